//! Memory outside the arenas, counted in the allocator. A process of its own, and one test at a
//! time: nobody else allocates meanwhile.

#![allow(clippy::unwrap_used, reason = "a test may fail anywhere")]

#[path = "../end_to_end/model.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod model;
mod formats;
mod mutant;
mod mutations;

use std::alloc::System;
use std::sync::{Mutex, PoisonError};

use codegen::prepare::prepare_training;
use gantline::job::{ADAMW, PlanRequest};
use gantline::{LOSS, compile, import, plan, prepare, prepare_as, start};
use ir::DType;
use ir::import::{Description, Options, preset, read_config};
use ir::plan::{FunctionPlan, Keep, Optimizer, Place};
use ir::precision::Precision;
use ir::program::{Buffer, Contents, ShardRole};
use ir::random::mix;
use ir::{Mesh, Plan};
use planner::cluster::Cluster;
use planner::footprint::Footprint;
use planner::limits::{Decision, Limits};
use runtime::execute::{Batch, Scalars, Session};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Held by the test that counts.
static ALONE: Mutex<()> = Mutex::new(());

const SEQ: usize = 64;
const SAMPLES: usize = 4;
/// What may lie outside, of each rank.
const MIB: u64 = 1 << 20;
/// Plans that are drawn.
const RANDOM_PLANS: usize = 100;

fn question([pp, dp, tp]: [usize; 3]) -> PlanRequest {
    let description = preset("gpt2-mini").unwrap();
    let options = Options { seq: SEQ, dtype: DType::F32, dropout: Some(0.1), documents: false };
    let model = import(&description, &options).unwrap();
    let mut limits = Limits::default();
    for (decision, number) in
        [(Decision::Pp, pp), (Decision::Dp, dp), (Decision::Tp, tp), (Decision::Mbs, 1)]
    {
        limits.fix(decision, number);
    }
    PlanRequest {
        module: prepare(&model).unwrap(),
        model: model.name,
        cluster: Cluster::load("cpu-local").unwrap(),
        ranks: pp * dp * tp,
        global_batch_size: SAMPLES,
        seq: SEQ,
        precision: Precision::uniform(DType::F32),
        optimizer: ADAMW,
        clip: Some(1.0),
        lora: None,
        limits,
    }
}

fn step(session: &mut Session) {
    let ids: Vec<i32> = (0..SAMPLES * SEQ).map(|i| (i * i % 251) as i32).collect();
    let batch = Batch { tokens: &ids, labels: &ids, ..Batch::default() };
    let scalars = Scalars { rate: 1e-4, correction1: 0.1, correction2: 0.05, ..Scalars::default() };
    session.step(&batch, scalars).unwrap();
    session.evaluate(&batch).unwrap();
}

#[test]
fn memory_is_that_of_arenas_and_workspaces() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let one = [([1, 1, 1], 1), ([1, 2, 1], 1), ([1, 1, 2], 1), ([2, 1, 1], 1)];
    for (mesh, threads) in one.into_iter().chain([([1, 1, 1], 2), ([1, 1, 2], 2)]) {
        check(mesh, threads);
    }
}

/// A layer is prepared once, however often it is called: of 48 layers hardly more is made than of
/// 12. Allocations are counted, which no busy machine makes slower.
#[test]
fn more_layers_are_hardly_more_to_prepare() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let options = Options { seq: 256, dtype: DType::F32, dropout: Some(0.0), documents: false };
    let allocations = |name: &str| {
        let module = import(&preset(name).unwrap(), &options).unwrap().module;
        let region = Region::new(ALLOCATOR);
        prepare_training(module, LOSS).unwrap();
        region.change().allocations
    };
    // The library is read once.
    allocations("gpt2-mini");
    let [few, many] = ["gpt2", "gpt2-xl"].map(allocations);
    assert!(many * 10 < few * 11, "{few} allocations for 12 layers, {many} for 48");
}

fn check(mesh: [usize; 3], threads: usize) {
    let question = question(mesh);
    let found = plan(&question.job()).unwrap();
    let classes = compile(&question.module, LOSS, &found.plan).unwrap();
    let ranks = found.plan.mesh.ranks();
    let of_class = Footprint::of_all(&classes.programs, &classes.kernels, None, threads);
    let footprints: Vec<Footprint> =
        (0..ranks).map(|rank| of_class[classes.class_of(rank)]).collect();
    let predicted = found.plan.predictions["arena_bytes"].value;
    assert_eq!(predicted, footprints.iter().map(|f| f.arena).max().unwrap() as f64);
    let arenas: u64 = footprints.iter().map(|f| f.arena).sum();
    let workspaces: u64 = footprints.iter().map(|f| f.workspace + f.mailboxes).sum();
    let bound = workspaces + (ranks * threads) as u64 * MIB;
    let whole = Region::new(ALLOCATOR);
    let mut session = start(classes, None, threads).unwrap();
    for at in 0..3 {
        let one = Region::new(ALLOCATOR);
        step(&mut session);
        // Workspaces are taken in the first step; threads that share a rank's work as it comes may
        // do so in any. What is allocated bounds what is held at once.
        let allocated = one.change().bytes_allocated as u64;
        let is_steady = at > 0 && threads == 1;
        assert!(!is_steady || allocated < MIB, "{mesh:?}: step {at} allocates {allocated} bytes");
        let change = whole.change();
        let live = change.bytes_allocated as u64 - change.bytes_deallocated as u64;
        assert!(live >= arenas, "{mesh:?} {threads}: the arenas are allocated");
        let rest = live - arenas;
        assert!(rest < bound, "{mesh:?} {threads}: {rest} bytes for {workspaces} of workspaces");
    }
}

/// Draws that depend on the seed alone.
struct Draws(u64);

impl Draws {
    fn below(&mut self, n: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 % n as u64) as usize
    }

    fn from(&mut self, choices: &[usize]) -> usize {
        choices[self.below(choices.len())]
    }
}

/// A small model; rows of its weights are blocks of states of 8 bits where it `has_blocks`.
fn random_model(draws: &mut Draws, has_blocks: bool) -> Description {
    let (layers, heads) = match has_blocks {
        true => (1 + draws.below(2), draws.from(&[2, 4])),
        false => (1 + draws.below(5), draws.from(&[2, 4, 6])),
    };
    let model = if has_blocks { 256 } else { heads * draws.from(&[4, 8]) };
    let vocab = draws.from(&[64, 259]);
    let text = match draws.below(2) {
        0 => format!(
            r#"{{"model_type": "gpt2", "n_layer": {layers}, "n_head": {heads}, "n_embd": {model},
            "n_positions": 40, "vocab_size": {vocab}, "bos_token_id": null, "eos_token_id": null}}"#
        ),
        _ => format!(
            r#"{{"model_type": "llama", "num_hidden_layers": {layers},
            "num_attention_heads": {heads}, "num_key_value_heads": 2, "hidden_size": {model},
            "intermediate_size": {}, "max_position_embeddings": 40, "vocab_size": {vocab}}}"#,
            3 * model
        ),
    };
    read_config("config.json", &text, "random").unwrap()
}

/// A plan with a random mesh, batch, boundary, stages and keep sets; none where it cannot be.
fn random_plan(draws: &mut Draws, module: &ir::Module, seq: usize) -> Option<Plan> {
    let meshes = [[1, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2], [2, 2, 1], [2, 1, 2], [1, 2, 2]];
    let more = [[1, 1, 4], [4, 1, 1], [3, 1, 1], [1, 1, 3], [1, 4, 1]];
    let [pp, dp, tp] = [&meshes[..], &more[..]].concat()[draws.below(12)];
    let wanted = model::Wanted {
        mesh: Mesh { pp, dp, tp, ..Mesh::ONE },
        microbatch_size: 1 + draws.below(3),
        microbatch_count: 1 + draws.below(5),
        keep: Keep::Full,
        sequence: tp > 1 && draws.below(2) == 1,
    };
    let mut plan = model::plan(module, seq, DType::F32, wanted).ok()?;
    for FunctionPlan { keep, .. } in plan.functions.values_mut() {
        *keep = if draws.below(2) == 1 { Keep::Full } else { Keep::None };
    }
    let sgd = Optimizer::Sgd { decay: 0.1, decay_biases: 0.0 };
    plan.optimizer = [Optimizer::None, sgd, ADAMW][draws.below(3)];
    // Stages that end anywhere.
    let calls = *plan.stage_ends.last().unwrap();
    let mut ends: Vec<usize> = (1..calls).collect();
    while ends.len() > pp - 1 {
        ends.remove(draws.below(ends.len()));
    }
    plan.stage_ends = [&ends[..], &[calls]].concat();
    Some(plan)
}

/// A precision that programs can have: of one type, or with roles of two.
fn random_precision(draws: &mut Draws) -> Precision {
    let dtype = [DType::F32, DType::F64, DType::BF16, DType::F16][draws.below(4)];
    let mut precision = Precision::training(dtype);
    if dtype.is_narrow() {
        let two = [dtype, precision.accumulate];
        precision.parameters = two[draws.below(2)];
        precision.states = two[draws.below(2)];
        precision.logits = two[draws.below(2)];
        precision.gradients = two[draws.below(2)];
        precision.reduce = if draws.below(2) == 0 { dtype } else { precision.gradients };
        if precision.parameters != dtype || draws.below(2) == 0 {
            precision.master = None;
        }
    }
    if dtype == DType::F32 {
        let narrow = [DType::F32, DType::BF16, DType::F16];
        precision.reduce = narrow[draws.below(3)];
        if draws.below(2) == 0 {
            precision.gradients = precision.reduce;
        }
    }
    let saved = [DType::F32, DType::BF16, DType::F16][draws.below(3)];
    if !dtype.is_narrow() && saved.size() < dtype.size() {
        precision.saved = saved;
    }
    if precision.accumulate == DType::F32 && draws.below(3) == 0 {
        precision.states = DType::F8E4M3;
    }
    assert_eq!(precision.lacking(), [""; 0]);
    precision
}

/// Random plans of random models: each rank allocates what is predicted, to the byte.
#[test]
fn ranks_of_random_plans_allocate_what_is_predicted() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let mut draws = Draws(seed);
    let (mut plans, mut coded) = (0, 0);
    while plans < RANDOM_PLANS {
        let seq = 8 + draws.below(25);
        let precision = random_precision(&mut draws);
        let options =
            Options { seq, dtype: precision.accumulate, dropout: Some(0.1), documents: false };
        let model =
            import(&random_model(&mut draws, precision.has_coded_states()), &options).unwrap();
        let module = prepare_as(&model, &precision).unwrap();
        let Some(plan) = random_plan(&mut draws, &module, seq) else { continue };
        let mut plan = Plan { precision, ..plan };
        if precision.has_coded_states() {
            plan.optimizer = ADAMW;
        }
        plan.zero.stage = draws.below(4) as u8;
        let what = format!("SEED={seed}, plan {plans}:\n{plan}");
        let classes = match compile(&module, LOSS, &plan) {
            Ok(classes) => classes,
            // Ranks hold whole blocks of states.
            Err(why) if format!("{why:?}").contains("inside a block") => continue,
            Err(why) => panic!("{why:?}, {what}"),
        };
        let is_scale = |buffer: &Buffer| {
            matches!(
                buffer.contents,
                Contents::Scale { .. } | Contents::Shard { role: ShardRole::Scale(_), .. }
            )
        };
        let mut programs = classes.programs.iter();
        coded += usize::from(programs.any(|program| program.buffers.iter().any(is_scale)));
        let predicted = Footprint::of_all(&classes.programs, &classes.kernels, None, 1);
        let of_rank: Vec<Footprint> =
            (0..plan.mesh.ranks()).map(|rank| predicted[classes.class_of(rank)]).collect();
        let whole = Region::new(ALLOCATOR);
        let mut session = start(classes, None, 1).unwrap();
        let ids: Vec<i32> =
            (0..plan.global_batch_size() * seq).map(|i| (i * i % 61) as i32).collect();
        let batch = Batch { tokens: &ids, labels: &ids, ..Batch::default() };
        session.step(&batch, Scalars::default()).unwrap();
        session.evaluate(&batch).unwrap();
        for (rank, footprint) in of_rank.iter().enumerate() {
            let allocated = session.lend(rank, |memory| memory.arena_bytes(Place::Device));
            assert_eq!(footprint.arena, allocated, "rank {rank}, {what}");
        }
        let change = whole.change();
        let live = change.bytes_allocated as u64 - change.bytes_deallocated as u64;
        let total: u64 = of_rank.iter().map(Footprint::total).sum();
        let slack = of_rank.len() as u64 * MIB;
        assert!(live <= total + slack, "{live} bytes for {total} predicted, {what}");
        plans += 1;
    }
    assert!(coded >= 8, "{coded} plans have states with scales");
}
