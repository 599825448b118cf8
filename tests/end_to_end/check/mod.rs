//! Compiled programs pass the checker, their text reads back, and planted mistakes are found.

mod constants;
mod experts;
mod mistakes;
mod offload;
mod order;

use codegen::check::check;
use codegen::compile::{Compiled, compile};
use gantline::generation::{Generator, Options};
use ir::diagnostic::render;
use ir::import::Description;
use ir::plan::{Keep, Zero};
use ir::program::Routine;
use ir::target::Arch;
use ir::text::parse_program;
use ir::{DType, Diagnostic, Mesh, Plan, Target};

use crate::mesh::{gpt2, llama, meshes};
use crate::model::{Wanted, plan, prepared};

/// A plan with its programs; none where the mesh does not fit the model.
pub(crate) fn compiled(
    description: &Description,
    dropout: f64,
    wanted: Wanted,
) -> Option<(Plan, Compiled)> {
    compiled_as(description, dropout, wanted, (Zero::default(), None))
}

/// The same, with what data-parallel ranks share, and for a target that is not this machine's.
fn compiled_as(
    description: &Description,
    dropout: f64,
    wanted: Wanted,
    (zero, target): (Zero, Option<Target>),
) -> Option<(Plan, Compiled)> {
    let (_, module) = prepared(description, 33, DType::F32, dropout);
    let own = plan(&module, 33, DType::F32, wanted).ok()?;
    let plan = Plan { zero, target: target.or(own.target), ..own };
    let compiled = compile(&module, "loss", &plan);
    Some((plan, compiled.unwrap_or_else(|d| panic!("{}", render(&d, None)))))
}

fn text(found: &[Diagnostic]) -> String {
    found.iter().map(|d| render(d, None)).collect()
}

#[test]
fn the_programs_of_every_mesh_pass_and_read_back() {
    let mut checked = 0;
    for description in [gpt2(), llama()] {
        for mesh in meshes(8) {
            for (keep, sequence) in [(Keep::Full, false), (Keep::None, true)] {
                let wanted = Wanted {
                    mesh,
                    microbatch_size: 1,
                    microbatch_count: 1 + mesh.ranks() % 5,
                    keep,
                    sequence: sequence && mesh.tp > 1,
                };
                let stage = if keep == Keep::None { 1 + mesh.ranks() as u8 % 3 } else { 0 };
                let zero = Zero { stage, shard: 0 };
                let target = (checked % 2 == 0).then_some(Target::Cuda(Arch::Sm80));
                let made = compiled_as(&description, 0.1, wanted, (zero, target));
                let Some((plan, compiled)) = made else { continue };
                let found = check(&compiled.programs, &compiled.kernels, &plan);
                assert!(found.is_empty(), "{} {mesh}:\n{}", description.name, text(&found));
                for program in &compiled.programs {
                    let printed = program.to_string();
                    assert_eq!(parse_program("text", &printed).as_ref(), Ok(program));
                }
                checked += 1;
            }
        }
    }
    assert!(checked > 100, "only {checked} plans fit");
}

/// Plants a mistake of each kind at each of many places, one at a time.
#[test]
fn every_planted_mistake_is_found() {
    let mut sites = [0; mistakes::ALL.len()];
    for (mesh, microbatch_count, stage) in [
        ((2, 2, 2), 3, 0),
        ((1, 2, 2), 1, 0),
        ((2, 2, 2), 2, 1),
        ((1, 3, 1), 1, 1),
        ((2, 2, 2), 2, 2),
        ((1, 3, 1), 1, 3),
        ((2, 2, 1), 2, 3),
    ] {
        let (pp, dp, tp) = mesh;
        let mesh = Mesh { pp, dp, tp, ..Mesh::ONE };
        let keep = Keep::Full;
        let wanted = Wanted { mesh, microbatch_size: 1, microbatch_count, keep, sequence: tp > 1 };
        let zero = Zero { stage, shard: 0 };
        let made = compiled_as(&gpt2(), 0.1, wanted, (zero, None));
        let (plan, sound) = made.expect("the mesh fits");
        for (at, (name, plant)) in mistakes::ALL.iter().enumerate() {
            sites[at] += places_found(&sound, &plan, &format!("{mesh}: {name}"), "E", *plant);
        }
    }
    for (sites, (name, _)) in sites.iter().zip(mistakes::ALL) {
        assert!(*sites > 0, "{name}: there is no place for it");
    }
}

/// Workspaces are where programs for GPUs say, and hold what their kernels need.
#[test]
fn mistakes_in_workspaces_are_found() {
    let mesh = Mesh { pp: 2, dp: 1, tp: 2, ..Mesh::ONE };
    let (microbatch_size, microbatch_count, keep) = (1, 2, Keep::Full);
    let wanted = Wanted { mesh, microbatch_size, microbatch_count, keep, sequence: true };
    let target = (Zero::default(), Some(Target::Cuda(Arch::Sm90a)));
    let (plan, sound) = compiled_as(&gpt2(), 0.1, wanted, target).expect("the mesh fits");
    for (code, name, plant) in mistakes::OF_WORKSPACES {
        let places = places_found(&sound, &plan, name, code, plant);
        assert!(places > 0, "{name}: there is no place for it");
    }
}

/// Each rule finds what it is there for, whatever others find.
#[test]
fn rules_find_what_they_are_for() {
    let mesh = Mesh { pp: 2, dp: 1, tp: 2, ..Mesh::ONE };
    let (microbatch_size, microbatch_count, keep) = (1, 2, Keep::Full);
    let wanted = Wanted { mesh, microbatch_size, microbatch_count, keep, sequence: true };
    let (plan, sound) = compiled(&gpt2(), 0.1, wanted).expect("the mesh fits");
    for (code, name, plant) in mistakes::OF_ONE_RULE {
        let places = places_found(&sound, &plan, name, code, plant);
        assert!(places > 0, "{name}: there is no place for it");
    }
}

/// Plants a mistake at each place that it fits, and counts them; each must be found, with a code
/// that starts in some way.
fn places_found(
    sound: &Compiled,
    plan: &Plan,
    name: &str,
    code: &str,
    plant: mistakes::Plant,
) -> usize {
    for site in 0..mistakes::SITES_MAX {
        let mut broken = sound.clone();
        if !plant(&mut broken, site) {
            return site;
        }
        let found = check(&broken.programs, &broken.kernels, plan);
        let changed = changed(sound, &broken);
        let is_found = found.iter().any(|diagnostic| diagnostic.code.starts_with(code));
        assert!(is_found, "{name}, place {site}: {} of {changed:?}", text(&found));
        assert!(found.len() <= 20, "{name}, place {site}");
    }
    mistakes::SITES_MAX
}

/// The buffers that lie elsewhere than in sound programs, and the routines that do something else:
/// the program, the name, the place.
fn changed(sound: &Compiled, broken: &Compiled) -> Vec<(usize, String, u64)> {
    let programs = sound.programs.iter().zip(&broken.programs).enumerate();
    let buffers = programs.flat_map(|(at, (a, b))| {
        let pairs = a.buffers.iter().zip(&b.buffers).filter(|(a, b)| a != b);
        let moved = pairs.map(move |(a, _)| (at, format!("{} {:?}", a.name, a.sizes), a.offset));
        let pairs = a.routines.iter().zip(&b.routines).enumerate().filter(|(_, (a, b))| a != b);
        let changed = move |(number, (a, b)): (usize, (&Routine, &Routine))| {
            let mut gone = a.instructions.iter().filter(|i| !b.instructions.contains(i));
            (at, format!("{} {:?}", a.name, gone.next()), number as u64)
        };
        moved.chain(pairs.map(changed))
    });
    buffers.collect()
}

/// The programs of a generator, and their plan.
fn for_inference(description: &Description, mesh: Mesh) -> Option<(Plan, Compiled)> {
    let options = Options {
        capacity: 20,
        sequences: 1,
        mesh,
        dtype: DType::F32,
        threads_per_rank: 1,
        target: None,
    };
    let mut generator = Generator::new(description, &options, &mut |_, _| Ok(())).ok()?;
    let plan = generator.plan().clone();
    let classes = generator.decoder().session().classes().clone();
    Some((plan, Compiled { programs: classes.programs, kernels: classes.kernels }))
}

#[test]
fn the_programs_of_inference_pass_and_read_back() {
    let mut checked = 0;
    for description in [gpt2(), llama()] {
        for mesh in meshes(4) {
            let Some((plan, compiled)) = for_inference(&description, mesh) else { continue };
            let found = check(&compiled.programs, &compiled.kernels, &plan);
            assert!(found.is_empty(), "{} {mesh}:\n{}", description.name, text(&found));
            for program in &compiled.programs {
                assert_eq!(program.entries.len(), 3, "entries for 1, 8 and 16 tokens");
                let printed = program.to_string();
                assert_eq!(parse_program("text", &printed).as_ref(), Ok(program));
            }
            checked += 1;
        }
    }
    assert!(checked > 10, "only {checked} meshes fit");
}

#[test]
fn mistakes_in_inference_are_found() {
    let mesh = Mesh { pp: 2, dp: 1, tp: 2, ..Mesh::ONE };
    let (plan, sound) = for_inference(&llama(), mesh).expect("the mesh fits");
    for (name, plant) in mistakes::OF_INFERENCE {
        let places = places_found(&sound, &plan, name, "E", plant);
        assert!(places > 0, "{name}: there is no place for it");
    }
}
