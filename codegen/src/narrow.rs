//! Integers of 64 bits as integers of 32, which kernels compute with.
//!
//! What is counted and looked up on one device fits. Constants that do not, such as the end of an
//! open range, become the nearest that does; sums that leave 32 bits do so too.

use ir::{DType, Function, Module, Op};

/// Makes every `i64` of a module an `i32`.
pub fn narrow_integers(module: &mut Module) {
    module.functions.iter_mut().for_each(narrow);
}

/// The nearest integer of 32 bits.
pub fn clamped(number: i64) -> i32 {
    number.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32
}

fn narrow(function: &mut Function) {
    for value in &mut function.values {
        if value.ty.dtype == DType::I64 {
            value.ty.dtype = DType::I32;
        }
    }
    for node in &mut function.nodes {
        #[expect(clippy::wildcard_enum_match_arm, reason = "other ops state no element type")]
        match &mut node.op {
            Op::Constant { value, dtype, .. } if *dtype == DType::I64 => {
                *dtype = DType::I32;
                *value = f64::from(clamped(*value as i64));
            }
            Op::Iota { dtype, .. } | Op::Cast { dtype } if *dtype == DType::I64 => {
                *dtype = DType::I32;
            }
            _ => {}
        }
    }
}
