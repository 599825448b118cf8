//! Launches and bytes of a GPT-2 block, beside those of kernels that are fused by hand.
//!
//! The peer is llm.c's `train_gpt2.cu`, counted in its source for one block. Its kernels:
//!
//! | forward | launches | what |
//! |---|--:|---|
//! | `matmul_forward_cublaslt` | 4 | qkv, projection, up, down, each with its bias |
//! | `attention_forward_cudnn` | 1 | flash attention |
//! | `fused_residual_forward5` | 2 | sum and the next layer norm |
//! | `gelu_forward` | 1 | on its own but where cuBLASLt has it as epilogue |
//!
//! | backward | launches | what |
//! |---|--:|---|
//! | `matmul_backward` | 16 | four times: operand, weight, and the bias in two |
//! | `attention_backward_cudnn` | 3 | row sums, the gradient, a conversion of types |
//! | `layernorm_backward` | 2 | with the sum of the residual's gradient |
//! | `gelu_backward` | 1 | in place |

use std::collections::BTreeMap;

use ir::plan::{Keep, Optimizer};
use ir::program::{Instruction, Program, Ref, Routine, Step};
use ir::{DType, Mesh, import};
use kernels::Kernel;

use crate::model::{Wanted, plan, prepared};

/// Launches of llm.c for one block, forward and backward.
const BY_HAND: [usize; 2] = [8, 22];

/// The most launches of ours. Forward: norm, queries with keys and values, attention, projection
/// with the first sum, norm, up with GELU, down with the last sum, which llm.c computes with the
/// next block's norm. Backward, products that wait for the same are one launch.
const LAUNCHES_MAX: [usize; 2] = [7, 10];

/// The most bytes of ours, beside llm.c: sums are added to products before those are written.
const BYTES_MAX: [f64; 2] = [0.85, 0.93];

/// Elements that a block of llm.c moves, per element of its input, forward and backward: derived
/// from the operands and results of the kernels above, products of weights left out.
///
/// Forward, in units of samples x positions x 768: qkv 1 + 3, attention 3 + 1, projection 1 + 1,
/// residual and norm 2 + 2, up 1 + 4, gelu 4 + 4, down 4 + 1, residual and norm 2 + 2.
/// Backward: down 1 + 4 and 1 + 4 and 1, gelu 4 + 4 + 4, up 4 + 1 and 4 + 1 and 4, norm 3 + 1,
/// projection 1 + 1 and 1 + 1 and 1, attention 3 + 1 + 1 + 3 (and 2 for row sums), qkv 3 + 1 and
/// 3 + 1 and 3, norm 3 + 1.
const UNITS_BY_HAND: [u64; 2] = [36, 71];

struct Counted {
    launches: usize,
    bytes: u64,
    kernels: BTreeMap<usize, usize>,
}

/// What a routine launches, and the bytes of what its launches read and write.
fn counted(routine: &Routine) -> Counted {
    let mut counted = Counted { launches: 0, bytes: 0, kernels: BTreeMap::new() };
    let bytes = |at: &Ref| match at {
        Ref::Slot(slot) => routine.slots[*slot as usize].1,
        Ref::Local(local) => routine.locals[*local as usize].bytes,
    };
    for instruction in &routine.instructions {
        if let Instruction::Launch { kernel, inputs, outputs, .. } = instruction {
            counted.launches += 1;
            counted.bytes += inputs.iter().chain(outputs).map(bytes).sum::<u64>();
            *counted.kernels.entry(*kernel).or_default() += 1;
        }
    }
    counted
}

fn routine<'p>(program: &'p Program, part: &str) -> &'p Routine {
    let names: Vec<&str> = program.routines.iter().map(|r| r.name.as_str()).collect();
    let is_it = |r: &&Routine| r.name.starts_with("block") && r.name.contains(part);
    program.routines.iter().find(is_it).unwrap_or_else(|| panic!("no {part} among {names:?}"))
}

/// The forward and the backward routine of a block of a model, and the kernels of all.
fn block(model: &str, seq: usize, samples: usize) -> ([Counted; 2], Vec<Kernel>) {
    let description = import::preset(model).expect("a preset");
    let (_, module) = prepared(&description, seq, DType::F32, 0.0);
    let wanted = Wanted {
        mesh: Mesh::ONE,
        microbatch_size: samples,
        microbatch_count: 1,
        keep: Keep::Full,
        sequence: false,
    };
    let plan = plan(&module, seq, DType::F32, wanted).expect("it fits");
    let compiled = codegen::compile::compile(&module, "loss", &plan).expect("it compiles");
    let program = &compiled.programs[0];
    (["forward", "backward"].map(|part| counted(routine(program, part))), compiled.kernels)
}

/// A line for each kind of kernel of a routine.
fn lines(found: &Counted, kernels: &[Kernel]) -> String {
    let line = |(kernel, count): (&usize, &usize)| format!("  {count} of {}\n", kernels[*kernel]);
    found.kernels.iter().map(line).collect()
}

#[test]
fn a_block_launches_and_moves_no_more_than_kernels_fused_by_hand() {
    let (seq, samples) = (1024, 4);
    let (routines, kernels) = block("gpt2", seq, samples);
    let unit = (samples * seq * 768 * 4) as u64;
    let weights = (12 * 768 * 768 * 4) as u64;
    let mut table = String::from("part launches by-hand MiB by-hand\n");
    let mut is_fine = true;
    for (at, (part, found)) in ["forward", "backward"].into_iter().zip(&routines).enumerate() {
        let by_hand = UNITS_BY_HAND[at] * unit + (1 + 2 * at as u64) * weights;
        let (launches, bytes) = (found.launches, [found.bytes, by_hand].map(|bytes| bytes >> 20));
        table += &format!("{part} {launches} {} {} {}\n", BY_HAND[at], bytes[0], bytes[1]);
        table += &lines(found, &kernels);
        let share = found.bytes as f64 / by_hand as f64;
        is_fine &= launches <= LAUNCHES_MAX[at] && share <= BYTES_MAX[at];
    }
    println!("{table}");
    assert!(is_fine, "{table}");
}

/// The most launches of a block of Llama. Forward: norm, queries with keys and values, the first
/// position, two rotations, attention, projection with the first sum, norm, gate and up with what
/// is gated, down with the last sum. Backward: the gradients of gate and up are computed by the
/// launch of the product before them.
const LLAMA_MAX: [usize; 2] = [10, 11];

/// Gate and up are one launch, which computes the product of the two as well.
#[test]
fn a_block_of_llama_gates_in_the_launch_of_its_products() {
    let (routines, kernels) = block("llama-3-8b", 512, 1);
    let table: String = routines.iter().map(|found| lines(found, &kernels) + "\n").collect();
    println!("{table}");
    let is_gate = |kernel: &Kernel| {
        let Kernel::Products(p) = kernel else { return false };
        p.parts.len() == 2 && p.teams().len() == 1
    };
    let gates = routines[0].kernels.keys().filter(|kernel| is_gate(&kernels[**kernel]));
    assert_eq!(gates.count(), 1, "{table}");
    for (found, most) in routines.iter().zip(LLAMA_MAX) {
        assert!(found.launches <= most, "{} launches\n{table}", found.launches);
    }
}

/// The launches that end a step of GPT-2 with twelve layers, by name.
fn at_the_end(mesh: Mesh, decay_biases: f64) -> Vec<BTreeMap<String, usize>> {
    let description = import::preset("gpt2").expect("a preset");
    let (seq, samples) = (64, 2);
    let (_, module) = prepared(&description, seq, DType::F32, 0.0);
    let wanted = Wanted {
        mesh,
        microbatch_size: samples,
        microbatch_count: 1,
        keep: Keep::Full,
        sequence: true,
    };
    let mut plan = plan(&module, seq, DType::F32, wanted).expect("it fits");
    plan.optimizer =
        Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.1, decay_biases };
    let compiled = codegen::compile::compile(&module, "loss", &plan).expect("it compiles");
    let counts = |program: &Program| {
        let mut counts = BTreeMap::new();
        for step in &program.steps {
            if let Step::Call { routine, .. } = step {
                *counts.entry(program.routines[*routine].name.clone()).or_default() += 1;
            }
        }
        counts
    };
    compiled.programs.iter().map(counts).collect()
}

/// The 148 weights of GPT-2 are updated by one launch for each decay, and their gradients are
/// squared by one, on any mesh: also where some are cut, some whole and one is another stage's.
#[test]
fn all_weights_are_updated_by_one_launch_for_each_decay() {
    for [pp, dp, tp] in [[1, 1, 1], [1, 1, 2], [2, 1, 2], [1, 2, 1], [3, 1, 1]] {
        for (decay_biases, updates) in [(0.0, 2), (0.1, 1)] {
            let mesh = Mesh { pp, dp, tp, ..Mesh::ONE };
            for program in at_the_end(mesh, decay_biases) {
                let of = |name: &str| program.get(name).copied().unwrap_or(0);
                assert_eq!([of("update"), of("squares")], [updates, 1], "{mesh}: {program:?}");
            }
        }
    }
}
