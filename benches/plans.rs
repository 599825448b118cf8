//! Plans that searches print: the generator of the tests, longer, and all plans of each search.
//!
//! ```text
//! cargo bench --bench plans -- --cases 2000 --seed 0
//! ```
//! How many plans are legal, have the name that they were printed under, and are refused with one
//! field changed. It ends with an error where there are others.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

// The generators of the interpreter's tests name the crate in full.
extern crate ir as gantline_ir;

#[path = "../ir/tests/ir/draws.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod draws;
#[path = "../tests/end_to_end/printed.rs"]
#[allow(dead_code, unused_imports, reason = "the tests use more of it")]
mod printed;

use std::panic::catch_unwind;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |flag: &str, default: u64| {
        let at = arguments.iter().position(|argument| argument == flag);
        let given = at.and_then(|at| arguments.get(at + 1)?.parse().ok());
        given.unwrap_or(default)
    };
    let (cases, first) = (number("--cases", 2000), number("--seed", 0));
    let (mut plans, mut wrong) = (0, Vec::new());
    for seed in first..first + cases {
        match catch_unwind(|| printed::case(seed, usize::MAX)) {
            Ok(count) => plans += count,
            Err(_) => wrong.push(seed),
        }
    }
    println!("{cases} searches from seed {first}: {plans} plans, {} wrong {wrong:?}", wrong.len());
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
