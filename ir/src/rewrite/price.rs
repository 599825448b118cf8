//! The price of a term: operations, bytes and launches, on no device in particular.
//!
//! The unit is one byte moved. Before planning nothing is known of the device, so that only the
//! order of magnitude of the three matters: all constants here are chosen, between those of a
//! processor core and of a large GPU.

use super::choose::Price;
use super::term::{Graph, Head, Term};
use crate::cost::{Cost, cost, function_cost_at};
use crate::dim::{Bindings, Dim};
use crate::infer::infer;
use crate::module::Module;
use crate::op::Op;
use crate::target::Target;
use crate::types::TensorType;

/// Bytes that could be moved while a kernel is launched. A GPU moves some MiB, a processor core
/// some 10 KiB in that time.
const LAUNCH_BYTES: u64 = 1 << 18;

/// The same of a GPU: three microseconds at some 3 TB/s.
const LAUNCH_BYTES_OF_GPUS: u64 = 8 << 20;

/// Elementwise operations in the time of one byte.
const FLOPS_PER_BYTE: u64 = 4;

/// Operations of products in the time of one byte.
const PRODUCT_FLOPS_PER_BYTE: u64 = 64;

/// Bytes that a target could move while a kernel is launched. CPUs, whose threads are woken for it,
/// have the price that is asked where there is no target yet.
pub fn launch_bytes(target: Option<Target>) -> u64 {
    match target {
        Some(Target::Cuda(_)) => LAUNCH_BYTES_OF_GPUS,
        Some(Target::Cpu(_)) | None => LAUNCH_BYTES,
    }
}

/// What a symbol such as `B` is taken for.
const SYMBOL: i64 = 8;

/// What a term does, with symbols taken for 8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Kernels launched.
    pub launches: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Operations, those of products included.
    pub flops: u64,
    /// Operations of products.
    pub product_flops: u64,
}

impl Work {
    /// The price of it on no device: one more than nothing, so that of equal choices the smaller
    /// one wins.
    pub fn price(self) -> Price {
        self.price_at(LAUNCH_BYTES)
    }

    /// The price, with [`launch_bytes`] as the cost of a launch.
    pub fn price_at(self, launch_bytes: u64) -> Price {
        let others = self.flops.saturating_sub(self.product_flops);
        1 + self.launches * launch_bytes
            + self.bytes
            + others / FLOPS_PER_BYTE
            + self.product_flops / PRODUCT_FLOPS_PER_BYTE
    }

    /// Both.
    #[must_use]
    pub fn plus(self, other: Work) -> Work {
        Work {
            launches: self.launches + other.launches,
            bytes: self.bytes + other.bytes,
            flops: self.flops + other.flops,
            product_flops: self.product_flops + other.product_flops,
        }
    }
}

/// The work of an op. A call is one launch that reads its operands and writes its results; views
/// that keep the order of elements, and numbers, are none.
pub fn work(op: &Op, operands: &[&TensorType], results: &[&TensorType], module: &Module) -> Work {
    let is_free = matches!(op, Op::Constant { .. } | Op::Reshape { .. });
    if is_free {
        return Work::default();
    }
    let numbers: Bindings = operands
        .iter()
        .chain(results)
        .flat_map(|ty| ty.dims.iter().flat_map(Dim::symbols))
        .map(|symbol| (symbol.to_owned(), SYMBOL))
        .collect();
    let number = |dim: &Dim| dim.bind(&numbers).as_constant().map_or(0, |n| n.max(0) as u64);
    let bind = |types: &[&TensorType]| -> Vec<TensorType> {
        types.iter().map(|ty| ty.bind(&numbers)).collect()
    };
    let (operands, results) = (bind(operands), bind(results));
    let cost = if let Op::Call { function } = op {
        let bytes = |types: &[TensorType]| {
            types.iter().fold(Dim::default(), |sum, ty| {
                &sum + &(&ty.elements() * &Dim::from(ty.dtype.size() as usize))
            })
        };
        let inner = function_cost_at(module, function, &numbers);
        Cost { bytes_read: bytes(&operands), bytes_written: bytes(&results), ..inner }
    } else {
        let operands: Vec<&TensorType> = operands.iter().collect();
        let results: Vec<&TensorType> = results.iter().collect();
        cost(op, &operands, &results, module)
    };
    Work {
        launches: 1,
        bytes: number(&cost.bytes_read) + number(&cost.bytes_written),
        flops: number(&cost.flops),
        product_flops: number(&cost.product_flops),
    }
}

/// The work of a term of a graph.
pub fn term_work(graph: &Graph, term: &Term) -> Work {
    let Head::Op(_, op) = term.head else { return Work::default() };
    let operands: Vec<&TensorType> = term.operands.iter().map(|id| graph[*id].data.ty()).collect();
    let op = graph.analysis.ops.get(op);
    let types = infer(op, &operands, &graph.analysis.module);
    let Ok(types) = types else { panic!("a term is checked before it is added") };
    work(op, &operands, &types.iter().collect::<Vec<_>>(), &graph.analysis.module)
}
