//! Mistakes in programs of which states, parameters and activations lie elsewhere than on the
//! device.

use codegen::check::check;
use codegen::compile::{Compiled, compile};
use ir::plan::{Keep, Offload, Place, Zero};
use ir::precision::Precision;
use ir::program::{Buffer, BufferId, Contents, Program, Step};
use ir::{DType, Mesh, Plan};

use super::mistakes::{self, Plant, pick};
use super::{places_found, text};
use crate::mesh::gpt2;
use crate::model::{Wanted, plan, prepared_as};

const SEQ: usize = 10;

fn offloading(mesh: Mesh, stage: u8, microbatch_count: usize) -> (Plan, Compiled) {
    offloading_as(Precision::training(DType::BF16), mesh, stage, microbatch_count)
}

fn offloading_as(
    precision: Precision,
    mesh: Mesh,
    stage: u8,
    microbatch_count: usize,
) -> (Plan, Compiled) {
    let (_, module) = prepared_as(&gpt2(), SEQ, &precision);
    let (microbatch_size, keep, sequence) = (1, Keep::Full, false);
    let wanted = Wanted { mesh, microbatch_size, microbatch_count, keep, sequence };
    let own = plan(&module, SEQ, DType::F32, wanted).expect("it fits");
    // Parameters that are gathered after the update stay.
    let parameters = if matches!(stage, 1 | 2) { Place::Device } else { Place::Host };
    let offload = Offload { optimizer: Place::Disk, parameters, activations: Place::Host };
    let plan = Plan { precision, offload, zero: Zero { stage, shard: 0 }, ..own };
    let compiled = compile(&module, "loss", &plan).expect("it compiles");
    (plan, compiled)
}

/// Mistakes that only such programs can have, and how the code of each begins.
const OWN: [(&str, &str, Plant); 10] = [
    ("E21", "a copy from the device is left out", |c, site| {
        let places = moves(c, |p, from, _| is_on_device(p, from));
        drop_step(c, pick(&places, site))
    }),
    ("E21", "a copy to the device is left out", |c, site| {
        let places = moves(c, |p, _, to| is_on_device(p, to));
        drop_step(c, pick(&places, site))
    }),
    ("E2127", "no copy is awaited", drop_awaits),
    ("E2115", "states are copied back before they are updated", |c, site| {
        let updates = |program: &Program, steps: &[Step], at: usize| {
            let Step::Call { routine, .. } = steps[at] else { return false };
            let is_update = program.routines[routine].name == "update";
            is_update && matches!(steps.get(at + 1), Some(Step::Move { .. }))
        };
        let Some((program, at)) = pick(&steps_where(c, updates), site) else { return false };
        c.programs[program].steps.swap(at, at + 1);
        true
    }),
    ("E2115", "a state is copied to the place of another", store_elsewhere),
    ("E2115", "an update is made twice", |c, site| {
        let updates = |program: &Program, steps: &[Step], at: usize| {
            let Step::Call { routine, .. } = steps[at] else { return false };
            program.routines[routine].name == "update"
        };
        let Some((program, at)) = pick(&steps_where(c, updates), site) else { return false };
        let steps = &mut c.programs[program].steps;
        steps.insert(at, steps[at].clone());
        true
    }),
    ("E21", "a fetch comes from another value", fetch_another),
    ("E2115", "a call fetches the weights of another", fetch_other_weights),
    ("E2126", "a call uses what is not on the device", |c, site| {
        let fetches = moves(c, |p, _, to| is_on_device(p, to));
        let Some((program, at)) = pick(&fetches, site) else { return false };
        let steps = &mut c.programs[program].steps;
        let Some((from, to)) = ends(&steps[at]) else { return false };
        let mut slots = steps[at..].iter_mut().filter_map(|step| {
            if let Step::Call { slots, .. } = step { Some(slots) } else { None }
        });
        let slot = slots.find_map(|slots| slots.iter_mut().find(|slot| **slot == to));
        slot.map(|slot| *slot = from).is_some()
    }),
    ("E2126", "a copy is made within the device", |c, site| {
        let fetches = moves(c, |p, _, to| is_on_device(p, to));
        let Some((program, at)) = pick(&fetches, site) else { return false };
        let steps = &mut c.programs[program].steps;
        let Some((_, to)) = ends(&steps[at]) else { return false };
        steps[at] = Step::Move { from: to, to };
        true
    }),
];

/// Leaves out all that a program awaits.
fn drop_awaits(c: &mut Compiled, site: usize) -> bool {
    let Some(program) = c.programs.get_mut(site) else { return false };
    program.steps.retain(|step| !matches!(step, Step::Await { .. }));
    true
}

/// Copies a state to another one's place of equal length.
fn store_elsewhere(c: &mut Compiled, site: usize) -> bool {
    let stores = moves(c, |p, from, to| is_on_device(p, from) && is_view(p, to));
    let Some((program, at)) = pick(&stores, site) else { return false };
    let own = &mut c.programs[program];
    let Some((from, to)) = ends(&own.steps[at]) else { return false };
    let size = |id: BufferId| size_of(own, id);
    let others = own.steps.iter().filter_map(ends).map(|(_, other)| other);
    let mut others = others.filter(|other| is_view(own, *other) && size(*other) == size(to));
    let Some(other) = others.find(|other| *other != to) else { return false };
    own.steps[at] = Step::Move { from, to: other };
    true
}

/// Fetches another value of equal length that the same pass has stored.
fn fetch_another(c: &mut Compiled, site: usize) -> bool {
    let fetches = moves(c, |p, from, to| is_on_device(p, to) && !is_view(p, from));
    let Some((program, at)) = pick(&fetches, site) else { return false };
    let own = &mut c.programs[program];
    let Some((from, to)) = ends(&own.steps[at]) else { return false };
    let size = |id: BufferId| own.buffers[id.0 as usize].sizes.clone();
    let others = own.steps[at + 1..].iter().filter_map(ends);
    let mut others = others.filter(|(other, home)| {
        is_on_device(own, *home) && !is_view(own, *other) && size(*other) == size(from)
    });
    let Some((other, _)) = others.find(|(other, home)| *other != from && *home != to) else {
        return false;
    };
    own.steps[at] = Step::Move { from: other, to };
    true
}

/// Fetches as many weights of another call.
fn fetch_other_weights(c: &mut Compiled, site: usize) -> bool {
    let fetches = moves(c, |p, _, to| is_on_device(p, to) && is_view(p, to));
    let other = |&(program, at): &(usize, usize)| {
        let own = &c.programs[program];
        let (from, to) = ends(&own.steps[at])?;
        let mut others = own.steps.iter().filter_map(ends).map(|(other, _)| other);
        let other = others.find(|other| {
            let is_param = is_view(own, *other) && own.buffers[other.0 as usize].name == "params";
            is_param && *other != from && size_of(own, *other) == size_of(own, from)
        });
        Some((program, at, Step::Move { from: other?, to }))
    };
    let places: Vec<(usize, usize, Step)> = fetches.iter().filter_map(other).collect();
    let Some((program, at, step)) = places.get(site).cloned() else { return false };
    c.programs[program].steps[at] = step;
    true
}

/// From where to where a step copies.
fn ends(step: &Step) -> Option<(BufferId, BufferId)> {
    if let Step::Move { from, to } = step { Some((*from, *to)) } else { None }
}

fn is_on_device(program: &Program, id: BufferId) -> bool {
    program.place_of(&program.buffers[id.0 as usize]) == Some(Place::Device)
}

fn size_of(program: &Program, id: BufferId) -> (u64, DType) {
    let Buffer { bytes, dtype, .. } = program.buffers[id.0 as usize];
    (bytes, dtype)
}

fn is_view(program: &Program, id: BufferId) -> bool {
    program.buffers[id.0 as usize].contents == Contents::View
}

fn steps_where(
    c: &Compiled,
    wanted: impl Fn(&Program, &[Step], usize) -> bool,
) -> Vec<(usize, usize)> {
    let programs = c.programs.iter().enumerate();
    let of = |(at, program): (usize, &Program)| {
        let steps = (0..program.steps.len()).filter(|step| wanted(program, &program.steps, *step));
        steps.map(|step| (at, step)).collect::<Vec<_>>()
    };
    programs.flat_map(of).collect()
}

/// The copies whose ends are wanted.
fn moves(c: &Compiled, wanted: fn(&Program, BufferId, BufferId) -> bool) -> Vec<(usize, usize)> {
    steps_where(c, |program, steps, at| {
        ends(&steps[at]).is_some_and(|(from, to)| wanted(program, from, to))
    })
}

fn drop_step(c: &mut Compiled, place: Option<(usize, usize)>) -> bool {
    let Some((program, at)) = place else { return false };
    c.programs[program].steps.remove(at);
    true
}

#[test]
fn programs_that_offload_pass_and_mistakes_in_them_are_found() {
    let mut own = [0; OWN.len()];
    let meshes = [(1, 1, 0, 1), (2, 1, 0, 3), (1, 2, 1, 2), (2, 2, 3, 2)];
    for (pp, dp, stage, microbatches) in meshes {
        let mesh = Mesh { pp, dp, ..Mesh::ONE };
        let (plan, sound) = offloading(mesh, stage, microbatches);
        let found = check(&sound.programs, &sound.kernels, &plan);
        assert!(found.is_empty(), "{mesh} zero={stage}: {}", text(&found));
        for program in &sound.programs {
            let printed = program.to_string();
            assert_eq!(ir::text::parse_program("text", &printed).as_ref(), Ok(program));
        }
        for (name, plant) in mistakes::ALL {
            places_found(&sound, &plan, &format!("{mesh} zero={stage}: {name}"), "E", plant);
        }
        for (at, (code, name, plant)) in OWN.iter().enumerate() {
            let name = format!("{mesh} zero={stage}: {name}");
            own[at] += places_found(&sound, &plan, &name, code, *plant);
        }
    }
    assert!(own.iter().all(|places| *places > 0), "{own:?}");
}

/// States of the same elements and type are not the weights that a call reads.
#[test]
fn states_that_are_fetched_as_weights_are_found() {
    let precision = Precision::uniform(DType::F32);
    let (plan, sound) = offloading_as(precision, Mesh::ONE, 0, 2);
    let found = check(&sound.programs, &sound.kernels, &plan);
    assert!(found.is_empty(), "{}", text(&found));
    let program = &sound.programs[0];
    // What a call fetches, and a view of as many numbers that is no parameter.
    let fetched = |step: &Step| {
        let (from, to) = ends(step)?;
        let name = |id: BufferId| program.buffers[id.0 as usize].name.as_str();
        (name(from) == "params" && name(to) == "gathered").then_some((from, to))
    };
    let fetches = program.steps.iter().enumerate();
    let mut fetches = fetches.filter_map(|(at, step)| Some((at, fetched(step)?)));
    let (at, (from, to)) = fetches.next_back().expect("calls fetch weights");
    // States lie in the same order in a block of their own, here on a disk.
    let mut broken = sound.clone();
    let own = &mut broken.programs[0];
    let state = own.buffers.iter().find(|b| matches!(b.contents, Contents::State { .. }));
    let param = own.buffers.iter().find(|b| matches!(b.contents, Contents::Param(_)));
    let apart = state.expect("a state").offset - param.expect("a parameter").offset;
    let mut view = own.buffers[from.0 as usize].clone();
    view.offset += apart;
    own.buffers.push(view);
    let from = BufferId(own.buffers.len() as u32 - 1);
    own.steps[at] = Step::Move { from, to };
    let found = check(&broken.programs, &broken.kernels, &plan);
    assert!(found.iter().any(|one| one.code == "E2115"), "{}", text(&found));
}
