//! A case of `tests/reference/families` on the compiled path, beside what transformers computes.
//! `tests/reference/README.md` describes the files; each check fails with what is wrong.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;

use gantline::generation::{Generator, Options};
use ir::import::{Description, Model, read_config};
use ir::plan::{Keep, Optimizer};
use ir::precision::Precision;
use ir::{DType, Mesh, Module};
use runtime::beams::Hypothesis;
use runtime::execute::{Batch, Part, Scalars, Session, Values};
use runtime::generate::{Ending, NextLogits, Sampling};
use runtime::load::{Named, collect_weights, export_weights, load_weights, write_named};
use runtime::weights::Weights;

use crate::drawn::{draw, root, uniform, writes_no_text};
use crate::model::{Wanted, plan, prepared, session};

pub(crate) const ONE: Mesh = Mesh::ONE;
const RATE: f64 = 1e-3;
/// Sums that stand for a weight.
const PROJECTIONS: usize = 4;

/// The element types that are computed in, and how far each may be from float64 of transformers.
const TYPES: [(DType, f64); 2] = [(DType::F64, 1e-10), (DType::F32, 1e-5)];

/// A case with a directory of its own, which transformers' `from_pretrained` would read.
pub(crate) struct Case {
    pub(crate) name: String,
    /// With `config.json`, `model.safetensors` and `ids.npy`; removed when the case ends.
    pub(crate) folder: PathBuf,
    expected: Weights,
    pub(crate) seq: usize,
    pub(crate) tokens: Vec<i32>,
    pub(crate) labels: Vec<i32>,
}

impl Drop for Case {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Case {
    /// Draws the weights of a case into a new directory, which is called so.
    pub(crate) fn open(name: &str, folder: &str) -> Case {
        let from = root().join(name);
        let expected = Weights::open(&from.join("expected.safetensors")).expect("values");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{folder}-{name}"));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("a directory");
        std::fs::copy(from.join("config.json"), folder.join("config.json")).expect("a config");
        let numbers = |tensor: &str| expected.read_f64(tensor, None).expect("the tensor reads");
        let ids = expected.get("input_ids").expect("there are tokens").dims.clone();
        let bytes: Vec<u8> =
            numbers("input_ids").iter().flat_map(|id| (*id as i64).to_le_bytes()).collect();
        runtime::npy::write(&folder.join("ids.npy"), DType::I64, &ids, &bytes).expect("a file");
        let drawn = expected.tensors().filter_map(|(tensor, values)| {
            let weight = tensor.strip_prefix("grad.")?.to_owned();
            let bytes = draw(name, &weight, &values.dims).into_iter().flat_map(f64::to_le_bytes);
            let (dtype, dims, bytes) = (DType::F64, values.dims.clone(), bytes.collect());
            Some(Named { name: weight, values: Values { dtype, dims, bytes } })
        });
        let drawn: Vec<Named> = drawn.collect();
        write_named(&folder.join("model.safetensors"), &drawn).expect("the weights are written");
        // transformers shifts: the label of a position is the next token's.
        let (seq, given) = (ids[1], numbers("labels"));
        let label = |at: usize| if at % seq + 1 == seq { -100 } else { given[at + 1] as i32 };
        let labels = (0..given.len()).map(label).collect();
        let tokens = numbers("input_ids").iter().map(|id| *id as i32).collect();
        Case { name: name.to_owned(), folder, expected, seq, tokens, labels }
    }

    pub(crate) fn numbers(&self, tensor: &str) -> Vec<f64> {
        self.expected.read_f64(tensor, None).expect("the tensor reads")
    }

    pub(crate) fn description(&self) -> Description {
        let text = std::fs::read_to_string(self.folder.join("config.json")).expect("a config");
        read_config("config.json", &text, &self.name).expect("the config reads")
    }

    fn start(&self, model: &Model, module: &Module, dtype: DType, folder: &Path) -> Session {
        self.start_as(model, module, (Precision::uniform(dtype), ONE), folder)
    }

    pub(crate) fn start_as(
        &self,
        model: &Model,
        module: &Module,
        (precision, mesh): (Precision, Mesh),
        folder: &Path,
    ) -> Session {
        let wanted = Wanted {
            mesh,
            microbatch_size: 1,
            microbatch_count: 2 / mesh.dp,
            keep: Keep::Full,
            sequence: false,
        };
        let mut plan = plan(module, self.seq, precision.compute, wanted).expect("a plan");
        plan.precision = precision;
        plan.optimizer =
            Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-4, decay: 0.1, decay_biases: 0.1 };
        let mut session = session(module, &plan);
        let weights = Weights::open(folder).expect("the weights open");
        load_weights(&mut session, &model.weights, &weights).expect("the weights fit");
        session
    }

    fn step(&self, session: &mut Session, step: u32) -> f64 {
        let scalars = Scalars {
            seed: 0,
            step,
            rate: RATE,
            correction1: 1.0 - 0.9_f64.powi(step as i32),
            correction2: 1.0 - 0.999_f64.powi(step as i32),
            clip: f64::INFINITY,
            ..Scalars::default()
        };
        let batch = Batch { tokens: &self.tokens, labels: &self.labels, ..Batch::default() };
        session.step(&batch, scalars).expect("the step runs").loss()
    }

    /// The loss, all gradients and five AdamW steps are transformers' in both element types; what
    /// was trained is exported under its names, and loads again bit for bit.
    pub(crate) fn check_training(&self) {
        for (dtype, bound) in TYPES {
            let (model, module) = prepared(&self.description(), self.seq, dtype, 0.0);
            let mut session = self.start(&model, &module, dtype, &self.folder);
            for (step, expected) in (1..).zip(self.numbers("adamw.loss")) {
                let loss = self.step(&mut session, step);
                let off = (loss - expected).abs() / expected;
                assert!(off <= bound, "{}: {dtype} loss {step} is off by {off:e}", self.name);
                if step == 1 {
                    self.check_gradients(&session, &model, dtype, bound);
                }
            }
            self.check_trained(&session, &model, dtype, bound);
            let folder = self.folder.join(format!("exported-{dtype}"));
            export_weights(&session, &model.weights, &folder).expect("the weights are written");
            let read = self.start(&model, &module, dtype, &folder);
            for weight in &model.weights {
                let [ours, again] =
                    [&session, &read].map(|s| s.read_weight(&weight.name, Part::Weight));
                assert!(ours == again, "{}: {} changed on the way", self.name, weight.name);
            }
        }
    }

    /// Errors are in parts of a gradient's largest entry; where that is nothing but rounding, as of
    /// the bias of keys that are not rotated, in parts of a hundredth of the largest of all.
    fn check_gradients(&self, session: &Session, model: &Model, dtype: DType, bound: f64) {
        let largest = |values: &[f64]| values.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        let count = self.labels.iter().filter(|label| **label >= 0).count() as f64;
        let ours = collect_weights(session, &model.weights, Part::Grad);
        let theirs: BTreeMap<&str, Vec<f64>> = ours
            .iter()
            .map(|one| (one.name.as_str(), self.numbers(&format!("grad.{}", one.name))))
            .collect();
        let overall = theirs.values().map(|values| largest(values)).fold(0.0, f64::max);
        for Named { name, values } in &ours {
            let theirs = &theirs[name.as_str()];
            let pairs = values.to_f64().into_iter().zip(theirs);
            let off = pairs.map(|(ours, theirs)| (ours / count - theirs).abs());
            // No maximum, which would leave a NaN out.
            let off = off.fold(0.0, |worst: f64, off| if off <= worst { worst } else { off });
            let off = off / largest(theirs).max(1e-2 * overall);
            assert!(off <= bound, "{}: {dtype} gradient {name} is off by {off:e}", self.name);
        }
        let count = self.expected.tensors().filter(|(name, _)| name.starts_with("grad.")).count();
        let buffers = model.weights.iter().filter(|weight| weight.frozen).count();
        assert_eq!(ours.len() + buffers, count, "{}: tensors", self.name);
    }

    /// Sums over a weight are compared in parts of its norm.
    fn check_trained(&self, session: &Session, model: &Model, dtype: DType, bound: f64) {
        for Named { name, values } in collect_weights(session, &model.weights, Part::Weight) {
            let weight = values.to_f64();
            let norm = weight.iter().map(|x| x * x).sum::<f64>().sqrt();
            let expected = self.numbers(&format!("adamw.{name}"));
            assert_eq!(expected.len(), PROJECTIONS);
            for (k, expected) in expected.into_iter().enumerate() {
                let drawn = uniform(&format!("{}:{name}:{k}", self.name), weight.len());
                let sum: f64 = drawn.iter().zip(&weight).map(|(u, w)| u * w).sum();
                let off = (sum - expected).abs() / norm;
                assert!(off <= bound, "{}: {dtype} {name} is off by {off:e}", self.name);
            }
        }
    }

    /// The greedy text is transformers' token for token, on one rank and on two stages; where no
    /// cache is right, it is refused.
    pub(crate) fn check_text(&self) {
        let ids = |tensor| self.numbers(tensor).into_iter().map(|id| id as u32);
        let (prompt, expected): (Vec<u32>, Vec<u32>) =
            (ids("prompt").collect(), ids("generated").collect());
        let weights = Weights::open(&self.folder).expect("the weights open");
        for mesh in [ONE, Mesh { pp: 2, ..ONE }] {
            let capacity = expected.len() - 1;
            let options = Options {
                capacity,
                sequences: 1,
                mesh,
                dtype: DType::F32,
                threads_per_rank: 1,
                target: None,
            };
            let mut fill = |session: &mut Session, model: &Model| {
                load_weights(session, &model.weights, &weights)?;
                Ok(())
            };
            let generator = Generator::new(&self.description(), &options, &mut fill);
            if writes_no_text(&self.name) {
                assert!(generator.is_err(), "{} writes text", self.name);
                continue;
            }
            let mut generator =
                generator.unwrap_or_else(|why| panic!("{} {mesh}: {}", self.name, why.message()));
            let ending = Ending { tokens_max: expected.len() - prompt.len(), stops: Vec::new() };
            let mut each = |_| ControlFlow::Continue(());
            let text = generator.generate(&prompt, &Sampling::GREEDY, &ending, &mut each);
            let text = text.unwrap_or_else(|why| panic!("{}: {}", self.name, why.message()));
            assert_eq!([prompt.clone(), text].concat(), expected, "{} {mesh}", self.name);
            self.check_beams(&options, &prompt, &ending);
        }
    }

    /// Sequences that go on side by side, from what they have of each other, are as likely as they
    /// are alone.
    fn check_beams(&self, alone: &Options, prompt: &[u32], ending: &Ending) {
        let weights = Weights::open(&self.folder).expect("the weights open");
        let mut fill = |session: &mut Session, model: &Model| {
            load_weights(session, &model.weights, &weights)?;
            Ok(())
        };
        let mut start = |sequences: usize| {
            let options = Options { sequences, ..*alone };
            let generator = Generator::new(&self.description(), &options, &mut fill);
            generator.unwrap_or_else(|why| panic!("{}: {}", self.name, why.message()))
        };
        let (mut many, mut one) = (start(3), start(1));
        let found = many.search(prompt, 1.0, ending);
        let found = found.unwrap_or_else(|why| panic!("{}: {}", self.name, why.message()));
        assert_eq!(found.len(), 3, "{}", self.name);
        for Hypothesis { tokens, log_probability, .. } in found {
            let (mut read, mut sum) = (prompt, 0.0);
            let decoder = one.decoder();
            decoder.reset();
            for token in &tokens {
                let logits = decoder.read(read).expect("the tokens are read");
                let all: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
                sum += f64::from(logits[*token as usize]) - all.ln();
                read = std::slice::from_ref(token);
            }
            let off = (sum - log_probability).abs();
            assert!(off < 1e-3, "{}: {tokens:?} {sum} {log_probability}", self.name);
        }
    }

    /// Runs the program in the directory of the case.
    fn run(&self, line: &str) {
        let program = env!("CARGO_BIN_EXE_gantline");
        let output = Command::new(program).args(line.split(' ')).current_dir(&self.folder).output();
        let output = output.expect("the program starts");
        let [said, wrong] =
            [output.stdout, output.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
        assert!(output.status.success(), "{}: gantline {line}\n{said}{wrong}", self.name);
    }

    /// Every mesh of so many ranks, and of their divisors, computes what one rank does.
    pub(crate) fn check_meshes(&self, ranks: usize, seed: u64) {
        self.run(&format!("verify config.json --ranks {ranks} --seq {} --seed {seed}", self.seq));
    }

    /// The logits of the program are transformers'.
    pub(crate) fn check_logits(&self) {
        for (dtype, bound) in TYPES {
            let output = format!("out-{dtype}");
            self.run(&format!("run . --input input_ids=ids.npy --dtype {dtype} -o {output}"));
            let array = runtime::npy::read(&self.folder.join(output).join("logits.npy"));
            let runtime::npy::Array { dtype, dims, bytes } = array.expect("there are logits");
            let logits = Values { dtype, dims, bytes }.to_f64();
            let expected = self.numbers("logits");
            let scale = expected.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
            assert_eq!(logits.len(), expected.len(), "{}", self.name);
            for (ours, theirs) in logits.iter().zip(&expected) {
                let off = (ours - theirs).abs() / scale;
                assert!(off <= bound, "{}: {dtype} logits are off by {off:e}", self.name);
            }
        }
    }
}
