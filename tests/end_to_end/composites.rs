//! Composites in texts that somebody edited: what is compiled is what the text says, or the text is
//! refused.
//!
//! Two generators, both a function of a seed. [`edited`] changes one thing in the body of an
//! instance; what is compiled of the text, and its gradient, equal what the interpreter makes of
//! the words. [`bounded`] gives one attribute a value at, below or above what its bounds say; what
//! is refused is refused before anything is built, and what is taken runs, the same from memory and
//! from a compiled file, and as the interpreter says.

#![allow(clippy::wildcard_enum_match_arm, reason = "few element types and ops are told apart")]

use codegen::function::compile_function;
use gantline::artefact::assemble;
use gantline::job::PlanRequest;
use gantline::{LOSS, compile, import, prepare, start};
use ir::autodiff::differentiate;
use ir::build::Builder;
use ir::dim::Bindings;
use ir::eval::eval;
use ir::import::{Description, Options, read_graph};
use ir::inline::inline_composites;
use ir::library::templates;
use ir::module::Attributes;
use ir::op::{Binary, Combiner, Comparison, Op, Unary};
use ir::plan::Optimizer;
use ir::rewrite::saturate::Selection;
use ir::rewrite::{Options as Rules, simplify};
use ir::text::parse_module;
use ir::{DType, Dim, Function, Kind, Module, Node, Severity, Tensor, TensorType, ValueId};
use planner::cluster::Cluster;
use planner::limits::{Decision, Limits};
use runtime::artefact as file;
use runtime::evaluate::Evaluation;
use runtime::execute::{Batch, Classes, Part, Scalars};
use runtime::init::Init;

use crate::draws::Draws;

/// How far compiled results may be from the interpreter's, in parts of the larger of one and the
/// number: kernels approximate exponentials, and add in other orders.
const TOLERANCE: f64 = 1e-8;

/// Types of operands: `B` is 2 where there is no batch, `T` is f64.
const OPERANDS: &[(&str, &[&str])] = &[
    ("gelu_tanh", &["T[B, 6]"]),
    ("gelu_tanh_bwd", &["T[B, 6]", "T[B, 6]"]),
    ("gelu_erf", &["T[B, 6]"]),
    ("gelu_erf_bwd", &["T[B, 6]", "T[B, 6]"]),
    ("silu", &["T[B, 6]"]),
    ("silu_bwd", &["T[B, 6]", "T[B, 6]"]),
    ("relu", &["T[B, 6]"]),
    ("relu_bwd", &["T[B, 6]", "T[B, 6]"]),
    ("dropout", &["T[B, 6]", "u32[4]"]),
    ("attention", &["T[B, 3, 4, 2]", "T[B, 5, 2, 2]", "T[B, 5, 2, 2]"]),
    (
        "attention_bwd",
        &[
            "T[B, 3, 4, 2]",
            "T[B, 5, 2, 2]",
            "T[B, 5, 2, 2]",
            "T[B, 3, 4, 2]",
            "T[B, 4, 3]",
            "T[B, 3, 4, 2]",
        ],
    ),
    ("attention_dropout", &["T[B, 3, 4, 2]", "T[B, 5, 2, 2]", "T[B, 5, 2, 2]", "u32[4]"]),
    (
        "attention_dropout_bwd",
        &[
            "T[B, 3, 4, 2]",
            "T[B, 5, 2, 2]",
            "T[B, 5, 2, 2]",
            "T[B, 3, 4, 2]",
            "T[B, 4, 3]",
            "T[B, 3, 4, 2]",
            "u32[4]",
        ],
    ),
    ("attention_cached", &["T[B, 3, 4, 2]", "T[B, 5, 2, 2]", "T[B, 5, 2, 2]", "i32[B]"]),
    ("rope", &["T[B, 3, 2, 4]", "i32[]"]),
    ("rope_scaled", &["T[B, 3, 2, 4]", "i32[B]"]),
    ("cross_entropy", &["T[B, 3, 5]", "i32[B, 3]"]),
    ("cross_entropy_bwd", &["T[B, 3, 5]", "i32[B, 3]", "T[B, 3]", "T[]"]),
    ("layer_norm", &["T[B, 3, 4]", "T[4]", "T[4]"]),
    ("layer_norm_bwd", &["T[B, 3, 4]", "T[4]", "T[B, 3]", "T[B, 3]", "T[B, 3, 4]"]),
    ("rms_norm", &["T[B, 3, 4]", "T[4]"]),
    ("rms_norm_bwd", &["T[B, 3, 4]", "T[4]", "T[B, 3]", "T[B, 3, 4]"]),
    ("softmax", &["T[B, 3, 4]"]),
    ("softmax_bwd", &["T[B, 3, 4]", "T[B, 3, 4]"]),
    ("sgd", &["T[6]", "T[6]", "T[]", "T[]"]),
    ("adamw", &["T[6]", "T[6]", "T[6]", "T[6]", "T[]", "T[]", "T[]", "T[]"]),
];

/// Attributes that every composite takes which has them.
const BASE: &[(&str, f64)] = &[
    ("scale", 0.7),
    ("group", 2.0),
    ("query_offset", 1.0),
    ("window", 0.0),
    ("softcap", 0.0),
    ("head_offset", 0.0),
    ("kv_offset", 0.0),
    ("p", 0.3),
    ("salt", 5.0),
    ("heads", 4.0),
    ("query_start", 1.0),
    ("queries", 5.0),
    ("theta", 100.0),
    ("sign", 1.0),
    ("offset", 0.2),
    ("by_pair", 0.3),
    ("by_frequency", 0.1),
    ("stretch", 0.5),
    ("gain", 1.2),
    ("eps", 0.1),
    ("decay", 0.2),
    ("beta1", 0.8),
    ("beta2", 0.9),
];

/// What became of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// It was refused, with diagnostics.
    Refused,
    /// It was compiled as the composite that it names.
    Composite,
    /// It was compiled as its body says, which is something else.
    Edited,
}

fn types(name: &str, batch: &Dim) -> Vec<TensorType> {
    let (_, texts) = OPERANDS.iter().find(|(of, _)| *of == name).expect("it is in the table");
    let read = |text: &&str| {
        let (dtype, dims) = text.strip_suffix(']').and_then(|t| t.split_once('[')).expect("a type");
        let dtype = if dtype == "T" { DType::F64 } else { dtype.parse().expect("a dtype") };
        let dims = dims.split(", ").filter(|dim| !dim.is_empty()).map(|dim| match dim {
            "B" => batch.clone(),
            size => Dim::constant(size.parse().expect("a size")),
        });
        TensorType::new(dtype, dims)
    };
    texts.iter().map(read).collect()
}

pub(crate) fn attributes(name: &str) -> Vec<(&'static str, f64)> {
    let known = &templates()[name].attributes;
    let known = BASE.iter().filter(|(base, _)| known.iter().any(|(known, _)| known == base));
    let by_sample = (name == "rope_scaled").then_some(("by_sample", 1.0));
    known.copied().chain(by_sample).collect()
}

/// A name of the table that a seed decides.
fn name_of(r: &mut Draws) -> &'static str {
    OPERANDS[r.below(OPERANDS.len())].0
}

fn argument(ty: &TensorType, r: &mut Draws) -> Tensor {
    let dims = ty.sizes().expect("sizes are bound");
    match ty.dtype {
        DType::U32 => r.key(),
        DType::I32 if dims.len() < 2 => r.ids(&dims, 0, 3),
        DType::I32 => r.ids(&dims, -1, 5),
        _ => r.positive(&dims),
    }
}

// Edited bodies.

/// Changes one thing in the body of a composite, or none at all; see the head of this file.
///
/// # Panics
/// When what is compiled is not what the text says.
pub(crate) fn edited(seed: u64) -> Outcome {
    let mut r = Draws::new(seed);
    let name = name_of(&mut r);
    let types = types(name, &Dim::constant(2));
    let mut module = Module::new("m");
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operands: Vec<ValueId> =
        types.iter().enumerate().map(|(at, ty)| b.param(&format!("x{at}"), ty.clone())).collect();
    let results = b.composite("y", name, &attributes(name), &operands);
    b.finish(&results);
    let mut edits = String::new();
    for _ in 0..r.below(3) {
        edits += &edit(&mut module.functions[0], &mut r);
        edits += "; ";
    }
    let text = module.to_string();
    let what = format!("SEED={seed} {name}: {edits}\n{text}");
    let Ok(said) = parse_module("text", &text) else { return Outcome::Refused };
    let Ok(Description { architecture, warnings, .. }) = read_graph("text", &text, "m") else {
        return Outcome::Refused;
    };
    let ir::import::Architecture::Graph(taken) = architecture else { panic!("{what}") };
    assert!(warnings.iter().all(|w| w.severity == Severity::Warning), "{what}");
    let args: Vec<Tensor> = types.iter().map(|ty| argument(ty, &mut r)).collect();
    let Ok(wanted) = eval(&said, "f", &args) else { return Outcome::Refused };
    let is_finite = |t: &Tensor| t.to_f64().iter().all(|x| x.is_finite());
    // What is no number tells nothing: approximations overflow elsewhere.
    if wanted.iter().all(is_finite) {
        let Some(found) = run(&taken, "f", &args, &what) else { return Outcome::Refused };
        assert_near(&found, &wanted, &what);
        gradients_agree(&said, &taken, &args, &what);
    }
    if warnings.is_empty() { Outcome::Composite } else { Outcome::Edited }
}

/// The results of a function by kernels, with composites recognised as in any model; none where a
/// node has no kernel.
fn run(module: &Module, name: &str, args: &[Tensor], what: &str) -> Option<Vec<Vec<f64>>> {
    let mut module = module.clone();
    simplify(&mut module, &Rules { selection: Selection::for_models(), ..Rules::default() });
    let compiled = match compile_function(&module, name) {
        Ok(compiled) => compiled,
        Err(why) => {
            assert_eq!(why.code, "E2003", "{}\n{what}", why.headline);
            return None;
        }
    };
    let evaluation = Evaluation::new(compiled.routine, &compiled.kernels, 1);
    let mut evaluation = evaluation.expect("there is memory");
    for (slot, arg) in args.iter().enumerate() {
        evaluation.write(slot, &crate::operators::bytes(arg));
    }
    evaluation.run();
    let result = |(at, ty): (usize, &TensorType)| {
        crate::operators::numbers(ty.dtype, evaluation.read(args.len() + at))
    };
    Some(compiled.results.iter().enumerate().map(result).collect())
}

fn assert_near(found: &[Vec<f64>], wanted: &[Tensor], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (found, wanted) in found.iter().zip(wanted) {
        for (x, y) in found.iter().zip(wanted.to_f64()) {
            let near = (x - y).abs() <= TOLERANCE * y.abs().max(1.0);
            assert!(near || *x == y, "{x}, not {y}: {what}");
        }
    }
}

/// The gradient of what was taken is that of the words, where both have one.
fn gradients_agree(said: &Module, taken: &Module, args: &[Tensor], what: &str) {
    let mut words = said.clone();
    inline_composites(&mut words, |_| false);
    let mut modules = [words, taken.clone()];
    let names: Vec<_> = modules.iter_mut().map(|m| differentiate(m, "f").ok()).collect();
    let [Some(first), Some(second)] = &names[..] else { return };
    let results = said.function("f").expect("it is there").result_types();
    let mut r = Draws::new(7);
    let floats = results.iter().filter(|ty| ty.dtype.is_float());
    let cotangents = floats.map(|ty| r.signed(&ty.sizes().expect("sizes are bound")));
    let args: Vec<Tensor> = args.iter().cloned().chain(cotangents).collect();
    let grads = [(&modules[0], first), (&modules[1], second)].map(|(m, f)| eval(m, f, &args));
    let [Ok(wanted), Ok(found)] = grads else { return };
    if wanted.iter().all(|t| t.to_f64().iter().all(|x| x.is_finite())) {
        let found: Vec<Vec<f64>> = found.iter().map(Tensor::to_f64).collect();
        assert_near(&found, &wanted, &format!("a gradient of {what}"));
    }
}

/// Changes one thing of a composite: an attribute, a number, an op, an operand; says what.
fn edit(function: &mut Function, r: &mut Draws) -> String {
    let at = r.below(function.nodes.len());
    match r.below(4) {
        0 => {
            let Kind::Composite { attributes, .. } = &mut function.kind else {
                return String::new();
            };
            let count = attributes.len().max(1);
            let Some((name, value)) = attributes.iter_mut().nth(r.below(count)) else {
                return String::new();
            };
            *value = [*value + 1.0, *value - 1.0, *value * 0.5, -*value][r.below(4)];
            format!("{name} is {value}")
        }
        1 => swap(function, at, r),
        _ => {
            let before = function.nodes[at].op.clone();
            change(&mut function.nodes[at], r);
            format!("{before:?} is {:?}", function.nodes[at].op)
        }
    }
}

/// Gives a node another operand of the same type, where there is one.
fn swap(function: &mut Function, at: usize, r: &mut Draws) -> String {
    let node = &function.nodes[at];
    let Some(place) = node.operands.len().checked_sub(1).map(|last| r.below(last + 1)) else {
        return String::new();
    };
    let (own, made) = (node.operands[place], node.results[0]);
    let is_other = |v: &ValueId| function.ty(*v) == function.ty(own) && *v != own;
    let others: Vec<ValueId> = (0..made.0).map(ValueId).filter(is_other).collect();
    if others.is_empty() {
        return String::new();
    }
    let other = others[r.below(others.len())];
    function.nodes[at].operands[place] = other;
    format!("operand {place} of node {at} is {}", function.value(other).name)
}

/// Changes the op of a node.
fn change(node: &mut Node, r: &mut Draws) {
    match &mut node.op {
        Op::Constant { value, dtype, .. } if !dtype.is_float() => {
            *value = [*value + 1.0, *value - 1.0, 4_294_967_296.0][r.below(3)];
        }
        Op::Constant { value, .. } => *value = [*value * 1.1, *value + 0.5, -*value][r.below(3)],
        Op::Iota { start, .. } => *start += [1, -1, 1 << 32][r.below(3)],
        Op::Gather { start, .. } => *start += 1,
        Op::Random { salt, .. } => *salt += 1,
        Op::Unary(how) => *how = [Unary::Exp, Unary::Neg, Unary::Tanh, Unary::Sin][r.below(4)],
        Op::Binary(how) => {
            *how = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Max][r.below(4)];
        }
        Op::Compare(how) => *how = Comparison::ALL[r.below(Comparison::ALL.len())],
        Op::Reduce { combiner, .. } => *combiner = Combiner::ALL[r.below(Combiner::ALL.len())],
        Op::Slice { start, .. } if *start > 0 => *start -= 1,
        Op::Contract(einsum) if einsum.a.len() == einsum.b.len() => {
            std::mem::swap(&mut einsum.a, &mut einsum.b);
        }
        _ => {}
    }
}

// Attributes at their bounds.

/// Values that lie around the bounds of attributes.
const VALUES: &[f64] = &[
    f64::NEG_INFINITY,
    -9.3e18,
    -4_294_967_296.0,
    -2_147_483_649.0,
    -2.0,
    -1.0,
    -1e-9,
    0.0,
    1e-9,
    0.5,
    0.999_999,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    5.0,
    2_147_483_643.0,
    2_147_483_645.0,
    2_147_483_646.0,
    2_147_483_647.0,
    2_147_483_648.0,
    4_294_967_295.0,
    4_294_967_296.0,
    9_007_199_254_740_993.0,
    1e300,
    f64::INFINITY,
];

/// One attribute of a composite in a model that is trained, at some value; see the head of this
/// file.
///
/// # Panics
/// When verdicts or results differ.
pub(crate) fn bounded(cluster: &Cluster, seed: u64) -> Outcome {
    let mut r = Draws::new(seed);
    let (name, given) = loop {
        let name = name_of(&mut r);
        let mut given = attributes(name);
        if given.is_empty() {
            continue;
        }
        let at = r.below(given.len());
        given[at].1 = VALUES[r.below(VALUES.len())];
        break (name, given);
    };
    let text = model(name, &given);
    let what = format!("SEED={seed} {name} {given:?}\n{text}");
    let description = match read_graph("text", &text, "m") {
        Ok(description) => description,
        Err(wrong) => {
            let known = ["E1001", "E1002", "E1003", "E1014", "E1015"];
            assert!(wrong.iter().all(|d| known.contains(&d.code)), "{wrong:?}\n{what}");
            return Outcome::Refused;
        }
    };
    let options = Options { seq: 3, dtype: DType::F64, dropout: Some(0.0), documents: false };
    let Ok(model) = import(&description, &options) else { return Outcome::Refused };
    let prepared = prepare(&model).unwrap_or_else(|why| panic!("{why:?}\n{what}"));
    let mut limits = Limits::default();
    [Decision::Pp, Decision::Dp, Decision::Tp]
        .into_iter()
        .for_each(|decision| limits.fix(decision, 1));
    let question = PlanRequest {
        module: prepared,
        model: "m".to_owned(),
        cluster: cluster.clone(),
        ranks: 1,
        global_batch_size: 2,
        seq: 3,
        precision: ir::precision::Precision::uniform(DType::F64),
        optimizer: Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 },
        clip: None,
        lora: None,
        limits,
    };
    let plan = gantline::plan(&question.job()).unwrap_or_else(|why| panic!("{why:?}\n{what}")).plan;
    let classes = compile(&question.module, LOSS, &plan);
    let stored = assemble(&model, &question, plan, &[]);
    let (classes, stored) = match (classes, stored) {
        (Ok(classes), Ok(stored)) => (classes, stored),
        (Err(_), Err(_)) => return Outcome::Refused,
        (classes, stored) => panic!("{:?} {:?}\n{what}", classes.err(), stored.err()),
    };
    let bytes = file::encode(&stored).expect("it is written");
    let back = file::decode("file", &bytes, &file::Limits::default());
    let back = back.unwrap_or_else(|why| panic!("{why:?}\n{what}"));
    let (loss, weights) = step(classes, &what);
    let (again, _) = step(back.into_classes(LOSS), &what);
    assert!(loss == again || loss.is_nan() && again.is_nan(), "{loss} and {again}: {what}");
    let wanted = interpreted(&text, &weights);
    let near = (loss - wanted).abs() <= 1e-6 * wanted.abs().max(1.0);
    assert!(near || loss == wanted || !wanted.is_finite(), "{loss}, not {wanted}: {what}");
    if description.warnings.is_empty() { Outcome::Composite } else { Outcome::Edited }
}

/// The loss that the words of a text say, for two samples of tokens that are 1.
fn interpreted(text: &str, weights: &[(String, Vec<f64>)]) -> f64 {
    let mut said = parse_module("text", text).expect("it was read");
    said.bind(&Bindings::from([("B".to_owned(), 2), ("S".to_owned(), 3)]));
    let entry = said.function(LOSS).expect("it is there");
    let args = entry.params().map(|param| {
        let (value, dims) = (entry.value(param), entry.ty(param).sizes().expect("bound"));
        let weight = weights.iter().find(|(name, _)| *name == value.name);
        match weight {
            Some((_, numbers)) => Tensor::f64(&dims, numbers.clone()),
            None if value.ty.dtype == DType::U32 => {
                Tensor::int(DType::U32, &dims, vec![0, 1, 0, 0])
            }
            None => Tensor::int(DType::I32, &dims, vec![1; dims.iter().product()]),
        }
    });
    let args: Vec<Tensor> = args.collect();
    eval(&said, LOSS, &args).expect("it evaluates")[0].scalar()
}

/// One step: the loss, and the weights that it started from.
fn step(classes: Classes, what: &str) -> (f64, Vec<(String, Vec<f64>)>) {
    let names: Vec<String> =
        classes.programs[0].weights.iter().map(|weight| weight.name.clone()).collect();
    let mut session = start(classes, None, 1).unwrap_or_else(|why| panic!("{why:?}\n{what}"));
    session.init_weights(3, &|_, _| Init::Normal { std: 0.5, zero_row: None });
    let read = |name: String| {
        let values = session.read_weight(&name, Part::Weight).expect("it has the weight");
        (name, values.to_f64())
    };
    let weights = names.into_iter().map(read).collect();
    let ids = [1; 6];
    let batch = Batch { tokens: &ids, labels: &ids, ..Batch::default() };
    let report = session.step(&batch, Scalars { seed: 0, ..Scalars::default() });
    let report = report.unwrap_or_else(|why| panic!("{why}\n{what}"));
    (report.loss_sum, weights)
}

/// The text of a model whose loss is the sum of a composite's first result, for each sample.
pub(crate) fn model(name: &str, given: &[(&str, f64)]) -> String {
    let mut module = Module::new("m");
    let types = types(name, &Dim::symbol(Dim::BATCH));
    let given_map: Attributes = given.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
    // What the library does not build with these attributes is written with others.
    let base: Attributes = attributes(name).iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
    let body = if is_plain(given) { &given_map } else { &base };
    let mut callee = ir::library::instantiate(name, body, &types, "c").expect("the base is fine");
    callee.kind = Kind::Composite { name: name.to_owned(), attributes: given_map };
    module.functions.push(callee);
    let mut b = Builder::new(&mut module, "body", Kind::Layer);
    let mut weights = Vec::new();
    let mut params = Vec::new();
    for (at, ty) in types.iter().enumerate() {
        let has_batch = ty.dims.first().is_some_and(|dim| dim.mentions(Dim::BATCH));
        if ty.dtype.is_float() {
            let dims = ty.dims[usize::from(has_batch)..].to_vec();
            weights.push((format!("w{at}"), TensorType::new(ty.dtype, dims)));
            let (name, ty) = weights.last().expect("one was pushed");
            params.push((b.param(name, ty.clone()), has_batch, at));
        }
    }
    let ids = TensorType::new(DType::I32, [Dim::symbol(Dim::BATCH), Dim::constant(3)]);
    let tokens = b.param("tokens", ids.clone());
    let has_key = types.iter().any(|ty| ty.dtype == DType::U32);
    let key = has_key.then(|| b.param("key", TensorType::of(DType::U32, &[4])));
    let mut operands: Vec<Option<ValueId>> = vec![None; types.len()];
    for (param, has_batch, at) in params {
        let wide = Op::Broadcast { new: vec![0], dims: types[at].dims.clone() };
        operands[at] = Some(if has_batch { b.push("wide", wide, &[param]) } else { param });
    }
    for (at, ty) in types.iter().enumerate().filter(|(_, ty)| !ty.dtype.is_float()) {
        operands[at] = match ty.dtype {
            DType::U32 => key,
            _ if ty.ndim() == 2 => Some(tokens),
            _ => Some(b.constant("position", 1.0, ty.clone())),
        };
    }
    let operands: Vec<ValueId> = operands.into_iter().flatten().collect();
    let first = b.call("y", "c", &operands)[0];
    let dims = (0..b.ty(first).ndim()).collect();
    let sum = b.reduce("sum", Combiner::Sum, dims, first);
    let numbers = b.push("numbers", Op::Cast { dtype: DType::F64 }, &[tokens]);
    let total = b.reduce("total", Combiner::Sum, vec![0, 1], numbers);
    let sum = b.add("loss", sum, total);
    let one = b.constant("one", 1.0, TensorType::new(DType::F64, [Dim::symbol(Dim::BATCH)]));
    let count = b.reduce("count", Combiner::Sum, vec![0], one);
    b.finish(&[sum, count]);
    let mut b = Builder::new(&mut module, LOSS, Kind::Layer);
    let mut all: Vec<ValueId> = weights.iter().map(|(n, ty)| b.param(n, ty.clone())).collect();
    all.push(b.param("tokens", ids.clone()));
    b.param("labels", ids);
    if has_key {
        all.push(b.param("key", TensorType::of(DType::U32, &[4])));
    }
    let results = b.call("loss", "body", &all);
    b.finish(&results);
    module.to_string()
}

/// Whether numbers are such that the library's texts can be read with them.
fn is_plain(given: &[(&str, f64)]) -> bool {
    let offsets = ["query_offset", "head_offset", "kv_offset", "query_start"];
    let whole = [&offsets[..], &["group", "window", "salt", "heads", "queries"]].concat();
    let is_index = |value: f64| value.fract() == 0.0 && (0.0..=4_294_967_295.0).contains(&value);
    given
        .iter()
        .all(|(name, value)| value.is_finite() && (!whole.contains(name) || is_index(*value)))
}

/// How many cases of each generator the tests look at; the bench takes more.
#[cfg(test)]
const CASES: u64 = 120;

#[cfg(test)]
fn count(outcomes: &[Outcome], of: Outcome) -> usize {
    outcomes.iter().filter(|outcome| **outcome == of).count()
}

#[test]
fn what_is_compiled_is_what_an_edited_text_says() {
    let outcomes: Vec<Outcome> = crate::draws::seeds(CASES).into_iter().map(edited).collect();
    if std::env::var_os("SEED").is_none() {
        for (of, least) in [(Outcome::Edited, 40), (Outcome::Composite, 20), (Outcome::Refused, 3)]
        {
            assert!(count(&outcomes, of) >= least, "{of:?}: {}", count(&outcomes, of));
        }
    }
}

/// What is not the library's by one number, and far from it.
#[test]
fn one_number_of_a_body_makes_the_difference_that_it_says() {
    let mut r = Draws::new(1);
    for (name, number, other) in [
        ("gelu_tanh", "constant 0.044715", "constant 0.05"),
        ("gelu_tanh_bwd", "constant 0.044715", "constant 0.05"),
        ("attention", "constant 0.7", "constant 0.3"),
        ("attention_bwd", "constant 0.7", "constant 0.3"),
        ("rope", "constant 100.0", "constant 50.0"),
    ] {
        let text = model(name, &attributes(name));
        let types = types(name, &Dim::constant(2));
        let args: Vec<Tensor> = types.iter().map(|ty| argument(ty, &mut r)).collect();
        let of = |text: &str| {
            let mut module = parse_module("text", text).expect("it is a module");
            module.bind(&Bindings::from([("B".to_owned(), 2)]));
            eval(&module, "c", &args).expect("it evaluates")
        };
        let edited = text.replace(number, other);
        let wanted = of(&edited);
        let distance = wanted[0].max_relative_difference(&of(&text)[0]);
        assert!(distance > 1e-4, "{name}: {distance}");
        let mut called = edited.replacen("composite @c", "composite @f", 1);
        called.truncate(called.find("  func @body").expect("there is a layer"));
        let read = read_graph("text", &called, "m").expect("it reads");
        assert_eq!(read.warnings.iter().map(|w| w.code).collect::<Vec<_>>(), ["W1017"], "{name}");
        let ir::import::Architecture::Graph(mut taken) = read.architecture else {
            panic!("{name} is a graph");
        };
        taken.bind(&Bindings::from([("B".to_owned(), 2)]));
        let mut caller = Builder::new(&mut taken, "g", Kind::Layer);
        let operands = types.iter().enumerate();
        let operands = operands.map(|(at, ty)| caller.param(&format!("x{at}"), ty.clone()));
        let operands: Vec<ValueId> = operands.collect();
        let results = caller.call("y", "f", &operands);
        caller.finish(&results);
        let found = run(&taken, "g", &args, name).expect("it has kernels");
        assert_near(&found, &wanted, name);
    }
}

#[test]
fn attributes_are_taken_or_refused_alike_everywhere() {
    let cluster = Cluster::load("cpu-local").expect("this machine");
    let seeds = crate::draws::seeds(CASES);
    let outcomes: Vec<Outcome> = seeds.into_iter().map(|seed| bounded(&cluster, seed)).collect();
    if std::env::var_os("SEED").is_none() {
        for (of, least) in [(Outcome::Composite, 25), (Outcome::Refused, 40)] {
            assert!(count(&outcomes, of) >= least, "{of:?}: {}", count(&outcomes, of));
        }
    }
}
