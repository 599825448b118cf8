//! The weights of a model of a family, and where checkpoints have them.
//!
//! A weight is a view of a tensor. Both are written as lists of dims, each a product of axes, as in
//! `attn.wk [H, D, M] … self_attn.qkv.weight [G 3@1 D, M]`:
//!
//! | axis of the tensor | is |
//! |---|---|
//! | `H` | an axis of the weight, found by its text: its size is that expression |
//! | `3@1` | of 3 entries the one numbered 1 |
//! | `H@G:N` | of N entries the H that begin at G, an axis `H` of the weight |
//! | `(H D)@G:N` | of N entries the H · D that begin at G, two axes of the weight |
//!
//! The outermost axis of a weight may be several tensors: `experts.{E}.w1.weight [F, M]` of a
//! weight `[E, F, M]`.
//!
//! So a fused matrix is split, axes change places (a transposition), and a split axis changes
//! places with its other half (the pairs of a rotary embedding).

use super::expr::{Expr, Scope};
use super::{FamilyModel, Section, WeightInit, WeightRule};
use crate::import::{Init, Source, Weight};

/// The weights of a model, by the function that takes them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Weights {
    /// Of `embed`; the first is the table of tokens.
    pub(crate) embed: Vec<Weight>,
    /// Of `block`, for each layer.
    pub(crate) layers: Vec<Vec<Weight>>,
    /// Of `head`; the last is `lm_head`, unless it is tied to the table of tokens.
    pub(crate) head: Vec<Weight>,
    /// Whether it is.
    pub(crate) tied: bool,
}

impl Weights {
    /// All, in the order of the entries' parameters.
    pub(crate) fn all(self) -> Vec<Weight> {
        let layers = self.layers.into_iter().flatten();
        self.embed.into_iter().chain(layers).chain(self.head).collect()
    }
}

/// The matrix of the head, which may be the table of tokens.
const HEAD: &str = "lm_head";

impl FamilyModel {
    /// The names of `model` with the symbols that are the layer's own.
    pub(crate) fn scope_of(&self, layer: usize) -> Scope {
        let own = self.layers.get(layer).into_iter().flatten();
        let own = own.map(|(name, value)| (name.clone(), value.clone()));
        self.scope.clone().into_iter().chain(own).collect()
    }

    /// The weights.
    pub(crate) fn weights(&self) -> Weights {
        let tied = self.flag("tied");
        let mut weights = Weights { tied, ..Weights::default() };
        for rule in self.rules_of(Section::Embed, &self.scope) {
            weights.embed.extend(weights_of(rule, &self.scope, None));
        }
        for layer in 0..self.layers.len() {
            let scope = self.scope_of(layer);
            let rules = self.rules_of(Section::Layer, &scope);
            weights.layers.push(rules.flat_map(|r| weights_of(r, &scope, Some(layer))).collect());
        }
        for rule in self.rules_of(Section::Head, &self.scope) {
            if tied && rule.name == HEAD {
                let table = weights.embed.first_mut().map(|table| &mut table.source.names);
                table.into_iter().for_each(|names| names.extend(rule.tensor.names.clone()));
            } else {
                weights.head.extend(weights_of(rule, &self.scope, None));
            }
        }
        weights
    }

    fn rules_of<'s>(
        &self,
        section: Section,
        scope: &'s Scope,
    ) -> impl Iterator<Item = &'static WeightRule> + use<'s> {
        let rules = self.family.weights.iter().filter(move |rule| rule.section == section);
        rules.filter(|rule| {
            let holds = rule.condition.as_ref().map(|condition| condition.holds(scope));
            known(rule.name, holds.unwrap_or(Ok(true)))
        })
    }
}

/// What a family file computes from its own symbols.
fn known<T>(what: &str, value: Result<T, String>) -> T {
    value.unwrap_or_else(|why| panic!("the family's weight `{what}`: {why}"))
}

/// The sizes of all tensors of a model that differ, each with a name, for a check that they can be
/// counted with at all. Tensors whose sizes follow from a wrong config are left out.
pub(super) fn largest_tensors(model: &FamilyModel) -> Vec<(String, Vec<usize>)> {
    let mut found = Vec::new();
    let kinds = model.kinds();
    let firsts = (0..kinds.len()).filter(|layer| !kinds[..*layer].contains(&kinds[*layer]));
    let scopes = firsts.map(|layer| (Section::Layer, model.scope_of(layer)));
    let ends = [Section::Embed, Section::Head].map(|section| (section, model.scope.clone()));
    for (section, scope) in ends.into_iter().chain(scopes) {
        for rule in model.rules_of(section, &scope) {
            let dims = rule.tensor.dims.as_ref().unwrap_or(&rule.dims);
            let sizes = dims.iter().flatten().map(|axis| Ok(read_axis(axis, &scope)?.total));
            let sizes: Result<Vec<usize>, String> = sizes.collect();
            found.extend(sizes.map(|sizes| (format!("`{}`", rule.tensor.names[0]), sizes)));
        }
    }
    found
}

/// An axis of a tensor.
struct Axis<'t> {
    /// The axes of the weight that it is, the outermost first, each with its entries.
    parts: Vec<(&'t str, usize)>,
    /// Entries of the tensor, and the first that belongs to the weight.
    total: usize,
    start: usize,
}

fn read_axis<'t>(text: &'t str, scope: &Scope) -> Result<Axis<'t>, String> {
    let size = |text: &str| -> Result<usize, String> {
        let value = Expr::parse(text)?.eval(scope)?;
        value.size().ok_or_else(|| format!("`{text}` is {value}, no size"))
    };
    let Some((of, place)) = text.split_once('@') else {
        let size = size(text)?;
        return Ok(Axis { parts: vec![(text, size)], total: size, start: 0 });
    };
    let Some((start, total)) = place.split_once(':') else {
        return Ok(Axis { parts: Vec::new(), total: size(of)?, start: size(place)? });
    };
    // One axis may be an expression in brackets: a group of several has spaces.
    let inside = of.strip_prefix('(').and_then(|of| of.strip_suffix(')'));
    let of = inside.filter(|of| of.contains(' ')).map_or(vec![of], |of| of.split(' ').collect());
    let parts = of.into_iter().map(|of| Ok((of, size(of)?))).collect::<Result<_, String>>()?;
    Ok(Axis { parts, total: size(total)?, start: size(start)? })
}

/// The weights that a rule stands for: one, or several that are numbered.
fn weights_of(rule: &WeightRule, scope: &Scope, layer: Option<usize>) -> Vec<Weight> {
    let weight = known(rule.name, try_weight(rule, scope, layer));
    let Some(count) = &rule.count else { return vec![weight] };
    let count = known(rule.name, count.eval(scope)).size().unwrap_or(0);
    let numbered = |i: usize| {
        let mut weight = weight.clone();
        let names = std::iter::once(&mut weight.name).chain(&mut weight.source.names);
        names.for_each(|name| *name = name.replace("{i}", &i.to_string()));
        weight
    };
    (0..count).map(numbered).collect()
}

fn try_weight(rule: &WeightRule, scope: &Scope, layer: Option<usize>) -> Result<Weight, String> {
    let frozen = matches!(rule.init, WeightInit::Frozen);
    let init = match &rule.init {
        WeightInit::Ones => Init::Ones,
        WeightInit::Zeros | WeightInit::Frozen => Init::Zeros,
        WeightInit::Normal(std, zero_row) => {
            let std = std.eval(scope)?.number().ok_or("its deviation is no number")?;
            let zero_row = zero_row.as_ref().map(|row| row.eval(scope)).transpose()?;
            Init::Normal { std, zero_row: zero_row.and_then(|row| row.size()) }
        }
    };
    let stored = rule.tensor.dims.as_ref().unwrap_or(&rule.dims);
    let stored: Vec<Vec<Axis<'_>>> = stored
        .iter()
        .map(|dim| dim.iter().map(|axis| read_axis(axis, scope)).collect())
        .collect::<Result<_, String>>()?;
    let tensor_dims = stored.iter().map(|dim| dim.iter().map(|axis| axis.total).product());
    let tensor_dims: Vec<usize> = tensor_dims.collect();
    let (mut stride, mut start) = (1, 0);
    let mut found: Vec<(&str, usize, usize)> = Vec::new();
    for axis in stored.iter().flatten().rev() {
        start += axis.start * stride;
        let mut inner = stride;
        for (name, size) in axis.parts.iter().rev() {
            found.push((name, *size, inner));
            inner *= size;
        }
        stride *= axis.total;
    }
    let numbered = rule.dims.first().and_then(|dim| dim.first()).filter(|axis| {
        let place = format!("{{{axis}}}");
        rule.tensor.names.iter().all(|name| name.contains(&place))
    });
    let count = numbered.map(|axis| read_axis(axis, scope).map(|axis| axis.total)).transpose()?;
    if let Some((axis, count)) = numbered.zip(count) {
        found.push((axis, count, stride));
    }
    // In the order of the tensor, so that of axes of one text the outer one is taken first.
    found.reverse();
    let (mut dims, mut axes) = (Vec::new(), Vec::new());
    for dim in &rule.dims {
        let mut size = 1;
        for name in dim {
            let at = found.iter().position(|(found, ..)| found == name);
            let (_, count, stride) = found.remove(at.ok_or(format!("no axis `{name}`"))?);
            axes.push((count, stride));
            size *= count;
        }
        dims.push(size);
    }
    if let Some((left, ..)) = found.first() {
        return Err(format!("the axis `{left}` is left over"));
    }
    let number = layer.map(|layer| layer.to_string()).unwrap_or_default();
    let name_of = |name: &String| {
        let name = name.replace("{layer}", &number);
        numbered.map_or(name.clone(), |axis| name.replace(&format!("{{{axis}}}"), "{}"))
    };
    let names = rule.tensor.names.iter().map(name_of).collect();
    let name = match layer {
        Some(layer) => format!("h.{layer}.{}", rule.name),
        None => rule.name.to_owned(),
    };
    let source = Source::view(names, tensor_dims, start, axes);
    let source = source.of_several(count.unwrap_or(1));
    Ok(Weight { name, dims, init, source, layer, frozen })
}
