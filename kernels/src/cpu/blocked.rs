//! A block of a product.

use super::formats::Operand;
use super::frame::Frame;

/// A block of a product and its tables of offsets.
pub(super) struct Block<'a, S> {
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) c: *mut S,
    pub(super) am: &'a [usize],
    pub(super) cm: &'a [usize],
    pub(super) ak: &'a [usize],
    pub(super) bk: &'a [usize],
    pub(super) bn: &'a [usize],
    pub(super) cn: &'a [usize],
    pub(super) frame: Frame<'a>,
}
