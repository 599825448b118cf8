//! What takes minutes: the whole example of the README, and GPT-2 at its full length.
//!
//! ```text
//! cargo bench --bench long                # both
//! cargo bench --bench long -- readme      # three minutes on two cores
//! cargo bench --bench long -- gpt2        # four minutes, and 6 GB of disk
//! ```
//! It ends with an error where the example learns too little or looks otherwise than the README
//! shows it, and where meshes differ or need more memory than they may.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

#[path = "../tests/end_to_end/readme.rs"]
mod readme;
#[path = "../tests/end_to_end/scratch.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod scratch;

use scratch::{Scratch, text};

/// KiB of 24 GB.
const MEMORY_KIB: u64 = 24_000_000_000 / 1024;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|word| word == name);
    if is_wanted("readme") {
        readme_learns();
    }
    if is_wanted("gpt2") {
        gpt2_is_trained_within_24_gb();
    }
}

/// The whole example of the README.
fn readme_learns() {
    let stdout = readme::check(&Scratch::new("readme-whole"), 200, "");
    let line = stdout.lines().find_map(|line| line.strip_prefix("validation  "));
    let words: Vec<&str> = line.expect("a validation").split(' ').collect();
    let nats: f64 = words[0].parse().expect("a number");
    let below = words.iter().position(|word| *word == "%").expect("a share") - 1;
    let below: f64 = words[below].parse().expect("a number");
    println!("{stdout}");
    assert!(nats < 3.0 && below >= 45.0, "{nats} nats, {below} % below the first loss");
}

/// One step of two samples of 1,024 tokens, on one rank and on two along each axis. The limit is
/// on addresses, which bounds the memory from above.
fn gpt2_is_trained_within_24_gb() {
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
