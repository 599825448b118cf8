//! Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): a transformation of modules.
//!
//! `y = x W` becomes `y = x W + (α / r) · (x A) B` for each targeted weight `W` [in, out], with
//! two new weights `A` [r, in] and `B` [out, r]. Everything else is frozen. `B` starts as zeros, so
//! that the adapted model begins as the model that it adapts, and `A` is drawn with the variance
//! that peft draws it with. [`merge`](Adapter::merge) adds `(α / r) · B A` to `W` again.
//!
//! Targets are named as peft names modules, by the end of the tensor's name (`q_proj`, `c_attn`),
//! or as this module names weights (`wq`, or `q`). A tensor of which several weights are views,
//! such as GPT-2's `c_attn`, has one `A` and one `B`, as in peft, when it is named as a tensor;
//! weights that are named themselves have their own.

mod insert;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::import::{Init, Model, Weight};
use crate::module::{Function, Kind, ValueId};
use crate::op::{Einsum, Op};
use crate::{Diagnostic, Span};

/// The target that stands for every adaptable weight of the layers.
pub const ALL_LINEAR: &str = "all-linear";

/// The modules that are adapted where none are named: queries and values, as in the paper's
/// experiments (section 4.2).
const USUAL_TARGETS: [&str; 2] = ["q", "v"];

/// What is adapted, and by how much.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Lora {
    /// The rank `r` of what is added to each weight.
    pub rank: usize,
    /// What is added is scaled by α over the rank.
    pub alpha: f64,
    /// The weights or modules that are adapted.
    pub targets: Vec<String>,
    /// How frozen weights are stored; none for the type that products compute in.
    pub base: Option<Base>,
}

/// How frozen weights of products are stored (Dettmers et al. 2022 and 2023): they are converted to
/// the type that products compute in at each use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Base {
    /// 8 bits, and scales of rows or columns.
    Int8,
    /// NormalFloats of 4 bits, with a scale in f32 for each 64.
    Nf4,
    /// So, with double quantisation: scales in 8 bits, with a scale in f32 for each 256.
    Nf4Dq,
}

impl Base {
    /// All of them.
    pub const ALL: [Base; 3] = [Base::Int8, Base::Nf4, Base::Nf4Dq];

    /// The name in flags.
    pub fn name(self) -> &'static str {
        match self {
            Base::Int8 => "int8",
            Base::Nf4 => "nf4",
            Base::Nf4Dq => "nf4-dq",
        }
    }
}

impl Lora {
    /// What the product with `A` and `B` is multiplied by: α / r.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }
}

impl fmt::Display for Lora {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank={},alpha={},targets={}", self.rank, self.alpha, self.targets.join(","))?;
        self.base.map_or(Ok(()), |base| write!(f, ",weights={}", base.name()))
    }
}

impl From<Lora> for String {
    fn from(lora: Lora) -> String {
        lora.to_string()
    }
}

impl TryFrom<String> for Lora {
    type Error = String;

    fn try_from(text: String) -> Result<Lora, String> {
        text.parse()
    }
}

/// Reads `rank=8,alpha=16,targets=q,v`: what follows `targets=` are further targets. Without
/// `alpha` it is the rank, without `targets` they are `q` and `v`. `weights=nf4-dq` says how frozen
/// weights are stored.
impl FromStr for Lora {
    type Err = String;

    fn from_str(text: &str) -> Result<Lora, String> {
        let (mut rank, mut alpha, mut targets) = (None, None, Vec::<String>::new());
        let mut base = None;
        let mut in_targets = false;
        for item in text.split(',').map(str::trim) {
            let (key, value) = item.split_once('=').map_or((None, item), |(k, v)| (Some(k), v));
            if value.is_empty() {
                return Err(format!("`{item}` says nothing: write `rank=8,alpha=16,targets=q,v`"));
            }
            let is_target = key == Some("targets") || (key.is_none() && in_targets);
            in_targets = is_target;
            match key {
                _ if is_target => targets.push(value.to_owned()),
                Some("rank" | "r") => {
                    let number = value.parse().ok().filter(|rank| *rank > 0);
                    rank = Some(number.ok_or_else(|| format!("the rank `{value}` is no count"))?);
                }
                Some("alpha") => {
                    let number = value.parse().ok().filter(|a: &f64| a.is_finite() && *a > 0.0);
                    alpha = Some(number.ok_or_else(|| format!("alpha `{value}` is not positive"))?);
                }
                Some("weights") => {
                    let known = Base::ALL.into_iter().find(|base| base.name() == value);
                    let names = || Base::ALL.map(Base::name).join(", ");
                    let unknown = || format!("frozen weights are stored in one of {}", names());
                    base = Some(known.ok_or_else(unknown)?);
                }
                Some(other) => {
                    return Err(format!("`{other}` is none of rank, alpha, targets and weights"));
                }
                None => return Err(format!("`{item}` is none of rank=, alpha= and targets=")),
            }
        }
        let rank = rank.ok_or("a rank is missing: write `rank=8`")?;
        if targets.is_empty() {
            targets.extend(USUAL_TARGETS.map(str::to_owned));
        }
        Ok(Lora { rank, alpha: alpha.unwrap_or(rank as f64), targets, base })
    }
}

/// What was added to one weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// The weight that is adapted.
    pub weight: String,
    /// Its `A`, which may be that of other weights too.
    pub a: String,
    /// Its `B`.
    pub b: String,
    /// For each dim of the weight, whether products sum over it.
    pub contracted: Vec<bool>,
    /// The dims of the weight.
    pub dims: Vec<usize>,
}

impl Adapter {
    /// The weight with `scale · B A` added, all row-major.
    ///
    /// # Panics
    /// When the numbers are not those of tensors of these dims.
    pub fn merge(&self, weight: &[f64], a: &[f64], b: &[f64], scale: f64) -> Vec<f64> {
        let sizes = |is_in: bool| {
            let of = self.dims.iter().zip(&self.contracted).filter(|(_, c)| **c == is_in);
            of.map(|(size, _)| *size).product::<usize>()
        };
        let (inner, outer) = (sizes(true), sizes(false));
        let rank = a.len() / inner.max(1);
        assert_eq!(weight.len(), inner * outer, "the weight has the dims that were adapted");
        assert_eq!((a.len(), b.len()), (rank * inner, rank * outer), "A and B have one rank");
        let merged = |(at, before): (usize, &f64)| {
            let (mut rest, mut i, mut o) = (at, 0, 0);
            let (mut i_stride, mut o_stride) = (1, 1);
            for (size, contracted) in self.dims.iter().zip(&self.contracted).rev() {
                let (index, stride) = match contracted {
                    true => (&mut i, &mut i_stride),
                    false => (&mut o, &mut o_stride),
                };
                *index += rest % size * *stride;
                *stride *= size;
                rest /= size;
            }
            let sum: f64 = (0..rank).map(|r| b[o * rank + r] * a[r * inner + i]).sum();
            before + scale * sum
        };
        weight.iter().enumerate().map(merged).collect()
    }
}

/// A weight that can be adapted.
struct Candidate<'m> {
    weight: &'m Weight,
    /// For each dim, whether products sum over it.
    contracted: Vec<bool>,
}

impl Candidate<'_> {
    /// The name of the module that peft would adapt.
    fn module(&self) -> &str {
        module_of(self.weight)
    }

    /// The last part of the name of the weight.
    fn short(&self) -> &str {
        self.weight.name.rsplit('.').next().unwrap_or(&self.weight.name)
    }

    /// Whether a target is the end of the module's name.
    fn is_module(&self, target: &str) -> bool {
        let rest = self.module().strip_suffix(target);
        rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }

    /// Whether a target is the weight's own name.
    fn is_weight(&self, target: &str) -> bool {
        let short = self.short();
        let bare = short.strip_prefix("w_").or(short.strip_prefix('w'));
        target == self.weight.name || target == short || Some(target) == bare
    }

    /// Sizes of what products sum over, and of what they yield.
    fn sizes(&self) -> [usize; 2] {
        [true, false].map(|is_in| {
            let dims = self.weight.dims.iter().zip(&self.contracted);
            dims.filter(|(_, c)| **c == is_in).map(|(size, _)| *size).product()
        })
    }
}

fn module_of(weight: &Weight) -> &str {
    let name = weight.source.name();
    name.strip_suffix(".weight").unwrap_or(name)
}

/// Adapts a model: adds the weights and what they compute to every entry, and freezes all others.
///
/// # Errors
/// `E1201` for a target that matches no weight, `E1202` for a rank above the dims of a weight,
/// `E1203` for targets that adapt a layer in some of its calls only, `E1204` for frozen weights
/// that are stored in another type than they are computed with.
pub fn adapt(model: &mut Model, lora: &Lora) -> Result<Vec<Adapter>, Diagnostic> {
    if let Some(base) = lora.base {
        let headline =
            format!("frozen weights in {} are priced on GPUs, and not computed with", base.name());
        let help = "leave `weights=` out, or name GPUs";
        return Err(Diagnostic::error("E1204", Span::of("--lora"), headline).help(help));
    }
    let candidates = candidates(model);
    let groups = select(&candidates, lora)?;
    let mut added: BTreeMap<String, Added> = BTreeMap::new();
    let mut adapters = Vec::new();
    for group in groups.values() {
        let Some(first) = group.members.first().map(|at| &candidates[*at]) else { continue };
        let a = format!("{}.lora_a", first.weight.name);
        for (number, at) in group.members.iter().enumerate() {
            let candidate = &candidates[*at];
            let is_peft = group.is_module;
            let new_a = (number == 0).then(|| source::down(candidate, &a, lora.rank, is_peft));
            let b = source::up(candidate, lora.rank, is_peft);
            adapters.push(Adapter {
                weight: candidate.weight.name.clone(),
                a: a.clone(),
                b: b.name.clone(),
                contracted: candidate.contracted.clone(),
                dims: candidate.weight.dims.clone(),
            });
            added.insert(candidate.weight.name.clone(), Added { a: a.clone(), new_a, b });
        }
    }
    insert::insert(model, &added, lora)?;
    let trained: BTreeSet<&str> =
        adapters.iter().flat_map(|adapter| [adapter.a.as_str(), adapter.b.as_str()]).collect();
    let weights: BTreeSet<&str> = model.weights.iter().map(|w| w.name.as_str()).collect();
    let is_frozen = |name: &str| weights.contains(name) && !trained.contains(name);
    crate::freeze::freeze(&mut model.module, is_frozen);
    Ok(adapters)
}

/// How many numbers of a model are trained: those of its weights that no entry has frozen.
pub fn trained_count(model: &Model) -> u64 {
    let main = model.entries.first().and_then(|entry| model.module.function(entry));
    let is_frozen = |weight: &Weight| {
        let param = main.and_then(|main| Some(main.value(main.find(&weight.name)?)));
        param.is_some_and(|param| param.frozen)
    };
    model.weights.iter().filter(|weight| !is_frozen(weight)).map(Weight::count).sum()
}

/// What is added for one weight.
struct Added {
    /// The name of its `A`.
    a: String,
    /// The `A` itself, where no weight before has it.
    new_a: Option<Weight>,
    b: Weight,
}

/// Weights that share an `A`.
#[derive(Default)]
struct Group {
    members: Vec<usize>,
    /// Whether it is a whole module of peft.
    is_module: bool,
}

/// Whether a weight is all of its tensor that the model has, so that both are adapted alike.
fn is_alone(candidate: &Candidate<'_>, candidates: &[Candidate<'_>]) -> bool {
    let same = candidates.iter().filter(|other| other.module() == candidate.module());
    same.count() == 1 && candidate.weight.source.is_permuted()
}

/// The targeted candidates, by the module or weight that they are adapted as.
fn select(
    candidates: &[Candidate<'_>],
    lora: &Lora,
) -> Result<BTreeMap<(usize, String), Group>, Diagnostic> {
    let mut groups: BTreeMap<(usize, String), Group> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let is_of_layer = |c: &Candidate<'_>| c.weight.layer.is_some();
    for by_module in [true, false] {
        for (at, candidate) in candidates.iter().enumerate() {
            let is_meant = |target: &String| match by_module {
                true => {
                    candidate.is_module(target) || (target == ALL_LINEAR && is_of_layer(candidate))
                }
                false => candidate.is_weight(target),
            };
            if lora.targets.iter().any(is_meant) && seen.insert(at) {
                check_rank(candidate, lora.rank)?;
                let name = if by_module { candidate.module() } else { &candidate.weight.name };
                let layer = candidate.weight.layer.map_or(usize::MAX, |layer| layer);
                let group = groups.entry((layer, name.to_owned())).or_default();
                group.members.push(at);
                group.is_module = by_module || is_alone(candidate, candidates);
            }
        }
    }
    let matches = |target: &String| {
        candidates.iter().any(|candidate| match target.as_str() {
            ALL_LINEAR => is_of_layer(candidate),
            target => candidate.is_module(target) || candidate.is_weight(target),
        })
    };
    match lora.targets.iter().find(|target| !matches(target)) {
        Some(target) => Err(no_match(target, candidates)),
        None => Ok(groups),
    }
}

fn check_rank(candidate: &Candidate<'_>, rank: usize) -> Result<(), Diagnostic> {
    let [inner, outer] = candidate.sizes();
    if rank <= inner.min(outer) {
        return Ok(());
    }
    let name = &candidate.weight.name;
    let headline = format!("rank {rank} is more than `{name}` has: it is {inner} by {outer}");
    let help = format!("write `rank={}` or less", inner.min(outer));
    Err(Diagnostic::error("E1202", Span::of("--lora"), headline).help(help))
}

fn no_match(target: &str, candidates: &[Candidate<'_>]) -> Diagnostic {
    let mut names: Vec<&str> = Vec::new();
    for candidate in candidates {
        let module = candidate.module().rsplit('.').next().unwrap_or_default();
        for name in [candidate.short(), module] {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    let headline = format!("the target `{target}` is the name of no weight that can be adapted");
    let wrong = Diagnostic::error("E1201", Span::of("--lora"), headline);
    if names.is_empty() {
        return wrong.note("no weight of the model is only multiplied by activations");
    }
    wrong.help(format!("targets are {ALL_LINEAR}, {}", names.join(", ")))
}

/// The weights of a model that every reader multiplies with an activation.
fn candidates<'m>(model: &'m Model) -> Vec<Candidate<'m>> {
    let mut uses: BTreeMap<&str, Option<Vec<bool>>> = BTreeMap::new();
    for function in model.entries.iter().filter_map(|entry| model.module.function(entry)) {
        for node in &function.nodes {
            let callee = node.callee().and_then(|callee| model.module.function(callee));
            for (at, operand) in node.operands.iter().enumerate() {
                if operand.index() >= function.param_count {
                    continue;
                }
                let read = callee
                    .filter(|callee| callee.kind == Kind::Layer)
                    .and_then(|callee| contracted(callee, ValueId(at as u32)));
                let name = function.value(*operand).name.as_str();
                let known = uses.entry(name).or_insert_with(|| read.clone());
                if *known != read {
                    *known = None;
                }
            }
        }
    }
    let candidate = |weight: &'m Weight| {
        let contracted = uses.get(weight.name.as_str())?.clone()?;
        Some(Candidate { weight, contracted })
    };
    model.weights.iter().filter_map(candidate).collect()
}

/// For each dim of a parameter, whether products sum over it; none where something else than
/// products with activations reads it, or where one product sums over it and another does not.
fn contracted(function: &Function, param: ValueId) -> Option<Vec<bool>> {
    let mut found: Option<Vec<bool>> = None;
    if function.results.contains(&param) {
        return None;
    }
    for node in function.nodes.iter().filter(|node| node.operands.contains(&param)) {
        let Op::Contract(einsum) = &node.op else { return None };
        let split = split(einsum, node.operands.iter().position(|o| *o == param)?)?;
        if node.operands[0] == node.operands[1] || found.as_ref().is_some_and(|f| *f != split) {
            return None;
        }
        found = Some(split);
    }
    found
}

/// For each letter of one operand, whether it is summed over; none where a letter is one of both
/// operands and of the result, as of products of groups.
fn split(einsum: &Einsum, weight_at: usize) -> Option<Vec<bool>> {
    let (weight, other) = operands(einsum, weight_at);
    let is_summed = |letter: &char| match (other.contains(letter), einsum.result.contains(letter)) {
        (true, false) => Some(true),
        (false, true) => Some(false),
        _ => None,
    };
    let split: Vec<bool> = weight.iter().map(is_summed).collect::<Option<_>>()?;
    (split.contains(&true) && split.contains(&false)).then_some(split)
}

/// The letters of an operand, and those of the other.
fn operands(einsum: &Einsum, at: usize) -> (&[char], &[char]) {
    if at == 0 { (&einsum.a, &einsum.b) } else { (&einsum.b, &einsum.a) }
}

/// How `A` starts: peft draws it uniformly from ±1 / √in, whose variance this is.
fn init_of_a(inner: usize) -> Init {
    Init::Normal { std: 1.0 / (3.0 * inner as f64).sqrt(), zero_row: None }
}

#[cfg(test)]
mod tests;
