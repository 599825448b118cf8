//! Rotary embeddings found in graphs as exporters write them, and twins that nearly are such.

use gantline_ir::op::{Binary, Op, Unary};
use gantline_ir::{DType, Dim, ValueId};

use crate::draws::{Draws, seeds};
use crate::recognise::{Exporter, assert_same_gradients, built, called, dtype, recognised};

/// What a twin does otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Twin {
    None,
    /// The half that is not negated is.
    OtherHalf,
    /// Neither half is negated.
    Neither,
    /// The halves stay where they are.
    Unturned,
    /// The cosines are those of other angles.
    Cosines,
    /// Rows count from the end.
    Backwards,
}

const TWINS: [Twin; 5] =
    [Twin::OtherHalf, Twin::Neither, Twin::Unturned, Twin::Cosines, Twin::Backwards];

/// Angles `[S, D/2]` of rows and pairs.
fn angles(e: &mut Exporter<'_, '_>, rows: usize, half: usize, theta: f64, twin: Twin) -> ValueId {
    let dims = vec![Dim::from(rows), Dim::from(half)];
    let i = e.b.iota("row", 0, DType::I64, dims.clone());
    let i = match twin {
        Twin::Backwards => {
            let last = e.b.constant_like("last", (rows - 1) as f64, i);
            e.b.binary("from_end", Binary::Sub, last, i)
        }
        Twin::None | Twin::OtherHalf | Twin::Neither | Twin::Unturned | Twin::Cosines => i,
    };
    let j = e.b.iota("pair", 1, DType::I64, dims);
    let [i, j] = [i, j].map(|x| e.b.push("float", Op::Cast { dtype: e.dtype }, &[x]));
    let power = e.with(Binary::Mul, j, 1.0 / half as f64);
    let base = e.number(theta, power);
    let scale = e.b.binary("scale", Binary::Pow, base, power);
    e.b.binary("angle", Binary::Div, i, scale)
}

fn half(e: &mut Exporter<'_, '_>, x: ValueId, start: usize, size: usize) -> ValueId {
    let dim = e.dims(x).len() - 1;
    e.b.push("half", Op::Slice { dim, start, size }, &[x])
}

/// `x cos + (-x₂, x₁) sin`
fn turned(e: &mut Exporter<'_, '_>, x: ValueId, angle: ValueId, sign: f64, twin: Twin) -> ValueId {
    let dims = e.dims(x);
    let (last, size) = (dims.len() - 1, dims[dims.len() - 1] / 2);
    let twice = e.b.push("twice", Op::Concat { dim: 1 }, &[angle, angle]);
    let sin = e.b.unary("sin", Unary::Sin, twice);
    let sin = if sign < 0.0 { e.b.unary("neg", Unary::Neg, sin) } else { sin };
    let of_cos = if twin == Twin::Cosines { e.with(Binary::Mul, twice, 1.01) } else { twice };
    let cos = e.b.unary("cos", Unary::Cos, of_cos);
    let [cos, sin] = [cos, sin].map(|table| e.repeat(table, &dims));
    let (low, high) = (half(e, x, 0, size), half(e, x, size, size));
    let negated = |e: &mut Exporter<'_, '_>, x: ValueId| match e.r.coin() {
        true => e.b.unary("neg", Unary::Neg, x),
        false => e.with(Binary::Mul, x, -1.0),
    };
    let (first, second) = match twin {
        Twin::OtherHalf => (high, negated(e, low)),
        Twin::Neither => (high, low),
        Twin::Unturned => (negated(e, low), high),
        Twin::None | Twin::Cosines | Twin::Backwards => (negated(e, high), low),
    };
    let other = e.b.push("turned", Op::Concat { dim: last }, &[first, second]);
    let (left, right) = (e.two(Binary::Mul, x, cos), e.two(Binary::Mul, other, sin));
    e.two(Binary::Add, left, right)
}

/// The halves `x₁ cos - x₂ sin` and `x₂ cos + x₁ sin` side by side.
fn by_halves(e: &mut Exporter<'_, '_>, x: ValueId, angle: ValueId) -> ValueId {
    let dims = e.dims(x);
    let (last, size) = (dims.len() - 1, dims[dims.len() - 1] / 2);
    let (low, high) = (half(e, x, 0, size), half(e, x, size, size));
    let dims = e.dims(low);
    let (cos, sin) = (e.b.unary("cos", Unary::Cos, angle), e.b.unary("sin", Unary::Sin, angle));
    let [cos, sin] = [cos, sin].map(|table| e.repeat(table, &dims));
    let (ac, bs) = (e.two(Binary::Mul, low, cos), e.two(Binary::Mul, high, sin));
    let (bc, as_) = (e.two(Binary::Mul, high, cos), e.two(Binary::Mul, low, sin));
    let left = e.b.binary("left", Binary::Sub, ac, bs);
    let right = e.two(Binary::Add, bc, as_);
    e.b.push("y", Op::Concat { dim: last }, &[left, right])
}

const THETAS: [f64; 4] = [1e4, 5e5, 1e6, 12_345.0];

fn sizes(r: &mut Draws) -> [usize; 4] {
    [1 + r.below(2), 1 + r.below(3), 2 + r.below(8), 2 * (2 + r.below(4))]
}

#[test]
fn rotary_embeddings_are_found() {
    for seed in seeds(150) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let [batch, heads, rows, size] = sizes(r);
        let theta = THETAS[r.below(4)];
        let (is_whole, is_partial) = (r.coin(), r.coin());
        let sign = if is_whole && r.coin() { -1.0 } else { 1.0 };
        let width = size + if is_partial { 3 } else { 0 };
        let module = built(r, dtype, |e| {
            let x = e.param("x", &[batch, rows, heads * width]);
            let x = e.view(x, &[batch, rows, heads, width]);
            let x = e.b.push("heads", Op::Transpose { perm: vec![0, 2, 1, 3] }, &[x]);
            let own = if is_partial { half(e, x, 0, size) } else { x };
            let angle = angles(e, rows, size / 2, theta, Twin::None);
            let y = match is_whole {
                true => turned(e, own, angle, sign, Twin::None),
                false => by_halves(e, own, angle),
            };
            if !is_partial {
                return y;
            }
            let rest = half(e, x, size, 3);
            e.b.push("all", Op::Concat { dim: 3 }, &[y, rest])
        });
        let note = format!("SEED={seed} theta={theta} {rows} rows of {size}");
        let after = recognised(&module, r, &note);
        assert_eq!(called(&after), ["rope"], "{note}\n{module}");
        assert_same_gradients(&module, &after, r, &note);
        let shown = after.to_string();
        let told = format!("rope(sign={sign:?}, theta={theta:?})");
        if dtype == DType::F64 {
            assert!(
                shown.contains("rope(") && shown.contains(&format!("sign={sign:?}")),
                "{shown}"
            );
        } else if theta != 12_345.0 {
            assert!(shown.contains(&told), "{note}: {told}\n{shown}");
        }
    }
}

#[test]
fn near_rotary_embeddings_are_not_found() {
    for seed in seeds(100) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let [batch, heads, rows, size] = sizes(r);
        let twin = TWINS[r.below(5)];
        let module = built(r, dtype, |e| {
            let x = e.param("x", &[batch, heads, rows, size]);
            let angle = angles(e, rows, size / 2, 1e4, twin);
            turned(e, x, angle, 1.0, twin)
        });
        let note = format!("SEED={seed} {twin:?}");
        let after = recognised(&module, r, &note);
        assert_eq!(called(&after), [""; 0], "{note}\n{module}");
    }
}
