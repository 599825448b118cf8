//! Products of quantised models: kernels of integers compute what the interpreter does in f64.
//!
//! [`graph`] is a function of a seed: a product or a convolution of numbers of 8 bits less their
//! zero points, as the importer of ONNX writes `MatMulInteger`, `QLinearMatMul` and the like.

#![allow(clippy::wildcard_enum_match_arm, reason = "few kernels are products")]

use codegen::function::{Compiled, compile_within};
use codegen::ranges::Range;
use ir::build::Builder;
use ir::eval::eval;
use ir::op::{Binary, Convolution, Op, Unary};
use ir::tensor::Data;
use ir::{DType, Kind, Module, Tensor, TensorType, ValueId};
use kernels::{Kernel, Product};
use runtime::evaluate::Evaluation;

use crate::draws::Draws;
use crate::integers::{bytes, is_same, tensor};

/// A function, its arguments, and how many of them have elements that are known.
struct Graph {
    module: Module,
    args: Vec<Tensor>,
    known: usize,
    /// Whether its product may be one of integers.
    is_small: bool,
    /// Whether its weights have 8 bits, and no zero point but zero.
    has_bytes: bool,
}

fn integers(r: &mut Draws, [low, high]: [i64; 2], sizes: &[usize]) -> Tensor {
    let count = sizes.iter().product();
    let mut draw = || match r.below(6) {
        0 => low,
        1 => high,
        _ => low + r.below((high - low + 1) as usize) as i64,
    };
    Tensor::int(DType::I32, sizes, (0..count).map(|_| draw()).collect())
}

/// A value less its zero point, in a type of floating-point numbers.
fn centred(b: &mut Builder, x: ValueId, zero: Option<(ValueId, Vec<usize>)>, to: DType) -> ValueId {
    let wide = b.push("wide", Op::Cast { dtype: to }, &[x]);
    let Some((zero, new)) = zero else { return wide };
    let zero = b.push("zero", Op::Cast { dtype: to }, &[zero]);
    let all = b.ty(wide).dims.clone();
    let zero = b.push("zeros", Op::Broadcast { new, dims: all }, &[zero]);
    b.binary("centred", Binary::Sub, wide, zero)
}

/// Numbers of f32 as the nearest integers of an unsigned byte below them.
fn quantised(b: &mut Builder, x: ValueId) -> ValueId {
    let x = b.unary("floor", Unary::Floor, x);
    let low = b.constant_like("low", 0.0, x);
    let x = b.binary("above", Binary::Max, x, low);
    let high = b.constant_like("high", 255.0, x);
    let x = b.binary("below", Binary::Min, x, high);
    b.push("byte", Op::Cast { dtype: DType::I32 }, &[x])
}

/// What becomes of the sums: integers, or bytes by a scale, or as they are.
fn finished(r: &mut Draws, b: &mut Builder, y: ValueId) -> Vec<ValueId> {
    let whole = |b: &mut Builder| b.push("sums", Op::Cast { dtype: DType::I32 }, &[y]);
    let scaled = |b: &mut Builder| {
        let factor = b.constant_like("factor", 0.01, y);
        let scaled = b.binary("scaled", Binary::Mul, y, factor);
        quantised(b, scaled)
    };
    match r.below(4) {
        0 => vec![whole(b)],
        1 => vec![scaled(b)],
        2 => vec![whole(b), scaled(b)],
        _ => vec![y],
    }
}

fn convolution([m, n]: [usize; 2]) -> Convolution {
    let pad = |at: usize| (at % 2) as i64;
    Convolution {
        stride: vec![1 + m % 2, 1],
        before: vec![pad(m), pad(n)],
        after: vec![pad(n), pad(m)],
        dilation: vec![1, 1],
        spread: vec![1, 1],
        orders: Default::default(),
    }
}

const BYTES: [i64; 2] = [-128, 127];
const UNSIGNED: [i64; 2] = [0, 255];

fn graph(seed: u64) -> Graph {
    let mut r = Draws::new(seed);
    let r = &mut r;
    let is_convolution = r.below(3) == 0;
    let wide = if r.below(5) == 0 { DType::F32 } else { DType::F64 };
    let [m, n] = [0; 2].map(|_| 1 + r.below(40));
    // Sums of f32 are exact for some hundred terms, not for all.
    let k = 1 + r.below(if wide == DType::F32 { 700 } else { 300 });
    let groups = if is_convolution { 1 + r.below(2) } else { 1 };
    let channels = 1 + k % 7;
    let is_turned = r.below(2) == 0;
    let (of_x, of_w) = if is_convolution {
        let image = [1 + m % 2, channels * groups, 3 + m % 9, 3 + n % 9];
        (image.to_vec(), vec![groups * (1 + n % 6), channels, 1 + k % 3, 1 + k % 2])
    } else if is_turned {
        (vec![m, k], vec![n, k])
    } else {
        (vec![2, m, k], vec![k, n])
    };
    let is_unsigned = r.below(3) == 0;
    let mut args = vec![integers(r, if is_unsigned { UNSIGNED } else { BYTES }, &of_w)];
    let zeros = [[0, 0], [0, 0], if is_unsigned { UNSIGNED } else { BYTES }][r.below(3)];
    let per_output = r.below(2) == 0;
    let side = if is_convolution || is_turned { 0 } else { 1 };
    let of_zero = if per_output { vec![of_w[side]] } else { Vec::new() };
    let has_zero = r.below(4) > 0;
    if has_zero {
        args.push(integers(r, zeros, &of_zero));
    }
    let known = args.len();
    let mut module = Module::new("m");
    let mut b = Builder::new(&mut module, "main", Kind::Layer);
    let params: Vec<ValueId> =
        args.iter().map(|arg| b.param("w", TensorType::of(DType::I32, &arg.dims))).collect();
    let x = b.param("x", TensorType::of(DType::F32, &of_x));
    let zero = b.param("z", TensorType::of(DType::F32, &[]));
    let count = of_x.iter().product();
    let numbers = (0..count).map(|_| r.below(3200) as f64 / 10.0 - 30.0).collect();
    args.push(Tensor::from_f64(DType::F32, &of_x, numbers));
    args.push(Tensor::from_f64(DType::F32, &[], vec![r.below(300) as f64]));
    let (x, zero) = (quantised(&mut b, x), quantised(&mut b, zero));
    let a = centred(&mut b, x, Some((zero, (0..of_x.len()).collect())), wide);
    let others = (0..of_w.len()).filter(|at| !per_output || *at != side).collect();
    let w = centred(&mut b, params[0], has_zero.then(|| (params[1], others)), wide);
    let y = if is_convolution {
        b.push("y", Op::Conv(convolution([m, n])), &[a, w])
    } else {
        b.contract("y", if is_turned { "ik,jk->ij" } else { "bik,kj->bij" }, a, w)
    };
    let results = finished(r, &mut b, y);
    b.finish(&results);
    let terms: usize = if is_convolution { of_w[1..].iter().product() } else { k };
    // Of what the ranges of the arguments say.
    let held = |x: &Tensor| match &x.data {
        Data::Int(x) => [x.iter().min(), x.iter().max()].map(|x| *x.unwrap_or(&0)),
        _ => [0, 0],
    };
    let (weights, zero) = (held(&args[0]), if has_zero { held(&args[1]) } else { [0, 0] });
    let largest = (weights[0] - zero[1]).abs().max((weights[1] - zero[0]).abs());
    let most = terms as i64 * 255 * largest;
    let is_small = most <= if wide == DType::F32 { 1 << 24 } else { i64::from(i32::MAX) };
    Graph { module, args, known, is_small, has_bytes: !is_unsigned && zero == [0, 0] }
}

fn compiled(graph: &Graph) -> Compiled {
    let range = |param: ValueId| {
        let Data::Int(x) = &graph.args[param.index()].data else { return None };
        let is_known = param.index() < graph.known;
        is_known.then(|| Some(Range::new(*x.iter().min()?, *x.iter().max()?))).flatten()
    };
    compile_within(&graph.module, "main", range).expect("every op has a kernel")
}

fn products(made: &Compiled) -> Vec<&Product> {
    made.kernels
        .iter()
        .flat_map(|kernel| match kernel {
            Kernel::Product(p) => vec![p],
            Kernel::Products(all) => all.parts.iter().map(|part| &part.product).collect(),
            _ => Vec::new(),
        })
        .collect()
}

#[test]
fn products_of_bytes_are_those_of_the_interpreter() {
    let (mut whole, mut stored) = (0, 0);
    for seed in 0..120 {
        let graph = graph(seed);
        let made = compiled(&graph);
        let is_whole = products(&made).iter().all(|p| p.dtype == DType::I32);
        assert_eq!(is_whole, graph.is_small, "SEED={seed}: {:?}", made.kernels);
        let is_stored = made.params[0].dtype == DType::I8;
        assert_eq!(is_stored, is_whole && graph.has_bytes, "SEED={seed}: {:?}", made.params);
        (whole, stored) = (whole + u32::from(is_whole), stored + u32::from(is_stored));
        let wanted = eval(&graph.module, "main", &graph.args).expect("it evaluates");
        let mut evaluation =
            Evaluation::new(made.routine, &made.kernels, 2).expect("there is memory");
        for (slot, (arg, ty)) in graph.args.iter().zip(&made.params).enumerate() {
            evaluation.write(slot, &bytes(arg, ty.dtype));
        }
        evaluation.run();
        for (at, (wanted, ty)) in wanted.iter().zip(&made.results).enumerate() {
            let found = evaluation.read(graph.args.len() + at);
            let found = tensor(wanted.dtype, ty.dtype, &wanted.dims, found);
            assert!(is_same(&found, wanted), "SEED={seed}: {found:?}, not {wanted:?}");
        }
    }
    assert!(whole > 60 && stored > 20 && whole < 120, "of 120: {whole} whole, {stored} stored");
}

/// What is known of weights alone says that they are small: without it, numbers stay as they are.
#[test]
fn numbers_that_may_be_large_are_multiplied_as_before() {
    for seed in 0..20 {
        let graph = Graph { known: 0, ..graph(seed) };
        let made = compiled(&graph);
        assert!(products(&made).iter().all(|p| p.dtype != DType::I32), "SEED={seed}");
        assert!(made.params.iter().all(|ty| ty.dtype != DType::I8), "SEED={seed}");
    }
}
