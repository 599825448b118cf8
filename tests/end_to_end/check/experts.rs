//! Mistakes in programs of ranks that share experts.

use codegen::check::check;
use codegen::compile::{Compiled, compile};
use ir::plan::{Keep, Zero};
use ir::program::{Exchange, Group, Instruction, Ref, Routed, Step};
use ir::{Axis, DType, ExpertParallel, Mesh, Plan};
use planner::link::Link;

use super::mistakes::{self, Plant, instructions_where, pick};
use super::{places_found, text};
use crate::model::{Wanted, mixtral, plan_sharing, prepared};

const SEQ: usize = 10;

/// Eight data-parallel ranks, of which two share experts, on one stage or two.
fn sharing(pp: usize, zero: Zero, microbatch_count: usize) -> (Plan, Compiled) {
    let (_, module) = prepared(&mixtral(4, 2), SEQ, DType::F32, 0.1);
    let mesh = Mesh { pp, dp: 8, ..Mesh::ONE };
    let (microbatch_size, keep, sequence) = (1, Keep::Full, false);
    let wanted = Wanted { mesh, microbatch_size, microbatch_count, keep, sequence };
    let link = Link { latency_s: 1e-6, bandwidth_bytes_per_s: 1e9 };
    let plan = plan_sharing(&module, (SEQ, DType::F32), wanted, (link, ExpertParallel::along(2)));
    let plan = plan.expect("it fits");
    let plan = Plan { zero, ..plan };
    let compiled = compile(&module, "loss", &plan).expect("it compiles");
    (plan, compiled)
}

/// Mistakes that only such programs can have, and the code that finds each.
const OWN: [(&str, &str, Plant); 11] = [
    ("E2116", "gradients of experts are summed over all ranks", |c, site| {
        regroup(c, site, Group::Copies(2), Group::Axis(Axis::Dp))
    }),
    ("E2116", "gradients of experts are summed over some of their copies", |c, site| {
        regroup(c, site, Group::Copies(2), Group::Copies(4))
    }),
    ("E2116", "gradients of other weights are summed over some ranks", |c, site| {
        regroup(c, site, Group::Axis(Axis::Dp), Group::Copies(2))
    }),
    ("E2124", "experts are said to be whole", |c, site| {
        let weights = c.programs.iter_mut().flat_map(|program| &mut program.weights);
        let weight = weights.filter(|weight| weight.experts.is_some()).nth(site);
        weight.is_some_and(|weight| weight.experts.take().is_some())
    }),
    ("E2122", "squares of experts are summed after those of others", sum_late),
    ("E2108", "ranks exchange other pieces", |c, site| {
        let is_it = |i: &Instruction| {
            let Instruction::Collective { exchange, .. } = i else { return false };
            matches!(exchange, Exchange::AllToAll { .. })
        };
        let Some((program, routine, at)) = pick(&instructions_where(c, is_it), site) else {
            return false;
        };
        let instruction = &mut c.programs[program].routines[routine].instructions[at];
        if let Instruction::Collective { exchange, .. } = instruction {
            *exchange = Exchange::AllToAll { pieces: 4 };
        }
        true
    }),
    ("E2108", "tokens are routed without gates", |c, site| {
        route_else(c, site, |_, gates| *gates = None)
    }),
    ("E2108", "fewer tokens are routed than ranks have", |c, site| {
        route_else(c, site, |routed, _| routed.rows -= 1)
    }),
    ("E21", "pieces of experts are summed over other ranks", |c, site| {
        exchange_among(c, site, Group::Strided { count: 2, stride: 2 }, Group::Shards(2))
    }),
    ("E2116", "copies of experts are not summed", |c, site| {
        regroup(c, site, Group::Copies(4), Group::Strided { count: 2, stride: 2 })
    }),
    ("E21", "squares of experts are not summed", |c, site| {
        regroup(c, site, Group::Shards(2), Group::Copies(2))
    }),
];

/// Lets sums be over another group.
fn regroup(c: &mut Compiled, site: usize, from: Group, to: Group) -> bool {
    let is_it = |i: &Instruction| {
        let Instruction::Collective { exchange, group, .. } = i else { return false };
        matches!(exchange, Exchange::AllReduce(_)) && *group == from
    };
    let Some((program, routine, at)) = pick(&instructions_where(c, is_it), site) else {
        return false;
    };
    let instruction = &mut c.programs[program].routines[routine].instructions[at];
    if let Instruction::Collective { group, .. } = instruction {
        *group = to;
    }
    true
}

/// Lets pieces be scattered among another group.
fn exchange_among(c: &mut Compiled, site: usize, from: Group, to: Group) -> bool {
    let is_it = |i: &Instruction| {
        let Instruction::Collective { exchange, group, .. } = i else { return false };
        matches!(exchange, Exchange::ReduceScatter { .. }) && *group == from
    };
    let Some((program, routine, at)) = pick(&instructions_where(c, is_it), site) else {
        return false;
    };
    let instruction = &mut c.programs[program].routines[routine].instructions[at];
    if let Instruction::Collective { group, .. } = instruction {
        *group = to;
    }
    true
}

/// Changes how tokens are dispatched or combined.
fn route_else(
    c: &mut Compiled,
    site: usize,
    change: impl Fn(&mut Routed, &mut Option<Ref>),
) -> bool {
    let is_it = |i: &Instruction| {
        let Instruction::Collective { exchange, .. } = i else { return false };
        matches!(exchange, Exchange::Dispatch(_) | Exchange::Combine(_))
    };
    let Some((program, routine, at)) = pick(&instructions_where(c, is_it), site) else {
        return false;
    };
    let instruction = &mut c.programs[program].routines[routine].instructions[at];
    if let Instruction::Collective {
        exchange: Exchange::Dispatch(routed) | Exchange::Combine(routed),
        gates,
        ..
    } = instruction
    {
        change(routed, gates);
    }
    true
}

/// Lets the sum of the squares of experts change places with what follows it.
fn sum_late(c: &mut Compiled, site: usize) -> bool {
    let of_shards = |i: &Instruction| {
        matches!(i, Instruction::Collective { exchange: Exchange::AllReduce(_), group, .. }
            if *group == Group::Shards(2))
    };
    let Some((program, routine, _)) = pick(&instructions_where(c, of_shards), site) else {
        return false;
    };
    let steps = &mut c.programs[program].steps;
    let is_sum = |step: &Step| matches!(step, Step::Call { routine: its, .. } if *its == routine);
    let Some(at) = steps.iter().position(is_sum) else { return false };
    steps.swap(at, at + 1);
    true
}

#[test]
fn programs_that_share_experts_pass_and_mistakes_in_them_are_found() {
    let mut own = [0; OWN.len()];
    for (pp, stage, shard, microbatches) in [
        (1, 0, 0, 2),
        (2, 0, 0, 1),
        (1, 1, 0, 2),
        (2, 2, 0, 2),
        (1, 3, 0, 1),
        (1, 1, 4, 1),
        (1, 2, 4, 2),
    ] {
        let (plan, sound) = sharing(pp, Zero { stage, shard }, microbatches);
        let found = check(&sound.programs, &sound.kernels, &plan);
        assert!(found.is_empty(), "pp={pp} zero={stage}: {}", text(&found));
        for program in &sound.programs {
            let printed = program.to_string();
            assert_eq!(ir::text::parse_program("text", &printed).as_ref(), Ok(program));
        }
        for (name, plant) in mistakes::ALL {
            places_found(&sound, &plan, &format!("pp={pp} zero={stage}: {name}"), "E", plant);
        }
        for (at, (code, name, plant)) in OWN.iter().enumerate() {
            // Of pieces no rank sums squares over some of the others.
            let name = format!("pp={pp} zero={stage}: {name}");
            own[at] += places_found(&sound, &plan, &name, code, *plant);
        }
    }
    assert!(own.iter().all(|places| *places > 0), "{own:?}");
}
