//! What each pass makes of one small model, as text that a change of a pass shows.
//!
//! `golden/passes` has a file for each: the module after each pass of preparation that changes it,
//! the plan, the local functions of a layer, the kernels into which they are fused, and the program
//! with its routines and its arena.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use codegen::compile::{Compiled, compile};
use codegen::partition::Place;
use codegen::prepare::{Preparation, Purpose, prepare};
use codegen::routines::{GradientSums, LayerDecisions, Layers};
use ir::plan::{Keep, Zero};
use ir::precision::Precision;
use ir::rewrite::saturate::Selection;
use ir::text::parse_module;
use ir::{DType, Mesh, Module, Plan};

use crate::model::{Wanted, plan};

/// The texts by name, in the order of the passes.
type Texts = Vec<(String, String)>;

/// The module after each pass that changes it, and at the end.
fn prepared(texts: &mut Texts) -> Module {
    let module = parse_module("passes.graph", include_str!("passes.graph")).expect("it reads");
    let mut last = module.to_string();
    let after = &mut |pass: &'static str, module: &Module| {
        let text = module.to_string();
        if text != last {
            texts.push((format!("{}-{pass}", 1 + texts.len()), text.clone()));
            last = text;
        }
    };
    let (purpose, selection) = (Purpose::Training, Selection::for_models());
    let precision = Precision::uniform(DType::F32);
    let preparation = Preparation { purpose, selection, precision, after };
    prepare(module, "loss", preparation).expect("it is prepared").0
}

/// Two ranks that share each layer, two copies of them that share the update.
fn planned(module: &Module) -> Plan {
    let mesh = Mesh { dp: 2, tp: 2, ..Mesh::ONE };
    let (microbatch_size, microbatch_count, keep) = (1, 2, Keep::Full);
    let wanted = Wanted { mesh, microbatch_size, microbatch_count, keep, sequence: true };
    let plan = plan(module, 8, DType::F32, wanted).expect("the mesh fits");
    Plan { zero: Zero { stage: 1, shard: 0 }, ..plan }
}

/// The local functions of the layer on the first rank.
fn local_functions(module: &Module, plan: &Plan) -> String {
    let place = Place {
        sizes: [plan.mesh.dp, 1, 1, plan.mesh.tp],
        takes_tp: false,
        coordinates: [0; 4],
        microbatch_size: plan.microbatch_size,
        target: None,
    };
    let decisions = LayerDecisions::of(&plan.functions["layer"], 0);
    let sums = GradientSums { adds: &[false, true, true, true], rounded: &[None; 4] };
    let mut layers = Layers::new(module);
    let layer = layers.layer("layer", decisions, place, sums, false).expect("it compiles");
    format!("{}\n{}", layer.halves.forward, layer.halves.backward)
}

fn texts() -> Texts {
    let mut texts = Texts::new();
    let module = prepared(&mut texts);
    let plan = planned(&module);
    let Compiled { programs, kernels } = compile(&module, "loss", &plan).expect("it compiles");
    let mut add = |pass: &str, text: String| {
        texts.push((format!("{}-{pass}", 1 + texts.len()), text));
    };
    add("plan", plan.to_string());
    add("partition", local_functions(&module, &plan));
    let mut fused = String::new();
    for (number, kernel) in kernels.iter().enumerate() {
        writeln!(fused, "{number} {kernel}").expect("text is written");
    }
    add("fusion", fused);
    add("program", programs[0].to_string());
    let shared = Plan { zero: Zero { stage: 3, shard: 0 }, ..plan };
    let shared = compile(&module, "loss", &shared).expect("it compiles");
    add("program-of-zero-3", shared.programs[0].to_string());
    texts
}

#[test]
fn passes_make_what_they_made() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/passes");
    let is_updated = std::env::var_os("UPDATE_GOLDEN").is_some();
    let texts = texts();
    if is_updated {
        fs::remove_dir_all(&folder).ok();
        fs::create_dir_all(&folder).expect("the folder is made");
    }
    let mut differences = String::new();
    for (name, text) in &texts {
        let file = folder.join(format!("{name}.txt"));
        if is_updated {
            fs::write(&file, text).expect("a golden file is written");
            continue;
        }
        let there = fs::read_to_string(&file).unwrap_or_default();
        if there != *text {
            let at = there.lines().zip(text.lines()).take_while(|(a, b)| a == b).count();
            let line = |text: &str| text.lines().nth(at).unwrap_or("nothing").to_owned();
            let (then, now) = (line(&there), line(text));
            let number = at + 1;
            writeln!(differences, "{name}, line {number}:\n- {then}\n+ {now}").expect("it is text");
        }
    }
    let count = fs::read_dir(&folder).expect("golden files are there").count();
    assert_eq!(count, texts.len(), "UPDATE_GOLDEN=1 writes one for each text");
    assert!(differences.is_empty(), "UPDATE_GOLDEN=1 rewrites them\n{differences}");
}
