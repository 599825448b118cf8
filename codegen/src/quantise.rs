//! Products of FP8: the operands of products of activations and weights, rounded to 8 bits in
//! blocks, each with a scale of its own.
//!
//! An activation, or a cotangent, has blocks of 128 along the sum of its product; a weight has
//! blocks of 128 × 128 along its sum and its outputs, so that the forward pass and the gradient of
//! activations read the same numbers (DeepSeek-V3, 2024, section 3.3). The scale of a block is the
//! largest power of two that keeps its largest element within the format: what is read back is a
//! number of BF16, and so products of BF16 are those that tensor cores compute of 8 bits and
//! scales, but for the order of sums.
//!
//! ```text
//! top   = max(reduce max |x|, 2^-100)
//! scale = power_floor(448 / top)              57344 of F8E5M2
//! read  = cast(f8, x · scale) / scale
//! ```
//!
//! Attention and experts, whose products are inside composites, convolutions, weights of fewer than
//! 128 inputs or outputs (a router, an adapter of low rank), and the layer of the loss stay as they
//! are. A scale is of whole blocks wherever these lie, and shards hold whole blocks, so that no
//! scale depends on how ranks share the work.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use ir::autodiff::gradient_name;
use ir::op::{Binary, Einsum};
use ir::precision::{Precision, Products};
use ir::{Class, DType, Diagnostic, Dim, Function, Module, Node, Op, Span, TensorType, ValueId};

use crate::blocks::{Appended, BLOCK, Codes};
use crate::retype::{ResultRole, Roles, roles, summands};
use crate::specialise::depends_on;

/// Has products of layers read operands of 8 bits, where the precision says so.
/// `O(nodes + operands)`.
///
/// # Errors
/// `E2001` as for [`crate::retype::retype`]; `E2005` names all operands whose dims blocks do not
/// fill.
pub fn quantise(module: &mut Module, precision: &Precision) -> Result<(), Diagnostic> {
    let of_cotangents = match precision.products {
        Products::Own | Products::Tf32 => return Ok(()),
        Products::F8E4M3 => DType::F8E4M3,
        Products::F8Hybrid => DType::F8E5M2,
    };
    let (mut unfilled, mut count) = (Vec::new(), 0);
    for (name, roles) in roles(module, precision)? {
        if roles.results.iter().any(|role| *role != ResultRole::Activation) {
            continue;
        }
        let Some(primal) = module.function(&name).cloned() else { continue };
        let gradient = module.function(&gradient_name(&name)).cloned();
        for function in [Some(&primal), gradient.as_ref()].into_iter().flatten() {
            let source = Source::of(function, &primal, &roles, of_cotangents);
            // A gradient reads all that its primal does.
            unfilled.retain(|(of, _)| *of != name);
            let made = Quantiser::new(source, module, (&mut unfilled, &mut count)).run();
            if let Some(there) = module.functions.iter_mut().find(|f| f.name == made.name) {
                *there = made;
            }
        }
    }
    if !unfilled.is_empty() {
        return Err(refusal(precision, unfilled));
    }
    if count == 0 {
        let name = precision.products.name();
        let headline = format!("products={name} has no product to round in this model");
        return Err(Diagnostic::error("E2005", Span::of("--precision"), headline)
            .note("it rounds products of weights that have 128 inputs and outputs or more")
            .note("attention, convolutions and the layer of the loss stay as they are")
            .help("leave it out"));
    }
    Ok(())
}

/// The most operands that a refusal names.
const NAMED_MAX: usize = 8;

fn refusal(precision: &Precision, unfilled: Vec<Unfilled>) -> Diagnostic {
    let name = precision.products.name();
    let all: BTreeSet<String> = unfilled.into_iter().map(|(_, why)| why).collect();
    let left = all.len().saturating_sub(NAMED_MAX);
    let more = (left > 0).then(|| format!("and {left} more"));
    let headline =
        format!("products={name} reads blocks of {BLOCK}, which do not fill what it reads");
    let error = Diagnostic::error("E2005", Span::of("--precision"), headline);
    let named = all.into_iter().take(NAMED_MAX).chain(more).fold(error, Diagnostic::note);
    named.help("leave `products`, or `--dtype f8`, out, or use multiples of 128, of tokens too")
}

/// A function, and what is known of its values.
struct Source<'f> {
    function: &'f Function,
    /// By value, whether it is a weight, seen through casts and views.
    weights: Vec<bool>,
    /// By value, whether it depends on a cotangent.
    late: Vec<bool>,
    /// The names of what gradients of weights are sums of.
    gradients: BTreeSet<String>,
    /// The format of cotangents.
    of_cotangents: DType,
}

impl<'f> Source<'f> {
    fn of(
        function: &'f Function,
        primal: &Function,
        roles: &Roles,
        of_cotangents: DType,
    ) -> Source<'f> {
        let mut weights = vec![false; function.values.len()];
        for (param, is_weight) in primal.params().zip(&roles.is_weight) {
            weights[param.index()] = *is_weight && function.ty(param).dtype.is_float();
        }
        for node in &function.nodes {
            let passes = matches!(node.op, Op::Cast { .. }) || node.op.class() == Class::View;
            if passes && weights[node.operands[0].index()] {
                weights[node.result().index()] = true;
            }
        }
        let is_cotangent =
            |id: ValueId| (primal.param_count..function.param_count).contains(&id.index());
        let of_weights = function.results.iter().skip(primal.results.len());
        let is_gradient = function.name != primal.name;
        let gradients = of_weights.filter(|_| is_gradient).flat_map(|r| summands(function, *r));
        Source {
            function,
            weights,
            late: depends_on(function, is_cotangent),
            gradients: gradients.collect(),
            of_cotangents,
        }
    }

    /// Whether a product reads operands of 8 bits: one of a weight, or of a weight's gradient, if
    /// the weight has a block of inputs and of outputs.
    fn is_quantised(&self, node: &Node, einsum: &Einsum) -> bool {
        let weight = node.operands.iter().position(|operand| self.weights[operand.index()]);
        let (ty, letters, other) = match weight {
            Some(0) => (self.function.ty(node.operands[0]), &einsum.a, &einsum.b),
            Some(_) => (self.function.ty(node.operands[1]), &einsum.b, &einsum.a),
            None if self.gradients.contains(&self.function.value(node.result()).name) => {
                (self.function.ty(node.result()), &einsum.result, &einsum.a)
            }
            None => return false,
        };
        let is_batch =
            |c: &char| [&einsum.a, &einsum.b, &einsum.result].iter().all(|all| all.contains(c));
        let side = |is_shared: bool| -> i64 {
            let of_side = |(c, _): &(&char, &Dim)| !is_batch(c) && other.contains(c) == is_shared;
            let sizes = letters.iter().zip(&ty.dims).filter(of_side);
            sizes.filter_map(|(_, size)| size.as_constant()).product()
        };
        [true, false].iter().all(|is_shared| side(*is_shared) >= BLOCK as i64)
    }

    fn format(&self, value: ValueId) -> DType {
        if self.late[value.index()] { self.of_cotangents } else { DType::F8E4M3 }
    }
}

/// The name of a function, and a sentence about a value of it that blocks do not fill.
type Unfilled = (String, String);

/// The dims of a value that a block lies in: each range is cut in blocks as one dim.
type Blocks = Vec<Range<usize>>;

struct Quantiser<'f, 'm> {
    source: Source<'f>,
    /// The function, with more values than its source.
    made: Appended<'m>,
    read: HashMap<(ValueId, Blocks), ValueId>,
    unfilled: &'m mut Vec<Unfilled>,
    /// How many products read 8 bits.
    count: &'m mut usize,
}

impl<'f, 'm> Quantiser<'f, 'm> {
    fn new(
        source: Source<'f>,
        module: &'m Module,
        (unfilled, count): (&'m mut Vec<Unfilled>, &'m mut usize),
    ) -> Quantiser<'f, 'm> {
        let made = Appended::to_values_of(source.function, module);
        Quantiser { made, read: HashMap::new(), unfilled, count, source }
    }

    fn run(mut self) -> Function {
        for node in &self.source.function.nodes {
            let mut node = node.clone();
            if let Op::Contract(einsum) = &node.op
                && self.source.is_quantised(&node, einsum)
            {
                let [a, b] = [node.operands[0], node.operands[1]];
                let of_a = self.operand(a, [&einsum.a, &einsum.b], einsum);
                let of_b = self.operand(b, [&einsum.b, &einsum.a], einsum);
                node.operands = vec![of_a, of_b];
                *self.count += 1;
            }
            self.made.function.nodes.push(node);
        }
        let mut made = self.made.function;
        ir::pass::renumber_values(&mut made);
        made
    }

    /// What a product reads in place of an operand, given its letters and those of the other one.
    fn operand(&mut self, value: ValueId, [own, other]: [&[char]; 2], einsum: &Einsum) -> ValueId {
        let ty = self.source.function.ty(value).clone();
        let is_summed = |c: &char| other.contains(c) && !einsum.result.contains(c);
        let is_kept = |c: &char| !other.contains(c);
        let mut sides: Vec<(&str, &dyn Fn(&char) -> bool)> = vec![("sum", &is_summed)];
        if self.source.weights[value.index()] {
            sides.push(("outputs", &is_kept));
        }
        let mut blocks = Blocks::new();
        for (side, is_of_side) in sides {
            match innermost(&ty, |dim| is_of_side(&own[dim])) {
                Ok(block) => blocks.push(block),
                Err(dims) => {
                    let Function { name, .. } = self.source.function;
                    let of = &self.source.function.value(value).name;
                    let why = format!("`%{of}` of `@{name}` is {ty}: {dims} along the {side}");
                    self.unfilled.push((name.clone(), why));
                }
            }
        }
        if blocks.len() < sides_of(self.source.weights[value.index()]) {
            return value;
        }
        blocks.sort_by_key(|block| block.start);
        if let Some(there) = self.read.get(&(value, blocks.clone())) {
            return *there;
        }
        let read = self.rounded(value, &ty, &blocks);
        self.read.insert((value, blocks), read);
        read
    }

    /// The value rounded to 8 bits in blocks, in its own type.
    fn rounded(&mut self, value: ValueId, ty: &TensorType, blocks: &Blocks) -> ValueId {
        let format = self.source.format(value);
        // A value may be read in blocks along several dims.
        let along: Vec<String> = blocks.iter().map(|block| block.start.to_string()).collect();
        let name = format!("{}.by{}", self.source.function.value(value).name, along.join("_"));
        let of = |what: &str| format!("{name}.{what}");
        let (dims, inside) = blocked(&ty.dims, blocks);
        let Codes { codes, scales, .. } = self.made.codes((&name, value), (&dims, &inside), format);
        let codes = self.made.cast(&of("codes"), codes, ty.dtype.accumulation());
        let exact = self.made.push(&of("exact"), Op::Binary(Binary::Div), &[codes, scales]);
        let exact = self.made.cast(&of("exact"), exact, ty.dtype);
        self.made.push(&of("read"), Op::Reshape { dims: ty.dims.clone() }, &[exact])
    }
}

/// How many sides of an operand are cut in blocks.
fn sides_of(is_weight: bool) -> usize {
    if is_weight { 2 } else { 1 }
}

/// The innermost dims of a side that follow each other and that blocks fill, as few as possible.
///
/// # Errors
/// The sizes that blocks do not fill.
fn innermost(ty: &TensorType, is_of_side: impl Fn(usize) -> bool) -> Result<Range<usize>, String> {
    let last = (0..ty.ndim()).rev().find(|dim| is_of_side(*dim));
    let Some(last) = last else { return Err("one number".to_owned()) };
    let (mut first, mut count) = (last + 1, 1);
    while first > 0 && is_of_side(first - 1) {
        let Some(size) = ty.dims[first - 1].as_constant() else { break };
        (first, count) = (first - 1, count * size);
        if count % BLOCK as i64 == 0 {
            return Ok(first..last + 1);
        }
    }
    let sizes: Vec<String> = ty.dims[first..=last].iter().map(Dim::to_string).collect();
    Err(if sizes.is_empty() { ty.dims[last].to_string() } else { sizes.join(" × ") })
}

/// The dims of a value in blocks, and which of these are inside one.
fn blocked(dims: &[Dim], blocks: &Blocks) -> (Vec<Dim>, Vec<usize>) {
    let (mut cut, mut inside, mut at) = (Vec::new(), Vec::new(), 0);
    for block in blocks {
        cut.extend_from_slice(&dims[at..block.start]);
        let size: i64 = dims[block.clone()].iter().filter_map(Dim::as_constant).product();
        cut.push(Dim::constant(size / BLOCK as i64));
        inside.push(cut.len());
        cut.push(Dim::constant(BLOCK as i64));
        at = block.end;
    }
    cut.extend_from_slice(&dims[at..]);
    (cut, inside)
}

#[cfg(test)]
mod tests;
