//! Releases that run models and do not train them.

use super::parts::EAGER;
use super::releases::GANTLINE;
use super::{AttentionKernel, Profile};

/// Engines with published runs.
pub const ENGINES: [Profile; 4] = [FASTER_TRANSFORMER, TENSORRT_LLM, GPT_FAST, LITGPT_GENERATE];

/// FasterTransformer 5: kernels that fuse biases, norms and residuals, launched from C++; prompts
/// write their scores to memory, with one kernel for mask and softmax.
const FASTER_TRANSFORMER: Profile = Profile {
    name: "fastertransformer",
    attention: AttentionKernel::FusedSoftmax,
    skips_masked: false,
    source: "github.com/NVIDIA/FasterTransformer docs/gpt_guide.md, src/fastertransformer/layers",
    ..GANTLINE
};

/// TensorRT-LLM: prompts and next tokens of requests share a pass, whose products are packed; its
/// attention kernels never write scores.
const TENSORRT_LLM: Profile = Profile {
    name: "tensorrt-llm",
    source: "github.com/NVIDIA/TensorRT-LLM docs/source/advanced/gpt-attention.md",
    ..GANTLINE
};

/// gpt-fast: kernels that `torch.compile` fuses, launched as graphs.
const GPT_FAST: Profile = Profile {
    name: "gpt-fast",
    attention: AttentionKernel::Flash2,
    source: "github.com/pytorch-labs/gpt-fast README.md, generate.py",
    ..GANTLINE
};

/// LitGPT's `generate`: eager modules of PyTorch, without graphs.
const LITGPT_GENERATE: Profile = Profile {
    name: "litgpt-generate",
    attention: AttentionKernel::Flash2,
    fused_norm: false,
    fused_activation: false,
    fused_rope: false,
    host: EAGER,
    source: "github.com/Lightning-AI/litgpt generate/base.py, litgpt/model.py",
    ..GANTLINE
};

/// The engine as tables of measurements name it; none for an unknown one.
pub fn of_engine(name: &str) -> Option<Profile> {
    let name = name.to_lowercase();
    let has = |part: &str| name.contains(part);
    if has("fastertransformer") {
        Some(FASTER_TRANSFORMER)
    } else if has("tensorrt") || has("trt-llm") || has("trtllm") {
        Some(TENSORRT_LLM)
    } else if has("gpt-fast") {
        Some(GPT_FAST)
    } else if has("litgpt (2023-10)") {
        Some(LITGPT_GENERATE)
    } else {
        None
    }
}
