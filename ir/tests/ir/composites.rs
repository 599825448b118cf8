//! Composites: their gradients against those of their definitions, and against differences.

use std::collections::BTreeMap;

use gantline_ir::autodiff::differentiate;
use gantline_ir::build::Builder;
use gantline_ir::eval::eval;
use gantline_ir::factors::{EXPERT_FORM, Factor, Offset, SEQUENCE_FORMS, factors_and_forms};
use gantline_ir::inline::inline_composites;
use gantline_ir::library::{Argument, templates};
use gantline_ir::module::Attributes;
use gantline_ir::op::Combiner;
use gantline_ir::sharding::{Layout, pieces};
use gantline_ir::verify::verify;
use gantline_ir::{DType, Function, Kind, Module, Op, Tensor, TensorType};

use crate::draws::{Draws, seeds};
use crate::gradients::{assert_close, differences, gradients, random_cotangents};
use crate::shardings::{piece, whole};

const TERM: Layout = Layout::Partial(Combiner::Sum);

/// Attributes and operands of a composite that has a gradient.
fn sample(name: &str, r: &mut Draws) -> (Vec<(&'static str, f64)>, Vec<Tensor>) {
    let count = 1 + r.below(3);
    let dims = r.dims(count);
    let size = 2 + r.below(4);
    let wide: Vec<usize> = dims.iter().copied().chain([size]).collect();
    let (batch, rows, heads, groups) =
        (1 + r.below(2), 1 + r.below(4), 1 + r.below(3), 1 + r.below(2));
    // Attention may have some of the queries of its sample.
    let before = if name.starts_with("attention") { r.below(3) } else { 0 };
    let keys = rows + before + if before > 0 { r.below(2) } else { 0 };
    let (q, kv) = ([batch, rows, heads * groups, 4], [batch, keys, groups, 4]);
    let offset = if r.coin() { before as f64 } else { 1000.0 };
    let mut attention = vec![("scale", 0.7), ("group", heads as f64), ("query_offset", offset)];
    let mut of_attention = vec![r.signed(&q), r.signed(&kv), r.signed(&kv)];
    if name.starts_with("attention") {
        let sizes = [batch, heads * groups, rows, keys];
        of_attention.extend(extend_attention(&mut attention, sizes, r));
        attention.push(("query_start", before as f64));
    }
    match name {
        "layer_norm" => {
            (vec![("eps", 0.1)], vec![r.signed(&wide), r.signed(&[size]), r.signed(&[size])])
        }
        "rms_norm" => (vec![("eps", 0.1)], vec![r.signed(&wide), r.signed(&[size])]),
        "softmax" | "gelu_tanh" | "gelu_erf" | "silu" | "relu" => (vec![], vec![r.signed(&wide)]),
        "dropout" => {
            let short = f64::from(u8::from(r.coin()));
            let attributes = vec![("p", 0.3), ("salt", 5.0), ("short_draws", short)];
            (attributes, vec![r.signed(&wide), r.key()])
        }
        "cross_entropy" => (vec![], vec![r.signed(&wide), r.ids(&dims, -1, size as i64)]),
        "attention" => (attention, of_attention),
        "attention_dropout" => {
            let all = (heads * groups) as f64;
            let short = f64::from(u8::from(r.coin()));
            attention.extend([("p", 0.3), ("salt", 7.0), ("heads", all), ("short_draws", short)]);
            let queries = before + rows + r.below(3);
            attention.extend((before > 0 || r.coin()).then_some(("queries", queries as f64)));
            of_attention.push(r.key());
            (attention, of_attention)
        }
        "rope" => {
            let by_sample = r.coin();
            let at = r.ids(if by_sample { &q[..1] } else { &[] }, 0, 9);
            let by_sample = f64::from(u8::from(by_sample));
            (vec![("theta", 100.0), ("by_sample", by_sample)], vec![r.signed(&q), at])
        }
        "rope_scaled" => {
            let scaling = [("by_pair", 0.3), ("by_frequency", 0.2), ("stretch", -0.75)];
            let attributes = [("theta", 100.0), ("offset", 0.1), ("gain", 1.2)];
            let by_sample = r.coin();
            let at = r.ids(if by_sample { &q[..1] } else { &[] }, 0, 9);
            let by_sample = ("by_sample", f64::from(u8::from(by_sample)));
            let attributes = attributes.into_iter().chain(scaling).chain([by_sample]).collect();
            (attributes, vec![r.signed(&q), at])
        }
        "experts" => {
            let (model, inner, count) = (1 + r.below(4), 1 + r.below(4), 1 + r.below(4));
            let wide = [count, inner, model];
            let gates = r.signed(&[batch, rows, count]);
            let [gate, up] = [r.signed(&wide), r.signed(&wide)];
            let down = r.signed(&[count, model, inner]);
            (vec![("top_k", 1.0)], vec![r.signed(&[batch, rows, model]), gates, gate, up, down])
        }
        _ => panic!("`{name}` has a gradient and needs a sample here"),
    }
}

/// A window, a soft cap, a bias and documents, each in half of the samples; some keys are hidden by
/// the bias, and sometimes all of a row. Documents are numbered in no order.
fn extend_attention(
    attributes: &mut Vec<(&'static str, f64)>,
    [batch, heads, rows, keys]: [usize; 4],
    r: &mut Draws,
) -> Vec<Tensor> {
    if r.coin() && attributes[2] != ("query_offset", 1000.0) {
        attributes.push(("window", (1 + r.below(rows)) as f64));
    }
    if r.coin() {
        attributes.push(("softcap", 1.5));
    }
    let mut operands = Vec::new();
    if r.coin() {
        operands.push(random_bias(attributes, [batch, heads, rows, keys], r));
    }
    if r.coin() {
        attributes.push(("documents", 1.0));
        operands.push(r.ids(&[batch, keys], -1, 2));
    }
    operands
}

fn random_bias(
    attributes: &mut Vec<(&'static str, f64)>,
    [batch, heads, rows, keys]: [usize; 4],
    r: &mut Draws,
) -> Tensor {
    attributes.push(("bias", 1.0));
    let mut dims = Vec::new();
    let flags = [("bias_batch", batch), ("bias_heads", heads), ("bias_queries", rows)];
    for (flag, size) in flags {
        if r.coin() {
            attributes.push((flag, 1.0));
            dims.push(size);
        }
    }
    dims.push(keys);
    let numbers = r.signed(&dims).to_f64();
    let hidden = |x: f64| if r.below(4) == 0 { f64::NEG_INFINITY } else { x };
    Tensor::f64(&dims, numbers.into_iter().map(hidden).collect())
}

/// `@f` calls the composite and returns the results whose cotangents its gradient takes.
fn module_of(name: &str, attributes: &[(&str, f64)], operands: &[Tensor]) -> Module {
    let mut module = Module::new(name);
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operand = |(at, t): (usize, &Tensor)| b.param(&format!("x{at}"), t.ty());
    let operands: Vec<_> = operands.iter().enumerate().map(operand).collect();
    let results = b.composite("y", name, attributes, &operands);
    let given = attributes.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect();
    let gradient = templates()[name].definition(&given).gradient.clone().unwrap();
    let callee: &Function = b.module().functions.iter().find(|f| f.name == name).unwrap();
    let taken = |at: usize| {
        let name = callee.value(callee.results[at]).name.clone();
        gradient.arguments.contains(&Argument::Cotangent(name))
    };
    let wanted: Vec<_> = (0..results.len()).filter(|at| taken(*at)).map(|at| results[at]).collect();
    b.finish(&wanted);
    module
}

fn calls(module: &Module, function: &str) -> Vec<String> {
    let nodes = &module.function(function).unwrap().nodes;
    let callee =
        |op: &Op| if let Op::Call { function } = op { Some(function.clone()) } else { None };
    nodes.iter().filter_map(|n| callee(&n.op)).collect()
}

#[test]
fn gradient_composites_are_those_of_the_definitions() {
    for seed in seeds(30) {
        let mut r = Draws::new(seed);
        for template in templates().values() {
            let plain = template.definition(&Attributes::new()).gradient.clone();
            let Some(gradient) = plain else { continue };
            if template.name == "shut_gradient" {
                // Its gradient is another than that of its definition: that is what it is for.
                continue;
            }
            let (attributes, operands) = sample(&template.name, &mut r);
            let mut module = module_of(&template.name, &attributes, &operands);
            let what = format!("SEED={seed} {}", template.name);
            let mut inlined = module.clone();
            assert!(inline_composites(&mut inlined, |_| false), "{what}");
            let results = eval(&module, "f", &operands).unwrap();
            assert_eq!(results, eval(&inlined, "f", &operands).unwrap(), "{what}");
            let d = random_cotangents(&mut r, &results);
            let found = gradients(&mut module, "f", &operands, &d);
            let called = calls(&module, "f.grad");
            let is_instance = |name: &String| name.starts_with(&gradient.callee);
            assert!(called.iter().skip(1).any(is_instance), "{what} calls {called:?}");
            let wanted = gradients(&mut inlined, "f", &operands, &d);
            assert_close(&found, &wanted, 1e-10, &what);
            let differences = differences(&inlined, "f", &operands, &d);
            assert_close(&wanted, &differences, 1e-6, &what);
        }
    }
}

#[test]
fn a_gradient_is_zero_where_it_is_shut() {
    let mut r = Draws::new(11);
    let (x, d) = (r.signed(&[3, 4]), r.signed(&[3, 4]));
    let is_shut = |at: usize| at.is_multiple_of(3);
    let shut = Tensor::bool(&[3, 4], (0..12).map(is_shut).collect());
    let operands = [x.clone(), shut];
    let mut module = module_of("shut_gradient", &[], &operands);
    assert_eq!(eval(&module, "f", &operands).unwrap(), [x]);
    let found = gradients(&mut module, "f", &operands, std::slice::from_ref(&d));
    let open = |(at, d): (usize, f64)| if is_shut(at) { 0.0 } else { d };
    let wanted: Vec<f64> = d.to_f64().into_iter().enumerate().map(open).collect();
    assert_eq!(found[0].to_f64(), wanted);
}

#[test]
fn a_cotangent_of_a_residual_inlines_the_composite() {
    let mut r = Draws::new(3);
    let mut module = Module::new("m");
    let (x, w) = (r.signed(&[3, 4]), r.signed(&[4]));
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operands = [b.param("x", x.ty()), b.param("w", w.ty())];
    let results = b.composite("y", "rms_norm", &[("eps", 0.1)], &operands);
    b.finish(&results);
    let args = [x, w];
    let d = random_cotangents(&mut r, &eval(&module, "f", &args).unwrap());
    let found = gradients(&mut module, "f", &args, &d);
    assert_eq!(calls(&module, "f.grad"), [""; 0]);
    assert_close(&found, &differences(&module, "f", &args, &d), 1e-6, "rms_norm with rstd");
    assert_eq!(differentiate(&mut module, "f").unwrap(), "f.grad");
}

/// `@f` is a composite of these operands, with all its results.
fn call_of(name: &str, attributes: &[(&str, f64)], operands: &[Tensor]) -> Module {
    let mut module = Module::new(name);
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operand = |(at, t): (usize, &Tensor)| b.param(&format!("x{at}"), t.ty());
    let operands: Vec<_> = operands.iter().enumerate().map(operand).collect();
    let results = b.composite("y", name, attributes, &operands);
    b.finish(&results);
    module
}

/// A gate that is 0 has the gradient 0; all other gradients are those of the definition.
#[test]
fn gates_that_are_zero_have_no_gradient() {
    let mut hidden = 0;
    for seed in seeds(20) {
        let mut r = Draws::new(seed);
        let (attributes, mut operands) = sample("experts", &mut r);
        let dims = operands[1].dims.clone();
        let gates = operands[1].to_f64().into_iter();
        let gates: Vec<f64> = gates.map(|gate| if r.coin() { gate } else { 0.0 }).collect();
        operands[1] = Tensor::f64(&dims, gates.clone());
        let mut module = module_of("experts", &attributes, &operands);
        let mut inlined = module.clone();
        assert!(inline_composites(&mut inlined, |_| false));
        let d = random_cotangents(&mut r, &eval(&module, "f", &operands).unwrap());
        let found = gradients(&mut module, "f", &operands, &d);
        let mut wanted = gradients(&mut inlined, "f", &operands, &d);
        let of_gates = wanted[1].to_f64().into_iter().zip(&gates);
        let of_gates = of_gates.map(|(x, gate)| if *gate == 0.0 { 0.0 } else { x }).collect();
        wanted[1] = Tensor::f64(&dims, of_gates);
        assert_close(&found, &wanted, 1e-10, &format!("SEED={seed}"));
        hidden += gates.iter().filter(|gate| **gate == 0.0).count();
    }
    assert!(hidden > 0, "no gate was 0");
}

/// Over samples, tokens, what is inside an expert, and experts: pieces make the whole. Over experts
/// the gates are cut as well, which is what ranks that share them send each other.
#[test]
fn experts_in_pieces_are_experts() {
    for seed in seeds(20) {
        let mut r = Draws::new(seed);
        let (attributes, mut operands) = sample("experts", &mut r);
        let forward = eval(&call_of("experts", &attributes, &operands), "f", &operands).unwrap();
        for name in ["experts", "experts_bwd"] {
            if name == "experts_bwd" {
                operands.push(r.signed(&forward[0].dims));
            }
            let module = call_of(name, &attributes, &operands);
            let function = module.function("f").unwrap();
            let results = eval(&module, "f", &operands).unwrap();
            let all = factors_and_forms(&function.nodes[0], function, &module, &[EXPERT_FORM]);
            assert_eq!(all.len(), 4, "batch, tokens, inner, dispatch");
            for (number, mut factor) in all.into_iter().enumerate() {
                let is_form = number == 3;
                if is_form {
                    factor.operands[1] = Layout::cut(2);
                    let first = if name == "experts" { TERM } else { Layout::cut(2) };
                    factor.results[usize::from(name != "experts")] = first;
                    factor.results[0] = TERM;
                }
                let ranks = factor.units.as_constant().unwrap() as usize;
                let of_rank = |rank: usize| {
                    let layouts = operands.iter().zip(&factor.operands);
                    let local: Vec<_> = layouts.map(|(x, l)| piece(x, *l, ranks, rank)).collect();
                    eval(&call_of(name, &attributes, &local), "f", &local).unwrap()
                };
                let of_ranks: Vec<Vec<Tensor>> = (0..ranks).map(of_rank).collect();
                for (at, (result, layout)) in results.iter().zip(&factor.results).enumerate() {
                    let parts: Vec<Tensor> = of_ranks.iter().map(|of| of[at].clone()).collect();
                    let off = whole(&parts, *layout).max_relative_difference(result);
                    assert!(off <= 1e-12, "SEED={seed} {name} {factor:?}: {at} is off by {off}");
                }
            }
        }
    }
}

/// Adds where a piece of a factor begins, in units, to the attributes that count from there.
fn add_offsets(attributes: &mut Vec<(&'static str, f64)>, factor: &Factor, start: usize) {
    let units = factor.units.as_constant().unwrap() as usize;
    for (offset, units) in factor.offsets_at(start, units) {
        let (Offset::Attribute { name, unit } | Offset::Whole { name, unit }) = &offset else {
            panic!("{offset:?}");
        };
        let number = (units * *unit as i64) as f64;
        let known = ["head_offset", "kv_offset", "query_offset", "query_start", "queries"];
        let known = known.into_iter().find(|known| known == name).unwrap();
        match attributes.iter_mut().find(|(of, _)| of == name) {
            Some(_) if known == "queries" => {}
            Some((_, before)) => *before += number,
            None => attributes.push((known, number)),
        }
    }
}

/// Over samples, heads and queries, with biases that have these dims and that share them, within
/// documents and with dropout: pieces make the whole, and gradients of what is shared are terms of
/// a sum.
#[test]
fn attention_in_pieces_is_attention() {
    let mut cut = BTreeMap::new();
    for seed in seeds(80) {
        let mut r = Draws::new(seed);
        for (forward, backward) in
            [("attention", "attention_bwd"), ("attention_dropout", "attention_dropout_bwd")]
        {
            let (mut attributes, operands) = sample(forward, &mut r);
            let results = check_pieces(forward, &attributes, &operands, (seed, &mut cut), &mut r);
            let has_key = usize::from(forward == "attention_dropout");
            let dout = r.signed(&results[0].dims);
            let (taken, key) = operands.split_at(operands.len() - has_key);
            let forward_results = [results[0].clone(), results[1].clone(), dout];
            let of_gradient = [taken, &forward_results[..], key].concat();
            let with_bias = attributes.contains(&("bias", 1.0));
            attributes.extend(with_bias.then_some(("bias_grad", 1.0)));
            check_pieces(backward, &attributes, &of_gradient, (seed, &mut cut), &mut r);
            if has_key == 0 {
                let not_cached = ["query_offset", "query_start", "documents", "bias_grad"];
                attributes.retain(|(name, _)| !not_cached.contains(name));
                let mut operands = operands[..if with_bias { 4 } else { 3 }].to_vec();
                operands.push(r.ids(&operands[0].dims[..1], 0, 3));
                let name = "attention_cached";
                check_pieces(name, &attributes, &operands, (seed, &mut cut), &mut r);
            }
        }
    }
    if std::env::var("SEED").is_err() {
        // A cache has no queries to cut; all others have documents, two of them draws.
        assert_eq!(cut.len(), 5 * 4 - 1 + 4 + 2, "{cut:?}");
        assert!(cut.values().all(|count| *count >= 10), "{cut:?}");
    }
}

/// How often each factor was cut, by its name: those of queries within documents and with draws of
/// 16 bits are counted apart.
type Cut = BTreeMap<String, usize>;

/// Cuts a call over two or three ranks along each of its factors and forms; returns its results.
fn check_pieces(
    name: &str,
    attributes: &[(&'static str, f64)],
    operands: &[Tensor],
    (seed, cut): (u64, &mut Cut),
    r: &mut Draws,
) -> Vec<Tensor> {
    let module = call_of(name, attributes, operands);
    let function = module.function("f").unwrap();
    let results = eval(&module, "f", operands).unwrap();
    let all = factors_and_forms(&function.nodes[0], function, &module, &SEQUENCE_FORMS);
    for (number, factor) in all.iter().enumerate() {
        let units = factor.units.as_constant().unwrap() as usize;
        let ranks = 2 + r.below(2);
        let Some(starts) = pieces(units, 1, ranks).filter(|_| units >= ranks) else { continue };
        *cut.entry(format!("{name} {number}")).or_default() += 1;
        for flag in ["documents", "short_draws"] {
            if number == 3 && attributes.contains(&(flag, 1.0)) {
                *cut.entry(format!("{name} {number} {flag}")).or_default() += 1;
            }
        }
        let of_rank = |rank: usize| {
            let layouts = operands.iter().zip(&factor.operands);
            let mut local: Vec<Tensor> =
                layouts.map(|(x, layout)| piece(x, *layout, ranks, rank)).collect();
            let mut attributes = attributes.to_vec();
            if name.starts_with("attention_dropout") {
                let is_batch = number == 0;
                let key = local.last_mut().expect("the key is the last operand");
                let first = if is_batch { starts[rank].start } else { 0 };
                *key = moved(key, first);
            }
            add_offsets(&mut attributes, factor, starts[rank].start);
            eval(&call_of(name, &attributes, &local), "f", &local).unwrap()
        };
        let of_ranks: Vec<Vec<Tensor>> = (0..ranks).map(of_rank).collect();
        for (at, (result, layout)) in results.iter().zip(&factor.results).enumerate() {
            let parts: Vec<Tensor> = of_ranks.iter().map(|of| of[at].clone()).collect();
            let off = whole(&parts, *layout).max_relative_difference(result);
            let what = format!("SEED={seed} {name} {attributes:?} {factor:?}");
            assert!(off <= 1e-12, "{what}: result {at} is off by {off}");
        }
    }
    results
}

/// The key of samples that begin later.
fn moved(key: &Tensor, samples: usize) -> Tensor {
    let mut words: Vec<i64> = key.to_f64().into_iter().map(|word| word as i64).collect();
    words[3] += samples as i64;
    Tensor::int(DType::U32, &[4], words)
}

/// A piece lies within the queries of its sample, and so within its numbers of documents.
#[test]
fn pieces_of_queries_are_within_their_sample() {
    let ty = |dims: &[usize]| TensorType::of(DType::F64, dims);
    let (q, kv) = (ty(&[2, 3, 4, 2]), ty(&[2, 5, 2, 2]));
    let key = TensorType::of(DType::U32, &[4]);
    let document = TensorType::of(DType::I32, &[2, 5]);
    let refused = |name: &str, more: &[(&str, f64)], operand: Option<&TensorType>| {
        let base = [("scale", 1.0), ("group", 2.0), ("query_offset", 9.0)];
        let dropout = [("p", 0.1), ("salt", 1.0), ("heads", 4.0)];
        let is_dropout = name == "attention_dropout";
        let attributes = base.iter().chain(dropout.iter().filter(|_| is_dropout)).chain(more);
        let types = [&q, &kv, &kv].into_iter().chain(operand).chain(is_dropout.then_some(&key));
        let types: Vec<TensorType> = types.cloned().collect();
        let attributes = attributes.map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let mut module = Module::new("m");
        assert!(module.composite(name, &attributes, &types).is_some(), "{attributes:?}");
        let found = verify(&module);
        found.iter().map(|d| d.headline.clone()).collect::<Vec<_>>()
    };
    let packed = |start: f64| {
        refused("attention", &[("documents", 1.0), ("query_start", start)], Some(&document))
    };
    assert_eq!(packed(0.0), [""; 0]);
    assert_eq!(packed(2.0), [""; 0]);
    let wrong = "`query_start` is 3, and `attention` needs query_start + S <= N";
    assert_eq!(packed(3.0), [wrong]);
    assert_eq!(packed(1.5), ["`query_start` is 1.5, and `attention` needs a whole number"]);
    let dropped = |start: f64, queries: f64| {
        refused("attention_dropout", &[("query_start", start), ("queries", queries)], None)
    };
    assert_eq!(dropped(0.0, 0.0), [""; 0]);
    assert_eq!(dropped(4.0, 7.0), [""; 0]);
    assert!(!dropped(5.0, 7.0).is_empty());
    assert!(!dropped(1.0, 0.0).is_empty());
}
