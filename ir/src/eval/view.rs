//! Ops that move elements: each is a list of the places that its elements come from.

use crate::op::Windows;
use crate::tensor::{Data, NOWHERE, Tensor, places, strides};

pub(super) fn reshape(dims: &[usize], x: &Tensor) -> Tensor {
    Tensor::new(x.dtype, dims, x.data.clone())
}

pub(super) fn transpose(perm: &[usize], x: &Tensor) -> Tensor {
    let from = strides(&x.dims);
    let dims: Vec<usize> = perm.iter().map(|p| x.dims[*p]).collect();
    let steps: Vec<usize> = perm.iter().map(|p| from[*p]).collect();
    picked(&dims, &places(&dims, &steps, 0), x)
}

pub(super) fn broadcast(new: &[usize], dims: &[usize], x: &Tensor) -> Tensor {
    let mut from = strides(&x.dims).into_iter();
    let is_new = |at: &usize| new.contains(at);
    let steps = (0..dims.len()).map(|at| if is_new(&at) { 0 } else { from.next().unwrap_or(0) });
    let steps: Vec<usize> = steps.collect();
    picked(dims, &places(dims, &steps, 0), x)
}

pub(super) fn slice(dim: usize, start: usize, size: usize, x: &Tensor) -> Tensor {
    let ids = (start..start + size).map(|at| at as i64).collect::<Vec<_>>();
    rows(dim, &with(&x.dims, dim, size), &ids, x)
}

pub(super) fn pad(dim: usize, before: usize, after: usize, x: &Tensor) -> Tensor {
    let size = x.dims[dim] + before + after;
    let ids = (0..size).map(|at| at as i64 - before as i64).collect::<Vec<_>>();
    rows(dim, &with(&x.dims, dim, size), &ids, x)
}

pub(super) fn reverse(dims: &[usize], x: &Tensor) -> Tensor {
    let flip = |x: &Tensor, dim: &usize| {
        let ids = (0..x.dims[*dim] as i64).rev().collect::<Vec<_>>();
        rows(*dim, &x.dims, &ids, x)
    };
    dims.iter().fold(x.clone(), |x, dim| flip(&x, dim))
}

pub(super) fn window(windows: Windows, x: &Tensor) -> Tensor {
    let (dims, places) = window_places(windows, &x.dims);
    picked(&dims, &places, x)
}

pub(super) fn fold(windows: Windows, extent: usize, x: &Tensor) -> Tensor {
    let mut dims = x.dims.clone();
    dims.splice(windows.dim..windows.dim + 2, [extent]);
    let (_, places) = window_places(windows, &dims);
    summed(&dims, &places, x)
}

/// The dims of the windows, and where their elements lie in a tensor of the given dims.
fn window_places(windows: Windows, dims: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let Windows { dim, size, stride, dilation } = windows;
    let count = windows.count(dims[dim]).unwrap_or(0);
    let (mut split, mut steps) = (dims.to_vec(), strides(dims));
    let step = steps[dim];
    split.splice(dim..=dim, [count, size]);
    steps.splice(dim..=dim, [step * stride, step * dilation]);
    let places = places(&split, &steps, 0);
    (split, places)
}

pub(super) fn concat(dim: usize, operands: &[&Tensor]) -> Tensor {
    let size = operands.iter().map(|x| x.dims[dim]).sum();
    let dims = with(&operands[0].dims, dim, size);
    let mut out = Tensor::filled(operands[0].dtype, &dims, 0.0);
    let mut start = 0;
    for x in operands {
        write(dim, start, x, &mut out);
        start += x.dims[dim];
    }
    out
}

pub(super) fn gather(dim: usize, start: i64, table: &Tensor, ids: &Tensor) -> Tensor {
    let dims = [&table.dims[..dim], &ids.dims, &table.dims[dim + 1..]].concat();
    let ids: Vec<i64> = integers(ids).iter().map(|id| id.saturating_sub(start)).collect();
    rows(dim, &dims, &ids, table)
}

pub(super) fn scatter_add(dim: usize, start: i64, size: usize, ids: &Tensor, x: &Tensor) -> Tensor {
    let after = &x.dims[dim + ids.dims.len()..];
    let dims = [&x.dims[..dim], &[size], after].concat();
    let ids: Vec<i64> = integers(ids).iter().map(|id| id.saturating_sub(start)).collect();
    summed(&dims, &row_places(&dims, dim, &ids), x)
}

pub(super) fn scatter(dim: usize, start: i64, x: &Tensor, ids: &Tensor, new: &Tensor) -> Tensor {
    let ids: Vec<i64> = integers(ids).iter().map(|id| id.saturating_sub(start)).collect();
    let places = row_places(&x.dims, dim, &ids);
    let inside: Vec<usize> = (0..places.len()).filter(|at| places[*at] != NOWHERE).collect();
    let targets: Vec<usize> = inside.iter().map(|at| places[*at]).collect();
    let mut out = x.clone();
    out.data.put(&targets, &new.data.pick(&inside));
    out
}

/// Zeros to which each element is added at its place, in order.
fn summed(dims: &[usize], places: &[usize], x: &Tensor) -> Tensor {
    let count = dims.iter().product();
    match &x.data {
        Data::F32(x_f32) => {
            let mut out = vec![0.0_f32; count];
            for (at, value) in places.iter().zip(x_f32).filter(|(at, _)| **at != NOWHERE) {
                out[*at] += value;
            }
            Tensor::f32(dims, out)
        }
        Data::Int(x_int) => {
            let mut out = vec![0_i64; count];
            for (at, value) in places.iter().zip(x_int).filter(|(at, _)| **at != NOWHERE) {
                out[*at] = out[*at].wrapping_add(*value);
            }
            Tensor::int(x.dtype, dims, out)
        }
        Data::F64(_) | Data::Bool(_) => {
            let mut out = vec![0.0; count];
            for (at, value) in places.iter().zip(x.to_f64()).filter(|(at, _)| **at != NOWHERE) {
                out[*at] += value;
            }
            Tensor::from_f64(x.dtype, dims, out)
        }
    }
}

pub(super) fn dynamic_slice(dim: usize, size: usize, x: &Tensor, at: &Tensor) -> Tensor {
    let dims = with(&x.dims, dim, size);
    picked(&dims, &ranges(dim, size, &x.dims, at), x)
}

pub(super) fn dynamic_update_slice(dim: usize, x: &Tensor, update: &Tensor, at: &Tensor) -> Tensor {
    let mut out = x.clone();
    out.data.put(&ranges(dim, update.dims[dim], &x.dims, at), &update.data);
    out
}

/// The places in a tensor of its ranges of `size` along a dim, of which `at` says where all begin,
/// or those of each point of the first dim. What would end past the end is moved back.
fn ranges(dim: usize, size: usize, whole: &[usize], at: &Tensor) -> Vec<usize> {
    let steps = strides(whole);
    let of_range = with(whole, dim, size);
    let start = |at: i64| at.clamp(0, (whole[dim] - size) as i64) as usize * steps[dim];
    match (integers(at), &at.dims[..]) {
        (ats, [_]) => {
            let of_point = |(point, at): (usize, &i64)| {
                places(&of_range[1..], &steps[1..], point * steps[0] + start(*at))
            };
            ats.iter().enumerate().flat_map(of_point).collect()
        }
        (ats, _) => places(&of_range, &steps, start(ats[0])),
    }
}

fn write(dim: usize, start: usize, x: &Tensor, out: &mut Tensor) {
    let steps = strides(&out.dims);
    let places = places(&x.dims, &steps, start * steps[dim]);
    out.data.put(&places, &x.data);
}

fn integers(x: &Tensor) -> &[i64] {
    let Data::Int(x) = &x.data else { panic!("verified: ids are integers") };
    x
}

fn with(dims: &[usize], dim: usize, size: usize) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims[dim] = size;
    dims
}

fn picked(dims: &[usize], places: &[usize], x: &Tensor) -> Tensor {
    Tensor::new(x.dtype, dims, x.data.pick(places))
}

/// The slices of the given indices along a dim; zeros where an index is outside.
fn rows(dim: usize, dims: &[usize], ids: &[i64], x: &Tensor) -> Tensor {
    picked(dims, &row_places(&x.dims, dim, ids), x)
}

/// Where the elements of the given indices along `dim` lie in a tensor of the given dims.
fn row_places(dims: &[usize], dim: usize, ids: &[i64]) -> Vec<usize> {
    let (outer, inner) = (dims[..dim].iter().product(), dims[dim + 1..].iter().product());
    let mut places = Vec::with_capacity(outer * ids.len() * inner);
    for block in 0..outer {
        for id in ids {
            match usize::try_from(*id).ok().filter(|id| *id < dims[dim]) {
                Some(id) => {
                    let start = (block * dims[dim] + id) * inner;
                    places.extend(start..start + inner);
                }
                None => places.extend(std::iter::repeat_n(NOWHERE, inner)),
            }
        }
    }
    places
}
