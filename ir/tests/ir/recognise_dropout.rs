//! Attention with dropout found in layers, with the draws that stand there; and twins whose draws,
//! probabilities or scales are other ones.

use gantline_ir::autodiff::differentiate;
use gantline_ir::build::Builder;
use gantline_ir::eval::eval;
use gantline_ir::op::{Binary, Comparison, Op};
use gantline_ir::random::{DrawBits, Key};
use gantline_ir::recognise::recognise;
use gantline_ir::verify::verify;
use gantline_ir::{DType, Dim, Kind, Module, Tensor, TensorType, ValueId};

use crate::draws::{Draws, seeds};
use crate::recognise::{called, dtype};

/// Samples, heads, queries, keys, numbers of a head.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    inner: usize,
}

/// What is nearly dropout of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Twin {
    None,
    /// What is equal to the probability is dropped as well.
    DropsEqual,
    /// What is below the probability is kept.
    Opposite,
    Unscaled,
    /// All samples draw the same.
    OfNoSample,
    /// Draws are numbered by queries before heads.
    Turned,
    /// Heads share their draws.
    OfNoHead,
    /// Draws begin at the second head of more.
    Shifted,
    /// Samples are no dim that planning knows.
    Fixed,
    /// The scores are dropped, not their softmax.
    OfScores,
}

const TWINS: [Twin; 9] = [
    Twin::DropsEqual,
    Twin::Opposite,
    Twin::Unscaled,
    Twin::OfNoSample,
    Twin::Turned,
    Twin::OfNoHead,
    Twin::Shifted,
    Twin::Fixed,
    Twin::OfScores,
];

struct Site {
    /// The dim that counts samples.
    batch: Dim,
    sizes: Sizes,
    dtype: DType,
    p: f64,
    bits: DrawBits,
    form: usize,
    twin: Twin,
}

impl Site {
    fn ty(&self, dims: &[Dim]) -> TensorType {
        TensorType { dtype: self.dtype, dims: dims.to_vec() }
    }

    fn scores(&self) -> Vec<Dim> {
        let s = self.sizes;
        [&[self.batch.clone()][..], &[s.heads, s.queries, s.keys].map(Dim::from)].concat()
    }

    fn draw(&self, b: &mut Builder<'_>, key: ValueId, dims: Vec<Dim>, per_sample: u32) -> ValueId {
        let (mut start, mut extent) = (vec![0; dims.len()], dims.clone());
        if self.twin == Twin::Shifted {
            start[1] = 1;
            extent[1] = &extent[1] + &Dim::from(1_usize);
        }
        let (dtype, salt, bits) = (self.dtype, 5, self.bits);
        b.push("u", Op::Random { salt, start, extent, per_sample, bits, dtype, dims }, &[key])
    }

    /// One draw for each score.
    #[expect(clippy::wildcard_enum_match_arm, reason = "other twins draw what attention does")]
    fn draws(&self, b: &mut Builder<'_>, key: ValueId) -> ValueId {
        let all = self.scores();
        let [batch, heads, queries, keys] = [0, 1, 2, 3].map(|at| all[at].clone());
        match self.twin {
            Twin::OfNoSample => self.draw(b, key, all, 0),
            Twin::Turned => {
                let u = self.draw(b, key, vec![batch, queries, heads, keys], 1);
                b.push("turned", Op::Transpose { perm: vec![0, 2, 1, 3] }, &[u])
            }
            Twin::OfNoHead => {
                let u = self.draw(b, key, vec![batch, queries, keys], 1);
                b.push("shared", Op::Broadcast { new: vec![1], dims: all }, &[u])
            }
            _ if self.form == 4 && self.twin != Twin::Shifted => {
                let rows = &batch * &heads;
                let u = self.draw(b, key, vec![rows, queries, keys], self.sizes.heads as u32);
                b.push("view", Op::Reshape { dims: all }, &[u])
            }
            _ => self.draw(b, key, all, 1),
        }
    }

    fn number(&self, b: &mut Builder<'_>, value: f64, like: ValueId) -> ValueId {
        let value = if self.dtype == DType::F32 { f64::from(value as f32) } else { value };
        b.constant_like("c", value, like)
    }

    fn dropped(&self, b: &mut Builder<'_>, x: ValueId, key: ValueId) -> ValueId {
        if self.form == 0 && [Twin::None, Twin::Fixed, Twin::OfScores].contains(&self.twin) {
            let short = f64::from(u8::from(self.bits == DrawBits::B16));
            let attributes = [("p", self.p), ("salt", 5.0), ("short_draws", short)];
            return b.composite("y", "dropout", &attributes, &[x, key])[0];
        }
        let u = self.draws(b, key);
        let limit = self.number(b, self.p, u);
        let rest = if self.twin == Twin::Unscaled { 1.0 } else { 1.0 - self.p };
        let rest = self.number(b, rest, x);
        let zero = self.number(b, 0.0, x);
        let scaled = b.binary("scaled", Binary::Div, x, rest);
        match (self.twin, self.form) {
            (Twin::DropsEqual, _) => {
                let kept = b.compare("kept", Comparison::Lt, limit, u);
                b.push("y", Op::Select, &[kept, scaled, zero])
            }
            (Twin::Opposite, _) => {
                let kept = b.compare("kept", Comparison::Lt, u, limit);
                b.push("y", Op::Select, &[kept, scaled, zero])
            }
            (_, 1) => {
                let by = self.number(b, 1.0 / (1.0 - self.p), x);
                let by = if self.twin == Twin::Unscaled { rest } else { by };
                let scaled = b.mul("scaled", by, x);
                let dropped = b.compare("dropped", Comparison::Lt, u, limit);
                b.push("y", Op::Select, &[dropped, zero, scaled])
            }
            (_, 2) => {
                let kept = b.compare("kept", Comparison::Le, limit, u);
                let mask = b.push("mask", Op::Cast { dtype: self.dtype }, &[kept]);
                let mask = b.binary("mask", Binary::Div, mask, rest);
                b.mul("y", mask, x)
            }
            (_, 3) => {
                let kept = b.compare("kept", Comparison::Le, limit, u);
                let y = b.push("y", Op::Select, &[kept, x, zero]);
                b.binary("y", Binary::Div, y, rest)
            }
            _ => {
                let kept = b.compare("kept", Comparison::Le, limit, u);
                b.push("y", Op::Select, &[kept, scaled, zero])
            }
        }
    }

    fn module(&self) -> Module {
        let Sizes { heads, queries, keys, inner, .. } = self.sizes;
        let mut module = Module::new("export");
        let mut b = Builder::new(&mut module, "main", Kind::Layer);
        let dims = |rows: usize| {
            [&[self.batch.clone()][..], &[heads, rows, inner].map(Dim::from)].concat()
        };
        let q = b.param("q", self.ty(&dims(queries)));
        let [k, v] = ["k", "v"].map(|name| b.param(name, self.ty(&dims(keys))));
        let key = b.param("key", TensorType::of(DType::U32, &[4]));
        let scores = b.contract("scores", "bhsd,bhnd->bhsn", q, k);
        let scale = self.number(&mut b, 0.5, scores);
        let mut scores = b.mul("scaled", scores, scale);
        if self.twin == Twin::OfScores {
            scores = self.dropped(&mut b, scores, key);
        }
        let mut weights = b.composite("p", "softmax", &[], &[scores])[0];
        if self.twin != Twin::OfScores {
            weights = self.dropped(&mut b, weights, key);
        }
        let out = b.contract("out", "bhsn,bhnd->bhsd", weights, v);
        let out = b.push("rows", Op::Transpose { perm: vec![0, 2, 1, 3] }, &[out]);
        b.finish(&[out]);
        module
    }
}

/// Numbers for each parameter of a function.
fn arguments(module: &Module, name: &str, batch: usize, seed: u64) -> Vec<Tensor> {
    let r = &mut Draws::new(seed);
    let bindings = [(Dim::BATCH.to_owned(), batch as i64)].into();
    let types = module.function(name).unwrap().param_types();
    let argument = |ty: TensorType| {
        let dims = ty.bind(&bindings).sizes().unwrap();
        let count = dims.iter().product();
        if ty.dtype == DType::U32 {
            return Tensor::key(Key { seed: 3, step: 1, path: 9, sample: 7 });
        }
        let numbers = (0..count).map(|_| r.number(-2.0, 2.0)).collect();
        Tensor::from_f64(ty.dtype, &dims, numbers)
    };
    types.into_iter().map(argument).collect()
}

/// What a module computes, and its gradients.
fn computed(module: &Module, batch: usize, seed: u64) -> Vec<Tensor> {
    let mut module = module.clone();
    let mut all = eval(&module, "main", &arguments(&module, "main", batch, seed)).unwrap();
    let name = differentiate(&mut module, "main").unwrap();
    all.extend(eval(&module, &name, &arguments(&module, &name, batch, seed)).unwrap());
    all
}

fn site(r: &mut Draws, twin: Twin) -> Site {
    let size = |r: &mut Draws| 2 + r.below(3);
    let sizes =
        Sizes { batch: size(r), heads: size(r), queries: size(r), keys: size(r), inner: size(r) };
    let is_fixed = twin == Twin::Fixed;
    let batch = if is_fixed { Dim::from(sizes.batch) } else { Dim::symbol(Dim::BATCH) };
    let (dtype, p) = (dtype(r), [0.25, 0.1, 0.5][r.below(3)]);
    let bits = [DrawBits::B24, DrawBits::B16][r.below(2)];
    Site { batch, sizes, dtype, p, bits, form: r.below(5), twin }
}

/// Recognises; the module then, whose numbers are the same.
fn recognised(site: &Site, seed: u64) -> Module {
    let module = site.module();
    let note = format!("SEED={seed} {:?} {:?} {}\n{module}", site.sizes, site.twin, site.form);
    assert_eq!(verify(&module), [], "{note}");
    let mut after = module.clone();
    recognise(&mut after, "main", &|_| true, &|_| None);
    assert_eq!(verify(&after), [], "{note}\n{after}");
    let batch = site.sizes.batch;
    let [a, b] = [&module, &after].map(|module| computed(module, batch, seed));
    assert_eq!(a.len(), b.len(), "{note}");
    assert!(a.len() > 3, "{note}");
    let most = if site.dtype == DType::F64 { 1e-11 } else { 2e-5 };
    for (a, b) in a.iter().zip(&b) {
        for (a, b) in a.to_f64().into_iter().zip(b.to_f64()) {
            assert!((a - b).abs() <= most * a.abs().max(1.0), "{a} is {b}: {note}\n{after}");
        }
    }
    after
}

#[test]
fn attention_with_dropout_is_found() {
    for seed in seeds(150) {
        let site = site(&mut Draws::new(seed), Twin::None);
        let after = recognised(&site, seed);
        assert_eq!(called(&after), ["attention_dropout"], "SEED={seed}\n{}", site.module());
    }
}

#[test]
fn near_dropout_of_attention_stays() {
    for seed in seeds(180) {
        let r = &mut Draws::new(seed);
        let twin = TWINS[r.below(TWINS.len())];
        let site = site(r, twin);
        let after = recognised(&site, seed);
        let found = called(&after);
        let is_found = found.contains(&"attention_dropout".to_owned());
        assert!(!is_found, "SEED={seed} {twin:?}\n{after}");
    }
}
