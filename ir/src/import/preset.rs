//! Models that need no file: published ones, and a small one to try things with.

use super::{Architecture, Description, Gpt2Config, LlamaConfig};
use crate::DType;

/// The names of all presets.
pub const PRESETS: [&str; 8] = [
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt3-175b",
    "llama-3-8b",
    "llama-3-70b",
    "gpt2-mini",
];

/// The preset of a name.
pub fn preset(name: &str) -> Option<Description> {
    let architecture = match name {
        "gpt2" => gpt2(12, 768, 12),
        "gpt2-medium" => gpt2(24, 1024, 16),
        "gpt2-large" => gpt2(36, 1280, 20),
        "gpt2-xl" => gpt2(48, 1600, 25),
        "gpt3-175b" => gpt3_175b(),
        "llama-3-8b" => llama3(LlamaConfig { inner: 14336, ..LlamaConfig::default() }),
        "llama-3-70b" => {
            let (model, heads, inner) = (8192, 64, 28672);
            llama3(LlamaConfig { layers: 80, model, heads, inner, ..LlamaConfig::default() })
        }
        "gpt2-mini" => gpt2_mini(),
        _ => return None,
    };
    let stored = match &architecture {
        Architecture::Llama(_) => DType::BF16,
        Architecture::Gpt2(_) | Architecture::Graph(_) | Architecture::Sized(_) => DType::F32,
    };
    let stored = Some(stored);
    Some(Description { name: name.to_owned(), architecture, stored })
}

/// As published with "Language Models are Unsupervised Multitask Learners" (Radford et al. 2019).
fn gpt2(layers: usize, model: usize, heads: usize) -> Architecture {
    let inner = 4 * model;
    Architecture::Gpt2(Gpt2Config { layers, model, heads, inner, ..Gpt2Config::default() })
}

/// The largest of table 2.1 of "Language Models are Few-Shot Learners" (Brown et al. 2020). Its
/// alternating sparse attention is taken as dense, as is usual where it is planned for.
fn gpt3_175b() -> Architecture {
    Architecture::Gpt2(Gpt2Config {
        positions: 2048,
        model: 12288,
        layers: 96,
        heads: 96,
        inner: 4 * 12288,
        ..Gpt2Config::default()
    })
}

/// What the models of "The Llama 3 Herd of Models" (2024) have in common.
fn llama3(config: LlamaConfig) -> Architecture {
    Architecture::Llama(LlamaConfig {
        vocab: 128_256,
        positions: 8192,
        key_heads: 8,
        eps: 1e-5,
        theta: 500_000.0,
        ..config
    })
}

/// Small enough to train on one core in minutes, on bytes.
fn gpt2_mini() -> Architecture {
    Architecture::Gpt2(Gpt2Config {
        vocab: 256,
        positions: 256,
        model: 256,
        layers: 4,
        heads: 4,
        inner: 4 * 256,
        dropout_residual: 0.0,
        dropout_embed: 0.0,
        dropout_attention: 0.0,
        ..Gpt2Config::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::{Options, import};

    #[test]
    fn presets_have_the_published_sizes() {
        let sizes = [
            ("gpt2", 124_439_808),
            ("gpt2-medium", 354_823_168),
            ("gpt2-large", 774_030_080),
            ("gpt2-xl", 1_557_611_200),
            ("gpt3-175b", 174_604_259_328),
            ("llama-3-8b", 8_030_261_248),
            ("llama-3-70b", 70_553_706_496),
            ("gpt2-mini", 3_290_624),
        ];
        assert_eq!(sizes.map(|(name, _)| name), PRESETS);
        for (name, size) in sizes {
            let description = preset(name).unwrap();
            let options = Options { seq: 64, dtype: DType::F32, dropout: None };
            let model = import(&description, &options).unwrap();
            assert_eq!(model.param_count(), size, "{name}");
            let printed = model.module.to_string();
            let read = crate::text::parse_module("printed", &printed).unwrap();
            assert!(read == model.module, "{name} prints and reads back");
        }
    }
}
