//! The releases whose runs can be predicted.

use super::parts::{EAGER, NO_HOST, NOTHING, WHOLE};
use super::sharded::{
    AUTOMODEL, FMS_FSDP, HUGGING_FACE, KEMPNER, LLM_FOUNDRY, NANOGPT, TORCH_FSDP, TORCHTITAN_2025,
    TORCHTITAN_EAGER, TORCHTUNE, XLA,
};
use super::{
    AroundAttention, AttentionKernel, Exchange, ExpertPlacement, Host, Printed, ProductKernels,
    Profile, Selective, Stated, VocabularyPadding, Whole,
};

/// What an allocator that takes the smallest block that fits leaves unused of what comes and goes,
/// where blocks cannot grow. Derived: PyTorch's rules (blocks of 2 MiB, cut where more than 1 MiB
/// is left) replayed over two steps of layers like nanotron's, of 1 and 3 billion parameters, on
/// one to eight stages, of one to four samples: 3 to 19 %, on average this.
const BEST_FIT_SHARE: f64 = 0.1;

/// Our own programs: fused kernels, flash attention, no dispatcher.
pub const GANTLINE: Profile = Profile {
    name: "gantline",
    attention: AttentionKernel::FlashBest,
    skips_masked: true,
    around_attention: NOTHING,
    vocabulary: None,
    vocabulary_padding: VocabularyPadding::ToLoad,
    fused_norm: true,
    fused_activation: true,
    fused_residual: true,
    fused_rope: true,
    dropout: false,
    loss_bytes: [4.0, 4.0],
    loss_saved_bytes: 2.0,
    loss_working_bytes: 2.0,
    loss_cut_bytes: 2.0,
    whole_logits: false,
    host: NO_HOST,
    gradients: Exchange::Overlapped,
    weights: Exchange::Overlapped,
    backward_weights: Exchange::Overlapped,
    weight_bytes: 2.0,
    gradient_bytes: 4.0,
    exchange_bytes: 4.0,
    bucket_bytes: WHOLE,
    whole: Whole::Calls,
    pieces_per_layer: 1.0,
    copies_pieces: false,
    copies_gathered: false,
    accumulate_bytes: 8.0,
    fuses_accumulation: false,
    selective: Selective::Attention,
    product_per_expert: false,
    state_bytes: 12.0,
    copies_gradients: false,
    update_bytes: 30.0,
    tensor_hidden: 0.0,
    tensor_backward_hidden: 0.0,
    tensor_operations: 1.0,
    frees_late: false,
    experts: ExpertPlacement::BesideTensor,
    experts_again: true,
    experts_once: true,
    balances_stages: false,
    usual_recompute: "none",
    usual_zero: 0,
    recomputes_rows: true,
    updates_in_pieces: true,
    keeps_sent: false,
    usual_sequence_parallel: false,
    fabric: "infiniband",
    products: ProductKernels::Fastest,
    sends_hidden: true,
    scatter_gather: true,
    prints_first: false,
    prints: Printed::Device,
    reserve_bytes: 1.0e9,
    printed_share: 0.0,
    doubt: 0.0,
    stated: Stated::NOTHING,
    source: "this compiler",
};

/// Megatron-LM of 2020 (Shoeybi et al. 2019, README of v1.1).
const MEGATRON_2020: Profile = Profile {
    name: "megatron-2020",
    attention: AttentionKernel::Separate,
    skips_masked: false,
    around_attention: NOTHING,
    vocabulary: None,
    vocabulary_padding: VocabularyPadding::ToLoad,
    fused_norm: true,
    fused_activation: true,
    fused_residual: true,
    fused_rope: false,
    dropout: true,
    loss_bytes: [38.0, 14.0],
    loss_saved_bytes: 4.0,
    loss_working_bytes: 8.0,
    loss_cut_bytes: 0.0,
    whole_logits: false,
    host: EAGER,
    gradients: Exchange::AtEnd,
    weights: Exchange::AtEnd,
    backward_weights: Exchange::AtEnd,
    weight_bytes: 2.0,
    gradient_bytes: 2.0,
    exchange_bytes: 2.0,
    bucket_bytes: WHOLE,
    whole: Whole::Layers,
    pieces_per_layer: 1.0,
    copies_pieces: false,
    copies_gathered: false,
    accumulate_bytes: 6.0,
    fuses_accumulation: false,
    selective: Selective::Attention,
    product_per_expert: false,
    state_bytes: 12.0,
    // `_copy_model_grads_to_main_grads` of its optimizers.
    copies_gradients: true,
    update_bytes: 48.0,
    tensor_hidden: 0.0,
    tensor_backward_hidden: 0.0,
    tensor_operations: 1.0,
    frees_late: false,
    experts: ExpertPlacement::FromTensor,
    experts_again: false,
    experts_once: false,
    balances_stages: false,
    usual_recompute: "none",
    usual_zero: 0,
    recomputes_rows: false,
    updates_in_pieces: false,
    keeps_sent: true,
    usual_sequence_parallel: false,
    fabric: "infiniband",
    products: ProductKernels::Fastest,
    sends_hidden: false,
    scatter_gather: false,
    prints_first: false,
    prints: Printed::Device,
    reserve_bytes: 2.0e9,
    printed_share: 0.0,
    doubt: 0.0,
    stated: Stated::NOTHING,
    source: "github.com/NVIDIA/Megatron-LM v1.1: README.md, megatron/model/transformer.py",
};

/// Megatron-LM of Narayanan et al. 2021.
const MEGATRON_2021: Profile = Profile {
    name: "megatron-2021",
    attention: AttentionKernel::FusedSoftmax,
    scatter_gather: true,
    source: "Narayanan et al. 2021, sections 4.1 and 4.2; github.com/NVIDIA/Megatron-LM v2.x",
    ..MEGATRON_2020
};

/// Megatron-LM of Korthikanti et al. 2022.
pub const MEGATRON_2022: Profile = Profile {
    name: "megatron-2022",
    // Gradients of weights are added in the product itself, and all-reduces run beside it.
    accumulate_bytes: 4.0,
    fuses_accumulation: true,
    tensor_backward_hidden: 0.9,
    usual_sequence_parallel: true,
    // `deallocate_output_tensor` frees what was sent.
    keeps_sent: false,
    source: "Korthikanti et al. 2022, section 6; github.com/NVIDIA/Megatron-LM v3.0",
    ..MEGATRON_2021
};

/// Megatron-DeepSpeed as BigScience ran it.
const MEGATRON_DEEPSPEED: Profile = Profile {
    name: "megatron-deepspeed",
    fabric: "omni-path",
    products: ProductKernels::Fastest,
    // Launches waited for their kernels, without which jobs of 40 nodes hung (bigscience,
    // train/tr11-176B-ml/chronicles-prequel.md, "Hanging Issue").
    host: Host { is_blocking: true, ..EAGER },
    // Context 0.8 GB, six communicators of 0.6 GB (github.com/NVIDIA/nccl/issues/964), two buckets
    // of 5e8 elements.
    reserve_bytes: 6.4e9,
    // nvidia-smi shows what the allocator reserved. Guo et al. 2024 (GMLake): 15 % of it is of use
    // to nobody, on average over eight models.
    printed_share: 0.15 / 0.85,
    usual_zero: 1,
    source: "github.com/bigscience-workshop/Megatron-DeepSpeed",
    ..MEGATRON_2021
};

/// NeMo-Megatron launcher of 2022 and 2023.
const NEMO: Profile = Profile {
    name: "nemo",
    gradient_bytes: 2.0,
    exchange_bytes: 2.0,
    accumulate_bytes: 10.0,
    fuses_accumulation: false,
    gradients: Exchange::Overlapped,
    // conf/training/gpt3/*.yaml: activations_checkpoint_granularity: selective.
    usual_recompute: "attention",
    source: "github.com/NVIDIA/NeMo-Megatron-Launcher 22.x to 23.x",
    ..MEGATRON_2022
};

/// Megatron-Bridge, NeMo containers of 2025: Transformer Engine.
pub const MEGATRON_BRIDGE: Profile = Profile {
    name: "megatron-bridge",
    attention: AttentionKernel::FlashBest,
    skips_masked: true,
    fused_rope: true,
    dropout: false,
    loss_bytes: [8.0, 6.0],
    host: EAGER,
    gradients: Exchange::Overlapped,
    weights: Exchange::Overlapped,
    backward_weights: Exchange::Overlapped,
    // Recipes sum gradients in bf16 (`grad_reduce_in_fp32=False`).
    gradient_bytes: 2.0,
    exchange_bytes: 2.0,
    accumulate_bytes: 4.0,
    tensor_hidden: 0.7,
    tensor_operations: 1.0,
    usual_sequence_parallel: true,
    sends_hidden: true,
    // `GroupedLinear` of Transformer Engine: casts and products in a loop over experts.
    product_per_expert: true,
    // Its guide to dispatchers: DeepEP on Hopper and B200, whatever crosses nodes.
    experts_once: true,
    // Recipes shard the optimizer.
    usual_zero: 1,
    source: "github.com/NVIDIA-NeMo/Megatron-Bridge, performance guide and summary",
    ..MEGATRON_2022
};

/// NeMo containers of 2024: Megatron-Core up to 0.9, where ranks that share experts lie along the
/// data-parallel axis and all ranks of `tp` slice experts, unless a run says otherwise.
const NEMO_2024: Profile = Profile {
    name: "nemo-24",
    experts: ExpertPlacement::BesideTensor,
    source: "github.com/NVIDIA/Megatron-LM core_r0.8.0: megatron/core/parallel_state.py",
    ..MEGATRON_BRIDGE
};

/// The same with its container 25.09, whose routed runs drop tokens: their shapes stand, and they
/// are launched as graphs.
const MEGATRON_BRIDGE_2509: Profile = Profile {
    name: "megatron-bridge-25.09",
    product_per_expert: false,
    source: "github.com/NVIDIA-NeMo/Megatron-Bridge, performance summary, archive",
    ..MEGATRON_BRIDGE
};

/// Megatron-Core started without its flags for overlap (`--overlap-grad-reduce`,
/// `--overlap-param-gather`, `--tp-comm-overlap`), which are off by default.
const MEGATRON_CORE_SERIAL: Profile = Profile {
    name: "megatron-core-serial",
    gradients: Exchange::AtEnd,
    weights: Exchange::AtEnd,
    backward_weights: Exchange::AtEnd,
    tensor_hidden: 0.0,
    source: "github.com/NVIDIA/Megatron-LM core_r0.14.0: megatron/training/arguments.py",
    // What `--bf16` does where `--grad-reduce-in-bf16` is not given.
    ..MEGATRON_BRIDGE.summing_in_single()
};

/// DeepSpeed ZeRO-3 without model parallelism, 2021.
pub const DEEPSPEED: Profile = Profile {
    name: "deepspeed",
    // Each parameter alone: weights and vectors of four products and two norms.
    pieces_per_layer: 12.0,
    gradients: Exchange::Overlapped,
    weights: Exchange::Overlapped,
    backward_weights: Exchange::Overlapped,
    usual_zero: 3,
    source: "Narayanan et al. 2021, section 5.2; Rajbhandari et al. 2021",
    ..MEGATRON_2021
};

/// nanotron as the playbook ran it.
const NANOTRON: Profile = Profile {
    name: "nanotron",
    attention: AttentionKernel::Flash2,
    skips_masked: true,
    // `CausalSelfAttention`, `CoreAttention`: queries, keys and values are laid out by sequence,
    // keys and values joined, and laid out again: 4 bytes for 7 of 3 elements; six kernels sum up
    // masks; keys rotate apart from queries. Backward: joined twice, and made contiguous.
    around_attention: AroundAttention {
        forward_launches: 10.0,
        backward_launches: 4.0,
        forward_bytes: 9.3,
        backward_bytes: 10.7,
    },
    vocabulary: None,
    vocabulary_padding: VocabularyPadding::ToDivide,
    fused_norm: true,
    fused_activation: false,
    fused_residual: false,
    fused_rope: true,
    dropout: false,
    loss_bytes: [38.0, 14.0],
    // `_ShardedCrossEntropy` keeps shifted logits in f32, and its caller the logits.
    loss_saved_bytes: 4.0,
    loss_working_bytes: 4.0,
    loss_cut_bytes: 0.0,
    whole_logits: false,
    // Supposed, not published: while a message between nodes is awaited, its library polls on the
    // host, and two busy threads share a core evenly.
    host: Host { polling_share: 0.5, ..EAGER },
    gradients: Exchange::Overlapped,
    weights: Exchange::AtEnd,
    backward_weights: Exchange::AtEnd,
    weight_bytes: 2.0,
    // Sums in f32; and in bf16 what PyTorch's data parallelism exchanges, or what a sharded
    // optimizer gathers its weights in.
    gradient_bytes: 6.0,
    exchange_bytes: 4.0,
    // Chosen: the size that the collectives of its cluster were timed with.
    bucket_bytes: 256e6,
    whole: Whole::Layers,
    pieces_per_layer: 1.0,
    // `reduce_scatter_coalesced`, `all_gather_coalesced`.
    copies_pieces: true,
    copies_gathered: false,
    accumulate_bytes: 10.0,
    fuses_accumulation: false,
    selective: Selective::Attention,
    product_per_expert: false,
    state_bytes: 12.0,
    copies_gradients: false,
    update_bytes: 40.0,
    tensor_hidden: 0.0,
    tensor_backward_hidden: 0.0,
    tensor_operations: 4.0,
    // `_RowLinearAsyncCommunication`; what it gathers goes into buffers that stay (`MemoryBuffer`).
    frees_late: true,
    experts: ExpertPlacement::FromTensor,
    experts_again: false,
    experts_once: false,
    balances_stages: true,
    usual_recompute: "none",
    usual_zero: 0,
    recomputes_rows: false,
    updates_in_pieces: false,
    keeps_sent: true,
    usual_sequence_parallel: false,
    fabric: "efa",
    products: ProductKernels::Fastest,
    sends_hidden: false,
    scatter_gather: false,
    prints_first: true,
    // `log_throughput`: the table behind the playbook's figure has what tensors held too.
    prints: Printed::Reserved,
    reserve_bytes: 0.0,
    printed_share: BEST_FIT_SHARE,
    doubt: 0.0,
    stated: Stated::NOTHING,
    source: "github.com/huggingface/nanotron; The Ultra-Scale Playbook",
};

/// Megatron-LM with DeepSpeed as Bang et al. 2024 ran it.
const VTRAIN: Profile = Profile {
    name: "vtrain",
    // `vTrainConfig`: nothing sets the vocabulary of GPT-2, and nothing pads it.
    vocabulary: Some(50_257),
    vocabulary_padding: VocabularyPadding::ToDivide,
    // `Trainer`: cross entropy of half-precision logits. Read twice and written; the gradient of
    // the chosen ones written, read with the result, and written.
    loss_bytes: [6.0, 10.0],
    loss_saved_bytes: 2.0,
    loss_working_bytes: 4.0,
    source: "github.com/VIA-Research/vTrain: validation configurations",
    ..MEGATRON_2021
};

/// What an unknown framework is taken for: Megatron-LM with Transformer Engine, which most run now.
/// Chosen: the doubt. One release differs from the next of the same framework by a fifth.
pub const DEFAULT: Profile = Profile { doubt: 0.2, ..MEGATRON_BRIDGE };

/// All profiles, ours first.
pub static PROFILES: [Profile; 24] = [
    GANTLINE,
    MEGATRON_2020,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_DEEPSPEED,
    NEMO,
    MEGATRON_BRIDGE,
    MEGATRON_BRIDGE_2509,
    NEMO_2024,
    MEGATRON_CORE_SERIAL,
    LLM_FOUNDRY,
    TORCH_FSDP,
    FMS_FSDP,
    TORCHTITAN_EAGER,
    TORCHTITAN_2025,
    KEMPNER,
    TORCHTUNE,
    HUGGING_FACE,
    NANOGPT,
    AUTOMODEL,
    XLA,
    DEEPSPEED,
    NANOTRON,
    VTRAIN,
];

/// The profile of a framework as tables of measurements name it; none for an unknown one.
pub fn of_framework(name: &str) -> Option<Profile> {
    let lower = name.to_lowercase();
    let has = |part: &str| lower.contains(part);
    let is_any = |parts: &[&str]| parts.iter().any(|part| has(part));
    let found = if has("vtrain") {
        VTRAIN
    } else if has("nanotron") {
        NANOTRON
    } else if has("foundry") || has("composer") || has("mosaic") {
        LLM_FOUNDRY
    } else if has("bridge") {
        if has("25.09") { MEGATRON_BRIDGE_2509 } else { MEGATRON_BRIDGE }
    } else if has("automodel") {
        AUTOMODEL
    } else if has("nemo") {
        // Since 24.01 it runs Megatron-Core with Transformer Engine.
        let is_old = has("launcher") || has("nemo 22") || has("nemo 23") || has("nemo-megatron");
        match (is_old, has("nemo 24")) {
            (true, _) => NEMO,
            (false, true) => NEMO_2024,
            (false, false) => MEGATRON_BRIDGE,
        }
    } else if has("kempner") {
        KEMPNER
    } else if has("torchtune") {
        TORCHTUNE
    } else if has("nanogpt") {
        NANOGPT
    } else if is_any(&["hugging", "accelerate", "transformers", "axolotl", "llama-factory"]) {
        HUGGING_FACE
    } else if has("fms-fsdp") || has("fms_fsdp") {
        FMS_FSDP
    } else if has("titan") && has("eager") {
        TORCHTITAN_EAGER
    } else if has("titan") && is_any(&["2025", "2026"]) {
        TORCHTITAN_2025
    } else if is_any(&["titan", "fsdp", "olmo", "litgpt", "lightning"]) {
        TORCH_FSDP
    } else if is_any(&["maxtext", "jax", "xla", "levanter", "axlearn", "easylm"]) {
        XLA
    } else if has("neox") {
        // Megatron-LM's layers under DeepSpeed; launches do not wait.
        Profile { name: "neox", usual_zero: 1, ..MEGATRON_2021 }
    } else if has("megascale") && !has("megatron") {
        MEGATRON_BRIDGE
    } else if has("megatron-deepspeed") {
        MEGATRON_DEEPSPEED
    } else if has("zero-3") || has("deepspeed") {
        DEEPSPEED
    } else if has("korthikanti") {
        MEGATRON_2022
    } else if has("sc21") || has("ptd-p") {
        MEGATRON_2021
    } else if has("megatron-core") || has("mcore") || has("transformer engine") {
        if is_any(&["no overlap", "without overlap"]) {
            MEGATRON_CORE_SERIAL
        } else {
            MEGATRON_BRIDGE
        }
    } else if has("megatron-lm 2020") {
        MEGATRON_2020
    } else if has("megatron") {
        MEGATRON_2021
    } else {
        return None;
    };
    Some(found)
}

/// The release of a framework that runs on devices of 2022 and later: those before wrote scores to
/// memory, for which nobody bought such devices. Chosen: the doubt, since the table does not say
/// which release it is.
pub fn on_new_device(profile: Profile) -> Profile {
    let is_old =
        matches!(profile.attention, AttentionKernel::Separate | AttentionKernel::FusedSoftmax);
    let megatron = [MEGATRON_2020, MEGATRON_2021, MEGATRON_2022, NEMO];
    if !is_old {
        profile
    } else if megatron.iter().any(|known| known.name == profile.name) {
        Profile { doubt: 0.1, ..MEGATRON_BRIDGE }
    } else {
        Profile { attention: AttentionKernel::Flash2, skips_masked: true, doubt: 0.1, ..profile }
    }
}
