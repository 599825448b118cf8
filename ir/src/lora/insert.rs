//! New parameters and products in the functions of a module.

use std::collections::BTreeMap;

use super::{Added, Lora, operands, split};
use crate::build::Builder;
use crate::import::Model;
use crate::module::{Function, Module, Node, Value, ValueId};
use crate::op::{Einsum, Op};
use crate::types::TensorType;
use crate::{Diagnostic, Dim, Span};

/// The new parameters of a layer beside one of its own: that of `A`, and the dims of a new `A`, and
/// of `B`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Beside {
    /// The parameter whose `A` it shares; itself where it has its own.
    a_of: usize,
    /// The dims of `A`, where it is new here.
    a: Option<Vec<usize>>,
    b: Vec<usize>,
}

/// The new parameters of a layer, by the parameter that they follow.
type Layout = BTreeMap<usize, Beside>;

/// Adds the weights of a model to its entries, and what is computed with them to its layers.
///
/// # Errors
/// `E1203` when calls of one layer differ in what is adapted.
pub(super) fn insert(
    model: &mut Model,
    added: &BTreeMap<String, Added>,
    lora: &Lora,
) -> Result<(), Diagnostic> {
    let layouts = layouts(model, added)?;
    let mut adapted = Module::new(model.module.name.clone());
    for function in &model.module.functions {
        let made = if model.entries.contains(&function.name) {
            entry(function, added, &layouts)
        } else {
            match layouts.get(&function.name) {
                Some(layout) => layer(&mut adapted, function, layout, lora),
                None => function.clone(),
            }
        };
        adapted.functions.push(made);
    }
    model.module = adapted;
    let mut weights = Vec::new();
    for weight in model.weights.drain(..) {
        let new = added.get(&weight.name);
        weights.push(weight);
        let Some(Added { new_a, b, .. }) = new else { continue };
        weights.extend(new_a.clone());
        weights.push(b.clone());
    }
    model.weights = weights;
    Ok(())
}

/// What each layer is given beside its parameters.
fn layouts(
    model: &Model,
    added: &BTreeMap<String, Added>,
) -> Result<BTreeMap<String, Layout>, Diagnostic> {
    let mut layouts: BTreeMap<String, (Layout, Vec<String>)> = BTreeMap::new();
    for entry in model.entries.iter().filter_map(|entry| model.module.function(entry)) {
        for node in &entry.nodes {
            let Some(callee) = node.callee() else { continue };
            let passed: Vec<String> =
                node.operands.iter().map(|o| entry.value(*o).name.clone()).collect();
            let layout = layout(&passed, added);
            match layouts.get(callee) {
                None => {
                    layouts.insert(callee.to_owned(), (layout, passed));
                }
                Some((known, first)) if *known != layout => {
                    return Err(unequal(callee, [first, &passed], added));
                }
                Some(_) => {}
            }
        }
    }
    let layouts = layouts.into_iter().map(|(name, (layout, _))| (name, layout));
    Ok(layouts.filter(|(_, layout)| !layout.is_empty()).collect())
}

/// What a layer is given beside the weights that are passed.
fn layout(passed: &[String], added: &BTreeMap<String, Added>) -> Layout {
    let mut layout = Layout::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    for (at, name) in passed.iter().enumerate() {
        let Some(Added { a, new_a, b }) = added.get(name) else { continue };
        let a_of = *places.entry(a).or_insert(at);
        let a = new_a.as_ref().map(|a| a.dims.clone());
        layout.insert(at, Beside { a_of, a, b: b.dims.clone() });
    }
    layout
}

fn unequal(callee: &str, calls: [&[String]; 2], added: &BTreeMap<String, Added>) -> Diagnostic {
    let differs = calls[0].iter().zip(calls[1]).find(|(first, other)| {
        let [first, other] = [first, other].map(|name| added.get(*name));
        let sizes = |added: &Added| added.b.dims.clone();
        first.map(sizes) != other.map(sizes)
    });
    let headline = format!("the targets adapt `@{callee}` in some of its calls only");
    let wrong = Diagnostic::error("E1203", Span::of("--lora"), headline)
        .help("name what all layers have, such as `q_proj`");
    match differs {
        Some((first, other)) => {
            wrong.note(format!("`{first}` and `{other}` are treated unequally"))
        }
        None => wrong,
    }
}

/// An entry with the new weights as parameters, each after the weight that it is added for.
fn entry(
    function: &Function,
    added: &BTreeMap<String, Added>,
    layouts: &BTreeMap<String, Layout>,
) -> Function {
    let mut made = Function::new(function.name.clone(), function.kind.clone());
    let mut map: Vec<ValueId> = Vec::new();
    let mut by_name: BTreeMap<&str, ValueId> = BTreeMap::new();
    let push = |made: &mut Function, value: Value| {
        made.values.push(value);
        ValueId(made.values.len() as u32 - 1)
    };
    for param in function.params() {
        let value = function.value(param);
        map.push(push(&mut made, value.clone()));
        let Some(Added { new_a, b, .. }) = added.get(&value.name) else { continue };
        for weight in new_a.iter().chain([b]) {
            let ty = TensorType::of(value.ty.dtype, &weight.dims);
            by_name.insert(&weight.name, push(&mut made, Value::new(&weight.name, ty)));
        }
    }
    made.param_count = made.values.len();
    for value in &function.values[function.param_count..] {
        map.push(push(&mut made, value.clone()));
    }
    for node in &function.nodes {
        let layout = node.callee().and_then(|callee| layouts.get(callee));
        let mut operands = Vec::new();
        for (at, operand) in node.operands.iter().enumerate() {
            operands.push(map[operand.index()]);
            let Some(beside) = layout.and_then(|layout| layout.get(&at)) else { continue };
            let new = &added[&function.value(*operand).name];
            operands.extend(beside.a.as_ref().map(|_| by_name[new.a.as_str()]));
            operands.push(by_name[new.b.name.as_str()]);
        }
        let results = node.results.iter().map(|r| map[r.index()]).collect();
        made.nodes.push(Node { op: node.op.clone(), operands, results });
    }
    made.results = function.results.iter().map(|r| map[r.index()]).collect();
    made
}

/// A layer that adds `scale · (x A) B` to each of its products with an adapted parameter.
fn layer(module: &mut Module, function: &Function, layout: &Layout, lora: &Lora) -> Function {
    let mut b = Builder::new(module, function.name.clone(), function.kind.clone());
    let mut map: Vec<Option<ValueId>> = vec![None; function.values.len()];
    let mut new: BTreeMap<usize, [ValueId; 2]> = BTreeMap::new();
    for (at, param) in function.params().enumerate() {
        let Value { name, ty, .. } = function.value(param).clone();
        map[at] = Some(b.param(&name, ty.clone()));
        let Some(beside) = layout.get(&at) else { continue };
        let mut define = |suffix: &str, dims: &[usize]| {
            let dims = dims.iter().map(|size| Dim::from(*size));
            b.param(&format!("{name}_{suffix}"), TensorType::new(ty.dtype, dims))
        };
        let down = match &beside.a {
            Some(dims) => define("lora_a", dims),
            None => new[&beside.a_of][0],
        };
        new.insert(at, [down, define("lora_b", &beside.b)]);
    }
    // Weights with one `A` share the product with it.
    let mut reduced: BTreeMap<(ValueId, ValueId), ValueId> = BTreeMap::new();
    for node in &function.nodes {
        let at = |value: &ValueId| map[value.index()].expect("verified: defined before it is read");
        let operands: Vec<ValueId> = node.operands.iter().map(at).collect();
        let names: Vec<String> =
            node.results.iter().map(|r| function.value(*r).name.clone()).collect();
        let results = b.push_named(&names, node.op.clone(), &operands);
        for (old, made) in node.results.iter().zip(&results) {
            map[old.index()] = Some(*made);
        }
        let adapted = node.operands.iter().position(|o| new.contains_key(&o.index()));
        let (Some(weight_at), Op::Contract(einsum)) = (adapted, &node.op) else { continue };
        let weights = new[&node.operands[weight_at].index()];
        let x = operands[1 - weight_at];
        let product = Product { einsum, weight_at, name: &names[0], weights };
        let sum = product.add(&mut b, x, results[0], lora, &mut reduced);
        map[node.results[0].index()] = Some(sum);
    }
    let results: Vec<ValueId> = function
        .results
        .iter()
        .map(|r| map[r.index()].expect("verified: results are defined"))
        .collect();
    b.into_function(&results)
}

/// A product with an adapted parameter.
struct Product<'a> {
    einsum: &'a Einsum,
    weight_at: usize,
    name: &'a str,
    /// `A` and `B`.
    weights: [ValueId; 2],
}

impl Product<'_> {
    /// Adds `scale · (x A) B` to `y`.
    fn add(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        y: ValueId,
        lora: &Lora,
        reduced: &mut BTreeMap<(ValueId, ValueId), ValueId>,
    ) -> ValueId {
        let (letters, of_x) = operands(self.einsum, self.weight_at);
        let summed = split(self.einsum, self.weight_at).expect("candidates are split");
        let side = |is_in: bool| -> Vec<char> {
            let of = letters.iter().zip(&summed).filter(|(_, summed)| **summed == is_in);
            of.map(|(letter, _)| *letter).collect()
        };
        let known = self.einsum.letters();
        let rank = ('a'..='z').chain('A'..='Z').find(|letter| !known.contains(letter));
        let rank = rank.expect("an einsum has fewer letters than the alphabet");
        let (inner, outer) = (side(true), side(false));
        let kept = of_x.iter().filter(|letter| !inner.contains(letter)).copied();
        let of_h: Vec<char> = kept.chain([rank]).collect();
        let [down, up] = self.weights;
        let name = |what: &str| format!("{}.{what}", self.name);
        let contract = |a: &[char], b: Vec<char>, result: &[char]| {
            let (a, result) = (a.to_vec(), result.to_vec());
            Op::Contract(Einsum::new(a, b, result))
        };
        let h = *reduced.entry((x, down)).or_insert_with(|| {
            let of_a = [rank].into_iter().chain(inner).collect();
            let h = b.push(&name("lora_h"), contract(of_x, of_a, &of_h), &[x, down]);
            let scale = b.constant_like(&name("lora_scale"), lora.scale(), h);
            b.mul(&name("lora_scaled"), h, scale)
        });
        let of_b = outer.into_iter().chain([rank]).collect();
        let op = contract(&of_h, of_b, &self.einsum.result);
        let d = b.push(&name("lora_y"), op, &[h, up]);
        b.add(&name("lora"), y, d)
    }
}
