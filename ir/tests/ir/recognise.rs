//! Composites found in graphs as exporters write them: norms and activations in all their forms,
//! and twins that nearly are such.
//!
//! Graphs are drawn from seeds. Each is evaluated as it stands and after recognition.

use gantline_ir::autodiff::differentiate;
use gantline_ir::build::Builder;
use gantline_ir::eval::eval;
use gantline_ir::op::{Binary, Combiner, Op, Unary};
use gantline_ir::recognise::recognise;
use gantline_ir::verify::verify;
use gantline_ir::{DType, Dim, Kind, Module, Tensor, TensorType, ValueId};

use crate::draws::{Draws, seeds};

/// A graph in the making, and the choices of its exporter.
pub(crate) struct Exporter<'m, 'r> {
    pub(crate) b: Builder<'m>,
    pub(crate) r: &'r mut Draws,
    pub(crate) dtype: DType,
}

impl Exporter<'_, '_> {
    pub(crate) fn param(&mut self, name: &str, dims: &[usize]) -> ValueId {
        self.b.param(name, TensorType::of(self.dtype, dims))
    }

    pub(crate) fn dims(&self, x: ValueId) -> Vec<usize> {
        self.b.ty(x).sizes().unwrap()
    }

    /// A number as the type holds it.
    pub(crate) fn number(&mut self, value: f64, like: ValueId) -> ValueId {
        let value = if self.dtype == DType::F32 { f64::from(value as f32) } else { value };
        self.b.constant_like("c", value, like)
    }

    pub(crate) fn with(&mut self, how: Binary, x: ValueId, value: f64) -> ValueId {
        let value = self.number(value, x);
        self.two(how, x, value)
    }

    pub(crate) fn scaled(&mut self, x: ValueId, by: f64) -> ValueId {
        match self.r.coin() {
            true => self.with(Binary::Mul, x, by),
            false => self.with(Binary::Div, x, 1.0 / by),
        }
    }

    pub(crate) fn two(&mut self, how: Binary, x: ValueId, y: ValueId) -> ValueId {
        let is_swapped = matches!(how, Binary::Mul | Binary::Add) && self.r.coin();
        let (x, y) = if is_swapped { (y, x) } else { (x, y) };
        self.b.binary("v", how, x, y)
    }

    pub(crate) fn view(&mut self, x: ValueId, dims: &[usize]) -> ValueId {
        let dims = dims.iter().map(|d| Dim::from(*d)).collect();
        self.b.push("view", Op::Reshape { dims }, &[x])
    }

    /// Repeats a value whose dims are aligned at the last one, as numpy does.
    pub(crate) fn repeat(&mut self, x: ValueId, dims: &[usize]) -> ValueId {
        let own = self.dims(x);
        let lead = dims.len() - own.len();
        let is_new = |at: &usize| *at < lead || (own[*at - lead] == 1 && dims[*at] != 1);
        let new: Vec<usize> = (0..dims.len()).filter(is_new).collect();
        let kept: Vec<usize> =
            (0..dims.len()).filter(|at| !is_new(at)).map(|at| dims[at]).collect();
        let x = self.view(x, &kept);
        let dims = dims.iter().map(|d| Dim::from(*d)).collect();
        self.b.push("repeat", Op::Broadcast { new, dims }, &[x])
    }

    /// A mean with dims of one in place of those that are averaged.
    fn mean(&mut self, x: ValueId, over: &[usize], count: f64) -> ValueId {
        let mut dims = self.dims(x);
        let sum = self.b.reduce("sum", Combiner::Sum, over.to_vec(), x);
        over.iter().for_each(|at| dims[*at] = 1);
        if self.r.coin() {
            let mean = self.scaled(sum, 1.0 / count);
            return self.view(mean, &dims);
        }
        let sum = self.view(sum, &dims);
        self.scaled(sum, 1.0 / count)
    }

    fn square(&mut self, x: ValueId) -> ValueId {
        match self.r.coin() {
            true => self.b.mul("square", x, x),
            false => self.with(Binary::Pow, x, 2.0),
        }
    }

    /// `x / root(variance)`
    fn over_root(&mut self, x: ValueId, variance: ValueId) -> ValueId {
        let dims = self.dims(x);
        match self.r.below(4) {
            0 => {
                let root = self.b.unary("root", Unary::Sqrt, variance);
                let root = self.repeat(root, &dims);
                self.b.binary("normal", Binary::Div, x, root)
            }
            1 => {
                let root = self.b.unary("rstd", Unary::Rsqrt, variance);
                let root = self.repeat(root, &dims);
                self.two(Binary::Mul, x, root)
            }
            2 => {
                let root = self.b.unary("root", Unary::Sqrt, variance);
                let one = self.number(1.0, root);
                let inverse = self.b.binary("rstd", Binary::Div, one, root);
                let inverse = self.repeat(inverse, &dims);
                self.two(Binary::Mul, x, inverse)
            }
            _ => {
                let power = self.with(Binary::Pow, variance, -0.5);
                let power = self.repeat(power, &dims);
                self.two(Binary::Mul, x, power)
            }
        }
    }

    fn norm(&mut self, x: ValueId, form: &Norm) -> ValueId {
        let dims = self.dims(x);
        let count: usize = form.over.iter().map(|at| dims[*at]).product();
        let centred = match form.is_centred {
            true => {
                let mean = self.mean(x, &form.over, count as f64);
                let mean = self.repeat(mean, &dims);
                self.b.binary("centred", Binary::Sub, x, mean)
            }
            false => x,
        };
        let square = self.square(centred);
        let variance = self.mean(square, &form.over, count as f64 - form.less);
        if form.is_epsilon_outside {
            let root = self.b.unary("root", Unary::Sqrt, variance);
            let root = self.with(Binary::Add, root, 1e-3);
            let root = self.repeat(root, &dims);
            return self.b.binary("normal", Binary::Div, centred, root);
        }
        let variance = self.with(Binary::Add, variance, form.epsilon);
        self.over_root(centred, variance)
    }
}

struct Norm {
    over: Vec<usize>,
    is_centred: bool,
    is_epsilon_outside: bool,
    epsilon: f64,
    /// By how much the count is too small.
    less: f64,
}

/// Builds `main` by an exporter, with its result at the end.
pub(crate) fn built(
    r: &mut Draws,
    dtype: DType,
    write: impl FnOnce(&mut Exporter<'_, '_>) -> ValueId,
) -> Module {
    let mut module = Module::new("export");
    let b = Builder::new(&mut module, "main", Kind::Layer);
    let mut exporter = Exporter { b, r, dtype };
    let y = write(&mut exporter);
    exporter.b.finish(&[y]);
    module
}

/// The composites that `main` calls, in alphabetical order.
pub(crate) fn called(module: &Module) -> Vec<String> {
    let main = module.function("main").unwrap();
    let callees = main.nodes.iter().filter_map(|node| module.function(node.callee()?));
    let mut names: Vec<String> = callees
        .filter_map(|f| match &f.kind {
            Kind::Composite { name, .. } => Some(name.clone()),
            Kind::Layer | Kind::Kernel => None,
        })
        .collect();
    names.sort();
    names
}

/// Numbers for every parameter of `main`.
#[expect(clippy::wildcard_enum_match_arm, reason = "the others are integers")]
pub(crate) fn arguments(module: &Module, r: &mut Draws) -> Vec<Tensor> {
    let types = module.function("main").unwrap().param_types();
    let argument = |ty: TensorType| {
        let dims = ty.sizes().unwrap();
        match ty.dtype {
            DType::Bool => r.bools(&dims),
            dtype if dtype.is_float() => {
                let count = dims.iter().product();
                let numbers = (0..count).map(|_| r.number(-2.0, 2.0)).collect();
                Tensor::from_f64(dtype, &dims, numbers)
            }
            _ => r.ids(&dims, 0, 2),
        }
    };
    types.into_iter().map(argument).collect()
}

/// Recognises, and compares what is computed with what was. The composites that are called.
pub(crate) fn compared(before: &Module, r: &mut Draws, note: &str) -> Vec<String> {
    called(&recognised(before, r, note))
}

/// The same, with the module as it is then.
pub(crate) fn recognised(before: &Module, r: &mut Draws, note: &str) -> Module {
    assert_eq!(verify(before), [], "{note}\n{before}");
    let mut after = before.clone();
    let args = arguments(before, r);
    // Parameters whose names say so are constants, as weights of a file are.
    let main = before.function("main").unwrap();
    let is_stored = |at: usize| main.values[at].name.starts_with("stored");
    let known = |at: usize| is_stored(at).then(|| args[at].clone());
    recognise(&mut after, "main", &|_| true, &known);
    assert_eq!(verify(&after), [], "{note}\n{before}\n{after}");
    let [a, b] = [before, &after].map(|module| eval(module, "main", &args).unwrap());
    assert_near(&a, &b, [1e-12, 2e-5], &format!("{note}\n{before}\n{after}"));
    after
}

/// That results are equal but for rounding, in f64 and f32; numbers that are none are the same.
fn assert_near(a: &[Tensor], b: &[Tensor], most: [f64; 2], note: &str) {
    assert_eq!(a.len(), b.len(), "{note}");
    for (a, b) in a.iter().zip(b) {
        let most = most[usize::from(a.dtype != DType::F64)];
        let (a, b) = (a.to_f64(), b.to_f64());
        let largest = a.iter().filter(|x| x.is_finite()).fold(1.0, |m: f64, x| m.max(x.abs()));
        for (a, b) in a.into_iter().zip(b) {
            let is_fine = (a.is_nan() && b.is_nan()) || (a - b).abs() <= most * largest;
            assert!(is_fine, "{a} is {b}: {note}");
        }
    }
}

/// That gradients are the same, taken before and after recognition.
pub(crate) fn assert_same_gradients(before: &Module, after: &Module, r: &mut Draws, note: &str) {
    let args = arguments(before, r);
    let seed = r.word();
    let [a, b] = [before, after].map(|module| {
        let mut module = module.clone();
        let name = differentiate(&mut module, "main").unwrap();
        let types = module.function(&name).unwrap().param_types();
        let mut args = args.clone();
        let r = &mut Draws::new(seed);
        for ty in &types[args.len()..] {
            let dims = ty.sizes().unwrap();
            let count = dims.iter().product();
            let numbers = (0..count).map(|_| r.number(-1.0, 1.0)).collect();
            args.push(Tensor::from_f64(ty.dtype, &dims, numbers));
        }
        eval(&module, &name, &args).unwrap()
    });
    assert!(a.len() > 1, "{note}");
    assert_near(&a, &b, [1e-11, 2e-4], &format!("gradients: {note}\n{before}\n{after}"));
}

pub(crate) fn dtype(r: &mut Draws) -> DType {
    if r.coin() { DType::F32 } else { DType::F64 }
}

#[test]
fn norms_are_found_in_every_form() {
    for seed in seeds(200) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let dims = [1 + r.below(2), 2 + r.below(3), 3 + r.below(5)];
        let (is_centred, has_weight, has_bias) = (r.coin(), r.coin(), r.coin());
        let (adds_one, is_sum) = (r.coin(), r.coin());
        let epsilon = [1e-5, 1e-6, 1e-12, 0.0][r.below(4)];
        let module = built(r, dtype, |e| {
            let x = e.param("x", &dims);
            let (other, w, b) =
                (e.param("other", &dims), e.param("w", &dims[2..]), e.param("b", &dims[2..]));
            let x = if is_sum { e.two(Binary::Add, x, other) } else { x };
            let (is_epsilon_outside, less) = (false, 0.0);
            let over = vec![2];
            let form = Norm { over, is_centred, is_epsilon_outside, epsilon, less };
            let mut y = e.norm(x, &form);
            if has_weight {
                let w = if adds_one { e.with(Binary::Add, w, 1.0) } else { w };
                let w = e.repeat(w, &dims);
                y = e.two(Binary::Mul, y, w);
            }
            if has_bias {
                let b = e.repeat(b, &dims);
                y = e.two(Binary::Add, y, b);
            }
            if is_sum { e.two(Binary::Add, y, other) } else { y }
        });
        let note = format!("SEED={seed}");
        let after = recognised(&module, r, &note);
        let found = called(&after);
        if epsilon > 1e-7 {
            assert_same_gradients(&module, &after, r, &note);
        }
        let wanted = if is_centred { "layer_norm" } else { "rms_norm" };
        assert_eq!(found, [wanted], "SEED={seed}\n{module}");
    }
}

/// Outputs are known by their names: what a composite is made of takes none of a later value.
#[test]
fn values_after_a_composite_keep_their_names() {
    let mut meetings = 0;
    for seed in seeds(100) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let dims = [2, 3, 4];
        // Without a weight, the composite takes ones, which are a part of it.
        let (has_weight, adds_one) = (r.coin(), r.coin());
        let mut module = Module::new("export");
        let b = Builder::new(&mut module, "main", Kind::Layer);
        let mut e = Exporter { b, r, dtype };
        let (x, w) = (e.param("x", &dims), e.param("w", &dims[2..]));
        let over = vec![2];
        let form =
            Norm { over, is_centred: false, is_epsilon_outside: false, epsilon: 1e-5, less: 0.0 };
        let mut y = e.norm(x, &form);
        if has_weight {
            let w = if adds_one { e.with(Binary::Add, w, 1.0) } else { w };
            let w = e.repeat(w, &dims);
            y = e.two(Binary::Mul, y, w);
        }
        let name = e.b.function().value(y).name.clone();
        let later = e.b.unary(&format!("{name}.1"), Unary::Neg, y);
        e.b.finish(&[y, later]);
        let names = |module: &Module| -> Vec<String> {
            let main = module.function("main").unwrap();
            main.results.iter().map(|result| main.value(*result).name.clone()).collect()
        };
        let note = format!("SEED={seed}");
        let after = recognised(&module, r, &note);
        assert_eq!(names(&after), names(&module), "{note}\n{module}\n{after}");
        let main = after.function("main").unwrap();
        meetings += usize::from(main.find(&format!("{name}.1.1")).is_some());
    }
    assert!(meetings > 0 || seeds(100).len() == 1, "no part of a composite wants such a name");
}

/// Nanoseconds that this thread has computed; none where the system does not tell.
fn computed_ns() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split(' ').next()?.parse().ok()
}

/// Eight times as many nodes take about eight times as long to build and to search.
#[test]
fn building_and_recognising_are_linear() {
    let seconds = |nodes: usize| {
        let once = || {
            let start = computed_ns()?;
            let mut module = Module::new("long");
            let mut b = Builder::new(&mut module, "main", Kind::Layer);
            let x = b.param("x", TensorType::of(DType::F32, &[4]));
            let y = (0..nodes).fold(x, |y, at| match at % 2 {
                0 => b.unary("v", Unary::Neg, y),
                _ => b.binary(&format!("n{at}"), Binary::Div, y, x),
            });
            b.finish(&[y]);
            recognise(&mut module, "main", &|_| true, &|_| None);
            Some(1e-9 * (computed_ns()? - start))
        };
        (0..3).map(|_| once()).try_fold(f64::INFINITY, |least, s| Some(least.min(s?)))
    };
    let (Some(few), Some(many)) = (seconds(4_000), seconds(32_000)) else { return };
    // Quadratic: 64 times.
    assert!(many < 30.0 * few, "{few} s for 4,000 nodes, {many} s for 32,000");
}

/// What is nearly a norm is left as it is.
#[test]
fn near_norms_are_not_found() {
    for seed in seeds(100) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let dims = [2, 4, 5];
        let which = r.below(6);
        let is_centred = r.coin();
        let module = built(r, dtype, |e| {
            let x = e.param("x", &dims);
            let other = e.param("other", &dims);
            let mut form = Norm {
                over: vec![2],
                is_centred,
                is_epsilon_outside: false,
                epsilon: 1e-5,
                less: 0.0,
            };
            match which {
                0 => form.is_epsilon_outside = true,
                1 => form.less = 1.0,
                2 => form.over = vec![1],
                3 => form.over = vec![0],
                4 => form.epsilon = -1e-5,
                _ => {
                    // The root is that of other numbers.
                    let square = e.square(other);
                    let variance = e.mean(square, &[2], 5.0);
                    let variance = e.with(Binary::Add, variance, 1e-5);
                    return e.over_root(x, variance);
                }
            }
            e.norm(x, &form)
        });
        let found = compared(&module, r, &format!("SEED={seed}"));
        assert_eq!(found, [""; 0], "SEED={seed}, {which}\n{module}");
    }
}

/// Writes an activation of `x`, with the given numbers in place of the right ones.
fn activation(e: &mut Exporter<'_, '_>, name: &str, x: ValueId, off: f64) -> ValueId {
    let gate = match name {
        "gelu_erf" => {
            let inner = e.scaled(x, std::f64::consts::FRAC_1_SQRT_2 * off);
            e.b.unary("erf", Unary::Erf, inner)
        }
        "gelu_tanh" => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let inner = match e.r.coin() {
                true => {
                    let cube = match e.r.coin() {
                        true => e.with(Binary::Pow, x, 3.0),
                        false => {
                            let square = e.square(x);
                            e.two(Binary::Mul, square, x)
                        }
                    };
                    let cubic = e.with(Binary::Mul, cube, 0.044_715 * off);
                    let sum = e.two(Binary::Add, x, cubic);
                    e.with(Binary::Mul, sum, root)
                }
                false => {
                    let square = e.square(x);
                    let cubic = e.with(Binary::Mul, square, 0.044_715 * off);
                    let more = e.with(Binary::Add, cubic, 1.0);
                    let scaled = e.with(Binary::Mul, x, root);
                    e.two(Binary::Mul, scaled, more)
                }
            };
            e.b.unary("tanh", Unary::Tanh, inner)
        }
        _ => {
            let negative = match off == 1.0 {
                true => e.b.unary("neg", Unary::Neg, x),
                false => e.with(Binary::Mul, x, -off),
            };
            let exp = e.b.unary("exp", Unary::Exp, negative);
            let below = e.with(Binary::Add, exp, 1.0);
            if e.r.coin() {
                return e.b.binary("silu", Binary::Div, x, below);
            }
            let one = e.number(1.0, below);
            let gate = e.b.binary("gate", Binary::Div, one, below);
            return e.two(Binary::Mul, x, gate);
        }
    };
    let gate = e.with(Binary::Add, gate, 1.0);
    match e.r.below(3) {
        0 => {
            let half = e.scaled(x, 0.5);
            e.two(Binary::Mul, half, gate)
        }
        1 => {
            let whole = e.two(Binary::Mul, x, gate);
            e.scaled(whole, 0.5)
        }
        _ => {
            let half = e.scaled(gate, 0.5);
            e.two(Binary::Mul, half, x)
        }
    }
}

const ACTIVATIONS: [&str; 3] = ["gelu_erf", "gelu_tanh", "silu"];

#[test]
fn activations_are_found_in_every_form() {
    for seed in seeds(200) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let dims = [1 + r.below(3), 3];
        let name = ACTIVATIONS[r.below(3)];
        let how = r.below(3);
        let module = built(r, dtype, |e| {
            let x = e.param("x", &dims);
            let other = e.param("other", &dims);
            let x = match how {
                0 => x,
                1 => e.two(Binary::Add, x, other),
                _ => e.two(Binary::Mul, x, other),
            };
            let y = activation(e, name, x, 1.0);
            if how == 1 { e.two(Binary::Mul, y, other) } else { y }
        });
        let note = format!("SEED={seed}");
        let after = recognised(&module, r, &note);
        assert_eq!(called(&after), [name], "{note}\n{module}");
        assert_same_gradients(&module, &after, r, &note);
    }
}

#[test]
fn near_activations_are_not_found() {
    for seed in seeds(100) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let name = ACTIVATIONS[r.below(3)];
        let off = [1.001, 0.99, 1.702][r.below(3)];
        let module = built(r, dtype, |e| {
            let x = e.param("x", &[3, 4]);
            activation(e, name, x, off)
        });
        let found = compared(&module, r, &format!("SEED={seed}"));
        assert_eq!(found, [""; 0], "SEED={seed}\n{module}");
    }
}
