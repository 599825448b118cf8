//! Rewriting: the time that it takes for gpt2 of 12 and of 48 layers, and what it gives to a step.
//!
//! ```text
//! cargo bench --bench rewrite              # all
//! cargo bench --bench rewrite -- prepare   # one group
//! cargo bench --bench rewrite -- step      # training steps only
//! ```
//! A function is looked at once, however often it is called, so that 48 layers take the time of 12
//! but for the entry, which calls each layer. `prepare` is all that a module goes through before
//! it is planned, `simplify` one run of all rules on a training step. `step` is a table of training
//! steps with the rules and without any; both take turns.
#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

#[path = "../tests/end_to_end/model.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod model;

use std::time::Instant;

use codegen::prepare::{Preparation, Purpose, prepare, prepare_training};
use criterion::{BatchSize, Criterion, criterion_group};
use ir::autodiff::training_step;
use ir::import::{Options, import, preset};
use ir::plan::Keep;
use ir::program::Step;
use ir::random::mix;
use ir::rewrite::rules::rules;
use ir::rewrite::saturate::Selection;
use ir::rewrite::{idiom, simplify};
use ir::{DType, Mesh, Module};
use model::{Wanted, plan, session_with};
use runtime::execute::{Batch, Scalars, Session};
use runtime::init::Init;

fn gpt2(name: &str, seq: usize) -> Module {
    let options = Options { seq, dtype: DType::F32, dropout: Some(0.0), documents: false };
    import(&preset(name).expect("a preset"), &options).expect("it imports").module
}

fn times(criterion: &mut Criterion) {
    for (name, layers) in [("gpt2", 12), ("gpt2-xl", 48)] {
        let plain = gpt2(name, 1024);
        let mut group = criterion.benchmark_group("prepare");
        group.sample_size(10);
        group.bench_function(format!("{layers}-layers"), |bencher| {
            let prepare = |module| prepare_training(module, "loss").expect("it is prepared");
            bencher.iter_batched(|| plain.clone(), prepare, BatchSize::LargeInput);
        });
        group.finish();
        let mut step = plain.clone();
        training_step(&mut step, "loss").expect("it has gradients");
        let mut group = criterion.benchmark_group("simplify");
        group.sample_size(10);
        group.bench_function(format!("{layers}-layers"), |bencher| {
            let simplify = |mut module| simplify(&mut module, &ir::rewrite::Options::default());
            bencher.iter_batched(|| step.clone(), simplify, BatchSize::LargeInput);
        });
        group.finish();
    }
}

/// Steps of a model that are timed, after one that is not.
const CASES: [(&str, usize, usize); 2] = [("gpt2-mini", 8, 8), ("gpt2", 1, 3)];

/// Training steps with the rules and without any, in turns, so that both meet the same machine.
fn steps() {
    println!("model, rules, launches of a step, MiB of arena, fastest and median seconds");
    let every_rule = rules().map(|rule| rule.name).chain(idiom::names());
    let every_rule: Vec<String> = every_rule.map(str::to_owned).collect();
    for (model, samples, count) in CASES {
        let kinds = [("all exact", Vec::new()), ("none", every_rule.clone())];
        let mut runs = kinds.map(|(name, without)| (name, Run::new(model, samples, without)));
        for at in 0..=count {
            for (_, run) in &mut runs {
                let seconds = run.step();
                run.seconds.extend((at > 0).then_some(seconds));
            }
        }
        for (name, run) in &mut runs {
            run.seconds.sort_by(f64::total_cmp);
            let (fastest, median) = (run.seconds[0], run.seconds[run.seconds.len() / 2]);
            let Run { launches, arena_bytes, .. } = run;
            let mib = *arena_bytes >> 20;
            println!("{model}, {name}, {launches}, {mib}, {fastest:.3}, {median:.3}");
        }
    }
}

/// A model that is trained, and the times of its steps.
struct Run {
    session: Session,
    tokens: Vec<i32>,
    launches: usize,
    arena_bytes: u64,
    seconds: Vec<f64>,
}

impl Run {
    fn new(model: &str, samples: usize, without: Vec<String>) -> Run {
        let seq = 256;
        let selection = Selection { without, ..Selection::exact() };
        let after = &mut |_: &'static str, _: &Module| {};
        let precision = ir::precision::Precision::uniform(ir::DType::F32);
        let purpose = Purpose::Training;
        let preparation = Preparation { purpose, selection, precision, after };
        let prepared = prepare(gpt2(model, seq), "loss", preparation);
        let (module, _) = prepared.expect("it is prepared");
        let wanted = Wanted {
            mesh: Mesh::ONE,
            microbatch_size: samples,
            microbatch_count: 1,
            keep: Keep::Full,
            sequence: true,
        };
        let plan = plan(&module, seq, DType::F32, wanted).expect("a plan");
        let mut session = session_with(&module, &plan, 2);
        session.init_weights(1, &|_, dims: &[usize]| match dims.len() {
            1 => Init::Ones,
            _ => Init::Normal { std: 0.02, zero_row: None },
        });
        let program = session.classes().program_of(0);
        let launches = program.steps.iter().map(|step| match step {
            Step::Call { routine, .. } => program.routines[*routine].instructions.len(),
            Step::Feed { .. }
            | Step::Send { .. }
            | Step::Receive { .. }
            | Step::Move { .. }
            | Step::Await { .. } => 0,
        });
        let (launches, arena_bytes) = (launches.sum(), program.arena_bytes);
        let vocab = if model == "gpt2-mini" { 256 } else { 50257 };
        let tokens = (0..samples * seq).map(|i| (mix(i as u64) % vocab) as i32).collect();
        Run { session, tokens, launches, arena_bytes, seconds: Vec::new() }
    }

    /// The seconds of one step.
    fn step(&mut self) -> f64 {
        let batch = Batch { tokens: &self.tokens, labels: &self.tokens, ..Batch::default() };
        let scalars = Scalars { rate: 1e-4, ..Scalars::default() };
        let start = Instant::now();
        self.session.step(&batch, scalars).expect("the step runs");
        start.elapsed().as_secs_f64()
    }
}

criterion_group!(benches, times);

fn main() {
    let filter = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    if filter.as_ref().is_none_or(|word| "step".contains(word.as_str())) {
        steps();
    }
    benches();
}
