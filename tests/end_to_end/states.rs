//! States of the optimizer in 8 bits, with a scale for each block.

use std::fs;

use ir::formats::{decode, encode};
use ir::import::{Description, read_config};
use ir::plan::{Keep, Zero};
use ir::precision::Precision;
use ir::program::STATE_BLOCK;
use ir::{DType, Mesh, Plan};
use runtime::execute::{Batch, Part, Scalars, Session};
use serde_json::Value;

use crate::mesh::{batch, random_weights};
use crate::model::{Wanted, load, plan, prepared_as, session};
use crate::scratch::{Scratch, text};

const SEQ: usize = 8;
const SAMPLES: usize = 4;
const CODED: &str = "--precision states=f8e4m3";
/// What `tests/end_to_end/model.rs` plans.
const BETA1: f32 = 0.9;
const BETA2: f32 = 0.999;
const EPS: f32 = 1e-4;
const DECAY: f32 = 0.1;

const WIDE: &str = r#"{"model_type": "llama", "vocab_size": 259, "max_position_embeddings": 32,
    "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true}"#;
const MINI: &str = r#"{"model_type": "gpt2", "vocab_size": 259, "n_positions": 32, "n_embd": 256,
    "n_layer": 2, "n_head": 4, "bos_token_id": null, "eos_token_id": null}"#;

fn description() -> Description {
    read_config("config.json", WIDE, "wide").expect("a model")
}

fn precision(compute: DType) -> Precision {
    let precision = Precision { states: DType::F8E4M3, ..Precision::training(compute) };
    assert_eq!(precision.lacking(), [""; 0]);
    precision
}

/// A weight and its states as numbers, with the codes and scales that they were read from.
#[derive(Clone, Debug, PartialEq)]
struct Held {
    weight: Vec<f32>,
    states: [Vec<f32>; 2],
    coded: Option<[(Vec<u8>, Vec<f32>); 2]>,
}

fn numbers(session: &Session, name: &str, part: Part) -> Option<Vec<f32>> {
    let values = session.read_weight(name, part)?;
    Some(values.to_f64().into_iter().map(|x| x as f32).collect())
}

fn held(session: &Session, name: &str) -> Held {
    let weight = numbers(session, name, Part::Weight).expect("a weight");
    let coded = [0, 1].map(|index| {
        let scales = numbers(session, name, Part::Scale(index))?;
        let codes = session.read_weight(name, Part::State(index)).expect("codes");
        assert_eq!(codes.dtype, DType::F8E4M3);
        Some((codes.bytes, scales))
    });
    let states = [0, 1].map(|index| match &coded[index] {
        Some((codes, scales)) => {
            let number = |code: &u8| decode(DType::F8E4M3, u16::from(*code)) as f32;
            let all = codes.iter().enumerate();
            all.map(|(at, code)| number(code) * scales[at / STATE_BLOCK]).collect()
        }
        None => numbers(session, name, Part::State(index)).expect("states"),
    });
    let coded = if let [Some(m), Some(v)] = coded { Some([m, v]) } else { None };
    Held { weight, states, coded }
}

/// The codes and the scales of numbers, block by block.
fn quantised(numbers: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in numbers.chunks(STATE_BLOCK) {
        let largest = block.iter().fold(2.0_f32.powi(-100), |most, x| most.max(x.abs()));
        let scale = largest / 448.0;
        let code = |x: &f32| encode(DType::F8E4M3, f64::from(x / scale)) as u8;
        codes.extend(block.iter().map(code));
        scales.push(scale);
    }
    (codes, scales)
}

/// AdamW, number by number.
fn updated(before: &Held, grads: &[f32], (count, step): (f64, u32), is_coded: bool) -> Held {
    let scalars = scalars(step);
    let rate = scalars.rate as f32;
    let [c1, c2] = [scalars.correction1 as f32, scalars.correction2 as f32];
    let mut after = before.clone();
    for (at, grad) in grads.iter().enumerate() {
        let grad = grad * (1.0 / count as f32);
        let m = BETA1 * before.states[0][at] + (1.0 - BETA1) * grad;
        let v = BETA2 * before.states[1][at] + (1.0 - BETA2) * (grad * grad);
        let direction = (m * (1.0 / c1)) / ((v * (1.0 / c2)).sqrt() + EPS);
        let kept = before.weight[at] * (1.0 - rate * DECAY);
        after.weight[at] = kept - rate * direction;
        (after.states[0][at], after.states[1][at]) = (m, v);
    }
    after.coded = is_coded.then(|| after.states.each_ref().map(|state| quantised(state)));
    after
}

fn scalars(step: u32) -> Scalars {
    let power = |beta: f64| 1.0 - beta.powi(step as i32);
    let [correction1, correction2] = [power(0.9), power(0.999)];
    Scalars { seed: 7, step, rate: 1e-2, correction1, correction2, ..Scalars::default() }
}

fn is_near(a: f32, b: f32) -> bool {
    (a - b).abs() <= 1e-6 * a.abs().max(b.abs()).max(1e-6)
}

/// Whether states of a weight are codes: it is large, and rows are whole blocks.
fn has_codes(dims: &[usize]) -> bool {
    dims.iter().product::<usize>() >= 4096 && dims[dims.len() - 1].is_multiple_of(STATE_BLOCK)
}

/// On every mesh, what a step makes of each weight, its codes and its scales is what the plain
/// update of the step's own gradients makes of them.
#[test]
fn updates_of_codes_are_those_of_the_numbers_that_they_stand_for() {
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(11_u64);
    println!("SEED={seed}");
    let one = Mesh::ONE;
    let meshes = [
        (one, Zero::default()),
        (Mesh { dp: 2, ..one }, Zero { stage: 1, shard: 0 }),
        (Mesh { tp: 2, ..one }, Zero::default()),
        (Mesh { pp: 2, ..one }, Zero::default()),
        (Mesh { dp: 2, tp: 2, ..one }, Zero { stage: 1, shard: 0 }),
    ];
    for (mesh, zero) in meshes {
        let (model, module) = prepared_as(&description(), SEQ, &precision(DType::F32));
        let wanted = Wanted {
            mesh,
            microbatch_size: 1,
            microbatch_count: SAMPLES / mesh.dp,
            keep: Keep::Full,
            sequence: false,
        };
        let whole = plan(&module, SEQ, DType::F32, wanted).expect("the mesh fits");
        let plan = Plan { precision: precision(DType::F32), zero, ..whole };
        let mut session = session(&module, &plan);
        load(&mut session, &random_weights(&model, seed));
        let names: Vec<String> = session.weights().into_iter().map(|(name, _)| name).collect();
        let mut coded = 0;
        for step in 1..=3 {
            let before: Vec<Held> = names.iter().map(|name| held(&session, name)).collect();
            let (tokens, labels) = batch(seed + u64::from(step), SAMPLES, SEQ, 259);
            let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
            let report = session.step(&batch, scalars(step)).expect("the step runs");
            for ((name, dims), before) in session.weights().iter().zip(&before) {
                let grads = numbers(&session, name, Part::Grad).expect("gradients");
                let (count, found) = (report.count, held(&session, name));
                let is_coded = found.coded.is_some();
                assert_eq!(is_coded, has_codes(dims), "{name}: {dims:?}");
                let expected = updated(before, &grads, (count, step), is_coded);
                let what = format!("SEED={seed} {mesh:?} step {step} {name}");
                let mut pairs = expected.weight.iter().zip(&found.weight);
                assert!(pairs.all(|(a, b)| is_near(*a, *b)), "{what}: weights");
                assert!(expected.coded == found.coded, "{what}: codes and scales");
                coded += usize::from(is_coded);
            }
        }
        assert!(coded >= 3 * 10, "{mesh:?}: {coded} updates of codes");
        // A byte for a number, and a scale for each block.
        for (name, dims) in session.weights() {
            let elements = dims.iter().product::<usize>() as u64;
            let of_state = |part: &Part| matches!(part, Part::State(_) | Part::Scale(_));
            let shards = session.shards().iter();
            let own = shards.filter(|s| s.name == name && s.is_first && of_state(&s.part));
            let bytes: u64 = own.map(|shard| shard.bytes() as u64).sum();
            let each = if has_codes(&dims) { elements + elements / 64 } else { 4 * elements };
            assert_eq!(bytes, 2 * each, "{name} {dims:?}");
        }
    }
}

fn losses(scratch: &Scratch, run: &str) -> Vec<f64> {
    let lines = fs::read_to_string(scratch.0.join(run).join("metrics.jsonl"));
    let loss = |line: &str| {
        let step: Value = serde_json::from_str(line).expect("a line is JSON");
        step["loss"].as_f64().expect("a loss")
    };
    lines.expect("there are metrics").lines().map(loss).collect()
}

fn scene(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("model/config.json", MINI);
    scratch.write("data.txt", &text());
    scratch
}

/// A run trains as one with states of 32 bits does; interrupted, it goes on to the same bits, and
/// on other ranks to the same losses.
#[test]
fn runs_with_codes_train_and_are_resumed() {
    let scratch = scene("states-train");
    let line = |more: &str, steps: usize, out: &str| {
        format!(
            "train model --data data.txt --from-scratch --calibration none --seq 16 --gbs 4 \
             --lr 0.001 --warmup 5 --val-every 0 --save-every 20 --keep 0 --steps {steps} {more} \
             --out {out}"
        )
    };
    let on = "--ranks 2 --fix dp=2,zero=1";
    scratch.answer(&line(on, 40, "wide"));
    scratch.answer(&line(&format!("{on} {CODED}"), 40, "whole"));
    let [wide, whole] = ["wide", "whole"].map(|run| losses(&scratch, run));
    let mean = |losses: &[f64]| losses[30..].iter().sum::<f64>() / 10.0;
    assert!(mean(&wide) < 0.9 * wide[0], "it learns: {wide:?}");
    let apart = (mean(&wide) - mean(&whole)).abs() / mean(&wide);
    assert!(apart < 0.01, "losses are {apart} apart: {wide:?}\n{whole:?}");
    assert_ne!(wide[39], whole[39], "states are rounded");
    scratch.answer(&line(&format!("{on} {CODED}"), 20, "parts"));
    for (name, on) in [("same", ""), ("one", " --ranks 1 --fix dp=1")] {
        let (from, to) = (scratch.0.join("parts"), scratch.0.join(name));
        let copied = std::process::Command::new("cp").arg("-r").args([from, to]).status();
        assert!(copied.expect("cp runs").success());
        scratch.answer(&format!("train --calibration none --steps 40{on} --resume {name}"));
    }
    let bytes = |run: &str, rank: usize| {
        let file = format!("{run}/checkpoints/step-40/rank-{rank}.safetensors");
        fs::read(scratch.0.join(file)).expect("a file of a checkpoint")
    };
    for rank in [0, 1] {
        assert!(bytes("same", rank) == bytes("whole", rank), "rank {rank} has other bits");
    }
    let other = losses(&scratch, "one");
    for (step, (a, b)) in whole.iter().zip(&other).enumerate() {
        assert!((a - b).abs() < 1e-3 * a, "step {}: {a} and {b}", step + 1);
    }
}

/// Ranks hold whole blocks: a plan that cuts one is refused, and a search finds another.
#[test]
fn blocks_are_not_cut() {
    let scratch = scene("states-cut");
    let line = |more: &str| {
        format!("plan model --calibration none --seq 16 --gbs 4 --ranks 2 {CODED}{more}")
    };
    let output = scratch.run(&line(" --fix tp=2"));
    let said = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b)).concat();
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("inside a block of 256") && said.contains("dim 1"), "{said}");
    let output = scratch.run(&line(""));
    let said = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b)).concat();
    assert!(output.status.success(), "{said}");
    let output = scratch.run(&format!("verify model --ranks 1 --dtype f64 --seq 8 {CODED}"));
    let said = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b)).concat();
    assert!(!output.status.success() && said.contains("states=f8e4m3"), "{said}");
}
