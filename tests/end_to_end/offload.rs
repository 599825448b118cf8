//! States of the optimizer, parameters and activations that lie in the memory of the host or on a
//! disk: programs compute the same bits with them as without, in less memory.

use codegen::executable::check_executable;
use ir::plan::{Keep, Offload, Place, Schedule};
use ir::precision::Precision;
use ir::program::Step;
use ir::{DType, Mesh, Module, Plan};

use crate::mesh::{Weights, gpt2, llama, random_weights};
use crate::model::prepared_as;
use crate::zero::{SEQ, distance, plans, schedules, trained};

/// Everything that can lie elsewhere, and where.
const AWAY: [Offload; 4] = [
    Offload { optimizer: Place::Device, parameters: Place::Device, activations: Place::Host },
    Offload { optimizer: Place::Disk, parameters: Place::Device, activations: Place::Device },
    Offload { optimizer: Place::Device, parameters: Place::Host, activations: Place::Device },
    Offload { optimizer: Place::Host, parameters: Place::Disk, activations: Place::Disk },
];

fn with_keep(mut plan: Plan, keep: Keep) -> Plan {
    plan.functions.values_mut().for_each(|function| function.keep = keep);
    plan
}

/// Offloaded or not, each bit is the same.
fn check(module: &Module, weights: &Weights, plan: &Plan) {
    let expected = trained(module, plan, weights, 0.5);
    for offload in AWAY {
        let away = Plan { offload, ..plan.clone() };
        if check_executable(&away).is_err() {
            // Weights are gathered after updates that ranks share.
            assert!(offload.parameters != Place::Device && matches!(plan.zero.stage, 1 | 2));
            continue;
        }
        let found = trained(module, &away, weights, 0.5);
        let distance = distance(&expected, &found);
        let Plan { mesh, zero, schedule, precision, .. } = plan;
        let schedule = schedule.name();
        assert_eq!(distance, 0.0, "{mesh:?} {zero:?} {schedule} {precision} {offload:?}");
    }
}

#[test]
fn what_is_offloaded_has_the_same_bits() {
    let mixed = Precision::training(DType::BF16);
    let coded = Precision { states: DType::F8E4M3, ..mixed };
    for precision in [Precision::uniform(DType::F64), mixed, coded] {
        let (model, module) = prepared_as(&llama(), SEQ, &precision);
        let weights = random_weights(&model, 21);
        for mesh in [Mesh::ONE, Mesh { dp: 2, tp: 2, ..Mesh::ONE }] {
            let (whole, shared) = plans(&module, &precision, mesh);
            let keep = if mesh.dp > 1 { Keep::Full } else { Keep::None };
            check(&module, &weights, &with_keep(whole, keep));
            if mesh.dp > 1 {
                shared.iter().for_each(|plan| check(&module, &weights, plan));
            }
        }
    }
}

#[test]
fn pipelines_offload_what_is_in_flight() {
    let precision = Precision::uniform(DType::F32);
    let (model, module) = prepared_as(&gpt2(), SEQ, &precision);
    let weights = random_weights(&model, 22);
    for mesh in [Mesh { pp: 2, ..Mesh::ONE }, Mesh { pp: 3, dp: 2, ..Mesh::ONE }] {
        let (whole, [shared, ..]) = plans(&module, &precision, mesh);
        let gpipe = Plan { schedule: Schedule::GPipe, ..whole.clone() };
        for plan in schedules(whole).into_iter().chain([gpipe, shared]) {
            check(&module, &weights, &plan);
        }
    }
}

/// What is elsewhere takes no memory of the device, but for what is being copied.
#[test]
fn arenas_are_smaller_by_what_is_elsewhere() {
    let precision = Precision::training(DType::BF16);
    let (_, module) = prepared_as(&llama(), SEQ, &precision);
    let (whole, _) = plans(&module, &precision, Mesh::ONE);
    let program = |plan: &Plan| {
        let compiled = codegen::compile::compile(&module, "loss", plan).expect("it compiles");
        compiled.programs.into_iter().next().expect("one rank has a program")
    };
    let on_device = program(&whole);
    let away = |offload: Offload| program(&Plan { offload, ..whole.clone() });
    let states: u64 = {
        let lasts = |b: &&ir::program::Buffer| {
            use ir::program::Contents;
            matches!(b.contents, Contents::State { .. } | Contents::Master(_))
        };
        on_device.buffers.iter().filter(lasts).map(|b| b.bytes).sum()
    };
    let offload = Offload { optimizer: Place::Disk, ..Offload::default() };
    let optimizer = away(offload);
    assert!(optimizer.disk_bytes >= states && optimizer.host_bytes == 0);
    assert!(optimizer.arena_bytes <= on_device.arena_bytes - states / 2);
    let offload = Offload { activations: Place::Host, ..Offload::default() };
    let activations = away(offload);
    let moved = |step: &&Step| matches!(step, Step::Move { .. });
    assert!(activations.host_bytes > 0 && activations.steps.iter().any(|step| moved(&step)));
    assert!(activations.arena_bytes < on_device.arena_bytes);
    assert!(activations.evaluate.iter().all(|step| !moved(&step)));
    let parameters = away(Offload { parameters: Place::Disk, ..Offload::default() });
    let params: u64 = {
        let lasts =
            |b: &&ir::program::Buffer| matches!(b.contents, ir::program::Contents::Param(_));
        on_device.buffers.iter().filter(lasts).map(|b| b.bytes).sum()
    };
    assert!(parameters.disk_bytes >= params);
    assert!(parameters.arena_bytes < on_device.arena_bytes - params / 4);
    assert!(parameters.evaluate.iter().any(|step| moved(&step)));
}
