//! The reference interpreter as a judge: what a step should be, how far rounding alone takes it
//! from that, and whether rewriting changed a function.

use std::collections::BTreeMap;

use ir::dim::Bindings;
use ir::eval::eval;
use ir::import::Model;
use ir::random::mix;
use ir::{DType, Dim, Function, Kind, Module, Op, Tensor, TensorType};

use super::{Computed, batch, difference, documents, drawn_weights};
use crate::failure::Failure;
use crate::job::PlanRequest;

/// The most products of a parameter and a token that are interpreted. Chosen: about a minute.
const PRODUCTS_MAX: u64 = 100_000_000;

/// How far a step may be from another one, in roundings of the interpreter. Chosen: sums are taken
/// in other orders, and no order is more than a few times better than another.
const ROUNDINGS_MAX: f64 = 8.0;

/// Steps that are rounded to see how far that takes them. Chosen: of 1,800 random graphs one was
/// judged wrongly by a single step.
const ROUNDED: u32 = 3;

/// How far apart a function and its rewritten form may be in f64. Chosen: constants that rules
/// compute are rounded to f32.
const REWRITTEN_MAX: f64 = 1e-5;

/// A step on the interpreter.
pub(in crate::verbs) struct Reference {
    /// In f64.
    pub(in crate::verbs) step: Computed,
    /// How far rounding to the model's element type takes a step from it: what rounding to f32
    /// does, and for f64 as much less as its numbers are finer.
    pub(in crate::verbs) rounding: f64,
    /// What the entry takes.
    args: Vec<Tensor>,
}

impl Reference {
    /// The step of a module that is not rewritten; none where the interpreter cannot do it, or
    /// where that would take long.
    pub(in crate::verbs) fn of(
        question: &mut PlanRequest,
        model: &Model,
        seed: u32,
    ) -> Result<Option<Reference>, Failure> {
        let tokens = (question.global_batch_size * question.seq) as u64;
        if model.param_count().saturating_mul(tokens) > PRODUCTS_MAX {
            return Ok(None);
        }
        let weights = drawn_weights(question, model, seed)?;
        let (tokens, labels) = batch(question, model, seed);
        let documents = documents(question, seed);
        let samples = question.global_batch_size;
        let mut module = model.module.clone();
        module.bind(&Bindings::from([("B".to_owned(), samples as i64)]));
        let Some(entry) = module.function(crate::LOSS).cloned() else { return Ok(None) };
        let argument = |(param, ty): (usize, &TensorType)| {
            let name = &entry.values[param].name;
            let (dims, ids) = (ty.sizes()?, |ids: &[i32]| {
                ids.iter().map(|id| i64::from(*id)).collect::<Vec<_>>()
            });
            let tensor = match (weights.get(name), name.as_str()) {
                (Some(numbers), _) => Tensor::from_f64(ty.dtype, &dims, numbers.clone()),
                (None, "tokens") => Tensor::int(ty.dtype, &dims, ids(&tokens)),
                (None, "labels") => Tensor::int(ty.dtype, &dims, ids(&labels)),
                (None, "documents") => Tensor::int(ty.dtype, &dims, ids(&documents)),
                (None, _) => return None,
            };
            (tensor.ty() == *ty).then_some(tensor)
        };
        let types = entry.param_types();
        let args: Option<Vec<Tensor>> = types.iter().enumerate().map(argument).collect();
        let Some(args) = args else { return Ok(None) };
        let in_type = |args: &[Tensor], dtype| {
            let mut module = module.clone();
            // What a model in f64 casts to f32 is rounded by every engine.
            if dtype != question.precision.accumulate {
                make_floats(&mut module, dtype);
            }
            let args: Vec<Tensor> = args.iter().map(|arg| cast(arg, dtype)).collect();
            interpret(module, &entry, args)
        };
        let Some(step) = in_type(&args, DType::F64) else { return Ok(None) };
        let mut rounding = 0.0_f64;
        for sample in 0..ROUNDED {
            // Roundings may cancel by chance, but hardly those of all of a few near steps.
            let args: Vec<Tensor> = args.iter().map(|arg| nudged(arg, sample)).collect();
            let [exact, rounded] = [DType::F64, DType::F32].map(|dtype| in_type(&args, dtype));
            let (Some(exact), Some(rounded)) = (exact, rounded) else { return Ok(None) };
            rounding = rounding.max(difference(&exact, &rounded));
        }
        let is_double = question.precision.accumulate == DType::F64;
        let finer = if is_double { 2.0_f64.powi(24 - 53) } else { 1.0 };
        Ok(Some(Reference { step, rounding: finer * rounding, args }))
    }

    /// The step of the module that is compiled, each value rounded to its type; none where the
    /// interpreter lacks something.
    pub(in crate::verbs) fn typed(&self, question: &PlanRequest) -> Option<Computed> {
        let mut module = question.module.clone();
        let samples = question.global_batch_size as i64;
        module.bind(&Bindings::from([("B".to_owned(), samples)]));
        let entry = module.function(crate::LOSS)?.clone();
        let types = entry.param_types();
        let args = self.args.iter().zip(&types).map(|(arg, ty)| cast(arg, ty.dtype)).collect();
        interpret(module, &entry, args)
    }

    /// The error that rounding explains: a gradient whose terms cancel has few right digits in any
    /// order of its sums.
    pub(in crate::verbs) fn error_max(&self, bound: f64) -> f64 {
        let rounding = ROUNDINGS_MAX * self.rounding;
        if rounding.is_finite() { bound.max(rounding) } else { bound }
    }
}

/// Floating-point numbers a few millionths larger.
fn nudged(arg: &Tensor, sample: u32) -> Tensor {
    if !arg.dtype.is_float() {
        return arg.clone();
    }
    let factor = 1.0 + f64::from(sample) * 3e-6;
    let numbers = arg.to_f64().into_iter().map(|number| number * factor);
    Tensor::from_f64(arg.dtype, &arg.dims, numbers.collect())
}

/// A tensor of floating-point numbers in a type; any other as it is.
fn cast(arg: &Tensor, dtype: DType) -> Tensor {
    match arg.dtype.is_float() {
        true => Tensor::from_f64(dtype, &arg.dims, arg.to_f64()),
        false => arg.clone(),
    }
}

/// Loss and gradients of an entry; none where the interpreter lacks an op or an element type.
fn interpret(mut module: Module, entry: &Function, mut args: Vec<Tensor>) -> Option<Computed> {
    let derivative = ir::autodiff::differentiate(&mut module, &entry.name).ok()?;
    let dtype = |at: usize| Some(module.function(&derivative)?.param_types().get(at)?.dtype);
    for number in [1.0, 0.0].into_iter().take(entry.results.len()) {
        args.push(Tensor::from_f64(dtype(args.len())?, &[], vec![number]));
    }
    let results = eval(&module, &derivative, &args).ok()?;
    let (values, grads) = results.split_at_checked(entry.results.len())?;
    let [sum, count] = values else { return None };
    let trained = entry.differentiable_params();
    let named =
        trained.zip(grads).map(|(param, grad)| (entry.value(param).name.clone(), grad.to_f64()));
    Some(Computed { loss: sum.scalar() / count.scalar(), grads: named.collect() })
}

/// Makes every floating-point type of a module this one.
fn make_floats(module: &mut Module, own: DType) {
    for function in &mut module.functions {
        for value in function.values.iter_mut().filter(|value| value.ty.dtype.is_float()) {
            value.ty.dtype = own;
        }
        for node in &mut function.nodes {
            if let Op::Constant { dtype, .. }
            | Op::Iota { dtype, .. }
            | Op::Random { dtype, .. }
            | Op::Cast { dtype } = &mut node.op
                && dtype.is_float()
            {
                *dtype = own;
            }
        }
    }
}

/// The first layer, or gradient of one, that two forms of a module compute differently for drawn
/// arguments, and by how much.
pub(in crate::verbs) fn changed_function(
    before: &Module,
    after: &Module,
    question: &PlanRequest,
    vocab: usize,
) -> Option<(String, f64)> {
    let samples = Bindings::from([(Dim::BATCH.to_owned(), question.global_batch_size as i64)]);
    let [before, after] = [before, after].map(|module| {
        let mut module = module.clone();
        module.bind(&samples);
        make_floats(&mut module, DType::F64);
        module
    });
    let layers = before.functions.iter().filter(|f| f.kind == Kind::Layer);
    layers.into_iter().find_map(|function| {
        let types = function.param_types();
        let mut number = 0_u64;
        let mut draw = || {
            number += 1;
            mix(number)
        };
        let argument = |ty: &TensorType| {
            let dims = ty.sizes()?;
            let count = dims.iter().product();
            let tensor = if ty.dtype.is_float() {
                // From -1 to 1.
                let unit = |bits: u64| (bits >> 11) as f64 / (1_u64 << 52) as f64 - 1.0;
                Tensor::f64(&dims, (0..count).map(|_| unit(draw())).collect())
            } else {
                let ids = (0..count).map(|_| (draw() % vocab.max(2) as u64) as i64).collect();
                Tensor::int(ty.dtype, &dims, ids)
            };
            (tensor.ty() == *ty).then_some(tensor)
        };
        let args: Option<Vec<Tensor>> = types.iter().map(argument).collect();
        let args = args?;
        let [wanted, found] =
            [&before, &after].map(|module| eval(module, &function.name, &args).ok());
        let computed = |results: Vec<Tensor>| {
            let named = results.iter().enumerate();
            let grads: BTreeMap<String, Vec<f64>> =
                named.map(|(at, result)| (at.to_string(), result.to_f64())).collect();
            Computed { loss: 0.0, grads }
        };
        let error = difference(&computed(wanted?), &computed(found?));
        (error > REWRITTEN_MAX).then(|| (function.name.clone(), error))
    })
}
