//! Packed documents that are kept apart: a sample of several yields the loss and the gradients that
//! each yields by itself.

use std::collections::BTreeMap;

use ir::autodiff::training_step;
use ir::eval::eval;
use ir::import::{Description, Model, Options, import, read_config};
use ir::plan::Keep;
use ir::random::mix;
use ir::{DType, Mesh, Module};
use runtime::execute::{Batch, Scalars};

use crate::cli::tiny;
use crate::mesh::{Weights, arguments, gpt2, llama, random_weights};
use crate::model::{Wanted, load, plan, session};

const SEQ: usize = 36;
const SAMPLES: usize = 8;
const VOCAB: u64 = 259;

fn model(description: &Description, seq: usize, documents: bool, dropout: f64) -> Model {
    let options = Options { seq, dtype: DType::F64, dropout: Some(dropout), documents };
    import(description, &options).expect("the model is imported")
}

fn prepared(model: &Model) -> Module {
    let module = codegen::prepare::prepare_training(model.module.clone(), "loss");
    module.expect("the module is prepared")
}

/// Learned positions with scores that are biased, and rotary ones with a window: by the config.
fn others() -> [Description; 3] {
    let read = |text, name| read_config("config.json", text, name).expect("the config reads");
    let bloom = r#"{"model_type": "bloom", "n_layer": 2, "n_head": 3, "hidden_size": 36,
        "vocab_size": 259}"#;
    let opt = r#"{"model_type": "opt", "num_hidden_layers": 2, "num_attention_heads": 3,
        "hidden_size": 36, "ffn_dim": 72, "word_embed_proj_dim": 36, "vocab_size": 259,
        "max_position_embeddings": 40}"#;
    let mistral = r#"{"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 259,
        "max_position_embeddings": 40, "sliding_window": 5}"#;
    [read(bloom, "bloom"), read(opt, "opt"), read(mistral, "mistral")]
}

/// A global batch of packed documents.
struct Packed {
    tokens: Vec<i32>,
    labels: Vec<i32>,
    documents: Vec<i32>,
    /// Where each document lies in the batch.
    spans: Vec<(usize, usize)>,
}

impl Packed {
    /// Documents of one token up to a whole sample.
    fn draw(seed: u64) -> Packed {
        let word = |at: usize| mix(seed << 32 | at as u64);
        let count = SAMPLES * SEQ;
        let tokens: Vec<i32> = (0..count).map(|at| (word(at) % VOCAB) as i32).collect();
        let (mut labels, mut documents, mut spans) = (Vec::new(), Vec::new(), Vec::new());
        for sample in 0..SAMPLES {
            let mut start = 0;
            while start < SEQ {
                let size = match sample {
                    0 => SEQ,
                    _ => (1 + word(count + spans.len()) as usize % 14).min(SEQ - start),
                };
                let first = sample * SEQ + start;
                spans.push((first, size));
                documents.extend(vec![start as i32; size]);
                labels.extend(&tokens[first + 1..first + size]);
                labels.push(-100);
                start += size;
            }
        }
        Packed { tokens, labels, documents, spans }
    }

    fn batch(&self) -> Batch<'_> {
        let Packed { tokens, labels, documents, .. } = self;
        Batch { tokens, labels, documents, ..Batch::default() }
    }

    /// Sums of losses and gradients over documents, each by itself on the interpreter.
    fn alone(&self, description: &Description, weights: &Weights) -> Sums {
        let mut sums = Sums { loss: 0.0, count: 0.0, grads: BTreeMap::new() };
        for &(first, size) in &self.spans {
            let model = model(description, size, false, 0.0);
            let mut module = model.module.clone();
            let step = training_step(&mut module, "loss").expect("the entry is differentiable");
            let [tokens, labels] = [&self.tokens, &self.labels].map(|all| &all[first..][..size]);
            let args = arguments(&model, weights, [tokens, labels], size);
            let results = eval(&module, &step, &args).expect("the step evaluates");
            sums.loss += results[0].scalar();
            sums.count += results[1].scalar();
            for (weight, grad) in model.weights.iter().zip(&results[2..]) {
                let grad = grad.to_f64();
                let sum =
                    sums.grads.entry(weight.name.clone()).or_insert_with(|| vec![0.0; grad.len()]);
                sum.iter_mut().zip(grad).for_each(|(sum, term)| *sum += term);
            }
        }
        sums
    }
}

struct Sums {
    loss: f64,
    count: f64,
    grads: BTreeMap<String, Vec<f64>>,
}

/// Compares one step of each mesh with the documents alone.
fn check(description: &Description, seed: u64, wanted: &[Wanted]) {
    let model = model(description, SEQ, true, 0.0);
    let module = prepared(&model);
    let weights = random_weights(&model, seed);
    let packed = Packed::draw(seed);
    let sums = packed.alone(description, &weights);
    let largest = sums.grads.values().flatten().fold(0.0_f64, |m, g| m.max(g.abs()));
    for wanted in wanted {
        let what = format!("{} seed {seed} {wanted:?}", description.name);
        let plan = plan(&module, SEQ, DType::F64, *wanted);
        let plan = plan.unwrap_or_else(|why| panic!("{what}: {why}"));
        let mut session = session(&module, &plan);
        load(&mut session, &weights);
        let evaluated = session.evaluate(&packed.batch()).expect("the evaluation runs");
        let report = session.step(&packed.batch(), Scalars::default()).expect("the step runs");
        for report in [&evaluated, &report] {
            assert_eq!(report.count, sums.count, "{what}");
            let off = (report.loss_sum - sums.loss).abs() / sums.loss;
            assert!(off <= 1e-11, "{what}: loss {} for {}", report.loss_sum, sums.loss);
        }
        for (name, expected) in &sums.grads {
            let found = session.read_grad(name).expect("the gradient is there").to_f64();
            let scale = expected.iter().fold(1e-3 * largest, |m, g| m.max(g.abs()));
            let off = found.iter().zip(expected).fold(0.0_f64, |m, (a, b)| m.max((a - b).abs()));
            assert!(off / scale <= 1e-10, "{what}: gradient of {name} off by {:e}", off / scale);
        }
    }
}

/// Meshes of `[pp, dp, cp, tp]`.
fn wanted(meshes: &[[usize; 4]], keep: Keep) -> Vec<Wanted> {
    let each = |&[pp, dp, cp, tp]: &[usize; 4]| {
        let of = move |sequence| Wanted {
            mesh: Mesh { pp, dp, cp, tp, ..Mesh::ONE },
            microbatch_size: SAMPLES / dp / 2,
            microbatch_count: 2,
            keep,
            sequence,
        };
        std::iter::once(of(false)).chain((tp > 1).then(|| of(true)))
    };
    meshes.iter().flat_map(each).collect()
}

#[test]
fn packed_documents_are_those_alone() {
    let meshes =
        [[1, 1, 1, 1], [1, 4, 1, 1], [1, 1, 1, 3], [3, 1, 1, 1], [2, 2, 1, 3], [1, 2, 2, 1]];
    check(&gpt2(), 1, &wanted(&meshes, Keep::Full));
    check(&llama(), 2, &wanted(&meshes, Keep::None));
}

#[test]
fn other_positions_are_of_documents_too() {
    for description in others() {
        check(
            &description,
            3,
            &wanted(&[[1, 1, 1, 1], [2, 2, 1, 1], [1, 1, 3, 2]], Keep::AllButAttention),
        );
    }
}

/// What documents are not given is that each sample is one.
#[test]
fn a_sample_without_documents_is_one() {
    let description = gpt2();
    let packed = Packed::draw(4);
    let [apart, plain] = [true, false].map(|documents| model(&description, SEQ, documents, 0.0));
    let weights = random_weights(&plain, 4);
    let wanted = wanted(&[[1, 2, 1, 1]], Keep::Full)[0];
    let losses = [&apart, &plain].map(|model| {
        let module = prepared(model);
        let plan = plan(&module, SEQ, DType::F64, wanted).expect("a plan");
        let mut session = session(&module, &plan);
        load(&mut session, &weights);
        let batch = Batch { documents: &[], ..packed.batch() };
        session.step(&batch, Scalars::default()).expect("the step runs").loss_sum
    });
    assert_eq!(losses[0], losses[1]);
}

/// With dropout, layouts agree: attention draws by head and position as without documents.
#[test]
fn layouts_drop_the_same_elements_of_documents() {
    let description = llama();
    let model = model(&description, SEQ, true, 0.2);
    let (module, weights, packed) = (prepared(&model), random_weights(&model, 5), Packed::draw(5));
    let losses =
        wanted(&[[1, 1, 1, 1], [2, 2, 1, 3], [1, 2, 3, 1]], Keep::None).into_iter().map(|wanted| {
            let plan = plan(&module, SEQ, DType::F64, wanted).expect("a plan");
            let mut session = session(&module, &plan);
            load(&mut session, &weights);
            let scalars = Scalars { seed: 7, ..Scalars::default() };
            session.step(&packed.batch(), scalars).expect("the step runs").loss_sum
        });
    let losses: Vec<f64> = losses.collect();
    assert!(losses.iter().all(|loss| (loss / losses[0] - 1.0).abs() <= 1e-11), "{losses:?}");
}

#[test]
fn a_run_keeps_documents_apart_and_resumes_bit_for_bit() {
    let scratch = tiny("documents");
    let flags = "--from-scratch --seq 16 --gbs 4 --ranks 2 --document-mask --eod-token 10";
    let train = |steps: usize, out: &str| {
        scratch.json(&format!("train tiny --data text {flags} --steps {steps} --out {out} --json"))
    };
    let whole = train(6, "whole");
    train(3, "half");
    let resumed = scratch.json("train --resume half --steps 6 --json");
    assert_eq!(resumed["loss"], whole["loss"]);
    assert_eq!(resumed["validation_loss"], whole["validation_loss"]);
    let plain = scratch.json(
        "train tiny --data text --from-scratch --seq 16 --gbs 4 --ranks 2 --steps 6 --out plain \
         --json",
    );
    assert_ne!(plain["loss_first"], whole["loss_first"]);
    let verified = scratch.json("verify tiny --ranks 4 --document-mask --json");
    assert_eq!(verified["ok"], true);
    let verified = scratch.json("verify tiny --ranks 1 --document-mask --json");
    assert_eq!(verified["ok"], true);
    let plan = scratch.answer("plan tiny --ranks 2 --seq 16 --gbs 4 --document-mask --plan");
    scratch.write("apart.plan", &plan);
    let compiled = scratch.json(
        "compile tiny --ranks 2 --seq 16 --gbs 4 --document-mask --plan apart.plan -o apart.gtl \
         --json",
    );
    assert_eq!(compiled["file"], "apart.gtl");
    scratch.answer("run apart.gtl");
}

/// A graph masks its attention itself, by documents that it takes.
#[test]
fn a_graph_that_takes_documents_is_verified_and_no_other() {
    let scratch = tiny("documents-graph");
    for (name, documents) in [("apart", true), ("plain", false)] {
        let module = model(&llama(), 8, documents, 0.0).module;
        scratch.write(&format!("{name}.graph"), &module.to_string());
    }
    let verified = scratch.json("verify apart.graph --ranks 2 --seq 8 --document-mask --json");
    assert_eq!(verified["ok"], true);
    let output = scratch.run("verify plain.graph --ranks 2 --seq 8 --document-mask");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{errors}");
    assert!(errors.contains("does not take `%documents: i32[B, S]`"), "{errors}");
}
