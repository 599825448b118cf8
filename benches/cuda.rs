//! The text of every device function, compiled by NVRTC for each architecture.
//!
//! ```text
//! cargo bench --bench cuda -- --cases 700 --seed 0 --nvdisasm FILE
//! ```
//! For each architecture: functions, the most registers and shared memory that one takes, and the
//! bytes of machine code. It prints every error and warning, and every function with spills or with
//! a stack, and ends with an error where there are any. With the disassembler it also finds what
//! reads or writes local memory, and atomic operations on floating-point numbers. A seed draws
//! which kernels are compiled first.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

// The shim names the crate in full.
extern crate kernels as gantline_kernels;

#[path = "../tests/end_to_end/cuda.rs"]
#[allow(dead_code, unused_imports, reason = "the tests use more of it")]
mod cuda;
#[path = "../tests/end_to_end/model.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod model;
#[path = "../tests/end_to_end/scratch.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod scratch;
#[path = "../kernels/tests/engines/shim.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod shim;

use std::process::{Command, ExitCode};
use std::time::Instant;

use ir::random::mix;
use kernels::Kernel;
use kernels::cuda::{Arch, unit};
use runtime::cuda::nvrtc::{Cubin, Nvrtc};
use scratch::Scratch;

/// Kernels whose text is compiled at once.
const AT_ONCE: usize = 16;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let text = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag)?;
        arguments.get(at + 1).cloned()
    };
    let number = |flag: &str| text(flag).and_then(|n| n.parse::<u64>().ok());
    let nvrtc = match Nvrtc::open() {
        Ok(nvrtc) => nvrtc,
        Err(absent) => {
            println!("{absent}");
            return ExitCode::FAILURE;
        }
    };
    let seed = number("--seed").unwrap_or(0);
    let mut drawn: Vec<(usize, Kernel)> = cuda::all_kernels().into_iter().enumerate().collect();
    drawn.sort_by_key(|(at, _)| mix(seed ^ mix(*at as u64)));
    drawn.truncate(number("--cases").map_or(drawn.len(), |cases| cases as usize));
    let kernels: Vec<Kernel> = drawn.into_iter().map(|(_, kernel)| kernel).collect();
    let nvdisasm = text("--nvdisasm");
    println!("NVRTC {:?}, {} kernels", nvrtc.version(), kernels.len());
    let compiled = |arch| Compiled::new(&nvrtc, arch, &kernels, nvdisasm.as_deref());
    let mut wrong = Vec::new();
    for both in Arch::ALL.chunks(2) {
        let all: Vec<Compiled> = std::thread::scope(|scope| {
            let threads: Vec<_> = both.iter().map(|arch| scope.spawn(|| compiled(*arch))).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        assert_eq!(all.len(), both.len(), "a thread panicked");
        for Compiled { line, wrong: found } in all {
            println!("{line}, {} wrong", found.len());
            wrong.extend(found);
        }
    }
    for line in &wrong {
        println!("{line}");
    }
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What was found for an architecture.
struct Compiled {
    /// For people.
    line: String,
    wrong: Vec<String>,
}

impl Compiled {
    fn new(nvrtc: &Nvrtc, arch: Arch, kernels: &[Kernel], nvdisasm: Option<&str>) -> Compiled {
        let from = Instant::now();
        let (mut count, mut registers, mut shared, mut code) = (0, 0, 0, 0);
        let mut wrong = Vec::new();
        for kernels in kernels.chunks(AT_ONCE) {
            let text = unit(kernels, arch);
            let cubin = match nvrtc.compile(&text, arch.name()) {
                Ok(cubin) => cubin,
                Err(log) => {
                    wrong.push(format!("{arch}: {log}"));
                    continue;
                }
            };
            count += cubin.used.len();
            code += cubin.bytes.len();
            for used in &cubin.used {
                registers = registers.max(used.registers);
                shared = shared.max(used.shared_bytes);
            }
            let named = |what: String| format!("{arch}: {what}");
            wrong.extend(findings(&cubin, &text).into_iter().map(named));
            if let Some(program) = nvdisasm {
                let found = disassembled(program, arch, &cubin, &text);
                wrong.extend(found.into_iter().map(named));
            }
        }
        let seconds = from.elapsed().as_secs_f64();
        let line = format!(
            "{arch}: {count} functions, at most {registers} registers and {shared} bytes of shared \
             memory, {code} bytes of code, {seconds:.0} s"
        );
        Compiled { line, wrong }
    }
}

/// The text of a function of a unit, after the line that says what it is.
fn text_of<'t>(unit: &'t str, name: &str) -> &'t str {
    let start = unit.find(&format!(") {name}(")).unwrap_or(0);
    let text = &unit[start..];
    &text[..text.find("\n}\n").unwrap_or(text.len())]
}

fn findings(cubin: &Cubin, unit: &str) -> Vec<String> {
    let mut wrong = cubin.warnings.clone();
    for used in &cubin.used {
        let stacks = used.stack_bytes > 0 && !cuda::may_stack(text_of(unit, &used.name));
        if stacks || used.spill_bytes > 0 || used.shared_bytes > 48 << 10 {
            wrong.push(format!("{used:?}"));
        }
    }
    wrong
}

/// What machine code does that it should not.
fn disassembled(program: &str, arch: Arch, cubin: &Cubin, unit: &str) -> Vec<String> {
    let scratch = Scratch::new(&format!("nvdisasm-{arch}"));
    let path = scratch.0.join("code.cubin");
    std::fs::write(&path, &cubin.bytes).expect("the file is written");
    let output = Command::new(program).arg("-c").arg(&path).output();
    let output = output.expect("the disassembler starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut wrong = Vec::new();
    let mut name = "";
    let code = String::from_utf8_lossy(&output.stdout);
    let mut instructions = 0;
    for line in code.lines() {
        if let Some((_, section)) = line.split_once(".section\t.text.") {
            name = section.split([',', '\t']).next().unwrap_or_default();
        }
        let Some((_, instruction)) = line.split_once("*/") else { continue };
        instructions += 1;
        let words = instruction.split([' ', ';']).filter(|word| !word.is_empty());
        let operation = words.clone().find(|word| !word.starts_with('@')).unwrap_or_default();
        let mut parts = operation.split('.');
        let kind = parts.next().unwrap_or_default();
        let is_float = parts.any(|part| ["F16", "F16x2", "BF16", "F32", "F64"].contains(&part));
        let is_local = ["LDL", "STL"].contains(&kind) && !cuda::may_stack(text_of(unit, name));
        let is_atomic = ["RED", "REDG", "REDS", "ATOM", "ATOMG", "ATOMS"].contains(&kind);
        if is_local || is_atomic && is_float {
            wrong.push(format!("{name}: {}", instruction.trim()));
        }
    }
    assert!(instructions > cubin.used.len() && !name.is_empty(), "the listing is not understood");
    wrong
}
