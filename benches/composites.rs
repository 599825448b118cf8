//! Composites in edited texts, and attributes at their bounds: the generators of the tests, longer.
//!
//! ```text
//! cargo bench --bench composites -- --cases 2000 --seed 0
//! ```
//! For each generator, how many cases were refused, compiled as the composite that they name, and
//! compiled as the other body that they have; and the seeds of those that were wrong, with what was
//! found. It ends with an error where there are any.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

// Cases of the interpreter's tests, which name the crate in full.
extern crate ir as gantline_ir;

#[path = "../tests/end_to_end/composites.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod composites;
#[path = "../ir/tests/ir/draws.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod draws;
#[path = "../tests/end_to_end/operators.rs"]
#[allow(dead_code, unused_imports)]
mod operators;
#[path = "../ir/tests/ir/ops.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod ops;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use composites::{Outcome, bounded, edited};
use planner::cluster::Cluster;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |flag: &str, default: u64| {
        let at = arguments.iter().position(|argument| argument == flag);
        let given = at.and_then(|at| arguments.get(at + 1)?.parse().ok());
        given.unwrap_or(default)
    };
    let (cases, seed) = (number("--cases", 2000), number("--seed", 0));
    let cluster = Cluster::load("cpu-local").expect("this machine");
    let wrong = look("edited bodies", cases, seed, &edited)
        + look("attributes at their bounds", cases, seed, &|seed| bounded(&cluster, seed));
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a generator; returns how many cases were wrong.
fn look(name: &str, cases: u64, first: u64, case: &dyn Fn(u64) -> Outcome) -> usize {
    let mut outcomes: BTreeMap<Outcome, usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    for seed in first..first + cases {
        match catch_unwind(AssertUnwindSafe(|| case(seed))) {
            Ok(outcome) => *outcomes.entry(outcome).or_default() += 1,
            Err(_) => wrong.push(seed),
        }
    }
    let of = |outcome: Outcome| outcomes.get(&outcome).copied().unwrap_or(0);
    let (refused, composite) = (of(Outcome::Refused), of(Outcome::Composite));
    let edited = of(Outcome::Edited);
    println!(
        "{name}: {cases} cases from seed {first}: {refused} refused, {composite} as the composite, \
         {edited} as the body says, {} wrong {wrong:?}",
        wrong.len()
    );
    wrong.len()
}
