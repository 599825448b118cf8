//! Windows, Fourier transforms as products with matrices, and filter banks.

use std::f64::consts::{LN_10, PI};

use super::casts::named;
use super::element::Element;
use super::moving::padded;
use super::narrowing::narrowed;
use super::site::{Made, Site, Translated, dim_at, sizes};
use crate::Tensor;
use crate::module::ValueId;
use crate::op::{Binary, Einsum, Op, Windows};

/// Points of a transform at most: it is a product with a matrix of their square.
const POINTS_MAX: usize = 8192;

/// Hann, Hamming and Blackman: sums of cosines.
pub(super) fn window(s: &mut Site) -> Translated {
    let size = s.known(0)?.ok_or("no size")?.to_f64().first().copied().unwrap_or(0.0);
    let to = named(s, "output_datatype", Element::F32)?;
    if !(0.0..=1e7).contains(&size) {
        return Err(format!("a window of {size}"));
    }
    let whole = if s.int("periodic", 1) != 0 { size } else { size - 1.0 };
    let [a, b, c] = match s.node.op_type.as_str() {
        "HannWindow" => [0.5, -0.5, 0.0],
        "HammingWindow" => [25.0 / 46.0, -21.0 / 46.0, 0.0],
        _ => [0.42, -0.5, 0.08],
    };
    let number = |at: usize| {
        let angle = 2.0 * PI * at as f64 / whole.max(1.0);
        a + b * angle.cos() + c * (2.0 * angle).cos()
    };
    let numbers = (0..size as usize).map(number).collect();
    let x = s.array(Tensor::f64(&[size as usize], numbers))?;
    s.state(0, to);
    let x = s.cast(x, to.carrier())?;
    Ok(vec![narrowed(s, x, to)?])
}

/// Weights that are computed when a model is read at most. Chosen: half a GiB of `f64`.
const WEIGHTS_MAX: usize = 1 << 26;

/// Triangles of equal width in mel.
pub(super) fn mel_weights(s: &mut Site) -> Translated {
    let number = |at: usize| -> Result<f64, String> {
        let known = s.known(at)?.ok_or_else(|| format!("operand {at} is missing"))?;
        known.to_f64().first().copied().ok_or_else(|| format!("operand {at} is empty"))
    };
    let (bins, length, rate) = (number(0)?, number(1)?, number(2)?);
    let (low, high) = (number(3)?, number(4)?);
    let to = named(s, "output_datatype", Element::F32)?;
    if !(0.0..=1e5).contains(&bins) || !(0.0..=1e6).contains(&length) || rate <= 0.0 {
        return Err(format!("{bins} bins of {length} points"));
    }
    let (bins, rows) = (bins as usize, length as usize / 2 + 1);
    if bins * rows > WEIGHTS_MAX {
        return Err(format!("{bins} bins of {length} points, of more than 2^26 weights"));
    }
    let mel = |hertz: f64| 2595.0 * (hertz / 700.0).ln_1p() / LN_10;
    let step = (mel(high) - mel(low)) / (bins + 2) as f64;
    let edge = |at: usize| {
        let mel = at as f64 * step + mel(low);
        let hertz = 700.0 * (mel / 2595.0 * LN_10).exp_m1();
        ((length + 1.0) * hertz / rate).floor()
    };
    let mut weights = vec![0.0; rows * bins];
    for bin in 0..bins {
        let (left, centre, right) = (edge(bin), edge(bin + 1), edge(bin + 2));
        for row in 0..rows {
            let at = row as f64;
            let weight = if centre == left && at == centre {
                1.0
            } else if at >= left && at <= centre && centre > left {
                (at - left) / (centre - left)
            } else {
                weights[row * bins + bin]
            };
            let is_right = right > centre && at >= centre && at < right;
            weights[row * bins + bin] =
                if is_right { (right - at) / (right - centre) } else { weight };
        }
    }
    let x = s.array(Tensor::f64(&[rows, bins], weights))?;
    s.state(0, to);
    let x = s.cast(x, to.carrier())?;
    Ok(vec![narrowed(s, x, to)?])
}

/// A transform along a dim of a tensor whose last dim is the real, or the real and the imaginary
/// part.
struct Transform {
    dim: usize,
    points: usize,
    inverse: bool,
    onesided: bool,
}

pub(super) fn fourier(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dims = s.dims(x);
    let axis = if s.opset < 20 {
        s.int("axis", 1)
    } else {
        s.integers(2)?.and_then(|axis| axis.first().copied()).unwrap_or(-2)
    };
    let dim = dim_at(axis, dims.len())?;
    if dim + 1 == dims.len() {
        return Err("a transform along the parts of a number".to_owned());
    }
    let (inverse, onesided) = (s.int("inverse", 0) != 0, s.int("onesided", 0) != 0);
    let default = match inverse && onesided {
        true => 2 * dims[dim].saturating_sub(1),
        false => dims[dim],
    };
    let points = match s.integers(1)?.and_then(|length| length.first().copied()) {
        Some(length) => usize::try_from(length).map_err(|_| format!("{length} points"))?,
        None => default,
    };
    Ok(vec![transformed(s, x, &Transform { dim, points, inverse, onesided })?])
}

fn transformed(s: &mut Site, x: ValueId, t: &Transform) -> Made {
    let (points, dim) = (t.points, t.dim);
    if points == 0 || points > POINTS_MAX {
        return Err(format!("a transform of {points} points, not 1 to {POINTS_MAX}"));
    }
    // An inverse of one side takes that side; all others take all points.
    let takes = if t.inverse && t.onesided { points / 2 + 1 } else { points };
    let makes = if !t.inverse && t.onesided { points / 2 + 1 } else { points };
    let more = takes as i64 - s.dims(x)[dim] as i64;
    let x = padded(s, x, dim, [0, more], 0.0)?;
    let last = s.ndim(x) - 1;
    let parts = s.dims(x)[last];
    let sign = if t.inverse { 1.0 } else { -1.0 };
    let scale = if t.inverse { 1.0 / points as f64 } else { 1.0 };
    // Of one side, what is not there is the conjugate of what is.
    let weight = |at: usize| match t.inverse && t.onesided {
        true if at == 0 || (2 * at == points) => 1.0,
        true => 2.0,
        false => 1.0,
    };
    let matrix = |s: &mut Site, of: fn(f64) -> f64, factor: f64| {
        let number = |at: usize| {
            let (row, column) = (at / takes, at % takes);
            let angle = 2.0 * PI * (row * column % points) as f64 / points as f64;
            factor * scale * weight(column) * of(angle)
        };
        let numbers = (0..makes * takes).map(number).collect();
        s.array(Tensor::from_f64(s.dtype(x), &[makes, takes], numbers))
    };
    let part = |s: &mut Site, at: usize| s.cut(x, last, at, 1);
    let real = part(s, 0)?;
    let (cosine, sine) = (matrix(s, f64::cos, 1.0)?, matrix(s, f64::sin, sign)?);
    let mut a = along(s, real, cosine, dim)?;
    let mut b = along(s, real, sine, dim)?;
    if parts == 2 {
        let imaginary = part(s, 1)?;
        let (more, less) = (along(s, imaginary, cosine, dim)?, along(s, imaginary, sine, dim)?);
        a = s.sub(a, less)?;
        b = s.add(b, more)?;
    }
    if t.inverse && t.onesided { Ok(a) } else { s.concat(last, &[a, b]) }
}

/// A product with a matrix along a dim.
fn along(s: &mut Site, x: ValueId, matrix: ValueId, dim: usize) -> Made {
    let letters: Vec<char> = ('a'..='y').take(s.ndim(x)).collect();
    let mut result = letters.clone();
    result[dim] = 'z';
    let einsum = Einsum::new(letters.clone(), vec!['z', letters[dim]], result);
    s.push(Op::Contract(einsum), &[x, matrix])
}

/// The transforms of frames of a signal.
pub(super) fn short_time_fourier(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dims = s.dims(x);
    let [batch, length, parts] = dims[..] else { return Err(format!("a signal {dims:?}")) };
    let number = |at: usize| -> Result<Option<usize>, String> {
        let found = s.integers(at)?.and_then(|list| list.first().copied());
        found.map(|n| usize::try_from(n).map_err(|_| format!("a frame of {n}"))).transpose()
    };
    let (step, given) = (number(1)?.ok_or("no step")?, number(3)?);
    let window = s.optional(2);
    let frame = given.or(window.map(|window| s.dims(window)[0])).unwrap_or(length);
    let onesided = s.int("onesided", 1) != 0;
    let windows = Windows { dim: 1, size: frame, stride: step, dilation: 1 };
    let frames = windows.count(length).ok_or_else(|| format!("frames of {frame} in {length}"))?;
    let mut y = s.push(Op::Window(windows), &[x])?;
    if let Some(window) = window {
        let new = vec![0, 1, 3];
        let dims = sizes(&[batch, frames, frame, parts]);
        let window = s.push(Op::Broadcast { new, dims }, &[window])?;
        y = s.binary(Binary::Mul, y, window)?;
    }
    let transform = Transform { dim: 2, points: frame, inverse: false, onesided };
    Ok(vec![transformed(s, y, &transform)?])
}
