//! TOML of torchtitan.

use ir::Diagnostic;
use planner::configuration::{Configuration, Recompute, Schedule, Zero};
use planner::estimate::profile::ExpertPlacement;
use planner::search::interop::launch::FLAVORS;
use planner::tools::torchtitan_chunks;

use super::megatron::leave_out_usual;
use super::said::Said;
use super::{DecoderSizes, Known, Layout, data_parallel_ranks};

/// What names begin with of which no step's time or memory depends.
pub(super) const IDLE: &[&str] = &[
    "checkpoint.",
    "comm.",
    "job.",
    "lr_scheduler.",
    "metrics.",
    "model.tokenizer_path",
    "model.hf_assets_path",
    "optimizer.eps",
    "optimizer.lr",
    "profiling.",
    "training.dataset",
    "training.deterministic",
    "training.max_norm",
    "training.seed",
    "training.steps",
    "training.warmup_steps",
    "validation.",
];

/// An order of micro-batches, whether its stages have several chunks, and whether it is priced as
/// something else.
#[derive(Clone, Copy)]
struct Order {
    schedule: Schedule,
    is_interleaved: bool,
    is_near: bool,
}

const fn order(schedule: Schedule, is_interleaved: bool, is_near: bool) -> Order {
    Order { schedule, is_interleaved, is_near }
}

/// The orders of torch.distributed.pipelining that can be priced.
const ORDERS: [(&str, Order); 5] = [
    ("1F1B", order(Schedule::OneForwardOneBackward, false, false)),
    ("GPipe", order(Schedule::GPipe, false, false)),
    ("Interleaved1F1B", order(Schedule::OneForwardOneBackward, true, false)),
    ("InterleavedZeroBubble", order(Schedule::ZeroBubbleH1, false, true)),
    ("ZBVZeroBubble", order(Schedule::ZeroBubbleH1, false, true)),
];

pub(super) fn layout(mut said: Said, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    let mut c = Configuration {
        tp: said.count("parallelism.tensor_parallel_degree"),
        cp: said.count("parallelism.context_parallel_degree"),
        pp: said.count("parallelism.pipeline_parallel_degree"),
        ep: said.count("parallelism.expert_parallel_degree"),
        ..Configuration::default()
    };
    c.sequence_parallel = c.tp > 1;
    let slices = said.size("parallelism.expert_tensor_parallel_degree").unwrap_or(1);
    if c.ep > 1 && slices != ExpertPlacement::FromTensor.slices(&c) {
        c.etp = slices;
    }
    let copies = said.count("parallelism.data_parallel_replicate_degree");
    let name = "parallelism.data_parallel_shard_degree";
    let is_rest = said.text(name).is_none_or(|text| text == "-1");
    let shard =
        if is_rest { data_parallel_ranks(&mut said, known, &c) / copies } else { said.count(name) };
    c.dp = copies.saturating_mul(shard.max(1));
    if shard > 1 || c.cp > 1 {
        let is_all = copies == 1;
        let ranks = shard.max(1).saturating_mul(c.cp);
        c.zero = Zero { stage: 3, shard: if is_all { 0 } else { ranks } };
    }
    let local = said.size("training.local_batch_size");
    let local = local.or_else(|| said.size("training.batch_size")).unwrap_or(1);
    let batch = match said.text("training.global_batch_size").as_deref() {
        None | Some("-1") => Some(local.saturating_mul(c.dp)),
        Some(_) => said.size("training.global_batch_size"),
    };
    let seq = said.size("training.seq_len");
    let at_once = u64::from(local) * u64::from(c.dp);
    if let Some(batch) = batch.filter(|batch| !u64::from(*batch).is_multiple_of(at_once)) {
        let name = "training.global_batch_size";
        let headline =
            format!("`{name}` is {batch}, no multiple of {local} samples × {} ranks", c.dp);
        said.refuse(name, headline, format!("write a multiple of {at_once}"));
    }
    check_flavor(&mut said, known.decoder);
    c.microbatch = local;
    pipeline(&mut said, known, &mut c);
    let modes =
        [("none", Recompute::None), ("selective", Recompute::Attention), ("full", Recompute::Full)];
    c.recompute = said.choice("activation_checkpoint.mode", &modes).unwrap_or_default();
    if let Some(option) = said.text("activation_checkpoint.selective_ac_option")
        && option != "op"
        && c.recompute == Recompute::Attention
    {
        said.notes.push(format!("`selective_ac_option` is `{option}`, and is priced as `op`"));
    }
    let executor = executor(&mut said);
    let layout = said.layout("torchtitan", c, [batch, seq])?;
    Ok(Layout { executor, ..layout })
}

/// The execution profile: compiled with the loss, compiled without it, or not compiled. Before
/// 2025, `training.compile` compiled the model alone.
fn executor(said: &mut Said) -> Option<&'static str> {
    let names = ["compile.enable", "training.compile"];
    let [now, before] = names.map(|name| said.text(name).map(|_| said.is(name)));
    let components = said.text("compile.components");
    match (now, before) {
        (Some(true), _) if components.is_none_or(|all| all.contains("loss")) => {
            Some("torchtitan 2025")
        }
        (Some(true), _) | (None, Some(true)) => Some("torchtitan"),
        (Some(false), _) | (None, Some(false)) => Some("torchtitan eager"),
        (None, None) => {
            let note = "`compile.enable` is not said: priced as if the model were compiled";
            said.notes.push(note.to_owned());
            Some("torchtitan")
        }
    }
}

/// Refuses a file for another model than the one that is asked about.
fn check_flavor(said: &mut Said, decoder: Option<DecoderSizes>) {
    let names = ["model.name", "model.flavor"].map(|name| said.text(name));
    let ([Some(name), Some(flavor)], Some(own)) = (names, decoder) else { return };
    let known = FLAVORS.iter().find(|known| (known.0, known.1) == (name.as_str(), &flavor));
    let Some((.., sizes)) = known else {
        let note = format!("the sizes of {name} {flavor} are not known: it is priced as MODEL");
        return said.notes.push(note);
    };
    let same = [own.layers, own.hidden, own.heads, own.kv_heads, own.ffn, own.experts];
    if *sizes != same {
        let headline = format!("the file is for {name} {flavor}, and MODEL has other sizes");
        said.refuse("model.flavor", headline, "name the model that the file trains");
    }
}

/// Micro-batches, their order, and the layers of a chunk.
fn pipeline(said: &mut Said, known: Known, c: &mut Configuration) {
    let chunk = said.size("parallelism.pipeline_parallel_layers_per_stage");
    // What the embedding and the loss count for, in layers.
    let mut end = |name: &str| said.number(&format!("parallelism.pipeline_parallel_{name}"));
    let first = end("first_stage_less_layers").unwrap_or(1);
    let last = end("last_stage_less_layers").unwrap_or(1);
    let microbatch = said.size("parallelism.pipeline_parallel_microbatch_size");
    let name = "parallelism.pipeline_parallel_schedule";
    // It compares names without their case.
    let order = said.choice_as(name, &ORDERS, str::eq_ignore_ascii_case);
    let written = said.text(name).unwrap_or_default();
    if c.pp == 1 {
        return;
    }
    c.microbatch = microbatch.unwrap_or(1);
    let Some(order) = order else { return };
    c.schedule = order.schedule;
    if order.is_near {
        let near = c.schedule.name();
        said.notes.push(format!("`{written}` is priced as {near}, whose stages have one chunk"));
    }
    if order.is_interleaved {
        let all = known.layers.saturating_add(first).saturating_add(last);
        c.vpp = chunk.map_or(2, |chunk| all.div_ceil(chunk) / c.pp).max(1);
    }
    let count = c.pp.saturating_mul(c.vpp);
    let chunks = torchtitan_chunks(known.layers, count, [first, last]);
    if let Some(chunks) = chunks.filter(|_| !order.is_near) {
        let stage = |stage: usize| chunks.iter().skip(stage).step_by(c.pp as usize).sum();
        c.stage_layers = (0..c.pp as usize).map(stage).collect();
        leave_out_usual(c, known.layers);
        if c.chunks(known.layers) != chunks {
            said.notes.push(format!("chunks of {chunks:?} layers are priced as {c} has them"));
        }
    }
}
