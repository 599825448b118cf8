//! JSON of an execution of Calculon.

use ir::Diagnostic;
use planner::configuration::{Configuration, Place, Recompute};

use super::Layout;
use super::said::Said;

pub(super) fn layout(mut said: Said) -> Result<Layout, Vec<Diagnostic>> {
    let place = |is: bool| if is { Place::Host } else { Place::Device };
    let mut c = Configuration {
        tp: said.count("tensor_par"),
        pp: said.count("pipeline_par"),
        dp: said.count("data_par"),
        microbatch: said.count("microbatch_size"),
        vpp: said.count("pipeline_interleaving"),
        ..Configuration::default()
    };
    let sequence = [("ar", false), ("p2p_rs_ag", false), ("rs_ag", true)];
    c.sequence_parallel =
        said.choice("tensor_par_comm_type", &sequence).unwrap_or_default() && c.tp > 1;
    c.zero.stage = u8::from(said.is("optimizer_sharding"));
    let again =
        [("none", Recompute::None), ("attn_only", Recompute::Attention), ("full", Recompute::Full)];
    c.recompute = said.choice("activation_recompute", &again).unwrap_or_default();
    c.offload.parameters = place(said.is("weight_offload"));
    c.offload.activations = place(said.is("activations_offload"));
    c.offload.optimizer = place(said.is("optimizer_offload"));
    let procs = said.number("num_procs");
    if let Some(procs) = procs.filter(|procs| u64::from(*procs) != c.ranks()) {
        let headline = format!("`num_procs` is {procs}, and tp · pp · dp are {}", c.ranks());
        said.refuse("num_procs", headline, format!("write {}", c.ranks()));
    }
    // Follows from the rest.
    for name in ["seq_par_ag_redo", "training", "tensor_par_net", "data_par_net"] {
        said.has(name);
    }
    said.has("pipeline_par_net");
    let batch = said.size("batch_size");
    said.layout("calculon", c, [batch, None])
}
