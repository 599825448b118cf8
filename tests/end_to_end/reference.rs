//! The CPU against PyTorch: loss, gradients and AdamW steps of the models in `tests/reference`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ir::import::{Description, Model, read_config};
use ir::plan::{Keep, Optimizer};
use ir::{DType, Mesh, Module};
use runtime::execute::{Batch, Part, Scalars, Session, StepReport};
use runtime::load::{collect_weights, export_weights, load_weights};
use runtime::weights::Weights;

use crate::model::{Wanted, plan, prepared, session};

const CASES: [&str; 4] = ["gpt2-tiny", "gpt2-untied", "llama-tiny", "llama-bias-tied"];
const RATE: f64 = 1e-3;

/// A model of `tests/reference`, with a batch and what PyTorch made of it.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) folder: PathBuf,
    expected: Weights,
    pub(crate) seq: usize,
    pub(crate) tokens: Vec<i32>,
    pub(crate) labels: Vec<i32>,
}

impl Case {
    pub(crate) fn open(name: &'static str) -> Case {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(name);
        let expected =
            Weights::open(&folder.join("expected.safetensors")).expect("the values open");
        let numbers = |tensor: &str| expected.read_f64(tensor, None).expect("the tensor reads");
        let seq = expected.get("input_ids").expect("there are tokens").dims[1];
        let tokens: Vec<i32> = numbers("input_ids").iter().map(|x| *x as i32).collect();
        // transformers shifts: the label of a position is the next token's.
        let given = numbers("labels");
        let label = |at: usize| if at % seq + 1 == seq { -100 } else { given[at + 1] as i32 };
        let labels = (0..given.len()).map(label).collect();
        Case { name, folder, seq, tokens, labels, expected }
    }

    fn numbers(&self, tensor: &str) -> Vec<f64> {
        self.expected.read_f64(tensor, None).expect("the tensor reads")
    }

    pub(crate) fn description(&self) -> Description {
        let text = std::fs::read_to_string(self.folder.join("config.json")).expect("a config");
        read_config("config.json", &text, self.name).expect("the config reads")
    }

    fn prepared(&self, dtype: DType) -> (Model, Module) {
        prepared(&self.description(), self.seq, dtype, 0.0)
    }

    fn start(&self, model: &Model, module: &Module, dtype: DType, mesh: Mesh) -> Session {
        let wanted = Wanted {
            mesh,
            microbatch_size: 1,
            microbatch_count: 2 / mesh.dp,
            keep: Keep::Full,
            sequence: mesh.tp > 1,
        };
        let mut plan = plan(module, self.seq, dtype, wanted).expect("a plan");
        plan.optimizer =
            Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-4, decay: 0.1, decay_biases: 0.1 };
        let mut session = session(module, &plan);
        let weights = Weights::open(&self.folder).expect("the weights open");
        load_weights(&mut session, &model.weights, &weights).expect("the weights fit");
        session
    }

    fn step(&self, session: &mut Session, step: u32, rate: f64, clip: f64) -> StepReport {
        let scalars = Scalars {
            seed: 0,
            step,
            rate,
            correction1: 1.0 - 0.9_f64.powi(step as i32),
            correction2: 1.0 - 0.999_f64.powi(step as i32),
            clip,
            ..Scalars::default()
        };
        let batch = Batch { tokens: &self.tokens, labels: &self.labels, ..Batch::default() };
        session.step(&batch, scalars).expect("the step runs")
    }

    /// Holds all tensors of a session against those named `prefix.<weight>`; `scale` multiplies
    /// ours first. The error is relative to the tensor's largest entry, or 1e-3 of the model's.
    fn compare(&self, ours: &BTreeMap<String, Vec<f64>>, prefix: &str, scale: f64, bound: f64) {
        let theirs: BTreeMap<&String, Vec<f64>> =
            ours.keys().map(|name| (name, self.numbers(&format!("{prefix}.{name}")))).collect();
        let largest = |values: &[f64]| values.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        let overall = theirs.values().map(|v| largest(v.as_slice())).fold(0.0, f64::max);
        for (name, theirs) in theirs {
            let pairs = ours[name].iter().zip(&theirs);
            let off = pairs.map(|(a, b)| (a * scale - b).abs()).fold(0.0, f64::max);
            let error = off / largest(&theirs).max(1e-3 * overall);
            assert!(error <= bound, "{}: {prefix}.{name} is off by {error:e}", self.name);
        }
    }
}

fn named(session: &Session, model: &Model, part: Part) -> BTreeMap<String, Vec<f64>> {
    let tensors = collect_weights(session, &model.weights, part);
    tensors.into_iter().map(|t| (t.name.clone(), t.values.to_f64())).collect()
}

fn meshes() -> [Mesh; 3] {
    let mesh = |pp, dp, tp| Mesh { pp, dp, tp, ..Mesh::ONE };
    [mesh(1, 1, 1), mesh(1, 2, 1), mesh(1, 1, 2)]
}

#[test]
fn loss_and_gradients_are_pytorchs() {
    for name in CASES {
        let case = Case::open(name);
        for (dtype, bound) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
            let (model, module) = case.prepared(dtype);
            for mesh in meshes() {
                let mut session = case.start(&model, &module, dtype, mesh);
                let report = case.step(&mut session, 1, 0.0, f64::INFINITY);
                let (loss, expected) = (report.loss(), case.numbers("loss")[0]);
                assert!((loss - expected).abs() <= bound * expected, "{name} {mesh}: {loss}");
                let count = case.labels.iter().filter(|l| **l >= 0).count() as f64;
                let grads = named(&session, &model, Part::Grad);
                case.compare(&grads, "grad", 1.0 / count, bound);
                let theirs = grads.keys().flat_map(|name| case.numbers(&format!("grad.{name}")));
                let norm = theirs.map(|x| x * x).sum::<f64>().sqrt();
                let off = (report.grad_norm - norm).abs() / norm;
                assert!(off <= bound, "{name} {mesh}: norm {} for {norm}", report.grad_norm);
            }
        }
    }
}

#[test]
fn five_steps_are_pytorchs() {
    for name in CASES {
        let case = Case::open(name);
        for (dtype, bound) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
            let (model, module) = case.prepared(dtype);
            for (set, clip) in [("adamw", f64::INFINITY), ("clip", 0.5)] {
                for mesh in meshes() {
                    let mut session = case.start(&model, &module, dtype, mesh);
                    for step in 0..5 {
                        let loss = case.step(&mut session, step + 1, RATE, clip).loss();
                        let expected = case.numbers(&format!("{set}.{step}.loss"))[0];
                        let off = (loss - expected).abs() / expected;
                        assert!(off <= bound, "{name} {mesh} {set} step {step}: off by {off:e}");
                    }
                    let weights = named(&session, &model, Part::Weight);
                    case.compare(&weights, &format!("{set}.5"), 1.0, bound);
                }
            }
        }
    }
}

#[test]
fn exported_weights_are_those_that_were_read_bit_for_bit() {
    for name in CASES {
        let case = Case::open(name);
        let (model, module) = case.prepared(DType::F64);
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("exported-{name}"));
        for mesh in [meshes().to_vec(), vec![Mesh { pp: 2, dp: 1, tp: 1, ..Mesh::ONE }]].concat() {
            let mut session = case.start(&model, &module, DType::F64, mesh);
            export_weights(&session, &model.weights, &folder).expect("the weights are written");
            let [ours, theirs] =
                [&folder, &case.folder].map(|f| Weights::open(f).expect("weights"));
            assert_eq!(ours.tensors().count(), theirs.tensors().count(), "{name} {mesh}");
            for (tensor, theirs_is) in theirs.tensors() {
                let ours_is = ours.get(tensor).unwrap_or_else(|| panic!("{name} lacks {tensor}"));
                assert_eq!(ours_is.dims, theirs_is.dims, "{name} {mesh} {tensor}");
                let is_equal = ours.bytes(ours_is) == theirs.bytes(theirs_is);
                assert!(is_equal, "{name} {mesh} {tensor} has other values");
            }
            // What was trained goes the same way, to a rank that was never cut.
            case.step(&mut session, 1, RATE, 1.0);
            export_weights(&session, &model.weights, &folder).expect("the weights are written");
            let one = Mesh::ONE;
            let mut read = case.start(&model, &module, DType::F64, one);
            let exported = Weights::open(&folder).expect("the weights open");
            load_weights(&mut read, &model.weights, &exported).expect("the weights fit");
            let [ours, theirs] =
                [&read, &session].map(|s| collect_weights(s, &model.weights, Part::Weight));
            assert!(ours == theirs, "{name} {mesh}: trained weights changed on the way");
            assert!(named(&read, &model, Part::Weight).values().flatten().all(|x| x.is_finite()));
        }
        std::fs::remove_dir_all(&folder).expect("the directory is removed");
    }
}
