//! Frozen weights and adapters: against peft, against the same model without frozen weights, and
//! through the command line.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use codegen::prepare::prepare_training;
use ir::import::{Model, Weight, preset};
use ir::lora::{Adapter, Lora, adapt};
use ir::plan::Keep;
use ir::program::Contents;
use ir::{DType, Mesh, Module, Plan};
use planner::footprint::Footprint;
use runtime::execute::{Batch, Part, Scalars, Session, Values};
use runtime::load::{Named, collect_weights, join_weights, load_weights, read_weight};
use runtime::weights::Weights;

use crate::model::{Wanted, plan, session};
use crate::reference::Case;
use crate::scratch::{Scratch, text};

/// A plan for GPUs names its adapters: it is scored and explained with them, and refused beside
/// others.
#[test]
fn plans_for_gpus_name_their_adapters() {
    let scratch = Scratch::new("lora-gpus");
    let asked = "llama-3.2-1b --cluster h100 --devices 8 --gbs 32 --seq 1024";
    let lora = "rank=8,alpha=16,targets=q,v";
    let answer = scratch.json(&format!("plan {asked} --lora {lora} -o a.plan --json"));
    assert_eq!(answer["memory"]["from"], "compiled", "{}", answer["memory"]);
    let text = std::fs::read_to_string(scratch.0.join("a.plan")).expect("a plan");
    assert!(text.contains(&format!("\n  lora {lora}\n")), "{text}");
    let score = "score llama-3.2-1b --cluster h100 --from a.plan";
    let scored = scratch.json(&format!("{score} --json"));
    assert_eq!(scored["step_time_s"], answer["step_time_s"]);
    assert_eq!(scored["memory"]["total_bytes"], answer["memory"]["total_bytes"]);
    let explain = "explain llama-3.2-1b --cluster h100 --plan a.plan";
    assert!(scratch.answer(explain).contains("adapters 851,968 parameters are trained"));
    scratch.answer("plan llama-3.2-1b --cluster h100 --devices 8 --gbs 32 --seq 1024 -o b.plan");
    for (line, code, said) in [
        (format!("{score} --lora rank=4"), 2, "E5006"),
        (format!("{explain} --lora rank=4"), 2, "E5006"),
        (format!("{} --lora {lora}", score.replace("a.plan", "b.plan")), 2, "no adapters"),
        (format!("plan {asked} --lora {lora},weights=nf4 -o c.plan"), 2, "in few bits"),
        ("export a.plan --to megatron".to_owned(), 6, "adapters"),
    ] {
        let output = scratch.run(&line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
        assert!(errors.contains(said), "{line}: {errors}");
    }
    scratch.answer("export a.plan --to megatron --lossy");
}

/// The cases of `tests/reference/lora.py`.
const CASES: [(&str, &str); 2] = [
    ("gpt2-tiny", "rank=4,alpha=6,targets=c_attn,c_proj,c_fc"),
    ("llama-tiny", "rank=3,alpha=16,targets=q_proj,v_proj,o_proj,down_proj"),
];

/// A model of `tests/reference` with adapters, and peft's values.
struct Adapted {
    case: Case,
    model: Model,
    module: Module,
    adapters: Vec<Adapter>,
    lora: Lora,
    base: Weights,
    expected: Weights,
}

impl Adapted {
    fn open((name, lora): (&'static str, &str), dtype: DType) -> Adapted {
        let case = Case::open(name);
        let options =
            ir::import::Options { seq: case.seq, dtype, dropout: Some(0.0), documents: false };
        let mut model = ir::import::import(&case.description(), &options).expect("it is imported");
        let lora: Lora = lora.parse().expect("it says what is adapted");
        let adapters = adapt(&mut model, &lora).expect("there are such weights");
        assert_eq!(ir::verify::verify(&model.module), []);
        let module = prepare_training(model.module.clone(), "loss").expect("it is prepared");
        let expected = case.folder.with_file_name("lora").join(format!("{name}.safetensors"));
        let expected = Weights::open(&expected).expect("peft's values");
        let base = Weights::open(&case.folder).expect("the weights open");
        Adapted { case, model, module, adapters, lora, base, expected }
    }

    /// The weights of the base model, and those of the adapters.
    fn weights(&self) -> [Vec<Weight>; 2] {
        let is_new =
            |w: &Weight| self.adapters.iter().any(|one| [&one.a, &one.b].contains(&&w.name));
        let (new, own) = self.model.weights.iter().cloned().partition(is_new);
        [own, new]
    }

    /// A session with the weights of the base and peft's adapters.
    fn start(&self, dtype: DType, mesh: Mesh) -> Session {
        let wanted = Wanted {
            mesh,
            microbatch_size: 1,
            microbatch_count: 2 / mesh.dp,
            keep: Keep::Full,
            sequence: mesh.tp > 1,
        };
        let plan = plan(&self.module, self.case.seq, dtype, wanted).expect("a plan");
        let mut session = session(&self.module, &plan);
        let [own, new] = self.weights();
        load_weights(&mut session, &own, &self.base).expect("the weights fit");
        for weight in &new {
            let mut values = |block: &[std::ops::Range<usize>], dtype| {
                read_weight(weight, &self.expected, block, dtype)
            };
            let there = session.write_weight(&weight.name, Part::Weight, &mut values);
            assert_eq!(there, Ok(true), "{}", weight.name);
        }
        session
    }

    fn step(&self, session: &mut Session, rate: f64) -> f64 {
        let scalars = Scalars {
            step: 1,
            rate,
            correction1: 0.1,
            correction2: 0.001,
            clip: f64::INFINITY,
            ..Scalars::default()
        };
        let batch =
            Batch { tokens: &self.case.tokens, labels: &self.case.labels, ..Batch::default() };
        session.step(&batch, scalars).expect("the step runs").loss()
    }

    /// Holds a tensor against peft's; the error is relative to the largest entry.
    fn compare(&self, tensor: &str, ours: &[f64], scale: f64, bound: f64) {
        let theirs = self.expected.read_f64(tensor, None);
        let theirs = theirs.unwrap_or_else(|_| panic!("peft has no `{tensor}`"));
        assert_eq!(ours.len(), theirs.len(), "{tensor}");
        let largest = theirs.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        let off = ours.iter().zip(&theirs).map(|(a, b)| (a * scale - b).abs()).fold(0.0, f64::max);
        assert!(
            off <= bound * largest,
            "{} {tensor} is off by {:e}",
            self.case.name,
            off / largest
        );
    }
}

fn meshes() -> [Mesh; 4] {
    let mesh = |pp, dp, tp| Mesh { pp, dp, tp, ..Mesh::ONE };
    [mesh(1, 1, 1), mesh(1, 2, 1), mesh(1, 1, 2), mesh(2, 1, 1)]
}

/// Loss, the gradients of all adapters and the merged weights are peft's, on every mesh; and a step
/// changes the adapters alone.
#[test]
fn adapters_are_pefts() {
    for given in CASES {
        for (dtype, bound) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
            let adapted = Adapted::open(given, dtype);
            let [own, new] = adapted.weights();
            for mesh in meshes() {
                let mut session = adapted.start(dtype, mesh);
                let before = collect_weights(&session, &own, Part::Weight);
                let merged = merged(&adapted, &session);
                for Named { name, values } in &merged {
                    let has = adapted.expected.get(&format!("merged.{name}")).is_some();
                    let tensor = format!("merged.{name}");
                    if has {
                        adapted.compare(&tensor, &values.to_f64(), 1.0, bound);
                    }
                }
                let is_adapted =
                    |t: &&Named| adapted.expected.get(&format!("merged.{}", t.name)).is_some();
                let count = merged.iter().filter(is_adapted).count();
                let tensors: BTreeSet<&str> = new.iter().map(|w| w.source.name()).collect();
                assert_eq!(2 * count, tensors.len(), "all that peft adapts is adapted");
                let loss = adapted.step(&mut session, 1e-3);
                adapted.compare("loss", &[loss], 1.0, bound);
                let labels = adapted.case.labels.iter().filter(|l| **l >= 0).count() as f64;
                for tensor in collect_weights(&session, &new, Part::Grad) {
                    let name = format!("grad.{}", tensor.name);
                    adapted.compare(&name, &tensor.values.to_f64(), 1.0 / labels, bound);
                }
                assert!(own.iter().all(|w| session.read_grad(&w.name).is_none()));
                let after = collect_weights(&session, &own, Part::Weight);
                assert!(before == after, "{} {mesh}: a frozen weight changed", adapted.case.name);
                for tensor in collect_weights(&session, &new, Part::Weight) {
                    let theirs =
                        adapted.expected.read_f64(&tensor.name, None).expect("it is there");
                    assert_ne!(tensor.values.to_f64(), theirs, "{} is trained", tensor.name);
                }
            }
        }
    }
}

/// The tensors of the base with the adapters of a session merged.
fn merged(adapted: &Adapted, session: &Session) -> Vec<Named> {
    let numbers =
        |name: &str| session.read_weight(name, Part::Weight).expect("the session has it").to_f64();
    let [own, _] = adapted.weights();
    let mut values = |weight: &Weight| {
        let mut of = numbers(&weight.name);
        if let Some(adapter) = adapted.adapters.iter().find(|one| one.weight == weight.name) {
            let [a, b] = [&adapter.a, &adapter.b].map(|name| numbers(name));
            of = adapter.merge(&of, &a, &b, adapted.lora.scale());
        }
        let bytes = of.iter().flat_map(|x| x.to_le_bytes()).collect();
        Ok::<_, String>(Values { dtype: DType::F64, dims: weight.dims.clone(), bytes })
    };
    join_weights(&own, &mut values).expect("all are there")
}

/// A small model in which all weights but those that `is_trained` names are frozen.
fn frozen(is_trained: impl Fn(&str) -> bool) -> (Model, Module) {
    let description = preset("gpt2-mini").expect("a preset");
    let options =
        ir::import::Options { seq: 16, dtype: DType::F64, dropout: Some(0.0), documents: false };
    let mut model = ir::import::import(&description, &options).expect("it is imported");
    ir::freeze::freeze(&mut model.module, |name| !is_trained(name));
    let module = prepare_training(model.module.clone(), "loss").expect("it is prepared");
    (model, module)
}

fn planned(module: &Module, mesh: Mesh) -> Plan {
    let wanted = Wanted {
        mesh,
        microbatch_size: 1,
        microbatch_count: 2 / mesh.dp,
        keep: Keep::Full,
        sequence: false,
    };
    plan(module, 16, DType::F64, wanted).expect("the mesh fits")
}

/// Freezing changes neither the loss nor other gradients, and takes away exactly the gradients and
/// states of what is frozen, and work.
#[test]
fn freezing_takes_away_what_is_frozen_and_nothing_else() {
    let is_trained = |name: &str| name.contains("mlp") || name.starts_with("lnf");
    let (model, whole) = frozen(|_| true);
    let (_, part) = frozen(is_trained);
    for mesh in meshes() {
        let mut grads: Vec<BTreeMap<String, Vec<f64>>> = Vec::new();
        let mut losses = Vec::new();
        let mut held = Vec::new();
        for module in [&whole, &part] {
            let plan = planned(module, mesh);
            let compiled = codegen::compile::compile(module, "loss", &plan).expect("it compiles");
            let of = Footprint::of_all(&compiled.programs, &compiled.kernels, None, 1);
            held.push((compiled.programs, of));
            let mut session = session(module, &plan);
            session
                .init_weights(7, &|_, _| runtime::init::Init::Normal { std: 0.05, zero_row: None });
            let tokens: Vec<i32> = (0..32).map(|at| at * 7 % 61).collect();
            let batch = Batch { tokens: &tokens, labels: &tokens, ..Batch::default() };
            let report = session.step(&batch, Scalars::default()).expect("the step runs");
            losses.push(report.loss());
            let grad = |w: &Weight| Some((w.name.clone(), session.read_grad(&w.name)?.to_f64()));
            grads.push(model.weights.iter().filter_map(grad).collect());
        }
        assert!((losses[0] - losses[1]).abs() <= 1e-12 * losses[0], "{mesh}: {losses:?}");
        let names: Vec<&String> = grads[1].keys().collect();
        let wanted: Vec<&String> = grads[0].keys().filter(|name| is_trained(name)).collect();
        assert_eq!(names, wanted, "{mesh}");
        for (name, grad) in &grads[1] {
            let whole = &grads[0][name];
            let largest = whole.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
            let off = grad.iter().zip(whole).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off <= 1e-11 * largest, "{mesh}: the gradient of {name} is off by {off:e}");
        }
        let [(programs, whole), (_, part)] = &held[..] else { panic!("two modules") };
        for ((program, whole), part) in programs.iter().zip(whole).zip(part) {
            let mut of_frozen = 0;
            for buffer in &program.buffers {
                let Contents::Grad(weight) = buffer.contents else { continue };
                let is_frozen = !is_trained(&program.weights[weight].name);
                of_frozen += if is_frozen { buffer.bytes } else { 0 };
            }
            assert!(of_frozen > 0 && whole.params == part.params, "{mesh}");
            assert_eq!(whole.grads - part.grads, of_frozen, "{mesh}");
            assert_eq!(whole.states - part.states, 2 * of_frozen, "{mesh}");
            let [before, after] = [whole, part].map(|of| of.activations);
            // Another sharding of what is left may keep more.
            assert!(
                after <= before || mesh.tp > 1,
                "{mesh}: activations are {after} bytes, and were {before}"
            );
        }
    }
}

/// Adapters are trained, kept, resumed and merged: of the weights that a run begins with, the
/// targets alone change.
#[test]
fn adapters_are_trained_and_merged() {
    let scratch = Scratch::new("lora");
    scratch.write("text.txt", &text());
    let common = "--data text.txt --seq 16 --gbs 4 --val-every 0";
    scratch.answer(&format!("train gpt2-mini {common} --steps 2 --out first"));
    scratch.answer("export first --to hf -o base");
    let lora = "--lora rank=2,alpha=4,targets=q,v";
    scratch.answer(&format!("train base {common} {lora} --ranks 2 --steps 4 --lr 0.01 --out run"));
    // It goes on as it began, and not otherwise.
    scratch.answer("train --resume run --steps 6");
    let other = scratch.run("train --resume run --steps 8 --lora rank=3");
    assert_eq!(other.status.code(), Some(2));
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(said.contains("rank=2,alpha=4,targets=q,v"), "{said}");
    scratch.answer("export run --to hf -o merged");
    let [base, merged] =
        ["base", "merged"].map(|folder| Weights::open(&scratch.0.join(folder)).expect("weights"));
    for (name, tensor) in base.tensors() {
        let [before, after] =
            [&base, &merged].map(|files| files.read_f64(name, None).expect("the tensor reads"));
        if !name.ends_with("c_attn.weight") {
            assert_eq!(before, after, "{name}");
            continue;
        }
        // Columns of queries, keys and values.
        let width = tensor.dims[1] / 3;
        let mut has_changed = [false; 3];
        for (at, (before, after)) in before.iter().zip(&after).enumerate() {
            has_changed[at % tensor.dims[1] / width] |= before != after;
        }
        assert_eq!(has_changed, [true, false, true], "{name}");
    }
    // What the run generates is what the merged weights do.
    let text = |from: &str| {
        scratch.answer(&format!("generate {from} --prompt abc --max-tokens 16 --temperature 1"))
    };
    assert_eq!(text("run"), text("merged"));
    assert_ne!(text("run"), text("base"));
}

/// A plan says which adapters it is for: what is given the plan trains, compares and compiles them.
#[test]
fn plans_say_their_adapters() {
    let scratch = Scratch::new("lora-plans");
    scratch.write("text.txt", &text());
    let asked = "gpt2-mini --ranks 2 --seq 16 --gbs 4 --fix dp=2";
    scratch.answer(&format!("plan {asked} --lora rank=2,targets=v -o adapted.plan"));
    scratch.answer(&format!("plan {asked} -o whole.plan"));
    let said = |file: &str| {
        let text = std::fs::read_to_string(scratch.0.join(file)).expect("it is written");
        text.lines().find(|line| line.starts_with("  lora ")).map(str::to_owned)
    };
    assert_eq!(said("adapted.plan").as_deref(), Some("  lora rank=2,alpha=2,targets=v"));
    assert_eq!(said("whole.plan"), None);
    let train = "train gpt2-mini --data text.txt --steps 1 --val-every 0 --plan";
    scratch.answer(&format!("{train} adapted.plan --out run"));
    let settings = std::fs::read_to_string(scratch.0.join("run/run.toml")).expect("it is written");
    assert!(settings.contains("rank=2,alpha=2,targets=v"), "{settings}");
    scratch.answer("verify gpt2-mini --plan adapted.plan");
    scratch.answer("explain gpt2-mini --plan adapted.plan");
    scratch.answer("compile gpt2-mini --plan adapted.plan -o adapted.gtl");
    for (line, says) in [
        (format!("{train} adapted.plan --lora rank=3 --out a"), "--lora rank=2,alpha=2,targets=v"),
        (format!("{train} whole.plan --lora rank=2 --out b"), "a model without adapters"),
    ] {
        let output = scratch.run(&line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains("E5006") && errors.contains(says), "{line}: {errors}");
    }
}

/// What cannot be adapted is refused, with what can be.
#[test]
fn wrong_adapters_are_refused() {
    let scratch = Scratch::new("lora-refused");
    let said = |lora: &str| {
        let output = scratch.run(&format!("verify gpt2-mini --ranks 1 --seq 8 --lora {lora}"));
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, text) = said("rank=4,targets=q_proj");
    assert!(code == Some(2) && text.contains("E1201") && text.contains("c_attn"), "{text}");
    let (code, text) = said("rank=4000,targets=q");
    assert!(code == Some(2) && text.contains("E1202") && text.contains("rank=256"), "{text}");
    let (code, text) = said("rank=4,targets=h.0.attn.wq");
    assert!(code == Some(2) && text.contains("E1203"), "{text}");
    let (code, text) = said("alpha=4");
    assert!(code == Some(2) && text.contains("a rank is missing"), "{text}");
}

/// Every mesh of four ranks computes the gradients of one, and one those of the interpreter.
#[test]
fn meshes_agree_on_adapters() {
    let scratch = Scratch::new("lora-meshes");
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/reference");
    for (name, lora) in CASES {
        let model = root.join(name);
        let model = model.display();
        scratch.answer(&format!("verify {model} --ranks 4 --seq 9 --lora {lora}"));
        scratch.answer(&format!("verify {model} --ranks 1 --seq 9 --lora {lora}"));
    }
    let all = "rank=2,targets=all-linear";
    scratch.answer(&format!("verify gpt2-mini --ranks 2 --seq 8 --lora {all}"));
}
