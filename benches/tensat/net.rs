//! Networks by code, for evaluation: a function is built beside what it costs op by op.

use ir::build::Builder;
use ir::op::{Binary, Combiner, Convolution, Op, Unary, Windows};
use ir::{DType, Dim, Kind, Module, TensorType, ValueId};

use crate::roofline::Work;

/// A value of a network.
pub(crate) type Value = ValueId;

/// A network that is being built. Its weights become parameters, in the order of their use.
pub(crate) struct Net<'m> {
    builder: Builder<'m>,
    /// The weights as parameters; none yet while they are only collected.
    weights: Option<std::ops::Range<u32>>,
    collected: Vec<TensorType>,
    /// What a library takes that has one kernel for each layer, with its activation.
    library: Vec<Work>,
}

/// A network as a module with one function, and what it costs op by op.
pub(crate) struct Built {
    pub(crate) module: Module,
    pub(crate) library: Vec<Work>,
}

/// The name of the function.
pub(crate) const NAME: &str = "network";

/// Builds a network of one input.
pub(crate) fn build(input: &[usize], network: &dyn Fn(&mut Net<'_>, Value) -> Value) -> Built {
    // Parameters come before nodes, so the first pass only finds out which weights there are.
    let mut weights: Option<Vec<TensorType>> = None;
    loop {
        let mut module = Module::new(NAME);
        let mut builder = Builder::new(&mut module, NAME, Kind::Layer);
        let x = builder.param("x", TensorType::of(DType::F32, input));
        let known = weights.as_deref().unwrap_or_default();
        known.iter().for_each(|ty| _ = builder.param("w", ty.clone()));
        let range = weights.as_ref().map(|w| 1..1 + w.len() as u32);
        let (collected, library) = (Vec::new(), Vec::new());
        let mut net = Net { builder, weights: range, collected, library };
        let y = network(&mut net, x);
        let Net { builder, collected, library, .. } = net;
        builder.finish(&[y]);
        // What is to be found has to be found.
        ir::inline::inline_composites(&mut module, |_| false);
        if weights.replace(collected).is_some() {
            return Built { module, library };
        }
    }
}

impl Net<'_> {
    pub(crate) fn dims(&self, x: Value) -> Vec<usize> {
        self.builder.ty(x).sizes().expect("sizes are known")
    }

    fn count(&self, x: Value) -> u64 {
        self.dims(x).iter().product::<usize>() as u64
    }

    fn weight(&mut self, dims: &[usize]) -> Value {
        let ty = TensorType::of(DType::F32, dims);
        if let Some(weights) = &mut self.weights {
            return ValueId(weights.next().expect("the passes agree"));
        }
        self.collected.push(ty.clone());
        self.builder.constant("w", 1.0, ty)
    }

    /// One kernel of the library, which reads and writes all of these.
    fn launched(&mut self, flops: u64, read: &[Value], written: Value) -> Value {
        let elements: u64 = read.iter().chain([&written]).map(|v| self.count(*v)).sum();
        self.library.push(Work { flops, bytes: 4 * elements });
        written
    }

    /// A convolution of kernels of `size`, padded by `pad` on each side, then a ReLU where wanted.
    pub(crate) fn conv(&mut self, x: Value, c: Conv) -> Value {
        let channels = self.dims(x)[1] / c.groups;
        let w = self.weight(&[c.outputs, channels, c.size[0], c.size[1]]);
        let pad = c.pad.map(|p| p as i64).to_vec();
        let op = Op::Conv(Convolution {
            stride: vec![c.stride; 2],
            before: pad.clone(),
            after: pad,
            dilation: vec![1; 2],
            spread: vec![1; 2],
            orders: Default::default(),
        });
        let mut y = self.builder.push("conv", op, &[x, w]);
        if c.relu {
            y = self.builder.composite("relu", "relu", &[], &[y])[0];
        }
        let flops = 2 * self.count(y) * (channels * c.size[0] * c.size[1]) as u64;
        self.launched(flops, &[x, w], y)
    }

    /// Windows of `size`, each one number: the largest, or the mean.
    pub(crate) fn pool(
        &mut self,
        x: Value,
        how: Pool,
        size: usize,
        stride: usize,
        pad: usize,
    ) -> Value {
        let mut y = x;
        for dim in [2, 3].into_iter().filter(|_| pad > 0) {
            y = self.builder.push("padded", Op::Pad { dim, before: pad, after: pad }, &[y]);
        }
        let combiner = match how {
            Pool::Max => Combiner::Max,
            Pool::Mean => Combiner::Sum,
        };
        for dim in [2, 3] {
            let windows = Windows { dim, size, stride, dilation: 1 };
            y = self.builder.push("windows", Op::Window(windows), &[y]);
            y = self.builder.reduce("pooled", combiner, vec![dim + 1], y);
        }
        if how == Pool::Mean {
            y = self.scaled(y, 1.0 / (size * size) as f64);
        }
        self.launched(0, &[x], y)
    }

    fn scaled(&mut self, x: Value, by: f64) -> Value {
        let number = self.builder.constant_like("number", by, x);
        self.builder.mul("scaled", x, number)
    }

    /// Rows `x[.., K]` times a weight `[K, N]`.
    pub(crate) fn linear(&mut self, x: Value, outputs: usize) -> Value {
        let dims = self.dims(x);
        let inputs = *dims.last().expect("a dim");
        let w = self.weight(&[inputs, outputs]);
        let einsum = if dims.len() == 3 { "brk,kn->brn" } else { "rk,kn->rn" };
        let y = self.builder.contract("product", einsum, x, w);
        let rows: usize = dims[..dims.len() - 1].iter().product();
        self.launched((2 * rows * inputs * outputs) as u64, &[x, w], y)
    }

    pub(crate) fn unary(&mut self, how: Unary, x: Value) -> Value {
        let y = self.builder.unary("y", how, x);
        self.launched(0, &[x], y)
    }

    /// `1 / (1 + exp(-x))`.
    pub(crate) fn sigmoid(&mut self, x: Value) -> Value {
        let minus = self.builder.unary("minus", Unary::Neg, x);
        let exp = self.builder.unary("exp", Unary::Exp, minus);
        let one = self.builder.constant_like("one", 1.0, x);
        let sum = self.builder.add("sum", one, exp);
        let y = self.builder.binary("sigmoid", Binary::Div, one, sum);
        self.launched(0, &[x], y)
    }

    pub(crate) fn binary(&mut self, how: Binary, a: Value, b: Value) -> Value {
        let y = self.builder.binary("y", how, a, b);
        self.launched(0, &[a, b], y)
    }

    /// A composite of the library without weights, such as `relu` or `softmax`.
    pub(crate) fn composite(&mut self, name: &str, x: Value) -> Value {
        let y = self.builder.composite(name, name, &[], &[x])[0];
        self.launched(0, &[x], y)
    }

    pub(crate) fn layer_norm(&mut self, x: Value) -> Value {
        let width = *self.dims(x).last().expect("a dim");
        let (w, b) = (self.weight(&[width]), self.weight(&[width]));
        let y = self.builder.composite("norm", "layer_norm", &[("eps", 1e-12)], &[x, w, b])[0];
        self.launched(0, &[x], y)
    }

    pub(crate) fn concat(&mut self, dim: usize, parts: &[Value]) -> Value {
        let y = self.builder.push("concat", Op::Concat { dim }, parts);
        self.launched(0, parts, y)
    }

    pub(crate) fn reshape(&mut self, x: Value, dims: &[usize]) -> Value {
        let dims = dims.iter().map(|d| Dim::from(*d)).collect();
        self.builder.push("view", Op::Reshape { dims }, &[x])
    }

    /// One row of a matrix, as a matrix.
    pub(crate) fn row(&mut self, x: Value, at: usize) -> Value {
        self.builder.push("row", Op::Slice { dim: 0, start: at, size: 1 }, &[x])
    }

    /// Attention of a sequence `[1, S, M]` to itself, without the projection of its result.
    pub(crate) fn attention(&mut self, x: Value, heads: usize) -> Value {
        let [samples, length, width] = self.dims(x)[..] else { panic!("samples") };
        let size = width / heads;
        let [q, k, v] = [(); 3].map(|()| {
            let y = self.linear(x, width);
            let y = self.reshape(y, &[samples, length, heads, size]);
            let y = self.builder.push("heads", Op::Transpose { perm: vec![0, 2, 1, 3] }, &[y]);
            self.launched(0, &[y], y)
        });
        let flops = (2 * samples * heads * length * length * size) as u64;
        let scores = self.builder.contract("scores", "bhqd,bhkd->bhqk", q, k);
        let scores = self.launched(flops, &[q, k], scores);
        let scaled = self.scaled(scores, (size as f64).powf(-0.5));
        let shares = self.composite("softmax", scaled);
        let y = self.builder.contract("mixed", "bhqk,bhkd->bhqd", shares, v);
        let y = self.launched(flops, &[shares, v], y);
        let y = self.builder.push("rows", Op::Transpose { perm: vec![0, 2, 1, 3] }, &[y]);
        let y = self.launched(0, &[y], y);
        self.reshape(y, &[samples, length, width])
    }
}

/// A convolution.
#[derive(Clone, Copy)]
pub(crate) struct Conv {
    pub(crate) outputs: usize,
    pub(crate) size: [usize; 2],
    pub(crate) stride: usize,
    pub(crate) pad: [usize; 2],
    pub(crate) groups: usize,
    pub(crate) relu: bool,
}

impl Conv {
    /// Square kernels, a ReLU after.
    pub(crate) fn square(outputs: usize, size: usize, stride: usize, pad: usize) -> Conv {
        Conv { outputs, size: [size; 2], stride, pad: [pad; 2], groups: 1, relu: true }
    }

    /// Kernels of `rows` by `cols` whose results have the size of the operand.
    pub(crate) fn same(outputs: usize, [rows, cols]: [usize; 2]) -> Conv {
        let pad = [rows / 2, cols / 2];
        Conv { size: [rows, cols], pad, ..Conv::square(outputs, 1, 1, 0) }
    }
}

/// What a window becomes.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Pool {
    Max,
    Mean,
}
