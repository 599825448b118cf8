//! Published runs of inference, and rows that are none.

use super::row::inference::InferenceRun;
use super::unseen::set;
use super::*;

/// Runs of four engines, evenly chosen; `source` says where each is printed.
const INFERENCE: &str = include_str!("../../../tests/inference_runs.csv");

/// The published times are met, engine by engine: the median error and the largest, of a batch, of
/// a token of a single stream, or of a token in flight.
#[test]
fn published_runs_of_inference_are_met() {
    let runs = read_runs(INFERENCE);
    let bounds = [
        ("FasterTransformer", 24, 0.10, 0.45),
        ("TensorRT-LLM", 24, 0.15, 0.30),
        ("gpt-fast", 11, 0.10, 0.26),
        ("LitGPT", 6, 0.22, 0.50),
    ];
    for (engine, rows, median, max) in bounds {
        let of_engine = runs.iter().filter(|run| run.text("engine").starts_with(engine));
        let errors = of_engine.map(|run| {
            let question = InferenceRun::read("", run).unwrap();
            let answer = question.answer("").unwrap();
            let [low, high] = answer.interval_s;
            assert!(low < answer.seconds && answer.seconds < high, "{}", run.text("row_id"));
            answer.seconds / question.measured_s.unwrap() - 1.0
        });
        let errors = Errors::of(errors.collect());
        println!("{engine}: {errors:?}");
        assert_eq!(errors.rows, rows, "{engine}");
        assert!(errors.median < median && errors.max < max, "{engine}: {errors:?}");
    }
}

/// More work is never faster: a longer prompt, more new tokens, a larger batch, fewer devices.
#[test]
fn more_of_a_batch_takes_longer() {
    let run = read_runs(INFERENCE).into_iter().find(|run| run.text("mode").contains("static"));
    let run = run.unwrap();
    let seconds = |column: &str, text: &str| {
        let mut changed = run.clone();
        set(&mut changed, column, text);
        InferenceRun::read("", &changed).unwrap().answer("").unwrap().seconds
    };
    for (column, less, more) in [
        ("input_len", "64", "512"),
        ("output_len", "8", "64"),
        ("batch_size", "4", "64"),
        ("layers", "70", "105"),
    ] {
        let [little, much] = [less, more].map(|text| seconds(column, text));
        assert!(little < much, "{column}: {little} s of {less}, {much} s of {more}");
    }
}

/// What cannot be predicted is refused with the column and what it says.
#[test]
fn rows_that_are_no_runs_of_inference_are_refused() {
    let runs = read_runs(INFERENCE);
    let of = |mode: &str| runs.iter().find(|run| run.text("mode").contains(mode)).unwrap().clone();
    let refused = |run: &Run| match InferenceRun::read("", run) {
        Ok(question) => question.answer("").map(|answer| answer.seconds).unwrap_err(),
        Err(reason) => reason,
    };
    for (mode, column, text, part) in [
        ("static", "mode", "streamed", "`mode` is `streamed`"),
        ("static", "kv_dtype", "int3", "`kv_dtype` is `int3`"),
        ("static", "input_len", "", "input_len"),
        ("static", "tp", "7", "no copy of this model"),
        ("flight", "output_len", "0", "`output_len` is 0"),
        ("flight", "gpu", "abacus", "abacus"),
    ] {
        let mut run = of(mode);
        set(&mut run, column, text);
        let reason = refused(&run);
        assert!(reason.contains(part), "{column}={text}: {reason}");
    }
}
