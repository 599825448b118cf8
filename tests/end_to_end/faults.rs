//! Runs on a disk that fails: whatever operation fails, and however, a run goes on from a
//! checkpoint that is whole, with the settings that it had or those that it was given, to the same
//! bits.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::cli::{Scratch, TINY, text};

/// How operations fail; see `faults/shim.c`.
const FAULTS: [&str; 6] = ["kill", "short", "eio", "enospc", "edquot", "erofs"];
/// Operations at which the sample of a test fails, for each fault.
const SAMPLED: u64 = 7;

/// Every case, in place of the sample: the number of operations is the step from one to the next.
const EVERY: &str = "GANTLINE_TEST_EVERY_FAULT";

/// What is written by `train --resume` with another learning rate.
const CHANGED: &str = "train --resume run --steps 4 --lr 0.0005";

/// A run of two steps in `base`, and what it comes to after four, with the old and the new rate.
struct Bench {
    scratch: Scratch,
    shim: PathBuf,
    expected: [BTreeMap<String, Vec<u8>>; 2],
}

impl Bench {
    /// None where no C compiler is found.
    fn new(name: &str) -> Option<Bench> {
        let scratch = Scratch::new(name);
        scratch.write("tiny/config.json", TINY);
        scratch.write("text/a.txt", &text());
        let shim = scratch.0.join("shim.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/end_to_end/faults/shim.c");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(&shim).arg(source);
        match cc.arg("-ldl").output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
            Err(_) => return None,
        }
        let flags = "--data text --from-scratch --seq 16 --val-every 0 --save-every 1 --keep 2";
        scratch.answer(&format!("train tiny {flags} --steps 2 --out base"));
        let mut bench = Bench { scratch, shim, expected: Default::default() };
        bench.expected = ["train --resume run --steps 4", CHANGED].map(|line| {
            bench.restore();
            bench.scratch.answer(line);
            bench.weights()
        });
        assert!(bench.expected[0] != bench.expected[1], "the learning rate makes a difference");
        Some(bench)
    }

    /// Makes `run` what `base` is.
    fn restore(&self) {
        let _ = fs::remove_dir_all(self.scratch.0.join("run"));
        copy(&self.scratch.0.join("base"), &self.scratch.0.join("run"));
    }

    /// The files of tensors of step 4.
    fn weights(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = fs::read_dir(self.scratch.0.join("run/checkpoints/step-4"));
        let paths = entries.expect("there is a checkpoint of step 4").flatten().map(|e| e.path());
        let tensors = paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
        let named = |path: PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (name, fs::read(path).expect("the file is read"))
        };
        tensors.map(named).collect()
    }

    /// Goes on with the new rate, failing; the number of operations is written to `count`.
    fn fail(&self, fault: &str, at: u64) -> Output {
        let mut command = self.scratch.command(&[], CHANGED);
        command.env("LD_PRELOAD", &self.shim).env("FAULT_BELOW", self.scratch.0.join("run"));
        command.env("FAULT_AS", fault).env("FAULT_AT", at.to_string());
        command.env("FAULT_COUNT", self.scratch.0.join("count"));
        command.output().expect("the program starts")
    }

    /// Fails at one operation, and checks what is left.
    fn check(&self, fault: &str, at: u64) {
        self.restore();
        let output = self.fail(fault, at);
        let errors = String::from_utf8_lossy(&output.stderr);
        let case = format!("{fault} at operation {at}:\n{errors}");
        let code = output.status.code();
        match fault {
            "kill" => assert_eq!(code, None, "{case}"),
            "short" => assert_eq!(code, Some(0), "a short write is no error: {case}"),
            _ => assert!(matches!(code, Some(0 | 7)), "{code:?} {case}"),
        }
        assert!(!errors.contains("defect"), "{case}");
        let verified = self.scratch.run("checkpoint verify run");
        let table = String::from_utf8_lossy(&verified.stdout).into_owned();
        assert_eq!(verified.status.code(), Some(0), "{case}\n{table}");
        let has_step_of_new_rate = table.lines().any(|line| line.trim().starts_with('3'));
        self.scratch.answer("train --resume run --steps 4");
        let weights = self.weights();
        let is = |expected: &BTreeMap<_, _>| weights == *expected;
        assert!(is(&self.expected[0]) || is(&self.expected[1]), "{case}");
        if has_step_of_new_rate || code == Some(0) {
            assert!(is(&self.expected[1]), "the new learning rate is lost: {case}");
        }
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the directory is made");
    for entry in fs::read_dir(from).expect("the directory is read").flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("the file is copied");
        }
    }
}

#[test]
fn whatever_operation_on_a_file_fails_no_checkpoint_and_no_setting_is_lost() {
    let Some(bench) = Bench::new("faults") else {
        eprintln!("skipped: no C compiler `cc`");
        return;
    };
    bench.restore();
    let output = bench.fail("kill", 0);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let count = fs::read_to_string(bench.scratch.0.join("count")).expect("they are counted");
    let count: u64 = count.trim().parse().expect("a number");
    assert!(count > 40, "{count} operations are too few for two checkpoints");
    let stride = if std::env::var_os(EVERY).is_some() { 1 } else { count.div_ceil(SAMPLED) };
    for (first, fault) in FAULTS.into_iter().enumerate() {
        // Each fault begins elsewhere, so that together they fail more operations.
        let first = 1 + first as u64 * stride / FAULTS.len() as u64;
        for at in (first..=count).step_by(stride as usize) {
            bench.check(fault, at);
        }
    }
}
