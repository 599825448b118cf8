//! Values that several calls take, and values that cross from stage to stage.
//!
//! A value crosses to the next stage and from there on to the last one that takes it; its cotangent
//! comes back the same way. Every call that takes it adds to the cotangent that has arrived, the
//! last one of a stage to which none arrives overwrites it.

use std::sync::Arc;

use ir::precision::Precision;
use ir::{DType, TensorType, ValueId};

use crate::calls::{Call, Calls, Operand};
use crate::refusal::Refusal;
use crate::routines::Layer;

/// The values that calls before the call `at` make and calls from there on take, in order.
pub fn crossing(calls: &Calls, at: usize) -> Vec<ValueId> {
    let (before, after) = calls.calls.split_at(at.min(calls.calls.len()));
    let takes = |v: &ValueId| after.iter().any(|c| c.operands.contains(&Operand::Value(*v)));
    let made = before.iter().flat_map(|call| &call.results).copied();
    made.filter(|value| !calls.results.contains(value) && takes(value)).collect()
}

/// The values that come from the stage before, that no call here takes and that go on to the stage
/// after, with their types: those of results of the calls that make them.
pub(crate) fn relayed(
    calls: &Calls,
    own: &[Call],
    [arriving, leaving]: &[Vec<ValueId>; 2],
    layer: &mut impl FnMut(&Call, &[bool]) -> Result<Arc<Layer>, Refusal>,
) -> Result<Vec<(ValueId, TensorType)>, Refusal> {
    let mut relayed = Vec::new();
    for value in arriving.iter().filter(|value| leaving.contains(value)) {
        let producer = calls.calls.iter().find(|call| call.results.contains(value));
        let is_taken = own.iter().any(|call| call.operands.contains(&Operand::Value(*value)));
        let Some(producer) = producer.filter(|_| !is_taken) else { continue };
        let made = layer(producer, &vec![false; producer.operands.len()])?;
        let forward = &made.halves.forward;
        let results = producer.results.iter().zip(&forward.results);
        let ty = results.filter(|(result, _)| *result == value).map(|(_, own)| forward.ty(*own));
        relayed.extend(ty.map(|ty| (*value, ty.clone())));
    }
    Ok(relayed)
}

/// What the gradients of weights that calls make are added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// Those of all calls before, of this number of micro-batches.
    OfStep {
        /// The micro-batches.
        terms: usize,
    },
    /// Nothing but others of the same call: ranks sum them, which share gradients.
    OfEachCall,
}

/// For each call of a stage and each of its operands, whether the operand's gradient is added to
/// what its buffer holds.
///
/// With one micro-batch the first backward call that touches a weight's gradient overwrites it, so
/// that nothing is cleared first; later ones add. With several micro-batches all gradients of
/// weights are added. The cotangent of a value is overwritten in each micro-batch, unless it has
/// `arrived` from a later stage.
pub fn gradient_adds(own: &[Call], arrived: &[ValueId], sums: Sums) -> Vec<Vec<bool>> {
    let mut touched: Vec<Operand> = arrived.iter().map(|v| Operand::Value(*v)).collect();
    let mut adds = Vec::new();
    for call in own.iter().rev() {
        let is_added = |(at, operand): (usize, &Operand)| match operand {
            // Gradients of one routine have no order among them.
            Operand::Weight(_) => {
                let twice = call.operands.iter().enumerate().any(|(b, o)| b != at && o == operand);
                let is_added = match sums {
                    Sums::OfStep { terms } => terms > 1 || touched.contains(operand),
                    Sums::OfEachCall => false,
                };
                twice || is_added
            }
            Operand::Value(_) => touched.contains(operand),
            Operand::Cache(_)
            | Operand::Tokens
            | Operand::Labels
            | Operand::Documents
            | Operand::Key(_)
            | Operand::Position
            | Operand::Last => false,
        };
        adds.push(call.operands.iter().enumerate().map(is_added).collect());
        touched.extend(&call.operands);
    }
    adds.reverse();
    adds
}

/// For each operand of a call, the type in which its gradient is added up, where that is not the
/// type of sums: to that each sum is rounded.
pub fn rounded_gradients(call: &Call, precision: &Precision) -> Vec<Option<DType>> {
    let Precision { gradients, accumulate, .. } = *precision;
    let of = |operand: &Operand| {
        (matches!(operand, Operand::Weight(_)) && gradients != accumulate).then_some(gradients)
    };
    call.operands.iter().map(of).collect()
}

/// Whether the gradient of a weight is added to before anything was written to it in this step.
pub(crate) fn must_clear(own: &[Call], sums: Sums) -> bool {
    if sums == Sums::OfEachCall {
        return false;
    }
    let adds = gradient_adds(own, &[], sums);
    let mut touched = Vec::new();
    for (call, adds) in own.iter().zip(adds).rev() {
        for (operand, adds) in call.operands.iter().zip(adds) {
            let Operand::Weight(weight) = operand else { continue };
            if adds && !touched.contains(weight) {
                return true;
            }
            touched.push(*weight);
        }
    }
    false
}
