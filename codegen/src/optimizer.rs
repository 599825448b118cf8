//! The update of an optimizer as a block program.
//!
//! States of 8 bits are codes and scales, as those of torchao's `AdamFp8`: of each block of
//! [`STATE_BLOCK`] numbers along the last dim of a weight the scale is the largest one over the
//! largest code. Nodes of the update's function read and write them, so that whatever executes the
//! function rounds alike, and no scale depends on how weights are cut.

use std::collections::HashMap;
use std::iter::repeat_n;

use ir::build::Builder;
use ir::module::Attributes;
use ir::op::{Binary, Combiner, Unary};
use ir::plan::Optimizer;
use ir::precision::Precision;
use ir::program::STATE_BLOCK;
use ir::{DType, Function, Kind, Module, Op, TensorType, ValueId};
use kernels::rows::{Output, Rows};

use crate::blocks::{LARGEST_MIN, code_max};
use crate::tile::{Tile, lower_kernel};

/// The block program of an update, and which of its operands each input is.
#[derive(Clone, Debug)]
pub(crate) struct Update {
    pub(crate) rows: Rows,
    pub(crate) inputs: Vec<String>,
}

impl Update {
    /// Computed in the type of sums, from and to what each role is stored as. Where states are
    /// `coded`, elements are whole blocks.
    pub(crate) fn new(
        (optimizer, decay): (Optimizer, f64),
        elements: usize,
        precision: &Precision,
        is_coded: bool,
    ) -> Result<Update, String> {
        let dims = match is_coded {
            true => vec![elements / STATE_BLOCK, STATE_BLOCK],
            false => vec![elements],
        };
        let mut function = optimizer_function(optimizer, decay, &dims, precision.accumulate)?;
        if is_coded {
            function = with_coded_states(&function, precision.states);
        }
        let Tile { mut rows, inputs, .. } = lower_kernel(&function, &Module::default());
        let name = |param: &ir::ValueId| function.value(*param).name.clone();
        let inputs: Vec<String> = inputs.iter().map(name).collect();
        for (input, name) in rows.inputs.iter_mut().zip(&inputs) {
            match name.as_str() {
                "p" => input.dtype = precision.updated(),
                "g" => input.dtype = precision.gradients,
                "m" | "v" => input.dtype = precision.state(is_coded),
                _ => {}
            }
        }
        let of_states = repeat_n(precision.state(is_coded), optimizer.state_count());
        let dtypes = std::iter::once(precision.updated()).chain(of_states);
        for (output, stored) in rows.outputs.iter_mut().zip(dtypes) {
            if let Output::Store { dtype, .. } = output {
                *dtype = stored;
            }
        }
        let first = rows.outputs.first().filter(|_| precision.master.is_some()).cloned();
        if let Some(Output::Store { value, access, accumulate, .. }) = first {
            let dtype = precision.parameters;
            rows.outputs.push(Output::Store { value, access, dtype, accumulate });
        }
        Ok(Update { inputs, rows })
    }
}

/// The update of parameters of some dims, as a kernel function of the library's composite.
fn optimizer_function(
    optimizer: Optimizer,
    decay: f64,
    dims: &[usize],
    dtype: DType,
) -> Result<Function, String> {
    let vector = TensorType::of(dtype, dims);
    let scalar = TensorType::scalar(dtype);
    let decay = ("decay", decay);
    let (attributes, vectors, scalars) = match optimizer {
        Optimizer::None => (Vec::new(), 0, 0),
        Optimizer::Sgd { .. } => (vec![decay], 2, 2),
        Optimizer::AdamW { beta1, beta2, eps, .. } => {
            (vec![("beta1", beta1), ("beta2", beta2), ("eps", eps), decay], 4, 4)
        }
    };
    let attributes: Attributes =
        attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let mut operands = vec![vector; vectors];
    operands.resize(vectors + scalars, scalar);
    let name = optimizer.composite().ok_or("nothing is updated")?;
    let function = ir::library::instantiate(name, &attributes, &operands, name);
    let mut function = function.ok_or_else(|| format!("`{name}` has no instance"))?;
    function.kind = Kind::Kernel;
    Ok(function)
}

/// An update that reads and writes its states `m` and `v` as codes of a type, with the scales of
/// their blocks: parameters, results and the values between are as before, then come the scales.
fn with_coded_states(plain: &Function, code: DType) -> Function {
    let mut module = Module::default();
    let mut b = Builder::new(&mut module, plain.name.clone(), Kind::Kernel);
    let is_state = |param: &ValueId| ["m", "v"].contains(&plain.value(*param).name.as_str());
    let mut made: HashMap<ValueId, ValueId> = HashMap::new();
    for param in plain.params() {
        let value = plain.value(param);
        let ty = if is_state(&param) { value.ty.with_dtype(code) } else { value.ty.clone() };
        made.insert(param, b.param(&value.name, ty));
    }
    let states: Vec<ValueId> = plain.params().filter(is_state).collect();
    let scale = |state: &ValueId| {
        let ty = plain.ty(*state);
        let ty = TensorType { dtype: ty.dtype, dims: ty.dims[..1].to_vec() };
        b.param(&format!("{}.scale", plain.value(*state).name), ty)
    };
    let scales: Vec<ValueId> = states.iter().map(scale).collect();
    let of_block = |b: &mut Builder<'_>, scale: ValueId, like: ValueId| {
        let (name, dims) = (b.function().value(scale).name.clone(), b.ty(like).dims.clone());
        b.push(&format!("{name}.all"), Op::Broadcast { new: vec![1], dims }, &[scale])
    };
    for (state, scale) in states.iter().zip(scales) {
        let name = &plain.value(*state).name;
        let wide = Op::Cast { dtype: plain.ty(*state).dtype };
        let number = b.push(&format!("{name}.code"), wide, &[made[state]]);
        let scale = of_block(&mut b, scale, number);
        made.insert(*state, b.mul(&format!("{name}.number"), number, scale));
    }
    for node in &plain.nodes {
        let operands: Vec<ValueId> = node.operands.iter().map(|o| made[o]).collect();
        let names: Vec<String> =
            node.results.iter().map(|r| plain.value(*r).name.clone()).collect();
        let results = b.push_named(&names, node.op.clone(), &operands);
        made.extend(node.results.iter().copied().zip(results));
    }
    let mut results = vec![made[&plain.results[0]]];
    let mut scales = Vec::new();
    for next in plain.results[1..].iter().map(|result| made[result]) {
        let name = b.function().value(next).name.clone();
        let size = b.unary(&format!("{name}.size"), Unary::Abs, next);
        let largest = b.reduce(&format!("{name}.largest"), Combiner::Max, vec![1], size);
        let least = b.constant_like("largest_min", LARGEST_MIN, largest);
        let some = b.binary(&format!("{name}.some"), Binary::Max, largest, least);
        let code_max = b.constant_like("code_max", code_max(code), some);
        let scale = b.binary(&format!("{name}.scale"), Binary::Div, some, code_max);
        let all = of_block(&mut b, scale, next);
        let quotient = b.binary(&format!("{name}.quotient"), Binary::Div, next, all);
        results.push(b.push(&format!("{name}.code"), Op::Cast { dtype: code }, &[quotient]));
        scales.push(scale);
    }
    results.extend(scales);
    b.into_function(&results)
}
