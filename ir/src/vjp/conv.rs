//! Gradients of a convolution are convolutions.
//!
//! Where `x[i]` meets `w[k]` in `y[j]`, that is where `i * spread + before = j * stride +
//! k * dilation`, each of the three is a sum of products of the other two; stride, dilation and
//! spread change places. Legend: g groups, N samples, C and O channels of a group, X, K, Y spatial.

use super::{Cotangents, Site};
use crate::build::Builder;
use crate::convolution::{Convolution, DimOrder};
use crate::dim::Dim;
use crate::module::ValueId;
use crate::op::Op;

/// Fixed sizes of the spatial dims of a value that lies in an order.
fn spatial(b: &Builder, order: &DimOrder, value: ValueId) -> Vec<i64> {
    order.usual(&b.ty(value).dims)[2..].iter().filter_map(Dim::as_constant).collect()
}

pub(super) fn conv(b: &mut Builder, s: &Site, c: &Convolution) -> Cotangents {
    vec![Some(of_x(b, s, c)), Some(of_w(b, s, c))]
}

/// `d[N, gO, Y]` with the kernels turned: `w[gO, C, K]` as `[gC, O, K]`, backwards.
fn of_x(b: &mut Builder, s: &Site, c: &Convolution) -> ValueId {
    let (x, w, name) = (s.operand(0), s.operand(1), s.names[0].as_str());
    let named = |part: &str| format!("{name}.{part}");
    let ([in_x, in_w, in_y], ndim) = (&c.orders, b.ty(w).ndim());
    let (kernel, order) = match groups(b, s, c) {
        1 => (w, in_w.exchanged(ndim)),
        groups => {
            let usual = usual(b, &named("usual"), w, in_w);
            (swapped(b, &named("kernel"), usual, groups, 0), DimOrder::default())
        }
    };
    let over = (0..ndim).filter(|place| order.dim(*place) > 1).collect();
    let turned = b.push(&named("turned"), Op::Reverse { dims: over }, &[kernel]);
    let [xs, ks, ys] = [(in_x, x), (in_w, w), (in_y, s.d)].map(|(of, value)| spatial(b, of, value));
    let of = |f: &dyn Fn(usize) -> i64| -> Vec<i64> { (0..xs.len()).map(f).collect() };
    let [stride, dilation, spread] = numbers(c);
    let before = of(&|at| (ks[at] - 1) * dilation[at] - c.before[at]);
    let after = of(&|at| (xs[at] - 1) * spread[at] - (ys[at] - 1) * stride[at] + c.before[at]);
    let back = Convolution {
        stride: c.spread.clone(),
        before,
        after,
        dilation: c.dilation.clone(),
        spread: c.stride.clone(),
        orders: [in_y.clone(), order, in_x.clone()],
    };
    b.push(name, Op::Conv(back), &[s.d, turned])
}

/// `x[N, gC, X]` as `[C, gN, X]` with kernels `d` as `[gO, N, Y]` yields `[C, gO, K]`.
fn of_w(b: &mut Builder, s: &Site, c: &Convolution) -> ValueId {
    let (x, w, name) = (s.operand(0), s.operand(1), s.names[1].as_str());
    let named = |part: &str| format!("{name}.{part}");
    let ([in_x, in_w, in_y], ndim) = (&c.orders, b.ty(w).ndim());
    let of_result = in_w.exchanged(ndim);
    let (images, order, of_result, then) = match groups(b, s, c) {
        1 => (x, in_x.exchanged(ndim), of_result, None),
        groups => {
            let usual = usual(b, &named("usual"), x, in_x);
            let images = swapped(b, &named("images"), usual, groups, 1);
            // Pieces of groups whose samples are not counted yet are cut from the whole.
            let perm = of_result.lying(&(0..ndim).collect::<Vec<usize>>());
            (images, DimOrder::default(), DimOrder::default(), Some(Op::Transpose { perm }))
        }
    };
    let [xs, ks, ys] = [(in_x, x), (in_w, w), (in_y, s.d)].map(|(of, value)| spatial(b, of, value));
    let [stride, dilation, spread] = numbers(c);
    let after = |at: usize| {
        let windows = (ks[at] - 1) * dilation[at] + (ys[at] - 1) * stride[at];
        windows - (xs[at] - 1) * spread[at] - c.before[at]
    };
    let back = Convolution {
        stride: c.dilation.clone(),
        before: c.before.clone(),
        after: (0..xs.len()).map(after).collect(),
        dilation: c.stride.clone(),
        spread: c.spread.clone(),
        orders: [order, in_y.exchanged(ndim), of_result],
    };
    let Some(then) = then else { return b.push(name, Op::Conv(back), &[images, s.d]) };
    let turned = b.push(&named("turned"), Op::Conv(back), &[images, s.d]);
    b.push(name, then, &[turned])
}

fn numbers(c: &Convolution) -> [Vec<i64>; 3] {
    [&c.stride, &c.dilation, &c.spread].map(|of| of.iter().map(|n| *n as i64).collect())
}

fn groups(b: &Builder, s: &Site, c: &Convolution) -> i64 {
    let channels = |at: usize| &b.ty(s.operand(at)).dims[c.orders[at].place(1)];
    channels(0).ratio(channels(1)).unwrap_or(1)
}

/// A value whose dims lie in the usual order.
fn usual(b: &mut Builder, name: &str, value: ValueId, order: &DimOrder) -> ValueId {
    let perm: Vec<usize> = (0..b.ty(value).ndim()).map(|dim| order.place(dim)).collect();
    if perm.is_sorted() { value } else { b.push(name, Op::Transpose { perm }, &[value]) }
}

/// Dims 0 and 1 change places within each group; dim `at` counts the groups.
fn swapped(b: &mut Builder, name: &str, value: ValueId, groups: i64, at: usize) -> ValueId {
    let whole = b.ty(value).dims.clone();
    let own = whole[at].divide(groups).unwrap_or_default();
    let groups = Dim::constant(groups);
    let mut split = whole.clone();
    split.splice(at..=at, [groups.clone(), own.clone()]);
    // Group and own part lie side by side: [g, O, C, ..] -> [g, C, O, ..], or [N, g, C, ..] ->
    // [C, g, N, ..].
    let mut perm: Vec<usize> = (0..split.len()).collect();
    perm[..3].copy_from_slice(if at == 0 { &[0, 2, 1] } else { &[2, 1, 0] });
    let (first, second) = match at {
        0 => (&groups * &whole[1], own),
        _ => (own, &groups * &whole[0]),
    };
    let merged = [first, second].into_iter().chain(whole[2..].iter().cloned()).collect();
    let apart = b.push(&format!("{name}.groups"), Op::Reshape { dims: split }, &[value]);
    let turned = b.push(&format!("{name}.turned"), Op::Transpose { perm }, &[apart]);
    b.push(name, Op::Reshape { dims: merged }, &[turned])
}
