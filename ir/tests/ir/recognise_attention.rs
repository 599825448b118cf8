//! Attention found in graphs as exporters write them, and twins that nearly are attention.
//!
//! Graphs are drawn from seeds: where the scale stands, how heads lie and are shared, what hides
//! keys and how, whether the softmax is one op or several. Rows that see no key occur.

use gantline_ir::op::{Binary, Combiner, Comparison, Op, Unary};
use gantline_ir::{DType, Dim, Kind, Module, TensorType, ValueId};

use crate::draws::{Draws, seeds};
use crate::recognise::{
    Exporter, assert_same_gradients, built, called, compared, dtype, recognised,
};

/// Sizes of attention.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    heads: usize,
    group: usize,
    queries: usize,
    keys: usize,
    inner: usize,
}

impl Sizes {
    fn drawn(r: &mut Draws) -> Sizes {
        let (group, queries) = (1 + r.below(3), 1 + r.below(5));
        let heads = group * (1 + r.below(3));
        let keys = 2 + r.below(4);
        Sizes { batch: 1 + r.below(3), heads, group, queries, keys, inner: 1 + r.below(4) }
    }

    fn scores(self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.keys]
    }
}

/// What hides keys.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sight {
    Full,
    /// Up to and with the own position, which begins at an offset.
    Causal(usize),
    /// The last keys alone.
    Window(usize, usize),
}

/// Whether a pair is hidden, over queries and keys.
fn hidden(e: &mut Exporter<'_, '_>, s: Sizes, sight: Sight) -> ValueId {
    let dims = vec![Dim::from(s.queries), Dim::from(s.keys)];
    let i = e.b.iota("i", 0, DType::I64, dims.clone());
    let j = e.b.iota("j", 1, DType::I64, dims);
    let (offset, window) = match sight {
        Sight::Full => (s.keys, 0),
        Sight::Causal(offset) => (offset, 0),
        Sight::Window(offset, window) => (offset, window),
    };
    let offset = e.b.constant_like("offset", offset as f64, i);
    let position = e.b.add("position", i, offset);
    let later = e.b.compare("later", Comparison::Lt, position, j);
    if window == 0 {
        return later;
    }
    let window = e.b.constant_like("window", window as f64, i);
    let reach = e.b.add("reach", j, window);
    let far = e.b.compare("far", Comparison::Le, reach, position);
    e.b.push("hidden", Op::Select, &[later, later, far])
}

fn filled(e: &mut Exporter<'_, '_>, hidden: ValueId, scores: ValueId, score: f64) -> ValueId {
    let dims = e.dims(scores);
    let hidden = e.repeat(hidden, &dims);
    let score = e.number(score, scores);
    match e.r.coin() {
        true => e.b.push("masked", Op::Select, &[hidden, score, scores]),
        false => {
            let no = e.b.constant_like("no", 0.0, hidden);
            let seen = e.b.compare("seen", Comparison::Eq, hidden, no);
            e.b.push("masked", Op::Select, &[seen, scores, score])
        }
    }
}

/// Zero and a low number, to be added to scores.
fn added(e: &mut Exporter<'_, '_>, hidden: ValueId, scores: ValueId, score: f64) -> ValueId {
    let dims = e.dims(hidden);
    let ty = TensorType::of(e.dtype, &dims);
    let (zero, low) = (e.b.constant("zero", 0.0, ty.clone()), e.b.constant("low", score, ty));
    let mask = e.b.push("mask", Op::Select, &[hidden, low, zero]);
    let dims = e.dims(scores);
    let mask = e.repeat(mask, &dims);
    e.two(Binary::Add, scores, mask)
}

fn softmax(e: &mut Exporter<'_, '_>, x: ValueId) -> ValueId {
    if e.r.coin() {
        return e.b.composite("softmax", "softmax", &[], &[x])[0];
    }
    let dims = e.dims(x);
    let last = dims.len() - 1;
    let kept: Vec<usize> = dims[..last].iter().copied().chain([1]).collect();
    let max = e.b.reduce("max", Combiner::Max, vec![last], x);
    let max = e.view(max, &kept);
    let max = e.repeat(max, &dims);
    let shifted = e.b.binary("shifted", Binary::Sub, x, max);
    let exp = e.b.unary("exp", Unary::Exp, shifted);
    let sum = e.b.reduce("sum", Combiner::Sum, vec![last], exp);
    let sum = e.view(sum, &kept);
    let sum = e.repeat(sum, &dims);
    e.b.binary("softmax", Binary::Div, exp, sum)
}

/// A projection `[B, rows, heads D]` as `[B, heads, rows, D]`.
fn heads(e: &mut Exporter<'_, '_>, x: ValueId, heads: usize, inner: usize) -> ValueId {
    let [batch, rows, _] = e.dims(x)[..] else { panic!("three dims") };
    let apart = e.view(x, &[batch, rows, heads, inner]);
    e.b.push("heads", Op::Transpose { perm: vec![0, 2, 1, 3] }, &[apart])
}

struct Written {
    q: ValueId,
    k: ValueId,
    v: ValueId,
}

fn operands(e: &mut Exporter<'_, '_>, s: Sizes) -> Written {
    let groups = s.heads / s.group;
    let q = e.param("q", &[s.batch, s.queries, s.heads * s.inner]);
    let k = e.param("k", &[s.batch, s.keys, groups * s.inner]);
    let v = e.param("v", &[s.batch, s.keys, groups * s.inner]);
    Written { q, k, v }
}

/// Scores with the scale somewhere, and the values of each head.
fn products(e: &mut Exporter<'_, '_>, s: Sizes, of: &Written, scale: f64) -> (ValueId, ValueId) {
    let groups = s.heads / s.group;
    let mut q = heads(e, of.q, s.heads, s.inner);
    let mut k = heads(e, of.k, groups, s.inner);
    let mut v = heads(e, of.v, groups, s.inner);
    if s.group > 1 {
        for x in [&mut k, &mut v] {
            let apart = e.view(*x, &[s.batch, groups, 1, s.keys, s.inner]);
            let all = e.repeat(apart, &[s.batch, groups, s.group, s.keys, s.inner]);
            *x = e.view(all, &[s.batch, s.heads, s.keys, s.inner]);
        }
    }
    let place = e.r.below(4);
    match place {
        0 => q = e.scaled(q, scale),
        1 => k = e.scaled(k, scale),
        2 => {
            q = e.with(Binary::Mul, q, scale.sqrt());
            k = e.with(Binary::Mul, k, scale.sqrt());
        }
        _ => {}
    }
    let scores = match e.r.below(3) {
        0 => e.b.contract("scores", "bhsd,bhnd->bhsn", q, k),
        1 => {
            let k = e.b.push("turned", Op::Transpose { perm: vec![0, 1, 3, 2] }, &[k]);
            e.b.contract("scores", "bhsd,bhdn->bhsn", q, k)
        }
        _ => {
            let all = s.batch * s.heads;
            let q = e.view(q, &[all, s.queries, s.inner]);
            let k = e.view(k, &[all, s.keys, s.inner]);
            let scores = e.b.contract("scores", "bsd,bnd->bsn", q, k);
            e.view(scores, &s.scores())
        }
    };
    (if place == 3 { e.scaled(scores, scale) } else { scores }, v)
}

fn weighed(e: &mut Exporter<'_, '_>, s: Sizes, weights: ValueId, v: ValueId) -> ValueId {
    let out = e.b.contract("out", "bhsn,bhnd->bhsd", weights, v);
    let out = e.b.push("rows", Op::Transpose { perm: vec![0, 2, 1, 3] }, &[out]);
    e.view(out, &[s.batch, s.queries, s.heads * s.inner])
}

/// The attributes of the attention that `main` calls.
fn attributes(module: &Module) -> gantline_ir::module::Attributes {
    let main = module.function("main").unwrap();
    let mut callees = main.nodes.iter().filter_map(|node| module.function(node.callee()?));
    let attributes = callees.find_map(|f| match &f.kind {
        Kind::Composite { name, attributes } if name == "attention" => Some(attributes.clone()),
        Kind::Composite { .. } | Kind::Layer | Kind::Kernel => None,
    });
    attributes.expect("attention is called")
}

/// The last but one is the least f32.
const LOW: [f64; 4] = [-1e4, -1e9, -3.402_823_466_385_288_6e38, f64::NEG_INFINITY];

#[test]
fn attention_is_found_with_masks_that_are_proved() {
    for seed in seeds(300) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let s = Sizes::drawn(r);
        let sight = match r.below(3) {
            0 => Sight::Full,
            1 => Sight::Causal(r.below(3)),
            _ => Sight::Window(r.below(2), 1 + r.below(3)),
        };
        // Every query sees a key.
        let s = match sight {
            Sight::Window(offset, window) => {
                Sizes { queries: s.queries.min(s.keys + window - 1 - offset).max(1), ..s }
            }
            Sight::Full | Sight::Causal(_) => s,
        };
        let (score, is_added) = (LOW[r.below(4)], r.coin());
        let cap = if r.below(4) == 0 { 2.0 } else { 0.0 };
        let scale = 1.0 / (s.inner as f64).sqrt();
        let module = built(r, dtype, |e| {
            let of = operands(e, s);
            let (mut scores, v) = products(e, s, &of, scale);
            if cap != 0.0 {
                let less = e.scaled(scores, 1.0 / cap);
                let bounded = e.b.unary("tanh", Unary::Tanh, less);
                scores = e.with(Binary::Mul, bounded, cap);
            }
            if sight != Sight::Full {
                let hidden = hidden(e, s, sight);
                scores = match is_added {
                    true => added(e, hidden, scores, score),
                    false => filled(e, hidden, scores, score),
                };
            }
            let weights = softmax(e, scores);
            weighed(e, s, weights, v)
        });
        let note = format!("SEED={seed} {s:?} {sight:?}");
        let after = recognised(&module, r, &note);
        assert_eq!(called(&after), ["attention"], "{note}\n{module}");
        assert_same_gradients(&module, &after, r, &note);
        let found = attributes(&after);
        assert_eq!(found["group"], s.group as f64, "{note}");
        assert!((found["scale"] - scale).abs() < 1e-6, "{note}");
        assert_eq!(found.get("softcap").copied().unwrap_or(0.0), cap, "{note}");
        assert!(!found.contains_key("bias"), "{note}\n{after}");
        let sees = |i: usize, j: usize| match sight {
            Sight::Full => true,
            Sight::Causal(offset) => j <= i + offset,
            Sight::Window(offset, window) => j <= i + offset && i + offset < j + window,
        };
        let window = found.get("window").copied().unwrap_or(0.0);
        for i in 0..s.queries {
            for j in 0..s.keys {
                let position = i as f64 + found["query_offset"];
                let near = window == 0.0 || position - window < j as f64;
                assert_eq!(sees(i, j), j as f64 <= position && near, "{note} {i} {j} {found:?}");
            }
        }
    }
}

/// Masks that inputs decide, biases, and rows that see no key.
#[test]
fn attention_is_found_with_biases() {
    for seed in seeds(300) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let s = Sizes::drawn(r);
        let (how, is_causal, is_guarded) = (r.below(4), r.coin(), r.coin());
        // A number that a score would change hides keys where it is the last that is done to them.
        let low = [f64::from(f32::MIN), f64::NEG_INFINITY, -1e9];
        let score = low[r.below(if how >= 2 && !is_causal { 3 } else { 2 })];
        let padding = [vec![s.batch, 1, 1, s.keys], vec![s.batch, 1, s.queries, s.keys]];
        let padding = padding[r.below(2)].clone();
        let bias = [vec![s.heads, s.queries, s.keys], vec![s.heads, 1, s.keys], vec![s.keys]];
        let bias = bias[r.below(3)].clone();
        let module = built(r, dtype, |e| {
            let of = operands(e, s);
            let hidden_keys = e.b.param("padding", TensorType::of(DType::Bool, &padding));
            let bias = e.param("bias", &bias);
            let (mut scores, v) = products(e, s, &of, 0.7);
            if is_causal {
                let hidden = hidden(e, s, Sight::Causal(0));
                scores = filled(e, hidden, scores, score);
            }
            if how != 1 {
                let dims = s.scores();
                let bias = e.repeat(bias, &dims);
                scores = e.two(Binary::Add, scores, bias);
            }
            scores = match how {
                0 => scores,
                1 => added(e, hidden_keys, scores, score),
                _ => filled(e, hidden_keys, scores, score),
            };
            let weights = softmax(e, scores);
            let weights = match is_guarded {
                true => {
                    let equal = e.b.compare("equal", Comparison::Eq, weights, weights);
                    let no = e.b.constant_like("no", 0.0, equal);
                    let is_nan = e.b.compare("is_nan", Comparison::Eq, equal, no);
                    let zero = e.number(0.0, weights);
                    e.b.push("guarded", Op::Select, &[is_nan, zero, weights])
                }
                false => weights,
            };
            weighed(e, s, weights, v)
        });
        let note = format!("SEED={seed} {s:?} {how}");
        assert_eq!(compared(&module, r, &note), ["attention"], "{note}\n{module}");
    }
}

/// What is nearly attention: not found, or as what it is.
#[test]
fn near_attention_is_what_it_is() {
    for seed in seeds(200) {
        let r = &mut Draws::new(seed);
        let dtype = dtype(r);
        let mut s = Sizes::drawn(r);
        let which = r.below(6);
        s.keys = if which == 1 { s.queries.max(2) } else { s.keys };
        s.queries = if which == 1 { s.keys } else { s.queries };
        let module = built(r, dtype, |e| {
            let of = operands(e, s);
            let by = e.param("by", &[s.keys]);
            let (scores, v) = products(e, s, &of, 0.7);
            let dims = s.scores();
            let all = hidden(e, s, Sight::Causal(0));
            let masked = match which {
                // A low number that does not hide.
                0 => filled(e, all, scores, -10.0),
                1 => scores,
                // Each key has a scale of its own.
                2 => {
                    let by = e.repeat(by, &dims);
                    e.two(Binary::Mul, scores, by)
                }
                3 => filled(e, all, scores, 0.0),
                4 => filled(e, all, scores, f64::INFINITY),
                _ => e.with(Binary::Pow, scores, 2.0),
            };
            let weights = match which {
                // Over queries in place of keys.
                1 => {
                    let turn = Op::Transpose { perm: vec![0, 1, 3, 2] };
                    let turned = e.b.push("turned", turn.clone(), &[masked]);
                    let weights = softmax(e, turned);
                    e.b.push("turned", turn, &[weights])
                }
                _ => softmax(e, masked),
            };
            weighed(e, s, weights, v)
        });
        let note = format!("SEED={seed} {which}");
        let found = compared(&module, r, &note);
        assert!(!found.contains(&"attention".to_owned()), "{note}\n{module}");
    }
}
