//! Releases that shard weights with PyTorch's own means, and those built on them.

use super::parts::{EAGER, NO_HOST, NOTHING, WHOLE};
use super::{
    AroundAttention, AttentionKernel, Exchange, ExpertPlacement, Host, Printed, ProductKernels,
    Profile, Selective, Stated, VocabularyPadding, Whole,
};

/// llm-foundry with Composer and FSDP, 2023.
pub(super) const LLM_FOUNDRY: Profile = Profile {
    name: "llm-foundry",
    attention: AttentionKernel::Flash1,
    skips_masked: true,
    // Gradients of queries, keys and values are joined.
    around_attention: AroundAttention { backward_launches: 1.0, backward_bytes: 4.0, ..NOTHING },
    vocabulary: None,
    vocabulary_padding: VocabularyPadding::ToDivide,
    fused_norm: true,
    fused_activation: true,
    fused_residual: false,
    fused_rope: false,
    // `MPTConfig`: all probabilities 0, for which PyTorch does nothing.
    dropout: false,
    // `fused_crossentropy` of flash-attn: reads half-precision logits and keeps them; their
    // gradient is written.
    loss_bytes: [2.0, 4.0],
    loss_saved_bytes: 2.0,
    loss_working_bytes: 2.0,
    loss_cut_bytes: 0.0,
    whole_logits: false,
    host: EAGER,
    gradients: Exchange::Overlapped,
    weights: Exchange::Overlapped,
    // Composer's `backward_prefetch` is `BACKWARD_POST`.
    backward_weights: Exchange::AtEnd,
    weight_bytes: 2.0,
    gradient_bytes: 4.0,
    exchange_bytes: 2.0,
    bucket_bytes: WHOLE,
    whole: Whole::Ends,
    pieces_per_layer: 1.0,
    copies_pieces: false,
    copies_gathered: false,
    accumulate_bytes: 0.0,
    fuses_accumulation: false,
    selective: Selective::Attention,
    product_per_expert: false,
    // The sharded master weights are the only ones that stay: 2 of their 4 bytes count as weights.
    state_bytes: 10.0,
    copies_gradients: false,
    update_bytes: 40.0,
    tensor_hidden: 0.0,
    tensor_backward_hidden: 0.0,
    tensor_operations: 1.0,
    frees_late: false,
    experts: ExpertPlacement::FromTensor,
    experts_again: false,
    experts_once: false,
    balances_stages: false,
    usual_recompute: "none",
    usual_zero: 3,
    recomputes_rows: false,
    updates_in_pieces: false,
    keeps_sent: false,
    usual_sequence_parallel: false,
    fabric: "infiniband",
    products: ProductKernels::Fastest,
    sends_hidden: false,
    scatter_gather: false,
    prints_first: false,
    prints: Printed::Reserved,
    reserve_bytes: 1.5e9,
    printed_share: 0.0,
    doubt: 0.0,
    stated: Stated::NOTHING,
    source: "github.com/mosaicml/llm-foundry scripts/train/benchmarking",
};

/// PyTorch's own sharding with compiled blocks: torchtitan, torchtune, OLMo.
pub const TORCH_FSDP: Profile = Profile {
    name: "torch-fsdp",
    backward_weights: Exchange::Overlapped,
    attention: AttentionKernel::Flash2,
    fused_residual: true,
    fused_rope: true,
    dropout: false,
    loss_bytes: [10.0, 8.0],
    // `cross_entropy` of `pred.float()`: the result of log-softmax is kept; its gradient, and that
    // of the logits. Cut over `tp`, an exponential too (`_nll_loss_and_log_softmax_backward`).
    loss_saved_bytes: 4.0,
    loss_working_bytes: 8.0,
    loss_cut_bytes: 4.0,
    // Compiled blocks are a few calls each.
    host: Host { operations: 2.0, ..EAGER },
    // `mixed_precision_reduce`; `foreach_all_gather_copy_out` and `foreach_reduce_scatter_copy_in`.
    exchange_bytes: 4.0,
    copies_gathered: true,
    // torchtitan's `selective_ac_option = "op"`, its usual one.
    selective: Selective::Operations,
    usual_recompute: "attention",
    source: "github.com/pytorch/torchtitan",
    ..LLM_FOUNDRY
};

/// fms-fsdp, on the first version of PyTorch's own sharding: views of what was gathered, and sums
/// in half precision.
pub(super) const FMS_FSDP: Profile = Profile {
    name: "fms-fsdp",
    exchange_bytes: 2.0,
    copies_gathered: false,
    source: "github.com/foundation-model-stack/fms-fsdp: fms_fsdp/policies/mixed_precision.py",
    ..TORCH_FSDP
};

/// torchtitan without `--training.compile`, as its presets are: modules one by one.
pub(super) const TORCHTITAN_EAGER: Profile = Profile {
    name: "torchtitan-eager",
    fused_norm: false,
    fused_activation: false,
    fused_rope: false,
    host: EAGER,
    source: "github.com/pytorch/torchtitan: train_configs, models/llama/model.py",
    ..TORCH_FSDP
};

/// torchtitan since 2025: `torchtitan/components/loss.py` compiles the loss too. Its logits stay in
/// half precision, and so is their gradient; nothing else is written.
pub const TORCHTITAN_2025: Profile = Profile {
    name: "torchtitan-2025",
    loss_bytes: [4.0, 4.0],
    loss_saved_bytes: 2.0,
    loss_working_bytes: 2.0,
    source: "github.com/pytorch/torchtitan, 2025 and later",
    ..TORCH_FSDP
};

/// KempnerForge: PyTorch's own sharding, weights and optimizer state in half precision.
pub(super) const KEMPNER: Profile = Profile {
    name: "kempnerforge",
    // `tensor_parallel.py`: the embedding is not cut, and the head's result is gathered. The loss
    // is that of half-precision logits, which stay: they and log-softmax, and gradients of both.
    whole_logits: true,
    loss_bytes: [4.0, 8.0],
    loss_saved_bytes: 4.0,
    loss_working_bytes: 4.0,
    loss_cut_bytes: 0.0,
    // `maybe_no_sync`: sums in f32 of whole gradients.
    whole: Whole::EndsAndSums,
    // `model.to(dtype=param_dtype)`, and AdamW's moments of the same type.
    state_bytes: 4.0,
    update_bytes: 16.0,
    usual_recompute: "full",
    prints: Printed::Allocated,
    source: "github.com/KempnerInstitute/KempnerForge: kempnerforge/distributed, metrics/memory.py",
    ..TORCH_FSDP
};

/// torchtune: weights, gradients and moments in half precision, a loss in pieces.
pub(super) const TORCHTUNE: Profile = Profile {
    name: "torchtune",
    // `dtype: bf16` of its recipes is that of the parameters.
    gradient_bytes: 2.0,
    exchange_bytes: 2.0,
    state_bytes: 4.0,
    update_bytes: 16.0,
    // `CEWithChunkedOutputLoss`: half-precision logits and their gradient; in f32 one of 8 pieces.
    loss_saved_bytes: 2.0,
    loss_working_bytes: 3.5,
    loss_cut_bytes: 0.0,
    // `enable_activation_checkpointing: True`.
    usual_recompute: "full",
    prints: Printed::Allocated,
    source: "github.com/pytorch/torchtune: recipes/configs, torchtune/modules/loss",
    ..TORCHTITAN_EAGER
};

/// Hugging Face Transformers with its own trainer or others around it.
pub(super) const HUGGING_FACE: Profile = Profile {
    name: "hugging-face",
    selective: Selective::Attention,
    // `ForCausalLMLoss`: half-precision logits are returned, and a copy of them in f32 is made.
    loss_saved_bytes: 6.0,
    loss_cut_bytes: 0.0,
    // Its guide to the anatomy of memory: 6 bytes of weights, 8 of moments, 4 of gradients.
    state_bytes: 12.0,
    // `accumulate` does not reduce before the last micro-batch.
    whole: Whole::EndsAndSums,
    usual_recompute: "none",
    usual_zero: 0,
    source: "github.com/huggingface/transformers: docs, loss/loss_utils.py; accelerate",
    ..TORCHTITAN_EAGER
};

/// nanoGPT: compiled whole, on copies that sum their gradients.
pub(super) const NANOGPT: Profile = Profile {
    name: "nanogpt",
    whole: Whole::Layers,
    selective: Selective::Attention,
    loss_saved_bytes: 2.0,
    loss_working_bytes: 2.0,
    loss_cut_bytes: 0.0,
    copies_gathered: false,
    usual_recompute: "none",
    usual_zero: 0,
    prints: Printed::Allocated,
    source: "github.com/karpathy/nanoGPT: train.py, model.py",
    ..TORCH_FSDP
};

/// NeMo AutoModel: PyTorch's own sharding around Transformer Engine.
pub(super) const AUTOMODEL: Profile = Profile {
    name: "automodel",
    attention: AttentionKernel::FlashBest,
    // DeepEP sends a token once to a node.
    experts_once: true,
    usual_recompute: "none",
    source: "github.com/NVIDIA-NeMo/Automodel, docs/performance-summary.md",
    ..TORCH_FSDP
};

/// MaxText and other programs of XLA on GPUs: compiled whole, attention of the vendor's library.
pub(super) const XLA: Profile = Profile {
    name: "xla",
    attention: AttentionKernel::FlashBest,
    host: NO_HOST,
    source: "github.com/AI-Hypercomputer/maxtext",
    ..TORCH_FSDP
};
