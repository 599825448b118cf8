//! Training steps on the CPU: the time of one step of gpt2-mini and gpt2 under several meshes.
//!
//! ```text
//! cargo bench --bench step                     # all
//! cargo bench --bench step -- gpt2/seq-256     # one
//! ```
//! `benches/torch_step.py` times the same step in PyTorch eager on the same cores; the ratio of the
//! two is the figure in the README.

#[path = "../tests/end_to_end/model.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod model;

use criterion::{Criterion, criterion_group, criterion_main};
use ir::plan::Keep;
use ir::random::mix;
use ir::{DType, Mesh};
use model::{Wanted, plan, prepared, session_with};
use runtime::execute::{Batch, Scalars};
use runtime::init::Init;

/// One step: the model, the sequence, samples of a step, the mesh, threads of a rank.
struct Case {
    name: &'static str,
    model: &'static str,
    seq: usize,
    samples: usize,
    mesh: Mesh,
    threads: usize,
}

fn mesh(pp: usize, dp: usize, tp: usize) -> Mesh {
    Mesh { pp, dp, tp, ..Mesh::ONE }
}

fn cases() -> Vec<Case> {
    let case = |name, model, seq, samples, mesh, threads| Case {
        name,
        model,
        seq,
        samples,
        mesh,
        threads,
    };
    vec![
        case("gpt2-mini/1-rank", "gpt2-mini", 256, 8, mesh(1, 1, 1), 2),
        case("gpt2-mini/2-dp", "gpt2-mini", 256, 8, mesh(1, 2, 1), 1),
        case("gpt2-mini/4-dp", "gpt2-mini", 256, 8, mesh(1, 4, 1), 1),
        case("gpt2-mini/2-tp", "gpt2-mini", 256, 8, mesh(1, 1, 2), 1),
        case("gpt2-mini/2-pp", "gpt2-mini", 256, 8, mesh(2, 1, 1), 1),
        case("gpt2/seq-256", "gpt2", 256, 1, mesh(1, 1, 1), 2),
        case("gpt2/seq-1024", "gpt2", 1024, 1, mesh(1, 1, 1), 2),
        case("gpt2/seq-1024/2-dp", "gpt2", 1024, 2, mesh(1, 2, 1), 1),
        case("gpt2/seq-1024/2-tp", "gpt2", 1024, 1, mesh(1, 1, 2), 1),
        case("gpt2/seq-1024/2-pp", "gpt2", 1024, 2, mesh(2, 1, 1), 1),
    ]
}

fn steps(criterion: &mut Criterion) {
    for case in cases() {
        let description = ir::import::preset(case.model).expect("a preset");
        let (_, module) = prepared(&description, case.seq, DType::F32, 0.0);
        // A pipeline of one micro-batch would only ever keep one stage busy.
        let microbatches = if case.mesh.pp > 1 { case.samples.min(4) } else { 1 };
        let wanted = Wanted {
            mesh: case.mesh,
            microbatch_size: case.samples / case.mesh.dp / microbatches,
            microbatch_count: microbatches,
            keep: Keep::Full,
            sequence: true,
        };
        let mut group = criterion.benchmark_group(case.name);
        group.sample_size(10);
        group.bench_function("step", |bencher| {
            let plan = plan(&module, case.seq, DType::F32, wanted).expect("a plan");
            let mut session = session_with(&module, &plan, case.threads);
            session.init_weights(1, &|_, dims: &[usize]| match dims.len() {
                1 => Init::Ones,
                _ => Init::Normal { std: 0.02, zero_row: None },
            });
            let vocab = if case.model == "gpt2-mini" { 256 } else { 50257 };
            let tokens: Vec<i32> =
                (0..case.samples * case.seq).map(|i| (mix(i as u64) % vocab) as i32).collect();
            let batch = Batch { tokens: &tokens, labels: &tokens, ..Batch::default() };
            let scalars = Scalars { rate: 1e-4, ..Scalars::default() };
            bencher.iter(|| session.step(&batch, scalars).expect("the step runs"));
        });
        group.finish();
    }
}

criterion_group!(benches, steps);
criterion_main!(benches);
