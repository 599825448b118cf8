//! Rewriting: the time to simplify gpt2 with its gradients, of 12 and of 48 layers.
//!
//! ```text
//! cargo bench --bench rewrite
//! ```
//! A function is looked at once, however often it is called, so that both take the same time but
//! for the entry, which calls each layer.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use ir::DType;
use ir::autodiff::training_step;
use ir::import::{Options, import, preset};
use ir::rewrite::simplify;

fn simplified(criterion: &mut Criterion) {
    for (name, layers) in [("gpt2", 12), ("gpt2-xl", 48)] {
        let description = preset(name).expect("a preset");
        let options = Options { seq: 1024, dtype: DType::F32, dropout: Some(0.0) };
        let mut module = import(&description, &options).expect("it imports").module;
        training_step(&mut module, "loss").expect("it has gradients");
        let mut group = criterion.benchmark_group("simplify");
        group.sample_size(10);
        group.bench_function(format!("{layers}-layers"), |bencher| {
            let simplify = |mut module| simplify(&mut module, &ir::rewrite::Options::default());
            bencher.iter_batched(|| module.clone(), simplify, BatchSize::LargeInput);
        });
        group.finish();
    }
}

criterion_group!(benches, simplified);
criterion_main!(benches);
