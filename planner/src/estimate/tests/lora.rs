//! Predictions of low-rank adaptation beside published runs, which nothing was chosen with.

use super::unseen::set;
use super::{Errors, read_runs};
use crate::estimate::row::{self, Columns};

const RUNS: &str = include_str!("../../../tests/lora_runs.csv");

/// Memory to 6 % in the middle; times to 25 %: base weights of the runs in 4 bits are converted by
/// kernels that are slower than memory, and short sequences wait for the host.
#[test]
fn adapters_cost_what_runs_say() {
    let (mut memory, mut time) = (Vec::new(), Vec::new());
    for run in read_runs(RUNS) {
        let question = row::read(&run).unwrap();
        let found = question.answer().unwrap();
        let number = |column: &str| run.text(column).parse::<f64>().unwrap();
        let bytes = found.memory.total_bytes() / 1e9 / number("peak_mem_gb") - 1.0;
        let seconds = found.step_time_s / number("step_time_s") - 1.0;
        let id = run.text("row_id");
        println!("{id}: memory {:+.0} %, time {:+.0} %", 100.0 * bytes, 100.0 * seconds);
        memory.push(bytes);
        time.push(seconds);
    }
    let [memory, time] = [memory, time].map(Errors::of);
    println!("memory {memory:?}\ntime {time:?}");
    assert_eq!(memory.rows, 42);
    assert!(memory.max < 0.5 && memory.median < 0.06, "{memory:?}");
    assert!(time.median < 0.25, "{time:?}");
}

/// Columns of adapters change what they are about; what is none of them is refused.
#[test]
fn columns_of_adapters_are_read() {
    let run = read_runs(RUNS).remove(0);
    let with = |column: &str, text: &str| {
        let mut changed = run.clone();
        set(&mut changed, column, text);
        row::read(&changed)
    };
    let trained = |column: &str, text: &str| with(column, text).unwrap().work.trained_parameters();
    let whole = trained("lora_rank", "");
    let rank = trained("lora_rank", "64");
    // Of 24 layers of width 2,048: two products of 2,048 and as many of queries, keys and values
    // as one of 6,144, and three of 5,504 inside.
    let each = (2048 + 3 * 2048) + (2048 + 2048) + 3 * (2048 + 5504);
    assert_eq!(rank, 24 * 64 * each);
    assert_eq!(trained("lora_rank", "8"), rank / 8);
    assert_eq!(trained("lora_targets", "o"), 24 * 64 * 4096);
    assert!(whole > 1_500_000_000, "{whole}");
    let stored = |text: &str| with("base_weights", text).unwrap().answer().unwrap().memory;
    assert!(stored("nf4").weights_bytes < 0.6 * stored("bf16").weights_bytes);
    let defaults = with("base_weights", "int4").unwrap().defaults;
    assert!(defaults.iter().any(|default| default == "base_weights=nf4-dq"), "{defaults:?}");
    for (column, text, said) in [
        ("lora_targets", "queries", "`lora_targets`"),
        ("base_weights", "int3", "`base_weights` is `int3`"),
        ("lora_rank", "many", "`lora_rank` is `many`"),
    ] {
        let reason = with(column, text).unwrap_err();
        assert!(reason.contains(said), "{reason}");
    }
    let mut unranked = run.clone();
    set(&mut unranked, "model", "qwen-1.8b lora");
    set(&mut unranked, "lora_rank", "");
    assert!(row::read(&unranked).unwrap_err().contains("no `lora_rank`"));
}
