//! Layers whose images lie with channels last compute what they did.

use gantline_ir::autodiff::differentiate;
use gantline_ir::build::Builder;
use gantline_ir::channels::lay_channels_last;
use gantline_ir::eval::eval;
use gantline_ir::op::{Binary, Combiner, Convolution, Unary, Windows};
use gantline_ir::text::parse_module;
use gantline_ir::verify::verify;
use gantline_ir::{DType, Dim, Kind, Module, Op, Tensor, TensorType, ValueId};

use crate::draws::{Draws, seeds};
use crate::generate::arguments;

/// Channels of all images that layers pass on, and sizes of those.
const CHANNELS: usize = 4;
const SIZE: usize = 5;

fn padded(kernel: usize, stride: usize) -> Op {
    Op::Conv(Convolution {
        stride: vec![stride; 2],
        before: vec![kernel as i64 / 2; 2],
        after: vec![kernel as i64 / 2; 2],
        dilation: vec![1; 2],
        spread: vec![1; 2],
        orders: Default::default(),
    })
}

/// Something that networks do to an image, or to what was made of one.
fn step(b: &mut Builder, w: [ValueId; 3], values: &mut Vec<ValueId>, r: &mut Draws) {
    let x = values[values.len() - 1 - r.below(values.len().min(3))];
    let ty = b.ty(x).clone();
    let ndim = ty.ndim();
    let dim = if ndim > 1 { 1 + r.below(ndim - 1) } else { 0 };
    let size = ty.dims[dim].as_constant().unwrap_or(0) as usize;
    let is_image = ndim == 4 && ty.dims[1] == Dim::from(CHANNELS);
    let like = values.iter().rev().copied().find(|other| *other != x && *b.ty(*other) == ty);
    let made = match r.below(17) {
        0 | 1 if is_image => b.try_push("conv", padded(3, 1 + r.below(2)), &[x, w[0]]),
        2 if is_image => b.try_push("one", padded(1, 1), &[x, w[1]]),
        3 if is_image => b.try_push("deep", padded(3, 1), &[x, w[2]]),
        4 => b.try_push("f", Op::Unary(Unary::Tanh), &[x]),
        5 if like.is_some() => b.try_push("add", Op::Binary(Binary::Add), &[x, like.unwrap()]),
        6 if size > 0 => {
            let bias =
                b.reduce("sum", Combiner::Sum, (0..ndim).filter(|at| *at != dim).collect(), x);
            let new = (0..ndim).filter(|at| *at != dim).collect();
            let bias = b.push("bias", Op::Broadcast { new, dims: ty.dims.clone() }, &[bias]);
            b.try_push("scaled", Op::Binary(Binary::Mul), &[x, bias])
        }
        7 if size > 1 => {
            let windows = Windows { dim, size: 2, stride: 1 + r.below(2), dilation: 1 };
            let windows = b.push("windows", Op::Window(windows), &[x]);
            let combiner = [Combiner::Max, Combiner::Sum][r.below(2)];
            b.try_push("pool", Op::Reduce { combiner, dims: vec![dim + 1] }, &[windows])
        }
        8 if size > 0 => b.try_push("pad", Op::Pad { dim, before: 1, after: r.below(2) }, &[x]),
        9 if size > 1 => b.try_push("cut", Op::Slice { dim, start: 1, size: size - 1 }, &[x]),
        10 => b.try_push("back", Op::Reverse { dims: vec![dim] }, &[x]),
        11 if size > 0 && like.is_some() => {
            b.try_push("both", Op::Concat { dim }, &[x, like.unwrap()])
        }
        12 if size.is_multiple_of(2) && size > 0 => {
            let mut dims = ty.dims.clone();
            dims.splice(dim..=dim, [2, size / 2].map(Dim::from));
            let split = b.push("split", Op::Reshape { dims }, &[x]);
            let all = r.coin().then_some(Op::Reshape { dims: ty.dims.clone() });
            b.try_push("joined", all.unwrap_or(Op::Unary(Unary::Sin)), &[split])
        }
        13 if ndim > 2 => {
            let perm = [vec![0, 2, 1], (3..ndim).collect()].concat();
            b.try_push("turned", Op::Transpose { perm }, &[x])
        }
        14 => b.try_push("run", Op::Cumulative { combiner: Combiner::Sum, dim }, &[x]),
        15 if ndim > dim + 1 && size > 0 => {
            let joined = &ty.dims[dim] * &ty.dims[dim + 1];
            let mut dims = ty.dims.clone();
            dims.splice(dim..=dim + 1, [joined]);
            b.try_push("flat", Op::Reshape { dims }, &[x])
        }
        _ => return,
    };
    values.extend(made.ok());
}

fn image() -> TensorType {
    TensorType::new(
        DType::F64,
        [Dim::symbol(Dim::BATCH), CHANNELS.into(), SIZE.into(), SIZE.into()],
    )
}

/// A layer from an image to an image, and to the sum of all that it makes.
fn layer(module: &mut Module, name: &str, r: &mut Draws) {
    let mut b = Builder::new(module, name, Kind::Layer);
    let mut values = vec![b.param("x", image())];
    let side = [[CHANNELS, 3, 3], [CHANNELS, 1, 1], [2, 3, 3]];
    let kernels = side.map(|[depth, y, x]| TensorType::of(DType::F64, &[CHANNELS, depth, y, x]));
    let w = kernels.map(|ty| b.param("w", ty));
    (0..3 + r.below(15)).for_each(|_| step(&mut b, w, &mut values, r));
    let is_image = |of: &&ValueId| *b.ty(**of) == image();
    let found = values.iter().rev().find(is_image).copied().unwrap();
    let yielded = b.push("y", padded(3, 1), &[found, w[0]]);
    let mut sum = None;
    for value in values {
        let all = (0..b.ty(value).ndim()).collect();
        let own = b.reduce("total", Combiner::Sum, all, value);
        sum = Some(sum.map_or(own, |sum| b.add("totals", sum, own)));
    }
    let sum = sum.unwrap();
    let of_image = if r.coin() { yielded } else { b.add("residual", yielded, found) };
    b.finish(&[of_image, sum]);
}

/// A network of layers, some of them called twice, between a first and a last one.
fn network(r: &mut Draws) -> Module {
    let mut module = Module::new("m");
    ["first", "a", "b", "last"].into_iter().for_each(|name| layer(&mut module, name, r));
    let mut b = Builder::new(&mut module, "main", Kind::Layer);
    let x = b.param("x", image());
    let kernels = [[4, 4, 3, 3], [4, 4, 1, 1], [4, 2, 3, 3]];
    let w = kernels.map(|dims| b.param("w", TensorType::of(DType::F64, &dims)));
    let (mut image, mut results) = (x, Vec::new());
    let between = (0..r.below(4)).map(|_| ["a", "b"][r.below(2)]);
    for name in ["first"].into_iter().chain(between.collect::<Vec<_>>()).chain(["last"]) {
        let made = b.call("h", name, &[image, w[0], w[1], w[2]]);
        image = made[0];
        results.push(made[1]);
        if r.below(8) == 0 {
            results.push(image);
        }
    }
    b.finish(&results);
    module
}

#[test]
fn images_with_channels_last_are_the_same_and_have_the_same_gradients() {
    let mut passed = 0;
    for seed in seeds(300) {
        let mut r = Draws::new(seed);
        let usual = network(&mut r);
        let mut last = usual.clone();
        assert!(lay_channels_last(&mut last));
        assert_eq!(verify(&last), [], "SEED={seed}\n{last}");
        assert_eq!(parse_module("m", &last.to_string()).unwrap(), last, "SEED={seed}");
        let signature = |m: &Module, name| m.function(name).unwrap().param_types();
        assert_eq!(signature(&usual, "main"), signature(&last, "main"), "SEED={seed}");
        passed += usize::from(signature(&usual, "last") != signature(&last, "last"));
        let both = [usual, last].map(|mut module| {
            let gradient = differentiate(&mut module, "main").unwrap();
            assert_eq!(verify(&module), [], "SEED={seed}\n{module}");
            let args = arguments(&module, &gradient, &mut Draws::new(seed));
            (eval(&module, &gradient, &args).unwrap(), module)
        });
        let [(wanted, before), (found, after)] = &both;
        // What rounding makes of it: of operands that are moved by a hundred of their last bits.
        let args = arguments(before, "main.grad", &mut Draws::new(seed));
        let moved = args.iter().map(|x| {
            if x.dtype != DType::F64 {
                return x.clone();
            }
            let numbers = x.to_f64().into_iter().map(|n| n * (1.0 + 100.0 * f64::EPSILON));
            Tensor::f64(&x.dims, numbers.collect())
        });
        let moved = eval(before, "main.grad", &moved.collect::<Vec<_>>()).unwrap();
        for (at, (wanted, found)) in wanted.iter().zip(found).enumerate() {
            let off = found.max_relative_difference(wanted);
            let limit = 1e-9 + moved[at].max_relative_difference(wanted);
            assert!(off < limit, "SEED={seed}: {at} is off {off}, {limit}\n{before}\n{after}");
        }
    }
    assert!(passed > 50 || std::env::var("SEED").is_ok(), "{passed} pass images on");
}

/// A residual network passes its images on with channels last: nothing but what it takes, what it
/// yields and kernels is transposed, forward and backward.
#[test]
fn residual_networks_transpose_their_ends_and_kernels() {
    let text = "module m
  func @stem(%x: f64[B, 3, 8, 8], %w: f64[4, 3, 3, 3]) {
    %y: f64[B, 4, 8, 8] = conv before=[1, 1] after=[1, 1] %x %w
    return %y
  }
  func @block(%x: f64[B, 4, 8, 8], %scale: f64[4], %w: f64[4, 4, 3, 3]) {
    %r: f64[B, 4, 8, 8] = tanh %x
    %s: f64[B, 4, 8, 8] = broadcast new=[0, 2, 3] %scale
    %n: f64[B, 4, 8, 8] = mul %r %s
    %h: f64[B, 4, 8, 8] = conv before=[1, 1] after=[1, 1] %n %w
    %y: f64[B, 4, 8, 8] = add %x %h
    return %y
  }
  func @head(%x: f64[B, 4, 8, 8]) {
    %mean: f64[B, 4] = reduce sum dims=[2, 3] %x
    return %mean
  }
  func @main(%x: f64[B, 3, 8, 8], %w: f64[4, 3, 3, 3], %s: f64[4], \
%v: f64[4, 4, 3, 3]) {
    %a: f64[B, 4, 8, 8] = call @stem %x %w
    %b: f64[B, 4, 8, 8] = call @block %a %s %v
    %c: f64[B, 4, 8, 8] = call @block %b %s %v
    %y: f64[B, 4] = call @head %c
    return %y
  }
";
    let mut module = parse_module("m", text).unwrap();
    lay_channels_last(&mut module);
    differentiate(&mut module, "main").unwrap();
    let transposed = |name: &str| {
        let function = module.function(name).unwrap();
        let turned = function.nodes.iter().filter(|n| matches!(n.op, Op::Transpose { .. }));
        turned.map(|n| function.value(n.operands[0]).name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(transposed("stem"), ["x", "w"]);
    assert_eq!(transposed("block"), ["w"]);
    assert_eq!(transposed("head"), [""; 0]);
    // Gradients of kernels are transposed back, and that of the image of the stem.
    assert_eq!(transposed("block.grad").len(), 2, "{module}");
    assert_eq!(transposed("stem.grad").len(), 4, "{module}");
    assert_eq!(transposed("head.grad").len(), 0, "{module}");
    let blocks = module.function("block").unwrap();
    assert_eq!(blocks.ty(ValueId(0)).to_string(), "f64[B, 8, 8, 4]");
}
