//! Every mesh gives the loss and the gradients of the reference interpreter.

use std::collections::BTreeMap;

use ir::import::{Description, read_config};
use ir::plan::{Keep, Schedule, Zero};
use ir::random::{mix, uniform};
use ir::tensor::Tensor;
use ir::{Axis, DType, ExpertParallel, Mesh, Plan};
use runtime::execute::{Batch, Scalars};

use planner::link::Link;

use crate::model::{Wanted, load, plan, plan_sharing, prepared, session};

const SEQ: usize = 33;

pub(crate) type Weights = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

pub(crate) fn gpt2() -> Description {
    let text = r#"{"model_type": "gpt2", "n_layer": 9, "n_head": 9, "n_embd": 36,
        "n_positions": 40, "vocab_size": 259, "bos_token_id": null, "eos_token_id": null}"#;
    read_config("config.json", text, "tiny-gpt2").expect("the config reads")
}

pub(crate) fn llama() -> Description {
    let text = r#"{"model_type": "llama", "num_hidden_layers": 9, "num_attention_heads": 9,
        "num_key_value_heads": 3, "hidden_size": 72, "intermediate_size": 100,
        "max_position_embeddings": 40, "vocab_size": 259}"#;
    read_config("config.json", text, "tiny-llama").expect("the config reads")
}

pub(crate) fn random_weights(model: &ir::import::Model, seed: u64) -> Weights {
    let mut weights = Weights::new();
    for (at, weight) in model.weights.iter().enumerate() {
        let count: usize = weight.dims.iter().product();
        let stream = mix(seed + at as u64);
        let one = if weight.name.contains("ln") && weight.name.ends_with('w') { 1.0 } else { 0.0 };
        let values =
            (0..count).map(|i| one + 0.3 * (f64::from(uniform(stream, i as u64)) - 0.5)).collect();
        weights.insert(weight.name.clone(), (weight.dims.clone(), values));
    }
    weights
}

/// Weights, tokens and labels as the interpreter takes them.
pub(crate) fn arguments(
    model: &ir::import::Model,
    weights: &Weights,
    batch: [&[i32]; 2],
    seq: usize,
) -> Vec<Tensor> {
    let mut args: Vec<Tensor> = Vec::new();
    for weight in &model.weights {
        let (dims, values) = &weights[&weight.name];
        args.push(Tensor::f64(dims, values.clone()));
    }
    let ints = |v: &[i32]| v.iter().map(|x| i64::from(*x)).collect::<Vec<_>>();
    args.extend(batch.map(|v| Tensor::int(DType::I32, &[v.len() / seq, seq], ints(v))));
    args
}

/// Loss sum and gradients of the interpreter, on the whole batch at once.
fn reference(
    model: &ir::import::Model,
    weights: &Weights,
    tokens: &[i32],
    labels: &[i32],
    seq: usize,
    dropout: bool,
) -> (f64, BTreeMap<String, Vec<f64>>) {
    let mut module = model.module.clone();
    let step =
        ir::autodiff::training_step(&mut module, "loss").expect("the entry is differentiable");
    let mut args = arguments(model, weights, [tokens, labels], seq);
    if dropout {
        args.push(Tensor::int(DType::U32, &[4], vec![7, 1, 0, 0]));
    }
    let results = ir::eval::eval(&module, &step, &args).expect("the step evaluates");
    let floats = |t: &Tensor| t.to_f64();
    let loss = floats(&results[0])[0];
    let grads = model.weights.iter().filter(|weight| !weight.frozen).zip(&results[2..]);
    (loss, grads.map(|(w, g)| (w.name.clone(), floats(g))).collect())
}

pub(crate) fn batch(seed: u64, samples: usize, seq: usize, vocab: u64) -> (Vec<i32>, Vec<i32>) {
    let draw = |i: usize| (mix(seed * 1_000_003 + i as u64) % vocab) as i32;
    let tokens = (0..samples * seq).map(draw).collect();
    let label = |i: usize| if i % 11 == 3 { -100 } else { draw(i + 500_000) };
    (tokens, (0..samples * seq).map(label).collect())
}

fn scalars() -> Scalars {
    Scalars {
        seed: 7,
        step: 1,
        rate: 0.0,
        correction1: 0.1,
        correction2: 0.001,
        clip: f64::INFINITY,
        ..Scalars::default()
    }
}

fn check(
    description: &Description,
    dropout: f64,
    meshes: &[Mesh],
    keep: Keep,
    dtype: DType,
    bound: f64,
) {
    let mut of_samples: BTreeMap<usize, Vec<Mesh>> = BTreeMap::new();
    for mesh in meshes {
        // A batch is cut evenly by dp, and dp alone may be any number.
        let samples = [8, 6, mesh.dp].into_iter().find(|samples| samples % mesh.dp == 0);
        of_samples.entry(samples.expect("the last one is")).or_default().push(*mesh);
    }
    for (samples, meshes) in of_samples {
        let case = Case {
            description,
            dropout,
            samples,
            keep,
            dtype,
            bound,
            seq: SEQ,
            experts: ExpertParallel::NONE,
        };
        check_batch(case, &meshes, &|_| {});
    }
}

/// What is compared, and how closely.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) description: &'a Description,
    pub(crate) dropout: f64,
    pub(crate) seq: usize,
    pub(crate) samples: usize,
    pub(crate) keep: Keep,
    pub(crate) dtype: DType,
    pub(crate) bound: f64,
    /// Ranks along `dp` that share experts.
    pub(crate) experts: ExpertParallel,
}

/// The same, for meshes that all split one batch, with a change of each plan.
pub(crate) fn check_batch(case: Case<'_>, meshes: &[Mesh], change: &dyn Fn(&mut Plan)) {
    let Case { description, dropout, seq, samples, keep, dtype, bound, experts } = case;
    let link = Link { latency_s: 1e-6, bandwidth_bytes_per_s: 1e9 };
    let (model, _) = prepared(description, seq, DType::F64, dropout);
    let weights = random_weights(&model, 5);
    let (tokens, labels) = batch(3, samples, seq, 259);
    let (loss, grads) = reference(&model, &weights, &tokens, &labels, seq, dropout > 0.0);
    let largest = grads.values().flatten().fold(0.0_f64, |m, g| m.max(g.abs()));
    let (_, module) = prepared(description, seq, dtype, dropout);
    for mesh in meshes {
        for sequence in [false, true] {
            let is_none = if sequence { mesh.tp == 1 } else { experts.takes_tp };
            if is_none {
                continue;
            }
            let wanted = Wanted {
                mesh: *mesh,
                microbatch_size: 1,
                microbatch_count: samples / mesh.dp,
                keep,
                sequence,
            };
            let mut plan = plan_sharing(&module, (seq, dtype), wanted, (link, experts))
                .unwrap_or_else(|why| panic!("{} {mesh}: {why}", description.name));
            change(&mut plan);
            let mut session = session(&module, &plan);
            load(&mut session, &weights);
            let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
            let report = session.step(&batch, scalars()).expect("the step runs");
            let error = (report.loss_sum - loss).abs() / loss.abs();
            assert!(
                error <= bound,
                "{mesh} sequence={sequence}: loss {} for {loss}",
                report.loss_sum
            );
            for (name, wanted) in &grads {
                let found = session.read_grad(name).expect("the gradient is there").to_f64();
                let scale = wanted.iter().fold(1e-3 * largest, |m, g| m.max(g.abs()));
                let error =
                    found.iter().zip(wanted).fold(0.0_f64, |m, (a, b)| m.max((a - b).abs()));
                assert!(
                    error / scale <= bound,
                    "{} {mesh} sequence={sequence} {dtype}: gradient of {name} off by {:e}",
                    description.name,
                    error / scale
                );
            }
        }
    }
}

pub(crate) fn meshes(ranks_max: usize) -> Vec<Mesh> {
    let mut meshes = Vec::new();
    for pp in 1..=ranks_max {
        for dp in 1..=ranks_max {
            for tp in 1..=ranks_max {
                if pp * dp * tp <= ranks_max {
                    meshes.push(Mesh { pp, dp, tp, ..Mesh::ONE });
                }
            }
        }
    }
    meshes
}

#[test]
fn one_rank_agrees_with_the_interpreter() {
    let one = [Mesh::ONE];
    check(&gpt2(), 0.0, &one, Keep::Full, DType::F64, 1e-10);
    check(&llama(), 0.0, &one, Keep::None, DType::F64, 1e-10);
}

/// Every `parts`-th mesh of up to eight ranks, the first of them number `part`: the tests below
/// take all of them together.
fn some(part: usize, parts: usize) -> Vec<Mesh> {
    meshes(8).into_iter().skip(part).step_by(parts).collect()
}

#[test]
fn every_mesh_agrees_with_the_interpreter() {
    check(&gpt2(), 0.0, &some(0, 3), Keep::Full, DType::F64, 1e-10);
    check(&llama(), 0.0, &some(1, 3), Keep::None, DType::F64, 1e-10);
    check(&gpt2(), 0.0, &some(2, 3), Keep::AllButAttention, DType::F64, 1e-10);
}

#[test]
fn every_mesh_drops_the_same_elements() {
    check(&gpt2(), 0.1, &some(1, 2), Keep::None, DType::F64, 1e-10);
    check(&llama(), 0.1, &some(0, 2), Keep::Full, DType::F64, 1e-10);
}

/// Whatever the order of micro-batches, the nesting of the axes, and what calls of one layer keep.
#[test]
fn schedules_keeps_and_orders_agree() {
    let [gpt2, llama] = [gpt2(), llama()];
    let mesh = |pp, dp, tp| Mesh { pp, dp, tp, ..Mesh::ONE };
    let turned = Mesh { order: [Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp], ..mesh(2, 2, 2) };
    let meshes = [mesh(1, 1, 1), mesh(3, 1, 2), mesh(4, 2, 1), turned];
    for (description, dropout) in [(&gpt2, 0.1), (&llama, 0.0)] {
        let keep = Keep::AllButAttention;
        let (seq, samples, dtype, bound) = (SEQ, 8, DType::F64, 1e-10);
        let case = Case {
            description,
            dropout,
            seq,
            samples,
            keep,
            dtype,
            bound,
            experts: ExpertParallel::NONE,
        };
        check_batch(case, &meshes, &|plan| plan.schedule = Schedule::GPipe);
        check_batch(case, &meshes, &|plan| plan.schedule = Schedule::ZeroBubbleH1);
        check_batch(case, &meshes[1..3], &|plan| {
            plan.schedule = Schedule::ZeroBubbleH2;
            plan.zero = Zero { stage: 2, shard: 0 };
        });
        check_batch(case, &meshes, &|plan| plan.zero = Zero { stage: 3, shard: 0 });
        check_batch(case, &meshes, &|plan| {
            let block = plan.functions.get_mut("block").expect("there are blocks");
            block.exceptions = [(0, Keep::None), (3, Keep::Full), (4, Keep::None)].into();
        });
    }
}

/// Every sum has one order, whatever the order of passes.
#[test]
fn schedules_change_no_bit() {
    let (seq, samples) = (33, 8);
    let (model, module) = prepared(&llama(), seq, DType::F32, 0.1);
    let weights = random_weights(&model, 6);
    let (tokens, labels) = batch(4, samples, seq, 259);
    let gradients = |schedule: Schedule| {
        let wanted = Wanted {
            mesh: Mesh { pp: 4, ..Mesh::ONE },
            microbatch_size: 1,
            microbatch_count: samples,
            keep: Keep::Full,
            sequence: false,
        };
        let whole = plan(&module, seq, DType::F32, wanted).expect("the mesh fits");
        let mut session = session(&module, &Plan { schedule, ..whole });
        load(&mut session, &weights);
        let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
        session.step(&batch, scalars()).expect("the step runs");
        let read = |name: &String| session.read_grad(name).expect("it is there").to_f64();
        weights.keys().map(read).collect::<Vec<_>>()
    };
    let usual = gradients(Schedule::OneForwardOneBackward);
    for schedule in Schedule::ALL {
        assert!(gradients(schedule) == usual, "{}", schedule.name());
    }
}

/// Cuts the calls of a plan into interleaved chunks, each of at least one call.
pub(crate) fn interleave(plan: &mut Plan, chunks_per_stage: usize, seed: u64) {
    let (calls, chunks) = (plan.stage_ends[plan.mesh.pp - 1], chunks_per_stage * plan.mesh.pp);
    let mut cuts: Vec<usize> = (1..calls).collect();
    cuts.sort_by_key(|cut| mix(seed + *cut as u64));
    cuts.truncate(chunks - 1);
    cuts.sort_unstable();
    plan.stage_ends = [&cuts[..], &[calls]].concat();
}

/// Wherever interleaved chunks are cut, whatever the update is shared over and what is kept: with
/// two stages messages of forward and backward passes go the same way.
#[test]
fn interleaved_stages_agree() {
    let [gpt2, llama] = [gpt2(), llama()];
    let mesh = |pp, dp, tp| Mesh { pp, dp, tp, ..Mesh::ONE };
    for seed in 0..3 {
        let (description, dropout) = if seed == 0 { (&gpt2, 0.1) } else { (&llama, 0.0) };
        let keep = [Keep::Full, Keep::None, Keep::AllButAttention][seed as usize];
        let (seq, samples, dtype, bound) = (SEQ, 8, DType::F64, 1e-10);
        let case = Case {
            description,
            dropout,
            seq,
            samples,
            keep,
            dtype,
            bound,
            experts: ExpertParallel::NONE,
        };
        check_batch(case, &[mesh(2, 1, 1), mesh(2, 2, 2)], &|plan| {
            interleave(plan, 2 + mix(seed) as usize % 4, 100 * seed);
        });
        check_batch(case, &[mesh(4, 2, 1)], &|plan| {
            plan.zero = Zero { stage: 1 + seed as u8, shard: 0 };
            interleave(plan, 2, 100 * seed + 50);
        });
        let case = Case { samples: 6, ..case };
        check_batch(case, &[mesh(3, 1, 2)], &|plan| interleave(plan, 3, 100 * seed + 70));
    }
}

#[test]
fn every_mesh_agrees_in_f32() {
    check(&gpt2(), 0.0, &some(0, 2), Keep::None, DType::F32, 1e-5);
    check(&llama(), 0.0, &some(1, 2), Keep::Full, DType::F32, 1e-5);
}
