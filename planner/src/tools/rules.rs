//! What each tool cannot express, as rules over configurations.
//!
//! A rule that refuses what a tool can do hides plans, and one that is missing finds plans that do
//! not start: each says where its fact is from. Megatron-LM: github.com/NVIDIA/Megatron-LM at
//! 000c4ac24f61159c138b0975def722c65245983c, `validate_args` unless another place is named.
//! DeepSpeed: release 0.19.8 on PyPI. torchtitan: release 0.2.1 on PyPI. Calculon:
//! github.com/calculon-ai/calculon, `calculon/llm/llm.py`.

use super::releases::{CORE_0_13, DEEPSPEED_0_16};
use super::torchtitan::{named_shard, shares_weights, torchtitan_ends};
use super::{Case, Form, Reads, Rule};
use crate::configuration::{Configuration, Offload, Place, Recompute, Schedule, USUAL_ORDER};
use crate::estimate::profile::ExpertPlacement;
use ir::Axis;

/// Megatron-LM's other order of ranks, in which stages lie inside of copies.
const STAGES_INSIDE: [Axis; 4] = [Axis::Tp, Axis::Cp, Axis::Pp, Axis::Dp];

/// Whether ranks lie as Megatron-LM's `--use-tp-pp-dp-mapping` places them.
pub fn stages_inside(c: &Configuration) -> bool {
    c.order == STAGES_INSIDE
}

const fn rule(what: &'static str, reads: Reads, breaks: fn(&Case<'_>) -> bool) -> Rule {
    Rule { what, reads, breaks }
}

const PLACEMENT: Rule =
    rule("placement of the axes on ranks", Reads::Order, |of| of.c.order != USUAL_ORDER);
const GPIPE: Rule = rule("schedule gpipe", Reads::Schedule, |of| runs(of, Schedule::GPipe));
const ZB_H1: Rule = rule("schedule zb-h1", Reads::Schedule, |of| runs(of, Schedule::ZeroBubbleH1));
const ZB_H2: Rule = rule("schedule zb-h2", Reads::Schedule, |of| runs(of, Schedule::ZeroBubbleH2));
const EVEN: Rule = rule("stages that do not divide the layers", Reads::Schedule, |of| {
    of.c.stage_layers.is_empty() && !divides_layers(of)
});
const UNEVEN: Rule = rule("uneven stages", Reads::Stages, |of| !of.c.stage_layers.is_empty());
const PART_OF_RANKS: Rule =
    rule("ZeRO shards over a part of the ranks", Reads::Zero, |of| of.c.zero.shard != 0);
const SOME_LAYERS: Rule = rule("recomputation of some layers", Reads::Recompute, |of| {
    matches!(of.c.recompute, Recompute::Layers(_))
});
const DISK: Rule = rule("offload to a disk", Reads::Offload, |of| {
    let Offload { optimizer, parameters, activations } = of.c.offload;
    [optimizer, parameters, activations].contains(&Place::Disk)
});
const KEY_HEADS: Rule =
    rule("tensor-parallel ranks that do not divide the heads of keys", Reads::Mesh, |of| {
        of.sizes.kv_heads > 0 && !of.sizes.kv_heads.is_multiple_of(of.c.tp)
    });

fn runs(of: &Case<'_>, schedule: Schedule) -> bool {
    of.c.pp > 1 && of.c.schedule == schedule
}

fn divides_layers(of: &Case<'_>) -> bool {
    of.sizes.layers.is_multiple_of(of.c.pp.saturating_mul(of.c.vpp))
}

fn is_moved(place: Place) -> bool {
    place != Place::Device
}

/// Whether a release of Megatron-LM is older than Megatron-Core 0.13.
fn before_core(of: &Case<'_>) -> bool {
    of.release < CORE_0_13
}

pub(super) const MEGATRON: &[Rule] = &[
    // `TransformerConfig.__post_init__`: "num_query_groups must be a multiple of tensor model
    // parallel size".
    KEY_HEADS,
    // v3.0 has no `--context-parallel-size`, `--expert-model-parallel-size`, and none of the flags
    // that are refused for it below: megatron/arguments.py of that release.
    rule("context parallelism before Megatron-Core", Reads::Mesh, |of| {
        before_core(of) && of.c.cp > 1
    }),
    rule("expert parallelism before Megatron-Core", Reads::Experts, |of| {
        before_core(of) && of.c.ep > 1
    }),
    // `--expert-tensor-parallel-size` times `--expert-model-parallel-size` ranks hold the experts.
    rule("expert-parallel ranks beside tensor-parallel ranks", Reads::Experts, |of| {
        of.c.etp == 0 && !of.c.ep.is_multiple_of(of.c.tp) && !of.c.tp.is_multiple_of(of.c.ep)
    }),
    rule("slices of experts before Megatron-Core", Reads::Experts, |of| {
        before_core(of) && of.c.etp > 0
    }),
    // megatron/core/transformer/moe/moe_layer.py, `forward`: refused in training.
    rule(
        "experts over tensor-parallel ranks without sequence parallelism",
        Reads::Sequence,
        |of| of.sizes.experts > 0 && of.c.tp > 1 && !of.c.sequence_parallel,
    ),
    // megatron/core/tensor_parallel/mappings.py: "First dimension of the tensor should be
    // divisible by tensor parallel size".
    rule("sequences that tensor-parallel ranks do not divide", Reads::Sequence, |of| {
        let ranks = of.c.tp.saturating_mul(of.c.cp);
        of.sizes.seq > 0 && of.c.sequence_parallel && !of.sizes.seq.is_multiple_of(ranks)
    }),
    // `initialize_model_parallel`: `tp-cp-ep-dp-pp`, or `tp-cp-ep-pp-dp`.
    rule("placement of the axes on ranks", Reads::Order, |of| {
        of.c.order != USUAL_ORDER && (before_core(of) || !stages_inside(of.c))
    }),
    // megatron/core/pipeline_parallel/schedules.py has 1F1B, with interleaving and without.
    GPIPE,
    ZB_H1,
    ZB_H2,
    // v3.0: "When interleaved schedule is used, pipeline-model-parallel size should be greater
    // than 2"; later with `--no-overlap-p2p-communication` alone.
    rule("two interleaved stages before Megatron-Core", Reads::Schedule, |of| {
        before_core(of) && of.c.vpp > 1 && of.c.pp == 2
    }),
    // "number of layers of the model must be divisible pipeline model parallel size";
    // `--pipeline-model-parallel-layout` came with Megatron-Core 0.13.
    rule("stages that do not divide the layers, before Megatron-Core", Reads::Schedule, |of| {
        before_core(of) && of.c.stage_layers.is_empty() && !divides_layers(of)
    }),
    rule("shards of gradients and weights before Megatron-Core", Reads::Zero, |of| {
        before_core(of) && (of.c.zero.stage > 1 || of.c.zero.shard != 0)
    }),
    // `--num-distributed-optimizer-instances` divides the data-parallel ranks.
    rule("ZeRO shards over a part of the ranks", Reads::Zero, |of| {
        let copies = of.c.dp.saturating_mul(of.c.cp);
        let divides = of.c.zero.stage > 0 && of.c.zero.shard > 0;
        of.c.zero.shard != 0 && !(divides && copies.is_multiple_of(of.c.zero.shard))
    }),
    // Megatron-Bridge, docs/training/megatron-fsdp.md: "`use_tp_pp_dp_mapping` is not supported
    // with Megatron FSDP".
    rule("sharded gradients or weights with stages inside of copies", Reads::Zero, |of| {
        of.c.zero.stage > 1 && of.c.order != USUAL_ORDER
    }),
    // `--use-precision-aware-optimizer`, without which nothing is moved, is of the distributed
    // optimizer alone.
    rule("offload of an optimizer that is not sharded", Reads::Offload, |of| {
        is_moved(of.c.offload.optimizer) && of.c.zero.stage == 0
    }),
    rule("offload of the optimizer before Megatron-Core", Reads::Offload, |of| {
        before_core(of) && is_moved(of.c.offload.optimizer)
    }),
    rule("optimizer offload to a disk", Reads::Offload, |of| of.c.offload.optimizer == Place::Disk),
    rule("parameter offload", Reads::Offload, |of| is_moved(of.c.offload.parameters)),
    rule("activation offload", Reads::Offload, |of| is_moved(of.c.offload.activations)),
    // `--recompute-num-layers` counts the layers of a chunk.
    rule(
        "recomputation of other numbers of layers of chunks",
        Reads::Recompute,
        |of| matches!(of.c.recompute, Recompute::Layers(count) if !count.is_multiple_of(of.c.vpp)),
    ),
    rule("uneven stages before Megatron-Core", Reads::Stages, |of| {
        before_core(of) && !of.c.stage_layers.is_empty()
    }),
];

pub(super) const DEEPSPEED: &[Rule] = &[
    // deepspeed/runtime/pipe/module.py: `PipelineModule(num_stages=…)`.
    rule("pipeline stages, which are set where the model is built", Reads::Mesh, |of| of.c.pp > 1),
    // `tensor_parallel.autotp_size` trains since 0.16; sequences are split since 0.10 (Ulysses).
    rule("tensor parallelism before DeepSpeed 0.16", Reads::Mesh, |of| {
        of.release < DEEPSPEED_0_16 && of.c.tp > 1
    }),
    rule("split sequences before DeepSpeed 0.16", Reads::Mesh, |of| {
        of.release < DEEPSPEED_0_16 && of.c.cp > 1
    }),
    // deepspeed/runtime/engine.py: "AutoTP: autotp_size exceeds the model's key-value head count".
    KEY_HEADS,
    // deepspeed/moe/layer.py: `MoE(ep_size=…)`.
    rule("expert-parallel ranks, which are set where the model is built", Reads::Experts, |of| {
        of.c.ep > 1 || slices_otherwise(of)
    }),
    rule("sequence parallelism of tensor-parallel ranks", Reads::Sequence, |of| {
        of.c.sequence_parallel
    }),
    PLACEMENT,
    rule("interleaved stages", Reads::Schedule, |of| of.c.vpp > 1),
    // Its second partition (`zero_hpz_partition_size`) is of a copy of the weights alone.
    PART_OF_RANKS,
    // deepspeed/runtime/zero/offload_config.py: the optimizer of ZeRO alone is moved, weights of
    // stage 3 alone, and to a disk of stage 3 alone.
    rule("offload of an optimizer that is not sharded", Reads::Offload, |of| {
        is_moved(of.c.offload.optimizer) && of.c.zero.stage == 0
    }),
    rule("offload of weights that are not sharded", Reads::Offload, |of| {
        is_moved(of.c.offload.parameters) && of.c.zero.stage < 3
    }),
    rule("offload to a disk without ZeRO-3", Reads::Offload, |of| {
        of.c.offload.optimizer == Place::Disk && of.c.zero.stage < 3
    }),
    // deepspeed/runtime/activation_checkpointing/checkpointing.py moves what a model hands to its
    // own `checkpoint`.
    rule("activation offload, which is set where the model is built", Reads::Offload, |of| {
        is_moved(of.c.offload.activations)
    }),
    // transformers, `TrainingArguments.gradient_checkpointing`: every layer.
    rule("recomputation, which is set where the model is built", Reads::Recompute, |of| {
        let is_launched = of.form == Form::Launch && of.c.recompute == Recompute::Full;
        of.c.recompute != Recompute::None && !is_launched
    }),
];

pub(super) const TORCHTITAN: &[Rule] = &[
    // torchtitan/models/llama3/infra/parallelize.py: `wk` and `wv` are cut by heads.
    KEY_HEADS,
    // torchtitan/distributed/parallel_dims.py: "Currently we only support ETP=TP or ETP=1".
    rule("experts that are cut over a part of the tensor-parallel ranks", Reads::Experts, |of| {
        let slices = ExpertPlacement::FromTensor.slices(of.c);
        // Without expert parallelism, tensor-parallel ranks share them.
        slices != of.c.tp && (of.c.ep == 1 || slices != 1)
    }),
    // `apply_tp` lays norms and residuals out as `Shard(1)`.
    rule("tensor parallelism without sequence parallelism", Reads::Sequence, |of| {
        of.c.tp > 1 && !of.c.sequence_parallel
    }),
    // torchtitan/distributed/parallel_dims.py, `seq_len_divisor`.
    rule("sequences that tensor-parallel ranks do not divide", Reads::Sequence, |of| {
        let pieces = of.c.tp.saturating_mul(of.c.cp).saturating_mul(2);
        of.sizes.seq > 0 && !of.sizes.seq.is_multiple_of(pieces)
    }),
    PLACEMENT,
    // Zero-bubble schedules of torch.distributed.pipelining take two chunks of a stage at least.
    ZB_H1,
    ZB_H2,
    // torchtitan/distributed/pipeline_parallel.py, `generate_llm_fqn_per_model_part`.
    rule("stages that torchtitan does not make of these layers", Reads::Schedule, |of| {
        of.c.stage_layers.is_empty() && !makes_stages(of)
    }),
    // `fully_shard` shards optimizer state with gradients and weights, or not at all.
    rule("shards of optimizer state or gradients alone", Reads::Zero, |of| {
        (1..3).contains(&of.c.zero.stage)
    }),
    // `fsdp_enabled`: context-parallel ranks share shards.
    rule("whole weights on context-parallel ranks", Reads::Zero, |of| {
        of.c.zero.stage == 0 && of.c.cp > 1
    }),
    rule("ZeRO over one rank", Reads::Zero, |of| {
        of.c.zero.stage == 3 && of.c.dp == 1 && of.c.cp == 1
    }),
    // torchtitan/models/llama3/infra/parallelize.py: "DDP has not supported > 1D parallelism".
    rule("whole weights beside other parallelism", Reads::Zero, |of| {
        of.c.zero.stage == 0 && of.c.dp > 1 && (of.c.tp > 1 || of.c.pp > 1)
    }),
    rule("ZeRO shards over this part of the ranks", Reads::Zero, |of| {
        of.c.zero.shard != 0 && named_shard(of.c).is_none()
    }),
    rule("expert-parallel ranks that share no weights", Reads::Zero, |of| {
        let shard = if of.c.zero.stage == 0 { 1 } else { named_shard(of.c).unwrap_or(of.c.dp) };
        !shares_weights(of.c, shard)
    }),
    rule("offload", Reads::Offload, |of| of.c.offload != Offload::default()),
    SOME_LAYERS,
    rule("uneven stages", Reads::Stages, |of| !of.c.stage_layers.is_empty() && !makes_stages(of)),
];

/// Whether not all tensor-parallel ranks slice experts.
fn slices_otherwise(of: &Case<'_>) -> bool {
    ![0, of.c.tp].contains(&of.c.etp)
}

/// Whether torchtitan's stages have the layers that a configuration says.
fn makes_stages(of: &Case<'_>) -> bool {
    of.c.pp == 1 || of.sizes.layers == 0 || torchtitan_ends(of.c, of.sizes.layers).is_some()
}

pub(super) const CALCULON: &[Rule] = &[
    rule("context parallelism", Reads::Mesh, |of| of.c.cp > 1),
    rule("expert parallelism", Reads::Experts, |of| of.c.ep > 1 || slices_otherwise(of)),
    PLACEMENT,
    GPIPE,
    ZB_H1,
    ZB_H2,
    EVEN,
    rule("shards of gradients and weights", Reads::Zero, |of| of.c.zero.stage > 1),
    rule("ZeRO over one rank", Reads::Zero, |of| of.c.zero.stage == 1 && of.c.dp == 1),
    PART_OF_RANKS,
    DISK,
    SOME_LAYERS,
    UNEVEN,
];
