//! Convolutions: every product of every window, added in f64.

use super::view::transpose;
use crate::convolution::{Convolution, DimOrder};
use crate::tensor::{Tensor, strides};

/// The places of one pair of elements that are multiplied, within a channel of `x` and of `w`.
type Tap = (usize, usize);

pub(super) fn conv(c: &Convolution, x: &Tensor, w: &Tensor) -> Tensor {
    let [of_x, of_w, of_y] = &c.orders;
    // The dims of a tensor that lies in an order, as it would be transposed from and to the usual.
    let places = |order: &DimOrder| (0..x.dims.len()).map(|dim| order.place(dim)).collect();
    let dims: Vec<usize> = (0..x.dims.len()).collect();
    let [x, w] = [(of_x, x), (of_w, w)].map(|(order, of)| {
        let perm: Vec<usize> = places(order);
        transpose(&perm, of)
    });
    transpose(&of_y.lying(&dims), &in_usual_order(c, &x, &w))
}

fn in_usual_order(c: &Convolution, x: &Tensor, w: &Tensor) -> Tensor {
    let spatial = c.result_sizes(&x.dims[2..], &w.dims[2..]).unwrap_or_default();
    let dims = [&[x.dims[0], w.dims[0]], spatial.as_slice()].concat();
    let taps = taps(c, &spatial, &x.dims[2..], &w.dims[2..]);
    let (inputs, outputs, depth) = (x.dims[1], w.dims[0], w.dims[1]);
    let outputs_per_group = outputs / (inputs / depth.max(1)).max(1);
    let channel_size = |of: &Tensor| of.dims[2..].iter().product::<usize>();
    let (in_x, in_w) = (channel_size(x), channel_size(w));
    let (x_numbers, w_numbers) = (x.to_f64(), w.to_f64());
    let mut out = Vec::with_capacity(dims.iter().product());
    for sample in 0..dims[0] {
        for output in 0..outputs {
            let first = sample * inputs + output / outputs_per_group * depth;
            for taps in &taps {
                let channel = |at: usize| -> f64 {
                    let (x_at, w_at) = ((first + at) * in_x, (output * depth + at) * in_w);
                    taps.iter().map(|(x, w)| x_numbers[x_at + x] * w_numbers[w_at + w]).sum()
                };
                out.push((0..depth).map(channel).sum());
            }
        }
    }
    Tensor::from_f64(x.dtype, &dims, out)
}

/// For each place of the result, within a channel, what is multiplied there.
fn taps(c: &Convolution, result: &[usize], x: &[usize], w: &[usize]) -> Vec<Vec<Tap>> {
    let (x_steps, w_steps) = (strides(x), strides(w));
    let mut taps: Vec<Vec<Tap>> = vec![vec![(0, 0)]];
    for dim in 0..result.len() {
        let pairs = |at: usize| -> Vec<Tap> {
            let source = |k: usize| {
                let place = (at * c.stride[dim] + k * c.dilation[dim]) as i64 - c.before[dim];
                let place = usize::try_from(place).ok()?;
                let there = place.is_multiple_of(c.spread[dim]) && place / c.spread[dim] < x[dim];
                there.then(|| (place / c.spread[dim] * x_steps[dim], k * w_steps[dim]))
            };
            (0..w[dim]).filter_map(source).collect()
        };
        let along: Vec<Vec<Tap>> = (0..result[dim]).map(pairs).collect();
        let joined = |outer: &Vec<Tap>, inner: &Vec<Tap>| -> Vec<Tap> {
            let all = outer.iter().flat_map(|o| inner.iter().map(move |i| (o.0 + i.0, o.1 + i.1)));
            all.collect()
        };
        taps = taps.iter().flat_map(|o| along.iter().map(move |i| joined(o, i))).collect();
    }
    taps
}
