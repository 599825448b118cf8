//! Orders: the indices that sort the elements along a dim.

use std::cmp::Ordering;

use crate::DType;
use crate::tensor::{Data, Tensor, strides};

/// The first `count` indices of the order along a dim. Equal elements stay in order; a NaN is
/// larger than every number.
pub(super) fn order(descending: bool, dim: usize, count: usize, x: &Tensor) -> Tensor {
    let compare: Box<dyn Fn(usize, usize) -> Ordering> = match &x.data {
        Data::Int(x) => Box::new(|a, b| x[a].cmp(&x[b])),
        Data::F64(_) | Data::F32(_) | Data::Bool(_) => {
            let x = x.to_f64();
            let compare = move |a: usize, b: usize| {
                let nans = x[a].is_nan().cmp(&x[b].is_nan());
                x[a].partial_cmp(&x[b]).unwrap_or(nans)
            };
            Box::new(compare)
        }
    };
    let (extent, step) = (x.dims[dim], strides(&x.dims)[dim]);
    let mut dims = x.dims.clone();
    dims[dim] = count;
    let mut out = vec![0; dims.iter().product()];
    for outer in 0..x.dims[..dim].iter().product() {
        for inner in 0..step {
            let first = outer * extent * step + inner;
            let mut indices: Vec<usize> = (0..extent).collect();
            indices.sort_by(|a, b| {
                let ascending = compare(first + a * step, first + b * step);
                if descending { ascending.reverse() } else { ascending }
            });
            for (at, index) in indices.into_iter().take(count).enumerate() {
                out[outer * count * step + at * step + inner] = index as i64;
            }
        }
    }
    Tensor::int(DType::I32, &dims, out)
}
