//! All cases of `tests/reference/families` on the compiled path, against transformers.
//!
//! ```text
//! cargo bench --bench families -- --cases 92 --seed 0 --ranks 8 --only phi
//! ```
//! Of each case: loss, gradients and five AdamW steps in f64 and f32, logits, greedy text with a
//! cache, and every mesh of the ranks beside one. It prints the cases that are wrong, with what was
//! found, and ends with an error where there are any. A seed draws the order of the cases, and the
//! weights of `verify`.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

#[path = "../tests/end_to_end/families/case.rs"]
mod case;
#[path = "../ir/tests/families/drawn.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod drawn;
#[path = "../tests/end_to_end/model.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod model;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use case::Case;
use ir::random::mix;

/// A check and its name.
type Check<'c> = (&'static str, &'c dyn Fn(&Case));

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let text = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag)?;
        arguments.get(at + 1).cloned()
    };
    let number = |flag: &str, default| text(flag).and_then(|n| n.parse().ok()).unwrap_or(default);
    let (seed, ranks) = (number("--seed", 0), number("--ranks", 8) as usize);
    let only = text("--only").unwrap_or_default();
    let mut names: Vec<String> =
        drawn::names().into_iter().filter(|name| name.starts_with(&only)).collect();
    names.sort_by_key(|name| name.bytes().fold(seed, |hash, byte| mix(hash ^ u64::from(byte))));
    names.truncate(number("--cases", names.len() as u64) as usize);
    names.sort();
    let meshes = |case: &Case| case.check_meshes(ranks, seed + 1);
    let checks: [Check<'_>; 4] = [
        ("training", &Case::check_training),
        ("text", &Case::check_text),
        ("logits", &Case::check_logits),
        ("meshes", &meshes),
    ];
    let mut wrong = Vec::new();
    for name in &names {
        let case = Case::open(name, "bench-families");
        let mut line = format!("{name:<26}");
        for (what, check) in &checks {
            let start = Instant::now();
            let is_right = catch_unwind(AssertUnwindSafe(|| check(&case))).is_ok();
            let said = if is_right { "ok" } else { "WRONG" };
            line += &format!(" {what} {said} {:.1} s ", start.elapsed().as_secs_f64());
            if !is_right {
                wrong.push(format!("{name}: {what}"));
            }
        }
        println!("{}", line.trim_end());
    }
    println!("{} cases, {} wrong {wrong:?} (seed {seed})", names.len(), wrong.len());
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
