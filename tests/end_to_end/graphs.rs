//! The models of `tests/models`: a convolutional network, a recommender, an encoder–decoder, a
//! mixture of experts, and the same with experts that are a composite.

use std::path::{Path, PathBuf};

use codegen::calls::Calls;
use ir::autodiff::differentiate;
use ir::dim::Bindings;
use ir::eval::eval;
use ir::text::parse_module;
use ir::{DType, Function, Module, Tensor, TensorType};

use crate::cli::Scratch;
use crate::draws::Draws;
use crate::operators::{assert_equal, compiled};

/// The models, and how many tokens a sample of each has.
const MODELS: [(&str, usize); 5] =
    [("resnet", 192), ("dlrm", 9), ("t5", 12), ("moe", 5), ("routed", 5)];

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/models/{name}.graph"))
}

/// The model in f64, for batches of so many samples.
fn module(name: &str, samples: i64) -> Module {
    let text = std::fs::read_to_string(path(name)).expect("the model is there");
    let mut module = parse_module(name, &text.replace("f32", "f64")).expect("it is a module");
    module.bind(&Bindings::from([("B".to_owned(), samples)]));
    module
}

/// Random arguments of a function.
fn arguments(function: &Function, r: &mut Draws) -> Vec<Tensor> {
    let argument = |ty: &TensorType| {
        let dims = ty.sizes().expect("sizes are bound");
        if ty.dtype.is_float() { r.signed(&dims) } else { r.ids(&dims, 0, 9) }
    };
    function.param_types().iter().map(argument).collect()
}

/// The gradient function of every layer, as kernels and on the interpreter.
#[test]
fn kernels_of_the_models_compute_what_the_interpreter_does() {
    for (name, _) in MODELS {
        for samples in [1, 2, 3] {
            let mut r = Draws::new(samples as u64);
            let mut module = module(name, samples);
            let layers: Vec<String> = Calls::of(&module, "loss")
                .expect("calls")
                .functions()
                .into_iter()
                .map(str::to_owned)
                .collect();
            for layer in layers {
                let gradient = differentiate(&mut module, &layer).expect("it has a derivative");
                let function = module.function(&gradient).expect("it was made");
                let args = arguments(function, &mut r);
                let what = format!("@{gradient} of {name}, {samples} samples");
                let found = compiled(&module, &gradient, &args);
                let found = found.unwrap_or_else(|why| panic!("{what}: {why}"));
                let wanted = eval(&module, &gradient, &args).expect("it evaluates");
                assert_equal(&found, &wanted, &what);
            }
        }
    }
}

/// Of weights, each in turn moved along a random direction, the gradients are the slopes of the
/// loss.
#[test]
fn gradients_of_the_models_are_differences_of_their_losses() {
    for (name, _) in MODELS {
        let mut r = Draws::new(7);
        let mut module = module(name, 3);
        let entry = module.function("loss").expect("there is a loss").clone();
        let args = arguments(&entry, &mut r);
        let loss = |args: &[Tensor]| -> f64 {
            let results = eval(&module, "loss", args).expect("it evaluates");
            results[0].scalar()
        };
        let mut slopes = Vec::new();
        for (at, arg) in args.iter().enumerate().filter(|(_, t)| t.dtype.is_float()) {
            let direction = r.signed(&arg.dims).to_f64();
            let moved = |by: f64| {
                let pairs = arg.to_f64().into_iter().zip(&direction);
                let mut args = args.clone();
                args[at] = Tensor::f64(&arg.dims, pairs.map(|(x, d)| x + by * d).collect());
                loss(&args)
            };
            slopes.push((at, (moved(1e-6) - moved(-1e-6)) / 2e-6, direction));
        }
        let derivative = differentiate(&mut module, "loss").expect("it has a derivative");
        let one = |value: f64| Tensor::f64(&[], vec![value]);
        let with_cotangents: Vec<Tensor> =
            args.iter().cloned().chain([one(1.0), one(0.0)]).collect();
        let grads = eval(&module, &derivative, &with_cotangents).expect("it evaluates");
        assert_eq!(grads.len(), 2 + slopes.len(), "{name}");
        for (grad, (at, slope, direction)) in grads[2..].iter().zip(&slopes) {
            let found: f64 = grad.to_f64().iter().zip(direction).map(|(g, d)| g * d).sum();
            let weight = &entry.values[*at].name;
            let near = (found - slope).abs() <= 1e-5 * slope.abs().max(1.0);
            assert!(near, "{name}: the slope along `{weight}` is {slope}, not {found}");
        }
        let moving = slopes.iter().filter(|(_, slope, _)| slope.abs() > 1e-3).count();
        assert!(moving * 2 > slopes.len(), "{name}: most weights matter");
        assert_eq!(grads[0].dtype, DType::F64);
    }
}

/// Two layers, of which each has nodes without a kernel.
const LACKING: &str = "module lacking
  func @embed(%tokens: i32[B, 4], %table: f32[9, 8]) {
    %wide: i64[B, 4] = cast %tokens
    %x: f32[B, 4, 8] = gather dim=0 start=0 %table %wide
    return %x
  }
  func @head(%x: f32[B, 4, 8], %w: f32[8, 9], %labels: i32[B, 4]) {
    %long: i64[B, 4] = cast %labels
    %zero: i64[B, 4] = constant 0.0
    %positive: bool[B, 4] = lt %zero %long
    %y: f32[B, 4, 9] = contract bsm,mv->bsv %x %w
    %rows: f32[B, 4, 9] = gather dim=0 start=0 %w %long
    %z: f32[B, 4, 9] = add %y %rows
    %sum: f32[B, 4] = reduce sum dims=[2] %z
    %none: f32[B, 4] = constant 0.0
    %one: f32[B, 4] = constant 1.0
    %terms: f32[B, 4] = select %positive %sum %none
    %ones: f32[B, 4] = select %positive %one %none
    %loss: f32[] = reduce sum dims=[0, 1] %terms
    %count: f32[] = reduce sum dims=[0, 1] %ones
    return %loss %count
  }
  func @loss(%table: f32[9, 8], %w: f32[8, 9], %tokens: i32[B, 4], %labels: i32[B, 4]) {
    %x: f32[B, 4, 8] = call @embed %tokens %table
    %loss: f32[], %count: f32[] = call @head %x %w %labels
    return %loss %count
  }
";

/// Every verb that compiles a model says all of its nodes that have no kernel, with exit code 4.
#[test]
fn nodes_without_kernels_are_said_at_once() {
    let scratch = Scratch::new("lacking");
    std::fs::write(scratch.0.join("lacking.graph"), LACKING).expect("it is written");
    for verb in ["plan", "compile", "verify"] {
        let line = format!("{verb} lacking.graph --ranks 2 --seq 4");
        let output = scratch.run(&line);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(4), "{line}\n{text}");
        for part in ["E2003", "ids of i64", "`%x`", "`%rows`"] {
            assert!(text.contains(part), "{line}: {part}\n{text}");
        }
    }
    let moe = std::fs::read_to_string(path("moe")).expect("the model is there");
    let late = moe.replace("gather dim=0 start=0 %table", "gather dim=0 start=-1 %table");
    assert_ne!(moe, late);
    scratch.write("late.graph", &late);
    let output = scratch.run("compile late.graph --ranks 2 -o late.gtl");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{text}");
    assert!(text.contains("E2003") && text.contains("start at id -1"), "{text}");
}

/// Without kernels there are no launches to list, and it is said why.
#[test]
fn launches_that_cannot_be_listed_are_explained() {
    let scratch = Scratch::new("lacking-fusions");
    std::fs::write(scratch.0.join("lacking.graph"), LACKING).expect("it is written");
    let output = scratch.run("inspect lacking.graph --fusions");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("no launches are listed") && text.contains("`%x`"), "{text}");
}

/// A graph's tokens say how many a sample has: no flag is needed, and none may say otherwise.
#[test]
fn sequences_are_those_of_the_graph() {
    let scratch = Scratch::new("graph-seq");
    let model = path("dlrm").display().to_string();
    let fine = scratch.run(&format!("compile {model} --gbs 2 -o fine.gtl"));
    assert_eq!(fine.status.code(), Some(0), "{}", String::from_utf8_lossy(&fine.stderr));
    let verdict = scratch.json(&format!("verify {model} --ranks 2 --json"));
    assert_eq!(verdict["ok"], true, "{verdict:#}");
    for line in ["compile @ --gbs 2 --seq 10", "compile @ --gbs 2 --seq 3", "plan @ --seq 10"] {
        let output = scratch.run(&line.replace('@', &model));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{line}\n{text}");
        assert!(text.contains("takes 9") && text.contains("write --seq 9"), "{line}\n{text}");
    }
}

/// One step on several ranks, cut every way that fits, yields what one rank yields. The seven calls
/// of the encoder–decoder are as many stages: what the encoder yields passes through that of the
/// decoder's embedding and is taken by two others.
#[test]
fn every_mesh_computes_the_models_alike() {
    let scratch = Scratch::new("graphs");
    for (name, seq) in MODELS {
        let ranks = if name == "t5" { 7 } else { 2 };
        let line = format!("verify {} --ranks {ranks} --seq {seq} --json", path(name).display());
        let verdict = scratch.json(&line);
        assert_eq!(verdict["ok"], true, "{name}: {verdict:#}");
        let meshes = verdict["meshes"].as_array().expect("a list");
        for axis in ["dp", "pp"] {
            let is_there = meshes.iter().any(|mesh| mesh[axis] == ranks);
            assert!(is_there, "{name}, {axis}={ranks}: {verdict:#}");
        }
    }
}

/// A concatenation of another one and of what is made of that: both lie in one whole, and share
/// bytes.
const NESTED: &str = "module nested
  func @mid(%tokens: i32[B, 4], %w: f32[16, 4]) {
    %v: f32[B, 4] = cast %tokens
    %w1: f32[16, 4] = cumulative sum dim=0 %w
    %w2: f32[16, 4] = tanh %w1
    %w3: f32[32, 4] = concat dim=0 %w1 %w2
    %w4: f32[32, 4] = cumulative sum dim=0 %w3
    %w5: f32[64, 4] = concat dim=0 %w3 %w4
    %w6: f32[64, 4] = cumulative sum dim=0 %w5
    %out: f32[B, 64] = contract bi,oi->bo %v %w6
    return %out
  }
  func @top(%x: f32[B, 64], %labels: i32[B, 4]) {
    %y: f32[B, 64] = tanh %x
    %loss: f32[] = reduce sum dims=[0, 1] %y
    %one: f32[B] = constant 1.0
    %count: f32[] = reduce sum dims=[0] %one
    return %loss %count
  }
  func @loss(%w: f32[16, 4], %tokens: i32[B, 4], %labels: i32[B, 4]) {
    %m: f32[B, 64] = call @mid %tokens %w
    %loss: f32[], %count: f32[] = call @top %m %labels
    return %loss %count
  }
";

/// What code generation lays out, the checks of compiled files take.
#[test]
fn nested_concatenations_are_compiled() {
    let scratch = Scratch::new("nested");
    std::fs::write(scratch.0.join("nested.graph"), NESTED).expect("it is written");
    let verdict = scratch.json("verify nested.graph --ranks 2 --gbs 2 --json");
    assert_eq!(verdict["ok"], true, "{verdict:#}");
    let compiled = scratch.run("compile nested.graph --gbs 2 -o nested.gtl");
    assert_eq!(compiled.status.code(), Some(0), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// A loss of rows of eight numbers.
const HEAD: &str = "
  func @head(%x: f32[B, 8], %w: f32[10, 8], %labels: i32[B, 64]) {
    %first: i32[B, 1] = slice dim=1 start=0 size=1 %labels
    %label: i32[B] = reshape %first
    %y: f32[B, 10] = contract bc,kc->bk %x %w
    %e: f32[B, 10] = exp %y
    %sum: f32[B] = reduce sum dims=[1] %e
    %log: f32[B] = log %sum
    %ids: i32[B, 10] = iota dim=1 start=0
    %wanted: i32[B, 10] = broadcast new=[1] %label
    %is: bool[B, 10] = eq %ids %wanted
    %zero: f32[B, 10] = constant 0.0
    %picked: f32[B, 10] = select %is %y %zero
    %own: f32[B] = reduce sum dims=[1] %picked
    %term: f32[B] = sub %log %own
    %one: f32[B] = constant 1.0
    %loss: f32[] = reduce sum dims=[0] %term
    %count: f32[] = reduce sum dims=[0] %one
    return %loss %count
  }
";

/// Convolutions in two groups.
const GROUPED: &str = "module grouped
  func @body(%tokens: i32[B, 64], %w: f32[8, 2, 3, 3], %v: f32[8, 4, 3, 3]) {
    %f: f32[B, 64] = cast %tokens
    %hundred: f32[B, 64] = constant 100.0
    %d: f32[B, 64] = div %f %hundred
    %x: f32[B, 4, 4, 4] = reshape %d
    %y: f32[B, 8, 4, 4] = conv stride=[1, 1] before=[1, 1] after=[1, 1] dilation=[1, 1] \
        spread=[1, 1] %x %w
    %a: f32[B, 8, 4, 4] = tanh %y
    %z: f32[B, 8, 2, 2] = conv stride=[2, 2] before=[1, 1] after=[1, 1] dilation=[1, 1] \
        spread=[1, 1] %a %v
    %r: f32[B, 8] = reduce sum dims=[2, 3] %z
    return %r
  }
  func @loss(%w: f32[8, 2, 3, 3], %v: f32[8, 4, 3, 3], %u: f32[10, 8], %tokens: i32[B, 64], \
        %labels: i32[B, 64]) {
    %x: f32[B, 8] = call @body %tokens %w %v
    %loss: f32[], %count: f32[] = call @head %x %u %labels
    return %loss %count
  }
";

/// A table that one layer makes of weights alone and two others take.
const SHARED: &str = "module shared
  func @table(%a: f32[256, 8], %b: f32[8, 8]) {
    %t: f32[256, 8] = contract im,mn->in %a %b
    return %t
  }
  func @embed(%tokens: i32[B, 64], %t: f32[256, 8]) {
    %x: f32[B, 64, 8] = gather dim=0 start=0 %t %tokens
    %y: f32[B, 64, 8] = tanh %x
    %z: f32[B, 8] = reduce sum dims=[1] %y
    return %z
  }
  func @mix(%x: f32[B, 8], %t: f32[256, 8]) {
    %s: f32[8, 8] = slice dim=0 start=0 size=8 %t
    %y: f32[B, 8] = contract bc,ck->bk %x %s
    return %y
  }
  func @loss(%a: f32[256, 8], %b: f32[8, 8], %u: f32[10, 8], %tokens: i32[B, 64], \
        %labels: i32[B, 64]) {
    %t: f32[256, 8] = call @table %a %b
    %x: f32[B, 8] = call @embed %tokens %t
    %y: f32[B, 8] = call @mix %x %t
    %loss: f32[], %count: f32[] = call @head %y %u %labels
    return %loss %count
  }
";

/// Gradients that are no sums over samples, or that no cut can make so, are not cut over `dp`:
/// that is refused and said. All other meshes yield what one rank does, a stage without weights
/// included.
#[test]
fn what_cannot_be_cut_over_samples_is_refused() {
    let scratch = Scratch::new("uncut");
    for (name, text, ranks) in [("grouped", GROUPED, 2), ("shared", SHARED, 4)] {
        let end = text.find("  func @loss").expect("there is a loss");
        let text = [&text[..end], &HEAD[1..], &text[end..]].concat();
        std::fs::write(scratch.0.join(format!("{name}.graph")), text).expect("it is written");
        let line = format!("verify {name}.graph --ranks {ranks} --seq 64 --json");
        let output = scratch.run(&line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("is no sum over dp"), "{name}: {said}");
        let verdict: serde_json::Value =
            serde_json::from_slice(&output.stdout).expect("a document");
        assert_eq!(verdict["ok"], true, "{name}: {verdict:#}");
        let meshes = verdict["meshes"].as_array().expect("a list");
        assert!(meshes.iter().all(|mesh| mesh["dp"] == 1), "{verdict:#}");
        for axis in ["tp", "pp"] {
            assert!(meshes.iter().any(|mesh| mesh[axis] == ranks), "{axis}: {verdict:#}");
        }
        // A plan is found on the others.
        scratch.answer(&format!("plan {name}.graph --ranks {ranks} --seq 64"));
    }
}

/// Weights that are scaled, normalised and multiplied with one another before they are used as `u`.
const DERIVED: [(&str, [&str; 2], &str); 3] = [
    (
        "scaled",
        ["%w: f32[16, 4]", "%w"],
        "%half: f32[16, 4] = constant 0.5
    %h: f32[16, 4] = mul %half %w
    %two: f32[16, 4] = constant 2.0
    %u: f32[16, 4] = div %h %two",
    ),
    (
        "normalised",
        ["%w: f32[16, 4]", "%w"],
        "%squares: f32[16, 4] = mul %w %w
    %sums: f32[16] = reduce sum dims=[1] %squares
    %norms: f32[16] = sqrt %sums
    %n: f32[16, 4] = broadcast new=[1] %norms
    %u: f32[16, 4] = div %w %n",
    ),
    (
        "low_rank",
        ["%a: f32[16, 2], %b: f32[2, 4]", "%a %b"],
        "%u: f32[16, 4] = contract or,ri->oi %a %b",
    ),
];

/// Gradients of such weights are linear in what the samples of each rank give: they are summed over
/// `dp` as others are.
#[test]
fn weights_derived_from_others_are_trained_on_copies() {
    let scratch = Scratch::new("derived");
    for (name, [weights, names], body) in DERIVED {
        let graph = format!(
            "module {name}
  func @mid(%tokens: i32[B, 4], {weights}) {{
    %x: f32[B, 4] = cast %tokens
    {body}
    %y: f32[B, 16] = contract bi,oi->bo %x %u
    return %y
  }}
  func @top(%x: f32[B, 16], %labels: i32[B, 4]) {{
    %ones: f32[B] = constant 1.0
    %z: f32[B, 16] = sin %x
    %sum: f32[] = reduce sum dims=[0, 1] %z
    %count: f32[] = reduce sum dims=[0] %ones
    return %sum %count
  }}
  func @loss({weights}, %tokens: i32[B, 4], %labels: i32[B, 4]) {{
    %m: f32[B, 16] = call @mid %tokens {names}
    %loss: f32[], %loss.count: f32[] = call @top %m %labels
    return %loss %loss.count
  }}
"
        );
        scratch.write("derived.graph", &graph);
        let verdict = scratch.json("verify derived.graph --ranks 2 --gbs 4 --dtype f32 --json");
        let meshes = verdict["meshes"].as_array().expect("meshes");
        assert!(meshes.iter().any(|mesh| mesh["dp"] == 2), "{name}: {verdict:#}");
        assert_eq!(verdict["ok"], true, "{name}: {verdict:#}");
    }
}

/// A layer that yields a value twice, each of which is used: both uses count on all ranks.
#[test]
fn what_a_layer_yields_twice_is_trained_on_copies() {
    let scratch = Scratch::new("twice");
    let graph = "module twice
  func @stem(%tokens: i32[B, 16], %w: f64[8, 16]) {
    %a: f64[B, 16] = cast %tokens
    %n: f64[B, 16] = constant 100.0
    %d: f64[B, 16] = div %a %n
    %x: f64[B, 8] = contract bc,dc->bd %d %w
    return %x %x
  }
  func @head(%x: f64[B, 8], %y: f64[B, 8], %u: f64[8, 8], %labels: i32[B, 16]) {
    %s: f64[B, 8] = mul %x %x
    %q: f64[B, 8] = contract bc,dc->bd %y %u
    %t: f64[B, 8] = add %s %q
    %v: f64[B] = reduce sum dims=[1] %t
    %l: f64[] = reduce sum dims=[0] %v
    %one: f64[B] = constant 1.0
    %c: f64[] = reduce sum dims=[0] %one
    return %l %c
  }
  func @loss(%w: f64[8, 16], %u: f64[8, 8], %tokens: i32[B, 16], %labels: i32[B, 16]) {
    %h: f64[B, 8], %g: f64[B, 8] = call @stem %tokens %w
    %l: f64[], %c: f64[] = call @head %h %g %u %labels
    return %l %c
  }
";
    scratch.write("twice.graph", graph);
    let verdict = scratch.json("verify twice.graph --ranks 2 --seq 16 --json");
    assert_eq!(verdict["ok"], true, "{verdict:#}");
    let meshes = verdict["meshes"].as_array().expect("a list");
    assert!(meshes.iter().any(|mesh| mesh["dp"] == 2), "{verdict:#}");
}
