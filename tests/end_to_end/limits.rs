//! Processes that may have little: memory, open files, stack. Each ends with an answer, or with
//! exit code 7 and the name of the limit; none by a signal.

use std::process::Output;

use crate::cli::{Scratch, tiny};

/// Runs a line under a limit of the shell.
fn limited(scratch: &Scratch, limit: &str, line: &str) -> Output {
    let script = format!("ulimit -c 0; ulimit {limit}; exec \"$0\" \"$@\"");
    scratch.command(&["sh", "-c", &script], line).output().expect("the shell starts")
}

/// Whether a line was answered; where it was not, it has to say why.
fn is_answered(output: &Output, case: &str, flag: &str) -> bool {
    let errors = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => true,
        Some(7) => {
            assert!(errors.contains(&format!("ulimit {flag}")), "{case}: {errors}");
            assert!(errors.contains("help: "), "{case}: {errors}");
            false
        }
        code => panic!("{case}: {code:?} {:?} {errors}", output.status),
    }
}

const LINES: [&str; 5] = [
    "plan tiny --ranks 2 --seq 16 --no-cache",
    "plan llama-3-8b --cluster h100 --devices 8 --no-cache",
    "run t.gtl --bench 1",
    "generate done --prompt abc --max-tokens 2",
    "train tiny --data text --from-scratch --steps 1 --seq 16 --ranks 2 --val-every 0 --out out",
];

fn scratch(name: &str) -> Scratch {
    let scratch = tiny(name);
    scratch.answer("compile tiny --ranks 2 --seq 16 --gbs 2 --mbs 1 -o t.gtl");
    let flags = "--data text --from-scratch --steps 1 --seq 16 --val-every 0";
    scratch.answer(&format!("train tiny {flags} --out done"));
    scratch
}

#[test]
fn little_memory_is_an_answer_or_names_the_limit() {
    let scratch = scratch("memory-limit");
    for line in LINES {
        let mut answered = 0;
        // Most of the room is needed by the code of a test's program.
        for mib in [50, 90, 140, 2000] {
            let _ = std::fs::remove_dir_all(scratch.0.join("out"));
            let output = limited(&scratch, &format!("-v {}", mib << 10), line);
            answered += usize::from(is_answered(&output, &format!("{line} in {mib} MiB"), "-v"));
        }
        assert!(answered > 0, "{line}: 2 GB are enough");
    }
}

/// What a run needs is compared with the limit before it begins: plans are made for all of it, and
/// the program itself takes some.
#[test]
fn a_run_that_a_limit_has_no_room_for_does_not_begin() {
    let scratch = tiny("memory-before");
    let wide = r#"{"model_type": "gpt2", "n_layer": 8, "n_head": 8, "n_embd": 512,
        "n_positions": 64, "vocab_size": 256, "bos_token_id": null, "eos_token_id": null}"#;
    scratch.write("wide/config.json", wide);
    let line = "train wide --data text --from-scratch --seq 16 --gbs 1 --steps 1 --ranks 1 \
                --val-every 0 --out out";
    let output = limited(&scratch, &format!("-v {}", 430 << 10), line);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{errors}");
    assert!(errors.contains("error[E5020]: the run needs"), "{errors}");
    assert!(errors.contains("the process has (`ulimit -v`) 430.0 MiB"), "{errors}");
    assert!(!scratch.0.join("out/checkpoints").exists(), "nothing was begun");
}

#[test]
fn few_open_files_are_enough_or_the_limit_is_named() {
    let scratch = scratch("files-limit");
    for line in LINES {
        for files in [4, 6, 8, 10] {
            let _ = std::fs::remove_dir_all(scratch.0.join("out"));
            let output = limited(&scratch, &format!("-n {files}"), line);
            is_answered(&output, &format!("{line} with {files} files"), "-n");
        }
        let _ = std::fs::remove_dir_all(scratch.0.join("out"));
        let output = limited(&scratch, "-n 24", line);
        assert!(is_answered(&output, line, "-n"), "{line}: 24 files are enough");
    }
}

#[test]
fn a_small_stack_is_told() {
    let scratch = tiny("stack-limit");
    let line = LINES[0];
    for kib in [256, 1024] {
        let output = limited(&scratch, &format!("-s {kib}"), line);
        assert!(!is_answered(&output, &format!("{kib} KiB of stack"), "-s"));
    }
    assert!(is_answered(&limited(&scratch, "-s 4096", line), line, "-s"));
}
