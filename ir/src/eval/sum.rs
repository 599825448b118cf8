//! Contractions and reductions.

use std::ops::{Add, Mul};

use super::elementwise::larger;
use crate::DType;
use crate::formats::tf32;
use crate::infer::RUN;
use crate::op::{Combiner, Einsum, Operands};
use crate::tensor::{Data, Tensor, places, strides, wrap};

/// Sums products. Factors fall into four groups: in both operands and the result, in `a` and the
/// result, in `b` and the result, in both operands only; so any contraction is a batch of matrix
/// products `[batch, m, k] x [batch, k, n]` between permuted operands.
pub(super) fn contract(einsum: &Einsum, a: &Tensor, b: &Tensor) -> Tensor {
    let Einsum { a: in_a, b: in_b, result, is_wide, operands } = einsum;
    let group = |of: &[char], here: &dyn Fn(&char) -> bool| -> Vec<char> {
        of.iter().filter(|c| here(c)).copied().collect()
    };
    let batch = group(result, &|c| in_a.contains(c) && in_b.contains(c));
    let m = group(result, &|c| !in_b.contains(c));
    let n = group(result, &|c| !in_a.contains(c));
    let k = group(in_a, &|c| !result.contains(c));
    let read = |data: Data| match operands {
        Operands::Exact => data,
        Operands::Tf32 => rounded(data),
    };
    let left = read(permuted(in_a, &[&batch, &m, &k], a));
    let right = read(permuted(in_b, &[&batch, &k, &n], b));
    let size = |c: &char| match in_a.iter().position(|x| x == c) {
        Some(at) => a.dims[at],
        None => in_b.iter().position(|x| x == c).map_or(1, |at| b.dims[at]),
    };
    let count = |letters: &[char]| letters.iter().map(size).product::<usize>();
    let sizes = [count(&batch), count(&m), count(&k), count(&n)];
    let data = match (&left, &right) {
        (Data::F64(x), Data::F64(y)) => Data::F64(products(sizes, x, y)),
        (Data::F32(x), Data::F32(y)) => Data::F32(products(sizes, x, y)),
        (Data::F64(_) | Data::F32(_) | Data::Int(_) | Data::Bool(_), _) => {
            panic!("verified: both operands are floating-point of one type")
        }
    };
    let letters: Vec<char> = [batch, m, n].concat();
    let dims: Vec<usize> = letters.iter().map(size).collect();
    let dtype = if *is_wide { a.dtype.accumulation() } else { a.dtype };
    let product = Tensor::new(dtype, &dims, data);
    let dims: Vec<usize> = result.iter().map(size).collect();
    Tensor::new(dtype, &dims, permuted(&letters, &[result], &product))
}

/// Sums products of codes, which are worth what their scales say.
pub(super) fn scaled_contract(
    einsum: &Einsum,
    runs_first: [bool; 2],
    [a, b, scales_a, scales_b]: [&Tensor; 4],
) -> Tensor {
    let is_summed = |c: &char| einsum.a.contains(c) && einsum.b.contains(c);
    // The order of runs is that of `a`.
    let summed: Vec<char> = einsum.a.iter().copied().filter(is_summed).collect();
    let worth = |letters: &[char], x: &Tensor, scales: &Tensor, runs_first: bool| {
        let kept: Vec<char> = letters.iter().copied().filter(|c| !is_summed(c)).collect();
        let size = |c: &char| letters.iter().position(|l| l == c).map_or(1, |at| x.dims[at]);
        let k = summed.iter().map(size).product::<usize>().max(1);
        let steps = if runs_first { [1, scales.dims[1]] } else { [scales.dims[1], 1] };
        let blocks = scales.dims[usize::from(runs_first)];
        let block = if blocks * k == x.count() { 1 } else { RUN };
        let worths = scales.to_f64();
        let number = |(at, code): (usize, f64)| {
            let (row, run) = (at / k / block, at % k / RUN);
            code * worths[row * steps[0] + run * steps[1]]
        };
        let codes = permuted(letters, &[&kept, &summed], x).to_f64();
        let numbers = codes.into_iter().enumerate().map(number).collect();
        let dims: Vec<usize> = kept.iter().chain(&summed).map(size).collect();
        (Tensor::from_f64(DType::F32, &dims, numbers), [kept, summed.clone()].concat())
    };
    let (x, of_a) = worth(&einsum.a, a, scales_a, runs_first[0]);
    let (y, of_b) = worth(&einsum.b, b, scales_b, runs_first[1]);
    let plain = Einsum::new(of_a, of_b, einsum.result.clone());
    let Tensor { dims, data, .. } = contract(&plain, &x, &y);
    let dtype = if einsum.is_wide { DType::F32 } else { DType::BF16 };
    Tensor::new(dtype, &dims, data)
}

/// Numbers of F32 as products of TF32 read them.
fn rounded(data: Data) -> Data {
    match data {
        Data::F32(numbers) => Data::F32(numbers.into_iter().map(tf32).collect()),
        Data::F64(_) | Data::Int(_) | Data::Bool(_) => panic!("verified: operands are of f32"),
    }
}

/// The elements of a tensor whose dims carry `letters`, with the dims in the order of `groups`.
fn permuted(letters: &[char], groups: &[&Vec<char>], x: &Tensor) -> Data {
    let order: Vec<usize> = groups
        .iter()
        .flat_map(|group| group.iter())
        .filter_map(|c| letters.iter().position(|l| l == c))
        .collect();
    if order.is_sorted() {
        return x.data.clone();
    }
    let from = strides(&x.dims);
    let dims: Vec<usize> = order.iter().map(|at| x.dims[*at]).collect();
    let steps: Vec<usize> = order.iter().map(|at| from[*at]).collect();
    x.data.pick(&places(&dims, &steps, 0))
}

/// Each element is summed in ascending `k`, in the element type.
fn products<T>([batch, m, k, n]: [usize; 4], a: &[T], b: &[T]) -> Vec<T>
where
    T: Copy + Default + Add<Output = T> + Mul<Output = T>,
{
    let mut out = vec![T::default(); batch * m * n];
    for of_batch in 0..batch {
        for of_m in 0..m {
            let row = of_batch * m + of_m;
            let sums = &mut out[row * n..(row + 1) * n];
            for of_k in 0..k {
                let scale = a[row * k + of_k];
                let from = (of_batch * k + of_k) * n;
                for (sum, value) in sums.iter_mut().zip(&b[from..from + n]) {
                    *sum = *sum + scale * *value;
                }
            }
        }
    }
    out
}

/// Combines along dims. Floating-point sums are accumulated in f64.
pub(super) fn reduce(combiner: Combiner, dims: &[usize], x: &Tensor) -> Tensor {
    let lanes = Lanes::new(dims, x);
    match &x.data {
        Data::Int(x_int) => lanes.of_int(x, |lane| {
            let found = combine_int(combiner, lane.map(|at| x_int[at]));
            // Of nothing, the end of the type.
            if combiner == Combiner::Sum { found } else { held(x.dtype, found) }
        }),
        // Any of truths is a sum and the largest of them, all the least.
        Data::Bool(truths) => {
            let of = |lane: &usize| {
                let mut lane = lanes.lane(*lane).map(|at| truths[at]);
                if combiner == Combiner::Min { lane.all(|x| x) } else { lane.any(|x| x) }
            };
            Tensor::bool(&lanes.sizes, lanes.starts.iter().map(of).collect())
        }
        Data::F64(_) | Data::F32(_) => {
            let numbers = x.to_f64();
            lanes.of_f64(x.dtype, |lane| combine(combiner, lane.map(|at| numbers[at])))
        }
    }
}

/// Combines up to and including each index of a dim.
pub(super) fn cumulative(combiner: Combiner, dim: usize, x: &Tensor) -> Tensor {
    let data = match &x.data {
        Data::F64(x_f64) => Data::F64(running(x, dim, x_f64, |a, b| two(combiner, a, b))),
        Data::F32(x_f32) => {
            let of = |a: f32, b: f32| two(combiner, f64::from(a), f64::from(b)) as f32;
            Data::F32(running(x, dim, x_f32, of))
        }
        Data::Int(x_int) => {
            let of = |a, b| wrap(x.dtype, combine_int(combiner, [a, b].into_iter()));
            Data::Int(running(x, dim, x_int, of))
        }
        Data::Bool(_) => panic!("verified: the operand is not bool"),
    };
    Tensor::new(x.dtype, &x.dims, data)
}

fn two(combiner: Combiner, a: f64, b: f64) -> f64 {
    combine(combiner, [a, b].into_iter())
}

fn running<T: Copy>(x: &Tensor, dim: usize, elements: &[T], of: impl Fn(T, T) -> T) -> Vec<T> {
    let mut out = elements.to_vec();
    let step = strides(&x.dims)[dim];
    for at in 0..out.len() {
        if !(at / step).is_multiple_of(x.dims[dim]) {
            out[at] = of(out[at - step], out[at]);
        }
    }
    out
}

/// Multiplies along dims. Floating-point products are accumulated in f64.
pub(super) fn prod(dims: &[usize], x: &Tensor) -> Tensor {
    let lanes = Lanes::new(dims, x);
    match &x.data {
        Data::Int(x_int) => {
            lanes.of_int(x, |lane| lane.fold(1, |product: i64, at| product.wrapping_mul(x_int[at])))
        }
        Data::F64(_) | Data::F32(_) | Data::Bool(_) => {
            let numbers = x.to_f64();
            lanes.of_f64(x.dtype, |lane| lane.map(|at| numbers[at]).product())
        }
    }
}

/// The first index at which nothing later along the dim is larger.
pub(super) fn argmax(dim: usize, x: &Tensor) -> Tensor {
    let lanes = Lanes::new(&[dim], x);
    let first = |is_larger: &dyn Fn(usize, usize) -> bool| {
        lanes.of_f64(DType::I32, |lane| {
            let places: Vec<usize> = lane.collect();
            let better = |best: usize, at: usize| {
                if is_larger(places[at], places[best]) { at } else { best }
            };
            (1..places.len()).fold(0, better) as f64
        })
    };
    match &x.data {
        Data::Int(x) => first(&|a, b| x[a] > x[b]),
        Data::F64(_) | Data::F32(_) | Data::Bool(_) => {
            let x = x.to_f64();
            first(&|a, b| x[a] > x[b] || (x[a].is_nan() && !x[b].is_nan()))
        }
    }
}

/// The places of the elements that are combined into each element of a result.
struct Lanes {
    starts: Vec<usize>,
    inner: Vec<usize>,
    sizes: Vec<usize>,
}

impl Lanes {
    fn new(dims: &[usize], x: &Tensor) -> Lanes {
        let from = strides(&x.dims);
        let kept: Vec<usize> = (0..x.dims.len()).filter(|d| !dims.contains(d)).collect();
        let view = |of: &[usize]| {
            let sizes: Vec<usize> = of.iter().map(|d| x.dims[*d]).collect();
            let steps: Vec<usize> = of.iter().map(|d| from[*d]).collect();
            (places(&sizes, &steps, 0), sizes)
        };
        let ((starts, sizes), (inner, _)) = (view(&kept), view(dims));
        Lanes { starts, inner, sizes }
    }

    fn lane(&self, start: usize) -> impl Iterator<Item = usize> {
        self.inner.iter().map(move |at| start + at)
    }

    fn of_f64(&self, dtype: DType, of: impl Fn(&mut dyn Iterator<Item = usize>) -> f64) -> Tensor {
        let elements = self.starts.iter().map(|start| of(&mut self.lane(*start))).collect();
        Tensor::from_f64(dtype, &self.sizes, elements)
    }

    fn of_int(&self, x: &Tensor, of: impl Fn(&mut dyn Iterator<Item = usize>) -> i64) -> Tensor {
        let elements = self.starts.iter().map(|start| of(&mut self.lane(*start))).collect();
        Tensor::int(x.dtype, &self.sizes, elements)
    }
}

fn combine(combiner: Combiner, items: impl Iterator<Item = f64>) -> f64 {
    match combiner {
        Combiner::Sum => items.sum(),
        Combiner::Max => items.fold(f64::NEG_INFINITY, larger),
        Combiner::Min => items.fold(f64::INFINITY, |a, b| -larger(-a, -b)),
    }
}

/// The nearest number of an integer type.
fn held(dtype: DType, number: i64) -> i64 {
    match dtype {
        DType::I8 => number.clamp(i8::MIN.into(), i8::MAX.into()),
        DType::I32 => number.clamp(i32::MIN.into(), i32::MAX.into()),
        DType::U32 => number.clamp(0, u32::MAX.into()),
        DType::I64
        | DType::Bool
        | DType::F64
        | DType::F32
        | DType::BF16
        | DType::F16
        | DType::F8E4M3
        | DType::F8E5M2 => number,
    }
}

fn combine_int(combiner: Combiner, items: impl Iterator<Item = i64>) -> i64 {
    match combiner {
        Combiner::Sum => items.fold(0, i64::wrapping_add),
        Combiner::Max => items.max().unwrap_or(i64::MIN),
        Combiner::Min => items.min().unwrap_or(i64::MAX),
    }
}
