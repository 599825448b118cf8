//! What a model is to the planner: the work of a published shape, of sizes in a config, or of a
//! description that is also built.

use std::path::Path;

use ir::import::{
    Architecture, Description, FamilyModel, Options, Sizes, Value, check_positions, import, preset,
    resolve,
};
use ir::{DType, Diagnostic, Module, TensorType};

use super::workload::encoders::{bert, t5};
use super::workload::family::family_shape;
use super::workload::module::of_module;
use super::workload::{Shape, Workload, assumptions};
use crate::search::models::{self, Published};

/// A model's work, and what the planner knows beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// What a step computes.
    pub work: Workload,
    /// Elements that attention caches of a token and layer, where that is one shared vector.
    pub latent: Option<u32>,
    /// Tokens of a sample. The work of a graph is counted by samples: there, the tokens it is fed.
    pub tokens: u32,
    /// What to know about the description, such as fields of its config that nobody reads.
    pub warnings: Vec<Diagnostic>,
}

/// The work of a MODEL argument: what [`resolve`] finds, or else a published shape by its name.
/// `seq` is the tokens of a sample; without it they are those that the model was made for, or that
/// the shape was published with.
///
/// # Errors
/// Those of [`resolve`], and `E3403` for sizes that cannot be.
pub fn described(model: impl AsRef<Path>, seq: Option<u32>) -> Result<Described, Vec<Diagnostic>> {
    let path = model.as_ref();
    let model = &*path.to_string_lossy();
    match published(path) {
        Some(Published::Shape(shape, unpriced)) => {
            let mut described = of_shape(shape, seq)?;
            described.work.assumptions.extend(unpriced.map(str::to_owned));
            Ok(described)
        }
        Some(Published::Sizes(sizes)) => of_sizes(model, &sizes, seq),
        None => {
            let known = |all: Vec<Diagnostic>| {
                let told = all.into_iter().map(|one| match models::near(model) {
                    _ if path.exists() => one,
                    Some(near) if one.help.is_none() => one.help(format!("did you mean `{near}`?")),
                    Some(_) => one,
                    None => {
                        let names: Vec<&str> = models::first_names().collect();
                        one.note(format!("or, on GPUs, one of the shapes {}", names.join(", ")))
                    }
                });
                told.collect::<Vec<_>>()
            };
            of_description(&resolve(path).map_err(known)?.description, seq)
        }
    }
}

/// The published sizes of a MODEL argument. What lies at its path goes first, then what can be
/// built, as everywhere.
fn published(path: &Path) -> Option<Published> {
    let name = &*path.to_string_lossy();
    let is_there = path.is_file() || path.join("config.json").is_file();
    models::published(name).filter(|_| !is_there && preset(name).is_none())
}

/// A decoder, as other tools describe it.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoder {
    /// Its sizes.
    pub shape: Shape,
    /// Its family; none of a shape that was published without code.
    pub family: Option<&'static str>,
    /// The base of rotary positions.
    pub theta: Option<f64>,
    /// How they are scaled.
    pub rope_type: Option<String>,
    /// Whether a layer attends within a window.
    pub has_window: bool,
    /// Whether the gates of experts are their shares among all, rather than among those of a token.
    pub keeps_shares: bool,
    /// Where experts are chosen in another way than by the largest shares.
    pub router: Router,
}

/// How experts are chosen and weighted (DeepSeek-AI 2024), beside how many and out of which.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Router {
    /// Whether scores are sigmoids, with a correction of each expert where they are compared.
    pub is_sigmoid: bool,
    /// Groups of experts and how many of them are open to a token; none where all are.
    pub groups: Option<[u32; 2]>,
    /// What gates are multiplied with; none for 1.
    pub gain: Option<f64>,
}

/// The decoder that a MODEL argument is; none of an encoder, a graph, or what is not found.
pub fn decoder(model: impl AsRef<Path>) -> Option<Decoder> {
    let of_shape = |shape| Decoder {
        shape,
        family: None,
        theta: None,
        rope_type: None,
        has_window: false,
        keeps_shares: false,
        router: Router::default(),
    };
    let path = model.as_ref();
    if let Some(Published::Shape(shape, _)) = published(path) {
        return Some(of_shape(shape));
    }
    let description = resolve(path).ok()?.description;
    match &description.architecture {
        Architecture::Family(model) => Some(of_decoder(description.name.clone(), model)),
        Architecture::Sized(_) | Architecture::Graph(_) => None,
    }
}

fn of_decoder(name: String, model: &FamilyModel) -> Decoder {
    let scopes = || model.layers.iter().chain([&model.scope]);
    let rotary = scopes().flat_map(|scope| scope.values()).find_map(Value::rotary);
    let windows = scopes().filter_map(|scope| scope.get("window").and_then(Value::size));
    let rope_type = rotary.and_then(|rotary| rotary.parameters.get("rope_type")?.as_str());
    Decoder {
        shape: family_shape(name, model),
        family: Some(model.family.name),
        theta: rotary.map(|rotary| rotary.theta),
        rope_type: rope_type.map(str::to_owned),
        has_window: windows.into_iter().any(|window| window > 0),
        keeps_shares: model.scope.get("is_normed") == Some(&Value::Flag(false)),
        router: router(model),
    }
}

fn router(model: &FamilyModel) -> Router {
    let size = |symbol: &str| model.scope.get(symbol).and_then(Value::size).map(of);
    let gain = model.scope.get("gain").and_then(Value::number).filter(|gain| *gain != 1.0);
    let groups = size("N").zip(size("N_open")).filter(|(all, open)| open < all);
    Router {
        is_sigmoid: model.flag("is_sigmoid"),
        groups: groups.map(|(all, open)| [all, open]),
        gain: gain.filter(|_| model.scope.contains_key("is_scaled")),
    }
}

fn of_shape(mut shape: Shape, seq: Option<u32>) -> Result<Described, Vec<Diagnostic>> {
    shape.seq = seq.unwrap_or(shape.seq);
    let latent = shape.low_rank.map(|rank| rank.kv_rank + rank.rope_dim);
    Ok(Described { work: shape.workload()?, latent, tokens: shape.seq, warnings: Vec::new() })
}

/// A size as a shape has it; one that is too large stays too large.
fn of(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

/// Refuses samples with more tokens than a table of positions has rows.
fn check_seq(seq: Option<u32>, positions: usize) -> Result<(), Vec<Diagnostic>> {
    let wrong = seq.and_then(|seq| check_positions(seq as usize, positions));
    wrong.map_or(Ok(()), |wrong| Err(vec![wrong]))
}

fn of_sizes(name: &str, sizes: &Sizes, seq: Option<u32>) -> Result<Described, Vec<Diagnostic>> {
    if let Sizes::Bert(sizes) = sizes {
        check_seq(seq, sizes.positions)?;
    }
    let seq = seq.unwrap_or(of(sizes.positions()));
    let work = match sizes {
        Sizes::Bert(sizes) => bert(name, sizes, seq)?,
        Sizes::T5(sizes) => t5(name, sizes, seq)?,
    };
    Ok(Described { work, latent: None, tokens: seq, warnings: Vec::new() })
}

/// The most tokens or labels of a sample that an entry is fed; 1 where it has none.
fn fed(module: &Module, entry: &str) -> u32 {
    let params = module.function(entry).into_iter().flat_map(|entry| {
        entry.params().map(|param| (entry.value(param).name.as_str(), entry.ty(param)))
    });
    let is_fed = |(name, ty): &(&str, &TensorType)| {
        ["tokens", "labels"].contains(name) && ty.ndim() == 2 && !ty.dtype.is_float()
    };
    let sizes = params.filter(is_fed).filter_map(|(_, ty)| ty.dims[1].as_constant());
    sizes.filter_map(|size| u32::try_from(size).ok()).max().unwrap_or(1)
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
    let warnings = description.warnings.clone();
    match &description.architecture {
        Architecture::Family(model) => Ok(Described { warnings, ..of_family(name, model, seq)? }),
        Architecture::Sized(sizes) => Ok(Described { warnings, ..of_sizes(&name, sizes, seq)? }),
        Architecture::Graph(_) => {
            let seq = seq.map_or(1, |seq| seq as usize);
            let options = Options { seq, dtype: DType::F32, dropout: None, documents: false };
            let model = import(description, &options)?;
            let is_loss = |entry: &&String| *entry == "loss";
            let entry = model.entries.iter().find(is_loss).or(model.entries.first());
            let entry = entry.map_or("loss", String::as_str);
            let work = of_module(&name, &model.module, entry).map_err(|wrong| vec![wrong])?;
            Ok(Described { work, latent: None, tokens: fed(&model.module, entry), warnings })
        }
    }
}

/// The work of a model of a family: that of its shape, with as many parameters as the module has.
fn of_family(
    name: String,
    model: &FamilyModel,
    seq: Option<u32>,
) -> Result<Described, Vec<Diagnostic>> {
    if let Some(learned) = model.learned {
        check_seq(seq, learned)?;
    }
    let shape = family_shape(name, model);
    // Shapes that are gated rotate.
    let rotates = shape.gated;
    let mut described = of_shape(shape, seq)?;
    described.work.set_parameters(&model.counts());
    described.work.assumptions = assumptions::of_family(model, described.tokens, rotates);
    let made_for = model.size("P");
    if described.tokens as usize > made_for {
        let tokens = described.tokens;
        let longer =
            format!("samples of {tokens} tokens are longer than the {made_for} it is made for");
        described.work.assumptions.push(longer);
    }
    Ok(described)
}

#[cfg(test)]
mod tests {
    use ir::import::{read_config, read_graph};

    use super::*;
    use crate::cluster::Cluster;
    use crate::estimate::rates::Arithmetic;
    use crate::estimate::{Estimator, Job, profile};
    use crate::machine::Machine;

    fn parameters(config: &str) -> u64 {
        let description = read_config("config.json", config, "model").unwrap();
        of_description(&description, None).unwrap().work.parameters()
    }

    /// Counts of transformers' classes `MixtralForCausalLM`, `DeepseekV3ForCausalLM` (with the
    /// corrections of its routers, which are buffers), `BertForPreTraining`, `BertForMaskedLM`
    /// (without a pooler and what follows it) and `T5ForConditionalGeneration`.
    #[test]
    fn configs_have_the_parameters_that_are_published() {
        let mixtral = r#"{"model_type": "mixtral", "max_position_embeddings": 32768}"#;
        assert_eq!(parameters(mixtral), 46_702_792_704);
        let deepseek = r#"{"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}"#;
        assert_eq!(parameters(deepseek), 671_026_404_352 + 58 * 256);
        let bert = r#"{"model_type": "bert", "architectures": ["BertForMaskedLM"]}"#;
        assert_eq!(parameters(bert), 109_514_298);
        let bert = r#"{"model_type": "bert", "architectures": ["BertForPreTraining"]}"#;
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

    /// One name is one model, with the parameters that are published: what is planned for is what
    /// is built, whatever the tokens of a sample.
    #[test]
    fn presets_are_planned_with_the_published_parameters() {
        for preset in ir::import::families().iter().flat_map(|family| &family.presets) {
            for seq in [None, Some(1)] {
                let work = described(preset.name, seq).unwrap().work;
                assert_eq!(work.parameters(), preset.count, "{}", preset.name);
            }
        }
    }

    /// What attention of a family computes and nobody prices is named, where it makes a difference.
    #[test]
    fn what_is_not_priced_is_named() {
        let of = |model, seq| described(model, seq).unwrap().work.assumptions;
        let window = "windows of 4096 tokens in 32 of 32 layers are priced as attention to all \
                      earlier tokens";
        assert_eq!(of("mistral-7b", Some(8192)), [window]);
        assert_eq!(of("mistral-7b", Some(4096)), [""; 0]);
        let longer = "samples of 16384 tokens are longer than the 8192 it is made for";
        assert_eq!(of("llama-3-8b", Some(16384)), [longer]);
        let gemma = of("gemma-2-2b", None);
        assert_eq!(gemma.len(), 3, "{gemma:?}");
        assert!(gemma[0].starts_with("windows of 4096 tokens in 13 of 26 layers"), "{gemma:?}");
        assert!(gemma[1].starts_with("soft caps of attention"), "{gemma:?}");
        assert_eq!(of("bloom-7b1", None), ["biases of attention scores are not priced"]);
        assert_eq!(of("gpt-j-6b", None), ["rotary embeddings are not priced"]);
        assert_eq!(of("gpt-oss-20b", None).len(), 1);
        for model in ["gpt2", "llama-3-8b", "gpt3-175b", "gpt-175b"] {
            assert_eq!(of(model, None), [""; 0], "{model}");
        }
        // A graph of the same model leaves out the same of attention.
        let description = resolve("mistral-7b").unwrap().description;
        let options =
            Options { seq: 8192, dtype: DType::BF16, dropout: Some(0.0), documents: false };
        let text = import(&description, &options).unwrap().module.to_string();
        let graph = read_graph("x.graph", &text, "mistral-7b").unwrap();
        assert_eq!(of_description(&graph, None).unwrap().work.assumptions, [window]);
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

    /// A table of positions has its rows whatever is asked, and no sample has more tokens; what is
    /// rotated has no end.
    #[test]
    fn parameters_do_not_depend_on_samples() {
        for (model, parameters) in [
            ("gpt2", Some(124_439_808)),
            ("gpt3-175b", None),
            ("gpt-18.4b", None),
            ("bert-large", None),
            ("t5-11b", None),
            ("llama-3-8b", Some(8_030_261_248)),
        ] {
            let work = |seq| described(model, seq).unwrap().work.parameters();
            let own = work(None);
            assert!(parameters.is_none_or(|known| own == known), "{model}: {own}");
            for seq in [1, 128, 512] {
                assert_eq!(work(Some(seq)), own, "{model}: {seq} tokens");
            }
        }
        for model in ["gpt2", "bert-large"] {
            assert_eq!(described(model, Some(2048)).unwrap_err()[0].code, "E1108", "{model}");
        }
        assert!(described("llama-3-8b", Some(1 << 17)).is_ok());
    }

    /// A model that is exported as a graph costs what it costs itself.
    #[test]
    fn graphs_cost_what_their_models_cost() {
        let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
        let cluster = Cluster::load_on("h100", &machine).unwrap();
        for name in ["llama-3-8b", "gpt2-large"] {
            let description = resolve(name).unwrap().description;
            let seq = 1024;
            let options = Options { seq, dtype: DType::BF16, dropout: Some(0.0), documents: false };
            let text = import(&description, &options).unwrap().module.to_string();
            let graph = read_graph("x.graph", &text, name).unwrap();
            let [ours, graphs] =
                [of_description(&description, Some(1024)), of_description(&graph, None)]
                    .map(Result::unwrap);
            assert_eq!((ours.tokens, graphs.tokens), (1024, 1024));
            assert_eq!(ours.work.parameters(), graphs.work.parameters());
            let flops = |of: &Described| of.work.flops_per_token() * f64::from(of.work.seq);
            assert!((flops(&graphs) / flops(&ours) - 1.0).abs() < 1e-9, "{name}");
            for layout in ["dp=8 mbs=1 zero=3", "tp=4 dp=2 mbs=1 zero=1"] {
                let configuration = layout.parse().unwrap();
                let [a, b] = [&ours, &graphs].map(|of| {
                    let job = Job { global_batch: 16, arithmetic: Arithmetic::Half };
                    let estimator =
                        Estimator::new(&of.work, &cluster, profile::GANTLINE, job).unwrap();
                    let found = estimator.estimate(&configuration).unwrap();
                    [found.step_time_s, found.memory.activations_bytes]
                });
                // In a graph a norm and a gate are operations as others, whose results are kept,
                // those of norms by each rank of `tp` whole.
                for ((a, b), most) in a.into_iter().zip(b).zip([0.2, 0.7]) {
                    assert!((b / a).ln().abs() < most, "{name} {layout}: {a} and {b}");
                }
            }
        }
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
