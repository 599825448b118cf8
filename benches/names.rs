//! Names of ONNX graphs: the generator of the tests, longer.
//!
//! ```text
//! cargo bench --bench names -- --cases 2000 --seed 0
//! ```
//! The seeds of the graphs that names make another, with what was found. It ends with an error
//! where there are any.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

// Cases of the interpreter's tests, which name the crate in full.
extern crate ir as gantline_ir;

#[path = "../ir/tests/ir/draws.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod draws;
#[path = "../tests/end_to_end/integers.rs"]
#[allow(dead_code, unused_imports, reason = "the tests use more of it")]
mod integers;
#[path = "../tests/end_to_end/names.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod names;
#[path = "../ir/tests/ir/onnx_file.rs"]
#[allow(dead_code)]
mod onnx_file;
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
    let is_wrong = |seed: &u64| catch_unwind(|| names::renamed(*seed)).is_err();
    let wrong: Vec<u64> = (first..first + cases).filter(is_wrong).collect();
    println!("{cases} graphs from seed {first}: {} wrong {wrong:?}", wrong.len());
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
