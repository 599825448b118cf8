//! Artefacts read back, and those that are damaged or made to do harm are refused.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use ir::diagnostic::render;
use kernels::cuda::Arch;

use super::*;
use crate::error::Failure;
use crate::execute::tiny::{self, SEQ};
use crate::execute::{Batch, Options, Scalars, Session};
use crate::scratch::{Scratch, mutations};
use crate::trace::Tracing;

const MODULE_TEXT: &str = "module tiny
  func @loss(%w: f32[8], %tokens: i32[2, 8]) {
    %s: f32[8] = add %w %w
    return %s
  }
";

const PLAN_TEXT: &str = "plan tiny on [pp=1, dp=1, tp=2] of test
  micro-batch size=2 count=2
  schedule 1f1b stages 1
  data seq=8 dtype=f32
  optimizer sgd decay=0.0 decay_biases=0.0
";

fn contents() -> Contents {
    let mesh = tiny::mesh(1, 2);
    let classes = tiny::classes(mesh, 2, 2);
    let machine = Machine {
        device: "cpu".to_owned(),
        instruction_set: "avx2".to_owned(),
        cores: 2,
        memory_bytes: 1 << 20,
    };
    Contents {
        module: ir::text::parse_module("module", MODULE_TEXT).unwrap(),
        plan: ir::text::parse_plan("plan", PLAN_TEXT).unwrap(),
        programs: classes.programs,
        kernels: classes.kernels,
        archs: Vec::new(),
        requirements: Requirements { ranks: 2, machine },
        report: serde_json::json!({"schema": "report/1", "step_time_s": 0.25}),
    }
}

fn parts(contents: &Contents) -> BTreeMap<String, Vec<u8>> {
    let parts = [
        (KERNELS, postcard::to_stdvec(&contents.kernels).unwrap()),
        (MODULE, contents.module.to_string().into_bytes()),
        (PLAN, contents.plan.to_string().into_bytes()),
        (PROGRAMS, postcard::to_stdvec(&contents.programs).unwrap()),
        (REPORT, serde_json::to_vec_pretty(&contents.report).unwrap()),
    ];
    parts.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect()
}

/// An artefact with one member replaced and all hashes right.
fn forged(name: &str, bytes: Vec<u8>) -> Vec<u8> {
    let contents = contents();
    let mut parts = parts(&contents);
    parts.insert(name.to_owned(), bytes);
    parts.insert(MANIFEST.to_owned(), manifest_of(&parts, &contents.requirements).unwrap());
    pack(&parts).unwrap()
}

fn codes(bytes: &[u8]) -> Vec<&'static str> {
    let found = decode("test.gtl", bytes, &Limits::default()).expect_err("it is refused");
    found.iter().for_each(|d| assert!(!render(d, None).is_empty()));
    found.iter().map(|d| d.code).collect()
}

#[test]
fn contents_read_back_and_equal_contents_give_equal_bytes() {
    let scratch = Scratch::new("artefact");
    let path = scratch.join("tiny.gtl");
    std::fs::write(&path, "an older file").unwrap();
    write(&path, &contents()).unwrap();
    assert_eq!(read(&path, &Limits::default()).unwrap(), contents());
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes, encode(&contents()).unwrap());
    assert_eq!(decode("again", &bytes, &Limits::default()).unwrap(), contents());
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 1, "no draft is left");
    let mut session =
        Session::start(Arc::new(contents().into_classes("loss")), &tiny::options()).unwrap();
    let tokens = vec![1; 4 * SEQ];
    let batch = Batch { tokens: &tokens, ..Batch::default() };
    assert!(session.step(&batch, Scalars::default()).unwrap().loss_sum > 0.0);
}

#[test]
fn a_machine_that_lacks_something_is_told_what() {
    let scratch = Scratch::new("artefact-machine");
    let path = scratch.join("tiny.gtl");
    write(&path, &contents()).unwrap();
    let present = contents().requirements.machine;
    let requirements = read(&path, &Limits::default()).unwrap().requirements;
    let refusals = |machine: &Machine| -> Vec<String> {
        requirements.unmet("tiny.gtl", machine).into_iter().map(|d| d.headline).collect()
    };
    assert_eq!(refusals(&present), [""; 0]);
    let wide = Machine { instruction_set: "avx512".to_owned(), cores: 64, ..present.clone() };
    assert_eq!(refusals(&wide), [""; 0]);
    let small = Machine {
        device: "cpu".to_owned(),
        instruction_set: "portable".to_owned(),
        cores: 1,
        memory_bytes: 1000,
    };
    assert_eq!(
        refusals(&small),
        [
            "it was compiled for the instruction set `avx2`, and this machine has `portable`",
            "it was compiled for 2 cores, and this machine has 1",
            "its 2 ranks need 1048576 bytes of memory, and this machine has 1000",
        ]
    );
    let gpu = Machine { device: "cuda".to_owned(), ..present };
    assert_eq!(refusals(&gpu), ["it was compiled for `cpu` devices, and this machine has `cuda`"]);
    assert!(matches!(read(&scratch.join("none.gtl"), &Limits::default()), Err(Failure::Input(_))));
}

#[test]
fn every_refusal_has_its_code() {
    let good = encode(&contents()).unwrap();
    assert_eq!(codes(b"not a zip"), ["E4070"]);
    assert_eq!(codes(b"PK not a zip either"), ["E4072"]);
    let few = pack(&BTreeMap::from([(MANIFEST.to_owned(), b"{}".to_vec())])).unwrap();
    assert_eq!(codes(&few), ["E4070"]);
    let found = decode("test", &good, &Limits { file_bytes: 100 }).unwrap_err();
    assert_eq!(found[0].code, "E4075");

    let mut cut = good.clone();
    cut.truncate(good.len() / 2);
    assert_eq!(codes(&cut), ["E4072"]);
    assert_eq!(codes(&forged(PLAN, vec![0xff])), ["E4072"]);
    assert_eq!(codes(&forged(PLAN, b"plan tiny".to_vec())), ["E1021"]);
    assert_eq!(codes(&forged(REPORT, b"{".to_vec())), ["E4072"]);
    let mut long = postcard::to_stdvec(&contents().programs).unwrap();
    long.push(0);
    assert_eq!(codes(&forged(PROGRAMS, long)), ["E4072"]);

    let with_manifest = |change: &dyn Fn(&mut Manifest)| {
        let mut parts = parts(&contents());
        let text = manifest_of(&parts, &contents().requirements).unwrap();
        let mut manifest: Manifest = serde_json::from_slice(&text).unwrap();
        change(&mut manifest);
        parts.insert(MANIFEST.to_owned(), serde_json::to_vec(&manifest).unwrap());
        pack(&parts).unwrap()
    };
    assert_eq!(codes(&with_manifest(&|m| m.format += 1)), ["E4071"]);
    assert_eq!(codes(&with_manifest(&|m| m.format -= 1)), ["E4071"]);
    assert_eq!(codes(&with_manifest(&|m| m.gantline = "9.9.9".to_owned())), ["E4071"]);
    assert_eq!(codes(&with_manifest(&|m| drop(m.members.remove(PLAN)))), ["E4072"]);
    let hash = |m: &mut Manifest| {
        m.members.values_mut().for_each(|member| member.blake3 = "0".repeat(64));
    };
    assert_eq!(codes(&with_manifest(&hash)), ["E4072"; 5]);
    assert_eq!(codes(&with_manifest(&|m| m.requirements.ranks = 3)), ["E4073"]);
    assert_eq!(codes(&with_manifest(&|m| m.requirements.machine.memory_bytes = 1)), ["E4073"]);

    let mut one = contents().programs;
    one.pop();
    assert_eq!(codes(&forged(PROGRAMS, postcard::to_stdvec(&one).unwrap())), ["E2101"]);
    let mut beyond = contents().programs;
    beyond[1].buffers[0].offset = u64::MAX - 63;
    assert_eq!(codes(&forged(PROGRAMS, postcard::to_stdvec(&beyond).unwrap())), ["E2103"]);
}

/// Text for GPUs is read back with the kernels that it is of, and refused beside others; CPUs are
/// told what the file is for.
#[test]
fn text_for_gpus_is_that_of_the_kernels() {
    let mut both = contents();
    both.archs = vec![Arch::Sm80, Arch::Sm90a];
    both.requirements.machine.device = "cuda".to_owned();
    let bytes = encode(&both).unwrap();
    assert_eq!(bytes, encode(&both).unwrap());
    assert_eq!(decode("both.gtl", &bytes, &Limits::default()).unwrap(), both);
    let unmet = both.requirements.unmet("both.gtl", &contents().requirements.machine);
    assert_eq!(unmet[0].help.as_deref().unwrap().split_once(", ").unwrap().1, "without `--arch`");
    let text = unit(&both.kernels, Arch::Sm80);
    assert_eq!(codes(&forged("kernels.sm_80.cu", text.replace("+", "-").into_bytes())), ["E4073"]);
    assert_eq!(codes(&forged("kernels.sm_70.cu", text.into_bytes())), ["E4070"]);
}

/// Sizes that no file has reserve no memory.
#[test]
fn sizes_are_not_believed() {
    let good = encode(&contents()).unwrap();
    let length = |name: &str| parts(&contents())[name].len() as u32;
    for name in [PROGRAMS, KERNELS] {
        let size = length(name).to_le_bytes();
        let twice = [size, size].concat();
        let mut forged = good.clone();
        let at: Vec<usize> =
            (0..forged.len() - 8).filter(|at| forged[*at..at + 8] == twice).collect();
        assert!(!at.is_empty(), "both sizes stand side by side in its headers");
        for at in at {
            forged[at..at + 8].fill(0xfe);
        }
        assert!(decode("test", &forged, &Limits::default()).is_err());
    }
    // The length of a list, as a number of ten bytes.
    let mut long = vec![0xff; 9];
    long.push(1);
    assert_eq!(codes(&self::forged(PROGRAMS, long.clone())), ["E4072"]);
    assert_eq!(codes(&self::forged(KERNELS, long)), ["E4072"]);
}

#[test]
fn mutated_files_never_panic() {
    let good = encode(&contents()).unwrap();
    let mut refused = 0;
    for (number, bytes) in mutations(&good, 4000) {
        let read = catch_unwind(|| decode("test", &bytes, &Limits::default()));
        match read.unwrap_or_else(|_| panic!("mutation {number} panics")) {
            // A date, or a flag that nobody looks at.
            Ok(read) => assert_eq!(read, contents(), "mutation {number} goes unnoticed"),
            Err(found) => {
                assert!((1..=20).contains(&found.len()));
                refused += 1;
            }
        }
    }
    assert!(refused > 3000, "only {refused} of 4000 mutations are found");
}

/// Programs and kernels whose hashes are right: what is accepted can be executed, to whatever end.
#[test]
fn what_is_accepted_can_be_executed() {
    for name in [PROGRAMS, KERNELS] {
        let mut accepted = 0;
        let good = parts(&contents())[name].clone();
        for (number, bytes) in mutations(&good, 3000) {
            let file = forged(name, bytes);
            let read = catch_unwind(|| decode("test", &file, &Limits::default()));
            let read = read.unwrap_or_else(|_| panic!("mutation {number} of {name} panics"));
            let Ok(read) = read else { continue };
            let flops: f64 = read.kernels.iter().map(|k| kernels::price::flops(k).0 as f64).sum();
            if read == contents() || accepted == 80 || flops > 1e7 {
                continue;
            }
            accepted += 1;
            let run = || step(read);
            let ran = catch_unwind(AssertUnwindSafe(run));
            assert!(ran.is_ok(), "mutation {number} of {name} panics when executed");
        }
        assert!(accepted > 10, "only {accepted} mutations of {name} are harmless");
    }
}

/// Buffers on top of each other: what writes where something else is read at once is refused, and
/// what is accepted can be executed.
#[test]
fn programs_that_write_what_they_read_are_refused() {
    let good = contents();
    let (mut refused, mut accepted) = (0, 0);
    for rank in 0..2 {
        let count = good.programs[rank].buffers.len();
        for (moved, onto) in (0..count * count).map(|at| (at / count, at % count)) {
            for by in [0, 64] {
                let mut programs = good.programs.clone();
                let buffers = &mut programs[rank].buffers;
                buffers[moved].offset = buffers[onto].offset + by;
                let file = forged(PROGRAMS, postcard::to_stdvec(&programs).unwrap());
                match decode("test", &file, &Limits::default()) {
                    Ok(read) => {
                        accepted += 1;
                        step(read);
                    }
                    Err(found) => refused += usize::from(found[0].code == "E2109"),
                }
            }
        }
    }
    assert!(refused > 5 && accepted > 20, "{refused} are refused, {accepted} are not");
}

/// Runs a step, which may fail: ranks may wait for each other. None may panic.
fn step(contents: Contents) {
    let deadline = Duration::from_millis(50);
    let options = Options { threads_per_rank: 1, deadline, tracing: Tracing::None, disk: None };
    let classes = Arc::new(contents.into_classes("loss"));
    let samples = classes.samples(crate::execute::Phase::Step);
    let tokens = vec![1; samples.map_or(0, |s| s.global() * s.seq).min(1 << 20)];
    let batch = Batch { tokens: &tokens, labels: &tokens, ..Batch::default() };
    let started = Session::start(classes, &options).map_err(Failure::World);
    let ran = started.and_then(|mut session| session.step(&batch, Scalars::default()).map(drop));
    if let Err(failure) = ran {
        let text = failure.to_string();
        assert!(!text.contains("panicked"), "{text}");
    }
}
