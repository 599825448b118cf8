//! Families of decoders: one file each, from the fields of a config to functions and weights.
//!
//! A file of `ir/src/families` says which fields a config has and which symbols they become, which
//! symbols every layer has of its own, in which tensors of a checkpoint the weights stand, and what
//! `embed`, `block` and `head` compute. Everything else follows: the entries for training and
//! generation, the presets, the config that is exported, the shape that is planned for.
//! `docs/contributing.md` shows the form and how to add a family.

mod body;
mod config;
mod expr;
mod rotary;
mod routing;
mod text;
mod weights;

use std::sync::OnceLock;

use serde_json::{Map, Value as Json};

use super::Weight;
use crate::DType;

pub use body::AttentionTraits;
pub use expr::{Scope, Value};
pub use rotary::{Ramp, Rotary, Scaling};

pub(crate) use body::{DOCUMENTS, Mode, Part};
pub(crate) use config::read_family;
pub(crate) use expr::Expr;
pub(crate) use weights::Weights;

const TEXTS: [(&str, &str); 30] = [
    ("gpt2.family", include_str!("../families/gpt2.family")),
    ("llama.family", include_str!("../families/llama.family")),
    ("qwen2.family", include_str!("../families/qwen2.family")),
    ("qwen3.family", include_str!("../families/qwen3.family")),
    ("mistral.family", include_str!("../families/mistral.family")),
    ("mixtral.family", include_str!("../families/mixtral.family")),
    ("qwen3_moe.family", include_str!("../families/qwen3_moe.family")),
    ("qwen2_moe.family", include_str!("../families/qwen2_moe.family")),
    ("olmoe.family", include_str!("../families/olmoe.family")),
    ("deepseek_v2.family", include_str!("../families/deepseek_v2.family")),
    ("deepseek_v3.family", include_str!("../families/deepseek_v3.family")),
    ("ministral.family", include_str!("../families/ministral.family")),
    ("granite.family", include_str!("../families/granite.family")),
    ("smollm3.family", include_str!("../families/smollm3.family")),
    ("olmo2.family", include_str!("../families/olmo2.family")),
    ("gemma.family", include_str!("../families/gemma.family")),
    ("gemma2.family", include_str!("../families/gemma2.family")),
    ("gemma3_text.family", include_str!("../families/gemma3_text.family")),
    ("cohere.family", include_str!("../families/cohere.family")),
    ("bloom.family", include_str!("../families/bloom.family")),
    ("falcon.family", include_str!("../families/falcon.family")),
    ("gpt_bigcode.family", include_str!("../families/gpt_bigcode.family")),
    ("gpt_neox.family", include_str!("../families/gpt_neox.family")),
    ("gptj.family", include_str!("../families/gptj.family")),
    ("mpt.family", include_str!("../families/mpt.family")),
    ("opt.family", include_str!("../families/opt.family")),
    ("phi.family", include_str!("../families/phi.family")),
    ("phi3.family", include_str!("../families/phi3.family")),
    ("stablelm.family", include_str!("../families/stablelm.family")),
    ("starcoder2.family", include_str!("../families/starcoder2.family")),
];

/// A family of models, as its file describes it.
#[derive(Clone, Debug, Default)]
pub struct Family {
    /// The `model_type` of its configs.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    /// The classes of transformers that are computed, the one with the head first.
    pub classes: Vec<&'static str>,
    /// The family whose sections it has where its file does not have them.
    like: &'static str,
    /// Published models.
    pub presets: Vec<Preset>,
    rules: Vec<Rule>,
    layer_rules: Vec<Rule>,
    shape: Vec<(&'static str, Expr)>,
    weights: Vec<WeightRule>,
    embed: Code,
    block: Code,
    head: Code,
    /// While the file is read: the section whose weights follow, and the prefixes of its tensors.
    section: Section,
    prefixes: Vec<&'static str>,
}

/// A published model of a family.
#[derive(Clone, Debug)]
pub struct Preset {
    /// The name.
    pub name: &'static str,
    /// The element type of the published weights.
    pub dtype: DType,
    /// Its parameters as they are published.
    pub count: u64,
    /// The fields of its config, as JSON.
    pub config: &'static str,
}

/// A line of `config`.
#[derive(Clone, Debug)]
enum Rule {
    /// A symbol that a field gives.
    Field(Field),
    /// A symbol that follows from others.
    Let(&'static str, Expr),
    /// A field that has one value only.
    Require(&'static str, Expr),
    /// Fields that do not change what is computed.
    Ignore(Vec<&'static str>),
    /// One symbol divides another.
    Multiple([&'static str; 2]),
    /// What holds of the symbols.
    Check(Check),
    /// Every position up to this one has a learned vector.
    Learned(Expr),
}

#[derive(Clone, Debug)]
struct Check {
    holds: Expr,
    key: &'static str,
    headline: &'static str,
    help: &'static str,
}

#[derive(Clone, Debug)]
struct Field {
    symbol: &'static str,
    kind: FieldKind,
    /// Whether null is a value of its own.
    optional: bool,
    /// The field; others are aliases.
    keys: Vec<&'static str>,
    default: Option<Expr>,
}

#[derive(Clone, Debug)]
enum FieldKind {
    /// A whole number from 1 on.
    Size,
    /// A number of layers.
    Depth,
    /// A whole number from 0 on.
    Count,
    /// A number from 0 on.
    Number,
    /// Any finite number.
    Real,
    /// A number above 0.
    Positive,
    /// A number from 0 on and below 1.
    Probability,
    /// The probability of a dropout.
    Dropout,
    /// True or false.
    Flag,
    /// The name of an activation function.
    Activation,
    /// One of these words.
    Word(Vec<&'static str>),
    /// One entry for each layer.
    List,
    /// A rotary embedding.
    Rotary(Vec<(&'static str, Expr)>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Section {
    #[default]
    Embed,
    Layer,
    Head,
}

#[derive(Clone, Debug)]
struct WeightRule {
    section: Section,
    name: &'static str,
    /// Dims, each a product of axes.
    dims: Vec<Vec<&'static str>>,
    init: WeightInit,
    tensor: Tensor,
    condition: Option<Expr>,
    /// How many weights the rule stands for, told apart by `{i}` in their names.
    count: Option<Expr>,
}

#[derive(Clone, Debug)]
enum WeightInit {
    Ones,
    Zeros,
    /// Zeros that training leaves as they are.
    Frozen,
    /// The standard deviation, and the row that is zero, if any.
    Normal(Box<Expr>, Option<Box<Expr>>),
}

#[derive(Clone, Debug)]
struct Tensor {
    /// `{layer}` stands for the number of the layer.
    names: Vec<String>,
    /// Dims, where they are not those of the weight.
    dims: Option<Vec<Vec<&'static str>>>,
}

/// What a function computes: a text with guards, and what its other lines say.
#[derive(Clone, Debug, Default)]
struct Code {
    text: String,
    /// By the number of the line in the text.
    lines: Vec<(usize, Line)>,
}

/// A line of a function that is no guard.
#[derive(Clone, Debug)]
enum Line {
    Return(&'static str),
    Call {
        result: &'static str,
        ty: Option<&'static str>,
        op: &'static str,
        bare: Vec<&'static str>,
        named: Vec<(&'static str, &'static str)>,
        operands: Vec<&'static str>,
    },
}

impl Family {
    /// The fields of its configs.
    fn fields(&self) -> impl Iterator<Item = &Field> {
        self.rules.iter().filter_map(|rule| if let Rule::Field(f) = rule { Some(f) } else { None })
    }

    /// The symbols that are probabilities of dropout.
    fn dropouts(&self) -> impl Iterator<Item = &'static str> {
        let dropouts = self.fields().filter(|field| matches!(field.kind, FieldKind::Dropout));
        dropouts.map(|field| field.symbol)
    }
}

/// All families, in the order in which they are listed.
///
/// # Panics
/// Never: the texts are part of the program, and a test reads them.
pub fn families() -> &'static [Family] {
    static FAMILIES: OnceLock<Vec<Family>> = OnceLock::new();
    FAMILIES.get_or_init(|| {
        let mut families = Vec::new();
        for (source, text) in TEXTS {
            match text::parse(text, &families) {
                Ok(family) => families.push(family),
                Err(why) => panic!("{source}: {why}"),
            }
        }
        families
    })
}

/// The family of a `model_type`.
pub fn family(name: &str) -> Option<&'static Family> {
    families().iter().find(|family| family.name == name)
}

/// Parameters of a model by place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterCounts {
    /// Before the layers.
    pub first: u64,
    /// Of each layer.
    pub layers: Vec<u64>,
    /// After the layers; a head that is tied counts where its table does.
    pub last: u64,
}

/// A model of a family: what its config says.
#[derive(Clone, Debug)]
pub struct FamilyModel {
    /// The family.
    pub family: &'static Family,
    /// The symbols.
    pub scope: Scope,
    /// The symbols of each layer that are its own.
    pub layers: Vec<Scope>,
    /// The longest sequence, where every position has a learned vector.
    pub learned: Option<usize>,
}

impl PartialEq for FamilyModel {
    fn eq(&self, other: &FamilyModel) -> bool {
        self.family.name == other.family.name
            && self.scope == other.scope
            && self.layers == other.layers
    }
}

impl FamilyModel {
    /// A symbol that is a whole number.
    ///
    /// # Panics
    /// When the family has no such symbol: every family has V, P, M, L, H, G and D.
    pub fn size(&self, symbol: &str) -> usize {
        match self.scope.get(symbol).and_then(Value::size) {
            Some(size) => size,
            None => panic!("the family `{}` has no size `{symbol}`", self.family.name),
        }
    }

    /// The same with a table of that many learned positions.
    pub fn with_positions(&self, positions: usize) -> FamilyModel {
        let mut model = self.clone();
        model.scope.insert("P".to_owned(), Value::Number(positions as f64));
        model.learned = model.learned.map(|_| positions);
        model
    }

    /// A symbol that is true or false; false where there is none.
    pub fn flag(&self, symbol: &str) -> bool {
        self.scope.get(symbol) == Some(&Value::Flag(true))
    }

    /// For each layer the number of its kind: layers of one kind compute the same from weights of
    /// the same dims.
    pub fn kinds(&self) -> Vec<usize> {
        let mut known: Vec<&Scope> = Vec::new();
        let of = |scope| {
            known.iter().position(|k| *k == scope).unwrap_or_else(|| {
                known.push(scope);
                known.len() - 1
            })
        };
        self.layers.iter().map(of).collect()
    }

    /// The longest sequence that keys can be kept of, and why; none without end.
    pub fn cached_max(&self) -> Option<usize> {
        let all = self.layers.iter().flat_map(Scope::values).chain(self.scope.values());
        all.filter_map(|value| value.rotary()?.cached_max()).min()
    }

    /// What the file says of the shape that is planned for on GPUs, by name.
    pub fn shape(&self) -> Scope {
        let value = |(name, expr): &(&'static str, Expr)| {
            let value = expr.eval(&self.scope);
            let value = value.unwrap_or_else(|why| panic!("{}: {name}: {why}", self.family.name));
            ((*name).to_owned(), value)
        };
        self.family.shape.iter().map(value).collect()
    }

    /// Parameters before the layers, of each layer, and after them; a tied head's none.
    pub fn counts(&self) -> ParameterCounts {
        let Weights { embed, layers, head, .. } = self.weights();
        let count = |weights: &[Weight]| weights.iter().map(Weight::count).sum::<u64>();
        let layers = layers.iter().map(|layer| count(layer)).collect();
        ParameterCounts { first: count(&embed), layers, last: count(&head) }
    }

    /// The fields of a config that says the same, as transformers writes it.
    pub fn config(&self) -> Map<String, Json> {
        config::write(self)
    }
}
