//! The words that tables use for devices, precisions and recomputation.

use ir::import::nearest;

use crate::cluster::names;
use crate::configuration::{Recompute, Zero};
use crate::estimate::rates::Arithmetic;

/// Letters and digits of a name, in capitals.
pub(super) fn plain(name: &str) -> String {
    let kept = name.chars().filter(char::is_ascii_alphanumeric);
    kept.map(|letter| letter.to_ascii_uppercase()).collect()
}

/// The preset of a device.
///
/// # Errors
/// In words, for a device that no preset describes.
pub(super) fn preset(gpu: &str) -> Result<&'static str, String> {
    names::preset(gpu).ok_or_else(|| {
        let near = nearest(&plain(gpu), names::DEVICES.iter().map(|(words, _, _)| *words));
        let near = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
        format!("`gpu` is `{gpu}`, which no preset describes{near}")
    })
}

/// Whether a device is of 2022 or later.
pub(super) fn is_new(preset: &str) -> bool {
    names::year(preset).is_none_or(|year| year >= 2022)
}

/// The memory that a device's name ends with, in gigabytes: 16 of `V100-16GB`.
pub(super) fn gigabytes(gpu: &str) -> Option<f64> {
    let words = gpu.split(|letter: char| !letter.is_ascii_alphanumeric());
    let mut numbers = words.filter_map(|word| {
        let upper = word.to_ascii_uppercase();
        upper.strip_suffix("GB").or(upper.strip_suffix('G'))?.parse::<f64>().ok()
    });
    numbers.next_back().filter(|size| (4.0..2048.0).contains(size))
}

/// The arithmetic of a precision; none where the text is blank.
///
/// # Errors
/// In words, for one that no device file has.
pub(super) fn arithmetic(text: &str) -> Result<Option<Arithmetic>, String> {
    let lower = text.trim().to_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
    if lower.is_empty() {
        Ok(None)
    } else if has(&["fp4", "f4"]) {
        Ok(Some(Arithmetic::F4))
    } else if has(&["fp8", "f8", "float8", "e4m3"]) {
        Ok(Some(Arithmetic::F8))
    } else if has(&["bf16", "fp16", "f16", "float16", "16-mixed", "half", "amp", "mixed"]) {
        Ok(Some(Arithmetic::Half))
    } else if has(&["tf32"]) {
        Ok(Some(Arithmetic::Tf32))
    } else if has(&["fp32", "f32", "float32", "32-true"]) {
        Ok(Some(Arithmetic::F32))
    } else {
        Err(format!("`precision` is `{text}`, which no device file has"))
    }
}

/// What is recomputed; none where the text is blank or says something else.
pub(super) fn recompute(text: &str) -> Option<Recompute> {
    match text.trim().to_lowercase().as_str() {
        "none" | "no" | "off" | "false" | "0" => Some(Recompute::None),
        "selective" | "attention" | "core_attn" => Some(Recompute::Attention),
        "full" | "yes" | "on" | "true" | "1" | "uniform" | "block" | "minimal" => {
            Some(Recompute::Full)
        }
        _ => None,
    }
}

/// A sharding of optimizer state, gradients and weights: its stage, and behind a `/` the ranks that
/// a shard lies over, as names of plans say it (`1/8`). None where the text is blank.
pub(super) fn zero(text: &str) -> Option<Result<Zero, String>> {
    let lower = text.trim().to_lowercase();
    if lower.is_empty() {
        return None;
    }
    if lower.contains("fsdp") || lower.contains("hsdp") {
        return Some(Ok(Zero { stage: 3, shard: 0 }));
    }
    let (stage, ranks) = lower.split_once('/').unwrap_or((&lower, "0"));
    let stage = stage.parse::<f64>().ok().filter(|stage| [0.0, 1.0, 2.0, 3.0].contains(stage));
    Some(match (stage, ranks.parse()) {
        (Some(stage), Ok(shard)) => Ok(Zero { stage: stage as u8, shard }),
        _ => Err(format!("`zero_stage` is `{text}`, not 0 to 3, or a stage over ranks as `1/8`")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_known_by_many_names() {
        for (name, expected) in [
            ("A100-SXM4-80GB", "a100"),
            ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
            ("A100-PCIE-40GB", "a100-pcie"),
            ("H100 SXM", "h100"),
            ("H100-96GB-HBM2e", "h100-96gb"),
            ("Tesla V100-SXM2-32GB", "v100"),
            ("AMD Instinct MI300X", "mi300x"),
            ("NVIDIA GeForce RTX 4090", "rtx4090"),
            ("RTX4090-24GB", "rtx4090"),
            ("NVIDIA GB200", "gb200-nvl72"),
            ("B200-180GB", "b200"),
            ("NVIDIA H20-96GB", "h20"),
            ("H100 PCIe 80GB", "h100-pcie"),
            ("A100-PCIe-80GB", "a100-pcie"),
            ("A800-SXM4-80GB", "a800"),
            ("Tesla V100-SXM2-16GB", "v100-16gb"),
            ("GH200-96GB", "gh200"),
            ("GH200 144 GB", "h200"),
            ("AMD Instinct MI250X", "mi250x"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA L4", "l4"),
            ("RTX A6000", "a6000"),
            ("NVIDIA A40", "a40"),
            ("NVIDIA A10", "a10"),
            ("NVIDIA A10G-24GB", "a10g"),
            ("H100 NVL 94GB", "h100-nvl"),
            ("GeForce RTX 3090", "rtx3090"),
            ("Tesla T4", "t4"),
        ] {
            assert_eq!(preset(name).unwrap(), expected, "{name}");
        }
        let old = ["v100", "v100-16gb", "a100", "a800", "a40", "a10g", "t4", "mi250x", "rtx3090"];
        assert!(
            old.iter().all(|old| !is_new(old))
                && ["h100", "l4", "rtx4090"].iter().all(|n| is_new(n))
        );
        assert!(preset("TPUv4").unwrap_err().contains("no preset describes"));
        assert_eq!(gigabytes("V100-16GB"), Some(16.0));
        assert_eq!(gigabytes("A100-SXM4-80GB"), Some(80.0));
        assert_eq!(gigabytes("H100 SXM"), None);
    }

    #[test]
    fn words_have_one_meaning() {
        for (text, expected) in [
            ("fp8-mx", Arithmetic::F8),
            ("MXFP8", Arithmetic::F8),
            ("NVFP4", Arithmetic::F4),
            ("bf16-true", Arithmetic::Half),
            ("BF16", Arithmetic::Half),
            ("tf32", Arithmetic::Tf32),
            ("fp32", Arithmetic::F32),
        ] {
            assert_eq!(arithmetic(text).unwrap(), Some(expected), "{text}");
        }
        assert!(arithmetic("int3").is_err());
        let sharded = |stage, shard| Some(Ok(Zero { stage, shard }));
        assert_eq!(zero("hsdp (8 in a node)"), sharded(3, 0));
        assert_eq!((zero("1"), zero("1/8"), zero(" ")), (sharded(1, 0), sharded(1, 8), None));
        assert!(["7", "1/x", "1/"].iter().all(|text| zero(text).unwrap().is_err()));
    }
}
