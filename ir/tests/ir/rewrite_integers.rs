//! Rewriting of integers, which wrap, next to the ends of their types.

use gantline_ir::build::Builder;
use gantline_ir::eval::eval;
use gantline_ir::op::{Binary, Comparison, Unary};
use gantline_ir::rewrite::saturate::Selection;
use gantline_ir::rewrite::{Options, simplify};
use gantline_ir::{DType, Dim, Kind, Module, Op, Tensor, TensorType, ValueId};

use crate::draws::{Draws, seeds};

/// The elements of a value; now and then there are none.
const SIZE: usize = 12;

/// The least and the largest number of a type.
fn ends(dtype: DType) -> (i64, i64) {
    let all = [
        (DType::I8, i8::MIN.into(), i8::MAX.into()),
        (DType::I32, i32::MIN.into(), i32::MAX.into()),
        (DType::U32, 0, u32::MAX.into()),
    ];
    let found = all.into_iter().find(|(own, ..)| *own == dtype);
    found.map(|(_, least, most)| (least, most)).expect("one of the types that are drawn")
}

/// An integer, mostly near one of the ends or zero.
fn integer(r: &mut Draws, (least, most): (i64, i64)) -> i64 {
    let near = [least, most, 0.max(least), (least + most) / 2][r.below(4)];
    let off = if r.coin() { r.below(4) } else { r.below(120) } as i64;
    (near + if r.coin() { off } else { -off }).clamp(least, most)
}

/// A comparison of sums, differences, absolute values and counts of numbers between bounds.
fn drawn(r: &mut Draws, dtype: DType, size: usize) -> Module {
    let mut module = Module::new("m");
    let mut b = Builder::new(&mut module, "main", Kind::Layer);
    let ty = TensorType::of(dtype, &[size]);
    let params = ["x", "y"].map(|name| b.param(name, ty.clone()));
    let mut values: Vec<ValueId> = Vec::new();
    for param in params {
        let (a, z) = (integer(r, ends(dtype)), integer(r, ends(dtype)));
        let bounds = [a.min(z), a.max(z)].map(|n| b.constant("c", n as f64, ty.clone()));
        let low = b.binary("low", Binary::Max, param, bounds[0]);
        values.push(b.binary("clipped", Binary::Min, low, bounds[1]));
    }
    for _ in 0..1 + r.below(3) {
        let [x, y] = [0, 1].map(|_| values[r.below(values.len())]);
        let value = match r.below(6) {
            0 if dtype != DType::U32 => b.unary("v", Unary::Abs, x),
            1 if dtype != DType::U32 => b.unary("v", Unary::Neg, x),
            2 => b.binary("v", Binary::Add, x, y),
            3 => b.binary("v", Binary::Sub, x, y),
            4 => {
                let (start, dims) = (integer(r, ends(dtype)), vec![Dim::from(size)]);
                b.push("v", Op::Iota { dim: 0, start, dtype, dims }, &[])
            }
            _ => b.constant("v", integer(r, ends(dtype)) as f64, ty.clone()),
        };
        values.push(value);
    }
    let last = values[values.len() - 1];
    let bound = match r.coin() {
        true => b.constant("bound", integer(r, ends(dtype)) as f64, ty),
        false => values[r.below(values.len())],
    };
    let how = Comparison::ALL[r.below(3)];
    let pair = if r.coin() { [last, bound] } else { [bound, last] };
    let result = b.push("result", Op::Compare(how), &pair);
    b.finish(&[result]);
    module
}

#[test]
fn integers_that_wrap_are_compared_as_they_are() {
    let (mut decided, mut total) = (0, 0);
    for seed in seeds(1500) {
        let mut r = Draws::new(seed);
        let dtype = [DType::I8, DType::I32, DType::U32][r.below(3)];
        let size = if r.below(10) == 0 { 0 } else { SIZE };
        let module = drawn(&mut r, dtype, size);
        let mut after = module.clone();
        let exact = Options { selection: Selection::exact(), ..Options::default() };
        let report = simplify(&mut after, &exact);
        decided += usize::from(report.rules().contains(&"decide-comparison-by-bounds"));
        total += 1;
        let args = [0, 1].map(|_| {
            let numbers = (0..size).map(|_| integer(&mut r, ends(dtype))).collect();
            Tensor::int(dtype, &[size], numbers)
        });
        let [before, found] = [&module, &after].map(|m| eval(m, "main", &args).unwrap());
        assert_eq!(before, found, "SEED={seed}\n{module}{after}{args:?}");
    }
    let replayed = std::env::var("SEED").is_ok();
    assert!(replayed || decided >= 10, "only {decided} of {total} were decided");
}
