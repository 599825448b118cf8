//! Rewriting: the time that it takes for gpt2 of 12 and of 48 layers, and what it gives to a step.
//!
//! ```text
//! cargo bench --bench rewrite              # all
//! cargo bench --bench rewrite -- prepare   # one group
//! ```
//! A function is looked at once, however often it is called, so that 48 layers take the time of 12
//! but for the entry, which calls each layer. `prepare` is all that a module goes through before
//! it is planned, `simplify` one run of all rules on a training step.

#[path = "../tests/end_to_end/model.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod model;

use codegen::prepare::{Preparation, Purpose, prepare, prepare_training};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use ir::autodiff::training_step;
use ir::import::{Options, import, preset};
use ir::plan::Keep;
use ir::random::mix;
use ir::rewrite::rules::rules;
use ir::rewrite::saturate::Selection;
use ir::rewrite::{idiom, simplify};
use ir::{DType, Mesh, Module};
use model::{Wanted, plan, session_with};
use runtime::execute::{Batch, Scalars};
use runtime::init::Init;

fn gpt2(name: &str, seq: usize) -> Module {
    let options = Options { seq, dtype: DType::F32, dropout: Some(0.0) };
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

/// A step of gpt2 with the rules, and without any.
fn steps(criterion: &mut Criterion) {
    let seq = 256;
    let every_rule = rules().map(|rule| rule.name).chain(idiom::names());
    let every_rule: Vec<String> = every_rule.map(str::to_owned).collect();
    for (name, without) in [("rewritten", Vec::new()), ("as-imported", every_rule)] {
        let selection = Selection { without, ..Selection::exact() };
        let after = &mut |_: &'static str, _: &Module| {};
        let preparation = Preparation { purpose: Purpose::Training, selection, after };
        let prepared = prepare(gpt2("gpt2", seq), "loss", preparation);
        let (module, _) = prepared.expect("it is prepared");
        let wanted = Wanted {
            mesh: Mesh { pp: 1, dp: 1, tp: 1 },
            microbatch_size: 1,
            microbatch_count: 1,
            keep: Keep::Full,
            sequence: true,
        };
        let mut group = criterion.benchmark_group("step");
        group.sample_size(10);
        group.bench_function(name, |bencher| {
            let plan = plan(&module, seq, DType::F32, wanted).expect("a plan");
            let mut session = session_with(&module, &plan, 2);
            session.init_weights(1, &|_, dims: &[usize]| match dims.len() {
                1 => Init::Ones,
                _ => Init::Normal { std: 0.02 },
            });
            let tokens: Vec<i32> = (0..seq).map(|i| (mix(i as u64) % 50257) as i32).collect();
            let batch = Batch { tokens: &tokens, labels: &tokens, ..Batch::default() };
            let scalars = Scalars { rate: 1e-4, ..Scalars::default() };
            bencher.iter(|| session.step(&batch, scalars).expect("the step runs"));
        });
        group.finish();
    }
}

criterion_group!(benches, times, steps);
criterion_main!(benches);
