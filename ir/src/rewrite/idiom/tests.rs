//! Composites inlined and found again, in models and one by one; what must not be found.

#![allow(clippy::wildcard_enum_match_arm, reason = "only some ops are changed")]

use super::recognisable;
use crate::build::Builder;
use crate::eval::eval;
use crate::import::{DecodingOptions, LogitsOf, Options, decoding, import, preset};
use crate::inline::inline_composites;
use crate::library::Template;
use crate::library::bounds::Bound;
use crate::library::check::faults;
use crate::module::{Function, Kind, Module, ValueId};
use crate::op::{Binary, Combiner, Comparison, Op, Unary};
use crate::random::{mix, uniform};
use crate::rewrite::saturate::Selection;
use crate::rewrite::{Options as Rules, simplify};
use crate::verify::verify;
use crate::{DType, Tensor, TensorType, text::parse_module};

/// All rules, without what is recognised before them.
fn rules_alone() -> Rules {
    let selection = Selection { by_meaning: false, ..Selection::default() };
    Rules { selection, ..Rules::default() }
}

/// What models are prepared with: definitions are found before what computes the same.
fn by_meaning() -> Rules {
    Rules { selection: Selection::for_models(), ..Rules::default() }
}

/// The calls of composites in each function that is none: function, composite, attributes, types.
fn calls(module: &Module) -> Vec<String> {
    let mut calls = Vec::new();
    for function in &module.functions {
        for node in &function.nodes {
            let Op::Call { function: callee } = &node.op else { continue };
            let callee = module.function(callee).unwrap();
            if let Kind::Composite { name, attributes } = &callee.kind {
                let types = callee.param_types();
                let types: Vec<String> = types.iter().map(ToString::to_string).collect();
                calls.push(format!("{} {name} {attributes:?} {types:?}", function.name));
            }
        }
    }
    calls.sort();
    calls
}

fn check(module: &Module) {
    let mut inlined = module.clone();
    inline_composites(&mut inlined, |_| false);
    assert!(calls(&inlined).is_empty());
    let mut found = inlined.clone();
    simplify(&mut found, &rules_alone());
    assert_eq!(verify(&found), [], "{found}");
    assert_eq!(calls(&found), calls(module), "{found}");
    let mut meant = inlined.clone();
    simplify(&mut meant, &by_meaning());
    assert_eq!(calls(&meant), calls(module), "{meant}");
    let printed = found.to_string();
    assert_eq!(parse_module("found", &printed).unwrap(), found);
}

#[test]
fn composites_of_models_are_found_again_after_inlining() {
    for name in ["gpt2", "llama-3-8b"] {
        for dropout in [0.0, 0.1] {
            let options =
                Options { seq: 32, dtype: DType::F32, dropout: Some(dropout), documents: false };
            check(&import(&preset(name).unwrap(), &options).unwrap().module);
        }
        let logits = LogitsOf::Last;
        let options = DecodingOptions { tokens: 4, capacity: 32, dtype: DType::F32, logits };
        check(&decoding(&preset(name).unwrap(), &options).unwrap().model.module);
    }
}

#[test]
fn every_composite_of_the_library_is_found_in_its_own_definition() {
    for template in recognisable() {
        let (given, types) = within_bounds(template, 12, 3);
        let mut module = Module::new("m");
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let operands: Vec<ValueId> =
            types.into_iter().enumerate().map(|(at, ty)| b.param(&format!("p{at}"), ty)).collect();
        let results = b.composite("y", &template.name, &given, &operands);
        b.finish(&results);
        check(&module);
    }
}

/// How many instances of each template are tried.
const INSTANCES: u64 = 200;

/// Sizes and attributes at random: the composite is found, and computes the same.
#[test]
fn every_composite_is_found_in_random_instances() {
    for template in recognisable() {
        for seed in 0..INSTANCES {
            let module = instance(template, seed);
            let mut inlined = module.clone();
            inline_composites(&mut inlined, |_| false);
            let mut found = inlined.clone();
            simplify(&mut found, &rules_alone());
            let name = |call: &String| call.split(' ').nth(1).map(str::to_owned);
            let names = |module: &Module| calls(module).iter().map(name).collect::<Vec<_>>();
            assert_eq!(names(&found), names(&module), "seed {seed}\n{inlined}{found}");
            if seed < INSTANCES / 5 {
                let mut meant = inlined.clone();
                simplify(&mut meant, &by_meaning());
                assert_eq!(calls(&meant), calls(&found), "seed {seed}\n{inlined}{meant}");
            }
            if seed < 4 {
                let types = module.functions.last().unwrap().param_types();
                let args =
                    types.iter().enumerate().map(|(at, ty)| argument(ty, mix(seed) ^ at as u64));
                let args: Vec<Tensor> = args.collect();
                let Ok(before) = eval(&inlined, "f", &args) else { continue };
                for (a, b) in before.iter().zip(&eval(&found, "f", &args).unwrap()) {
                    let difference = b.max_relative_difference(a);
                    assert!(
                        difference.is_nan() || difference < 1e-4,
                        "{} seed {seed}: {difference}",
                        template.name
                    );
                }
            }
        }
    }
}

/// A function that calls a composite, of sizes and with attributes that a seed decides.
fn instance(template: &'static Template, seed: u64) -> Module {
    let smallest = 2 + 2 * (mix(mix(seed)) % 5) as i64;
    let (given, types) = within_bounds(template, smallest, seed);
    let mut module = Module::new("m");
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operands: Vec<ValueId> =
        types.into_iter().enumerate().map(|(at, ty)| b.param(&format!("p{at}"), ty)).collect();
    let results = b.composite("y", &template.name, &given, &operands);
    b.finish(&results);
    module
}

/// Attributes of a template that a seed decides, the first that keep to its bounds, and types that
/// operands may have then. Optional attributes are left out.
fn within_bounds(
    template: &'static Template,
    smallest: i64,
    seed: u64,
) -> (Vec<(&'static str, f64)>, Vec<TensorType>) {
    let definition = template.definition(&[].into());
    let types = definition.sample_types(smallest);
    let draw = |name: &String, word: u64| {
        let either = definition.bounds.iter().find_map(|bound| match bound {
            Bound::Either { attribute, values } if attribute == name => Some(values),
            _ => None,
        });
        match either {
            Some(values) => values[(word % values.len() as u64) as usize],
            None if name == "heads" => (30 + word % 7) as f64,
            None if definition.bounds.contains(&Bound::Whole(name.clone())) => {
                (1 + word % 7) as f64
            }
            None => 0.1 + f64::from(uniform(seed, word)),
        }
    };
    let attempt = |again: u64| {
        let names = template.attributes.iter().map(|(name, _)| name);
        let drawn = names.filter(|name| !template.is_optional(name)).zip(1..);
        let word = |at: u64| mix(mix(seed << 16 | again) ^ at);
        drawn.map(|(name, at)| (name.as_str(), draw(name, word(at)))).collect::<Vec<_>>()
    };
    let is_within = |given: &Vec<(&str, f64)>| {
        let given = given.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        faults(&template.name, &given, &types).is_empty()
    };
    let found = (0..10_000).map(attempt).find(is_within);
    let found =
        found.unwrap_or_else(|| panic!("nothing is within the bounds of `{}`", template.name));
    (found, types)
}

#[test]
fn recognised_modules_compute_the_same_bits() {
    let options = Options { seq: 4, dtype: DType::F64, dropout: Some(0.0), documents: false };
    let mut model = import(&preset("gpt2-mini").unwrap(), &options).unwrap();
    let ids = |x: &[i64]| Tensor::int(DType::I32, &[1, 4], x.to_vec());
    let mut args: Vec<Tensor> = Vec::new();
    for (seed, weight) in model.weights.iter().enumerate() {
        let draw = |at: usize| f64::from(crate::random::uniform(seed as u64, at as u64)) / 8.0;
        let count = weight.count() as usize;
        args.push(Tensor::f64(&weight.dims, (0..count).map(draw).collect()));
    }
    args.extend([ids(&[5, 6, 7, 8]), ids(&[6, 7, 8, -1])]);
    let before = eval(&model.module, "loss", &args).unwrap();
    inline_composites(&mut model.module, |_| false);
    simplify(&mut model.module, &exact());
    assert_eq!(eval(&model.module, "loss", &args).unwrap(), before);
}

/// Rules that keep every bit.
fn exact() -> Rules {
    let selection = Selection::exact();
    Rules { selection, ..Rules::default() }
}

/// What becomes of one function.
fn recognised(body: &str) -> String {
    let mut module = parse_module("m", &format!("module m\n{body}")).unwrap();
    simplify(&mut module, &rules_alone());
    module.functions.last().unwrap().to_string()
}

#[test]
fn operands_may_be_swapped_and_letters_be_others() {
    let text = recognised(
        "  func @f(%x: f32[2, 6], %w: f32[6, 8]) {
    %h: f32[2, 8] = contract qr,pq->pr %w %x
    %one: f32[2, 8] = constant 1
    %n: f32[2, 8] = neg %h
    %e: f32[2, 8] = exp %n
    %d: f32[2, 8] = add %e %one
    %y: f32[2, 8] = div %h %d
    return %y
  }
",
    );
    assert!(text.contains("%y: f32[2, 8] = call @silu %h"), "{text}");
    assert!(!text.contains("exp"), "{text}");
}

const SOFTMAX: &str = "  func @f(%x: f32[2, 6]) {
    %max: f32[2] = reduce max dims=[1] %x
    %max_m: f32[2, 6] = broadcast new=[1] %max
    %shifted: f32[2, 6] = sub %x %max_m
    %e: f32[2, 6] = exp %shifted
    %sum: f32[2] = reduce sum dims=[1] %e
    %sum_m: f32[2, 6] = broadcast new=[1] %sum
    %y: f32[2, 6] = div %e %sum_m
    return %y
  }
";

#[test]
fn a_sum_over_another_dim_is_no_softmax() {
    assert!(recognised(SOFTMAX).contains("call @softmax %x"));
    let other = SOFTMAX.replace("reduce sum dims=[1]", "reduce min dims=[1]");
    assert!(!recognised(&other).contains("call"));
    let other = SOFTMAX.replace("f32[2, 6]", "f32[6, 6]").replace("f32[2]", "f32[6]");
    let other = other
        .replace("%sum_m: f32[6, 6] = broadcast new=[1]", "%sum_m: f32[6, 6] = broadcast new=[0]");
    assert!(!recognised(&other).contains("call"));
}

/// What a call needs may depend on a value inside of it: that one is computed apart then.
#[test]
fn a_call_never_needs_its_own_result() {
    let text = "module m
  func @f(%x: f64[6, 6], %b: f64[6]) {
    %n: f64[6] = constant 6
    %e: f64[6] = constant 0.5
    %square: f64[6, 6] = mul %x %x
    %square_sum: f64[6] = reduce sum dims=[1] %square
    %mean: f64[6] = div %square_sum %n
    %mean_e: f64[6] = add %mean %e
    %rstd: f64[6] = rsqrt %mean_e
    %w: f64[6] = mul %rstd %b
    %rstd_m: f64[6, 6] = broadcast new=[1] %rstd
    %normal: f64[6, 6] = mul %x %rstd_m
    %w_m: f64[6, 6] = broadcast new=[0] %w
    %y: f64[6, 6] = mul %normal %w_m
    return %y %square
  }
";
    let before = parse_module("m", text).unwrap();
    let mut after = before.clone();
    simplify(&mut after, &exact());
    assert_eq!(verify(&after), [], "{after}");
    let args = [[6, 6].as_slice(), &[6]].map(|dims| argument(&TensorType::of(DType::F64, dims), 3));
    assert_eq!(eval(&after, "f", &args).unwrap(), eval(&before, "f", &args).unwrap(), "{after}");
}

/// Norms and activations as other frameworks export them.
#[test]
fn other_spellings_are_found_by_rules() {
    let text = recognised(
        "  func @f(%x: f32[2, 6], %w: f32[6], %b: f32[6]) {
    %n: f32[2] = constant 6
    %e: f32[2] = constant 0.5
    %sum: f32[2] = reduce sum dims=[1] %x
    %mean: f32[2] = div %sum %n
    %mean_m: f32[2, 6] = broadcast new=[1] %mean
    %centred: f32[2, 6] = sub %x %mean_m
    %two: f32[2, 6] = constant 2
    %square: f32[2, 6] = pow %centred %two
    %square_sum: f32[2] = reduce sum dims=[1] %square
    %variance: f32[2] = div %square_sum %n
    %variance_e: f32[2] = add %e %variance
    %std: f32[2] = sqrt %variance_e
    %std_m: f32[2, 6] = broadcast new=[1] %std
    %normal: f32[2, 6] = div %centred %std_m
    %w_m: f32[2, 6] = broadcast new=[0] %w
    %b_m: f32[2, 6] = broadcast new=[0] %b
    %scaled: f32[2, 6] = mul %w_m %normal
    %y: f32[2, 6] = add %scaled %b_m
    return %y
  }
",
    );
    assert!(
        text.contains("%y: f32[2, 6], ") && text.contains("call @layer_norm %x %w %b"),
        "{text}"
    );
    let text = recognised(
        "  func @f(%x: f32[2, 6]) {
    %half: f32[2, 6] = constant 0.5
    %one: f32[2, 6] = constant 1
    %scale: f32[2, 6] = constant 0.7071067811865476
    %u: f32[2, 6] = mul %x %scale
    %e: f32[2, 6] = erf %u
    %s: f32[2, 6] = add %e %one
    %h: f32[2, 6] = mul %s %x
    %y: f32[2, 6] = mul %h %half
    return %y
  }
",
    );
    assert!(text.contains("call @gelu_erf %x"), "{text}");
    let text = recognised(
        "  func @f(%x: f32[2, 6]) {
    %one: f32[2, 6] = constant 1
    %n: f32[2, 6] = neg %x
    %e: f32[2, 6] = exp %n
    %d: f32[2, 6] = add %e %one
    %s: f32[2, 6] = div %one %d
    %y: f32[2, 6] = mul %s %x
    return %y
  }
",
    );
    assert!(text.contains("call @silu %x"), "{text}");
}

/// Attention without masks and shared heads, in the layout and order of other frameworks.
#[test]
fn attention_is_found_in_other_layouts() {
    let text = |mask: &str| {
        format!(
            "  func @f(%q: f32[2, 6, 4, 16], %k: f32[2, 6, 4, 16], %v: f32[2, 6, 4, 16]) {{
    %qt: f32[2, 4, 6, 16] = transpose perm=[0, 2, 1, 3] %q
    %kt: f32[2, 4, 6, 16] = transpose perm=[0, 2, 1, 3] %k
    %vt: f32[2, 4, 6, 16] = transpose perm=[0, 2, 1, 3] %v
    %dot: f32[2, 4, 6, 6] = contract bhsd,bhnd->bhsn %qt %kt
    %c: f32[2, 4, 6, 6] = constant 4
    %scores: f32[2, 4, 6, 6] = div %dot %c
{mask}    %max: f32[2, 4, 6] = reduce max dims=[3] %masked
    %max_n: f32[2, 4, 6, 6] = broadcast new=[3] %max
    %shifted: f32[2, 4, 6, 6] = sub %masked %max_n
    %e: f32[2, 4, 6, 6] = exp %shifted
    %sum: f32[2, 4, 6] = reduce sum dims=[3] %e
    %sum_n: f32[2, 4, 6, 6] = broadcast new=[3] %sum
    %p: f32[2, 4, 6, 6] = div %e %sum_n
    %o: f32[2, 4, 6, 16] = contract bhsn,bhnd->bhsd %p %vt
    %y: f32[2, 6, 4, 16] = transpose perm=[0, 2, 1, 3] %o
    return %y
  }}
"
        )
    };
    let causal = |start: &str| {
        format!(
            "    %i: i32[2, 4, 6, 6] = iota dim=2 start={start}
    %j: i32[2, 4, 6, 6] = iota dim=3
    %seen: i1[2, 4, 6, 6] = le %j %i
    %hidden: f32[2, 4, 6, 6] = constant -inf
    %masked: f32[2, 4, 6, 6] = select %seen %scores %hidden
"
        )
        .replace("i1[", "bool[")
    };
    let found = |text: &str| {
        let mut module = parse_module("m", &format!("module m\n{text}")).unwrap();
        let before = module.clone();
        simplify(&mut module, &rules_alone());
        assert_eq!(verify(&module), []);
        let ty = TensorType::of(DType::F32, &[2, 6, 4, 16]);
        let args: Vec<Tensor> = (0..3).map(|seed| argument(&ty, mix(seed))).collect();
        let (a, b) = (eval(&before, "f", &args).unwrap(), eval(&module, "f", &args).unwrap());
        assert!(b[0].max_relative_difference(&a[0]) < 1e-5, "{module}");
        module.to_string()
    };
    let full = found(&text("").replace("%masked", "%scores"));
    assert!(full.contains("query_offset=1073741824"), "{full}");
    let start = found(&text(&causal("0")));
    assert!(start.contains("query_offset=0") && start.contains("group=1"), "{start}");
    let later = found(&text(&causal("2")));
    assert!(later.contains("query_offset=2"), "{later}");
    let after = found(&text(&causal("0").replace("le %j %i", "le %i %j")));
    assert!(!after.contains("composite @attention"), "keys to come only: {after}");
}

/// How many near misses are made of each template.
const TWINS: u64 = 60;

/// One thing of a definition is changed; what is made of that computes what it computes.
#[test]
fn near_misses_are_not_taken_for_the_composite() {
    for template in recognisable() {
        let mut told_apart = 0;
        for seed in 0..TWINS {
            told_apart += usize::from(twin_is_told_apart(template, seed));
        }
        assert!(told_apart >= 8, "only {told_apart} near misses of `{}`", template.name);
    }
}

/// Whether a change makes a difference; it makes the same one after rewriting then.
fn twin_is_told_apart(template: &'static Template, seed: u64) -> bool {
    let (given, types) = within_bounds(template, 2, seed);
    let mut module = Module::new("m");
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operands: Vec<ValueId> =
        types.iter().enumerate().map(|(at, ty)| b.param(&format!("p{at}"), ty.clone())).collect();
    let results = b.composite("y", &template.name, &given, &operands);
    b.finish(&results);
    inline_composites(&mut module, |_| false);
    let mut twin = module.clone();
    if !mutate(&mut twin.functions[0], seed) || !verify(&twin).is_empty() {
        return false;
    }
    let args: Vec<Tensor> =
        types.iter().enumerate().map(|(at, ty)| argument(ty, mix(seed) ^ at as u64)).collect();
    let (Ok(original), Ok(before)) = (eval(&module, "f", &args), eval(&twin, "f", &args)) else {
        return false;
    };
    let mut after = twin.clone();
    simplify(&mut after, &exact());
    let found = eval(&after, "f", &args).unwrap();
    for (a, b) in before.iter().zip(&found) {
        let difference = b.max_relative_difference(a);
        assert!(difference < 1e-12, "{} seed {seed}: {difference}\n{twin}{after}", template.name);
    }
    let is_other = |(a, b): (&Tensor, &Tensor)| b.max_relative_difference(a) > 1e-6;
    original.iter().zip(&before).any(is_other)
}

fn argument(ty: &TensorType, seed: u64) -> Tensor {
    let dims = ty.sizes().unwrap();
    let count: usize = dims.iter().product();
    let draw = |at: usize| f64::from(uniform(seed, at as u64));
    let numbers = (0..count).map(|at| match ty.dtype {
        DType::U32 => (draw(at) * 1e9).floor(),
        DType::I32 => (draw(at) * 4.0).floor() - 1.0,
        _ => draw(at) * 2.0 - 0.9,
    });
    Tensor::from_f64(ty.dtype, &dims, numbers.collect())
}

/// Changes one number, function or operand; whether there was something to change.
fn mutate(function: &mut Function, seed: u64) -> bool {
    let word = mix(seed ^ 0x5eed);
    let at = (word % function.nodes.len() as u64) as usize;
    let pick = (word >> 32) as usize;
    if pick.is_multiple_of(3) && !function.nodes[at].operands.is_empty() {
        let count = function.nodes[at].operands.len();
        let place = (pick / 3) % count;
        let wanted = function.ty(function.nodes[at].operands[place]).clone();
        let made = function.nodes[at].results[0];
        let others: Vec<ValueId> = (0..made.0)
            .map(ValueId)
            .filter(|v| *function.ty(*v) == wanted && *v != function.nodes[at].operands[place])
            .collect();
        if others.is_empty() {
            return false;
        }
        function.nodes[at].operands[place] = others[(pick / 7) % others.len()];
        return true;
    }
    mutate_op(&mut function.nodes[at].op, pick)
}

fn mutate_op(op: &mut Op, pick: usize) -> bool {
    match op {
        Op::Constant { value, dtype, .. } if !dtype.is_float() => *value += 1.0,
        Op::Constant { value, .. } => {
            *value = if value.is_finite() { *value * 1.5 + 1.0 } else { -1.0 }
        }
        Op::Iota { start, .. } => *start += 1,
        Op::Random { salt, .. } => *salt += 1,
        Op::Unary(how) => *how = Unary::ALL[pick % Unary::ALL.len()],
        Op::Binary(how) => *how = Binary::ALL[pick % Binary::ALL.len()],
        Op::Compare(how) => *how = Comparison::ALL[pick % Comparison::ALL.len()],
        Op::Reduce { combiner, .. } => *combiner = Combiner::ALL[pick % Combiner::ALL.len()],
        Op::Broadcast { new, dims } if new.len() == 1 && dims.len() == 2 => new[0] = 1 - new[0],
        Op::Slice { start, .. } if *start > 0 => *start -= 1,
        Op::Gather { start, .. } | Op::ScatterAdd { start, .. } => *start += 1,
        Op::Contract(einsum) if einsum.a.len() == einsum.b.len() => {
            std::mem::swap(&mut einsum.a, &mut einsum.b);
        }
        _ => return false,
    }
    true
}
