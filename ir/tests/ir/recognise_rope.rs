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
        let told = format!("rope(sign={sign:?}, start=0.0, theta={theta:?})");
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

/// What tables of cosines and sines are made with.
#[derive(Clone, Copy, Debug)]
struct Made {
    start: usize,
    scale: f64,
    gain: f64,
}

/// Cosines and sines of rows and pairs.
fn tables(e: &mut Exporter<'_, '_>, rows: usize, half: usize, made: Made) -> [ValueId; 2] {
    let dims = vec![Dim::from(rows), Dim::from(half)];
    let start = made.start as i64;
    let i = e.b.push("row", Op::Iota { dim: 0, start, dtype: DType::I64, dims: dims.clone() }, &[]);
    let j = e.b.iota("pair", 1, DType::I64, dims);
    let [i, j] = [i, j].map(|x| e.b.push("float", Op::Cast { dtype: e.dtype }, &[x]));
    let power = e.with(Binary::Mul, j, -1.0 / half as f64);
    let base = e.number(1e4, power);
    let frequency = e.b.binary("frequency", Binary::Pow, base, power);
    let frequency = e.with(Binary::Mul, frequency, made.scale);
    let angle = e.b.binary("angle", Binary::Mul, i, frequency);
    [Unary::Cos, Unary::Sin].map(|how| {
        let table = e.b.unary("table", how, angle);
        if made.gain == 1.0 { table } else { e.with(Binary::Mul, table, made.gain) }
    })
}

/// Each number of the last dim twice, side by side.
fn twice(e: &mut Exporter<'_, '_>, x: ValueId) -> ValueId {
    let [rows, half] = e.dims(x)[..] else { panic!("two dims") };
    let apart = e.view(x, &[rows, half, 1]);
    let all = e.repeat(apart, &[rows, half, 2]);
    e.view(all, &[rows, 2 * half])
}

/// Every other number of the last dim.
fn every_other(e: &mut Exporter<'_, '_>, x: ValueId, start: usize) -> ValueId {
    let mut dims = e.dims(x);
    let last = dims.len() - 1;
    let half = dims[last] / 2;
    dims.splice(last.., [half, 2]);
    let apart = e.view(x, &dims);
    let one = e.b.push("one", Op::Slice { dim: last + 1, start, size: 1 }, &[apart]);
    dims.pop();
    e.view(one, &dims)
}

/// Two values side by side along a dim of two, as one dim of both.
fn stacked(e: &mut Exporter<'_, '_>, a: ValueId, b: ValueId) -> ValueId {
    let mut dims = e.dims(a);
    let last = dims.len() - 1;
    let half = dims[last];
    dims.push(1);
    let [a, b] = [a, b].map(|x| e.view(x, &dims));
    let both = e.b.push("both", Op::Concat { dim: last + 1 }, &[a, b]);
    dims.pop();
    dims[last] = 2 * half;
    e.view(both, &dims)
}

/// As GPT-J writes it, where pairs are neighbours; which twin, 0 for none.
fn neighbours(
    e: &mut Exporter<'_, '_>,
    x: ValueId,
    [cos, sin]: [ValueId; 2],
    which: usize,
) -> ValueId {
    let dims = e.dims(x);
    let (low, high) = (every_other(e, x, 0), every_other(e, x, 1));
    if e.r.coin() && which == 0 {
        let half = e.dims(low);
        let [cos, sin] = [cos, sin].map(|table| e.repeat(table, &half));
        let (ac, bs) = (e.two(Binary::Mul, low, cos), e.two(Binary::Mul, high, sin));
        let (bc, as_) = (e.two(Binary::Mul, high, cos), e.two(Binary::Mul, low, sin));
        let left = e.b.binary("left", Binary::Sub, ac, bs);
        let right = e.two(Binary::Add, bc, as_);
        return stacked(e, left, right);
    }
    let [cos, sin] = [cos, sin].map(|table| match which {
        // Tables of halves, numbers of neighbours.
        1 => e.b.push("halves", Op::Concat { dim: 1 }, &[table, table]),
        _ => twice(e, table),
    });
    let [cos, sin] = [cos, sin].map(|table| e.repeat(table, &dims));
    let negative = e.b.unary("neg", Unary::Neg, if which == 2 { low } else { high });
    let other = stacked(e, negative, if which == 2 { high } else { low });
    let (left, right) = (e.two(Binary::Mul, x, cos), e.two(Binary::Mul, other, sin));
    e.two(Binary::Add, left, right)
}

#[test]
fn rotary_embeddings_of_neighbours_and_of_other_tables_are_found() {
    for seed in seeds(150) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let [batch, heads, rows, size] = sizes(r);
        let made = Made {
            start: [0, 0, 3, 17][r.below(4)],
            scale: [1.0, 1.0, 0.5, 0.125][r.below(4)],
            gain: [1.0, 1.0, 1.138_629_436, 0.75][r.below(4)],
        };
        let (are_neighbours, which) = (r.coin(), r.below(5));
        let which = if are_neighbours && which < 3 { which } else { 0 };
        let module = built(r, dtype, |e| {
            let x = e.param("x", &[batch, heads, rows, size]);
            let [cos, sin] = tables(e, rows, size / 2, made);
            if are_neighbours {
                return neighbours(e, x, [cos, sin], which);
            }
            let dims = e.dims(x);
            let (low, high) = (half(e, x, 0, size / 2), half(e, x, size / 2, size / 2));
            let [cos, sin] = [cos, sin].map(|table| {
                let all = e.b.push("twice", Op::Concat { dim: 1 }, &[table, table]);
                e.repeat(all, &dims)
            });
            let negative = e.b.unary("neg", Unary::Neg, high);
            let other = e.b.push("turned", Op::Concat { dim: 3 }, &[negative, low]);
            let (left, right) = (e.two(Binary::Mul, x, cos), e.two(Binary::Mul, other, sin));
            e.two(Binary::Add, left, right)
        });
        let note = format!("SEED={seed} {made:?} {rows} rows of {size}, {are_neighbours} {which}");
        let after = recognised(&module, r, &note);
        let is_plain = made.scale == 1.0 && made.gain == 1.0;
        match which {
            0 if is_plain => assert_eq!(called(&after), ["rope"], "{note}\n{module}"),
            0 => assert_eq!(called(&after), ["rope_scaled"], "{note}\n{module}"),
            _ => assert_eq!(called(&after), [""; 0], "{note}\n{module}"),
        }
        assert_same_gradients(&module, &after, r, &note);
    }
}
