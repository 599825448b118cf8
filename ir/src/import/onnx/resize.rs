//! `Resize` and `Upsample`: along each dim a sum of neighbours with weights that sizes tell.

use super::site::{Made, Site, Translated, dim_at};
use crate::module::ValueId;
use crate::op::{Binary, Einsum, Op};
use crate::{DType, Tensor};

/// Neighbours that are picked one after the other at most; more are a product with a matrix.
const PICKED_MAX: usize = 4;

/// Elements along a dim of a result at most: each has a list of neighbours. Chosen: a hundred times
/// the longest side of an image.
const SIZE_MAX: f64 = 16_777_216.0;

/// How one dim is resized.
struct Along {
    dim: usize,
    size: usize,
    scale: f64,
    /// The part of the input that is looked at, in parts of its size.
    window: (f64, f64),
}

/// The neighbours of each element of a result, with their weights, and those that lie outside.
struct Taps {
    places: Vec<Vec<usize>>,
    weights: Vec<Vec<f64>>,
    outside: Vec<bool>,
}

pub(super) fn upsample(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let scales = match s.floats("scales") {
        Some(scales) => scales.into_iter().map(f64::from).collect(),
        None => s.known(1)?.ok_or("no scales")?.to_f64(),
    };
    let dims = s.dims(x);
    if scales.len() != dims.len() {
        return Err(format!("{} scales of {} dims", scales.len(), dims.len()));
    }
    let along = dims.iter().zip(&scales).enumerate().map(|(dim, (size, scale))| Along {
        dim,
        size: (*size as f64 * scale).floor().min(SIZE_MAX + 1.0) as usize,
        scale: *scale,
        window: (0.0, 1.0),
    });
    let along: Vec<Along> = along.collect();
    Ok(vec![resized(s, x, &along, true)?])
}

pub(super) fn resize(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    if s.opset < 11 {
        return upsample(s);
    }
    let along = stretched(s, x)?;
    Ok(vec![resized(s, x, &along, false)?])
}

/// The dims that are resized, and how.
fn stretched(s: &Site, x: ValueId) -> Result<Vec<Along>, String> {
    let dims = s.dims(x);
    let axes = match s.ints("axes") {
        Some(axes) => axes.iter().map(|a| dim_at(*a, dims.len())).collect::<Result<Vec<_>, _>>()?,
        None => (0..dims.len()).collect(),
    };
    let list = |at: usize| -> Result<Option<Vec<f64>>, String> {
        let found = s.known(at)?.map(|list| list.to_f64()).filter(|list| !list.is_empty());
        match found {
            Some(list) if list.len() != axes.len() => {
                Err(format!("{} numbers of operand {at} for {} dims", list.len(), axes.len()))
            }
            found => Ok(found),
        }
    };
    let (scales, sizes) = (list(2)?, list(3)?);
    let (mut along, policy) = (Vec::new(), s.text("keep_aspect_ratio_policy", "stretch"));
    let window = |at: usize| -> Result<(f64, f64), String> {
        if s.text("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize" {
            return Ok((0.0, 1.0));
        }
        let window = s.known(1)?.ok_or("no region")?.to_f64();
        match (window.get(at), window.get(at + axes.len())) {
            (Some(first), Some(last)) => Ok((*first, *last)),
            _ => Err(format!("a region of {} numbers", window.len())),
        }
    };
    let ratios = sizes.as_ref().map(|sizes| {
        let ratio = |(size, dim): (&f64, &usize)| size / dims[*dim].max(1) as f64;
        sizes.iter().zip(&axes).map(ratio).collect::<Vec<f64>>()
    });
    let common = ratios.as_ref().and_then(|ratios| match policy.as_str() {
        "not_larger" => ratios.iter().copied().reduce(f64::min),
        "not_smaller" => ratios.iter().copied().reduce(f64::max),
        _ => None,
    });
    for (at, dim) in axes.iter().enumerate() {
        let whole = dims[*dim] as f64;
        let (size, scale) = match (&scales, &sizes, &ratios) {
            (Some(scales), None, _) => ((whole * scales[at]).floor(), scales[at]),
            (None, Some(_), Some(_)) if let Some(scale) = common => {
                ((whole * scale + 0.5).floor(), scale)
            }
            (None, Some(sizes), Some(ratios)) => (sizes[at], ratios[at]),
            _ => return Err("not either scales or sizes".to_owned()),
        };
        if !(0.0..=SIZE_MAX).contains(&size) || !scale.is_finite() || scale <= 0.0 {
            return Err(format!("a dim of {whole} times {scale}"));
        }
        along.push(Along { dim: *dim, size: size as usize, scale, window: window(at)? });
    }
    Ok(along)
}

/// Dim after dim, the later ones first.
fn resized(s: &mut Site, x: ValueId, along: &[Along], is_upsample: bool) -> Made {
    let (mode, dtype) = (s.text("mode", "nearest"), s.dtype(x));
    if s.dims(x).contains(&0) {
        return Err("a dim of no elements".to_owned());
    }
    let mut y = x;
    let is_linear = match mode.as_str() {
        "nearest" => false,
        "linear" | "bilinear" | "trilinear" | "cubic" => true,
        other => return Err(format!("mode `{other}`")),
    };
    if is_linear && !s.is_float(x) {
        y = s.cast(y, DType::F32)?;
    }
    for one in along.iter().rev() {
        let whole = s.dims(x)[one.dim];
        if one.size == whole && one.scale == 1.0 && one.window == (0.0, 1.0) {
            continue;
        }
        let taps = taps(s, one, whole, &mode, is_upsample)?;
        y = tapped(s, y, one.dim, &taps)?;
        y = outside(s, y, one.dim, &taps.outside)?;
    }
    if is_linear && !s.is_float(x) {
        // To the nearest integer that the type has.
        let (low, high) = s.element(0).and_then(|of| of.range()).ok_or("integers of 64 bits")?;
        let inside = s.with(Binary::Max, y, low)?;
        let inside = s.with(Binary::Min, inside, high)?;
        return s.cast(inside, dtype);
    }
    Ok(y)
}

/// What lies outside of the input has a number of its own.
fn outside(s: &mut Site, y: ValueId, dim: usize, places: &[bool]) -> Made {
    if !places.contains(&true) {
        return Ok(y);
    }
    let (dims, value) = (s.dims(y), s.float("extrapolation_value", 0.0));
    let is_outside = s.array(Tensor::bool(&[places.len()], places.to_vec()))?;
    let mut own = vec![1; dims.len()];
    own[dim] = places.len();
    let is_outside = s.reshape(is_outside, &own)?;
    let is_outside = s.broadcast(is_outside, &dims)?;
    let value = s.number(value, y)?;
    s.select(is_outside, value, y)
}

/// Sums of neighbours along a dim.
fn tapped(s: &mut Site, x: ValueId, dim: usize, taps: &Taps) -> Made {
    let count = taps.places.iter().map(Vec::len).max().unwrap_or(0);
    if count > PICKED_MAX {
        return by_matrix(s, x, dim, taps);
    }
    let mut sum = None;
    for at in 0..count {
        let places: Vec<usize> = taps.places.iter().map(|of| of[at]).collect();
        let weights: Vec<f64> = taps.weights.iter().map(|of| of[at]).collect();
        if weights.iter().all(|w| *w == 0.0) {
            continue;
        }
        let picked = s.picked(x, dim, &places)?;
        let term = if weights.iter().all(|w| *w == 1.0) {
            picked
        } else {
            let dims = s.dims(picked);
            let weights = Tensor::from_f64(s.dtype(x), &[weights.len()], weights);
            let weights = s.array(weights)?;
            let new = (0..dims.len()).filter(|other| *other != dim).collect();
            let op = Op::Broadcast { new, dims: super::site::sizes(&dims) };
            let weights = s.push(op, &[weights])?;
            s.mul(picked, weights)?
        };
        sum = Some(match sum {
            Some(sum) => s.add(sum, term)?,
            None => term,
        });
    }
    sum.ok_or_else(|| "no weights".to_owned())
}

fn by_matrix(s: &mut Site, x: ValueId, dim: usize, taps: &Taps) -> Made {
    let (size, rows) = (s.dims(x)[dim], taps.places.len());
    let mut matrix = vec![0.0; rows * size];
    for (row, (places, weights)) in taps.places.iter().zip(&taps.weights).enumerate() {
        for (place, weight) in places.iter().zip(weights) {
            matrix[row * size + place] += weight;
        }
    }
    let matrix = s.array(Tensor::from_f64(s.dtype(x), &[rows, size], matrix))?;
    let letters: Vec<char> = ('a'..='y').take(s.ndim(x)).collect();
    let mut result = letters.clone();
    result[dim] = 'z';
    let einsum = Einsum::new(letters.clone(), vec!['z', letters[dim]], result);
    s.push(Op::Contract(einsum), &[x, matrix])
}

/// Where in the input an element of the result lies.
fn source(mode: &str, at: f64, along: &Along, whole: f64) -> Result<f64, String> {
    let (scale, size) = (along.scale, along.scale * whole);
    Ok(match mode {
        "align_corners" if size == 1.0 => 0.0,
        "align_corners" => at * (whole - 1.0) / (size - 1.0),
        "asymmetric" => at / scale,
        "pytorch_half_pixel" if size == 1.0 => -0.5,
        "half_pixel" | "pytorch_half_pixel" => (at + 0.5) / scale - 0.5,
        "half_pixel_symmetric" => {
            let adjustment = along.size as f64 / size;
            whole / 2.0 * (1.0 - adjustment) + (at + 0.5) / scale - 0.5
        }
        "tf_half_pixel_for_nn" => (at + 0.5) / scale,
        "tf_crop_and_resize" => {
            let (first, last) = along.window;
            let offset = if size == 1.0 {
                (last - first) * (whole - 1.0) / 2.0
            } else {
                at * (last - first) * (whole - 1.0) / (size - 1.0)
            };
            offset + first * (whole - 1.0)
        }
        other => return Err(format!("coordinate_transformation_mode `{other}`")),
    })
}

fn taps(
    s: &Site,
    along: &Along,
    whole: usize,
    mode: &str,
    is_upsample: bool,
) -> Result<Taps, String> {
    let transform = match is_upsample {
        true => "asymmetric".to_owned(),
        false => s.text("coordinate_transformation_mode", "half_pixel"),
    };
    let nearest = match is_upsample {
        true => "floor".to_owned(),
        false => s.text("nearest_mode", "round_prefer_floor"),
    };
    let antialias = s.int("antialias", 0) != 0;
    let excludes = s.int("exclude_outside", 0) != 0;
    let cubic = s.float("cubic_coeff_a", -0.75);
    if antialias && mode == "nearest" {
        return Err("antialias of the nearest".to_owned());
    }
    let mut taps = Taps { places: Vec::new(), weights: Vec::new(), outside: Vec::new() };
    for at in 0..along.size {
        let x = source(&transform, at as f64, along, whole as f64)?;
        let is_crop = transform == "tf_crop_and_resize";
        taps.outside.push(is_crop && (x < 0.0 || x > whole as f64 - 1.0));
        let (first, mut weights) = match mode {
            "nearest" => (rounded(x, &nearest)?, vec![1.0]),
            "cubic" => spread(x, along.scale, 2.0, antialias, |d| cubic_weight(d, cubic)),
            _ => spread(x, along.scale, 1.0, antialias, |d| (1.0 - d.abs()).max(0.0)),
        };
        let place = |tap: usize| first + tap as f64;
        if excludes {
            let inside = |tap: usize| (0.0..whole as f64).contains(&place(tap));
            weights.iter_mut().enumerate().for_each(|(tap, weight)| {
                *weight = if inside(tap) { *weight } else { 0.0 };
            });
        }
        let sum: f64 = weights.iter().sum();
        if (excludes || antialias) && sum != 0.0 {
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        let last = whole as f64 - 1.0;
        taps.places.push((0..weights.len()).map(|t| place(t).clamp(0.0, last) as usize).collect());
        taps.weights.push(weights);
    }
    Ok(taps)
}

fn rounded(x: f64, how: &str) -> Result<f64, String> {
    Ok(match how {
        "floor" => x.floor(),
        "ceil" => x.ceil(),
        "round_prefer_floor" => (x - 0.5).ceil(),
        "round_prefer_ceil" => (x + 0.5).floor(),
        other => return Err(format!("nearest_mode `{other}`")),
    })
}

/// The first neighbour and the weights of all: of distances below `reach`, which antialiasing
/// stretches where the result is smaller.
fn spread(
    x: f64,
    scale: f64,
    reach: f64,
    antialias: bool,
    weight: impl Fn(f64) -> f64,
) -> (f64, Vec<f64>) {
    let narrow = if antialias { scale.min(1.0) } else { 1.0 };
    let before = (-reach / narrow).floor() + 1.0;
    let count = 2.0 * (1.0 - before);
    let first = x.floor() + before;
    let weights = (0..count as usize).map(|tap| weight((first + tap as f64 - x) * narrow));
    (first, weights.collect())
}

/// R. Keys, Cubic convolution interpolation for digital image processing, 1981.
fn cubic_weight(distance: f64, a: f64) -> f64 {
    let d = distance.abs();
    if d <= 1.0 {
        ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0
    } else if d < 2.0 {
        ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a
    } else {
        0.0
    }
}
