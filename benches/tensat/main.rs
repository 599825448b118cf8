//! The networks of the TASO and TENSAT papers: what fusing and rewriting save under the published
//! limits of a T4, and how long it takes.
//!
//! ```text
//! cargo bench --bench tensat             # all networks, as a Markdown table
//! cargo bench --bench tensat -- VGG-19   # those that are named
//! ```
//! `op by op` is a library that has one kernel for each layer with its activation, the peers'
//! starting point. `fused` is this compiler without rules, `rewritten` with all but those that
//! approximate.
//! Kernels run one after the other, each as fast as its operations or its bytes allow, after a
//! launch. Speed-ups are of `op by op`. TENSAT's are measured, with cuDNN's kernels, so that only
//! their order can be compared.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

mod net;
mod networks;
mod roofline;

use std::time::Instant;

use codegen::function::{Compiled, compile_function};
use ir::Module;
use ir::program::Instruction;
use ir::rewrite::{Options, simplify};
use kernels::price;
use roofline::{Work, seconds};

fn compiled(module: &Module) -> Vec<Work> {
    let Compiled { routine, kernels, .. } =
        compile_function(module, net::NAME).expect("every op has a kernel");
    let work = |instruction: &Instruction| match instruction {
        Instruction::Launch { kernel, .. } => {
            let kernel = &kernels[*kernel];
            let has_product = matches!(
                kernel,
                kernels::Kernel::Product(_)
                    | kernels::Kernel::Products(_)
                    | kernels::Kernel::Attention(_)
            );
            let flops = if has_product { price::flops(kernel).0 } else { 0 };
            Some(Work { flops, bytes: price::bytes(kernel).0 })
        }
        Instruction::Collective { .. } => None,
    };
    routine.instructions.iter().filter_map(work).collect()
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    println!("| network | op by op | fused | rewritten | faster | took | TENSAT | took |");
    println!("|---|--:|--:|--:|--:|--:|--:|--:|");
    for (name, built, [tensat_s, tensat]) in networks::networks() {
        if !wanted.is_empty() && !wanted.iter().any(|w| w == name) {
            continue;
        }
        let fused = compiled(&built.module);
        let begin = Instant::now();
        let mut module = built.module.clone();
        simplify(&mut module, &Options::default());
        let rewritten = compiled(&module);
        let took = begin.elapsed().as_secs_f64();
        let cell = |kernels: &[Work]| {
            format!("{} launches, {:.2} ms", kernels.len(), 1e3 * seconds(kernels))
        };
        let faster = 100.0 * (seconds(&built.library) / seconds(&rewritten) - 1.0);
        let cells = [&built.library, &fused, &rewritten].map(|kernels| cell(kernels)).join(" | ");
        let ours = format!("{faster:.1} % | {took:.2} s");
        println!("| {name} | {cells} | {ours} | {tensat:.1} % | {tensat_s:.1} s |");
    }
}
