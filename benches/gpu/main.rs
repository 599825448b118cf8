//! Kernels on a GPU: checked, and timed between events.
//!
//! ```text
//! cargo bench --bench gpu -- products|attention|memory|FILE.gtl [--gpu 0] [--text sm_80]
//! ```
//! Prints one JSON document a line, which `benches/gpu/peers.py` lays beside PyTorch on the same
//! GPU; `benches/gpu/run` does all of it. A file is one that `gantline compile --arch` wrote: each
//! of its kernels is timed alone. `--text` measures what is written for an older architecture.
//!
//! Numbers are random and buffers change from launch to launch, so that they do not come from the
//! cache. Seconds are the median of rounds, the spread is the largest over the least. Of products
//! and attention, sums of random rows are compared with f64 before they are timed.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

mod cases;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use ir::DType;
use ir::program::{Instruction, Step};
use kernels::arguments::Argument;
use kernels::cuda::{Arch, functions_for, name, unit};
use kernels::{Kernel, price};
use runtime::cuda::context::{Context, Failure};
use runtime::cuda::launch::{Launch, Module};
use runtime::cuda::memory::{Memory, Piece};
use runtime::cuda::nvrtc::Nvrtc;
use serde_json::{Value, json};

use cases::Case;

/// Rounds; the median is reported.
const ROUNDS: usize = 7;
/// Seconds of a round, about.
const ROUND_S: f64 = 0.012;
/// Launches of a round at most.
const MOST: usize = 400;
/// Bytes that sets of buffers have together: several times a cache of 60 MB.
const SETS_BYTES: usize = 300 << 20;
/// Scalars that launches of a file take at most.
const SCALARS: usize = 64;
/// Sets of buffers at most.
const SETS: usize = 12;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag)?;
        arguments.get(at + 1).cloned()
    };
    let ordinal = after("--gpu").and_then(|number| number.parse().ok()).unwrap_or(0);
    let text = match after("--text").map(|name| name.parse::<Arch>()) {
        None => None,
        Some(Ok(arch)) => Some(arch),
        Some(Err(_)) => {
            println!("{}", json!({ "failed": "--text takes sm_80, sm_89, sm_90a or sm_100" }));
            return ExitCode::FAILURE;
        }
    };
    let what = arguments.first().filter(|argument| !argument.starts_with("--"));
    match measure(what.map_or("products", String::as_str), ordinal, text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("{}", json!({ "failed": why }));
            ExitCode::FAILURE
        }
    }
}

fn measure(what: &str, ordinal: usize, text: Option<Arch>) -> Result<(), String> {
    let context = Context::open(ordinal).map_err(|absent| absent.to_string())?;
    let own = context.arch().ok_or("no text is written for this GPU")?;
    let nvrtc = Nvrtc::open().map_err(|absent| absent.to_string())?;
    let gpu = Gpu { nvrtc, context, own, text: text.unwrap_or(own) };
    let cases = match what {
        "products" => cases::products(gpu.text),
        "attention" => cases::attention(),
        "memory" => {
            println!("{}", gpu.copied().map_err(|why| why.to_string())?);
            cases::memory()
        }
        file => launches_of(file)?,
    };
    let texts = gpu.compiled(&cases);
    let mut failed = 0;
    for (case, cubin) in cases.iter().zip(texts) {
        let measured = cubin.and_then(|cubin| gpu.line(case, &cubin));
        failed += usize::from(measured.is_err());
        println!("{}", measured.unwrap_or_else(|why| json!({ "name": case.name, "failed": why })));
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} of {}", cases.len())) }
}

/// The kernels of a file, each with how often a step of the first rank that launches it does so.
fn launches_of(file: &str) -> Result<Vec<Case>, String> {
    let contents = runtime::artefact::read(Path::new(file), &runtime::artefact::Limits::default());
    let contents = contents.map_err(|why| format!("{why:?}"))?;
    let count = |kernel: usize| {
        let of = |program: &ir::Program| {
            let called = |step: &'_ Step| {
                let Step::Call { routine, .. } = step else { return None };
                Some(*routine)
            };
            let calls = program.steps.iter().filter_map(called);
            let launches = calls.flat_map(|routine| &program.routines[routine].instructions);
            let is_it = |of: &&Instruction| {
                let Instruction::Launch { kernel: launched, .. } = of else { return false };
                *launched == kernel
            };
            launches.filter(is_it).count()
        };
        contents.programs.iter().map(of).find(|count| *count > 0).unwrap_or(0)
    };
    let case = |(at, kernel): (usize, &Kernel)| Case {
        name: format!("k{at} {kernel}"),
        kernel: kernel.clone(),
        of: json!({ "kind": "launch", "launches": count(at) }),
    };
    Ok(contents.kernels.iter().enumerate().map(case).collect())
}

struct Gpu {
    context: Arc<Context>,
    nvrtc: Nvrtc,
    /// Its architecture.
    own: Arch,
    /// What text is written for.
    text: Arch,
}

impl Gpu {
    /// Machine code of each case, compiled side by side.
    fn compiled(&self, cases: &[Case]) -> Vec<Result<Vec<u8>, String>> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let one = |case: &Case| {
            let text = unit(std::slice::from_ref(&case.kernel), self.text);
            self.nvrtc.compile(&text, self.own.name()).map(|cubin| cubin.bytes)
        };
        let mut all = Vec::new();
        for some in cases.chunks(threads) {
            all.extend(std::thread::scope(|scope| {
                let threads: Vec<_> =
                    some.iter().map(|case| scope.spawn(move || one(case))).collect();
                let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                    thread.join().unwrap_or_else(|_| Err("the compiler panics".to_owned()))
                };
                threads.into_iter().map(join).collect::<Vec<_>>()
            }));
        }
        all
    }

    /// A case, checked and timed.
    fn line(&self, case: &Case, cubin: &[u8]) -> Result<Value, String> {
        let functions = functions_for(&case.kernel, self.text);
        let told = |why: Failure| why.to_string();
        let module = Arc::new(Module::load(&self.context, cubin).map_err(told)?);
        let launch = Launch::new(&module, &case.kernel, &functions, |number| name(0, number));
        let launch = launch.map_err(told)?;
        let workspace = Memory::new(&self.context, launch.workspace_bytes()).map_err(told)?;
        let (inputs, outputs) = (case.kernel.inputs(), case.kernel.outputs());
        let bytes: usize = inputs.iter().chain(&outputs).map(Argument::bytes).sum();
        let sets = (SETS_BYTES / bytes.max(1)).clamp(1, SETS);
        let mut buffers = Vec::new();
        for set in 0..sets {
            let make = |(at, of): (usize, &Argument)| {
                let mut memory = Memory::new(&self.context, of.bytes())?;
                memory.write(0, &cases::numbers(of, (set * 31 + at) as u64))?;
                Ok(memory)
            };
            let both = [&inputs, &outputs].map(|of| of.iter().enumerate().map(make).collect());
            let [inputs, outputs]: [Result<Vec<Memory>, Failure>; 2] = both;
            buffers.push([inputs.map_err(told)?, outputs.map_err(told)?]);
        }
        let start = |at: usize| {
            let [inputs, outputs] = &buffers[at % sets];
            let inputs: Vec<Piece<'_>> = inputs.iter().map(Memory::whole).collect();
            let outputs: Vec<Piece<'_>> = outputs.iter().map(Memory::whole).collect();
            launch.start(&[0; SCALARS], &inputs, &outputs, &workspace.whole())
        };
        start(0).map_err(told)?;
        self.context.synchronize().map_err(told)?;
        let checked = cases::wrong(case, &buffers[0][0], &buffers[0][1]);
        if let Some(wrong) = checked {
            return Err(wrong);
        }
        let [seconds, spread] = self.timed(&start).map_err(told)?;
        let mut line = case.of.clone();
        for (key, value) in [
            ("name", json!(case.name)),
            ("s", json!(seconds)),
            ("spread", json!(spread)),
            ("bytes", json!(price::bytes(&case.kernel).0)),
            ("flops", json!(price::flops(&case.kernel).0)),
        ] {
            line[key] = value;
        }
        Ok(line)
    }

    /// Median seconds of a launch, and the largest over the least.
    fn timed(&self, start: &dyn Fn(usize) -> Result<(), Failure>) -> Result<[f64; 2], Failure> {
        let round = |count: usize| {
            let from = self.context.moment()?;
            for at in 0..count {
                start(at)?;
            }
            Ok::<f64, Failure>(self.context.moment()?.since(&from)? / count as f64)
        };
        round(3)?;
        let count = ((ROUND_S / round(5)?) as usize).clamp(3, MOST);
        let mut rounds = (0..ROUNDS).map(|_| round(count)).collect::<Result<Vec<f64>, _>>()?;
        rounds.sort_by(f64::total_cmp);
        Ok([rounds[ROUNDS / 2], rounds[ROUNDS - 1] / rounds[0]])
    }

    /// The copy of a large buffer, whose bytes are read and written.
    fn copied(&self) -> Result<Value, Failure> {
        let bytes = 2 << 30;
        let make = || Memory::new(&self.context, bytes);
        let (mut from, mut to) = (make()?, make()?);
        from.write(0, &cases::numbers(&Argument { dtype: DType::F32, len: bytes / 4 }, 1))?;
        let times = (0..ROUNDS).map(|_| {
            let earlier = self.context.moment()?;
            for _ in 0..10 {
                to.copy(&from)?;
            }
            Ok(self.context.moment()?.since(&earlier)? / 10.0)
        });
        let mut times = times.collect::<Result<Vec<f64>, Failure>>()?;
        times.sort_by(f64::total_cmp);
        let [s, spread] = [times[ROUNDS / 2], times[ROUNDS - 1] / times[0]];
        Ok(json!({ "kind": "copy", "name": "copy", "s": s, "spread": spread, "bytes": 2 * bytes }))
    }
}
