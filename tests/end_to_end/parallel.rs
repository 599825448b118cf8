//! Plans really divide the work: weights, products, bytes moved and memory, counted in programs.

use std::collections::{BTreeMap, BTreeSet};

use codegen::compile::{Compiled, compile};
use ir::import::preset;
use ir::plan::Keep;
use ir::program::{Contents, Exchange, Instruction, Program, Step};
use ir::{DType, Mesh, Plan};
use kernels::Kernel;

use crate::model::{Wanted, plan, prepared};

fn compiled(name: &str, seq: usize, wanted: Wanted) -> (Plan, Compiled) {
    let description = preset(name).expect("a preset");
    let (_, module) = prepared(&description, seq, DType::F32, 0.0);
    let plan = plan(&module, seq, DType::F32, wanted).unwrap_or_else(|why| panic!("{name}: {why}"));
    let compiled = compile(&module, "loss", &plan);
    let compiled = compiled.unwrap_or_else(|d| panic!("{}", ir::diagnostic::render(&d, None)));
    (plan, compiled)
}

fn wanted(pp: usize, dp: usize, tp: usize) -> Wanted {
    Wanted {
        mesh: Mesh { pp, dp, tp, ..Mesh::ONE },
        microbatch_size: 1,
        microbatch_count: pp,
        keep: Keep::Full,
        sequence: tp > 1,
    }
}

/// The launches of one training step, each as often as it happens.
fn launches<'a>(program: &'a Program, kernels: &'a [Kernel]) -> impl Iterator<Item = &'a Kernel> {
    let routines = program.steps.iter().filter_map(|step| match step {
        Step::Call { routine, .. } => Some(&program.routines[*routine]),
        Step::Feed { .. }
        | Step::Send { .. }
        | Step::Receive { .. }
        | Step::Move { .. }
        | Step::Await { .. } => None,
    });
    routines.flat_map(|r| &r.instructions).filter_map(move |i| match i {
        Instruction::Launch { kernel, .. } => Some(&kernels[*kernel]),
        Instruction::Collective { .. } => None,
    })
}

/// Ranks of one stage launch the same kernels, with scalars of their own, as long as their local
/// sizes are equal. At the end of a step they are not: one rank alone counts the loss, and the
/// gradients of whole weights.
#[test]
fn ranks_with_equal_sizes_launch_equal_kernels() {
    for (name, dropout, tp) in
        [("gpt2-mini", 0.0, 2), ("gpt2-mini", 0.1, 2), ("llama-3-8b", 0.0, 8)]
    {
        let description = preset(name).expect("a preset");
        let (_, module) = prepared(&description, 64, DType::F32, dropout);
        let plan = plan(&module, 64, DType::F32, wanted(1, 1, tp)).expect("the mesh fits");
        let Compiled { programs, kernels } = compile(&module, "loss", &plan).expect("it compiles");
        let launched = |program: &Program| -> BTreeMap<usize, BTreeSet<Vec<i64>>> {
            let mut launched: BTreeMap<usize, BTreeSet<Vec<i64>>> = BTreeMap::new();
            let is_counting = |name: &str| ["fill", "squares"].contains(&name);
            let routines = program.routines.iter().filter(|r| !is_counting(&r.name));
            for instruction in routines.flat_map(|routine| &routine.instructions) {
                if let Instruction::Launch { kernel, scalars, .. } = instruction {
                    launched.entry(*kernel).or_default().insert(scalars.clone());
                }
            }
            launched
        };
        let first = launched(&programs[0]);
        assert!(first.len() > 20, "{name}: {} kernels", first.len());
        for program in &programs[1..] {
            let own = launched(program);
            let other = own.keys().filter(|kernel| !first.contains_key(kernel));
            let other: Vec<String> = other.map(|kernel| kernels[*kernel].to_string()).collect();
            assert!(own.keys().eq(first.keys()), "{name}: {other:?}");
            assert_ne!(own, first, "{name}: where pieces begin differs");
        }
    }
}

fn product_flops(program: &Program, kernels: &[Kernel]) -> u64 {
    let flops = |kernel: &Kernel| {
        let is_product = matches!(kernel, Kernel::Product(_) | Kernel::Products(_));
        if is_product { kernels::price::flops(kernel).0 } else { 0 }
    };
    launches(program, kernels).map(flops).sum()
}

#[test]
fn weights_are_cut_and_bytes_are_those_of_the_shards() {
    for (name, tp) in [("gpt2", 4), ("gpt2-xl", 5), ("llama-3-8b", 8), ("gpt3-175b", 8)] {
        let (plan, compiled) = compiled(name, 64, wanted(1, 1, tp));
        let mut replicated = 0;
        let mut whole = 0;
        for program in &compiled.programs {
            let mut shards = 0;
            for weight in &program.weights {
                let elements: usize = weight.ranges.iter().map(|r| r.1).product();
                let all: usize = weight.global.iter().product();
                shards += elements as u64 * 4;
                if program.tensor == 0 {
                    whole += all;
                    replicated += if elements == all { all } else { 0 };
                }
                let is_cut = elements < all;
                assert!(is_cut || weight.global.len() < 2, "{name}: `{}` is whole", weight.name);
            }
            let params =
                program.buffers.iter().filter(|b| matches!(b.contents, Contents::Param(_)));
            let bytes: u64 = params.map(|b| b.bytes).sum();
            assert_eq!(bytes, shards, "{name} {}", plan.mesh);
        }
        let share = replicated as f64 / whole as f64;
        assert!(
            share <= 0.01,
            "{name}: {:.2} % of the weights are whole everywhere",
            100.0 * share
        );
    }
}

#[test]
fn products_are_divided_evenly() {
    for (name, pp, dp, tp) in [("gpt2", 1, 1, 4), ("gpt2", 1, 2, 2), ("llama-3-8b", 1, 1, 8)] {
        let (_, one) = compiled(name, 64, Wanted { microbatch_size: dp, ..wanted(1, 1, 1) });
        let (_, many) = compiled(name, 64, wanted(pp, dp, tp));
        let all = product_flops(&one.programs[0], &one.kernels);
        for program in &many.programs {
            let own = product_flops(program, &many.kernels);
            let ratio = own as f64 * (dp * tp) as f64 / all as f64;
            // gpt2's vocabulary is odd: its largest shard has one row more.
            assert!(ratio <= 1.02, "{name} dp={dp} tp={tp}: {ratio:.4} of an even share");
        }
    }
}

#[test]
fn arenas_are_hardly_larger_than_what_lives_at_once() {
    for (name, pp, tp) in
        [("gpt2-mini", 1, 1), ("gpt2", 1, 1), ("gpt2", 2, 2), ("llama-3-8b", 1, 8)]
    {
        for keep in [Keep::None, Keep::Full] {
            let (_, compiled) = compiled(name, 256, Wanted { keep, ..wanted(pp, 1, tp) });
            for program in &compiled.programs {
                let ratio = program.arena_bytes as f64 / program.live_bytes_max as f64;
                assert!(ratio <= 1.05, "{name} pp={pp} tp={tp} {keep:?}: {ratio:.4}");
            }
        }
    }
}

/// Elements that a rank puts into the collectives of one axis in one micro-batch, by kind.
fn moved(program: &Program) -> BTreeMap<&'static str, usize> {
    let mut moved = BTreeMap::new();
    for step in &program.steps {
        let Step::Call { routine, .. } = step else { continue };
        for instruction in &program.routines[*routine].instructions {
            let Instruction::Collective { exchange, group, elements, .. } = instruction else {
                continue;
            };
            if *group != ir::program::Group::Axis(ir::Axis::Tp) {
                continue;
            }
            let kind = match exchange {
                Exchange::AllReduce(_) => "all-reduce",
                Exchange::AllGather { .. } => "all-gather",
                Exchange::ReduceScatter { .. } => "reduce-scatter",
                Exchange::AllToAll { .. } => "all-to-all",
                Exchange::Dispatch(_) => "dispatch",
                Exchange::Combine(_) => "combine",
            };
            *moved.entry(kind).or_default() += elements;
        }
    }
    moved
}

#[test]
fn tensor_parallel_layers_move_what_megatron_moves() {
    // With sequence parallelism each half of a block gathers its input and scatters its output,
    // forward and backward: of B·S·M activations, per layer 2 gathers and 2 scatters forward, the
    // same backward, and 2 more gathers where the backward pass needs a gathered input again
    // (Korthikanti et al. 2022, §4.2.2).
    let tp = 4;
    let layers = |count: usize| {
        let text =
            format!(r#"{{"model_type": "gpt2", "n_layer": {count}, "n_head": 12, "n_embd": 768}}"#);
        let description = ir::import::read_config("config.json", &text, "gpt2").expect("it reads");
        let (_, module) = prepared(&description, 64, DType::F32, 0.0);
        let plan = plan(&module, 64, DType::F32, wanted(1, 1, tp)).expect("a plan");
        let compiled = compile(&module, "loss", &plan).expect("it compiles");
        moved(&compiled.programs[0])
    };
    let (two, one) = (layers(2), layers(1));
    let per_layer = |kind: &str| two.get(kind).unwrap_or(&0) - one.get(kind).unwrap_or(&0);
    let activations = 64 * 768;
    assert_eq!(per_layer("all-gather"), 6 * activations / tp);
    assert_eq!(per_layer("reduce-scatter"), 4 * activations);
    // What is left is the gradient of the norms' weights and of two biases, summed at the end.
    assert!(per_layer("all-reduce") <= 8 * 768, "{}", per_layer("all-reduce"));
}

#[test]
fn programs_hardly_grow_with_depth() {
    let sizes = |count: usize| {
        let text = format!(r#"{{"model_type": "gpt2", "n_layer": {count}}}"#);
        let description = ir::import::read_config("config.json", &text, "gpt2").expect("it reads");
        let (_, module) = prepared(&description, 64, DType::F32, 0.0);
        let plan = plan(&module, 64, DType::F32, wanted(1, 1, 1)).expect("a plan");
        let compiled = compile(&module, "loss", &plan).expect("it compiles");
        (compiled.programs[0].routines.len(), compiled.kernels.len())
    };
    // The last routines update all weights at once, whatever their number.
    assert_eq!(sizes(12), sizes(48));
}
