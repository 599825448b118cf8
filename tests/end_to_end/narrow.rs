//! Training in bf16 and f16: beside PyTorch, on every mesh, what it holds, and what it skips.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Output;

use ir::formats::nearest;
use ir::ids::IGNORED;
use ir::plan::{Keep, Place};
use ir::precision::Precision;
use ir::{DType, Mesh};
use runtime::execute::{Batch, Part, Scalars};
use runtime::load::{Named, collect_weights};
use serde_json::Value;

use crate::families::case::{Case, ONE};
use crate::mesh::{batch, gpt2, llama, random_weights};
use crate::model::{Wanted, load, plan, prepared_as, session};
use crate::scratch::{Scratch, text};

/// How much farther from the truth than PyTorch a narrow type may be.
const FARTHER_MAX: f64 = 1.5;

/// What is farther all the same, and how far at most, until it is mended: the gradient of
/// saturated attention is the difference of nearly equal numbers, one of which comes from the
/// output, rounded.
const FARTHER: [(&str, &str, f64); 1] = [("gpt2", "f16", 25.0)];

impl Case {
    /// How far loss and gradients in a narrow type are from the truth: see
    /// `tests/reference/narrow.py`.
    fn distance(&self, precision: Precision, loss_scale: f64) -> f64 {
        let (model, module) = prepared_as(&self.description(), self.seq, &precision);
        let mut session = self.start_as(&model, &module, (precision, ONE), &self.folder);
        let scalars = Scalars { loss_scale, ..Scalars::default() };
        let batch = Batch { tokens: &self.tokens, labels: &self.labels, ..Batch::default() };
        let report = session.step(&batch, scalars).expect("the step runs");
        let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let grads = collect_weights(&session, &model.weights, Part::Grad);
        let truth = |name: &str| self.numbers(&format!("grad.{name}"));
        let floor = grads.iter().map(|grad| norm(&truth(&grad.name))).fold(0.0, f64::max) * 1e-3;
        let expected = self.numbers("loss")[0];
        let mut squares = ((report.loss() - expected) / expected).powi(2);
        for Named { name, values } in &grads {
            let expected = truth(name);
            let ours = values.to_f64().into_iter().map(|grad| grad / report.count / loss_scale);
            let apart: Vec<f64> = ours.zip(&expected).map(|(a, b)| a - b).collect();
            squares += (norm(&apart) / norm(&expected).max(floor)).powi(2);
        }
        (squares / (1 + grads.len()) as f64).sqrt()
    }
}

/// Narrow weights, with masters and without, whose forward and backward passes are the same.
fn precisions() -> [(Precision, f64); 4] {
    let pure = |dtype| Precision { states: dtype, ..Precision::uniform(dtype) };
    let [bf16, f16] = [DType::BF16, DType::F16];
    [
        (Precision::training(bf16), 1.0),
        (pure(bf16), 1.0),
        (Precision::training(f16), 1024.0),
        (pure(f16), 1024.0),
    ]
}

/// Over the cases of a family, by the root of the mean square. `tests/reference/narrow.py` says how
/// the distances of PyTorch are measured.
#[test]
fn gradients_are_as_near_to_the_truth_as_those_of_pytorch() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/narrow.json");
    let text = fs::read_to_string(root).expect("the distances are there");
    let distances: Value = serde_json::from_str(&text).expect("they are a document");
    let cases = distances.as_object().expect("by the names of cases");
    assert!(cases.len() >= 15, "{} cases", cases.len());
    let mut squares: BTreeMap<(&str, Precision), [f64; 2]> = BTreeMap::new();
    for (name, ways) in cases {
        let family = name.split('-').next().expect("a name has a family");
        let case = Case::open(name, "narrow");
        for (precision, loss_scale) in precisions() {
            // Where sums cancel, as in saturated attention, either way is near by chance.
            let of = |way: &str| ways[way].as_f64().expect("a distance");
            let dtype = precision.compute.name();
            let theirs = of(dtype).max(of(&format!("{dtype} autocast")));
            let ours = case.distance(precision, loss_scale);
            let sums = squares.entry((family, precision)).or_default();
            *sums = [sums[0] + ours * ours, sums[1] + theirs * theirs];
        }
    }
    for ((family, precision), [ours, theirs]) in &squares {
        let dtype = precision.compute.name();
        let known = FARTHER.iter().find(|(f, d, _)| f == family && *d == dtype);
        let most = known.map_or(FARTHER_MAX, |(_, _, most)| *most);
        let ratio = (ours / theirs).sqrt();
        assert!(
            ratio <= most,
            "{family} in {precision}: {ratio:.2} times as far; all: {squares:?}"
        );
    }
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// A small model and a text.
fn scene(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    let config = r#"{"model_type": "llama", "vocab_size": 259, "max_position_embeddings": 32,
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": true}"#;
    scratch.write("model/config.json", config);
    scratch.write("data.txt", &text());
    scratch
}

/// Meshes differ by where sums are rounded, and not by more than one rank is from the truth.
#[test]
fn narrow_meshes_are_as_near_to_the_truth_as_one_rank() {
    let scratch = scene("narrow-meshes");
    for line in [
        "verify model --ranks 1 --dtype bf16 --seq 17",
        "verify model --ranks 4 --dtype bf16 --seq 17",
        "verify model --ranks 4 --dtype f16 --seq 17 --precision master=none,states=f16",
        "verify model --ranks 2 --dtype bf16 --seq 17 --precision parameters=f32,master=none",
        "verify model --ranks 2 --dtype f16 --seq 17 --precision logits=f32",
        "verify model --ranks 4 --dtype bf16 --seq 17 --precision reduce=bf16",
        "verify model --ranks 4 --dtype f32 --seq 17 --precision reduce=f16",
        "verify model --ranks 4 --dtype bf16 --seq 17 --gbs 8 --precision gradients=bf16",
        "verify model --ranks 2 --dtype f16 --seq 17 --precision gradients=f16,logits=f32",
        "verify model --ranks 4 --dtype f32 --seq 17 --precision gradients=bf16",
        "verify model --ranks 1 --dtype f32 --seq 17 --gbs 4 --precision gradients=f16",
        "verify model --ranks 1 --dtype f32 --seq 17 --precision saved=bf16",
        "verify model --ranks 4 --dtype f32 --seq 17 --precision saved=bf16,reduce=bf16",
        "verify model --ranks 2 --dtype f64 --seq 17 --precision saved=f32",
        "verify model --ranks 4 --dtype f32 --seq 17 --precision products=tf32",
    ] {
        let output = scratch.run(line);
        assert!(output.status.success(), "{line}\n{}", said(&output));
    }
}

/// A model whose sizes blocks of 128 fill: with two heads of 64, a block is of both.
fn filled(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    for (folder, inner) in [("wide", 512), ("thin", 128)] {
        let config = format!(
            r#"{{"model_type": "gpt2", "vocab_size": 64, "n_positions": 128, "n_embd": 256,
                "n_layer": 1, "n_head": 4, "n_inner": {inner}}}"#
        );
        scratch.write(&format!("{folder}/config.json"), &config);
    }
    scratch
}

/// Operands of 8 bits are rounded in blocks that lie in shards as in the whole.
#[test]
fn products_of_8_bits_are_the_same_on_all_meshes() {
    let scratch = filled("narrow-blocks");
    for line in [
        "verify wide --ranks 2 --gbs 1 --dtype bf16 --seq 128 --precision products=f8e4m3",
        "verify wide --ranks 2 --gbs 1 --dtype f32 --seq 128 --precision products=f8-hybrid",
        "verify thin --ranks 2 --gbs 2 --dtype bf16 --seq 128 --precision products=f8-hybrid",
    ] {
        let output = scratch.run(line);
        assert!(output.status.success(), "{line}\n{}", said(&output));
    }
}

/// Module, plan and kernels of such a step are read back from a file, which runs.
#[test]
fn files_hold_products_of_8_bits() {
    let scratch = filled("narrow-blocks-file");
    scratch.answer("compile wide --ranks 2 --gbs 2 --fix tp=2 --seq 128 --dtype f8 -o wide.gtl");
    let told = scratch.answer("inspect wide.gtl");
    assert!(told.contains("products=f8e4m3"), "{told}");
    let told = scratch.answer("run wide.gtl");
    assert!(told.contains("over 256 labels"), "{told}");
    scratch.answer("plan wide --ranks 2 --gbs 2 --fix tp=2 --seq 128 --dtype f8 -o wide.plan");
    let told = scratch.answer("explain wide --plan wide.plan");
    assert!(told.contains("tp=2"), "{told}");
}

/// A role that reaches no product is no role.
#[test]
fn products_of_8_bits_refuse_a_model_that_has_none() {
    let scratch = scene("narrow-none");
    let output =
        scratch.run("verify model --ranks 1 --dtype bf16 --seq 32 --precision products=f8e4m3");
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert!(said(&output).contains("has no product to round"), "{}", said(&output));
}

/// All operands that blocks do not fill are named at once.
#[test]
fn products_of_8_bits_refuse_what_blocks_do_not_fill() {
    let scratch = filled("narrow-unfilled");
    let line = "verify wide --ranks 1 --dtype bf16 --seq 96 --precision products=f8e4m3";
    let output = scratch.run(line);
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert!(said(&output).contains("E2005"), "{}", said(&output));
    assert!(said(&output).contains("96 along the sum"), "{}", said(&output));
    let scratch = scene("narrow-unfilled-sizes");
    let output = scratch.run("verify model --ranks 1 --seq 32 --precision products=f8e4m3");
    assert_eq!(output.status.code(), Some(4), "f64: {}", said(&output));
    assert!(said(&output).contains("operands are of f64, not of f32 or bf16"), "{}", said(&output));
}

/// Each rank's term of a gradient is rounded, and so is their sum, which is taken in f32.
#[test]
fn gradients_are_exchanged_as_the_plan_says() {
    let case = Case::open("llama-heads", "narrow-exchange");
    assert_eq!(case.tokens.len(), 2 * case.seq, "a sample for each rank");
    let step = |reduce: DType, dp: usize, labels: &[i32]| -> Vec<Named> {
        let precision = Precision { reduce, ..Precision::uniform(DType::F32) };
        let (model, module) = prepared_as(&case.description(), case.seq, &precision);
        let mesh = Mesh { dp, ..ONE };
        let mut session = case.start_as(&model, &module, (precision, mesh), &case.folder);
        let batch = Batch { tokens: &case.tokens, labels, ..Batch::default() };
        session.step(&batch, Scalars::default()).expect("the step runs");
        collect_weights(&session, &model.weights, Part::Grad)
    };
    let terms = [0, 1].map(|sample| {
        let mut labels = vec![IGNORED; case.labels.len()];
        let own = sample * case.seq..(sample + 1) * case.seq;
        labels[own.clone()].copy_from_slice(&case.labels[own]);
        step(DType::F32, 1, &labels)
    });
    for reduce in [DType::F32, DType::BF16, DType::F16] {
        let mut moved = 0;
        for (at, sum) in step(reduce, 2, &case.labels).iter().enumerate() {
            let [a, b] = terms.each_ref().map(|terms| terms[at].values.to_f64());
            for ((a, b), sum) in a.into_iter().zip(b).zip(sum.values.to_f64()) {
                let [p, q] = [a, b].map(|term| nearest(reduce, term) as f32);
                assert_eq!(
                    sum,
                    nearest(reduce, f64::from(p + q)),
                    "{}: {a} + {b}",
                    terms[0][at].name
                );
                moved += usize::from(sum != f64::from(a as f32 + b as f32));
            }
        }
        assert_eq!(moved > 100, reduce.is_narrow(), "{reduce}: {moved} elements are rounded");
    }
}

/// Where gradients are narrow, what a rank has of one is rounded whenever a micro-batch is added to
/// it, and so is the sum over ranks.
#[test]
fn narrow_gradients_are_rounded_once_for_each_sum() {
    let case = Case::open("llama-heads", "narrow-gradients");
    let step = |(compute, gradients): (DType, DType), dp: usize, labels: &[i32]| -> Vec<Named> {
        let precision = Precision { gradients, reduce: gradients, ..Precision::training(compute) };
        assert_eq!(precision.lacking(), [""; 0]);
        let (model, module) = prepared_as(&case.description(), case.seq, &precision);
        let mesh = Mesh { dp, ..ONE };
        let mut session = case.start_as(&model, &module, (precision, mesh), &case.folder);
        let batch = Batch { tokens: &case.tokens, labels, ..Batch::default() };
        session.step(&batch, Scalars::default()).expect("the step runs");
        collect_weights(&session, &model.weights, Part::Grad)
    };
    for (compute, narrow) in [(DType::BF16, DType::BF16), (DType::F32, DType::F16)] {
        let terms = [0, 1].map(|sample| {
            let mut labels = vec![IGNORED; case.labels.len()];
            let own = sample * case.seq..(sample + 1) * case.seq;
            labels[own.clone()].copy_from_slice(&case.labels[own]);
            step((compute, DType::F32), 1, &labels)
        });
        let round = |x: f64| nearest(narrow, x);
        let add = |a: f64, b: f64| round(f64::from(a as f32 + b as f32));
        // Micro-batches of one rank, and ranks of one micro-batch.
        for dp in [1, 2] {
            let mut moved = 0;
            for (at, sum) in step((compute, narrow), dp, &case.labels).iter().enumerate() {
                let name = &terms[0][at].name;
                // Two layers add to the table that they share.
                if name == "model.embed_tokens.weight" {
                    continue;
                }
                let [a, b] = terms.each_ref().map(|terms| terms[at].values.to_f64());
                for ((a, b), sum) in a.into_iter().zip(b).zip(sum.values.to_f64()) {
                    let second = if dp == 1 { b } else { round(b) };
                    assert_eq!(sum, add(round(a), second), "dp={dp} {name}: {a} + {b}");
                    moved += usize::from(sum != add(a, b));
                }
            }
            assert!(moved > 100, "{compute} dp={dp}: {moved} elements are rounded twice");
        }
    }
}

/// A run with narrow gradients, whose ranks share the update, goes on to the bits of one that is
/// not interrupted, and its loss is that of wide gradients.
#[test]
fn narrow_gradients_train_and_resume_bit_for_bit() {
    let scratch = scene("narrow-gradients-train");
    let line = |roles: &str, steps: usize, out: &str| {
        format!(
            "train model --data data.txt --from-scratch --dtype bf16 --ranks 2 --fix dp=2,zero=1 \
             --seq 16 --gbs 4 --fix mbs=1 --steps {steps} --save-every 1 --keep 0 --val-every 0 \
             --precision {roles} --out {out}"
        )
    };
    scratch.answer(&line("gradients=f32", 8, "wide"));
    scratch.answer(&line("gradients=bf16", 8, "whole"));
    scratch.answer(&line("gradients=bf16", 3, "parts"));
    scratch.answer("train --resume parts --steps 8");
    let [wide, whole, parts] = ["wide", "whole", "parts"].map(|out| scratch.0.join(out));
    assert!(checkpoint(&parts, 8) == checkpoint(&whole, 8));
    assert!(checkpoint(&whole, 8) != checkpoint(&wide, 8), "nothing was rounded");
    let loss = |run: &Path| metrics(run)[7]["loss"].as_f64().expect("a loss");
    let apart = (loss(&wide) - loss(&whole)).abs() / loss(&wide);
    assert!(apart < 0.01, "the loss is off by {apart}");
    let plan = fs::read_to_string(whole.join("run.plan")).expect("a run has its plan");
    assert!(plan.contains("gradients=bf16 reduce=bf16"), "{plan}");
}

/// What is saved is rounded: the forward pass is not, and gradients are the same whether what they
/// read was kept or computed a second time.
#[test]
fn saved_activations_are_rounded_kept_or_not() {
    let (seq, samples) = (33, 8);
    let (tokens, labels) = batch(3, samples, seq, 259);
    for (description, saved) in [(llama(), DType::BF16), (gpt2(), DType::F16)] {
        let name = &description.name;
        let step = |saved: DType, keep: Keep| {
            let precision = Precision { saved, ..Precision::uniform(DType::F32) };
            assert_eq!(precision.lacking(), [""; 0]);
            let (model, module) = prepared_as(&description, seq, &precision);
            let wanted = Wanted {
                mesh: ONE,
                microbatch_size: samples,
                microbatch_count: 1,
                keep,
                sequence: false,
            };
            let mut plan = plan(&module, seq, DType::F32, wanted).expect("a plan");
            plan.precision = precision;
            let mut session = session(&module, &plan);
            load(&mut session, &random_weights(&model, 3));
            let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
            let report = session.step(&batch, Scalars::default()).expect("the step runs");
            let bytes = session.lend(0, |lent| lent.arena_bytes(Place::Device));
            let grads = collect_weights(&session, &model.weights, Part::Grad);
            let grads: Vec<Vec<f64>> = grads.iter().map(|g| g.values.to_f64()).collect();
            (report.loss_sum, bytes, grads)
        };
        let (loss, bytes, exact) = step(DType::F32, Keep::Full);
        let (loss_saved, bytes_saved, kept) = step(saved, Keep::Full);
        let (loss_again, _, recomputed) = step(saved, Keep::None);
        assert_eq!([loss, loss], [loss_saved, loss_again], "{name}");
        assert!(kept == recomputed, "{name}: gradients depend on what is kept");
        assert!(bytes_saved < bytes, "{name}: {bytes_saved} bytes in place of {bytes}");
        let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let largest = exact.iter().map(|grad| norm(grad)).fold(0.0, f64::max);
        let mut moved = 0;
        for (exact, kept) in exact.iter().zip(&kept) {
            let apart: Vec<f64> = exact.iter().zip(kept).map(|(a, b)| a - b).collect();
            let error = norm(&apart) / norm(exact).max(1e-3 * largest);
            assert!(error < 0.02, "{name}: a gradient is off by {error:e}");
            moved += usize::from(error > 1e-6);
        }
        assert!(moved > exact.len() / 2, "{name}: {moved} of {} gradients moved", exact.len());
    }
}

/// All roles that do not go together are said at once.
#[test]
fn roles_that_nothing_computes_are_refused_together() {
    let scratch = scene("narrow-roles");
    let line = "verify model --ranks 1 --dtype bf16 --precision \
                states=f8e5m2,gradients=f64,master=bf16,logits=f64,saved=f32";
    let output = scratch.run(line);
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    for role in ["states=f8e5m2", "gradients=f64", "master=bf16", "logits=f64", "saved=f32"] {
        assert!(said(&output).contains(role), "{role}: {}", said(&output));
    }
    assert!(!said(&output).contains("reduce="), "what follows is not said: {}", said(&output));
    let output =
        scratch.run("verify model --ranks 1 --dtype bf16 --precision gradients=bf16,reduce=f32");
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert!(said(&output).contains("sums of bf16 are exchanged as bf16"), "{}", said(&output));
    let output = scratch.run("verify model --ranks 1 --precision states=bf17");
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("help: types are f64"), "{}", said(&output));
    let output = scratch.run("verify model --ranks 1 --precision grads=f32,master");
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("there is no role `grads`"), "{}", said(&output));
    assert!(said(&output).contains("`master` sets no role"), "{}", said(&output));
}

fn metrics(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).expect("a journal");
    text.lines().map(|line| serde_json::from_str(line).expect("a line")).collect()
}

fn checkpoint(run: &Path, step: u64) -> Vec<Vec<u8>> {
    let folder = run.join(format!("checkpoints/step-{step}"));
    let files =
        fs::read_dir(folder).expect("a checkpoint").map(|file| file.expect("a file").path());
    let mut files: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
    files.sort();
    files.iter().map(|path| fs::read(path).expect("it reads")).collect()
}

/// A first scale that overflows is halved until it does not: those steps change no weight, and the
/// run that is interrupted among them goes on to the bits of one that is not.
#[test]
fn overflows_are_skipped_by_all_ranks_and_resumed_bit_for_bit() {
    let scratch = scene("narrow-scale");
    let line = |steps: usize, out: &str| {
        format!(
            "train model --data data.txt --from-scratch --dtype f16 --ranks 2 --fix dp=2 --seq 16 \
             --gbs 4 --steps {steps} --save-every 1 --keep 0 --val-every 0 --loss-scale 1073741824 \
             --out {out}"
        )
    };
    let run = |line: &str| _ = scratch.answer(line);
    run(&line(24, "whole"));
    let lines = metrics(&scratch.0.join("whole"));
    let skipped: Vec<u64> = lines
        .iter()
        .filter(|line| line["skipped"] == "not finite")
        .map(|line| line["step"].as_u64().expect("a step"))
        .collect();
    assert!(skipped.len() >= 3 && skipped.len() < 20, "{skipped:?}");
    let scale = |at: usize| lines[at]["loss_scale"].as_f64().expect("a scale");
    assert_eq!(scale(0), 1_073_741_824.0);
    for step in skipped.iter().filter(|step| **step > 1) {
        let [before, after] = [step - 1, *step].map(|s| checkpoint(&scratch.0.join("whole"), s));
        assert!(before == after, "step {step} changed weights or states");
        assert_eq!(scale(*step as usize), scale(*step as usize - 1) / 2.0, "after step {step}");
    }
    assert!(!skipped.contains(&24), "the last step is done");
    let [before, after] = [23, 24].map(|s| checkpoint(&scratch.0.join("whole"), s));
    assert!(before != after, "a step changes weights");
    let cut = skipped[1];
    run(&line(cut as usize, "parts"));
    run("train --resume parts --steps 24");
    assert!(checkpoint(&scratch.0.join("parts"), 24) == checkpoint(&scratch.0.join("whole"), 24));
}

/// What is held for each parameter: itself, its master, its gradient and two moments.
#[test]
fn bf16_with_masters_holds_eighteen_bytes_a_parameter() {
    let scratch = scene("narrow-memory");
    let line = "compile model --cluster cpu-local --ranks 1 --dtype bf16 --seq 16 --gbs 1 -o x.gtl";
    let output = scratch.run(line);
    assert!(output.status.success(), "{}", said(&output));
    let output = scratch.run("inspect x.gtl");
    let text = said(&output);
    let mut held: BTreeMap<&str, [u64; 2]> = Default::default();
    for line in text.lines().filter(|line| line.trim_start().starts_with("buffer b")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let bytes =
            words.iter().position(|w| *w == "bytes").and_then(|at| words[at + 1].parse().ok());
        for kind in ["param", "master", "grad", "state"] {
            // A view has no number of a weight.
            let is_of_weight = |pair: &[&str]| pair[0] == kind && pair[1].parse::<u64>().is_ok();
            if words.windows(2).any(is_of_weight) {
                let [count, sum] = held.entry(kind).or_default();
                (*count, *sum) = (*count + 1, *sum + bytes.unwrap_or(0));
            }
        }
    }
    let [weights, parameters] = held["param"];
    assert!(weights > 10 && parameters > 50_000, "{held:?}\n{text}");
    assert_eq!(held["master"], [weights, 2 * parameters]);
    assert_eq!(held["grad"], [weights, 2 * parameters]);
    assert_eq!(held["state"], [2 * weights, 4 * parameters]);
}

/// A step whose gradient is above the bound is left out by all ranks, or ends the run.
#[test]
fn steps_above_the_bound_of_the_norm_are_left_out() {
    let scratch = scene("narrow-norm");
    let line = |more: &str, out: &str| {
        format!(
            "train model --data data.txt --from-scratch --ranks 2 --fix dp=2 --seq 16 --gbs 4 \
             --steps 8 --save-every 1 --keep 0 --val-every 0 --lr 0.01 --warmup 0 --out {out}{more}"
        )
    };
    scratch.answer(&line("", "free"));
    let norm = |line: &Value| line["grad_norm"].as_f64().expect("a norm");
    let norms: Vec<f64> = metrics(&scratch.0.join("free")).iter().map(norm).collect();
    // From the second step on, so that there is a checkpoint before.
    let largest = norms[1..].iter().copied().fold(0.0, f64::max);
    let first = 1 + norms[1..].iter().position(|n| *n == largest).expect("there is one");
    let before = norms[..first].iter().copied().fold(0.0, f64::max);
    let bound = if before < largest { f64::midpoint(before, largest) } else { norms[0] / 2.0 };
    scratch.answer(&line(&format!(" --on-spike skip --spike-norm {bound}"), "skipping"));
    let run = scratch.0.join("skipping");
    let mut skipped = 0;
    for line in metrics(&run).iter().skip(1) {
        let step = line["step"].as_u64().expect("a step");
        let is_skipped = line["skipped"] == "norm";
        assert_eq!(is_skipped, norm(line) > bound, "step {step} of norm {}", norm(line));
        let is_same = checkpoint(&run, step - 1) == checkpoint(&run, step);
        assert_eq!(is_same, is_skipped, "step {step}");
        skipped += u64::from(is_skipped);
    }
    assert!(skipped > 0, "{norms:?} and a bound of {bound}");
    let output = scratch.run(&line(&format!(" --on-spike stop --spike-norm {bound}"), "stopping"));
    assert_eq!(output.status.code(), Some(5), "{}", said(&output));
    assert!(said(&output).contains("has a norm of"), "{}", said(&output));
}
