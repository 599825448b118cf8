//! The releases whose runs can be predicted.

use super::{AttentionKernel, Exchange, Host, Style};

/// An eager release of PyTorch 1.x under Python on a 2.25 GHz server core: 15 µs for an operation
/// (issue "AutoParallel kernel floor" gives 7 µs for a launch alone; an operation is a launch with
/// its dispatch, its autograd node and its share of the interpreter).
const EAGER_2021: Host = Host { forward_s: 15e-6, backward_s: 12e-6, operations: 2.0 };

/// An eager release of PyTorch 2.x on a server core of 2022 or later.
const EAGER_2023: Host = Host { forward_s: 8e-6, backward_s: 6e-6, operations: 2.0 };

/// Kernels that are launched as graphs or by compiled code.
const NO_HOST: Host = Host { forward_s: 0.0, backward_s: 0.0, operations: 1.0 };

/// Our own programs: fused kernels, flash attention, no dispatcher.
pub const OURS: Style = Style {
    name: "ours",
    attention: AttentionKernel::FlashBest,
    skips_masked: true,
    fused_norm: true,
    fused_activation: true,
    fused_residual: true,
    fused_rope: true,
    dropout: false,
    loss_bytes: [4.0, 4.0],
    loss_saved_bytes: 2.0,
    host: NO_HOST,
    gradients: Exchange::Overlapped,
    weights: Exchange::Overlapped,
    weight_bytes: 2.0,
    gradient_bytes: 4.0,
    exchange_bytes: 4.0,
    accumulate_bytes: 8.0,
    state_bytes: 12.0,
    update_bytes: 30.0,
    tensor_hidden: 0.0,
    sends_hidden: true,
    scatter_gather: true,
    reserve_bytes: 1.0e9,
    source: "this compiler",
};

/// Megatron-LM of 2020 (Shoeybi et al. 2019, README of v1.1).
const MEGATRON_2020: Style = Style {
    name: "megatron-2020",
    attention: AttentionKernel::Separate,
    skips_masked: false,
    fused_norm: true,
    fused_activation: true,
    fused_residual: true,
    fused_rope: false,
    dropout: true,
    loss_bytes: [30.0, 20.0],
    loss_saved_bytes: 4.0,
    host: EAGER_2021,
    gradients: Exchange::AtEnd,
    weights: Exchange::AtEnd,
    weight_bytes: 2.0,
    gradient_bytes: 2.0,
    exchange_bytes: 2.0,
    accumulate_bytes: 6.0,
    state_bytes: 16.0,
    update_bytes: 48.0,
    tensor_hidden: 0.0,
    sends_hidden: false,
    scatter_gather: false,
    reserve_bytes: 2.0e9,
    source: "github.com/NVIDIA/Megatron-LM v1.1: README.md, megatron/model/transformer.py",
};

/// Megatron-LM of Narayanan et al. 2021.
const MEGATRON_2021: Style = Style {
    name: "megatron-2021",
    attention: AttentionKernel::FusedSoftmax,
    scatter_gather: true,
    source: "Narayanan et al. 2021, sections 4.1 and 4.2; github.com/NVIDIA/Megatron-LM v2.x",
    ..MEGATRON_2020
};

/// Megatron-LM of Korthikanti et al. 2022.
const MEGATRON_2022: Style = Style {
    name: "megatron-2022",
    source: "Korthikanti et al. 2022, section 6; github.com/NVIDIA/Megatron-LM v3.0",
    ..MEGATRON_2021
};

/// Megatron-DeepSpeed as BigScience ran it.
const MEGATRON_DEEPSPEED: Style = Style {
    name: "megatron-deepspeed",
    source: "github.com/bigscience-workshop/Megatron-DeepSpeed",
    ..MEGATRON_2021
};

/// NeMo-Megatron launcher of 2022 and 2023.
const NEMO: Style = Style {
    name: "nemo",
    gradient_bytes: 4.0,
    exchange_bytes: 2.0,
    accumulate_bytes: 10.0,
    gradients: Exchange::Overlapped,
    source: "github.com/NVIDIA/NeMo-Megatron-Launcher 22.x to 23.x",
    ..MEGATRON_2022
};

/// Megatron-Bridge, NeMo containers of 2025: Transformer Engine.
const MEGATRON_BRIDGE: Style = Style {
    name: "megatron-bridge",
    attention: AttentionKernel::FlashBest,
    skips_masked: true,
    fused_rope: true,
    dropout: false,
    loss_bytes: [8.0, 6.0],
    host: EAGER_2023,
    gradients: Exchange::Overlapped,
    weights: Exchange::Overlapped,
    gradient_bytes: 4.0,
    exchange_bytes: 2.0,
    accumulate_bytes: 8.0,
    tensor_hidden: 0.7,
    sends_hidden: true,
    source: "github.com/NVIDIA-NeMo/Megatron-Bridge, performance guide and summary",
    ..MEGATRON_2022
};

/// llm-foundry with Composer and FSDP, 2023.
const LLM_FOUNDRY: Style = Style {
    name: "llm-foundry",
    attention: AttentionKernel::Flash1,
    skips_masked: true,
    fused_norm: true,
    fused_activation: false,
    fused_residual: false,
    fused_rope: false,
    dropout: false,
    loss_bytes: [14.0, 10.0],
    loss_saved_bytes: 4.0,
    host: EAGER_2023,
    gradients: Exchange::Overlapped,
    weights: Exchange::Overlapped,
    weight_bytes: 2.0,
    gradient_bytes: 4.0,
    exchange_bytes: 2.0,
    accumulate_bytes: 0.0,
    state_bytes: 12.0,
    update_bytes: 40.0,
    tensor_hidden: 0.0,
    sends_hidden: false,
    scatter_gather: false,
    reserve_bytes: 2.0e9,
    source: "github.com/mosaicml/llm-foundry scripts/train/benchmarking",
};

/// DeepSpeed ZeRO-3 without model parallelism, 2021.
const DEEPSPEED: Style = Style {
    name: "deepspeed",
    gradients: Exchange::Overlapped,
    weights: Exchange::Overlapped,
    source: "Narayanan et al. 2021, section 5.2; Rajbhandari et al. 2021",
    ..MEGATRON_2021
};

/// nanotron as the playbook ran it.
const NANOTRON: Style = Style {
    name: "nanotron",
    attention: AttentionKernel::Flash2,
    skips_masked: true,
    fused_norm: true,
    fused_activation: false,
    fused_residual: false,
    fused_rope: true,
    dropout: false,
    loss_bytes: [30.0, 20.0],
    loss_saved_bytes: 4.0,
    host: EAGER_2023,
    gradients: Exchange::Overlapped,
    weights: Exchange::AtEnd,
    weight_bytes: 2.0,
    gradient_bytes: 4.0,
    exchange_bytes: 4.0,
    accumulate_bytes: 10.0,
    state_bytes: 12.0,
    update_bytes: 40.0,
    tensor_hidden: 0.0,
    sends_hidden: false,
    scatter_gather: false,
    reserve_bytes: 0.0,
    source: "github.com/huggingface/nanotron; The Ultra-Scale Playbook",
};

/// Megatron-LM with DeepSpeed as Bang et al. 2024 ran it.
const VTRAIN: Style = Style {
    name: "vtrain",
    source: "github.com/VIA-Research/vTrain: validation configurations",
    ..MEGATRON_2021
};

/// All styles, ours first.
pub const STYLES: [Style; 11] = [
    OURS,
    MEGATRON_2020,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_DEEPSPEED,
    NEMO,
    MEGATRON_BRIDGE,
    LLM_FOUNDRY,
    DEEPSPEED,
    NANOTRON,
    VTRAIN,
];

/// The style of a framework as tables of measurements name it; none for an unknown one.
pub fn of_framework(name: &str) -> Option<Style> {
    let lower = name.to_lowercase();
    let has = |part: &str| lower.contains(part);
    let found = if has("vtrain") {
        VTRAIN
    } else if has("nanotron") {
        NANOTRON
    } else if has("foundry") || has("composer") || has("mosaic") {
        LLM_FOUNDRY
    } else if has("bridge") {
        MEGATRON_BRIDGE
    } else if has("nemo") {
        NEMO
    } else if has("megatron-deepspeed") {
        MEGATRON_DEEPSPEED
    } else if has("zero-3") || has("deepspeed") {
        DEEPSPEED
    } else if has("korthikanti") {
        MEGATRON_2022
    } else if has("sc21") || has("ptd-p") {
        MEGATRON_2021
    } else if has("megatron-core") || has("mcore") || has("transformer engine") {
        MEGATRON_BRIDGE
    } else if has("megatron-lm 2020") {
        MEGATRON_2020
    } else if has("megatron") {
        MEGATRON_2021
    } else {
        return None;
    };
    Some(found)
}
