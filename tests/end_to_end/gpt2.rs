//! GPT-2 as it was published, at its full length.

use crate::cli::{Scratch, text};

/// KiB of 24 GB.
const MEMORY_KIB: u64 = 24_000_000_000 / 1024;

/// One step of two samples of 1,024 tokens, on one rank and on two along each axis. The limit is
/// on addresses, which bounds the memory from above.
///
/// Four runs of about a minute on two cores: `cargo test --test end_to_end gpt2:: -- --ignored`
#[test]
#[ignore = "four minutes and 6 GB of disk"]
fn gpt2_is_trained_at_full_length_within_24_gb() {
    let scratch = Scratch::new("gpt2");
    scratch.write("text/a.txt", &text());
    let inspected = scratch.json("inspect gpt2 --json");
    assert_eq!(inspected["params"], 124_439_808);
    let script = format!("ulimit -v {MEMORY_KIB}; exec \"$0\" \"$@\"");
    let mut first = None;
    for mesh in ["--ranks 1", "--ranks 2 --dp 2", "--ranks 2 --tp 2", "--ranks 2 --pp 2"] {
        let flags = "--data text --seq 1024 --gbs 2 --steps 1 --val-every 0 --json";
        let line = format!("train gpt2 {flags} {mesh} --out run");
        let output = scratch.command(&["sh", "-c", &script], &line).output();
        let output = output.expect("the program starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{mesh}: {errors}");
        let answer: serde_json::Value =
            serde_json::from_slice(&output.stdout).expect("the answer is one document");
        let loss = answer["loss"].as_f64().expect("a loss");
        println!("{mesh}: loss {loss}, {} s a step", answer["step_time_s"]);
        // All weights are drawn with a deviation of 0.02: it knows nothing of 50,257 tokens yet.
        let nothing = 50_257_f64.ln();
        assert!((loss - nothing).abs() < 0.5, "{mesh}: {loss} for {nothing}");
        let first = *first.get_or_insert(loss);
        assert!((loss - first).abs() / first <= 1e-5, "{mesh}: {loss} for {first}");
        std::fs::remove_dir_all(scratch.0.join("run")).expect("the run is removed");
    }
}
