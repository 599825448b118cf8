//! The angles of rotary embeddings, and what scales them: linear, dynamic, yarn, longrope, llama3.
//!
//! Pair `i` of a head turns by `p · f_i` at position `p`. Without scaling `f_i = θ^(-2i/R)`, where
//! R counts the rotated elements of a head. Facts as of transformers 5.23
//! (`modeling_rope_utils.py`):
//!
//! | `rope_type` | f_i | cosine and sine times |
//! |---|---|---|
//! | `linear` | f_i / s | 1 |
//! | `dynamic` | with θ · (s·n/P − s + 1)^(R/(R−2)), n = max(S, P) for S tokens | 1 |
//! | `yarn` (Peng 2023) | f_i below a pair, f_i / s above another, a ramp between | 0.1 ln s + 1 |
//! | `llama3` | f_i / s for long waves, f_i for short ones, a ramp between | 1 |
//! | `longrope` (Ding 2024) | f_i / factor_i, others beyond P₀ tokens | √(1 + ln s / ln P₀) |
//!
//! All but the last are one formula, `f_i · (1 + r_i · stretch)` with
//! `r_i = clamp(offset + by_pair · i + by_frequency · f_i, 0, 1)`.
//! `dynamic` and `longrope` depend on the length of the sequence. In training that is S. Cached
//! keys were rotated when the sequence was shorter, so that generation ends where the angles would
//! change.

use std::f64::consts::TAU;
use std::fmt;

use serde_json::{Map, Number, Value, json};

use crate::import::config::fields::{Fields, list};

/// The angles of a rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// R: elements of a head that are rotated, an even number.
    pub dim: usize,
    /// θ.
    pub theta: f64,
    /// What changes the frequencies.
    pub scaling: Scaling,
    /// What cosines and sines are multiplied with.
    pub gain: f64,
    /// What scores are multiplied with where a family asks for it (`scores=true`): the square of
    /// `0.1 · mscale_all_dim · ln s + 1`, or 1 without `mscale_all_dim`.
    pub score_gain: f64,
    /// As transformers 5 writes it.
    pub parameters: Map<String, Value>,
}

/// What changes the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// Nothing.
    Default,
    /// The formula of this module.
    Ramp(Ramp),
    /// θ grows with the sequence.
    Dynamic {
        /// s
        factor: f64,
        /// P
        positions: usize,
    },
    /// Divisors of each pair.
    Factors {
        /// Up to `original` tokens.
        short: Vec<f64>,
        /// Beyond.
        long: Vec<f64>,
        /// P₀
        original: usize,
    },
}

/// `1 + clamp(offset + by_pair · i + by_frequency · f_i, 0, 1) · stretch`, which multiplies `f_i`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ramp {
    /// The ramp before the first pair.
    pub offset: f64,
    /// What each pair adds.
    pub by_pair: f64,
    /// What a frequency of one adds.
    pub by_frequency: f64,
    /// `1/s − 1`
    pub stretch: f64,
}

/// The frequencies for sequences of one length.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Angles {
    /// By the formula of [`Ramp`], if there is one.
    Formula(f64, Option<Ramp>),
    /// One number for each pair.
    Table(Vec<f64>),
}

impl Rotary {
    /// The frequencies for sequences of so many tokens.
    pub(crate) fn angles(&self, seq: usize) -> Angles {
        match &self.scaling {
            Scaling::Default => Angles::Formula(self.theta, None),
            Scaling::Ramp(ramp) => Angles::Formula(self.theta, Some(*ramp)),
            Scaling::Dynamic { factor, positions } => {
                let (n, p, r) = (seq.max(*positions) as f64, *positions as f64, self.dim as f64);
                let growth = (factor * n / p - (factor - 1.0)).powf(r / (r - 2.0));
                Angles::Formula(self.theta * growth, None)
            }
            Scaling::Factors { short, long, original } => {
                let factors = if seq > *original { long } else { short };
                let frequency = |(i, factor): (usize, &f64)| {
                    1.0 / (factor * self.theta.powf(2.0 * i as f64 / self.dim as f64))
                };
                Angles::Table(factors.iter().enumerate().map(frequency).collect())
            }
        }
    }

    /// The longest sequence whose frequencies are those of every shorter one; none without end.
    pub(crate) fn cached_max(&self) -> Option<usize> {
        match self.scaling {
            Scaling::Default | Scaling::Ramp(_) => None,
            Scaling::Dynamic { positions, .. } => Some(positions),
            Scaling::Factors { original, .. } => Some(original),
        }
    }
}

impl fmt::Display for Rotary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rotary({}, {})", self.dim, Value::from(self.parameters.clone()))
    }
}

/// What a family says of its rotary embedding.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// Elements of a head.
    pub(crate) head: usize,
    /// θ where the config does not say.
    pub(crate) theta: f64,
    /// The share of a head that is rotated where the config does not say; none where all of it
    /// always is.
    pub(crate) partial: Option<f64>,
    /// P
    pub(crate) positions: usize,
    /// The kind of layers whose parameters are wanted, where each kind may have its own.
    pub(crate) layers: Option<&'static str>,
    /// The field of θ beside the parameters; older configs have it.
    pub(crate) theta_field: &'static str,
    /// The field of the rotated share beside the parameters; older configs have it.
    pub(crate) partial_field: &'static str,
    /// Whether the types `su` and `yarn` are older names of `longrope`.
    pub(crate) is_longrope: bool,
    /// Whether `rope_scaling` of older configs is about this one.
    pub(crate) scaled: bool,
    /// Whether `mscale_all_dim` scales scores, whatever the type.
    pub(crate) scores: bool,
    /// The field of the elements of a head that rotate.
    pub(crate) head_field: &'static str,
}

/// The names of the fields that [`read`] looks at, beside that of θ.
pub(crate) const FIELDS: [&str; 5] = [
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
];

const TYPES: [&str; 6] = ["default", "linear", "dynamic", "yarn", "longrope", "llama3"];

/// The fields inside `rope_parameters`.
const INSIDE: [&str; 15] = [
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "low_freq_factor",
];

/// Reads the rotary embedding of a config; what is wrong is reported there.
///
/// Version 5 writes `rope_parameters`, version 4 `rope_theta` and `rope_scaling`; one that is given
/// in the older form wins.
pub(crate) fn read(fields: &mut Fields<'_>, wanted: &Wanted) -> Rotary {
    let mut inside = Inside::open(fields, wanted);
    let theta = inside.fields.positive(wanted.theta_field, wanted.theta);
    let theta = inside.positive("rope_theta").unwrap_or(theta);
    let dim = inside.rotated(wanted);
    let kind = inside.kind(wanted.is_longrope);
    inside.parameters.insert("rope_type".into(), json!(kind));
    inside.parameters.insert("rope_theta".into(), json!(theta));
    let mut rotary = Rotary {
        dim,
        theta,
        scaling: Scaling::Default,
        gain: 1.0,
        score_gain: 1.0,
        parameters: Map::new(),
    };
    match kind {
        "linear" => {
            let stretch = 1.0 / inside.required("factor") - 1.0;
            let ramp = Ramp { offset: 1.0, by_pair: 0.0, by_frequency: 0.0, stretch };
            rotary.scaling = Scaling::Ramp(ramp);
        }
        "dynamic" => {
            let factor = inside.required("factor");
            if dim <= 2 {
                inside.wrong("E1105", "a dynamic base needs two pairs in a head");
            }
            rotary.scaling = Scaling::Dynamic { factor, positions: wanted.positions };
        }
        "yarn" => inside.yarn(wanted, &mut rotary),
        "longrope" => inside.longrope(wanted, &mut rotary),
        "llama3" => inside.llama3(wanted, &mut rotary),
        _ => {}
    }
    if wanted.scores && kind != "default" {
        rotary.score_gain = inside.score_gain();
    }
    inside.warn_of_unknown();
    rotary.parameters = inside.parameters;
    rotary
}

/// `0.1 · by · ln s + 1` for a text that is `factor` times as long.
fn mscale(factor: f64, by: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 }
}

/// The object of the parameters.
struct Inside<'f, 't> {
    fields: &'f mut Fields<'t>,
    key: &'static str,
    object: Map<String, Value>,
    /// What was read.
    parameters: Map<String, Value>,
}

impl<'f, 't> Inside<'f, 't> {
    fn open(fields: &'f mut Fields<'t>, wanted: &Wanted) -> Inside<'f, 't> {
        let older = fields.object("rope_scaling").filter(|o| !o.is_empty() && wanted.scaled);
        let key = if older.is_some() { "rope_scaling" } else { "rope_parameters" };
        let mut object = older.or_else(|| fields.object("rope_parameters")).unwrap_or_default();
        let is_nested = object.values().any(Value::is_object);
        if let (Some(layers), true) = (wanted.layers, is_nested) {
            object = object.get(layers).and_then(Value::as_object).cloned().unwrap_or_default();
        } else if wanted.layers.is_some() && !wanted.scaled && key == "rope_parameters" {
            // Parameters that are not told by kinds of layers are those of the others.
            object = Map::new();
        } else if is_nested {
            let headline = format!("`{key}` tells kinds of layers apart, which there are none of");
            let wrong = fields.wrong("E1107", key, headline);
            fields.report(wrong);
            object = Map::new();
        }
        Inside { fields, key, object, parameters: Map::new() }
    }

    fn wrong(&mut self, code: &'static str, headline: impl Into<String>) {
        let wrong = self.fields.wrong(code, self.key, headline);
        self.fields.report(wrong);
    }

    fn kind(&mut self, is_longrope: bool) -> &'static str {
        let word = |name: &str| self.object.get(name).and_then(Value::as_str);
        let kind = word("rope_type").or(word("type")).unwrap_or("default").to_owned();
        if is_longrope && ["su", "yarn"].contains(&kind.as_str()) {
            return "longrope";
        }
        TYPES.into_iter().find(|known| *known == kind).unwrap_or_else(|| {
            let headline = format!("rotary embeddings of type `{kind}` are not supported");
            let wrong = self.fields.wrong("E1107", self.key, headline);
            self.fields.report(wrong.help(format!("supported are {}", list(&TYPES))));
            "default"
        })
    }

    /// A number above zero, if it is given.
    fn positive(&mut self, name: &str) -> Option<f64> {
        let value = self.object.get(name).filter(|value| !value.is_null())?.clone();
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        match number {
            Some(number) => {
                self.parameters.insert(name.to_owned(), value);
                Some(number)
            }
            None => {
                let headline = format!("the `{name}` of `{}` is no number above 0", self.key);
                self.wrong("E1104", headline);
                None
            }
        }
    }

    fn required(&mut self, name: &str) -> f64 {
        if self.object.get(name).is_none_or(Value::is_null) {
            let headline = format!("`{}` has no `{name}`", self.key);
            self.wrong("E1104", headline);
        }
        self.positive(name).unwrap_or(1.0)
    }

    /// One number above zero for each pair.
    fn numbers(&mut self, name: &str, pairs: usize) -> Vec<f64> {
        let items = self.object.get(name).and_then(Value::as_array).cloned().unwrap_or_default();
        let number = |item: &Value| item.as_f64().filter(|n| n.is_finite() && *n > 0.0);
        let numbers: Option<Vec<f64>> = items.iter().map(number).collect();
        match numbers {
            Some(numbers) if numbers.len() == pairs => {
                self.parameters.insert(name.to_owned(), Value::Array(items));
                numbers
            }
            _ => {
                let key = self.key;
                let headline = format!("the `{name}` of `{key}` is no list of {pairs} numbers");
                let wrong = self.fields.wrong("E1105", key, format!("{headline} above 0"));
                self.fields.report(wrong.note(format!("a head has {pairs} pairs that rotate")));
                vec![1.0; pairs]
            }
        }
    }

    /// P₀: beside the parameters, inside them, or P.
    fn original(&mut self, wanted: &Wanted) -> usize {
        let name = "original_max_position_embeddings";
        let beside = self.fields.optional_size(&["original_max_position_embeddings"]);
        let inside = self.positive(name).filter(|n| n.fract() == 0.0).map(|n| n as usize);
        let original = beside.or(inside).unwrap_or(wanted.positions).max(1);
        self.parameters.insert(name.to_owned(), Value::Number(Number::from(original)));
        original
    }

    /// R.
    fn rotated(&mut self, wanted: &Wanted) -> usize {
        let partial = "partial_rotary_factor";
        let beside = self.fields.key_of_any([wanted.partial_field, partial]);
        let beside = beside.map(|field| self.fields.positive(field, 1.0));
        let given = self.positive(partial).or(beside);
        let share = given.or(wanted.partial).unwrap_or(1.0);
        if wanted.partial.is_none() && share != 1.0 {
            let headline = "heads that rotate in part are not supported in this kind of model";
            let key = if self.fields.given(partial) { partial } else { self.key };
            let wrong = self.fields.wrong("E1107", key, headline);
            self.fields.report(wrong);
            return wanted.head;
        }
        let rotated = (wanted.head as f64 * share) as usize;
        if rotated == 0 || rotated % 2 == 1 || rotated > wanted.head {
            let headline = match rotated == wanted.head {
                true => format!("heads of {rotated} numbers cannot be rotated in pairs"),
                false => format!("{rotated} of {} numbers cannot be rotated in pairs", wanted.head),
            };
            let given = self.fields.given(wanted.head_field);
            let key = if given { wanted.head_field } else { self.fields.key_of(&["hidden_size"]) };
            let wrong = self.fields.wrong("E1105", key, headline);
            self.fields.report(wrong.help(format!("write an even `{}`", wanted.head_field)));
            return (wanted.head + 1) & !1;
        }
        if wanted.partial.is_some() {
            self.parameters.insert(partial.to_owned(), json!(share));
        }
        rotated
    }

    /// As `yarn_apply_mscale` of transformers (`models/deepseek_v2`).
    fn score_gain(&mut self) -> f64 {
        let Some(all) = self.positive("mscale_all_dim") else { return 1.0 };
        mscale(self.required("factor"), all).powi(2)
    }

    fn yarn(&mut self, wanted: &Wanted, rotary: &mut Rotary) {
        let original = self.original(wanted) as f64;
        let factor = self.positive("factor").unwrap_or(wanted.positions as f64 / original);
        let (by, all) = (self.positive("mscale"), self.positive("mscale_all_dim"));
        let usual = match (by, all) {
            (Some(by), Some(all)) => mscale(factor, by) / mscale(factor, all),
            _ => mscale(factor, 1.0),
        };
        rotary.gain = self.positive("attention_factor").unwrap_or(usual);
        let (fast, slow) = (self.positive("beta_fast"), self.positive("beta_slow"));
        let (fast, slow) = (fast.unwrap_or(32.0), slow.unwrap_or(1.0));
        let truncate = self.object.get("truncate").and_then(Value::as_bool).unwrap_or(true);
        if !truncate {
            self.parameters.insert("truncate".into(), json!(false));
        }
        let dim = rotary.dim as f64;
        // The pair that turns so often within the original length.
        let pair = |turns: f64| dim * (original / (turns * TAU)).ln() / (2.0 * rotary.theta.ln());
        let (low, high) = (pair(fast), pair(slow));
        let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let by_pair = 1.0 / (high - low);
        if !by_pair.is_finite() {
            self.wrong("E1105", "yarn has no ramp between these frequencies");
            return;
        }
        let offset = -low * by_pair;
        let stretch = 1.0 / factor - 1.0;
        rotary.scaling = Scaling::Ramp(Ramp { offset, by_pair, by_frequency: 0.0, stretch });
    }

    fn longrope(&mut self, wanted: &Wanted, rotary: &mut Rotary) {
        let original = self.original(wanted);
        let pairs = rotary.dim / 2;
        let (short, long) =
            (self.numbers("short_factor", pairs), self.numbers("long_factor", pairs));
        let usual = wanted.positions as f64 / original as f64;
        let factor = self.positive("factor").unwrap_or(usual);
        let usual = (1.0 + factor.ln() / (original as f64).ln()).sqrt();
        let usual = if factor <= 1.0 { 1.0 } else { usual };
        rotary.gain = self.positive("attention_factor").unwrap_or(usual);
        if !rotary.gain.is_finite() {
            self.wrong("E1105", "an original length of one token has no attention factor");
            rotary.gain = 1.0;
        }
        rotary.scaling = Scaling::Factors { short, long, original };
    }

    fn llama3(&mut self, wanted: &Wanted, rotary: &mut Rotary) {
        let stretch = 1.0 / self.required("factor") - 1.0;
        let (low, high) = (self.required("low_freq_factor"), self.required("high_freq_factor"));
        let original = self.original(wanted) as f64;
        if high <= low {
            self.wrong("E1105", format!("`high_freq_factor` {high} is not above {low}"));
            return;
        }
        let (offset, by_frequency) = (high / (high - low), -original / (TAU * (high - low)));
        rotary.scaling = Scaling::Ramp(Ramp { offset, by_pair: 0.0, by_frequency, stretch });
    }

    fn warn_of_unknown(&mut self) {
        let known = |key: &str| INSIDE.contains(&key) || key == "high_freq_factor";
        let unknown: Vec<String> = self.object.keys().filter(|key| !known(key)).cloned().collect();
        for name in unknown {
            let known = INSIDE.into_iter().chain(["high_freq_factor"]);
            self.fields.warn_of_unknown(self.key, &name, known);
        }
    }
}
