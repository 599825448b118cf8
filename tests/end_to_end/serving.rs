//! The verbs about inference on GPUs, from outside.

use serde_json::Value;

use crate::cli::Scratch;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("a number: {value}"))
}

fn rows(document: &Value) -> &[Value] {
    document["rows"].as_array().expect("rows")
}

fn is_near(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-9
}

const RATES: [&str; 5] = [
    "prompt_s",
    "prompt_tokens_per_s_per_device",
    "token_s_alone",
    "token_s",
    "tokens_per_s_per_device",
];

/// What fits comes first, the most tokens per second first; the first is the one to take, and what
/// does not fit has no rates.
#[test]
fn ways_to_lie_are_sorted_and_one_is_recommended() {
    let scratch = Scratch::new("serving-sorted");
    for (asked, key) in [
        ("fit llama-3-70b --devices 16 --for inference", "tokens_per_s_per_device"),
        ("fit llama-3-70b --devices 16 --for inference --gbs 40", "tokens_per_s_per_device"),
        ("fit deepseek-v3 --devices 32 --for decode", "tokens_per_s_per_device"),
        ("plan mixtral-8x7b --devices 8 --for prefill", "prompt_tokens_per_s_per_device"),
    ] {
        let line = format!("{asked} --cluster h100 --seq 4096");
        let document = scratch.json(&format!("{line} --json"));
        let fitting: Vec<&Value> =
            rows(&document).iter().filter(|row| row["fits"] == true).collect();
        let (first, last) = rows(&document).split_at(fitting.len());
        assert!(!last.is_empty() && first.len() > 3, "{line}");
        assert!(first.iter().all(|row| row["fits"] == true), "{line}: {document:#}");
        let figures: Vec<f64> = first.iter().map(|row| number(&row[key])).collect();
        assert!(figures.is_sorted_by(|a, b| a >= b), "{line}: {figures:?}");
        for row in last {
            assert!(RATES.iter().all(|rate| row[rate].is_null()), "{line}: {row:#}");
        }
        assert_eq!(document["recommended"]["layout"], first[0]["layout"], "{line}");
        let page = scratch.answer(&line);
        let best = first[0]["layout"].as_str().expect("a layout");
        assert!(page.contains(&format!("✓ take {best}, ")), "{line}: {page}");
        let refused: Vec<&str> = page.lines().filter(|line| line.starts_with("  ✗")).collect();
        assert!(refused.iter().all(|line| !line.contains(" ms") && line.ends_with('-')), "{page}");
    }
    // Where nothing fits it is said what is missing.
    let line = "fit deepseek-v3 --cluster h100 --devices 8 --seq 4096 --for inference";
    let output = scratch.run(&format!("{line} --json"));
    assert_eq!(output.status.code(), Some(3));
    let document: Value = serde_json::from_slice(&output.stdout).expect("a document");
    let least = rows(&document).iter().map(|row| number(&row["need_bytes"]));
    let missing = least.fold(f64::INFINITY, f64::min) - number(&document["have_bytes"]);
    assert!(is_near(number(&document["missing_bytes"]), missing), "{document:#}");
}

/// The longest context is that of the sequences that the row says, over all copies.
#[test]
fn the_longest_context_is_of_the_batch_that_is_stated() {
    let scratch = Scratch::new("serving-longest");
    let asked = "fit llama-3-70b --cluster h100 --devices 16 --seq 8192 --for inference";
    for (layout, copies) in [("tp=8,pp=1", 2.0), ("tp=1,pp=8", 2.0), ("tp=4,pp=4", 1.0)] {
        let row = |more: &str| {
            let document = scratch.json(&format!("{asked} --fix {layout}{more} --json"));
            assert_eq!(rows(&document).len(), 1, "{document:#}");
            rows(&document)[0].clone()
        };
        let one = row("");
        assert_eq!(number(&one["longest_context_sequences"]), copies, "{layout}");
        let longest = number(&one["longest_context"]);
        for sequences in [2.0, 32.0, 64.0] {
            let many = row(&format!(" --gbs {sequences}"));
            assert_eq!(number(&many["longest_context_sequences"]), sequences, "{layout}");
            assert_eq!(number(&many["sequences"]), sequences, "{layout}");
            // As many tokens in all, but for working memory.
            let each = number(&many["longest_context"]);
            let share = each * sequences / copies / longest;
            assert!((0.97..=1.0001).contains(&share), "{layout} {sequences}: {share}");
            // A context of so many tokens fits, and one of a few more does not: longer prompts than
            // these are worked on in pieces that are no larger.
            assert!(each > 8192.0 * 2.0, "{layout} {sequences}: {each}");
            let line = asked.replace("8192", &(0.99 * each).floor().to_string());
            let line = format!("{line} --fix {layout} --gbs {sequences}");
            assert_eq!(scratch.run(&line).status.code(), Some(0), "{line}");
            let line =
                line.replace(&(0.99 * each).floor().to_string(), &(1.01 * each).ceil().to_string());
            assert_eq!(scratch.run(&line).status.code(), Some(3), "{line}");
        }
    }
    let page = scratch.answer(&format!("{asked} --gbs 32"));
    assert!(page.contains("8,192 tokens, 32 sequences at once"), "{page}");
}

/// Experts may lie over the ranks of several copies, and are then exchanged with.
#[test]
fn copies_may_share_experts() {
    let scratch = Scratch::new("serving-experts");
    let asked = "mixtral-8x7b --cluster h100 --seq 4096 --for decode --json";
    let plan = |more: &str| scratch.json(&format!("plan {asked} --devices 8{more}"));
    let all = plan("");
    let of = |tp: u32, ep: u32| {
        let is = |row: &&Value| row["tp"] == tp && row["pp"] == 1 && row["ep"] == ep;
        rows(&all).iter().find(is).unwrap_or_else(|| panic!("tp={tp} ep={ep}: {all:#}"))
    };
    let bytes = |row: &Value| number(&row["weights_bytes"]);
    // 32 layers of 8 experts of three products of 4,096 · 14,336, of which a rank has an eighth.
    let experts = 2.0 * 32.0 * 8.0 * 3.0 * 4096.0 * 14336.0;
    let saved = bytes(of(1, 1)) - bytes(of(1, 8));
    assert!(is_near(saved, experts * 7.0 / 8.0), "{saved} of {experts}");
    let fixed = plan(" --fix tp=2,ep=4");
    assert!(rows(&fixed).iter().all(|row| row["tp"] == 2 && row["ep"] == 4), "{fixed:#}");
    let scored = scratch.json(&format!("score {asked} --tp 2 --dp 4 --ep 4"));
    assert_eq!(rows(&scored)[0], *of(2, 4));
    for (wrong, way_out) in
        [("--tp 2 --dp 4 --ep 3", "multiple of tp"), ("--tp 2 --dp 3 --ep 4", "write a dp")]
    {
        let output = scratch.run(&format!("score {asked} {wrong}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(way_out), "{errors}");
    }
}
