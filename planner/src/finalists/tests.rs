use codegen::compile::Compiler;
use ir::plan::{Optimizer, Place};
use ir::target::{Arch, Target};

use super::*;
use crate::cluster::Cluster;
use crate::elaborate::tests::{draw, gpt2, llama, prepared, purpose};
use crate::estimate::profile::GANTLINE;
use crate::estimate::rates::Arithmetic;
use crate::estimate::tests::{gpt3, machine};
use crate::estimate::{Estimator, Job};

const ADAMW: Optimizer =
    Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1, decay_biases: 0.0 };

/// A random name whose plan programs carry out.
fn executable(seed: u64) -> Configuration {
    let mut name = draw(seed);
    if matches!(name.zero.stage, 1 | 2) {
        name.offload.parameters = Place::Device;
    }
    name
}

/// What is said of a plan without compiling all of it is what the programs of all ranks allocate,
/// the fullest of them, to the byte and role by role.
#[test]
fn footprints_are_those_of_all_programs() {
    let uneven = [
        "tp=3 dp=2 mbs=1",
        "tp=3 pp=2 dp=1 mbs=1 sp",
        "pp=5 dp=2 mbs=2 stages=3.2.3.2.2",
        "cp=2 dp=2 mbs=1 zero=3",
        "tp=2 cp=2 pp=2 dp=1 mbs=1 sp recompute=attention",
        "cp=4 dp=2 mbs=1 zero=1/2",
    ];
    let targets = [None, Some(Target::Cuda(Arch::Sm90a))];
    for (module, target) in [gpt2(), llama()].map(prepared).into_iter().zip(targets) {
        let purpose = Purpose { optimizer: ADAMW, target, ..purpose(&module) };
        let mut lowering = Lowering::new(purpose.clone()).unwrap();
        let mut compiler = Compiler::new(&module, "loss").unwrap();
        let uneven = uneven.map(|text| text.parse().unwrap());
        let mut compared = 0;
        for name in uneven.into_iter().chain((0..48).map(executable)) {
            let Ok(plan) = elaborate(&name, &purpose) else { continue };
            let programs = compiler.programs(&plan).unwrap();
            let all = Footprint::of_all(&programs, compiler.kernels(), target, 1);
            let mut fullest = Footprint::default();
            // What depends on the threads of a CPU is no part of it.
            for own in all {
                let host = own.host + own.offloaded;
                let own = Footprint { mailboxes: 0, workspace: 0, host, offloaded: 0, ..own };
                if own.total() > fullest.total() {
                    fullest = own;
                }
            }
            assert_eq!(lowering.footprint(&name).unwrap(), fullest, "{name}");
            let Footprint { params, masters, grads, states, activations, .. } = fullest;
            assert_eq!(params + masters + grads + states + activations, fullest.arena, "{name}");
            // Where states come for the update, calls have worked before.
            let is_covered = name.offload.optimizer != Place::Device;
            let (kept, activations) = (fullest.kept(), fullest.activations);
            assert!(kept < activations || is_covered, "{name}: {fullest:?}");
            compared += 1;
        }
        assert!(compared > 40, "{compared} plans");
    }
}

/// What attention makes is not kept where it is recomputed, also where it is made of pieces: ranks
/// that have as many tokens, of one sample or of several, keep as much less.
#[test]
fn results_of_attention_are_recomputed_in_pieces_too() {
    let module = prepared(gpt2());
    let mut lowering = Lowering::new(purpose(&module)).unwrap();
    let mut kept = |name: &str| lowering.footprint(&name.parse().unwrap()).unwrap().kept();
    let mut saved = |mesh: &str| {
        let [all, but_attention] =
            ["none", "attention"].map(|recompute| kept(&format!("{mesh} recompute={recompute}")));
        all.saturating_sub(but_attention)
    };
    let of_samples = saved("dp=4 mbs=1");
    assert!(of_samples > 0);
    for mesh in ["cp=4 mbs=4", "cp=2 dp=2 mbs=2"] {
        let apart = saved(mesh).abs_diff(of_samples);
        assert!(apart * 10 <= of_samples, "{mesh}: {apart} of {of_samples}");
    }
}

/// What no program carries out is said in words, before anything is compiled.
#[test]
fn what_is_not_compiled_is_named() {
    let module = prepared(gpt2());
    let mut lowering = Lowering::new(purpose(&module)).unwrap();
    for (name, word) in [
        ("cp=2 zero=1 offload-parameters=disk", "offload of parameters"),
        ("dp=2 zero=2 offload-parameters=host", "offload of parameters"),
        ("pp=16", "16"),
    ] {
        let why = lowering.footprint(&name.parse().unwrap()).unwrap_err();
        assert!(why.decision.contains(word), "{name}: {why}");
    }
}

fn held(bytes: u64) -> Held {
    let footprint = Footprint { arena: bytes, activations: bytes, ..Footprint::default() };
    Held { footprint, reserve_bytes: 10.0, host_excess_bytes: 0.0 }
}

/// A plan whose program does not fit is not the answer: the next one is, found within less memory.
#[test]
fn finalists_that_do_not_fit_are_passed_over() {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = gpt3();
    let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
    let estimator = Estimator::new(&work, &cluster, GANTLINE, job).unwrap();
    let chosen = |text: &str| {
        let estimate = estimator.estimate(&text.parse().unwrap()).unwrap();
        Chosen { configuration: estimate.configuration.clone(), estimate, fits: true }
    };
    let [fast, slow] = ["tp=8 pp=8 dp=1 mbs=1 sp", "tp=8 pp=8 dp=1 mbs=1 sp recompute=full"];
    let [fast, slow] = [fast, slow].map(chosen);
    let have = 2.0 * fast.estimate.memory.total_bytes();
    let bound_s = 0.5 * fast.estimate.step_time_s;
    let first = SearchResult {
        bound_s: Some(bound_s),
        gap: Some(1.0),
        ..SearchResult::alone(fast.clone(), have)
    };
    let all = u64::MAX / 2;
    let run = |sizes: [u64; 2]| {
        let mut answer = first.clone();
        let mut limits = Vec::new();
        let mut lower = |c: &Configuration| Ok(held(sizes[usize::from(*c == slow.configuration)]));
        let mut search = |limit: f64| {
            limits.push(limit);
            (limits.len() < 2).then(|| SearchResult::alone(slow.clone(), limit))
        };
        let found = settle(&mut answer, &mut lower, &mut search);
        (found, answer, limits)
    };
    let (found, answer, limits) = run([100, 100]);
    assert_eq!((found.unwrap().oversized, limits.len()), (Vec::new(), 0));
    assert_eq!(answer, first);
    let (found, answer, limits) = run([have as u64 + 90, 100]);
    let found = found.unwrap();
    assert_eq!(found.oversized.len(), 1);
    assert_eq!(found.oversized[0].chosen, fast);
    assert_eq!(found.held.unwrap().footprint.arena, 100);
    assert_eq!(answer.best, std::slice::from_ref(&slow));
    assert_eq!((answer.have_bytes, answer.bound_s), (have, Some(bound_s)));
    assert_eq!(answer.gap, Some(slow.estimate.step_time_s / bound_s - 1.0));
    // As much less as the program had too much, or less than the closed form expected of it.
    assert!(limits == [fast.estimate.memory.total_bytes() - 1.0], "{limits:?}");
    let (found, _, limits) = run([all, all]);
    let wrong = found.unwrap_err();
    // Where nothing fits within so much less, what is a little smaller is tried.
    assert_eq!((wrong.code, limits.len()), ("E3201", 3));
    assert_eq!(limits[2], slow.estimate.memory.total_bytes() - 1.0);
    assert!(wrong.notes.iter().any(|note| note.contains("its program needs")), "{wrong:?}");
    // Where there is no program yet, the expectation stands.
    let mut answer = first.clone();
    let why = NotYet { decision: "offload".to_owned() };
    let found = settle(&mut answer, &mut |_| Err(why.clone()), &mut |_| None).unwrap();
    assert_eq!((found.held, answer), (Err(why.clone()), first.clone()));
}
