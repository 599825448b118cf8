//! What training does besides losses and gradients: evaluation, and weights that decay or not.

use std::collections::BTreeMap;

use ir::import::Description;
use ir::plan::{Keep, Optimizer};
use ir::{DType, Mesh};
use runtime::execute::{Batch, Scalars};

use crate::mesh::{arguments, batch, gpt2, llama, random_weights};
use crate::model::{Wanted, load, plan, prepared, session};

const SEQ: usize = 33;
const SAMPLES: usize = 8;

/// Every axis alone, all together, and with sequences cut.
fn wanted() -> Vec<Wanted> {
    let meshes = [(1, 1, 1), (3, 1, 1), (1, 4, 1), (1, 1, 3), (2, 2, 2)];
    let each = |(pp, dp, tp)| {
        let of = move |sequence| Wanted {
            mesh: Mesh { pp, dp, tp, ..Mesh::ONE },
            microbatch_size: 1,
            microbatch_count: SAMPLES / dp,
            keep: Keep::Full,
            sequence,
        };
        std::iter::once(of(false)).chain((tp > 1).then(|| of(true)))
    };
    meshes.into_iter().flat_map(each).collect()
}

fn scalars(seed: u32, rate: f64) -> Scalars {
    Scalars {
        seed,
        step: 1,
        rate,
        correction1: 0.1,
        correction2: 0.001,
        clip: f64::INFINITY,
        ..Scalars::default()
    }
}

#[test]
fn evaluations_drop_nothing() {
    for description in [gpt2(), llama()] {
        let (model, module) = prepared(&description, SEQ, DType::F64, 0.5);
        let weights = random_weights(&model, 5);
        let (tokens, labels) = batch(3, SAMPLES, SEQ, 259);
        let args = arguments(&model, &weights, [&tokens, &labels], SEQ);
        let reference = ir::eval::eval(&model.module, "loss_eval", &args);
        let reference = reference.expect("the entry evaluates")[0].to_f64()[0];
        let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
        for wanted in wanted() {
            let plan = plan(&module, SEQ, DType::F64, wanted).expect("a plan");
            let mut session = session(&module, &plan);
            load(&mut session, &weights);
            let mut trained = Vec::new();
            for seed in [1, 2] {
                let report = session.step(&batch, scalars(seed, 0.0)).expect("the step runs");
                trained.push(report.loss_sum);
                let loss = session.evaluate(&batch).expect("the evaluation runs").loss_sum;
                let off = (loss - reference).abs() / reference;
                let what = format!("{} {wanted:?} seed {seed}", description.name);
                assert!(off <= 1e-10, "{what}: {loss} for {reference}");
            }
            // What the steps dropped is another matter.
            let far = |loss: &f64| (loss - reference).abs() / reference > 1e-6;
            assert!(trained.iter().all(far) && trained[0] != trained[1], "{trained:?}");
        }
    }
}

/// The weights after one step.
fn updated(
    description: &Description,
    wanted: Wanted,
    optimizer: Optimizer,
) -> BTreeMap<String, Vec<f64>> {
    let (model, module) = prepared(description, SEQ, DType::F64, 0.0);
    let mut plan = plan(&module, SEQ, DType::F64, wanted).expect("a plan");
    plan.optimizer = optimizer;
    let mut session = session(&module, &plan);
    load(&mut session, &random_weights(&model, 5));
    let (tokens, labels) = batch(3, SAMPLES, SEQ, 259);
    let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
    session.step(&batch, scalars(1, RATE)).expect("the step runs");
    let value = |name: &String| session.read_weight(name, runtime::execute::Part::Weight);
    let named = |name: &String| (name.clone(), value(name).expect("it is there").to_f64());
    model.weights.iter().map(|w| named(&w.name)).collect()
}

const RATE: f64 = 0.125;

#[test]
fn matrices_and_tables_decay_and_biases_and_norms_do_not() {
    // Decay is decoupled: what a step adds besides it is the same with any decay. Of the tensors
    // that Hugging Face stores, GPT-2 was trained with decay of those of two dims.
    let adamw = |decay, decay_biases| Optimizer::AdamW {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-4,
        decay,
        decay_biases,
    };
    let sgd = |decay, decay_biases| Optimizer::Sgd { decay, decay_biases };
    for description in [gpt2(), llama()] {
        let (model, _) = prepared(&description, SEQ, DType::F64, 0.0);
        let first = random_weights(&model, 5);
        let all = wanted();
        let adamw = all.iter().map(|w| (w, [adamw(0.0, 0.0), adamw(0.5, 0.0), adamw(0.5, 0.5)]));
        let sgd = all[..1].iter().map(|w| (w, [sgd(0.0, 0.0), sgd(0.5, 0.0), sgd(0.5, 0.5)]));
        for (wanted, optimizers) in adamw.chain(sgd) {
            let [none, some, all] = optimizers.map(|o| updated(&description, *wanted, o));
            let mut counts = [0, 0];
            for weight in &model.weights {
                let is_matrix = weight.source.dims.len() > 1;
                counts[usize::from(is_matrix)] += 1;
                let name = &weight.name;
                for (at, before) in first[name].1.iter().enumerate() {
                    let decayed = none[name][at] - RATE * 0.5 * before;
                    let expected = if is_matrix { decayed } else { none[name][at] };
                    let off = (some[name][at] - expected).abs();
                    assert!(off < 1e-12, "{name}[{at}] {wanted:?}: {}", some[name][at]);
                    assert!((all[name][at] - decayed).abs() < 1e-12, "{name}[{at}]");
                }
            }
            assert!(counts[0] > 9 && counts[1] > 9, "{counts:?}");
        }
    }
}
