//! The table `cost`: operations and bytes of each op, as polynomials in the symbols of a module.
//!
//! Costs of the mathematics, not of a device: one multiplication with addition is two operations,
//! every elementwise result is one, whatever the function; operands are read once and results
//! written once. A reshape is free, and an update in place moves what is updated.

use std::collections::BTreeMap;

use crate::convolution::DimOrder;
use crate::dim::{Bindings, Dim, product};
use crate::module::{Function, Kind, Module};
use crate::op::{Einsum, Op};
use crate::types::TensorType;

/// Composites of routed experts.
const EXPERTS: [&str; 2] = ["experts", "experts_bwd"];

/// What an op or a function costs on one executor.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Cost {
    /// Floating-point (or integer) operations, those of products included.
    pub flops: Dim,
    /// The operations of contractions alone: what matrix units can do.
    pub product_flops: Dim,
    /// Bytes read.
    pub bytes_read: Dim,
    /// Bytes written.
    pub bytes_written: Dim,
}

impl Cost {
    /// The cost of `count` repetitions.
    #[must_use]
    pub fn times(&self, count: usize) -> Cost {
        let count = Dim::from(count);
        Cost {
            flops: &self.flops * &count,
            product_flops: &self.product_flops * &count,
            bytes_read: &self.bytes_read * &count,
            bytes_written: &self.bytes_written * &count,
        }
    }

    /// The cost of both.
    #[must_use]
    pub fn plus(&self, other: &Cost) -> Cost {
        Cost {
            flops: &self.flops + &other.flops,
            product_flops: &self.product_flops + &other.product_flops,
            bytes_read: &self.bytes_read + &other.bytes_read,
            bytes_written: &self.bytes_written + &other.bytes_written,
        }
    }

    /// The cost with symbols replaced by their values.
    #[must_use]
    pub fn bind(&self, bindings: &Bindings) -> Cost {
        Cost {
            flops: self.flops.bind(bindings),
            product_flops: self.product_flops.bind(bindings),
            bytes_read: self.bytes_read.bind(bindings),
            bytes_written: self.bytes_written.bind(bindings),
        }
    }
}

/// The cost of an op; of a call, that of the called function.
pub fn cost(op: &Op, operands: &[&TensorType], results: &[&TensorType], module: &Module) -> Cost {
    let count = |x: &TensorType| x.elements();
    match op {
        Op::Constant { .. } | Op::Iota { .. } => moved(&[], results),
        Op::Random { .. } => computed(count(results[0]), operands, results),
        Op::FoldKey { .. } => moved(operands, results),
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast { .. } => {
            computed(count(results[0]), operands, results)
        }
        Op::Contract(einsum) | Op::ScaledContract { einsum, .. } => {
            contract(einsum, operands, results)
        }
        Op::Conv(c) => conv(&c.orders[1], operands, results),
        Op::Reduce { .. }
        | Op::Prod { .. }
        | Op::ArgMax { .. }
        | Op::Cumulative { .. }
        | Op::Sort { .. }
        | Op::TopK { .. } => computed(count(operands[0]), operands, results),
        Op::Reshape { .. } => Cost::default(),
        Op::Transpose { .. } | Op::Broadcast { .. } | Op::Reverse { .. } => {
            moved(operands, results)
        }
        Op::Window(_) => moved(results, results),
        Op::Fold { .. } => computed(count(operands[0]), operands, results),
        Op::Slice { .. } | Op::DynamicSlice { .. } => moved(results, results),
        Op::Pad { .. } | Op::Concat { .. } => moved(operands, results),
        Op::Gather { .. } => moved(&[results[0], operands[1]], results),
        Op::ScatterAdd { .. } => computed(count(operands[1]), operands, results),
        Op::Scatter { .. } => moved(&operands[..3], results),
        Op::DynamicUpdateSlice { .. } => moved(&operands[1..2], &operands[1..2]),
        Op::Call { function } => function_cost(module, function),
        Op::Collective { .. } => moved(operands, results),
    }
}

/// The cost of one run of a function: the sum of its nodes' costs. Nothing for an unknown one.
pub fn function_cost(module: &Module, function: &str) -> Cost {
    function_cost_at(module, function, &Bindings::new())
}

/// As [`function_cost`], with symbols replaced by their values first, so that numbers are added.
pub fn function_cost_at(module: &Module, function: &str, bindings: &Bindings) -> Cost {
    let Some(function) = module.function(function) else { return Cost::default() };
    let mut sum = Cost::default();
    let mut calls: BTreeMap<&str, usize> = BTreeMap::new();
    for node in &function.nodes {
        if let Some(callee) = node.callee() {
            *calls.entry(callee).or_default() += 1;
            continue;
        }
        let types = |ids: &[crate::ValueId]| -> Vec<TensorType> {
            ids.iter().map(|id| function.ty(*id).bind(bindings)).collect()
        };
        let (operands, results) = (types(&node.operands), types(&node.results));
        let operands: Vec<&TensorType> = operands.iter().collect();
        let results: Vec<&TensorType> = results.iter().collect();
        sum = sum.plus(&cost(&node.op, &operands, &results, module));
    }
    for (callee, count) in calls {
        sum = sum.plus(&function_cost_at(module, callee, bindings).times(count));
    }
    routed(sum, function)
}

fn routed(cost: Cost, function: &Function) -> Cost {
    let [visited, experts] = share_visited(function);
    let of_visited = |flops: &Dim| {
        let of_one = flops.divide(experts)?;
        Some(&of_one * &Dim::constant(visited))
    };
    match (of_visited(&cost.flops), of_visited(&cost.product_flops)) {
        (Some(flops), Some(product_flops)) => Cost { flops, product_flops, ..cost },
        _ => cost,
    }
}

/// The share of experts that a token visits, as a fraction: the definition of these composites
/// computes every expert for every token, in all of its nodes. 1 for all other functions.
pub fn share_visited(function: &Function) -> [i64; 2] {
    let all = [1, 1];
    let Kind::Composite { name, attributes } = &function.kind else { return all };
    let weight = function.find("w_gate").filter(|_| EXPERTS.contains(&name.as_str()));
    let experts = weight.and_then(|weight| function.ty(weight).dims.first()?.as_constant());
    match (experts, attributes.get("top_k")) {
        (Some(experts), Some(visited)) if experts > 0 => [(*visited as i64).min(experts), experts],
        _ => all,
    }
}

fn bytes(types: &[&TensorType]) -> Dim {
    let of = |ty: &&TensorType| &ty.elements() * &Dim::from(ty.dtype.size() as usize);
    types.iter().map(of).fold(Dim::default(), |sum, bytes| &sum + &bytes)
}

fn moved(read: &[&TensorType], written: &[&TensorType]) -> Cost {
    Cost { bytes_read: bytes(read), bytes_written: bytes(written), ..Cost::default() }
}

fn computed(flops: Dim, read: &[&TensorType], written: &[&TensorType]) -> Cost {
    Cost { flops, ..moved(read, written) }
}

/// Two operations for every point of the space of all factors.
fn contract(einsum: &Einsum, operands: &[&TensorType], results: &[&TensorType]) -> Cost {
    let size = |c: &char| match einsum.a.iter().position(|a| a == c) {
        Some(at) => Some(&operands[0].dims[at]),
        None => einsum.b.iter().position(|b| b == c).map(|at| &operands[1].dims[at]),
    };
    let points = product(einsum.letters().iter().filter_map(size));
    let flops = &points * &Dim::from(2);
    Cost { product_flops: flops.clone(), ..computed(flops, operands, results) }
}

/// Two operations for every element of the result and of one kernel.
fn conv(order: &DimOrder, operands: &[&TensorType], results: &[&TensorType]) -> Cost {
    let points = &results[0].elements() * &product(&order.usual(&operands[1].dims)[1..]);
    let flops = &points * &Dim::from(2);
    Cost { product_flops: flops.clone(), ..computed(flops, operands, results) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::library::instantiate;
    use crate::text::parse_module;

    #[test]
    fn costs_are_polynomials_and_calls_add_up() {
        let text = "module m
  func @layer(%x: f32[B, 8], %w: f32[8, 8]) {
    %h: f32[B, 8] = contract bm,mf->bf %x %w
    %y: f32[B, 8] = tanh %h
    return %y
  }
  func @model(%x: f32[B, 8], %w: f32[8, 8]) {
    %a: f32[B, 8] = call @layer %x %w
    %b: f32[B, 8] = call @layer %a %w
    %c: f32[8*B] = reshape %b
    %d: f32[] = reduce sum dims=[0] %c
    return %d
  }
";
        let module = parse_module("m", text).unwrap();
        let layer = function_cost(&module, "layer");
        assert_eq!(layer.product_flops.to_string(), "128*B");
        assert_eq!(layer.flops.to_string(), "136*B");
        assert_eq!(layer.bytes_read.to_string(), "64*B+256");
        assert_eq!(layer.bytes_written.to_string(), "64*B");
        let model = function_cost(&module, "model");
        assert_eq!(model.flops.to_string(), "280*B");
        assert_eq!(model.bytes_written.to_string(), "128*B+4");
        let bound = model.bind(&Bindings::from([("B".to_owned(), 2)]));
        assert_eq!(bound.product_flops, Dim::from(512));
    }

    /// Three products of each expert that a token visits, of eight.
    #[test]
    fn experts_that_no_token_visits_cost_nothing() {
        let ty = |dims: &[usize]| TensorType::of(DType::F32, dims);
        let (x, gates) = (ty(&[2, 3, 5]), ty(&[2, 3, 8]));
        let (wide, down) = (ty(&[8, 7, 5]), ty(&[8, 5, 7]));
        let operands = [x, gates, wide.clone(), wide, down];
        let attributes = [("top_k".to_owned(), 2.0)].into();
        let experts = instantiate("experts", &attributes, &operands, "experts").unwrap();
        let module = Module { name: "m".into(), functions: vec![experts] };
        let cost = function_cost(&module, "experts");
        assert_eq!(cost.product_flops, Dim::from(2 * 3 * (2 * 3) * 2 * 5 * 7));
    }
}
