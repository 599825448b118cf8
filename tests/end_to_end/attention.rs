//! Attention with windows, soft caps, biases, documents and dropout, of all queries of a sample or
//! some of them: kernels against the interpreter, and decoding over a cache against the whole
//! sequence.

use ir::autodiff::differentiate;
use ir::build::Builder;
use ir::eval::eval;
use ir::text::parse_module;
use ir::{DType, Dim, Kind, Module, Tensor, TensorType, ValueId};

use crate::cli::Scratch;
use crate::draws::{Draws, seeds};
use crate::operators::compiled;

/// A form of attention at random: attributes, sizes, and the dims of its bias.
struct Form {
    attributes: Vec<(&'static str, f64)>,
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    groups: usize,
    dim: usize,
    bias: Option<Vec<usize>>,
}

impl Form {
    /// `offset` is the position of query 0, and the largest number for full attention.
    fn drawn(r: &mut Draws, queries: usize, keys: usize, offset: f64) -> Form {
        let (batch, group, groups) = (1 + r.below(3), 1 + r.below(3), 1 + r.below(3));
        let (heads, dim) = (group * groups, 1 + r.below(9));
        let mut attributes = vec![("scale", 0.6), ("group", group as f64)];
        if offset < keys as f64 && r.coin() {
            let windows = [1, 1 + r.below(keys), keys, keys + 3];
            attributes.push(("window", windows[r.below(4)] as f64));
        }
        if r.coin() {
            attributes.push(("softcap", 0.9));
        }
        let mut bias = None;
        if r.coin() {
            attributes.push(("bias", 1.0));
            let mut dims = Vec::new();
            let flags = [("bias_batch", batch), ("bias_heads", heads), ("bias_queries", queries)];
            for (flag, size) in flags {
                if r.coin() {
                    attributes.push((flag, 1.0));
                    dims.push(size);
                }
            }
            dims.push(keys);
            bias = Some(dims);
        }
        Form { attributes, batch, queries, keys, heads, groups, dim, bias }
    }

    /// `q k v [bias]`; some keys are hidden by the bias, and sometimes all of a row.
    fn operands(&self, r: &mut Draws, dtype: DType) -> Vec<Tensor> {
        let q = [self.batch, self.queries, self.heads, self.dim];
        let kv = [self.batch, self.keys, self.groups, self.dim];
        let mut operands = vec![r.signed(&q), r.signed(&kv), r.signed(&kv)];
        operands.extend(self.bias.as_ref().map(|dims| {
            let numbers = r.signed(dims).to_f64();
            let hidden = |x: f64| if r.below(4) == 0 { f64::NEG_INFINITY } else { x };
            Tensor::f64(dims, numbers.into_iter().map(hidden).collect())
        }));
        operands.iter().map(|t| Tensor::from_f64(dtype, &t.dims, t.to_f64())).collect()
    }

    fn has(&self, name: &str) -> bool {
        self.attributes.iter().any(|(attribute, _)| *attribute == name)
    }
}

/// `@f` calls a composite with all its parameters and returns its first result.
fn module_of(composite: &str, attributes: &[(&str, f64)], operands: &[Tensor]) -> Module {
    let mut module = Module::new("m");
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operand = |(at, t): (usize, &Tensor)| b.param(&format!("x{at}"), t.ty());
    let operands: Vec<ValueId> = operands.iter().enumerate().map(operand).collect();
    let results = b.composite("y", composite, attributes, &operands);
    b.finish(&results[..1]);
    module
}

fn assert_near(found: &[Vec<f64>], wanted: &[Tensor], tolerance: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let wanted = wanted.to_f64();
        let largest = wanted.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
        for (x, y) in found.iter().zip(&wanted) {
            let near = (x - y).abs() <= tolerance * largest;
            assert!(near || x == y, "{what}: result {at} is {x}, not {y}");
        }
    }
}

#[test]
fn kernels_of_all_forms_compute_what_the_interpreter_does() {
    let mut seen = [0; 6];
    for seed in seeds(80) {
        let mut r = Draws::new(seed);
        let (queries, more) = (1 + r.below(9), r.below(5));
        // Causal from a position on, or full.
        let offset = if r.below(3) == 0 { f64::from(1 << 30) } else { r.below(more + 1) as f64 };
        let mut form = Form::drawn(&mut r, queries, queries + more, offset);
        form.attributes.push(("query_offset", offset));
        let dropout = r.below(3) == 0;
        let name = if dropout { "attention_dropout" } else { "attention" };
        if dropout {
            let short = f64::from(u8::from(r.coin()));
            form.attributes.extend([("p", 0.3), ("salt", 3.0), ("heads", form.heads as f64)]);
            form.attributes.push(("short_draws", short));
        }
        // Of a sample that has as many queries as keys, or more where there are no documents.
        let before = r.below(more + 1).min(offset as usize);
        form.attributes.extend((before > 0).then_some(("query_start", before as f64)));
        if dropout && (before > 0 || r.coin()) {
            let all = before + queries + r.below(3);
            form.attributes.push(("queries", all as f64));
        }
        form.attributes.extend(r.coin().then_some(("documents", 1.0)));
        let documents = form.has("documents").then(|| r.ids(&[form.batch, form.keys], -1, 2));
        for dtype in [DType::F64, DType::F32] {
            let mut operands = form.operands(&mut r, dtype);
            operands.extend(documents.clone());
            operands.extend(dropout.then(|| r.key()));
            let mut module = module_of(name, &form.attributes, &operands);
            let what = format!("SEED={seed} {name} {dtype} {:?}", form.attributes);
            let gradient = differentiate(&mut module, "f").expect("it has a derivative");
            let out = [form.batch, form.queries, form.heads, form.dim];
            let dout = r.signed(&out).to_f64();
            operands.push(Tensor::from_f64(dtype, &out, dout));
            let found = compiled(&module, &gradient, &operands);
            let found = found.unwrap_or_else(|why| panic!("{what}: {why}"));
            let wanted = eval(&module, &gradient, &operands).expect("it evaluates");
            // The result, and a gradient for each operand.
            assert_eq!(wanted.len(), 4 + usize::from(form.bias.is_some()), "{what}");
            let tolerance = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
            assert_near(&found, &wanted, tolerance, &what);
        }
        let names = ["window", "softcap", "bias", "p", "query_start", "documents"];
        for (count, name) in seen.iter_mut().zip(names) {
            *count += usize::from(form.has(name));
        }
    }
    let enough = seen.iter().all(|count| *count >= 10) || std::env::var("SEED").is_ok();
    assert!(enough, "windows, soft caps, biases, dropouts, pieces, documents: {seen:?}");
}

/// Query by query over a cache whose later rows hold anything, and in pieces of several queries.
#[test]
fn decoding_over_a_cache_is_attention_over_the_sequence() {
    for seed in seeds(60) {
        let mut r = Draws::new(seed);
        let length = 2 + r.below(9);
        let mut form = Form::drawn(&mut r, length, length, 0.0);
        // Over a cache, a bias per query is that of the queries at hand.
        let operands = form.operands(&mut r, DType::F64);
        let cached = form.attributes.clone();
        form.attributes.push(("query_offset", 0.0));
        let whole = module_of("attention", &form.attributes, &operands);
        let wanted = eval(&whole, "f", &operands).expect("it evaluates").remove(0);
        let what = format!("SEED={seed} {:?}", form.attributes);
        let step = 1 + r.below(length);
        for from in (0..length).step_by(step) {
            let count = step.min(length - from);
            let rows = |t: &Tensor, dim: usize| part(t, dim, from, count);
            let mut local = operands.clone();
            local[0] = rows(&operands[0], 1);
            if form.has("bias_queries") {
                let dim = operands[3].dims.len() - 2;
                local[3] = rows(&operands[3], dim);
            }
            // What is not written yet is not seen.
            for cache in &mut local[1..3] {
                let mut numbers = cache.to_f64();
                let row = form.groups * form.dim;
                for (at, number) in numbers.iter_mut().enumerate() {
                    if at / row % length >= from + count {
                        *number = 1e6;
                    }
                }
                *cache = Tensor::f64(&cache.dims, numbers);
            }
            let samples = local[0].dims[0];
            local.push(Tensor::int(DType::I32, &[samples], vec![from as i64; samples]));
            let module = module_of("attention_cached", &cached, &local);
            let wanted = [rows(&wanted, 1)];
            let evaluated = eval(&module, "f", &local).expect("it evaluates");
            let numbers: Vec<Vec<f64>> = evaluated.iter().map(Tensor::to_f64).collect();
            assert_near(&numbers, &wanted, 1e-12, &format!("{what} at {from}, interpreted"));
            let found = compiled(&module, "f", &local);
            let found = found.unwrap_or_else(|why| panic!("{what}: {why}"));
            assert_near(&found, &wanted, 1e-12, &format!("{what} at {from}"));
        }
    }
}

/// `count` rows of a dim, from `from` on.
fn part(t: &Tensor, dim: usize, from: usize, count: usize) -> Tensor {
    let inner: usize = t.dims[dim + 1..].iter().product();
    let size = t.dims[dim];
    let numbers = t.to_f64().into_iter().enumerate();
    let inside = |at: usize| (from..from + count).contains(&(at / inner % size));
    let numbers = numbers.filter(|(at, _)| inside(*at)).map(|(_, number)| number).collect();
    let mut dims = t.dims.clone();
    dims[dim] = count;
    Tensor::f64(&dims, numbers)
}

/// What stands around two blocks of attention.
const ENDS: &str = "module ends
  func @embed(%tokens: i32[B, 6], %table: f32[9, 16]) {
    %x: f32[B, 6, 16] = gather dim=0 start=0 %table %tokens
    return %x
  }
  func @padding(%tokens: i32[B, 6]) {
    %five: i32[B, 6] = constant 5
    %is_padding: bool[B, 6] = lt %five %tokens
    %hidden: f32[B, 6] = constant -inf
    %shown: f32[B, 6] = constant 0
    %mask: f32[B, 6] = select %is_padding %hidden %shown
    return %mask
  }
  func @head(%x: f32[B, 6, 16], %w: f32[9, 16], %labels: i32[B, 6]) {
    %y: f32[B, 6, 9] = contract bsm,vm->bsv %x %w
    %z: f32[B, 6, 9] = sin %y
    %sum: f32[] = reduce sum dims=[0, 1, 2] %z
    %ones: f32[B] = constant 1
    %count: f32[] = reduce sum dims=[0] %ones
    return %sum %count
  }
";

fn batched(dims: &[i64]) -> TensorType {
    let dims = dims.iter().map(|d| Dim::constant(*d));
    TensorType::new(DType::F32, std::iter::once(Dim::symbol("B")).chain(dims).collect::<Vec<_>>())
}

/// Adds a block of attention with four heads and two key heads, whose bias is a parameter.
fn add_block(module: &mut Module, name: &str, form: &[(&str, f64)], bias: TensorType) {
    let mut b = Builder::new(module, name, Kind::Layer);
    let x = b.param("x", batched(&[6, 16]));
    let weights = [[4, 8, 16], [2, 8, 16], [2, 8, 16], [16, 4, 8]];
    let names = ["wq", "wk", "wv", "wo"];
    let of = |dims: [usize; 3]| TensorType::of(DType::F32, &dims);
    let [wq, wk, wv, wo] = [0, 1, 2, 3].map(|at| b.param(names[at], of(weights[at])));
    let bias = b.param("bias", bias);
    let [q, k, v] =
        [("q", wq), ("k", wk), ("v", wv)].map(|(n, w)| b.contract(n, "bsm,hdm->bshd", x, w));
    let form = [&[("scale", 0.4), ("group", 2.0), ("bias", 1.0)], form].concat();
    let mixed = b.composite("mixed", "attention", &form, &[q, k, v, bias])[0];
    let o = b.contract("o", "bshd,mhd->bsm", mixed, wo);
    let y = b.add("y", x, o);
    b.finish(&[y]);
}

/// A learned bias for each head and pair with a window and a soft cap, then a mask of padding.
fn model() -> Module {
    let mut module = parse_module("ends", ENDS).expect("it is a module");
    let near = [("query_offset", 0.0), ("window", 3.0), ("softcap", 0.7), ("bias_heads", 1.0)];
    let near = [&near[..], &[("bias_queries", 1.0)]].concat();
    add_block(&mut module, "near", &near, TensorType::of(DType::F32, &[4, 6, 6]));
    let full = [("query_offset", f64::from(1 << 30)), ("bias_batch", 1.0)];
    add_block(&mut module, "full", &full, batched(&[6]));
    let mut b = Builder::new(&mut module, "loss", Kind::Layer);
    let of = |dims: &[usize]| TensorType::of(DType::F32, dims);
    let table = b.param("table", of(&[9, 16]));
    let weights = |b: &mut Builder<'_>, block: &str| {
        [("wq", [4, 8, 16]), ("wk", [2, 8, 16]), ("wv", [2, 8, 16]), ("wo", [16, 4, 8])]
            .map(|(name, dims)| b.param(&format!("{block}.{name}"), of(&dims)))
    };
    let (near, full) = (weights(&mut b, "near"), weights(&mut b, "full"));
    let bias = b.param("near.bias", of(&[4, 6, 6]));
    let integers = TensorType { dtype: DType::I32, ..batched(&[6]) };
    let [tokens, labels] = ["tokens", "labels"].map(|name| b.param(name, integers.clone()));
    let x = b.call("x", "embed", &[tokens, table])[0];
    let mask = b.call("mask", "padding", &[tokens])[0];
    let with = |x: ValueId, w: [ValueId; 4], bias: ValueId| [&[x], &w[..], &[bias]].concat();
    let x1 = b.call("x1", "near", &with(x, near, bias))[0];
    let x2 = b.call("x2", "full", &with(x1, full, mask))[0];
    let results = b.call("loss", "head", &[x2, table, labels]);
    b.finish(&results);
    module
}

/// Biases that heads have and that they share, over tensor-parallel and data-parallel ranks.
#[test]
fn meshes_compute_what_one_rank_does() {
    let scratch = Scratch::new("attention");
    scratch.write("biased.graph", &model().to_string());
    for ranks in [2, 4] {
        let line = format!("verify biased.graph --ranks {ranks} --gbs 4 --json");
        let verdict = scratch.json(&line);
        let meshes = verdict["meshes"].as_array().expect("meshes");
        for axis in ["tp", "dp"] {
            assert!(meshes.iter().any(|mesh| mesh[axis] == 2), "no {axis}: {verdict:#}");
        }
        assert_eq!(verdict["ok"], true, "{verdict:#}");
    }
    let verdict = scratch.json("verify biased.graph --ranks 1 --json");
    assert_eq!(verdict["ok"], true, "against the interpreter: {verdict:#}");
}

/// A gradient of the learned bias is computed; one of the mask, which nobody asks for, is not.
#[test]
fn a_gradient_of_a_bias_is_computed_where_it_is_read() {
    let mut module = model();
    ir::autodiff::training_step(&mut module, "loss").expect("it has a derivative");
    assert_eq!(ir::verify::verify(&module), []);
    let called = |function: &str| -> String {
        let nodes = &module.function(function).expect("it is there").nodes;
        let callees = nodes.iter().filter_map(|node| module.function(node.callee()?));
        let attributes = callees.filter_map(|callee| match &callee.kind {
            Kind::Composite { name, attributes } if name == "attention_bwd" => Some(attributes),
            Kind::Composite { .. } | Kind::Layer | Kind::Kernel => None,
        });
        format!("{:?}", attributes.collect::<Vec<_>>())
    };
    assert!(called("near.grad").contains("bias_grad"), "{}", called("near.grad"));
    assert!(!called("full.grad").contains("bias_grad"), "{}", called("full.grad"));
    assert!(called("full.grad").contains("bias_batch"), "{}", called("full.grad"));
}
