//! Ranks that hold copies of the weights: whatever is computed of these, and drawn, the sums over
//! samples are those of the interpreter on the whole batch.

use std::collections::BTreeMap;
use std::fmt::Write;

use codegen::compile::compile;
use codegen::prepare::prepare_training;
use ir::autodiff::training_step;
use ir::dim::Bindings;
use ir::eval::eval;
use ir::plan::Keep;
use ir::text::parse_module;
use ir::{DType, Dim, Mesh, Module, Tensor};
use planner::cluster::Cluster;
use runtime::execute::{Batch, Scalars};

use crate::draws::{Draws, seeds};
use crate::model::{Wanted, load, plan, session};

/// Samples of a step, and tokens of a sample.
const SAMPLES: usize = 8;
const TOKENS: usize = 4;

/// The seed of a run, its step, the path of its calls and the first sample: the key of the entry.
const KEY: [i64; 4] = [7, 1, 0, 0];

/// A model whose first layer computes `%y: f64[B, width]` of tokens, weights and a key.
fn model(weights: &[(&str, &str)], body: &str, width: usize) -> Module {
    let params: String = weights.iter().map(|(name, ty)| format!("%{name}: {ty}, ")).collect();
    let names: String = weights.iter().map(|(name, _)| format!("%{name} ")).collect();
    let text = format!(
        "module copies
  func @mid(%tokens: i32[B, {TOKENS}], {params}%key: u32[4]) {{
    %ids: f64[B, {TOKENS}] = cast %tokens
    %tenth: f64[B, {TOKENS}] = constant 0.1
    %x: f64[B, {TOKENS}] = mul %ids %tenth
{body}    return %y
  }}
  func @top(%y: f64[B, {width}], %labels: i32[B, {TOKENS}]) {{
    %ones: f64[B] = constant 1.0
    %z: f64[B, {width}] = sin %y
    %sum: f64[] = reduce sum dims=[0, 1] %z
    %count: f64[] = reduce sum dims=[0] %ones
    return %sum %count
  }}
  func @loss({params}%tokens: i32[B, {TOKENS}], %labels: i32[B, {TOKENS}], %key: u32[4]) {{
    %k: u32[4] = fold_key salt=5 %key
    %m: f64[B, {width}] = call @mid %tokens {names}%k
    %loss: f64[], %loss.count: f64[] = call @top %m %labels
    return %loss %loss.count
  }}
"
    );
    parse_module("copies", &text).unwrap_or_else(|why| panic!("{why:?}\n{text}"))
}

type Weights = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

/// Random weights and tokens of a model.
fn data(module: &Module, r: &mut Draws) -> (Weights, Vec<i32>) {
    let entry = module.function("loss").expect("there is a loss");
    let floats = entry.params().filter(|param| entry.ty(*param).dtype.is_float());
    let weight = |param| {
        let dims = entry.ty(param).sizes().expect("weights have fixed sizes");
        let values = r.signed(&dims).to_f64();
        (entry.value(param).name.clone(), (dims, values))
    };
    let weights = floats.map(weight).collect();
    (weights, (0..SAMPLES * TOKENS).map(|_| r.below(9) as i32).collect())
}

/// The loss, and the gradients of the weights, on the interpreter.
fn interpreted(module: &Module, weights: &Weights, tokens: &[i32]) -> (f64, Vec<Vec<f64>>) {
    let mut module = module.clone();
    let step = training_step(&mut module, "loss").expect("the loss has gradients");
    module.bind(&Bindings::from([(Dim::BATCH.to_owned(), SAMPLES as i64)]));
    let entry = module.function("loss").expect("there is a loss");
    let ids = || tokens.iter().map(|id| i64::from(*id)).collect();
    let argument = |param| {
        let name = entry.value(param).name.as_str();
        match weights.get(name) {
            Some((dims, values)) => Tensor::f64(dims, values.clone()),
            None if name == "key" => Tensor::int(DType::U32, &[4], KEY.to_vec()),
            None => Tensor::int(DType::I32, &[SAMPLES, TOKENS], ids()),
        }
    };
    let args: Vec<Tensor> = entry.params().map(argument).collect();
    let results = eval(&module, &step, &args).expect("the step evaluates");
    (results[0].scalar(), results[2..].iter().map(Tensor::to_f64).collect())
}

/// The largest difference of loss and gradients from the interpreter's on so many ranks and
/// micro-batches, in parts of the largest number; why there is none.
fn difference(
    module: &Module,
    data: &(Weights, Vec<i32>),
    dp: usize,
    microbatch_count: usize,
) -> Result<f64, String> {
    let (weights, tokens) = data;
    let prepared = prepare_training(module.clone(), "loss").map_err(|why| why.headline)?;
    let wanted = Wanted {
        mesh: Mesh { pp: 1, dp, tp: 1, ..Mesh::ONE },
        microbatch_size: SAMPLES / dp / microbatch_count,
        microbatch_count,
        keep: Keep::Full,
        sequence: false,
    };
    let plan = plan(&prepared, TOKENS, DType::F64, wanted)?;
    compile(&prepared, "loss", &plan).map_err(|why| why.headline)?;
    let cluster = Cluster::load("h100").expect("a preset");
    let wrong = planner::check::check(&prepared, "loss", &plan, &cluster);
    assert!(wrong.is_empty(), "what compiles is legal: {wrong:?}");
    let mut session = session(&prepared, &plan);
    load(&mut session, weights);
    let batch = Batch { tokens, labels: tokens, ..Batch::default() };
    let scalars = Scalars { seed: KEY[0] as u32, step: KEY[1] as u32, ..Scalars::default() };
    let report = session.step(&batch, scalars).expect("the step runs");
    let (loss, grads) = interpreted(module, weights, tokens);
    let largest = grads.iter().flatten().fold(1e-3, |most: f64, grad| most.max(grad.abs()));
    let mut worst = (report.loss_sum - loss).abs() / loss.abs().max(1.0);
    for (name, wanted) in weights.keys().zip(&grads) {
        let found = session.read_grad(name).expect("the gradient is there").to_f64();
        let off = found.iter().zip(wanted).fold(0.0_f64, |most, (a, b)| most.max((a - b).abs()));
        worst = worst.max(off / largest);
    }
    Ok(worst)
}

/// What is drawn for weights, for all elements of samples and for samples.
const DRAWN: [(&str, &str); 4] = [
    (
        "a mask of a weight",
        "    %u: f64[16, 4] = random salt=1 %key
    %p: f64[16, 4] = constant 0.5
    %kept: bool[16, 4] = le %p %u
    %zero: f64[16, 4] = constant 0.0
    %v: f64[16, 4] = select %kept %w %zero
    %y: f64[B, 16] = contract bi,oi->bo %x %v
",
    ),
    (
        "noise on a weight, stored",
        "    %u: f64[16, 4] = random salt=1 %key
    %turned: f64[4, 16] = transpose perm=[1, 0] %u
    %back: f64[16, 4] = transpose perm=[1, 0] %turned
    %v: f64[16, 4] = mul %w %back
    %y: f64[B, 16] = contract bi,oi->bo %x %v
",
    ),
    (
        "one mask of all samples",
        "    %u: f64[16] = random salt=1 %key
    %mask: f64[B, 16] = broadcast new=[0] %u
    %all: f64[B, 16] = contract bi,oi->bo %x %w
    %y: f64[B, 16] = mul %all %mask
",
    ),
    (
        "a number for each result of a sample",
        "    %u: f64[B, 16] = random salt=1 %key
    %all: f64[B, 16] = contract bi,oi->bo %x %w
    %y: f64[B, 16] = mul %all %u
",
    ),
];

/// Draws are those of the whole batch, on any number of ranks and in any number of micro-batches.
#[test]
fn draws_are_of_the_global_element() {
    for (what, body) in DRAWN {
        let module = model(&[("w", "f64[16, 4]")], body, 16);
        let data = data(&module, &mut Draws::new(3));
        for (dp, count) in [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2)] {
            let error = difference(&module, &data, dp, count);
            let error = error.unwrap_or_else(|why| panic!("{what}, dp={dp}: {why}"));
            assert!(error < 1e-9, "{what}, dp={dp}, {count} micro-batches: off by {error:e}");
        }
    }
}

/// Where samples and tokens are one dim, so many numbers are drawn for each sample.
#[test]
fn draws_of_tokens_are_told_apart_by_samples() {
    let body = "    %flat: f64[4*B] = reshape %x
    %u: f64[4*B] = random salt=1 %key
    %noisy: f64[4*B] = mul %flat %u
    %n: f64[B, 4] = reshape %noisy
    %y: f64[B, 16] = contract bi,oi->bo %n %w
";
    let module = model(&[("w", "f64[16, 4]")], body, 16);
    let data = data(&module, &mut Draws::new(3));
    for count in [1, 2, 4] {
        let error = difference(&module, &data, 1, count).expect("it is compiled");
        assert!(error < 1e-9, "{count} micro-batches: off by {error:e}");
    }
}

/// Samples that are not the first dim are told apart by no rank and no micro-batch.
#[test]
fn draws_along_another_dim_are_refused() {
    let body = "    %u: f64[16, B] = random salt=1 %key
    %mask: f64[B, 16] = transpose perm=[1, 0] %u
    %all: f64[B, 16] = contract bi,oi->bo %x %w
    %y: f64[B, 16] = mul %all %mask
";
    let module = model(&[("w", "f64[16, 4]")], body, 16);
    let data = data(&module, &mut Draws::new(3));
    assert!(difference(&module, &data, 1, 1).is_ok_and(|error| error < 1e-9));
    for (dp, count) in [(2, 1), (1, 2), (2, 2)] {
        let refused = difference(&module, &data, dp, count).expect_err("it cannot be drawn");
        assert!(refused.contains("along the batch"), "{refused}");
    }
    let body = "    %u: f64[B+1, 16] = random salt=1 %key
    %sum: f64[16] = reduce sum dims=[0] %u
    %mask: f64[B, 16] = broadcast new=[0] %sum
    %all: f64[B, 16] = contract bi,oi->bo %x %w
    %y: f64[B, 16] = mul %all %mask
";
    let refused = prepare_training(model(&[("w", "f64[16, 4]")], body, 16), "loss");
    let refused = refused.expect_err("one number too many belongs to no sample");
    assert!(refused.code == "E2003" && refused.headline.contains("by samples"), "{refused:?}");
}

/// What is made of sums over samples before they are whole, and what needs them whole.
const OF_SUMS: [(&str, &str); 8] = [
    ("a term of a sum", "%of: f64[4] = sub %s %t"),
    ("what is added to the sum", "%of: f64[4] = add %s %one"),
    (
        "side by side with another one",
        "%c: f64[8] = concat dim=0 %t %s
    %of: f64[4] = slice dim=0 start=2 size=4 %c",
    ),
    (
        "side by side with ones",
        "%c: f64[8] = concat dim=0 %one %s
    %of: f64[4] = slice dim=0 start=2 size=4 %c",
    ),
    ("a product of sums", "%of: f64[4] = mul %s %t"),
    ("a quotient by a sum", "%of: f64[4] = div %one %s"),
    ("sums or zeros", "%of: f64[4] = select %is %s %none"),
    ("sums or ones", "%of: f64[4] = select %is %s %one"),
];

/// Sums over the samples of all ranks are those of the whole batch, whatever is made of them.
#[test]
fn what_is_made_of_sums_is_made_of_whole_sums() {
    for (what, line) in OF_SUMS {
        let body = format!(
            "    %one: f64[4] = constant 1.0
    %none: f64[4] = constant 0.0
    %at: f64[4] = iota dim=0 start=0
    %is: bool[4] = lt %one %at
    %wave: f64[B, 4] = cos %x
    %s: f64[4] = reduce sum dims=[0] %wave
    %t: f64[4] = reduce sum dims=[0] %x
    {line}
    %every: f64[B, 4] = broadcast new=[0] %of
    %all: f64[B, 4] = contract bi,oi->bo %x %w
    %y: f64[B, 4] = add %all %every
"
        );
        let module = model(&[("w", "f64[4, 4]")], &body, 4);
        let data = data(&module, &mut Draws::new(3));
        for dp in [2, 4] {
            let error = difference(&module, &data, dp, 1);
            let error = error.unwrap_or_else(|why| panic!("{what}, dp={dp}: {why}"));
            assert!(error < 1e-9, "{what}, dp={dp}: off by {error:e}");
        }
    }
}

/// Random computations on weights alone.
struct Derived<'r> {
    r: &'r mut Draws,
    text: String,
    /// Values and their sizes.
    values: Vec<(String, [usize; 2])>,
}

impl Derived<'_> {
    fn any(&mut self) -> (String, [usize; 2]) {
        let at = self.r.below(self.values.len());
        self.values[at].clone()
    }

    /// Another value of the same sizes; the same one where there is none.
    fn beside(&mut self, of: [usize; 2]) -> String {
        let same = self.values.iter().filter(|(_, dims)| *dims == of);
        let same: Vec<&String> = same.map(|(name, _)| name).collect();
        same[self.r.below(same.len())].clone()
    }

    /// Adds a line; `_` stands for a new name, which is returned.
    fn line(&mut self, ty: &str, op: &str) -> String {
        let name = format!("%v{}", self.text.lines().count());
        writeln!(self.text, "    {name}: {ty} = {op}").expect("texts take lines");
        name
    }

    fn add(&mut self, [rows, cols]: [usize; 2], op: &str) {
        let name = self.line(&format!("f64[{rows}, {cols}]"), op);
        self.values.push((name, [rows, cols]));
    }

    /// A node, or a few, of one of the kinds.
    fn step(&mut self, kind: usize) {
        let (x, dims) = self.any();
        let ([rows, cols], y) = (dims, self.beside(dims));
        let ty = format!("f64[{rows}, {cols}]");
        match kind {
            0 => self.add(dims, &format!("tanh {x}")),
            1 => self.add(dims, &format!("mul {x} {y}")),
            2 => self.add(dims, &format!("sub {x} {y}")),
            3 => {
                let e = self.line(&ty, &format!("exp {y}"));
                self.add(dims, &format!("div {x} {e}"));
            }
            4 => {
                let zero = self.line(&ty, "constant 0.0");
                self.add(dims, &format!("max {x} {zero}"));
            }
            5 => {
                let zero = self.line(&ty, "constant 0.0");
                let positive =
                    self.line(&format!("bool[{rows}, {cols}]"), &format!("lt {zero} {y}"));
                self.add(dims, &format!("select {positive} {x} {zero}"));
            }
            6 => self.add([2 * rows, cols], &format!("concat dim=0 {x} {y}")),
            7 => {
                let (start, size) = (self.r.below(cols), 1);
                self.add([rows, size], &format!("slice dim=1 start={start} size={size} {x}"));
            }
            8 => self.add([rows, cols + 2], &format!("pad dim=1 before=1 after=1 {x}")),
            9 => self.add([cols, rows], &format!("transpose perm=[1, 0] {x}")),
            10 => self.add(dims, &format!("reverse dims=[0] {x}")),
            11 => self.add(dims, &format!("cumulative sum dim=0 {x}")),
            12 => {
                let ids = self.line("i32[3]", "iota dim=0 start=1");
                self.add([3, cols], &format!("gather dim=0 start=0 {x} {ids}"));
            }
            13 => {
                let at = self.line("i32[]", "constant 1");
                self.add([1, cols], &format!("dynamic_slice dim=0 size=1 {x} {at}"));
            }
            14 => {
                let first = self
                    .line(&format!("f64[1, {cols}]"), &format!("slice dim=0 start=0 size=1 {y}"));
                let at = self.line("i32[]", "constant 0");
                self.add(dims, &format!("dynamic_update_slice dim=0 {x} {first} {at}"));
            }
            15 => {
                let sum = self.line(&format!("f64[{rows}]"), &format!("reduce sum dims=[1] {x}"));
                self.add(dims, &format!("broadcast new=[1] {sum}"));
            }
            16 => {
                let most = self.line(&format!("f64[{rows}]"), &format!("reduce max dims=[1] {x}"));
                self.add(dims, &format!("broadcast new=[1] {most}"));
            }
            17 => self.add([rows, rows], &format!("contract ab,cb->ac {x} {y}")),
            _ => self.add([cols, rows], &format!("reshape {x}")),
        }
    }
}

/// The gradient of whatever is computed of weights is linear in what the samples give: it is summed
/// over ranks, and never refused.
#[test]
fn whatever_is_computed_of_weights_is_trained_on_copies() {
    for seed in seeds(80) {
        let mut r = Draws::new(seed);
        let weights = [("a", "f64[3, 4]"), ("b", "f64[3, 4]")];
        let values = [("%a".to_owned(), [3, 4]), ("%b".to_owned(), [3, 4])];
        let mut derived = Derived { r: &mut r, text: String::new(), values: values.into() };
        for _ in 0..2 + derived.r.below(6) {
            let kind = derived.r.below(19);
            derived.step(kind);
        }
        // The last value has the samples' sums added, so that the gradient is one of all of them.
        let (last, [rows, cols]) = derived.values.last().expect("there are weights").clone();
        let width = rows * cols;
        let body = derived.text
            + &format!(
                "    %sums: f64[B] = reduce sum dims=[1] %x
    %scaled: f64[B, {rows}, {cols}] = contract b,rc->brc %sums {last}
    %y: f64[B, {width}] = reshape %scaled
"
            );
        let module = model(&weights, &body, width);
        let data = data(&module, &mut r);
        for dp in [2, 4] {
            let what = format!("SEED={seed}, dp={dp}\n{module}");
            let error = difference(&module, &data, dp, 1);
            let error = error.unwrap_or_else(|why| panic!("{what}: {why}"));
            assert!(error < 1e-9, "{what}: off by {error:e}");
        }
    }
}
