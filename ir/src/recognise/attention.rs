//! Attention: a product of values with a softmax of scaled, masked and biased products of queries
//! and keys.
//!
//! Found from the last product backwards. Which dims are samples, heads, queries and keys follows
//! from the indices: keys that a group of heads shares lack a digit of the heads' index. Masks are
//! proved where they depend on no input, and else become the bias of the composite. Dropout of the
//! softmax is a part of it where the composite makes the same draws.
//!
//! Legend: B samples, H heads, S queries, N keys, D numbers of a head.

use super::draft::{Draft, Finished, Source};
use super::dropout::Dropout;
use super::element::{Digit, Element, Graph, Index};
use super::mask::{Pairs, Sight};
use super::scores::{ABSORBING, Guard, Mask, Scores, scores};
use super::softmax::softmax_of;
use super::views::{sizes, split, views};
use crate::DType;
use crate::dim::{Dim, product};
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Comparison, Op};
use crate::types::TensorType;

/// Attention that ends in a value.
pub(super) fn attention<'g>(graph: &'g Graph<'g>, value: ValueId) -> Option<Finished> {
    let node = graph.node(value)?;
    let Op::Contract(einsum) = &node.op else { return None };
    let letters = einsum.letters();
    let mut summed = letters.iter().filter(|l| !einsum.result.contains(l));
    let (letter, None) = (summed.next()?, summed.next()) else { return None };
    let root = graph.any(value);
    let size = |letter: char| {
        let of = |letters: &[char], at: usize| {
            let dim = letters.iter().position(|l| *l == letter)?;
            Some(graph.dims(node.operands[at])[dim].clone())
        };
        of(&einsum.a, 0).or_else(|| of(&einsum.b, 1))
    };
    let keys = graph.fresh(&size(*letter)?);
    let index = |letter: &char| match einsum.result.iter().position(|l| l == letter) {
        Some(at) => root.index[at].clone(),
        None => keys.clone(),
    };
    let operand = |at: usize, letters: &[char]| {
        let index = letters.iter().map(index).collect();
        graph.peel(&Element { value: node.operands[at], index })
    };
    let [a, b] = [operand(0, &einsum.a), operand(1, &einsum.b)];
    of_parts(graph, &root, &a, &b, &keys).or_else(|| of_parts(graph, &root, &b, &a, &keys))
}

fn of_parts<'g>(
    graph: &'g Graph<'g>,
    root: &Element,
    weights: &Element,
    values: &Element,
    keys: &Index,
) -> Option<Finished> {
    if !graph.function.ty(root.value).dtype.is_float() || keys.is_empty() {
        return None;
    }
    let (dropout, kept) = match Dropout::of(graph, weights) {
        Some((dropout, kept)) => (Some(dropout), kept),
        None => (None, weights.clone()),
    };
    let (guard, inner) = Guard::of(graph, &kept);
    let x = softmax_of(graph, &inner, keys)?;
    let found = scores(graph, &x, &guard, keys)?;
    let roles = Roles::of(root, &found, values, keys)?;
    let mut draft = Draft::new(graph);
    let y = roles.draft(graph, &mut draft, &found, values, dropout.as_ref())?;
    let back = views(&sizes(&roles.output()), &roles.output(), &root.index)?;
    let y = draft.views(y, back)?;
    let (name, spared) = match dropout {
        Some(_) => ("attention_dropout", weights.value),
        None => ("attention", inner.value),
    };
    Some(draft.finish(name, y, root.value)?.in_place_of(spared))
}

/// The indices of the dims of attention.
struct Roles {
    batch: Index,
    /// Heads of keys, then query heads of each group.
    groups: Index,
    shared: Index,
    queries: Index,
    keys: Index,
    inner: Index,
    values: Index,
    /// What counts samples and heads, as in the result.
    lead: Index,
}

/// Variables of elements, each once, in the order of the first.
fn variables<'e>(of: impl Iterator<Item = &'e Digit>) -> Vec<usize> {
    let mut all = Vec::new();
    for digit in of {
        if !all.contains(&digit.variable) {
            all.push(digit.variable);
        }
    }
    all
}

/// What of the digits of samples and heads counts samples, heads of keys, and query heads that
/// share one: those that neither keys nor values have.
fn samples_and_heads(lead: &[Digit], found: &Scores, values: &Element) -> [Index; 3] {
    let [q, k] = &found.operands;
    let all = found.masks.iter().map(Mask::element).chain([q, k, values]);
    let cuts: Vec<(usize, Dim)> = all
        .flat_map(Element::digits)
        .flat_map(|d| [(d.variable, d.stride.clone()), (d.variable, &d.stride * &d.size)])
        .collect();
    let lead: Index = lead.iter().flat_map(|digit| split(digit, &cuts)).collect();
    let reads =
        |e: &Element, digit: &Digit| e.digits().flat_map(|d| split(d, &cuts)).any(|d| d == *digit);
    let is_shared = |digit: &&Digit| !reads(k, digit) && !reads(values, digit);
    let shared = lead.iter().rev().take_while(is_shared).count();
    let (rest, shared) = lead.split_at(lead.len() - shared);
    // The first dim counts samples, the last one before those that are shared heads.
    let batch = if rest.len() < 2 { rest.len() } else { rest.len() - 1 };
    let (batch, groups) = rest.split_at(batch);
    [batch.to_vec(), groups.to_vec(), shared.to_vec()]
}

impl Roles {
    fn of(root: &Element, found: &Scores, values: &Element, keys: &Index) -> Option<Roles> {
        let of_root = variables(root.digits());
        let Scores { inner, .. } = found;
        let is_query = |variable: usize| inner.iter().all(|d| d.variable != variable);
        let key_variable = keys.first()?.variable;
        let [q, k] = &found.operands;
        let known = |e: &Element, also: &[usize]| {
            e.digits().all(|d| of_root.contains(&d.variable) || also.contains(&d.variable))
        };
        let of_inner: Vec<usize> = inner.iter().map(|d| d.variable).collect();
        if !known(q, &of_inner)
            || !known(k, &[&of_inner[..], &[key_variable]].concat())
            || !known(values, &[key_variable])
        {
            return None;
        }
        // What only values have counts the numbers of a head, what only queries have the queries.
        let of_scores = |v: usize| q.mentions(v) || k.mentions(v) || found.mentions(v);
        let own = |wanted: &dyn Fn(usize) -> bool| -> Vec<usize> {
            of_root.iter().copied().filter(|v| wanted(*v)).collect()
        };
        let of_values = own(&|v| values.mentions(v) && !of_scores(v));
        let of_queries = own(&|v| {
            is_query(v) && !k.mentions(v) && !values.mentions(v) && found.order.contains(&v)
        });
        let whole = |variable: usize| -> Index {
            root.digits().filter(|d| d.variable == variable).cloned().collect()
        };
        if of_values.len() > 1 {
            return None;
        }
        let queries = match found.row[..] {
            // A lone row of queries has no variable: its dim has one element.
            [] => None,
            [Digit { variable, .. }] if of_queries.contains(&variable) => Some(variable),
            _ => found.order.iter().rev().find(|v| of_queries.contains(v)).copied(),
        };
        let lead = own(&|v| !of_values.contains(&v) && Some(v) != queries);
        let queries = queries.map_or_else(Index::new, whole);
        let whole_lead: Index = lead.into_iter().flat_map(whole).collect();
        let [batch, groups, shared] = samples_and_heads(&whole_lead, found, values);
        Some(Roles {
            batch,
            groups,
            shared,
            queries,
            keys: keys.clone(),
            inner: inner.clone(),
            values: of_values.into_iter().flat_map(whole).collect(),
            lead: whole_lead,
        })
    }

    fn heads(&self) -> Index {
        [&self.groups[..], &self.shared[..]].concat()
    }

    fn output(&self) -> Vec<Index> {
        vec![self.batch.clone(), self.queries.clone(), self.heads(), self.values.clone()]
    }

    fn draft<'g>(
        &self,
        graph: &'g Graph<'g>,
        draft: &mut Draft<'g>,
        found: &Scores,
        values: &Element,
        dropout: Option<&Dropout>,
    ) -> Option<Source> {
        let [q, k] = &found.operands;
        let of = |heads: Index, rows: &Index, numbers: &Index| {
            [self.batch.clone(), rows.clone(), heads, numbers.clone()]
        };
        let q = draft.laid(q, &of(self.heads(), &self.queries, &self.inner))?;
        let k = draft.laid(k, &of(self.groups.clone(), &self.keys, &self.inner))?;
        let v = draft.laid(values, &of(self.groups.clone(), &self.keys, &self.values))?;
        let (sight, biases) = self.sight(graph, found);
        let group = product(self.shared.iter().map(|digit| &digit.size)).as_constant()?;
        let mut attributes = vec![
            ("scale", found.scale),
            ("group", group as f64),
            ("query_offset", sight.query_offset),
            ("window", sight.window),
            ("softcap", found.softcap),
        ];
        let mut operands = vec![q, k, v];
        let filled = filled(&biases);
        if !biases.is_empty() {
            let dtype = graph.function.ty(values.value).dtype;
            let (bias, flags) = self.bias(draft, &biases, found.least, filled.is_some(), dtype)?;
            operands.push(bias);
            let names = ["bias_batch", "bias_heads", "bias_queries"];
            attributes.push(("bias", 1.0));
            attributes.extend(names.into_iter().zip(flags.map(|has| f64::from(u8::from(has)))));
        }
        let are_finite = biases.iter().all(|mask| mask.is_finite(graph))
            && biases.iter().filter(|mask| !mask.hides_nothing(graph)).count() < 2;
        let is_plain = filled.is_none()
            && (biases.is_empty() || are_finite || found.least.is_some() || found.is_guarded);
        if let Some(dropout) = dropout {
            // Of a row that sees no key dropout leaves a part, which is no correction of the whole.
            return match is_plain {
                true => self.dropped(graph, draft, dropout, (attributes, operands)),
                false => None,
            };
        }
        let made = draft.composite("attention", &attributes, &operands)?;
        if filled.is_some() {
            return self.averaged(draft, made[0], made[1], v);
        }
        if is_plain {
            return Some(made[0]);
        }
        self.undefined(draft, made[0], made[1])
    }

    /// The same with dropout, if the composite draws for each score what is drawn for it here.
    fn dropped(
        &self,
        graph: &Graph,
        draft: &mut Draft<'_>,
        dropout: &Dropout,
        (mut attributes, mut operands): (Vec<(&str, f64)>, Vec<Source>),
    ) -> Option<Source> {
        let scores = [self.batch.clone(), self.heads(), self.queries.clone(), self.keys.clone()];
        if !dropout.is_of(graph, &scores) {
            return None;
        }
        let heads = sizes(&scores[1..2])[0].as_constant()?;
        let Dropout { p, salt, key, bits, .. } = *dropout;
        attributes.extend([("p", p), ("salt", f64::from(salt)), ("heads", heads as f64)]);
        attributes.extend(bits.attribute());
        operands.push(Source::Old(key));
        Some(draft.composite("attention_dropout", &attributes, &operands)?[0])
    }

    /// All that is added to the scores, and whether it depends on samples, heads and queries.
    /// Where `is_whole`, what hides keys does so by minus infinity.
    fn bias(
        &self,
        draft: &mut Draft<'_>,
        biases: &[&Mask],
        least: Option<f64>,
        is_whole: bool,
        dtype: DType,
    ) -> Option<(Source, [bool; 3])> {
        let has = |index: &Index| {
            let mut of = biases.iter().flat_map(|mask| mask.element().digits());
            of.any(|d| index.iter().any(|i| overlap(i, d)))
        };
        let heads = self.heads();
        let flags = [has(&self.batch), has(&heads), has(&self.queries)];
        let dims = [&self.batch, &heads, &self.queries];
        let kept = dims.into_iter().zip(flags).filter(|(_, has)| *has);
        let mut wanted: Vec<Index> = kept.map(|(index, _)| index.clone()).collect();
        wanted.push(self.keys.clone());
        let ty = TensorType { dtype, dims: sizes(&wanted) };
        // From the product outwards, as the scores themselves go.
        let mut sum: Option<Source> = None;
        for mask in biases.iter().rev() {
            sum = Some(mask.bias(draft, sum, &wanted, &ty, is_whole)?);
        }
        let mut sum = sum?;
        if let Some(least) = least {
            let least = draft.number(least, ty)?;
            sum = draft.op(Op::Binary(Binary::Max), &[sum, least])?;
        }
        Some((sum, flags))
    }

    /// A number for each row of queries as one for each element of the output.
    fn rows(&self, draft: &mut Draft<'_>, of: Source, out: Source) -> Option<Source> {
        let turned = draft.op(Op::Transpose { perm: vec![0, 2, 1] }, &[of])?;
        let dims = draft.ty(out).dims.clone();
        draft.op(Op::Broadcast { new: vec![3], dims }, &[turned])
    }

    /// The output, with the mean of all values in the rows that see no key: there all scores are
    /// the same number.
    fn averaged(
        &self,
        draft: &mut Draft<'_>,
        out: Source,
        lse: Source,
        values: Source,
    ) -> Option<Source> {
        let ty = draft.ty(lse).clone();
        let least = draft.number(f64::NEG_INFINITY, ty)?;
        let is_empty = draft.op(Op::Compare(Comparison::Eq), &[lse, least])?;
        let is_empty = self.rows(draft, is_empty, out)?;
        let sum = Op::Reduce { combiner: Combiner::Sum, dims: vec![1] };
        let sum = draft.op(sum, &[values])?;
        let count = sizes(std::slice::from_ref(&self.keys))[0].as_constant()?;
        let count = draft.number(count as f64, draft.ty(sum).clone())?;
        let mean = draft.op(Op::Binary(Binary::Div), &[sum, count])?;
        let [batch, rows, heads, numbers] = &draft.ty(out).dims.clone()[..] else { return None };
        let groups = draft.ty(mean).dims[1].clone();
        let shared = product(self.shared.iter().map(|digit| &digit.size));
        let dims = vec![batch.clone(), rows.clone(), groups, shared, numbers.clone()];
        let mean = draft.op(Op::Broadcast { new: vec![1, 3], dims }, &[mean])?;
        let dims = [batch, rows, heads, numbers].map(Dim::clone).to_vec();
        let mean = draft.op(Op::Reshape { dims }, &[mean])?;
        draft.op(Op::Select, &[is_empty, mean, out])
    }

    /// The output, with NaN in the rows that see no key, as a softmax of nothing but minus
    /// infinities has: the composite has zeros there, and minus infinity among its second result,
    /// through which no gradient flows.
    fn undefined(&self, draft: &mut Draft<'_>, out: Source, lse: Source) -> Option<Source> {
        let ty = draft.ty(lse).clone();
        let least = draft.number(f64::NEG_INFINITY, ty.clone())?;
        let is_empty = draft.op(Op::Compare(Comparison::Eq), &[lse, least])?;
        let zero = draft.number(0.0, ty)?;
        let row = draft.op(Op::Select, &[is_empty, least, zero])?;
        let nothing = draft.op(Op::Binary(Binary::Sub), &[row, row])?;
        let rows = self.rows(draft, nothing, out)?;
        draft.op(Op::Binary(Binary::Add), &[out, rows])
    }

    /// What every query sees by the masks that no input decides, and the other masks.
    ///
    /// In a row where the others hide all that these let it see, finite numbers make it look at
    /// hidden keys: there all masks are added up instead.
    fn sight<'m>(&self, graph: &Graph, found: &'m Scores) -> (Sight, Vec<&'m Mask>) {
        let all = || (Sight::FULL, found.masks.iter().collect());
        let Some(pairs) = Pairs::of(&[], &self.queries, &self.keys) else { return all() };
        let (mut others, mut sees, mut are_whole) = (vec![], vec![true; pairs.count()], true);
        for mask in &found.masks {
            match mask.sees(graph, &self.lead, &self.queries, &self.keys) {
                Some((own, is_whole)) => {
                    sees.iter_mut().zip(own).for_each(|(sees, own)| *sees &= own);
                    are_whole &= is_whole;
                }
                None => others.push(mask),
            }
        }
        let is_kept = are_whole || others.iter().all(|mask| mask.hides_nothing(graph));
        match pairs.proved(&sees).filter(|_| is_kept) {
            Some(sight) => (sight, others),
            None => all(),
        }
    }
}

/// The number that hidden scores are, where it is one that a score would still change: all masks
/// outside of what is added hide by it.
fn filled(biases: &[&Mask]) -> Option<f64> {
    let score = |mask: &&Mask| match mask {
        Mask::Hidden { score, .. } => Some(*score),
        Mask::Added { .. } => None,
    };
    let first = biases.first().and_then(score).filter(|score| *score > ABSORBING)?;
    let scores: Vec<Option<f64>> = biases.iter().map(score).collect();
    let outer = scores.iter().take_while(|score| **score == Some(first)).count();
    scores[outer..].iter().all(Option::is_none).then_some(first)
}

/// Whether two digits share numbers of a variable.
fn overlap(a: &Digit, b: &Digit) -> bool {
    if a.variable != b.variable {
        return false;
    }
    let ends = |d: &Digit| Some((d.stride.as_constant()?, (&d.stride * &d.size).as_constant()?));
    match (ends(a), ends(b)) {
        (Some((a, above_a)), Some((b, above_b))) => a < above_b && b < above_a,
        (None, _) | (_, None) => true,
    }
}
