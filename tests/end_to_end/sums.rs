//! Sums of what is repeated, and products of it: kernels against the interpreter.
//!
//! What is the same in all columns, or in all rows, is held once: a sum adds it as often as it is
//! there, and a product reads it where it was written.

use ir::build::Builder;
use ir::eval::eval;
use ir::op::{Binary, Combiner, Op, Unary};
use ir::{DType, Dim, Kind, Module, Tensor, TensorType, ValueId};

use crate::draws::{Draws, seeds};
use crate::operators::compiled;

const SIZES: [usize; 5] = [1, 2, 3, 8, 17];

fn operand(b: &mut Builder<'_>, r: &mut Draws, dims: &[usize]) -> (ValueId, Tensor) {
    let count = dims.iter().product();
    let numbers: Vec<f64> = (0..count).map(|_| r.number(-1.0, 1.0)).collect();
    let ty = TensorType::of(DType::F32, dims);
    (b.param(&format!("x{}", r.below(1 << 30)), ty), Tensor::from_f64(DType::F32, dims, numbers))
}

/// New dims at any places, and all dims with them.
fn repeated(r: &mut Draws, dims: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let (mut new, mut dims): (Vec<usize>, _) = (Vec::new(), dims.to_vec());
    for _ in 0..1 + r.below(2) {
        let at = r.below(dims.len() + 1);
        new.iter_mut().filter(|dim| **dim >= at).for_each(|dim| *dim += 1);
        new.push(at);
        dims.insert(at, SIZES[r.below(SIZES.len())]);
    }
    new.sort_unstable();
    (new, dims)
}

/// Sums are taken in other orders.
fn assert_near(found: &[Vec<f64>], wanted: &[Tensor], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (found, wanted) in found.iter().zip(wanted) {
        for (x, y) in found.iter().zip(wanted.to_f64()) {
            assert!((x - y).abs() <= 1e-4 * y.abs().max(1.0), "{what}: {x}, not {y}");
        }
    }
}

fn maybe_unary(b: &mut Builder<'_>, r: &mut Draws, name: &str, x: ValueId) -> ValueId {
    match r.below(3) {
        0 => b.unary(name, Unary::Abs, x),
        1 => b.unary(name, Unary::Neg, x),
        _ => x,
    }
}

/// Repeated values, with others of their shape at times, summed over any of their dims.
#[test]
fn sums_count_what_is_repeated() {
    for seed in seeds(400) {
        let r = &mut Draws::new(seed);
        let mut module = Module::new("m");
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let dims: Vec<usize> = (0..r.below(3)).map(|_| SIZES[r.below(SIZES.len())]).collect();
        let (x, tensor) = operand(&mut b, r, &dims);
        let mut operands = vec![tensor];
        // Another of the shape that it is repeated to, at times.
        let (new, dims) = repeated(r, &dims);
        let other = (r.below(3) == 0).then(|| {
            let (other, tensor) = operand(&mut b, r, &dims);
            operands.push(tensor);
            other
        });
        let x = maybe_unary(&mut b, r, "before", x);
        let dims = dims.into_iter().map(Dim::from).collect();
        let mut y = b.push("repeated", Op::Broadcast { new, dims }, &[x]);
        y = maybe_unary(&mut b, r, "after", y);
        let mut results = Vec::new();
        results.extend(other.map(|other| b.binary("product", Binary::Mul, y, other)));
        let all: Vec<usize> = (0..b.ty(y).ndim()).collect();
        for at in 0..1 + r.below(2) {
            let mut dims: Vec<usize> = all.iter().copied().filter(|_| r.below(3) > 0).collect();
            if dims.is_empty() {
                dims.clone_from(&all);
            }
            results.push(b.reduce(&format!("sum{at}"), Combiner::Sum, dims, y));
        }
        b.finish(&results);
        let what = format!("SEED={seed}\n{module}");
        let found = compiled(&module, "f", &operands).unwrap_or_else(|why| panic!("{what}: {why}"));
        let wanted = eval(&module, "f", &operands).expect("it evaluates");
        assert_near(&found, &wanted, &what);
    }
}

/// Products of which a factor is repeated along rows or columns, with and without a bias.
#[test]
fn products_read_repeated_factors() {
    for seed in seeds(200) {
        let r = &mut Draws::new(seed);
        let mut module = Module::new("m");
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let [m, k, n] = [0; 3].map(|_| SIZES[r.below(SIZES.len())]);
        // Of each factor the dims that it has: one of two, or both.
        let shapes = [[m, k], [n, k], [m, n]].map(|dims| (dims, r.below(4).min(2)));
        let made = shapes.map(|(dims, lacks)| {
            let kept: Vec<usize> = (0..2).filter(|at| *at != lacks).map(|at| dims[at]).collect();
            operand(&mut b, r, &kept)
        });
        let [x, w, bias] = [0, 1, 2].map(|at| {
            let ((dims, lacks), (value, _)) = (&shapes[at], &made[at]);
            let dims = dims.map(Dim::from).to_vec();
            let new = vec![*lacks];
            let name = ["a", "w", "bias"][at];
            if *lacks == 2 { *value } else { b.push(name, Op::Broadcast { new, dims }, &[*value]) }
        });
        let operands = made.map(|(_, tensor)| tensor).to_vec();
        let mut y = b.contract("product", "mk,nk->mn", x, w);
        if r.below(3) > 0 {
            y = b.binary("sum", Binary::Add, y, bias);
        }
        let y = maybe_unary(&mut b, r, "after", y);
        b.finish(&[y]);
        let what = format!("SEED={seed}\n{module}");
        let found = compiled(&module, "f", &operands).unwrap_or_else(|why| panic!("{what}: {why}"));
        let wanted = eval(&module, "f", &operands).expect("it evaluates");
        assert_near(&found, &wanted, &what);
    }
}
