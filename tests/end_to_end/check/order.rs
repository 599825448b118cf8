//! Ranks whose shards differ in size make the same exchanges in the same order, whatever each of
//! them fuses.

use codegen::check::check;
use codegen::compile::compile;
use codegen::partition::{Place, partition};
use ir::autodiff::gradient_name;
use ir::diagnostic::render;
use ir::import::read_config;
use ir::op::Collective;
use ir::plan::Keep;
use ir::random::mix;
use ir::{DType, Mesh, Module, Op, Plan};
use planner::link::Link;

use super::text;
use crate::drawn::{family, names, root};
use crate::model::{Wanted, plan_over, prepared};

const SEQ: usize = 12;
/// Meshes of up to eight ranks that cut few dims of the cases evenly.
const MESHES: [[usize; 3]; 8] =
    [[1, 1, 8], [1, 1, 7], [1, 1, 5], [1, 2, 3], [2, 1, 4], [1, 1, 3], [1, 1, 6], [2, 1, 3]];
/// Where exchanges cost next to nothing, as in memory, or much: shardings differ.
const LINKS: [Link; 2] = [
    Link { latency_s: 1e-7, bandwidth_bytes_per_s: 1e11 },
    Link { latency_s: 1e-6, bandwidth_bytes_per_s: 1e9 },
];

/// What a rank puts into an exchange, but for what is its own: which piece it keeps, and the size
/// of its own shard.
fn exchanges(module: &Module, name: &str, plan: &Plan, tensor: usize) -> Vec<String> {
    let place = Place {
        sizes: [plan.mesh.dp, 1, 1, plan.mesh.tp],
        takes_tp: false,
        coordinates: [0, 0, 0, tensor],
        microbatch_size: plan.microbatch_size,
        target: plan.target,
    };
    let function = module.function(&gradient_name(name)).expect("layers have gradients");
    let local = partition(module, function, &plan.functions[name].shardings, place);
    let local = local.expect("the plan fits").function;
    let told = |node: &ir::Node| {
        let Op::Collective { kind, axis } = &node.op else { return None };
        let name = &local.value(node.result()).name;
        Some(match kind {
            Collective::ReduceScatter { dim, counts, .. } => {
                format!("{axis} scatter {dim} {counts:?} {name}")
            }
            Collective::AllReduce(_)
            | Collective::AllGather { .. }
            | Collective::AllToAll { .. }
            | Collective::Dispatch { .. }
            | Collective::Combine { .. } => {
                format!("{axis} {kind:?} {name}")
            }
        })
    };
    local.nodes.iter().filter_map(told).collect()
}

/// The programs of a case on a mesh pass the checker, which replays all ranks; says how many
/// exchanges its layers make, none where the mesh does not fit.
fn exchanged(case: &str, wanted: Wanted, link: Link) -> Option<usize> {
    let config = std::fs::read_to_string(root().join(case).join("config.json"));
    let description = read_config("config.json", &config.expect("a config"), case);
    let (_, module) = prepared(&description.expect("it reads"), SEQ, DType::F32, 0.0);
    let plan = plan_over(&module, SEQ, DType::F32, wanted, link).ok()?;
    let mut count = 0;
    for name in plan.functions.keys() {
        let first = exchanges(&module, name, &plan, 0);
        for tensor in 1..plan.mesh.tp {
            let other = exchanges(&module, name, &plan, tensor);
            assert_eq!(first, other, "{case} {}: `@{name}` on rank {tensor}", plan.mesh);
        }
        count += first.len();
    }
    let compiled = compile(&module, "loss", &plan);
    let compiled = compiled.unwrap_or_else(|d| panic!("{case}: {}", render(&d, None)));
    let found = check(&compiled.programs, &compiled.kernels, &plan);
    assert!(found.is_empty(), "{case} {}: {}", plan.mesh, text(&found));
    Some(count)
}

/// One case of each family, drawn as the mesh is.
#[test]
fn uneven_ranks_exchange_in_one_order() {
    let seed: u64 = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    println!("SEED={seed}");
    let (names, mut plans, mut exchanges) = (names(), 0, 0);
    for (at, name) in names.iter().enumerate() {
        let draw =
            |of: u64, below: usize| mix(seed << 32 ^ mix((at as u64) << 8 | of)) as usize % below;
        // One of its family's cases, but for the one that was refused.
        let cases = names.iter().filter(|other| family(other) == family(name)).count();
        if draw(0, cases) != 0 && name != "gemma3_text-scaled" {
            continue;
        }
        for first in 0..2 {
            let [pp, dp, tp] = MESHES[(draw(1, MESHES.len()) + 3 * first) % MESHES.len()];
            let wanted = Wanted {
                mesh: Mesh { pp, dp, tp, ..Mesh::ONE },
                microbatch_size: 1 + draw(2, 2),
                microbatch_count: 2,
                keep: if draw(3, 2) == 0 { Keep::Full } else { Keep::None },
                sequence: draw(4, 2) == 0,
            };
            let found = exchanged(name, wanted, LINKS[draw(5, LINKS.len())]);
            plans += usize::from(found.is_some());
            exchanges += found.unwrap_or(0);
        }
    }
    println!("{plans} plans, {exchanges} exchanges");
    assert!(plans > 20 && exchanges > 20 * plans, "{plans} plans, {exchanges} exchanges");
}
