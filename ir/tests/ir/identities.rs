//! Ops against other ops that compute the same.

use gantline_ir::convolution::DimOrder;
use gantline_ir::dim::Bindings;
use gantline_ir::eval::eval_op;
use gantline_ir::op::{Binary, Combiner, Comparison, Convolution, Einsum, Windows};
use gantline_ir::{DType, Dim, Op, Tensor};

use crate::draws::{Draws, seeds};
use crate::ops::order;

/// The largest difference: sums are added in another order.
const TOLERANCE: f64 = 1e-12;

fn eval(op: Op, operands: &[&Tensor]) -> Tensor {
    eval_op(&op, operands, &Bindings::new()).unwrap()
}

fn assert_same(found: &Tensor, wanted: &Tensor, what: &str) {
    let off = found.max_relative_difference(wanted);
    assert!(off <= TOLERANCE, "{what}: off {off}\n{found:?}\n{wanted:?}");
}

/// Pads, takes the windows of both spatial dims, and multiplies them with the kernels.
#[test]
fn a_convolution_is_a_product_of_windows() {
    let mut tried = 0;
    for seed in seeds(60) {
        let mut r = Draws::new(seed);
        let two = |r: &mut Draws, most: usize| vec![1 + r.below(most), 1 + r.below(most)];
        let (stride, dilation) = (two(&mut r, 3), two(&mut r, 2));
        let (kernel, image) = (two(&mut r, 3), two(&mut r, 6));
        let pads: Vec<usize> = (0..4).map(|_| r.below(3)).collect();
        let c = Convolution {
            stride: stride.clone(),
            before: vec![pads[0] as i64, pads[1] as i64],
            after: vec![pads[2] as i64, pads[3] as i64],
            dilation: dilation.clone(),
            spread: vec![1, 1],
            orders: Default::default(),
        };
        if c.result_sizes(&image, &kernel).is_none() {
            continue;
        }
        tried += 1;
        let x = r.signed(&[2, 3, image[0], image[1]]);
        let w = r.signed(&[4, 3, kernel[0], kernel[1]]);
        let found = eval(Op::Conv(c), &[&x, &w]);
        let mut windows = x;
        for at in [1, 0] {
            let dim = 2 + at;
            let pad = Op::Pad { dim, before: pads[at], after: pads[at + 2] };
            let (size, stride, dilation) = (kernel[at], stride[at], dilation[at]);
            let of = Windows { dim, size, stride, dilation };
            windows = eval(Op::Window(of), &[&eval(pad, &[&windows])]);
        }
        let einsum = Einsum::parse("ncykxl,ockl->noyx").unwrap();
        let wanted = eval(Op::Contract(einsum), &[&windows, &w]);
        assert_same(&found, &wanted, &format!("SEED={seed}"));
    }
    assert!(tried >= 20 || std::env::var("SEED").is_ok(), "only {tried} were possible");
}

/// Arrays whose dims lie in another order are those that lie in the usual one, transposed.
#[test]
fn a_convolution_reads_and_writes_dims_in_any_order() {
    let mut named = 0;
    for seed in seeds(40) {
        let mut r = Draws::new(seed);
        let orders = [0; 3].map(|_| order(4, &mut r));
        named += usize::from(orders.iter().any(|order| order.named().is_some()));
        let usual = Convolution {
            stride: vec![1, 2],
            before: vec![1, 0],
            after: vec![0, 1],
            dilation: vec![1, 2],
            spread: vec![2, 1],
            orders: Default::default(),
        };
        let groups = 1 + r.below(2);
        let (x, w) = (r.signed(&[2, 2 * groups, 4, 5]), r.signed(&[3 * groups, 2, 3, 2]));
        let dims: Vec<usize> = (0..4).collect();
        let lie =
            |order: &DimOrder, of: &Tensor| eval(Op::Transpose { perm: order.lying(&dims) }, &[of]);
        let wanted = lie(&orders[2], &eval(Op::Conv(usual.clone()), &[&x, &w]));
        let (x, w) = (lie(&orders[0], &x), lie(&orders[1], &w));
        let found = eval(Op::Conv(Convolution { orders, ..usual }), &[&x, &w]);
        assert_same(&found, &wanted, &format!("SEED={seed}"));
    }
    assert!(named > 20 || std::env::var("SEED").is_ok(), "{named}");
}

/// A running sum is a product with a triangle of ones.
#[test]
fn a_cumulative_sum_is_a_product_with_a_triangle() {
    for seed in seeds(30) {
        let mut r = Draws::new(seed);
        let [rows, size] = [1 + r.below(4), 1 + r.below(6)];
        let x = r.signed(&[rows, size]);
        let found = eval(Op::Cumulative { combiner: Combiner::Sum, dim: 1 }, &[&x]);
        let dims = vec![Dim::from(size), Dim::from(size)];
        let index =
            |dim| eval(Op::Iota { dim, start: 0, dtype: DType::I32, dims: dims.clone() }, &[]);
        let ones = eval(Op::Compare(Comparison::Le), &[&index(0), &index(1)]);
        let ones = eval(Op::Cast { dtype: DType::F64 }, &[&ones]);
        let wanted = eval(Op::Contract(Einsum::parse("ri,ij->rj").unwrap()), &[&x, &ones]);
        assert_same(&found, &wanted, &format!("SEED={seed}"));
    }
}

/// Values in the order of their indices ascend, each index occurs once, and the largest elements
/// are the end of that order.
#[test]
fn orders_sort_and_top_k_ends_them() {
    for seed in seeds(40) {
        let mut r = Draws::new(seed);
        let size = 1 + r.below(7);
        let x = r.signed(&[size]);
        let ascending = eval(Op::Sort { dim: 0, descending: false }, &[&x]);
        let sorted = eval(Op::Gather { dim: 0, start: 0 }, &[&x, &ascending]);
        let numbers = sorted.to_f64();
        assert!(numbers.is_sorted(), "SEED={seed} {numbers:?}");
        let once = eval(Op::Sort { dim: 0, descending: false }, &[&ascending]);
        let inverse = eval(Op::Gather { dim: 0, start: 0 }, &[&ascending, &once]);
        assert!(inverse.to_f64().iter().map(|i| *i as usize).eq(0..size), "SEED={seed}");
        let count = 1 + r.below(size);
        let top = eval(Op::TopK { dim: 0, count }, &[&x]);
        let top = eval(Op::Gather { dim: 0, start: 0 }, &[&x, &top]).to_f64();
        let wanted: Vec<f64> = numbers.into_iter().rev().take(count).collect();
        assert_eq!(top, wanted, "SEED={seed}");
    }
}

/// What is written is read again, and the rest stays; without doubles, scattering is adding the
/// difference.
#[test]
fn a_scatter_of_distinct_ids_adds_the_difference() {
    for seed in seeds(40) {
        let mut r = Draws::new(seed);
        let [rows, width] = [2 + r.below(4), 1 + r.below(3)];
        let (x, keys) = (r.signed(&[rows, width]), r.signed(&[rows]));
        let count = 1 + r.below(rows - 1);
        let ids = eval(Op::TopK { dim: 0, count }, &[&keys]);
        let updates = r.signed(&[count, width]);
        let found = eval(Op::Scatter { dim: 0, start: 0 }, &[&x, &ids, &updates]);
        let old = eval(Op::Gather { dim: 0, start: 0 }, &[&x, &ids]);
        let more = eval(Op::Binary(Binary::Sub), &[&updates, &old]);
        let size = Dim::from(rows);
        let sums = eval(Op::ScatterAdd { dim: 0, start: 0, size }, &[&ids, &more]);
        let wanted = eval(Op::Binary(Binary::Add), &[&x, &sums]);
        assert_same(&found, &wanted, &format!("SEED={seed}"));
    }
}
