//! Every op as kernels against the interpreter, forward and backward, on random cases.

use std::collections::BTreeMap;

use codegen::lower::KernelTable;
use codegen::routines::routine;
use ir::autodiff::differentiate;
use ir::build::Builder;
use ir::eval::eval;
use ir::formats::decode;
use ir::op::{Binary, Combiner, Unary, Windows};
use ir::{DType, Kind, Module, Op, Tensor};
use runtime::convert::{Stored, convert};
use runtime::evaluate::Evaluation;

use crate::draws::{Draws, seeds};
use crate::ops::{Case, cases, kinds};

/// The largest difference, relative to the larger of one and the number: that of the functions of
/// the kernels in f64.
const TOLERANCE: f64 = 1e-9;

pub(crate) fn bytes(tensor: &Tensor) -> Vec<u8> {
    let numbers: Vec<u8> = tensor.to_f64().iter().flat_map(|x| x.to_le_bytes()).collect();
    if tensor.dtype == DType::Bool {
        return tensor.to_f64().iter().map(|x| u8::from(*x != 0.0)).collect();
    }
    if tensor.dtype == DType::U32 {
        return tensor.to_f64().iter().flat_map(|x| (*x as u32).to_le_bytes()).collect();
    }
    if tensor.dtype == DType::I32 {
        return tensor.to_f64().iter().flat_map(|x| (*x as i32).to_le_bytes()).collect();
    }
    convert(Stored::DType(DType::F64), &numbers, tensor.dtype)
}

pub(crate) fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let words = bytes.as_chunks().0.iter();
    if dtype == DType::Bool {
        bytes.iter().map(|b| f64::from(*b)).collect()
    } else if dtype == DType::U32 {
        words.map(|b| u32::from_le_bytes(*b).into()).collect()
    } else if dtype == DType::I32 {
        words.map(|b| i32::from_le_bytes(*b).into()).collect()
    } else if dtype == DType::F32 {
        words.map(|b| f32::from_le_bytes(*b).into()).collect()
    } else if dtype == DType::BF16 {
        let words = bytes.as_chunks().0.iter();
        words.map(|b| decode(dtype, u16::from_le_bytes(*b))).collect()
    } else {
        assert_eq!(dtype, DType::F64, "cases are of these types");
        bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
    }
}

/// The results of a function by its kernels; why there are none.
pub(crate) fn compiled(
    module: &Module,
    name: &str,
    args: &[Tensor],
) -> Result<Vec<Vec<f64>>, String> {
    let function = module.function(name).expect("it was built");
    let mut table = KernelTable::default();
    let made = routine(function, module, &[], &[], &mut table).map_err(|why| why.to_string())?;
    for kernel in &table.kernels {
        kernels::verify::verify(kernel).unwrap_or_else(|why| panic!("{kernel:?}: {why}"));
    }
    let mut evaluation = Evaluation::new(made, &table.kernels, 2).expect("there is memory");
    for (slot, arg) in args.iter().enumerate() {
        evaluation.write(slot, &bytes(arg));
    }
    evaluation.run();
    let types = function.result_types();
    let read = |(at, ty): (usize, &ir::TensorType)| {
        numbers(ty.dtype, evaluation.read(function.param_count + at))
    };
    Ok(types.iter().enumerate().map(read).collect())
}

fn module_of(case: &Case) -> Module {
    let mut module = Module::new("m");
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operand = |(at, t): (usize, &Tensor)| b.param(&format!("x{at}"), t.ty());
    let operands: Vec<_> = case.operands.iter().enumerate().map(operand).collect();
    let results = b.push_all("y", case.op.clone(), &operands);
    b.finish(&results);
    module
}

pub(crate) fn assert_equal(found: &[Vec<f64>], wanted: &[Tensor], what: &str) {
    assert_within(found, wanted, TOLERANCE, what);
}

fn assert_within(found: &[Vec<f64>], wanted: &[Tensor], tolerance: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (found, wanted) in found.iter().zip(wanted) {
        for (x, y) in found.iter().zip(wanted.to_f64()) {
            let near = (x - y).abs() <= tolerance * y.abs().max(1.0);
            assert!(near || *x == y || (x.is_nan() && y.is_nan()), "{what}: {x}, not {y}");
        }
    }
}

/// What has no kernel of its own: calls and collectives are no kernels, and a key is folded when a
/// program is made.
const WITHOUT: [&str; 5] = ["call", "all_reduce", "all_gather", "reduce_scatter", "fold_key"];

#[test]
fn every_op_has_a_kernel_that_computes_what_the_interpreter_does() {
    let mut ran: BTreeMap<&str, usize> = BTreeMap::new();
    let mut refused: BTreeMap<String, usize> = BTreeMap::new();
    for seed in seeds(30) {
        let mut r = Draws::new(seed);
        for kind in kinds() {
            let name = ir::infer::name(&kind);
            if WITHOUT.contains(&name) || matches!(kind, Op::Call { .. }) {
                continue;
            }
            for case in cases(&kind, &mut r) {
                let module = module_of(&case);
                let what = format!("SEED={seed}, {:?}\n{module}", case.op);
                match compiled(&module, "f", &case.operands) {
                    Ok(found) => {
                        let wanted = eval(&module, "f", &case.operands).expect("it evaluates");
                        let is_scaled = matches!(case.op, Op::ScaledContract { .. });
                        // The others are of f64.
                        let tolerance = if is_scaled { 2.0_f64.powi(-7) } else { TOLERANCE };
                        assert_within(&found, &wanted, tolerance, &what);
                        *ran.entry(name).or_default() += 1;
                        if !is_scaled {
                            backward(module, &case, &mut r, &what);
                        }
                    }
                    Err(why) => *refused.entry(format!("{name}: {why}")).or_default() += 1,
                }
            }
        }
    }
    for kind in kinds() {
        let name = ir::infer::name(&kind);
        let count = ran.get(name).copied().unwrap_or(0);
        let enough = count >= 20 || WITHOUT.contains(&name) || std::env::var("SEED").is_ok();
        assert!(enough, "{name} ran {count} times; refused are {refused:#?}");
    }
}

/// What becomes of windows is one launch, which stores none of them, and what the interpreter
/// computes, forward and backward.
#[test]
fn pools_are_one_launch() {
    for seed in seeds(30) {
        let mut r = Draws::new(seed);
        let ndim = 1 + r.below(3);
        let dim = r.below(ndim);
        let mut dims = r.dims(ndim);
        dims[dim] += 5;
        let (size, stride, dilation) = (1 + r.below(3), 1 + r.below(3), 1 + r.below(2));
        for combiner in Combiner::ALL {
            let mut module = Module::new("m");
            let mut b = Builder::new(&mut module, "f", Kind::Layer);
            let x = r.signed(&dims);
            let value = b.param("x", x.ty());
            let windows = Op::Window(Windows { dim, size, stride, dilation });
            let windows = b.push("windows", windows, &[value]);
            let y = b.reduce("y", combiner, vec![dim + 1], windows);
            b.finish(&[y]);
            let what = format!("SEED={seed}, {combiner:?}\n{module}");
            let mut table = KernelTable::default();
            let function = module.function("f").expect("it was built");
            let made = routine(function, &module, &[], &[], &mut table);
            assert_eq!(made.expect("it has a kernel").instructions.len(), 1, "{what}");
            let case = Case { op: Op::Reverse { dims: Vec::new() }, operands: vec![x] };
            let found = compiled(&module, "f", &case.operands);
            let wanted = eval(&module, "f", &case.operands).expect("it evaluates");
            assert_equal(&found.unwrap_or_else(|why| panic!("{what}: {why}")), &wanted, &what);
            backward(module, &case, &mut r, &what);
        }
    }
}

/// Operands of a concatenation are computed where they lie in it: only what begins within a line of
/// the cache, or stands there twice, is copied.
#[test]
fn operands_side_by_side_are_computed_there() {
    let reversed = || Op::Reverse { dims: vec![1] };
    for seed in seeds(30) {
        let mut r = Draws::new(seed);
        let rows: Vec<usize> = (0..3).map(|_| 1 + r.below(6)).collect();
        let is_twice = r.below(2) == 1;
        let mut module = Module::new("m");
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let args: Vec<Tensor> = rows.iter().map(|n| r.signed(&[1, *n, 4])).collect();
        let param = |(at, arg): (usize, &Tensor)| b.param(&format!("x{at}"), arg.ty());
        let params: Vec<_> = args.iter().enumerate().map(param).collect();
        let parts: Vec<_> = params.iter().map(|x| b.push("part", reversed(), &[*x])).collect();
        let inner = b.push("inner", Op::Concat { dim: 1 }, &[parts[0], parts[1]]);
        let mut operands = vec![inner, parts[2]];
        operands.extend(is_twice.then_some(parts[0]));
        let outer = b.push("outer", Op::Concat { dim: 1 }, &operands);
        let results = [outer, inner, parts[1]].map(|x| b.push("y", reversed(), &[x]));
        b.finish(&results);
        let what = format!("SEED={seed}\n{module}");
        let mut table = KernelTable::default();
        let function = module.function("f").expect("it was built");
        let made = routine(function, &module, &[], &[], &mut table).expect("it has kernels");
        // Two rows of four doubles are a line.
        let begins = [rows[0], rows[0] + rows[1]].iter().filter(|row| *row % 2 != 0).count();
        let copied = begins + if is_twice { 2 } else { 0 };
        assert_eq!(made.instructions.len(), 6 + copied, "{what}");
        let found = compiled(&module, "f", &args).unwrap_or_else(|why| panic!("{what}: {why}"));
        let wanted = eval(&module, "f", &args).expect("it evaluates");
        assert_equal(&found, &wanted, &what);
    }
}

/// Integers of 32 bits are computed exactly, quotients rounded down and by zero included; the least
/// one is its own negative and size.
#[test]
fn integers_are_exact() {
    let edges = [0, 1, -1, 7, -7, i64::from(i32::MAX), i64::from(i32::MIN) + 1];
    for seed in seeds(30) {
        let mut r = Draws::new(seed);
        let mut draw = |wide: bool| -> Vec<i64> {
            let number = |at: usize, word: u64| match at % 3 {
                0 => edges[(word % 7) as usize],
                1 if wide => i64::from(word as i32).max(edges[6]),
                _ => (word % 19) as i64 - 9,
            };
            (0..40).map(|at| number(at, r.word())).collect()
        };
        for how in [Binary::Div, Binary::Max, Binary::Min, Binary::Add, Binary::Sub] {
            let is_sum = matches!(how, Binary::Add | Binary::Sub);
            let halved = |numbers: Vec<i64>| numbers.into_iter().map(|n| n / 2).collect();
            let mut operand = |wide| {
                let numbers = draw(wide);
                Tensor::int(DType::I32, &[5, 8], if is_sum { halved(numbers) } else { numbers })
            };
            let operands = vec![operand(true), operand(how != Binary::Div)];
            let case = Case { op: Op::Binary(how), operands };
            let module = module_of(&case);
            let what = format!("SEED={seed}, {how:?}");
            let found = compiled(&module, "f", &case.operands);
            let found = found.unwrap_or_else(|why| panic!("{what}: {why}"));
            let wanted = eval(&module, "f", &case.operands).expect("it evaluates");
            let wanted: Vec<Vec<f64>> = wanted.iter().map(Tensor::to_f64).collect();
            assert_eq!(found, wanted, "{what}");
        }
        for how in [Unary::Neg, Unary::Abs] {
            let mut numbers = draw(true);
            // What wraps.
            numbers[0] = i64::from(i32::MIN);
            let operands = vec![Tensor::int(DType::I32, &[5, 8], numbers)];
            let case = Case { op: Op::Unary(how), operands };
            let module = module_of(&case);
            let found = compiled(&module, "f", &case.operands);
            let found = found.unwrap_or_else(|why| panic!("SEED={seed}, {how:?}: {why}"));
            let wanted = eval(&module, "f", &case.operands).expect("it evaluates");
            assert_eq!(found, [wanted[0].to_f64()], "SEED={seed}, {how:?}");
            assert_eq!(found[0][0], f64::from(i32::MIN), "SEED={seed}, {how:?}");
        }
    }
}

fn backward(mut module: Module, case: &Case, r: &mut Draws, what: &str) {
    let results = eval(&module, "f", &case.operands).expect("it evaluates");
    let floats = results.iter().filter(|t| t.dtype.is_float());
    let cotangents: Vec<Tensor> = floats.map(|t| r.signed(&t.dims)).collect();
    let derivative = differentiate(&mut module, "f").expect("it has a derivative");
    let args: Vec<Tensor> = case.operands.iter().cloned().chain(cotangents).collect();
    let what = format!("{what}\nbackward");
    match compiled(&module, &derivative, &args) {
        Ok(found) => {
            let wanted = eval(&module, &derivative, &args).expect("it evaluates");
            assert_equal(&found, &wanted, &what);
        }
        Err(why) => panic!("{what}: {why}"),
    }
}
