//! Layers with gradients that depend on no data: programs of them are sound, compute what one
//! rank does, and lose no term unseen.

use codegen::check::check;
use codegen::compile::{Compiled, compile};
use codegen::prepare::prepare_training;
use ir::diagnostic::render;
use ir::plan::Keep;
use ir::text::parse_module;
use ir::{DType, Mesh, Plan};

use super::{mistakes, places_found, text};
use crate::cli::Scratch;
use crate::mesh::meshes;
use crate::model::{Wanted, plan};

/// The loss is linear in what its layer takes.
const LINEAR: &str = "module linear
  func @mid(%tokens: i32[B, 4], %w: f32[16, 4]) {
    %x: f32[B, 4] = cast %tokens
    %y: f32[B, 16] = contract bi,oi->bo %x %w
    %z: f32[B] = reduce sum dims=[1] %y
    return %z
  }
  func @top(%x: f32[B], %labels: i32[B, 4]) {
    %ones: f32[B] = constant 1.0
    %sum: f32[] = reduce sum dims=[0] %x
    %count: f32[] = reduce sum dims=[0] %ones
    return %sum %count
  }
  func @loss(%w: f32[16, 4], %tokens: i32[B, 4], %labels: i32[B, 4]) {
    %m: f32[B] = call @mid %tokens %w
    %loss: f32[], %loss.count: f32[] = call @top %m %labels
    return %loss %loss.count
  }
";

/// Nothing reads `s`, and the gradient of `t` is the number of samples.
const UNREAD: &str = "module unread
  func @mid(%tokens: i32[B, 4], %w: f32[16, 4], %s: f32[4]) {
    %x: f32[B, 4] = cast %tokens
    %y: f32[B, 16] = contract bi,oi->bo %x %w
    return %y
  }
  func @shift(%x: f32[B, 16], %t: f32[16]) {
    %t.b: f32[B, 16] = broadcast new=[0] %t
    %y: f32[B, 16] = add %x %t.b
    return %y
  }
  func @top(%x: f32[B, 16], %labels: i32[B, 4]) {
    %ones: f32[B] = constant 1.0
    %sum: f32[] = reduce sum dims=[0, 1] %x
    %count: f32[] = reduce sum dims=[0] %ones
    return %sum %count
  }
  func @loss(%w: f32[16, 4], %s: f32[4], %t: f32[16], %tokens: i32[B, 4], %labels: i32[B, 4]) {
    %m: f32[B, 16] = call @mid %tokens %w %s
    %n: f32[B, 16] = call @shift %m %t
    %loss: f32[], %loss.count: f32[] = call @top %n %labels
    return %loss %loss.count
  }
";

/// No layer before the loss reads data: both gradients of each call are numbers.
const BLIND: &str = "module blind
  func @mid(%w: f32[16], %tokens: i32[B, 4]) {
    %y: f32[B, 16] = broadcast new=[0] %w
    return %y
  }
  func @top(%x: f32[B, 16], %labels: i32[B, 4]) {
    %ones: f32[B] = constant 1.0
    %sum: f32[] = reduce sum dims=[0, 1] %x
    %count: f32[] = reduce sum dims=[0] %ones
    return %sum %count
  }
  func @loss(%w: f32[16], %tokens: i32[B, 4], %labels: i32[B, 4]) {
    %m: f32[B, 16] = call @mid %w %tokens
    %loss: f32[], %loss.count: f32[] = call @top %m %labels
    return %loss %loss.count
  }
";

/// Two weights have one gradient, which cannot have the names of both.
const SHARED: &str = "module shared
  func @mid(%tokens: i32[B, 4], %w: f32[16, 4], %s: f32[16, 4]) {
    %x: f32[B, 4] = cast %tokens
    %zero: f32[16, 4] = constant -0.0
    %t: f32[16, 4] = add %s %zero
    %u: f32[16, 4] = add %w %t
    %y: f32[B, 16] = contract bi,oi->bo %x %u
    return %y
  }
  func @top(%x: f32[B, 16], %labels: i32[B, 4]) {
    %ones: f32[B] = constant 1.0
    %z: f32[B, 16] = sin %x
    %sum: f32[] = reduce sum dims=[0, 1] %z
    %count: f32[] = reduce sum dims=[0] %ones
    return %sum %count
  }
  func @loss(%w: f32[16, 4], %s: f32[16, 4], %tokens: i32[B, 4], %labels: i32[B, 4]) {
    %m: f32[B, 16] = call @mid %tokens %w %s
    %loss: f32[], %loss.count: f32[] = call @top %m %labels
    return %loss %loss.count
  }
";

const ALL: [(&str, &str); 4] =
    [("linear", LINEAR), ("unread", UNREAD), ("blind", BLIND), ("shared", SHARED)];

/// A plan with its programs; none where the mesh does not fit the model.
fn compiled(name: &str, graph: &str, mesh: Mesh, count: usize) -> Option<(Plan, Compiled)> {
    let module = parse_module(name, graph).expect("it is a module");
    let module = prepare_training(module, "loss").expect("it is prepared");
    let (keep, sequence) = (Keep::Full, false);
    let wanted = Wanted { mesh, microbatch_size: 2, microbatch_count: count, keep, sequence };
    let plan = plan(&module, 4, DType::F32, wanted).ok()?;
    let compiled = compile(&module, "loss", &plan);
    Some((plan, compiled.unwrap_or_else(|d| panic!("{name} {mesh}: {}", render(&d, None)))))
}

#[test]
fn gradients_without_data_are_sound() {
    for (name, graph) in ALL {
        let mut checked = 0;
        for mesh in meshes(4) {
            for count in 1..=3 {
                let Some((plan, found)) = compiled(name, graph, mesh, count) else { continue };
                let found = check(&found.programs, &found.kernels, &plan);
                assert!(found.is_empty(), "{name} {mesh} of {count}:\n{}", text(&found));
                checked += 1;
            }
        }
        assert!(checked >= 9, "{name}: only {checked} plans fit");
        let scratch = Scratch::new(&format!("constants-{name}"));
        scratch.write("model.graph", graph);
        for ranks in [1, 2] {
            scratch.answer(&format!("verify model.graph --ranks {ranks} --gbs 4 --dtype f32"));
        }
    }
}

/// Terms that are numbers are counted as others are. A stage of its own would have a scale that
/// nothing reads.
#[test]
fn lost_terms_without_data_are_found() {
    let wanted = [
        "a call is left out",
        "a fill is left out",
        "a launch is left out",
        "a kernel overwrites a sum",
        "gradients are not reduced",
    ];
    let mut sites = [0; 5];
    for (name, graph) in ALL {
        for (mesh, count) in [((1, 2, 1), 3), ((1, 1, 1), 2), ((1, 1, 1), 1)] {
            let mesh = Mesh { pp: mesh.0, dp: mesh.1, tp: mesh.2, ..Mesh::ONE };
            let (plan, sound) = compiled(name, graph, mesh, count).expect("the mesh fits");
            for (at, wanted) in wanted.iter().enumerate() {
                let (_, plant) =
                    mistakes::ALL.iter().find(|(name, _)| name == wanted).expect("it is one");
                let what = format!("{name} {mesh} of {count}: {wanted}");
                sites[at] += places_found(&sound, &plan, &what, "E", *plant);
            }
        }
    }
    assert!(sites.iter().all(|sites| *sites > 0), "{sites:?}");
}
