//! Flags of Megatron-LM in a script.

use ir::Diagnostic;
use planner::configuration::{Configuration, Place, Recompute};

use super::said::Said;
use super::{Known, Layout, data_parallel_ranks};

/// What flags begin with of which no step's time or memory depends: what is learnt and how fast,
/// files, logs, and how processes find each other.
pub(super) const IDLE: &[&str] = &[
    "--adam-",
    "--ckpt-",
    "--clip-grad",
    "--data-cache-path",
    "--data-path",
    "--dataloader-type",
    "--distributed-backend",
    "--distributed-timeout-minutes",
    "--end-weight-decay",
    "--eval-",
    "--exit-",
    "--init-method-std",
    "--load",
    "--log-",
    "--lr",
    "--master",
    "--merge-file",
    "--min-lr",
    "--no-load-",
    "--no-save-",
    "--node",
    "--num-workers",
    "--override-opt_param-scheduler",
    "--rdzv",
    "--save",
    "--seed",
    "--split",
    "--start-weight-decay",
    "--tensorboard-",
    "--timing-log-",
    "--tokenizer-",
    "--train-iters",
    "--train-samples",
    "--use-checkpoint-",
    "--vocab-file",
    "--wandb-",
    "--weight-decay",
];

/// Part of a step's work that is computed again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Granularity {
    Selective,
    Full,
}

pub(super) fn layout(mut said: Said, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    let mut c = Configuration {
        tp: said.count("--tensor-model-parallel-size"),
        pp: said.count("--pipeline-model-parallel-size"),
        cp: said.count("--context-parallel-size"),
        ep: said.count("--expert-model-parallel-size"),
        microbatch: said.count("--micro-batch-size"),
        // Flags without a value: a word that follows belongs to something else.
        sequence_parallel: said.has("--sequence-parallel"),
        ..Configuration::default()
    };
    if let Some(layers) = said.size("--num-layers-per-virtual-pipeline-stage") {
        c.vpp = chunks(&mut said, known.layers / c.pp, layers);
    }
    if let Some(chunks) = said.size("--num-virtual-stages-per-pipeline-rank") {
        c.vpp = chunks;
    }
    let first = said.number("--decoder-first-pipeline-num-layers");
    let last = said.number("--decoder-last-pipeline-num-layers");
    if (first.is_some() || last.is_some()) && c.pp > 1 {
        c.stage_layers = stages(known.layers, c.pp, first, last);
    }
    if said.has("--use-distributed-optimizer") {
        c.zero.stage = 1;
    }
    let strategies = [("no_shard", 0), ("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3)];
    let strategy = said.choice("--data-parallel-sharding-strategy", &strategies);
    if said.has("--use-megatron-fsdp") {
        c.zero.stage = strategy.filter(|stage| *stage > 0).unwrap_or(c.zero.stage);
    }
    if said.has("--use-torch-fsdp2") {
        c.zero.stage = 3;
    }
    c.recompute = recompute(&mut said);
    if said.has("--optimizer-cpu-offload") {
        c.offload.optimizer = Place::Host;
    }
    // Says how, or follows from the rest.
    for name in ["--bf16", "--ckpt-format", "--use-precision-aware-optimizer"] {
        said.has(name);
    }
    let nodes = said.size("--nnodes").unwrap_or(1);
    let each = said.size("--nproc_per_node").or_else(|| said.size("--nproc-per-node"));
    let devices = known.devices.or_else(|| Some(each?.saturating_mul(nodes)));
    c.dp = data_parallel_ranks(&mut said, Known { devices, ..known }, &c);
    let batch = said.size("--global-batch-size");
    let seq = said.size("--seq-length");
    said.layout("megatron", c, [batch, seq])
}

/// Chunks of a stage of so many layers, of `layers` each.
fn chunks(said: &mut Said, stage: u32, layers: u32) -> u32 {
    if !stage.is_multiple_of(layers) {
        let name = "--num-layers-per-virtual-pipeline-stage";
        let headline = format!("`{name}` is {layers}, and a stage has {stage} layers");
        said.refuse(name, headline, "write a number that divides them");
    }
    (stage / layers).max(1)
}

fn recompute(said: &mut Said) -> Recompute {
    let count = said.size("--recompute-num-layers");
    let is_block = said.choice("--recompute-method", &[("uniform", false), ("block", true)]);
    let granularities = [("selective", Granularity::Selective), ("full", Granularity::Full)];
    let granularity = said.choice("--recompute-granularity", &granularities);
    let is_selective = said.has("--recompute-activations");
    match granularity {
        Some(Granularity::Selective) => Recompute::Attention,
        Some(Granularity::Full) if is_block == Some(true) => Recompute::Layers(count.unwrap_or(1)),
        Some(Granularity::Full) => {
            if let Some(count) = count.filter(|count| *count > 1) {
                said.notes.push(format!(
                    "`--recompute-num-layers` is {count}: layers are priced as kept one by one"
                ));
            }
            Recompute::Full
        }
        None if is_selective => Recompute::Attention,
        None => Recompute::None,
    }
}

/// Layers of stages where the first, the last or both are named: the others share what is left.
fn stages(layers: u32, pp: u32, first: Option<u32>, last: Option<u32>) -> Vec<u32> {
    let named = [first, last].into_iter().flatten();
    let others = pp - named.clone().count() as u32;
    let rest = layers.saturating_sub(named.fold(0, u32::saturating_add));
    let mut left = others;
    let mut given = 0;
    (0..pp)
        .map(|stage| match (stage, first, last) {
            (0, Some(first), _) => first,
            (stage, _, Some(last)) if stage + 1 == pp => last,
            _ => {
                let size = (rest - given).div_ceil(left.max(1));
                (given, left) = (given + size, left.saturating_sub(1));
                size
            }
        })
        .collect()
}
