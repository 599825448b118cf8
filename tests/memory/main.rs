//! Memory outside the arenas, counted in the allocator. A process of its own, and one test at a
//! time: nobody else allocates meanwhile.

#![allow(clippy::unwrap_used, reason = "a test may fail anywhere")]

mod mutations;

use std::alloc::System;
use std::sync::{Mutex, PoisonError};

use gantline::job::{ADAMW, Question};
use gantline::{LOSS, compile, import, plan, prepare, start};
use ir::DType;
use ir::import::{Options, preset};
use planner::cluster::Cluster;
use planner::footprint::Footprint;
use planner::limits::{Knob, Limits};
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

fn question([pp, dp, tp]: [usize; 3]) -> Question {
    let description = preset("gpt2-mini").unwrap();
    let options = Options { seq: SEQ, dtype: DType::F32, dropout: Some(0.1) };
    let model = import(&description, &options).unwrap();
    let mut limits = Limits::default();
    for (knob, number) in [(Knob::Pp, pp), (Knob::Dp, dp), (Knob::Tp, tp), (Knob::Mbs, 1)] {
        limits.fix(knob, number);
    }
    Question {
        module: prepare(&model).unwrap(),
        model: model.name,
        cluster: Cluster::load("cpu-local").unwrap(),
        ranks: pp * dp * tp,
        global_batch_size: SAMPLES,
        seq: SEQ,
        dtype: DType::F32,
        optimizer: ADAMW,
        clip: Some(1.0),
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

fn check(mesh: [usize; 3], threads: usize) {
    let question = question(mesh);
    let found = plan(&question.job()).unwrap();
    let classes = compile(&question.module, LOSS, &found.plan).unwrap();
    let ranks = found.plan.mesh.ranks();
    let of_class = Footprint::of_all(&classes.programs, &classes.kernels, threads);
    let footprints: Vec<Footprint> =
        (0..ranks).map(|rank| of_class[classes.class_of(rank)]).collect();
    let predicted = found.plan.predictions["arena_bytes"].value;
    assert_eq!(predicted, footprints.iter().map(|f| f.arena).max().unwrap() as f64);
    let arenas: u64 = footprints.iter().map(|f| f.arena).sum();
    let workspaces: u64 = footprints.iter().map(|f| f.workspace + f.mailboxes).sum();
    let bound = workspaces + ranks as u64 * MIB;
    let whole = Region::new(ALLOCATOR);
    let mut session = start(classes, threads).unwrap();
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
