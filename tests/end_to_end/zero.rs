//! Ranks that share the update of weights, gradients and parameters (ZeRO) leave what ranks leave
//! that have all of them.

use ir::plan::{Keep, Schedule, Zero};
use ir::precision::Precision;
use ir::{DType, Mesh, Module, Plan};
use runtime::execute::{Batch, Part, Scalars, Session};

use crate::cli::{Scratch, TINY, text};
use crate::mesh::{Weights, batch, gpt2, llama, random_weights};
use crate::model::{Wanted, load, plan, prepared_as, session};

pub(crate) const SEQ: usize = 16;
const SAMPLES: usize = 12;
/// What ranks may share: the update, gradients too, parameters too.
const STAGES: [Zero; 3] =
    [Zero { stage: 1, shard: 0 }, Zero { stage: 2, shard: 0 }, Zero { stage: 3, shard: 0 }];

fn scalars(step: u32, clip: f64) -> Scalars {
    let power = |beta: f64| 1.0 - beta.powi(step as i32);
    let corrections = [power(0.9), power(0.999)];
    Scalars {
        seed: 7,
        step,
        rate: 1e-2,
        correction1: corrections[0],
        correction2: corrections[1],
        clip,
        ..Scalars::default()
    }
}

/// A session after some steps of a plan.
pub(crate) fn trained(module: &Module, plan: &Plan, weights: &Weights, clip: f64) -> Session {
    let mut session = session(module, plan);
    load(&mut session, weights);
    for step in 1..=3 {
        let (tokens, labels) = batch(u64::from(step), SAMPLES, SEQ, 259);
        let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
        let report = session.step(&batch, scalars(step, clip)).expect("the step runs");
        assert!(report.grad_norm > 0.0 && report.loss_sum.is_finite());
    }
    session
}

/// The plans of a mesh: one that shares nothing, and those of all stages.
pub(crate) fn plans(module: &Module, precision: &Precision, mesh: Mesh) -> (Plan, [Plan; 3]) {
    // With four ranks, one micro-batch is all that each has.
    let microbatch_size = if mesh.dp == 4 { SAMPLES / 4 } else { 1 };
    let wanted = Wanted {
        mesh,
        microbatch_size,
        microbatch_count: SAMPLES / mesh.dp / microbatch_size,
        keep: Keep::Full,
        sequence: mesh.tp > 1,
    };
    let whole = plan(module, SEQ, precision.accumulate, wanted).expect("the mesh fits");
    let whole = Plan { precision: *precision, ..whole };
    let shared = STAGES.map(|zero| Plan { zero, ..whole.clone() });
    (whole, shared)
}

/// The largest difference of two sessions in each of the tensors that weights have, relative to the
/// largest element of all weights: some gradients are nothing but rounding.
pub(crate) fn distance(a: &Session, b: &Session) -> f64 {
    let mut worst = 0.0_f64;
    for part in [Part::Weight, Part::Rounded, Part::Grad, Part::State(0), Part::State(1)] {
        let (mut largest, mut apart) = (1e-30_f64, 0.0_f64);
        for (name, _) in a.weights() {
            let [one, other] = [a, b].map(|session| session.read_weight(&name, part));
            // Without masters, what is updated is a copy only where ranks share it.
            let (Some(one), Some(other)) = (one, other) else {
                assert_eq!(part, Part::Rounded, "`{name}` has all tensors in both");
                continue;
            };
            assert_eq!((one.dtype, &one.dims), (other.dtype, &other.dims), "{part:?} of `{name}`");
            let (one, other) = (one.to_f64(), other.to_f64());
            largest = one.iter().fold(largest, |most, x| most.max(x.abs()));
            apart = one.iter().zip(&other).fold(apart, |most, (x, y)| most.max((x - y).abs()));
        }
        worst = worst.max(apart / largest);
    }
    worst
}

/// Without clipping, and where no other axis adds to a sum, every bit is the same: each element is
/// summed over the ranks in one order and updated by one formula. Ranks that share gradients sum
/// those of each micro-batch, and of each call of a tied weight.
#[test]
fn shared_updates_have_the_same_bits() {
    let mixed = Precision::training(DType::BF16);
    let rounded = Precision { reduce: DType::BF16, ..mixed };
    for (description, precision) in [
        (gpt2(), Precision::uniform(DType::F32)),
        (llama(), Precision::uniform(DType::F64)),
        (gpt2(), mixed),
        (llama(), mixed),
        (gpt2(), rounded),
        (llama(), rounded),
    ] {
        let (model, module) = prepared_as(&description, SEQ, &precision);
        let weights = random_weights(&model, 11);
        // The stages of tied weights add theirs before or after the ranks do.
        let is_tied = description.name.contains("gpt2");
        let stages = if is_tied { 1 } else { 2 };
        for (pp, dp) in [(1, 2), (1, 3), (stages, 2), (1, 4)] {
            let (whole, shared) = plans(&module, &precision, Mesh { pp, dp, ..Mesh::ONE });
            let expected = trained(&module, &whole, &weights, f64::INFINITY);
            for plan in shared {
                if plan.zero.stage > 1 && (is_tied || plan.microbatch_count > 1) {
                    continue;
                }
                let found = trained(&module, &plan, &weights, f64::INFINITY);
                let distance = distance(&expected, &found);
                let (model, zero) = (&description.name, plan.zero.stage);
                assert_eq!(distance, 0.0, "{model} pp={pp} dp={dp} zero={zero} {precision}");
            }
        }
    }
}

/// With clipping and tensor-parallel ranks, sums have other orders: what is left is rounding. So do
/// sums over micro-batches, and all schedules of them.
#[test]
fn shared_updates_agree_on_every_mesh() {
    let precision = Precision::uniform(DType::F64);
    let (model, module) = prepared_as(&gpt2(), SEQ, &precision);
    let weights = random_weights(&model, 12);
    for (pp, dp, tp) in [(1, 2, 2), (2, 2, 2), (3, 2, 1), (1, 3, 2)] {
        let (whole, shared) = plans(&module, &precision, Mesh { pp, dp, tp, ..Mesh::ONE });
        let expected = trained(&module, &whole, &weights, 0.5);
        let [first, second, third] = shared.map(schedules);
        // What is gathered, and what is scattered late.
        let late = second.into_iter().take(2);
        for plan in first.into_iter().take(1).chain(late).chain(third) {
            let found = trained(&module, &plan, &weights, 0.5);
            let (distance, zero) = (distance(&expected, &found), plan.zero.stage);
            let schedule = plan.schedule.name();
            assert!(
                distance < 1e-9,
                "pp={pp} dp={dp} tp={tp} zero={zero} {schedule} {:?}: {distance:e}",
                plan.stage_ends
            );
        }
    }
}

/// Pieces over fewer ranks than there are, of which others have copies: sums are those of all, in
/// another order, and copies stay equal to the bit, which sessions assert where they read them.
#[test]
fn copies_of_what_is_shared_agree_with_what_is_not() {
    let precision = Precision::uniform(DType::F64);
    for (description, clip) in [(gpt2(), 0.5), (llama(), f64::INFINITY)] {
        let (model, module) = prepared_as(&description, SEQ, &precision);
        let weights = random_weights(&model, 14);
        for ([pp, dp, tp], shard) in
            [([1, 4, 1], 2), ([1, 4, 1], 1), ([1, 6, 1], 3), ([2, 4, 1], 2), ([1, 4, 2], 2)]
        {
            let (whole, shared) = plans(&module, &precision, Mesh { pp, dp, tp, ..Mesh::ONE });
            let expected = trained(&module, &whole, &weights, clip);
            for mut plan in shared {
                plan.zero.shard = shard;
                let found = trained(&module, &plan, &weights, clip);
                let (distance, zero) = (distance(&expected, &found), plan.zero.stage);
                let about = format!("{} pp={pp} dp={dp} tp={tp} {zero}/{shard}", description.name);
                assert!(distance < 1e-9, "{about}: {distance:e}");
            }
        }
    }
}

/// A plan, and the same with gradients that are put off and with interleaved stages, where it has
/// stages.
pub(crate) fn schedules(plan: Plan) -> Vec<Plan> {
    if plan.mesh.pp == 1 {
        return vec![plan];
    }
    let late = Plan { schedule: Schedule::ZeroBubbleH1, ..plan.clone() };
    let calls = plan.stage_ends.last().copied().unwrap_or(0);
    let mut all = vec![plan.clone(), late];
    if calls >= 2 * plan.mesh.pp && plan.microbatch_count.is_multiple_of(plan.mesh.pp) {
        let chunks = 2 * plan.mesh.pp;
        let stage_ends = (1..=chunks).map(|chunk| chunk * calls / chunks).collect();
        all.push(Plan { stage_ends, ..plan });
    }
    all
}

/// Gradients of several micro-batches in narrow types are the sums of the rounded ones.
#[test]
fn narrow_weights_and_gradients_are_shared() {
    let mixed = Precision::training(DType::BF16);
    let rounded = Precision { reduce: DType::BF16, ..mixed };
    let narrow = Precision { gradients: DType::BF16, ..rounded };
    for precision in [mixed, rounded, narrow] {
        let (model, module) = prepared_as(&llama(), SEQ, &precision);
        let weights = random_weights(&model, 13);
        let (whole, shared) = plans(&module, &precision, Mesh { dp: 2, ..Mesh::ONE });
        let expected = trained(&module, &whole, &weights, f64::INFINITY);
        for plan in shared {
            let found = trained(&module, &plan, &weights, f64::INFINITY);
            let (distance, zero) = (distance(&expected, &found), plan.zero.stage);
            // Rates of 1e-2 move weights of about one by the sign of gradients, which rounding of
            // three digits leaves but for the smallest ones; where ranks exchange the gradients of
            // each micro-batch, these are rounded more often.
            assert!(distance < 0.1, "zero={zero} {precision}: {distance:e}");
        }
    }
}

/// What ranks share takes a share of its bytes on each.
#[test]
fn what_is_shared_is_split_over_ranks() {
    let precision = Precision::training(DType::BF16);
    let (_, module) = prepared_as(&gpt2(), SEQ, &precision);
    let held = |plan: &Plan| {
        let compiled = codegen::compile::compile(&module, "loss", plan).expect("it compiles");
        let footprints =
            planner::footprint::Footprint::of_all(&compiled.programs, &compiled.kernels, None, 1);
        (footprints[0], compiled.programs[0].weights.len())
    };
    for (dp, shard) in [(2, 0), (3, 0), (4, 0), (4, 2), (6, 3)] {
        let (plan, mut shared) = plans(&module, &precision, Mesh { dp, ..Mesh::ONE });
        shared.iter_mut().for_each(|plan| plan.zero.shard = shard);
        let dp = if shard == 0 { dp } else { shard as usize };
        let (whole, weights) = held(&plan);
        let mut last = whole.arena;
        for plan in shared {
            let (own, stage) = (held(&plan).0, plan.zero.stage);
            // Each weight, and each bucket, of which a layer has two at most, is padded to lines of
            // 64 bytes.
            let padding = 2 * 4 * 32 * (weights + 2 * weights * dp) as u64;
            let parts = [
                (whole.masters, own.masters, true),
                (whole.states, own.states, true),
                (whole.grads, own.grads, stage > 1),
                (whole.params, own.params, stage > 2),
            ];
            for (all, own, is_shared) in parts {
                let share = if is_shared { all.div_ceil(dp as u64) } else { all };
                let fits = own >= share && own <= share + padding;
                assert!(fits, "dp={dp} zero={stage}: {own} of {all}");
            }
            assert!(own.arena < last, "dp={dp} zero={stage}: {} of {last}", own.arena);
            last = own.arena;
        }
    }
}

/// A checkpoint holds pieces of weights and moments, which ranks of another plan put together.
#[test]
fn pieces_are_resumed_under_another_plan() {
    let scratch = Scratch::new("zero-resumed");
    scratch.write("tiny/config.json", TINY);
    scratch.write("text/a.txt", &text());
    let flags = "--data text --from-scratch --calibration none --seq 16 --gbs 8 --lr 0.01";
    let on = "--val-every 0 --save-every 4 --ranks 4 --fix dp=4,zero=3 --steps 4";
    scratch.answer(&format!("train tiny {flags} {on} --out run"));
    let folder = scratch.0.join("run/checkpoints/step-4");
    assert!(folder.join("rank-3.safetensors").exists(), "each rank writes its pieces");
    let resumed = |name: &str, on: &str| -> Vec<f64> {
        let (from, to) = (scratch.0.join("run"), scratch.0.join(name));
        let copied = std::process::Command::new("cp").arg("-r").args([from, to]).status();
        assert!(copied.expect("cp runs").success());
        scratch.answer(&format!("train --calibration none --steps 8 {on} --resume {name}"));
        let lines = std::fs::read_to_string(scratch.0.join(name).join("metrics.jsonl"));
        let loss = |line: &str| {
            let step: serde_json::Value = serde_json::from_str(line).expect("a line is JSON");
            step["loss"].as_f64().expect("a loss")
        };
        lines.expect("there are metrics").lines().map(loss).collect()
    };
    let same = resumed("same", "--ranks 4");
    assert_eq!(same.len(), 8);
    for (name, on) in [("one", "--ranks 1 --fix dp=1"), ("tensor", "--ranks 2 --fix dp=1,tp=2")] {
        let other = resumed(name, on);
        for (step, (a, b)) in same.iter().zip(&other).enumerate() {
            assert!((a - b).abs() < 1e-5, "{name}, step {}: {a} and {b}", step + 1);
        }
    }
}
