//! Graphs of integers near the ends of 32, 53 and 64 bits: the generator of the tests, longer.
//!
//! ```text
//! cargo bench --bench integers -- --cases 2000 --seed 0
//! ```
//! How many cases were compiled to kernels of 32 bits alone, and to kernels of which some compute
//! in 64; and the seeds of those that were wrong or refused, with what was found. It ends with an
//! error where there are any.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

// Cases of the interpreter's tests, which name the crate in full.
extern crate ir as gantline_ir;

#[path = "../ir/tests/ir/draws.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod draws;
#[path = "../tests/end_to_end/integers.rs"]
#[allow(dead_code, unused_imports, reason = "the tests use more of it")]
mod integers;

use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::process::ExitCode;

use integers::{Outcome, integers as case};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |flag: &str, default: u64| {
        let at = arguments.iter().position(|argument| argument == flag);
        let given = at.and_then(|at| arguments.get(at + 1)?.parse().ok());
        given.unwrap_or(default)
    };
    let (cases, first) = (number("--cases", 2000), number("--seed", 0));
    let mut outcomes: BTreeMap<Outcome, usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    for seed in first..first + cases {
        match catch_unwind(|| case(seed)) {
            Ok(outcome) => *outcomes.entry(outcome).or_default() += 1,
            Err(_) => wrong.push(seed),
        }
    }
    let of = |outcome: Outcome| outcomes.get(&outcome).copied().unwrap_or(0);
    let (narrow, whole) = (of(Outcome::Narrow), of(Outcome::Whole));
    println!(
        "{cases} cases from seed {first}: {narrow} in 32 bits, {whole} in 64, {} wrong {wrong:?}",
        wrong.len()
    );
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
