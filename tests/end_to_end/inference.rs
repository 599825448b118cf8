//! Logits and generated text against PyTorch's, with a cache and without.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use codegen::compile::Compiled;
use codegen::inference::compile_inference;
use codegen::prepare::prepare_inference;
use gantline::generation::{Generator, Options, plan_forward};
use ir::ids::Ids;
use ir::import::{Description, Model, import, read_config};
use ir::{DType, Mesh};
use runtime::execute::{Batch, Classes, Session};
use runtime::generate::{Ending, NextLogits, Sampling, generate};
use runtime::load::load_weights;
use runtime::trace::Tracing;
use runtime::weights::Weights;

const CASES: [&str; 4] = ["gpt2-tiny", "gpt2-untied", "llama-tiny", "llama-bias-tied"];

/// The entry `logits` of a session, which reads a whole sequence each time.
const LOGITS: usize = 0;

fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(case)
}

fn description(case: &str) -> Description {
    let text = std::fs::read_to_string(folder(case).join("config.json")).expect("a config");
    read_config("config.json", &text, case).expect("the config reads")
}

fn expected(case: &str) -> Weights {
    Weights::open(&folder(case).join("expected.safetensors")).expect("the values open")
}

fn tokens(case: &str, tensor: &str) -> Vec<u32> {
    let numbers = expected(case).read_f64(tensor, None).expect("the tensor reads");
    numbers.iter().map(|x| *x as u32).collect()
}

fn fill(case: &str, session: &mut Session, model: &Model) {
    let weights = Weights::open(&folder(case)).expect("the weights open");
    let count = load_weights(session, &model.weights, &weights).expect("the weights fit");
    assert_eq!(count, model.param_count());
}

fn mesh(pp: usize, dp: usize, tp: usize) -> Mesh {
    Mesh { pp, dp, tp, ..Mesh::ONE }
}

/// The meshes on which a case is run: `tp` up to its number of heads.
fn meshes(case: &str) -> Vec<Mesh> {
    let mut meshes = vec![mesh(1, 1, 1), mesh(1, 1, 2), mesh(2, 1, 1)];
    if case != "gpt2-untied" {
        meshes.extend([mesh(1, 1, 3), mesh(2, 1, 2)]);
    }
    meshes
}

/// A session of the entry `logits` for so many samples on each rank.
fn logits_session(case: &str, seq: usize, samples: usize, mesh: Mesh, dtype: DType) -> Session {
    let options = ir::import::Options { seq, dtype, dropout: Some(0.0), documents: false };
    let model = import(&description(case), &options).expect("the model is imported");
    let module = prepare_inference(model.module.clone(), "logits").expect("it is prepared");
    let plan = plan_forward(
        &module,
        "logits",
        mesh,
        samples,
        seq,
        ir::precision::Precision::uniform(dtype),
    )
    .unwrap_or_else(|why| panic!("{case} {mesh}: {why:?}"));
    let compiled = compile_inference(&module, "logits", &plan);
    let compiled = compiled.unwrap_or_else(|d| panic!("{}", ir::diagnostic::render(&d, None)));
    let Compiled { programs, kernels } = compiled;
    let classes = Classes { programs, kernels, mesh, ids: Ids::of(&module, "logits") };
    let options = runtime::execute::Options {
        threads_per_rank: 1,
        deadline: Duration::from_secs(60),
        tracing: Tracing::None,
        disk: None,
    };
    let mut session = Session::start(Arc::new(classes), &options).expect("the ranks start");
    fill(case, &mut session, &model);
    session
}

/// The model without a cache: all tokens are read again for each.
struct Uncached {
    session: Session,
    read: Vec<i32>,
    seq: usize,
    logits: Vec<f32>,
}

impl NextLogits for Uncached {
    fn read(&mut self, tokens: &[u32]) -> Result<&[f32], runtime::Failure> {
        self.read.extend(tokens.iter().map(|token| *token as i32));
        let mut padded = self.read.clone();
        padded.resize(self.seq, 0);
        self.session.infer(LOGITS, &Batch { tokens: &padded, ..Batch::default() })?;
        let output = self.session.output(LOGITS, 0);
        let vocab = output.dims[2];
        let row = &output.to_f64()[(self.read.len() - 1) * vocab..self.read.len() * vocab];
        self.logits = row.iter().map(|x| *x as f32).collect();
        Ok(&self.logits)
    }

    fn capacity(&self) -> usize {
        self.seq
    }
}

fn check_text(case: &str, dtype: DType) {
    let (prompt, text) = (tokens(case, "prompt"), tokens(case, "generated"));
    let ending = Ending { tokens_max: text.len() - prompt.len(), stops: Vec::new() };
    let mut all = |_| ControlFlow::Continue(());
    for mesh in [meshes(case), vec![mesh(1, 2, 1), mesh(1, 2, 2)]].concat() {
        let options = Options { capacity: text.len() - 1, mesh, dtype, threads_per_rank: 1 };
        let mut load = |session: &mut Session, model: &Model| {
            fill(case, session, model);
            Ok(())
        };
        let generator = Generator::new(&description(case), &options, &mut load);
        let mut generator = generator.unwrap_or_else(|why| panic!("{case} {mesh}: {why:?}"));
        // The second time, the caches hold what the first left.
        for _ in 0..2 {
            let new = generator.generate(&prompt, &Sampling::GREEDY, &ending, &mut all);
            let new = new.expect("the text is generated");
            assert_eq!([&prompt[..], &new].concat(), text, "{case} {mesh} {dtype} with a cache");
        }
    }
    let seq = text.len() - 1;
    let session = logits_session(case, seq, 1, mesh(1, 1, 1), dtype);
    let mut uncached = Uncached { session, read: Vec::new(), seq, logits: Vec::new() };
    let new = generate(&mut uncached, &prompt, &Sampling::GREEDY, &ending, &mut all);
    let new = new.expect("the text is generated");
    assert_eq!([&prompt[..], &new].concat(), text, "{case} {dtype} without a cache");
}

#[test]
fn the_text_is_pytorchs_with_a_cache_and_without() {
    for case in CASES {
        for dtype in [DType::F64, DType::F32] {
            check_text(case, dtype);
        }
    }
}

#[test]
fn logits_are_pytorchs() {
    for case in CASES {
        let ids: Vec<i32> = tokens(case, "input_ids").iter().map(|x| *x as i32).collect();
        let theirs = expected(case).read_f64("logits", None).expect("the tensor reads");
        let largest = theirs.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        for (dtype, bound) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
            for mesh in [meshes(case), vec![mesh(1, 2, 1), mesh(1, 2, 2)]].concat() {
                let samples = 2 / mesh.dp;
                let mut session = logits_session(case, ids.len() / 2, samples, mesh, dtype);
                let batch = Batch { tokens: &ids, ..Batch::default() };
                session.infer(LOGITS, &batch).expect("the entry runs");
                let ours = session.output(LOGITS, 0).to_f64();
                assert_eq!(ours.len(), theirs.len());
                let off = ours.iter().zip(&theirs).fold(0.0_f64, |m, (a, b)| m.max((a - b).abs()));
                assert!(off / largest <= bound, "{case} {mesh} {dtype}: {:e}", off / largest);
            }
        }
    }
}

#[test]
fn a_prompt_in_pieces_is_a_prompt_at_once() {
    let case = "llama-tiny";
    let options =
        Options { capacity: 16, mesh: mesh(1, 1, 1), dtype: DType::F64, threads_per_rank: 2 };
    let mut load = |session: &mut Session, model: &Model| {
        fill(case, session, model);
        Ok(())
    };
    let generator = Generator::new(&description(case), &options, &mut load);
    let mut generator = generator.unwrap_or_else(|why| panic!("{why:?}"));
    let ids = &tokens(case, "input_ids")[..16];
    let values = expected(case);
    let vocab = values.get("logits").expect("there are logits").dims[2];
    let theirs = values.read_f64("logits", Some(&[0..1, 15..16, 0..vocab]));
    let theirs = theirs.expect("the tensor reads");
    let mut results = Vec::new();
    for pieces in [&[16][..], &[5, 11], &[1, 14, 1], &[7, 7, 2]] {
        let decoder = generator.decoder();
        decoder.reset();
        let (mut from, mut logits) = (0, Vec::new());
        for piece in pieces {
            logits = decoder.read(&ids[from..from + piece]).expect("the tokens are read").to_vec();
            from += piece;
        }
        results.push(logits);
    }
    for logits in &results {
        for (a, b) in logits.iter().zip(&theirs) {
            assert!((f64::from(*a) - b).abs() <= 1e-5, "{a} for {b}");
        }
    }
}
