//! What rewriting may change of a run: nothing by rules that keep every bit, rounding by others.

use codegen::prepare::{Preparation, Purpose, prepare};
use ir::import::{self, Model};
use ir::plan::Keep;
use ir::precision::Precision;
use ir::rewrite::idiom;
use ir::rewrite::rules::rules;
use ir::rewrite::saturate::Selection;
use ir::{DType, Mesh, Module};
use runtime::execute::{Batch, Scalars};

use crate::mesh::{batch, gpt2, llama, random_weights};
use crate::model::{Wanted, load, plan, session};

const SEQ: usize = 33;
const SAMPLES: usize = 2;
const STEPS: u32 = 20;

/// The losses of a training run.
fn losses(model: &Model, module: &Module, selection: Selection) -> Vec<f64> {
    let (purpose, precision) = (Purpose::Training, Precision::uniform(DType::F32));
    let after = &mut |_, _: &Module| {};
    let preparation = Preparation { purpose, selection, precision, after };
    let (module, _) = prepare(module.clone(), "loss", preparation).expect("it is prepared");
    let wanted = Wanted {
        mesh: Mesh::ONE,
        microbatch_size: SAMPLES,
        microbatch_count: 1,
        keep: Keep::Full,
        sequence: false,
    };
    let plan = plan(&module, SEQ, DType::F32, wanted).expect("a plan");
    let mut session = session(&module, &plan);
    load(&mut session, &random_weights(model, 5));
    let (tokens, labels) = batch(3, SAMPLES, SEQ, 259);
    let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
    let step = |step: u32| {
        let correction = |beta: f64| 1.0 - beta.powi(step as i32);
        let scalars = Scalars {
            seed: 1,
            step,
            rate: 1e-3,
            correction1: correction(0.9),
            correction2: correction(0.999),
            clip: f64::INFINITY,
            ..Scalars::default()
        };
        session.step(&batch, scalars).expect("the step runs").loss_sum
    };
    (1..=STEPS).map(step).collect()
}

fn no_rules() -> Selection {
    let without = rules().map(|rule| rule.name).chain(idiom::names());
    Selection { without: without.map(str::to_owned).collect(), ..Selection::exact() }
}

#[test]
fn twenty_steps_have_the_same_losses_with_and_without_rules() {
    for description in [gpt2(), llama()] {
        let options =
            import::Options { seq: SEQ, dtype: DType::F32, dropout: Some(0.0), documents: false };
        let model = import::import(&description, &options).expect("the model is imported");
        let plain = losses(&model, &model.module, no_rules());
        assert!(plain[STEPS as usize - 1] < 0.9 * plain[0], "it does not learn: {plain:?}");
        let exact = losses(&model, &model.module, Selection::for_models());
        assert_eq!(plain, exact, "{}", description.name);
        // Primitives, as an exporter writes them, against the kernels that rules find in them.
        // Attention stays: its definition divides integers, for which there is no kernel.
        let mut flat = model.module.clone();
        ir::inline::inline_composites(&mut flat, |name| name.starts_with("attention"));
        let unfused = losses(&model, &flat, no_rules());
        let fused = losses(&model, &flat, Selection::default());
        assert_ne!(unfused, fused, "nothing was found in {}", description.name);
        for (step, (a, b)) in unfused.iter().zip(&fused).enumerate() {
            let off = (a - b).abs() / a;
            assert!(off <= 1e-5, "{} step {step}: {a} or {b}", description.name);
        }
    }
}
