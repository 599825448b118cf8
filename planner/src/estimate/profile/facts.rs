//! Facts of an executor that users state on top of a profile.
//!
//! [`FACTS`] is the one table of them: flags are read from it, help and completions are made of it,
//! and every answer prints what it assumes from it. A fact changes bytes and times by
//! what it says of the software, never by a factor on the step.

mod apply;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use ir::import::nearest;
use serde::Serialize;

use super::{AttentionKernel, Exchange, NOTHING, ProductKernels, Profile};
use crate::quantity::Unit;
use apply::{
    adafactor, adam, flash, gradients, graphs, masters, moments, muon, overlaps_tensor, reduces,
    sgd, weights,
};

/// How the moments of a parameter are kept, and what an update computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Update {
    /// Element by element.
    #[default]
    Elements,
    /// Second moments of a matrix are sums of its rows and columns (Shazeer and Stern 2018).
    Factored,
    /// The momentum of a layer's matrix is made orthogonal (Jordan et al. 2024); embedding, head
    /// and vectors have Adam's moments.
    Orthogonal,
}

/// How the operations of a step are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Counted {
    /// Those of products and attention, forward and backward.
    #[default]
    Products,
    /// Six for a parameter that a token visits.
    Parameters,
    /// These, and attention's.
    ParametersAndAttention,
}

/// What a user stated, and what follows from it that no release's profile says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stated {
    values: [Option<Value>; COUNT],
    /// What an update computes.
    pub update: Update,
    /// Bytes of a parameter's moments, where they are not the usual ones.
    pub moments_bytes: Option<f64>,
    /// Bytes of an element of a product's input that is kept for the backward pass.
    pub saved_bytes: Option<f64>,
    /// Share of what an allocator holds for values that come and go, and cannot use.
    pub fragmentation: f64,
    /// Expert load imbalance: the busiest rank's tokens over the mean.
    pub imbalance: Option<f64>,
    /// How much slower the slowest device is than the mean.
    pub straggler: Option<f64>,
    /// Power limit of a device, in watts.
    pub power_w: Option<f64>,
    /// How operations are counted in MFU.
    pub counted: Counted,
    /// Whether causal attention counts as attention to all tokens in MFU.
    pub counts_masked: bool,
    /// Whether MFU is against the peak with structured sparsity, twice the dense one.
    pub sparse_peak: bool,
}

/// What is stated of one fact.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Value {
    /// A word of its list.
    Word(usize),
    /// A number.
    Number(f64),
}

/// A word that a fact can be stated with.
#[derive(Debug)]
pub struct Word {
    /// As it is written.
    pub name: &'static str,
    /// What it means.
    pub means: &'static str,
    apply: fn(&mut Profile),
}

/// A number that a fact can be stated with.
#[derive(Debug)]
struct Number {
    /// How it is written, in help.
    form: &'static str,
    /// What is possible, for people.
    range: &'static str,
    read: fn(&str) -> Option<f64>,
    apply: fn(&mut Profile, f64),
}

/// A fact that users can state.
#[derive(Debug)]
pub struct Fact {
    /// As it is written.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// Whether the tool's own configuration sets it: files that start a tool would have to say it.
    pub configured: bool,
    /// Whether the price of inference depends on it, too.
    pub inference: bool,
    /// The words that it can be; `yes` may be left out where it is one.
    pub words: &'static [Word],
    number: Option<Number>,
    shown: fn(&Profile) -> String,
}

/// A fact as an answer prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Assumption {
    /// The fact.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// Whether the user stated it.
    pub stated: bool,
}

const fn word(name: &'static str, means: &'static str, apply: fn(&mut Profile)) -> Word {
    Word { name, means, apply }
}

const fn bytes_of(apply: fn(&mut Profile, f64)) -> Option<Number> {
    let range = "from 0 to 16 bytes a parameter";
    Some(Number { form: "BYTES", range, read: read_bytes_of_parameter, apply })
}

const COUNT: usize = 22;

/// All facts, in the order in which they are applied and printed: the optimizer goes before its
/// moments.
pub const FACTS: [Fact; COUNT] = [
    Fact {
        name: "weights",
        about: "Weights that products read, for each parameter",
        configured: true,
        inference: false,
        words: &[
            word("bf16", "2 bytes", |p| weights(p, 2.0)),
            word("f32", "4 bytes", |p| weights(p, 4.0)),
        ],
        number: bytes_of(weights),
        shown: |p| bytes_text(p.weight_bytes),
    },
    Fact {
        name: "gradients",
        about: "Gradients as they are held; they are exchanged so too, unless `reduce` is stated",
        configured: true,
        inference: false,
        words: &[
            word("bf16", "2 bytes", |p| gradients(p, 2.0)),
            word("f32", "4 bytes", |p| gradients(p, 4.0)),
        ],
        number: bytes_of(gradients),
        shown: |p| bytes_text(p.gradient_bytes),
    },
    Fact {
        name: "reduce",
        about: "Gradients as they are exchanged over data-parallel ranks",
        configured: true,
        inference: false,
        words: &[
            word("bf16", "2 bytes", |p| reduces(p, 2.0)),
            word("f32", "4 bytes", |p| reduces(p, 4.0)),
        ],
        number: None,
        shown: |p| bytes_text(p.exchange_bytes),
    },
    Fact {
        name: "optimizer",
        about: "The optimizer: its moments, and what an update reads, writes and computes",
        configured: true,
        inference: false,
        words: &[
            word("adamw", "two moments in f32: 8 bytes", |p| adam(p, 8.0)),
            word(
                "adam-8bit",
                "bitsandbytes: two moments in 8 bits, with a scale in f32 for each 256: 2.03 bytes",
                |p| adam(p, 2.0 * (1.0 + 4.0 / 256.0)),
            ),
            word("adam-bf16", "two moments in bf16: 4 bytes", |p| adam(p, 4.0)),
            word(
                "muon",
                "a momentum in f32 for matrices of layers, made orthogonal by five Newton-Schulz \
                 steps; adamw for the rest",
                muon,
            ),
            word(
                "adafactor",
                "no first moment; the second as sums of rows and columns in f32",
                adafactor,
            ),
            word("sgd-momentum", "one moment in f32: 4 bytes", |p| sgd(p, 4.0)),
            word("sgd", "no moment", |p| sgd(p, 0.0)),
        ],
        number: None,
        shown: apply::optimizer_text,
    },
    Fact {
        name: "moments",
        about: "Moments of an optimizer that has them for each parameter",
        configured: true,
        inference: false,
        words: &[],
        number: bytes_of(moments),
        shown: apply::moments_text,
    },
    Fact {
        name: "masters",
        about: "Master weights, beside the weights that products read",
        configured: true,
        inference: false,
        words: &[
            word("f32", "4 bytes, where the weights themselves are narrower", |p| {
                if p.weight_bytes < 4.0 && p.master_bytes() < 2.0 {
                    masters(p, 4.0);
                }
            }),
            word("none", "the optimizer updates the weights themselves", |p| masters(p, 0.0)),
        ],
        number: bytes_of(masters),
        shown: |p| bytes_text(p.master_bytes()),
    },
    Fact {
        name: "products",
        about: "The tensor-core instructions of products",
        configured: false,
        inference: true,
        words: &[
            word("fastest", "those that the device's library is timed with", |p| {
                p.products = ProductKernels::Fastest;
            }),
            word("mma-sync", "those of a warp, of which devices from Hopper on reach less", |p| {
                p.products = ProductKernels::MmaSync;
            }),
        ],
        number: None,
        shown: |p| match p.products {
            ProductKernels::Fastest => "fastest".to_owned(),
            ProductKernels::MmaSync => "mma-sync".to_owned(),
        },
    },
    Fact {
        name: "attention",
        about: "The inside of attention",
        configured: true,
        inference: true,
        words: &[
            word("materialised", "scores in memory; mask and softmax are kernels", |p| {
                p.attention = AttentionKernel::Separate;
            }),
            word(
                "fused-softmax",
                "scores in memory; scale, mask and softmax are one kernel",
                |p| {
                    p.attention = AttentionKernel::FusedSoftmax;
                },
            ),
            word("flash-1", "FlashAttention", |p| flash(p, AttentionKernel::Flash1)),
            word("flash-2", "FlashAttention-2", |p| flash(p, AttentionKernel::Flash2)),
            word("flash-best", "FlashAttention-3 on Hopper, the vendor's library elsewhere", |p| {
                flash(p, AttentionKernel::FlashBest);
            }),
        ],
        number: None,
        shown: |p| attention_word(p.attention).to_owned(),
    },
    Fact {
        name: "attention-copies",
        about: "Whether queries, keys and values are laid out anew around fused attention",
        configured: false,
        inference: true,
        words: &[word("no", "kernels read them where they lie", |p| {
            p.around_attention = NOTHING;
        })],
        number: None,
        shown: |p| yes_no(p.around_attention != NOTHING),
    },
    Fact {
        name: "overlap-gradients",
        about: "Whether gradients are reduced beside the backward pass",
        configured: true,
        inference: false,
        words: &[
            word("yes", "beside it", |p| p.gradients = Exchange::Overlapped),
            word("no", "after it", |p| p.gradients = Exchange::AtEnd),
        ],
        number: None,
        shown: |p| yes_no(p.gradients == Exchange::Overlapped),
    },
    Fact {
        name: "overlap-weights",
        about: "Whether sharded weights are gathered beside computation",
        configured: true,
        inference: false,
        words: &[
            word("yes", "beside it", |p| {
                (p.weights, p.backward_weights) = (Exchange::Overlapped, Exchange::Overlapped);
            }),
            word("no", "before it", |p| {
                (p.weights, p.backward_weights) = (Exchange::AtEnd, Exchange::AtEnd);
            }),
        ],
        number: None,
        shown: |p| match (p.weights, p.backward_weights) {
            (Exchange::Overlapped, Exchange::AtEnd) => "in the forward pass alone".to_owned(),
            (weights, _) => yes_no(weights == Exchange::Overlapped),
        },
    },
    Fact {
        name: "overlap-tp",
        about: "Share of the collectives of tensor parallelism that run beside products",
        configured: true,
        inference: true,
        words: &[word("no", "none", |p| overlaps_tensor(p, 0.0))],
        number: Some(Number {
            form: "SHARE",
            range: "a share from 0 to 1, as 0.7 or 70%",
            read: |text| read_share(text).filter(|share| *share <= 1.0),
            apply: overlaps_tensor,
        }),
        shown: apply::tensor_text,
    },
    Fact {
        name: "cuda-graphs",
        about: "Whether kernels are launched as graphs, so that the host takes no time",
        configured: true,
        inference: true,
        words: &[
            word("yes", "as graphs", |p| graphs(p, true)),
            word("no", "one by one: 50 µs a launch, as PyTorch without compilation", |p| {
                graphs(p, false);
            }),
        ],
        number: None,
        shown: apply::host_text,
    },
    Fact {
        name: "saved",
        about: "Inputs of products that are kept for the backward pass",
        configured: true,
        inference: false,
        words: &[
            word("computed", "in the type that the product read", |p| p.stated.saved_bytes = None),
            word("f8", "in 1 byte, cast by kernels of their own", |p| {
                p.stated.saved_bytes = Some(1.0);
            }),
        ],
        number: None,
        shown: |p| match p.stated.saved_bytes {
            None => "computed".to_owned(),
            Some(bytes) => format!("{bytes} byte an element"),
        },
    },
    Fact {
        name: "fragmentation",
        about: "Share of the memory for activations and temporaries that the allocator cannot use",
        configured: false,
        inference: false,
        words: &[],
        number: Some(Number {
            form: "SHARE",
            range: "a share from 0 to 0.9, as 0.1 or 10%",
            read: |text| read_share(text).filter(|share| *share <= 0.9),
            apply: |p, share| p.stated.fragmentation = share,
        }),
        shown: |p| percent(p.stated.fragmentation),
    },
    Fact {
        name: "reserve",
        about: "Memory of a device for context, libraries and communicators (NCCL)",
        configured: false,
        inference: true,
        words: &[],
        number: Some(Number {
            form: "SIZE",
            range: "bytes with a unit, as 2GiB or 500MB",
            read: |text| Unit::Bytes.parse(text),
            apply: |p, bytes| p.reserve_bytes = bytes,
        }),
        shown: |p| size_text(p.reserve_bytes),
    },
    Fact {
        name: "imbalance",
        about: "Expert load imbalance: the busiest rank's tokens over the mean",
        configured: false,
        inference: true,
        words: &[],
        number: Some(Number {
            form: "TIMES",
            range: "a number from 1 to 1024",
            read: |text| text.parse().ok().filter(|times| (1.0..=1024.0).contains(times)),
            apply: |p, times| p.stated.imbalance = Some(times),
        }),
        shown: |p| format!("{}", p.stated.imbalance.unwrap_or(1.0)),
    },
    Fact {
        name: "straggler",
        about: "How much slower the products and attention of the slowest device are than the mean",
        configured: false,
        inference: true,
        words: &[],
        number: Some(Number {
            form: "SHARE",
            range: "a share from 0 to 10, as 0.03 or 3%",
            read: |text| read_share(text).filter(|share| *share <= 10.0),
            apply: |p, share| p.stated.straggler = Some(share),
        }),
        shown: |p| match p.stated.straggler {
            None => "grows with the devices (Sinha et al. 2022)".to_owned(),
            Some(share) => percent(share),
        },
    },
    Fact {
        name: "power",
        about: "Power limit of a device: clocks of products and attention follow its square root",
        configured: false,
        inference: true,
        words: &[],
        number: Some(Number {
            form: "WATTS",
            range: "more than 0 W, as 500W",
            read: |text| Unit::Watts.parse(text).filter(|watts| *watts > 0.0),
            apply: |p, watts| p.stated.power_w = Some(watts),
        }),
        shown: |p| match p.stated.power_w {
            None => "that of the datasheet".to_owned(),
            Some(watts) => format!("{watts} W"),
        },
    },
    Fact {
        name: "flops",
        about: "Operations that MFU counts",
        configured: false,
        inference: false,
        words: &[
            word("products", "2 for each multiply-add of products and attention, times 3", |p| {
                p.stated.counted = Counted::Products;
            }),
            word("6n", "6 for each parameter that a token visits", |p| {
                p.stated.counted = Counted::Parameters;
            }),
            word("6n+attention", "these, and those of attention", |p| {
                p.stated.counted = Counted::ParametersAndAttention;
            }),
        ],
        number: None,
        shown: |p| match p.stated.counted {
            Counted::Products => "products".to_owned(),
            Counted::Parameters => "6n".to_owned(),
            Counted::ParametersAndAttention => "6n+attention".to_owned(),
        },
    },
    Fact {
        name: "causal",
        about: "How MFU counts causal attention",
        configured: false,
        inference: false,
        words: &[
            word("half", "the half that is seen", |p| p.stated.counts_masked = false),
            word("full", "as attention to all tokens", |p| p.stated.counts_masked = true),
        ],
        number: None,
        shown: |p| if p.stated.counts_masked { "full" } else { "half" }.to_owned(),
    },
    Fact {
        name: "peak",
        about: "The peak of the hardware that MFU is against",
        configured: false,
        inference: false,
        words: &[
            word("dense", "of dense products", |p| p.stated.sparse_peak = false),
            word("sparse", "twice that: structured sparsity", |p| p.stated.sparse_peak = true),
        ],
        number: None,
        shown: |p| if p.stated.sparse_peak { "sparse" } else { "dense" }.to_owned(),
    },
];

/// Facts that cannot both be stated, with a word of the first where it is about one, and why.
const CONTRADICTIONS: [(&str, Option<&str>, &str, &str); 8] = [
    ("optimizer", Some("sgd"), "moments", "sgd has no moments"),
    ("optimizer", Some("muon"), "moments", "muon has other moments for matrices and the rest"),
    ("optimizer", Some("adafactor"), "moments", "adafactor has no moments for each parameter"),
    ("optimizer", Some("adam-8bit"), "moments", "it says the bytes of its moments"),
    ("optimizer", Some("adam-bf16"), "moments", "it says the bytes of its moments"),
    ("attention", Some("materialised"), "attention-copies", "only fused attention has them"),
    ("attention", Some("fused-softmax"), "attention-copies", "only fused attention has them"),
    ("flops", Some("6n"), "causal", "6n counts no attention"),
];

impl Stated {
    /// Nothing: a profile as its release has it.
    pub const NOTHING: Stated = Stated {
        values: [None; COUNT],
        update: Update::Elements,
        moments_bytes: None,
        saved_bytes: None,
        fragmentation: 0.0,
        imbalance: None,
        straggler: None,
        power_w: None,
        counted: Counted::Products,
        counts_masked: false,
        sparse_peak: false,
    };

    /// Whether nothing is stated.
    pub fn is_empty(&self) -> bool {
        self.values.iter().all(Option::is_none)
    }

    /// Reads facts one by one: `optimizer=adam-8bit`, `cuda-graphs`.
    ///
    /// # Errors
    /// What is wrong with each, and the way out.
    pub fn read(texts: &[String]) -> Result<Stated, Vec<(String, String)>> {
        let mut stated = Stated::NOTHING;
        let mut wrong = Vec::new();
        for text in texts.iter().map(|text| text.trim()) {
            match read_one(text) {
                Ok((at, _)) if stated.values[at].is_some() => {
                    let headline = format!("`{}` is stated twice", FACTS[at].name);
                    wrong.push((headline, "state it once".to_owned()));
                }
                Ok((at, value)) => stated.values[at] = Some(value),
                Err(why) => wrong.push(why),
            }
        }
        wrong.extend(stated.contradictions());
        if wrong.is_empty() { Ok(stated) } else { Err(wrong) }
    }

    fn contradictions(&self) -> Vec<(String, String)> {
        let place = |name: &str| FACTS.iter().position(|fact| fact.name == name);
        let said = |name: &str| self.values[place(name)?];
        let broken = CONTRADICTIONS.iter().filter(|(one, word, other, _)| {
            let is_said = match (said(one), word) {
                (Some(Value::Word(at)), Some(word)) => {
                    place(one).is_some_and(|fact| FACTS[fact].words[at].name == *word)
                }
                (said, None) => said.is_some(),
                (_, Some(_)) => false,
            };
            is_said && said(other).is_some()
        });
        let text = |(one, word, other, why): &(&str, Option<&str>, &str, &str)| {
            let one = word.map_or((*one).to_owned(), |word| format!("{one}={word}"));
            (format!("`{one}` and `{other}` contradict each other: {why}"), "leave one out".into())
        };
        broken.map(text).collect()
    }

    /// Of the facts that are stated, those that a tool's own configuration sets.
    pub fn configured(&self) -> Vec<&'static str> {
        let stated = FACTS.iter().zip(&self.values).filter(|(_, value)| value.is_some());
        stated.filter(|(fact, _)| fact.configured).map(|(fact, _)| fact.name).collect()
    }

    /// Of the facts that are stated, those that the price of inference does not depend on.
    pub fn of_training(&self) -> Vec<&'static str> {
        let stated = FACTS.iter().zip(&self.values).filter(|(_, value)| value.is_some());
        stated.filter(|(fact, _)| !fact.inference).map(|(fact, _)| fact.name).collect()
    }

    /// Whether one fact is stated.
    pub fn says(&self, name: &str) -> bool {
        FACTS.iter().zip(&self.values).any(|(fact, value)| fact.name == name && value.is_some())
    }

    /// The word that one fact is stated with.
    fn word(&self, name: &str) -> Option<&'static str> {
        let all = FACTS.iter().zip(&self.values);
        let (fact, value) = all.into_iter().find(|(fact, _)| fact.name == name)?;
        if let Some(Value::Word(at)) = value { Some(fact.words[*at].name) } else { None }
    }

    /// The number that a fact is stated with, before a profile has it: `imbalance`, `power`.
    pub fn number(&self, name: &str) -> Option<f64> {
        let all = FACTS.iter().zip(&self.values);
        let value = all.filter(|(fact, _)| fact.name == name).find_map(|(_, value)| *value);
        if let Some(Value::Number(number)) = value { Some(number) } else { None }
    }

    /// The profile with these facts, which are applied in its arithmetic.
    pub(super) fn applied(self, mut profile: Profile) -> Profile {
        for (fact, value) in FACTS.iter().zip(self.values) {
            match (value, &fact.number) {
                (Some(Value::Word(at)), _) => (fact.words[at].apply)(&mut profile),
                (Some(Value::Number(number)), Some(form)) => (form.apply)(&mut profile, number),
                (Some(Value::Number(_)), None) | (None, _) => {}
            }
        }
        profile
    }
}

/// As `--assume` takes it.
impl fmt::Display for Stated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = FACTS.iter().zip(&self.values).filter_map(|(fact, value)| {
            Some(match (*value)? {
                Value::Word(at) => format!("{}={}", fact.name, fact.words[at].name),
                Value::Number(number) => format!("{}={number}", fact.name),
            })
        });
        f.write_str(&said.collect::<Vec<_>>().join(","))
    }
}

impl Profile {
    /// What the profile assumes, fact by fact; `self` is in its arithmetic.
    pub fn assumptions(&self) -> Vec<Assumption> {
        self.assumptions_where(|_| true)
    }

    /// Those of them that the price of inference depends on.
    pub fn assumptions_of_inference(&self) -> Vec<Assumption> {
        self.assumptions_where(|fact| fact.inference)
    }

    fn assumptions_where(&self, is_asked: impl Fn(&Fact) -> bool) -> Vec<Assumption> {
        let line = |(fact, value): (&Fact, &Option<Value>)| Assumption {
            name: fact.name,
            value: (fact.shown)(self),
            stated: value.is_some(),
        };
        let all = FACTS.iter().zip(&self.stated.values);
        all.filter(|(fact, _)| is_asked(fact)).map(line).collect()
    }
}

/// Everything that can be stated, as a shell completes it: words whole, numbers up to their `=`.
pub fn completions() -> &'static [(String, &'static str)] {
    static WRITTEN: OnceLock<Vec<(String, &str)>> = OnceLock::new();
    WRITTEN.get_or_init(|| {
        let mut all = Vec::new();
        for fact in &FACTS {
            for word in fact.words {
                all.push((format!("{}={}", fact.name, word.name), word.means));
            }
            if fact.number.is_some() {
                all.push((format!("{}=", fact.name), fact.about));
            }
        }
        all
    })
}

/// The table for people, a fact and its words a line each.
pub fn table() -> String {
    let mut text = String::new();
    for fact in &FACTS {
        let number = fact.number.as_ref().map(|number| format!("={}", number.form));
        let inference = if fact.inference { " (also in inference)" } else { "" };
        let number = number.unwrap_or_default();
        text += &format!("  {}{number}: {}{inference}\n", fact.name, fact.about);
        for word in fact.words {
            text += &format!("    {:<14} {}\n", word.name, word.means);
        }
    }
    text
}

/// Reads one fact: its place in the table, and its value.
fn read_one(text: &str) -> Result<(usize, Value), (String, String)> {
    let (name, value) = text.split_once('=').unwrap_or((text, "yes"));
    let Some(at) = FACTS.iter().position(|fact| fact.name == name) else {
        let names = || FACTS.iter().map(|fact| fact.name);
        let near = nearest(name, names()).map(|near| format!("did you mean `{near}`? "));
        let all = names().collect::<Vec<_>>().join(", ");
        let help = format!("{}facts are {all}", near.unwrap_or_default());
        return Err((format!("no fact is called `{name}`"), help));
    };
    let fact = &FACTS[at];
    if let Some(word) = fact.words.iter().position(|word| word.name == value) {
        return Ok((at, Value::Word(word)));
    }
    if let Some(number) = fact.number.as_ref().and_then(|number| (number.read)(value)) {
        return Ok((at, Value::Number(number)));
    }
    let words = || fact.words.iter().map(|word| word.name);
    let near = nearest(value, words()).map(|near| format!("did you mean `{near}`? "));
    let mut forms: Vec<String> = words().map(str::to_owned).collect();
    forms.extend(fact.number.as_ref().map(|number| number.range.to_owned()));
    let headline = match text.contains('=') {
        true => format!("`{name}` is not `{value}`"),
        false => format!("`{name}` says nothing alone"),
    };
    Err((headline, format!("{}it is one of: {}", near.unwrap_or_default(), forms.join(", "))))
}

impl FromStr for Stated {
    type Err = Vec<(String, String)>;

    fn from_str(text: &str) -> Result<Stated, Self::Err> {
        let texts: Vec<String> = text.split(',').map(str::to_owned).collect();
        Stated::read(&texts)
    }
}

fn read_share(text: &str) -> Option<f64> {
    let (digits, factor) = text.strip_suffix('%').map_or((text, 1.0), |digits| (digits, 0.01));
    let share: f64 = digits.trim_end().parse().ok()?;
    (share.is_finite() && share >= 0.0).then_some(share * factor)
}

fn read_bytes_of_parameter(text: &str) -> Option<f64> {
    text.parse().ok().filter(|bytes| (0.0..=16.0).contains(bytes))
}

fn attention_word(kernel: AttentionKernel) -> &'static str {
    match kernel {
        AttentionKernel::Separate => "materialised",
        AttentionKernel::FusedSoftmax => "fused-softmax",
        AttentionKernel::Flash1 => "flash-1",
        AttentionKernel::Flash2 => "flash-2",
        AttentionKernel::FlashBest => "flash-best",
    }
}

fn yes_no(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.to_owned()
}

fn percent(share: f64) -> String {
    // To two digits, without noise of the last ones.
    format!("{}%", (share * 1e4).round() / 100.0)
}

fn bytes_text(bytes: f64) -> String {
    let bytes = (bytes * 1e4).round() / 1e4;
    format!("{bytes} bytes a parameter")
}

fn size_text(bytes: f64) -> String {
    format!("{:.2} GiB", bytes / 1_073_741_824.0)
}
