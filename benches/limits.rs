//! How far the parts of a program are from what limits them.
//!
//! ```text
//! cargo bench --bench limits               # all
//! cargo bench --bench limits -- kernels    # or products, experts, compile, or decode
//! ```
//! * `kernels`: every product and fused kernel that a training step of gpt2 launches, alone.
//!   Products as a share of the fastest of them, fused kernels as a share of what copying reaches
//!   on the same memory. Shares above one are of what fits into a cache.
//! * `products`: square products of bf16 in the forms of a layer, on one thread; beside those of
//!   `python benches/torch_products.py`.
//! * `experts`: a feed-forward layer of 8 experts, of which a token passes 2, against the kernels
//!   that compute all of them.
//! * `compile`: seconds from a description to programs, for gpt2 with 12 and with 48 layers.
//! * `decode`: tokens a second, beside what reading every weight once would allow.
//!
//! Times are the best of several launches.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

#[path = "../tests/end_to_end/model.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod model;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::Instant;

use codegen::function::compile_function;
use gantline::generation::{Generator, Options};
use ir::build::Builder;
use ir::import::{Description, preset, read_config};
use ir::inline::inline_composites;
use ir::plan::Keep;
use ir::program::Instruction;
use ir::{DType, Kind, Mesh, Module, TensorType};
use kernels::cpu::{Cpu, View, ViewMut};
use kernels::{Copy, CopyLoop, Kernel, Offset, Product, price};
use model::{Wanted, plan, prepared};
use runtime::generate::{Ending, Sampling};
use runtime::init::Init;

const ONE_RANK: Wanted = Wanted {
    mesh: Mesh::ONE,
    microbatch_size: 1,
    microbatch_count: 1,
    keep: Keep::Full,
    sequence: true,
};
/// Launches of a kernel, of which the fastest counts.
const LAUNCHES: usize = 5;
/// Elements that are copied: more than any cache holds.
const COPIED: usize = 64 << 20;
/// Tokens that are generated.
const TOKENS: usize = 48;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cores} threads");
    let cpu = Cpu::new(cores);
    let copying = rate(&cpu, &copy(COPIED));
    println!("copying reaches {:.1} GB/s, read and written", copying / 1e9);
    if is_wanted("kernels") {
        for seq in [256, 1024] {
            kernels_of_a_step(&cpu, seq, copying);
        }
    }
    if is_wanted("products") {
        square_products();
    }
    if is_wanted("experts") {
        experts(&cpu);
    }
    if is_wanted("compile") {
        compile();
    }
    if is_wanted("decode") {
        decode("gpt2-mini", cores, copying);
        decode("gpt2", cores, copying);
    }
}

fn copy(elements: usize) -> Kernel {
    Kernel::Copy(Copy {
        loops: vec![CopyLoop { size: elements, source: 1, target: 1 }],
        source_offset: Offset::ZERO,
        target_offset: 0,
        zero_first: 0,
        dtype: DType::F32,
    })
}

/// The seconds of the fastest launch, with inputs of ones.
fn seconds(cpu: &Cpu, kernel: &Kernel) -> f64 {
    seconds_of(cpu, kernel, |_| {})
}

/// The same with inputs that are changed before, as numbers of F32.
fn seconds_of(cpu: &Cpu, kernel: &Kernel, change: impl FnOnce(&mut [Vec<f32>])) -> f64 {
    let buffer = |argument: &kernels::arguments::Argument| vec![1.0f32; argument.bytes() / 4 + 1];
    let mut inputs: Vec<Vec<f32>> = kernel.inputs().iter().map(buffer).collect();
    change(&mut inputs);
    let mut outputs: Vec<Vec<f32>> = kernel.outputs().iter().map(buffer).collect();
    let inputs: Vec<View<'_>> = inputs.iter().map(|b| View::of(b)).collect();
    let outputs: Vec<ViewMut<'_>> = outputs.iter_mut().map(|b| ViewMut::of(b)).collect();
    let launch = |_| {
        let start = Instant::now();
        cpu.execute(kernel, &inputs, &outputs);
        start.elapsed().as_secs_f64()
    };
    (0..LAUNCHES).map(launch).fold(f64::INFINITY, f64::min)
}

/// Bytes a second that a kernel reads and writes.
fn rate(cpu: &Cpu, kernel: &Kernel) -> f64 {
    price::bytes(kernel).0 as f64 / seconds(cpu, kernel)
}

fn kernels_of_a_step(cpu: &Cpu, seq: usize, copying: f64) {
    let description = preset("gpt2").expect("a preset");
    let (_, module) = prepared(&description, seq, DType::F32, 0.0);
    let plan = plan(&module, seq, DType::F32, ONE_RANK).expect("a plan");
    let compiled = codegen::compile::compile(&module, "loss", &plan).expect("programs");
    let mut launches: BTreeMap<usize, usize> = BTreeMap::new();
    for instruction in compiled.programs[0].routines.iter().flat_map(|r| &r.instructions) {
        if let Instruction::Launch { kernel, .. } = instruction {
            *launches.entry(*kernel).or_default() += 1;
        }
    }
    let mut products = Vec::new();
    let mut fused = Vec::new();
    for &kernel in launches.keys() {
        let kernel = &compiled.kernels[kernel];
        if matches!(kernel, Kernel::Product(_) | Kernel::Products(_)) {
            products.push((kernel, seconds(cpu, kernel)));
        } else if matches!(kernel, Kernel::Rows(_)) {
            fused.push((kernel, seconds(cpu, kernel)));
        }
    }
    let flops_per_s = |(kernel, s): &(&Kernel, f64)| price::flops(kernel).0 as f64 / s;
    let fastest = products.iter().map(flops_per_s).fold(0.0, f64::max);
    println!("gpt2, 1 x {seq} tokens: products, as a share of the fastest");
    for product in &products {
        let (rate, ms) = (flops_per_s(product), product.1 * 1e3);
        println!(
            "  {:<44} {ms:9.3} ms {:7.1} Gflop/s {:5.2}",
            product.0,
            rate / 1e9,
            rate / fastest
        );
    }
    println!("gpt2, 1 x {seq} tokens: fused kernels, as a share of copying");
    for (kernel, s) in &fused {
        let rate = price::bytes(kernel).0 as f64 / s;
        let name = kernel.to_string();
        println!("  {name:<44} {:9.3} ms {:7.1} GB/s {:9.2}", s * 1e3, rate / 1e9, rate / copying);
    }
}

/// A layer's result, and the gradients of its input and of its weight.
fn square_products() {
    let cpu = Cpu::new(1);
    println!("products of bf16 on {:?}, one thread", cpu.isa());
    for side in [768, 1024, 2048, 3072] {
        for form in ["forward", "dgrad", "wgrad"] {
            let mut p = Product::matrix(side, side, side, DType::BF16);
            if form == "dgrad" {
                (p.n[0].b, p.k[0].b) = (side, 1);
            } else if form == "wgrad" {
                (p.m[0].a, p.k[0].a) = (1, side);
            }
            let kernel = Kernel::Product(p);
            let best = (0..LAUNCHES).map(|_| seconds(&cpu, &kernel)).fold(f64::INFINITY, f64::min);
            let rate = price::flops(&kernel).0 as f64 / best;
            println!("  {side:>4} {form:<8} {:9.3} ms {:7.1} Gflop/s", best * 1e3, rate / 1e9);
        }
    }
}

/// gpt2 with another number of layers.
/// Sizes of the experts that are measured: tokens, experts, model, inside, and those of a token.
const EXPERTS: [usize; 5] = [512, 8, 512, 1024, 2];

fn experts(cpu: &Cpu) {
    let [tokens, experts, model, inner, top_k] = EXPERTS;
    for (name, products) in [("experts", 3), ("experts_bwd", 8)] {
        let mut module = Module::new("experts");
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let mut param =
            |name: &str, dims: &[usize]| b.param(name, TensorType::of(DType::F32, dims));
        let x = param("x", &[1, tokens, model]);
        let gates = param("gates", &[1, tokens, experts]);
        let [gate, up] = ["gate", "up"].map(|name| param(name, &[experts, inner, model]));
        let mut operands = vec![x, gates, gate, up, param("down", &[experts, model, inner])];
        operands.extend((products == 8).then(|| param("dy", &[1, tokens, model])));
        let results = b.composite("y", name, &[("top_k", top_k as f64)], &operands);
        b.finish(&results);
        let routed = compile_function(&module, "f").expect("experts have kernels");
        inline_composites(&mut module, |_| false);
        let all = compile_function(&module, "f").expect("products have kernels");
        let launches = all.routine.instructions.iter().filter_map(|of| match of {
            Instruction::Launch { kernel, .. } => Some(&all.kernels[*kernel]),
            Instruction::Collective { .. } => None,
        });
        let all: f64 = launches.map(|kernel| seconds(cpu, kernel)).sum();
        // A token passes neighbours, and all experts have as many tokens.
        let is_passed = |at: usize| (at % experts + at / experts) % experts < top_k;
        let routed = seconds_of(cpu, &routed.kernels[0], |inputs| {
            for at in (0..tokens * experts).filter(|at| !is_passed(*at)) {
                inputs[1][at] = 0.0;
            }
        });
        let flops = (2 * products * tokens * top_k * model * inner) as f64;
        println!(
            "{name}: {:.2} ms, {:.0} Gflop/s; all of them {:.2} ms, {:.2} times as long",
            routed * 1e3,
            flops / routed / 1e9,
            all * 1e3,
            all / routed
        );
    }
}

fn deep(layers: usize) -> Description {
    let config = format!(r#"{{"model_type": "gpt2", "n_layer": {layers}}}"#);
    read_config("config.json", &config, "gpt2").expect("a config")
}

fn compile() {
    let time = |layers: usize| {
        let description = deep(layers);
        let once = |_| {
            let start = Instant::now();
            let (_, module) = prepared(&description, 1024, DType::F32, 0.0);
            let plan = plan(&module, 1024, DType::F32, ONE_RANK).expect("a plan");
            codegen::compile::compile(&module, "loss", &plan).expect("programs");
            start.elapsed().as_secs_f64()
        };
        (0..LAUNCHES).map(once).fold(f64::INFINITY, f64::min)
    };
    let [shallow, deep] = [12, 48].map(time);
    println!("compiling gpt2, from its description to programs");
    println!("  12 layers {shallow:.3} s, 48 layers {deep:.3} s, ratio {:.2}", deep / shallow);
}

fn decode(name: &str, threads_per_rank: usize, copying: f64) {
    let description = preset(name).expect("a preset");
    let mesh = ONE_RANK.mesh;
    let (capacity, sequences, dtype) = (2 * TOKENS, 1, DType::F32);
    let options = Options { capacity, sequences, mesh, dtype, threads_per_rank, target: None };
    let mut fill = |session: &mut runtime::execute::Session, _: &ir::import::Model| {
        session.init_weights(1, &|_, dims: &[usize]| match dims.len() {
            1 => Init::Ones,
            _ => Init::Normal { std: 0.02, zero_row: None },
        });
        Ok(())
    };
    let mut generator = Generator::new(&description, &options, &mut fill).expect("a generator");
    let ending = Ending { tokens_max: TOKENS, stops: Default::default() };
    let mut rates = Vec::new();
    for _ in 0..LAUNCHES {
        let mut first = None;
        let each = &mut |_| {
            first.get_or_insert_with(Instant::now);
            ControlFlow::Continue(())
        };
        let tokens = generator.generate(&[1, 2, 3, 4], &Sampling::GREEDY, &ending, each);
        let made = tokens.expect("the model generates").len() - 1;
        rates.push(made as f64 / first.expect("a token").elapsed().as_secs_f64());
    }
    let rate = rates.into_iter().fold(0.0, f64::max);
    let weights = generator.model().weights.iter().map(|w| w.dims.iter().product::<usize>());
    // Reading moves half of the bytes that copying moves in the same time, at best.
    let most = copying / (4.0 * weights.sum::<usize>() as f64);
    println!("{name}: decodes {rate:.1} tokens/s; reading all weights allows {most:.1}");
}
