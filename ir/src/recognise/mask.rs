//! Masks: which key a query sees, computed at every pair where no input decides it, and proved to
//! be full, causal or windowed.

use super::element::{Digit, Element, Graph, Index};
use crate::dim::Bindings;
use crate::eval::eval_op;
use crate::op::Op;
use crate::tensor::Tensor;

/// The number by which every key is seen.
pub(super) const UNMASKED: f64 = (1_u64 << 30) as f64;

/// From where on a score hides a key: `e^x` is zero in f32 from -104 and in f64 from -746 on, and
/// exporters write -1e4 or less, so that this leaves room for the scores themselves.
pub(super) const HIDDEN: f64 = -1000.0;

/// How deep the formula of a mask is followed.
const DEPTH: usize = 40;

/// Pairs of a query and a key at most: those of 4096 tokens.
const PAIRS_MAX: usize = 1 << 24;

/// The dims over which a mask is computed: samples and heads, then queries, then keys.
pub(super) struct Pairs {
    /// The variable and size of each; size one has no variable.
    axes: Vec<(Option<usize>, usize)>,
}

impl Pairs {
    /// The pairs of two indices, for all others of known sizes too; none where the size of one of
    /// the two is open or there are too many.
    pub(super) fn of(others: &[Digit], queries: &Index, keys: &Index) -> Option<Pairs> {
        let of = |Digit { variable, size, .. }: &Digit| {
            Some((Some(*variable), usize::try_from(size.as_constant()?).ok()?))
        };
        let axis = |index: &Index| match &index[..] {
            [] => Some((None, 1)),
            [digit] => of(digit),
            _ => None,
        };
        // What an open size counts has no place here: masks that depend on it are not computed.
        let others = others.iter().filter_map(of).map(Some);
        let axes: Vec<_> = others.chain([axis(queries), axis(keys)]).collect::<Option<_>>()?;
        let mut sizes = axes.iter().map(|(_, size)| *size);
        let count = sizes.try_fold(1_usize, usize::checked_mul)?;
        (1..=PAIRS_MAX).contains(&count).then_some(Pairs { axes })
    }

    fn dims(&self) -> Vec<usize> {
        self.axes.iter().map(|(_, size)| *size).collect()
    }

    fn queries_and_keys(&self) -> [usize; 2] {
        let count = self.axes.len();
        [self.axes[count - 2].1, self.axes[count - 1].1]
    }

    /// How many pairs there are of a query and a key.
    pub(super) fn count(&self) -> usize {
        self.queries_and_keys().iter().product()
    }

    /// The number of an index at every pair; none where another variable decides it.
    fn places(&self, index: &Index) -> Option<Vec<usize>> {
        let sizes = self.dims();
        let mut places = vec![0; sizes.iter().product()];
        for Digit { variable, stride, size } in index {
            let axis = self.axes.iter().position(|(own, _)| *own == Some(*variable))?;
            let inner: usize = sizes[axis + 1..].iter().product();
            let constant = |d: &crate::Dim| usize::try_from(d.as_constant()?).ok();
            let (stride, size) = (constant(stride)?, constant(size)?);
            for (at, place) in places.iter_mut().enumerate() {
                let number = at / inner % sizes[axis];
                *place = *place * size + number.checked_div(stride)? % size;
            }
        }
        Some(places)
    }

    /// The elements at every pair of a query and a key, where they are the same for all others;
    /// none where an input decides them.
    pub(super) fn values(&self, graph: &Graph, of: &Element) -> Option<Vec<f64>> {
        let mut all = self.within(graph, of, DEPTH)?.to_f64();
        let count = self.count();
        let is_same = all.chunks(count).all(|other| *other == all[..count]);
        all.truncate(count);
        is_same.then_some(all)
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "other ops are evaluated whole or not")]
    fn within(&self, graph: &Graph, of: &Element, depth: usize) -> Option<Tensor> {
        let of = graph.peel(of);
        let ty = graph.function.ty(of.value);
        if depth == 0 {
            return None;
        }
        if let Some(value) = graph.constant(&of) {
            return Some(Tensor::filled(ty.dtype, &self.dims(), value));
        }
        if let Some(whole) = graph.evaluate(of.value) {
            let mut places = vec![0; self.dims().iter().product()];
            for (index, size) in of.index.iter().zip(&whole.dims) {
                for (place, more) in places.iter_mut().zip(self.places(index)?) {
                    *place = *place * size + more;
                }
            }
            let all = whole.to_f64();
            let numbers = places.into_iter().map(|at| all[at]).collect();
            return Some(Tensor::from_f64(ty.dtype, &self.dims(), numbers));
        }
        match graph.op(&of)? {
            Op::Iota { dim, start, .. } => {
                let places = self.places(&of.index[*dim])?;
                let numbers = places.into_iter().map(|at| (at as i64 + start) as f64).collect();
                Some(Tensor::from_f64(ty.dtype, &self.dims(), numbers))
            }
            op @ (Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast { .. }) => {
                let operands = graph.operands(&of);
                let operands: Vec<Tensor> = operands
                    .iter()
                    .map(|operand| self.within(graph, operand, depth - 1))
                    .collect::<Option<_>>()?;
                let operands: Vec<&Tensor> = operands.iter().collect();
                eval_op(op, &operands, &Bindings::new()).ok()
            }
            _ => None,
        }
    }

    /// The attributes by which every query sees these keys and no others; none where there are
    /// none, or a query sees no key.
    pub(super) fn proved(&self, sees: &[bool]) -> Option<Sight> {
        let [queries, keys] = self.queries_and_keys();
        if sees.iter().all(|sees| *sees) {
            return Some(Sight::FULL);
        }
        let ends = |row: usize| {
            let row = &sees[row * keys..][..keys];
            Some((row.iter().position(|s| *s)? as i64, row.iter().rposition(|s| *s)? as i64))
        };
        let ends: Vec<(i64, i64)> = (0..queries).map(ends).collect::<Option<_>>()?;
        let rows = || ends.iter().zip(0_i64..);
        let last = keys as i64 - 1;
        // A row whose last key is hidden tells its position.
        let offset = rows().find(|((_, high), _)| *high < last).map(|((_, high), row)| high - row);
        let offset = offset.unwrap_or(last);
        let window =
            rows().find(|((low, _), _)| *low > 0).map(|((low, _), row)| row + offset + 1 - low);
        let window = window.unwrap_or(0);
        if offset < 0 || window < 0 {
            return None;
        }
        let is_seen = |row: i64, key: i64| {
            let position = row + offset;
            key <= position && (window == 0 || position - window < key)
        };
        let as_stated = sees
            .iter()
            .enumerate()
            .all(|(at, sees)| *sees == is_seen((at / keys) as i64, (at % keys) as i64));
        as_stated.then_some(Sight { query_offset: offset as f64, window: window as f64 })
    }
}

/// What the queries of attention see.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sight {
    pub(super) query_offset: f64,
    pub(super) window: f64,
}

impl Sight {
    /// Everything.
    pub(super) const FULL: Sight = Sight { query_offset: UNMASKED, window: 0.0 };
}
