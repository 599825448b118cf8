//! What a model is to the planner: the work of a published shape, of sizes in a config, or of a
//! description that is also built.

use std::path::Path;

use ir::import::{Architecture, Description, Options, RoutedSizes, Sizes, import, resolve};
use ir::{DType, Diagnostic};

use super::workload::encoders::{bert, t5};
use super::workload::module::of_module;
use super::workload::{LowRank, Routed, Shape, Workload};
use crate::space::models::{self, Published};

/// A model's work, and what the planner knows beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// What a step computes.
    pub work: Workload,
    /// Elements that attention caches of a token and layer, where that is one shared vector.
    pub latent: Option<u32>,
}

/// The work of a MODEL argument: a published shape by its name, or what
/// [`resolve`] finds. `seq` are the tokens of a sample; without it, as many as the shape was
/// published with or the model was made for.
///
/// # Errors
/// Those of [`resolve`], and `E3403` for sizes that cannot be.
pub fn described(model: &str, seq: Option<u32>) -> Result<Described, Vec<Diagnostic>> {
    // What lies there goes first, as everywhere.
    let path = Path::new(model);
    let is_there = path.is_file() || path.join("config.json").is_file();
    match models::published(model).filter(|_| !is_there) {
        Some(Published::Shape(shape)) => of_shape(shape, seq),
        Some(Published::Sizes(sizes)) => of_sizes(model, &sizes, seq),
        None => {
            let known = |mut all: Vec<Diagnostic>| {
                if let (Some(near), [one]) = (models::near(model), &mut all[..])
                    && one.help.is_none()
                {
                    one.help = Some(format!("did you mean `{near}`?"));
                }
                all
            };
            of_description(&resolve(model).map_err(known)?.description, seq)
        }
    }
}

fn of_shape(mut shape: Shape, seq: Option<u32>) -> Result<Described, Vec<Diagnostic>> {
    shape.seq = seq.unwrap_or(shape.seq);
    let latent = shape.low_rank.map(|rank| rank.kv_rank + rank.rope_dim);
    Ok(Described { work: shape.workload()?, latent })
}

/// A size as a shape has it; one that is too large stays too large.
fn of(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

fn of_sizes(name: &str, sizes: &Sizes, seq: Option<u32>) -> Result<Described, Vec<Diagnostic>> {
    let seq = seq.unwrap_or(of(sizes.positions()));
    let work = match sizes {
        Sizes::Routed(sizes) => return of_shape(routed_shape(name, sizes, seq), None),
        Sizes::Bert(sizes) => bert(name, sizes, seq)?,
        Sizes::T5(sizes) => t5(name, sizes, seq)?,
    };
    Ok(Described { work, latent: None })
}

fn routed_shape(name: &str, sizes: &RoutedSizes, seq: u32) -> Shape {
    let low_rank = sizes.low_rank.map(|rank| LowRank {
        q_rank: of(rank.queries),
        kv_rank: of(rank.keys),
        plain_dim: of(rank.plain),
        rope_dim: of(rank.turned),
        v_dim: of(rank.values),
    });
    Shape {
        name: name.to_owned(),
        layers: of(sizes.layers),
        hidden: of(sizes.model),
        heads: of(sizes.heads),
        kv_heads: of(sizes.key_heads),
        head_dim: of(sizes.head_size),
        ffn: of(sizes.inner),
        gated: true,
        vocab: of(sizes.vocab),
        seq,
        causal: true,
        biases: false,
        tied: sizes.tied,
        routed: Some(Routed {
            experts: of(sizes.experts),
            top_k: of(sizes.experts_of_token),
            ffn: of(sizes.expert_inner),
            shared_ffn: of(sizes.shared_inner),
            dense_layers: of(sizes.dense_layers),
        }),
        low_rank,
    }
}

/// The work of a description.
///
/// # Errors
/// `E3403` for sizes that cannot be.
pub fn of_description(
    description: &Description,
    seq: Option<u32>,
) -> Result<Described, Vec<Diagnostic>> {
    let name = description.name.clone();
    let shape = match &description.architecture {
        Architecture::Gpt2(config) => Shape {
            name,
            layers: of(config.layers),
            hidden: of(config.model),
            heads: of(config.heads),
            kv_heads: of(config.heads),
            head_dim: of(config.model / config.heads.max(1)),
            ffn: of(config.inner),
            gated: false,
            vocab: of(config.vocab),
            seq: of(config.positions),
            causal: true,
            biases: true,
            tied: config.tied,
            routed: None,
            low_rank: None,
        },
        Architecture::Llama(config) => Shape {
            name,
            layers: of(config.layers),
            hidden: of(config.model),
            heads: of(config.heads),
            kv_heads: of(config.key_heads),
            head_dim: of(config.head_size),
            ffn: of(config.inner),
            gated: true,
            vocab: of(config.vocab),
            seq: of(config.positions),
            causal: true,
            biases: config.mlp_bias,
            tied: config.tied,
            routed: None,
            low_rank: None,
        },
        Architecture::Sized(sizes) => return of_sizes(&name, sizes, seq),
        Architecture::Graph(_) => {
            let seq = seq.map_or(1, |seq| seq as usize);
            let options = Options { seq, dtype: DType::F32, dropout: None };
            let model = import(description, &options)?;
            let is_loss = |entry: &&String| *entry == "loss";
            let entry = model.entries.iter().find(is_loss).or(model.entries.first());
            let entry = entry.map_or("loss", String::as_str);
            let work = of_module(&name, &model.module, entry).map_err(|wrong| vec![wrong])?;
            return Ok(Described { work, latent: None });
        }
    };
    of_shape(shape, seq)
}

#[cfg(test)]
mod tests {
    use ir::import::read_config;

    use super::*;

    fn parameters(config: &str) -> u64 {
        let description = read_config("config.json", config, "model").unwrap();
        of_description(&description, None).unwrap().work.parameters()
    }

    /// Counts of transformers' classes `MixtralForCausalLM`, `DeepseekV3ForCausalLM` (without the
    /// correction of the router, which is no parameter), `BertForPreTraining` and
    /// `T5ForConditionalGeneration`.
    #[test]
    fn configs_have_the_parameters_that_are_published() {
        let mixtral = r#"{"model_type": "mixtral", "max_position_embeddings": 32768}"#;
        assert_eq!(parameters(mixtral), 46_702_792_704);
        let deepseek = r#"{"model_type": "deepseek_v3", "quantization_config": {"fmt": "e4m3"}}"#;
        assert_eq!(parameters(deepseek), 671_026_404_352);
        let bert = r#"{"model_type": "bert", "architectures": ["BertForMaskedLM"]}"#;
        assert_eq!(parameters(bert), 110_106_428);
        let large = r#"{"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24,
            "num_attention_heads": 16, "intermediate_size": 4096}"#;
        assert_eq!(parameters(large), 336_226_108);
        let base = r#"{"model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12,
            "num_heads": 12}"#;
        assert_eq!(parameters(base), 222_903_552);
        let huge = r#"{"model_type": "t5", "d_model": 1024, "d_ff": 65536, "num_layers": 24,
            "num_heads": 128, "d_kv": 128}"#;
        assert_eq!(parameters(huge), 11_307_321_344);
        // Version 1.1: gated, with a head of its own.
        let gated = r#"{"model_type": "t5", "d_model": 768, "d_ff": 2048, "num_layers": 12,
            "num_heads": 12, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": false}"#;
        assert_eq!(parameters(gated), 247_577_856);
    }

    /// A config says what the preset of the same model says.
    #[test]
    fn configs_and_presets_agree() {
        let mixtral = read_config("c", r#"{"model_type": "mixtral"}"#, "mixtral-8x7b").unwrap();
        let deepseek = read_config("c", r#"{"model_type": "deepseek_v3"}"#, "deepseek-v3").unwrap();
        for description in [mixtral, deepseek] {
            let preset = described(&description.name, Some(4096)).unwrap();
            assert_eq!(of_description(&description, Some(4096)).unwrap(), preset);
        }
    }

    /// A step of an encoder–decoder: 6 operations for each parameter of a product, and 12 for each
    /// element of attention that is seen: twice the whole square, and half of it.
    #[test]
    fn operations_follow_from_parameters() {
        let work = described("t5-11b", Some(512)).unwrap().work;
        let (layers, rows, seq) = (24.0, 128.0 * 128.0, 512.0);
        let expected = 6.0 * work.parameters() as f64 + 12.0 * layers * 2.5 * rows * seq;
        let ratio = work.flops_per_token() / expected;
        assert!((ratio - 1.0).abs() < 1e-3, "{ratio}");
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let config = r#"{"model_type": "t5", "d_model": 1000000000, "d_ff": 1000000000}"#;
        let description = read_config("c", config, "t5").unwrap();
        assert_eq!(of_description(&description, None).unwrap_err().len(), 2);
        let config = r#"{"model_type": "mixtral", "num_experts_per_tok": 9}"#;
        assert_eq!(read_config("c", config, "m").unwrap_err()[0].code, "E1105");
        assert_eq!(described("t5-12b", None).unwrap_err()[0].code, "E1101");
    }
}
