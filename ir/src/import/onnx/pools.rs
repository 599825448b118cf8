//! Pools besides those of sums.rs: of powers, with the places of the largest, and back; columns to
//! images.

use super::indexing::along;
use super::moving::padded;
use super::site::{Made, Site, Translated, check_size};
use super::sums::{Geometry, geometry, pool, round_up, windows};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Op, Unary, Windows};

/// Elements of the pool's windows, and how they lie.
fn shape(s: &Site, x: ValueId) -> Result<(Geometry, Vec<usize>), String> {
    let dims = s.dims(x);
    let kernel = s.ints("kernel_shape").ok_or("no kernel shape")?;
    let kernel: Option<Vec<usize>> = kernel.iter().map(|n| usize::try_from(*n).ok()).collect();
    if dims.len() < 3 {
        return Err(format!("an operand of dims {dims:?}"));
    }
    let mut g = geometry(s, &dims[2..], kernel.ok_or("a negative kernel")?)?;
    round_up(s, &mut g, &dims[2..]);
    Ok((g, dims))
}

/// `(Σ |x|^p)^(1/p)` of each window.
pub(super) fn lp_pool(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let (g, _) = shape(s, x)?;
    let size = s.unary(Unary::Abs, x)?;
    let of = windows(s, size, &g, 0.0)?;
    let over: Vec<usize> = (0..g.kernel.len()).map(|at| 3 + 2 * at).collect();
    Ok(vec![norm(s, of, over)?])
}

pub(super) fn global_lp_pool(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let mut dims = s.dims(x);
    let size = s.unary(Unary::Abs, x)?;
    let y = norm(s, size, (2..dims.len()).collect())?;
    dims.iter_mut().skip(2).for_each(|dim| *dim = 1);
    Ok(vec![s.reshape(y, &dims)?])
}

/// Of numbers that are not negative.
fn norm(s: &mut Site, x: ValueId, over: Vec<usize>) -> Made {
    let p = s.int("p", 2) as f64;
    match p {
        1.0 => s.reduce(Combiner::Sum, over, x),
        2.0 => {
            let square = s.mul(x, x)?;
            let sum = s.reduce(Combiner::Sum, over, square)?;
            s.unary(Unary::Sqrt, sum)
        }
        _ => {
            let power = s.with(Binary::Pow, x, p)?;
            let sum = s.reduce(Combiner::Sum, over, power)?;
            s.with(Binary::Pow, sum, 1.0 / p)
        }
    }
}

/// The largest of each window, and its place in the whole operand.
pub(super) fn max_pool(s: &mut Site) -> Translated {
    if s.node.output.get(1).is_none_or(String::is_empty) {
        return pool(s);
    }
    let x = s.operand(0)?;
    let (g, dims) = shape(s, x)?;
    let spatial = g.kernel.len();
    let outside = match s.element(0).and_then(super::element::Element::range) {
        Some((low, _)) => low,
        None => f64::NEG_INFINITY,
    };
    let of = windows(s, x, &g, outside)?;
    let places = places(s, &dims)?;
    let places = windows(s, places, &g, -1.0)?;
    // [N, C, counts…, sizes…], the sizes as one dim.
    let counts: Vec<usize> = (0..spatial).map(|at| 2 + 2 * at).collect();
    let sizes: Vec<usize> = (0..spatial).map(|at| 3 + 2 * at).collect();
    let perm = [&[0, 1][..], &counts, &sizes].concat();
    let apart = s.dims(of);
    let kept: Vec<usize> = perm[..2 + spatial].iter().map(|at| apart[*at]).collect();
    let flat = [&kept[..], &[g.kernel.iter().product()]].concat();
    let joined = |s: &mut Site, x: ValueId| -> Made {
        let turned = s.transpose(x, &perm)?;
        s.reshape(turned, &flat)
    };
    let (of, places) = (joined(s, of)?, joined(s, places)?);
    let last = 2 + spatial;
    let found = s.push(Op::ArgMax { dim: last }, &[of])?;
    let one = [&kept[..], &[1]].concat();
    let found = s.reshape(found, &one)?;
    let (y, at) = (along(s, of, found, last)?, along(s, places, found, last)?);
    Ok(vec![s.reshape(y, &kept)?, s.reshape(at, &kept)?])
}

/// The place of each element in the whole tensor: in row-major order, or of matrices in
/// column-major order.
fn places(s: &mut Site, dims: &[usize]) -> Made {
    let count = dims.iter().product();
    if s.int("storage_order", 0) == 0 {
        let flat = s.index(0, DType::I64, &[count])?;
        return s.reshape(flat, dims);
    }
    let mut turned = dims.to_vec();
    turned[2..].reverse();
    let flat = s.index(0, DType::I64, &[count])?;
    let flat = s.reshape(flat, &turned)?;
    let perm: Vec<usize> = [0, 1].into_iter().chain((2..dims.len()).rev()).collect();
    s.transpose(flat, &perm)
}

/// Elements at their places in a larger tensor of zeros.
pub(super) fn max_unpool(s: &mut Site) -> Translated {
    let (x, places) = (s.operand(0)?, s.operand(1)?);
    let dims = s.dims(x);
    let kernel = s.ints("kernel_shape").ok_or("no kernel shape")?;
    let spatial = kernel.len();
    if dims.len() != spatial + 2 {
        return Err(format!("an operand of dims {dims:?}"));
    }
    let strides = s.ints("strides").unwrap_or_else(|| vec![1; spatial]);
    let pads = s.ints("pads").unwrap_or_else(|| vec![0; 2 * spatial]);
    if strides.len() != spatial || pads.len() != 2 * spatial {
        return Err(format!("strides {strides:?} and pads {pads:?}"));
    }
    let mut whole = dims[..2].to_vec();
    for at in 0..spatial {
        let size = (dims[at + 2] as i64 - 1).checked_mul(strides[at]);
        let terms = [Some(kernel[at]), pads[at].checked_neg(), pads[at + spatial].checked_neg()];
        let size = terms.into_iter().fold(size, |sum, term| sum?.checked_add(term?));
        let size = size.and_then(|size| usize::try_from(size).ok());
        whole.push(size.ok_or_else(|| format!("strides {strides:?} and pads {pads:?}"))?);
    }
    check_size(&whole)?;
    let count: usize = whole.iter().product();
    let zeros = s.constant(0.0, s.dtype(x), &[count])?;
    let len = dims.iter().product();
    let (x, places) = (s.reshape(x, &[len])?, s.reshape(places, &[len])?);
    s.demand_rows(places, count)?;
    let y = s.push(Op::Scatter { dim: 0, start: 0 }, &[zeros, places, x])?;
    let mut y = s.reshape(y, &whole)?;
    if let Some(wanted) = s.integers(2)? {
        for (dim, size) in wanted.iter().enumerate() {
            let more = size.saturating_sub(s.dims(y).get(dim).copied().unwrap_or(0) as i64);
            y = padded(s, y, dim, [0, more], 0.0)?;
        }
    }
    Ok(vec![y])
}

/// The sum of columns where they lie in an image: the transpose of cutting it into windows.
pub(super) fn columns_to_image(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let image = s.integers(1)?.ok_or("no image shape")?;
    let block = s.integers(2)?.ok_or("no block shape")?;
    let size = |n: &i64| usize::try_from(*n).map_err(|_| format!("a size of {n}"));
    let image = image.iter().map(size).collect::<Result<Vec<_>, _>>()?;
    let block = block.iter().map(size).collect::<Result<Vec<_>, _>>()?;
    check_size(&image)?;
    let g = geometry(s, &image, block)?;
    let spatial = image.len();
    let [batch, channels, _] = s.dims(x)[..] else { return Err("not three dims".to_owned()) };
    let area: usize = g.kernel.iter().product();
    let channels = channels.checked_div(area).filter(|c| c * area == channels);
    let channels = channels.ok_or("channels that are no blocks")?;
    let mut counts = Vec::new();
    let mut extents = Vec::new();
    for (at, size) in image.iter().enumerate() {
        let extent = *size as i64 + g.before[at] + g.after[at];
        let extent = usize::try_from(extent).map_err(|_| format!("an extent of {extent}"))?;
        let of = along_dim(&g, at, 0);
        counts.push(of.count(extent).ok_or("no window fits")?);
        extents.push(extent);
    }
    let apart = [&[batch, channels][..], &g.kernel, &counts].concat();
    let mut y = s.reshape(x, &apart)?;
    let pairs = (0..spatial).flat_map(|at| [2 + spatial + at, 2 + at]);
    let perm: Vec<usize> = [0, 1].into_iter().chain(pairs).collect();
    y = s.transpose(y, &perm)?;
    for (at, extent) in extents.iter().enumerate() {
        let dim = 2 + at;
        y = s.push(Op::Fold { windows: along_dim(&g, at, dim), extent: *extent }, &[y])?;
        y = padded(s, y, dim, [-g.before[at], -g.after[at]], 0.0)?;
    }
    Ok(vec![y])
}

fn along_dim(g: &Geometry, at: usize, dim: usize) -> Windows {
    Windows { dim, size: g.kernel[at], stride: g.stride[at], dilation: g.dilation[at] }
}
