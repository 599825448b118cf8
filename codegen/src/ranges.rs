//! Ranges: between which integers the elements of each value lie.
//!
//! A forward pass over intervals whose ends have 128 bits, so that they do not wrap. What leaves
//! the integers of its type wraps, and may then be any of these.
//!
//! Of floating-point numbers the pass knows the integers between which they lie, where something
//! bounds them, and whether all of them are integers: quantised models compute in such numbers.

use ir::op::{Binary, Combiner, Unary, Windows};
use ir::{DType, Function, Node, Op, TensorType, ValueId};

/// The integers from one on up to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The least.
    pub low: i128,
    /// The largest.
    pub high: i128,
}

impl Range {
    /// Between two numbers, both included.
    pub fn new(low: impl Into<i128>, high: impl Into<i128>) -> Range {
        Range { low: low.into(), high: high.into() }
    }

    /// All integers of a type; none for other types.
    pub fn of_type(dtype: DType) -> Option<Range> {
        match dtype {
            DType::Bool => Some(Range::new(0, 1)),
            DType::I8 => Some(Range::new(i8::MIN, i8::MAX)),
            DType::I32 => Some(Range::new(i32::MIN, i32::MAX)),
            DType::U32 => Some(Range::new(u32::MIN, u32::MAX)),
            DType::I64 => Some(Range::new(i64::MIN, i64::MAX)),
            DType::F64 | DType::F32 | DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => {
                None
            }
        }
    }

    /// Whether all of these are among others.
    pub fn is_within(self, other: Range) -> bool {
        other.low <= self.low && self.high <= other.high
    }

    /// From the least to the largest of some numbers.
    fn around(numbers: impl IntoIterator<Item = i128>) -> Range {
        let empty = Range { low: i128::MAX, high: i128::MIN };
        numbers.into_iter().fold(empty, |r, n| Range { low: r.low.min(n), high: r.high.max(n) })
    }

    fn and(self, other: Range) -> Range {
        Range::around([self.low, self.high, other.low, other.high])
    }

    fn with_zero(self) -> Range {
        self.and(Range::new(0, 0))
    }

    /// Sums of one to `count` of these, or of `count` alone where `all` of them are added.
    fn sum(self, count: i128, all: bool) -> Range {
        let first = if all { count } else { 1 };
        Range::around([first, count].into_iter().flat_map(|n| [n * self.low, n * self.high]))
    }
}

/// What is known of the elements of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Between which integers those lie that are numbers.
    pub range: Range,
    /// Whether all of them are integers.
    pub is_whole: bool,
}

impl Known {
    /// The range of the same numbers as integers: what is no number becomes zero, others the next
    /// integer towards it.
    fn whole(self) -> Range {
        if self.is_whole { self.range } else { self.range.with_zero() }
    }
}

/// The range of each value of a function: none of what is no integer. A parameter has the one that
/// is given, where there is one for it, else all of its type. O(nodes + operands).
pub fn ranges(function: &Function, given: impl Fn(ValueId) -> Option<Range>) -> Vec<Option<Range>> {
    let is_integer = |value: &ir::Value| Range::of_type(value.ty.dtype).is_some();
    let known = known(function, given).into_iter().zip(&function.values);
    known.map(|(known, value)| Some(known?.range).filter(|_| is_integer(value))).collect()
}

/// What is known of each value of a function, its floating-point numbers as well; the rest is as in
/// [`ranges`].
pub fn known(function: &Function, given: impl Fn(ValueId) -> Option<Range>) -> Vec<Option<Known>> {
    let of_type = |value: ValueId| Range::of_type(function.ty(value).dtype);
    let whole = |range: Range| Known { range, is_whole: true };
    let mut found: Vec<Option<Known>> = vec![None; function.values.len()];
    for param in function.params() {
        let range = match (of_type(param), given(param)) {
            (Some(all), Some(given)) if given.is_within(all) => Some(given),
            (all, _) => all,
        };
        found[param.index()] = range.map(whole);
    }
    for node in &function.nodes {
        for result in &node.results {
            found[result.index()] = match of_type(*result) {
                Some(all) => {
                    let own = range_of_node(function, node, &found);
                    Some(whole(own.filter(|own| own.is_within(all)).unwrap_or(all)))
                }
                None => float(function, node, &found),
            };
        }
    }
    found
}

/// Up to which integers a floating-point type has all; none for types of few digits.
pub(crate) fn exact(dtype: DType) -> Option<Range> {
    let around = |most: i128| Some(Range { low: -most, high: most });
    match dtype {
        DType::F64 => around(1 << 53),
        DType::F32 => around(1 << 24),
        DType::BF16
        | DType::F16
        | DType::F8E4M3
        | DType::F8E5M2
        | DType::I8
        | DType::I32
        | DType::U32
        | DType::I64
        | DType::Bool => None,
    }
}

/// Numbers of which nothing is known: beyond all that [`exact`] has.
const ANY: Known = Known { range: Range { low: -(1 << 100), high: 1 << 100 }, is_whole: false };

/// What is known of a node that yields floating-point numbers.
fn float(function: &Function, node: &Node, found: &[Option<Known>]) -> Option<Known> {
    let exact = exact(function.ty(node.results[0]).dtype)?;
    let x = |at: usize| found[node.operands[at].index()];
    let mut own = float_of_node(node, x)?;
    if own.is_whole {
        return own.range.is_within(exact).then_some(own);
    }
    // What is rounded to a type stays between integers that the type has, and only between those.
    let has = |end: i128| exact.low <= end && end <= exact.high;
    let Known { range: any, .. } = ANY;
    own.range.low = if has(own.range.low) { own.range.low } else { any.low };
    own.range.high = if has(own.range.high) { own.range.high } else { any.high };
    (own != ANY).then_some(own)
}

/// The same as if all integers were numbers of the type.
fn float_of_node(node: &Node, x: impl Fn(usize) -> Option<Known>) -> Option<Known> {
    let any = |at: usize| x(at).unwrap_or(ANY);
    let both = |a: Known, b: Known, range: Range| {
        Some(Known { range, is_whole: a.is_whole && b.is_whole })
    };
    #[expect(clippy::wildcard_enum_match_arm, reason = "few ops yield integers or bounds")]
    match &node.op {
        Op::Constant { value, .. } if value.abs() < 1e15 => {
            let range = Range::new(value.floor() as i64, value.ceil() as i64);
            Some(Known { range, is_whole: value.fract() == 0.0 })
        }
        Op::Unary(how @ (Unary::Neg | Unary::Abs)) => {
            Some(Known { range: unary(*how, x(0)?.range)?, ..x(0)? })
        }
        Op::Unary(Unary::Floor) => x(0),
        Op::Binary(how @ (Binary::Max | Binary::Min)) => {
            let (a, b) = (any(0), any(1));
            both(a, b, binary(*how, a.range, b.range)?)
        }
        Op::Binary(how @ (Binary::Add | Binary::Sub | Binary::Mul)) => {
            let (a, b) = (x(0)?, x(1)?);
            let sum = both(a, b, binary(*how, a.range, b.range)?)?;
            sum.is_whole.then_some(sum)
        }
        Op::Select => both(x(1)?, x(2)?, x(1)?.range.and(x(2)?.range)),
        Op::Cast { .. }
        | Op::Reshape { .. }
        | Op::Transpose { .. }
        | Op::Broadcast { .. }
        | Op::Slice { .. }
        | Op::Reverse { .. }
        | Op::Window(_) => x(0),
        Op::Pad { .. } | Op::Gather { .. } => {
            Some(Known { range: x(0)?.range.with_zero(), ..x(0)? })
        }
        _ => None,
    }
}

/// The range of a node of one result, as if nothing wrapped; none where it may be any.
fn range_of_node(function: &Function, node: &Node, found: &[Option<Known>]) -> Option<Range> {
    let ty = |at: usize| function.ty(node.operands[at]);
    let x = |at: usize| found[node.operands[at].index()].map(Known::whole);
    let result = function.ty(node.results[0]);
    let is_truth = result.dtype == DType::Bool;
    match &node.op {
        Op::Constant { value, .. } => Some(Range::new(*value as i64, *value as i64)),
        Op::Iota { dim, start, .. } => {
            Some(Range::new(*start, i128::from(*start) + (extent(result, *dim) - 1).max(0)))
        }
        Op::Unary(how) => unary(*how, x(0)?),
        Op::Binary(how) => binary(*how, x(0)?, x(1)?),
        Op::Select => Some(x(1)?.and(x(2)?)),
        Op::Reduce { .. }
        | Op::Prod { .. }
        | Op::Cumulative { .. }
        | Op::Fold { .. }
        | Op::ScatterAdd { .. }
            if is_truth =>
        {
            None
        }
        Op::Reduce { combiner, dims } => {
            let count = extents(ty(0), dims);
            match combiner {
                Combiner::Sum => Some(x(0)?.sum(count, true)),
                Combiner::Max | Combiner::Min => x(0).filter(|_| count > 0),
            }
        }
        Op::Prod { dims } => product(x(0)?, extents(ty(0), dims)),
        Op::Cumulative { combiner: Combiner::Sum, dim } => {
            Some(x(0)?.sum(extent(ty(0), *dim).max(1), false))
        }
        Op::Fold { windows: Windows { size, .. }, .. } => {
            Some(x(0)?.sum((*size).max(1) as i128, false).with_zero())
        }
        Op::ScatterAdd { .. } => {
            let count = extents(ty(0), &(0..ty(0).ndim()).collect::<Vec<_>>());
            Some(x(1)?.sum(count.max(1), false).with_zero())
        }
        Op::Sort { dim, .. } | Op::TopK { dim, .. } | Op::ArgMax { dim } => {
            Some(Range::new(0, (extent(ty(0), *dim) - 1).max(0)))
        }
        // Elements that stay as they are.
        Op::Cast { .. }
        | Op::Cumulative { combiner: Combiner::Max | Combiner::Min, .. }
        | Op::Reshape { .. }
        | Op::Transpose { .. }
        | Op::Broadcast { .. }
        | Op::Slice { .. }
        | Op::Reverse { .. }
        | Op::Window(_)
        | Op::DynamicSlice { .. } => x(0),
        Op::Pad { .. } | Op::Gather { .. } => Some(x(0)?.with_zero()),
        Op::Concat { .. } => {
            let all: Option<Vec<Range>> = (0..node.operands.len()).map(x).collect();
            all?.into_iter().reduce(Range::and)
        }
        Op::Scatter { .. } => Some(x(0)?.and(x(2)?)),
        Op::DynamicUpdateSlice { .. } => Some(x(0)?.and(x(1)?)),
        Op::Random { .. }
        | Op::FoldKey { .. }
        | Op::Compare(_)
        | Op::Contract(_)
        | Op::ScaledContract { .. }
        | Op::Conv(_)
        | Op::Call { .. }
        | Op::Collective { .. } => None,
    }
}

/// The range of a product of `count` factors in `x`; none where it may be any.
fn product(x: Range, count: i128) -> Option<Range> {
    let largest = x.low.abs().max(x.high.abs()).max(1);
    let most = u32::try_from(count).ok().and_then(|count| largest.checked_pow(count))?;
    Some(Range { low: if x.low < 0 { -most } else { 0 }, high: most })
}

/// The size of a dim; the largest there can be where it is open.
fn extent(ty: &TensorType, dim: usize) -> i128 {
    i128::from(ty.dims[dim].as_constant().unwrap_or(i64::from(i32::MAX)))
}

/// How many elements some dims have, at most `2^60` where there can be more.
fn extents(ty: &TensorType, dims: &[usize]) -> i128 {
    let most = 1 << 60;
    dims.iter().fold(1, |count, dim| (count * extent(ty, *dim)).min(most))
}

fn unary(how: Unary, x: Range) -> Option<Range> {
    match how {
        Unary::Neg => Some(Range { low: -x.high, high: -x.low }),
        Unary::Abs => {
            let ends = Range::around([x.low.abs(), x.high.abs()]);
            Some(if x.low <= 0 && 0 <= x.high { ends.with_zero() } else { ends })
        }
        Unary::Exp
        | Unary::Log
        | Unary::Sqrt
        | Unary::Rsqrt
        | Unary::Tanh
        | Unary::Erf
        | Unary::Sin
        | Unary::Cos
        | Unary::Floor
        | Unary::PowerFloor => None,
    }
}

fn binary(how: Binary, a: Range, b: Range) -> Option<Range> {
    let ends = |of: fn(i128, i128) -> i128| {
        let all = [(a.low, b.low), (a.low, b.high), (a.high, b.low), (a.high, b.high)];
        Range::around(all.map(|(a, b)| of(a, b)))
    };
    match how {
        Binary::Add => Some(ends(|a, b| a + b)),
        Binary::Sub => Some(ends(|a, b| a - b)),
        // Of 64 bits each, which have no more than 128 together.
        Binary::Mul => Some(ends(|a, b| a * b)),
        Binary::Max => Some(ends(i128::max)),
        Binary::Min => Some(ends(i128::min)),
        // Zero by zero, and largest by one and minus one, which are among or beside the divisors.
        Binary::Div if b.low <= 0 && 0 <= b.high => {
            Some(Range::around([a.low, a.high, -a.low, -a.high]).with_zero())
        }
        Binary::Div => Some(ends(floor_div)),
        Binary::Pow => {
            let largest = a.low.abs().max(a.high.abs()).max(1);
            let most = u32::try_from(b.high.max(0)).ok().and_then(|n| largest.checked_pow(n))?;
            Some(Range { low: if a.low < 0 { -most } else { 0 }, high: most })
        }
    }
}

/// The quotient rounded down, by what is not zero.
fn floor_div(a: i128, b: i128) -> i128 {
    let exact = a % b == 0;
    if exact || (a < 0) == (b < 0) { a / b } else { a / b - 1 }
}

#[cfg(test)]
mod tests {
    use ir::build::Builder;
    use ir::{Kind, Module};

    use super::*;

    /// Every result of numbers of two ranges is in the range of the op.
    #[test]
    fn results_lie_in_their_ranges() {
        let ends = [-9_i64, -3, -1, 0, 1, 2, 7];
        let all = |r: Range| (r.low as i64)..=(r.high as i64);
        let pairs = || {
            ends.iter()
                .enumerate()
                .flat_map(|(at, low)| ends[at..].iter().map(move |high| Range::new(*low, *high)))
        };
        for a in pairs() {
            for how in [Unary::Neg, Unary::Abs] {
                let range = unary(how, a).expect("it has one");
                for x in all(a) {
                    let y = if how == Unary::Neg { -x } else { x.abs() };
                    assert!(Range::new(y, y).is_within(range), "{how:?} {x}: {y}, {range:?}");
                }
            }
            for b in pairs() {
                for how in Binary::ALL {
                    let range = binary(how, a, b).expect("it has one");
                    for (x, y) in all(a).flat_map(|x| all(b).map(move |y| (x, y))) {
                        let z = match how {
                            Binary::Add => x + y,
                            Binary::Sub => x - y,
                            Binary::Mul => x * y,
                            Binary::Max => x.max(y),
                            Binary::Min => x.min(y),
                            Binary::Div if y == 0 => 0,
                            Binary::Div => floor_div(x.into(), y.into()) as i64,
                            Binary::Pow if y >= 0 => x.pow(y as u32),
                            Binary::Pow if x == 0 => 0,
                            Binary::Pow => (x as f64).powi(y as i32).trunc() as i64,
                        };
                        let is_there = Range::new(z, z).is_within(range);
                        assert!(is_there, "{how:?} {x} {y}: {z}, {range:?}");
                    }
                }
            }
        }
    }

    /// What bounds floating-point numbers bounds the integers that are made of them, and zero,
    /// which is made of what is no number.
    #[test]
    fn bounds_of_floats_are_those_of_integers() {
        let mut module = Module::default();
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let x = b.param("x", TensorType::of(DType::F32, &[4]));
        let n = b.param("n", TensorType::of(DType::I32, &[4]));
        let bounded = |b: &mut Builder, low: f64, high: f64| {
            let low = b.constant_like("low", low, x);
            let above = b.binary("above", Binary::Max, x, low);
            let high = b.constant_like("high", high, x);
            let below = b.binary("below", Binary::Min, above, high);
            (below, b.push("whole", Op::Cast { dtype: DType::I32 }, &[below]))
        };
        let (real, byte) = bounded(&mut b, -0.5, 254.5);
        let (_, apart) = bounded(&mut b, 3.0, 7.0);
        let wide = b.push("wide", Op::Cast { dtype: DType::F64 }, &[byte]);
        let less = b.binary("less", Binary::Sub, wide, wide);
        let square = b.binary("square", Binary::Mul, less, less);
        let single = b.push("single", Op::Cast { dtype: DType::F32 }, &[n]);
        let double = b.push("double", Op::Cast { dtype: DType::F64 }, &[n]);
        let function = b.into_function(&[real, apart, square, single, double]);
        let found = known(&function, |_| None);
        let of = |value: ValueId| found[value.index()];
        let is = |low: i64, high: i64, is_whole: bool| {
            Some(Known { range: Range::new(low, high), is_whole })
        };
        assert_eq!(of(x), None);
        assert_eq!(of(real), is(-1, 255, false));
        assert_eq!(of(byte), is(-1, 255, true));
        assert_eq!(of(apart), is(0, 7, true));
        assert_eq!(of(less), is(-256, 256, true));
        assert_eq!(of(square), is(-65_536, 65_536, true));
        assert_eq!(of(single), None, "not all of these are numbers of f32");
        assert_eq!(of(double), is(i32::MIN.into(), i32::MAX.into(), true));
        assert!(ranges(&function, |_| None)[real.index()].is_none(), "it is no integer");
    }

    #[test]
    fn sums_count_their_terms() {
        assert_eq!(Range::new(-1, 3).sum(4, true), Range::new(-4, 12));
        assert_eq!(Range::new(2, 3).sum(4, false), Range::new(2, 12));
        assert_eq!(Range::new(2, 3).sum(0, true), Range::new(0, 0));
    }
}
