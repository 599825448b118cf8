//! Kernels as CUDA C++: every launch of every program has text, and whole training steps of which
//! each launch is executed by the shim equal those of the CPU.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use codegen::compile::{Compiled, compile};
use codegen::inference::compile_inference;
use codegen::prepare::prepare_inference_as;
use gantline::generation::DECODE;
use ir::ids::Ids;
use ir::import::{DecodingOptions, Description, LogitsOf, decoding, preset, read_config};
use ir::op::Operands;
use ir::plan::Keep;
use ir::precision::{Precision, Products};
use ir::program::Instruction;
use ir::{DType, Mesh, Target};
use kernels::cpu::{Prepared, View, ViewMut};
use kernels::cuda::{
    Arch, Elements, Functions, TensorTile, Tile, device_prelude, functions, functions_for,
};
use kernels::verify::verify;
use kernels::{Kernel, Product};
use planner::inference::plan_forward;
use runtime::cuda::nvrtc::Nvrtc;
use runtime::device::Device;
use runtime::execute::{Batch, Classes, Options, Part, Scalars, Session};
use runtime::init::Init;
use runtime::load::collect_weights;
use runtime::trace::Tracing;

use crate::model::{Wanted, mixtral, plan, prepared_as, prepared_for};
use crate::scratch::Scratch;
use crate::shim::{Library, compiler};

/// A device whose launches are those of a library.
struct Shim(Arc<Library>);

impl Device for Shim {
    fn launch(
        &mut self,
        prepared: &mut Prepared,
        inputs: &[View<'_>],
        outputs: &[ViewMut<'_>],
        workspace: Option<&ViewMut<'_>>,
    ) {
        let at = self.0.position(prepared.kernel()).expect("every kernel is in the library");
        self.0.launch_with(at, prepared.scalars(), inputs, outputs, (workspace, 0));
    }
}

fn llama() -> Description {
    let config = r#"{"model_type": "llama", "vocab_size": 259, "max_position_embeddings": 64,
        "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": false}"#;
    read_config("config.json", config, "llama").expect("the config is read")
}

fn wanted(pp: usize, tp: usize) -> Wanted {
    Wanted {
        mesh: Mesh { pp, dp: 1, tp, ..Mesh::ONE },
        microbatch_size: 2,
        microbatch_count: pp,
        keep: Keep::Full,
        sequence: tp > 1,
    }
}

/// Loss, gradients and updated weights of a step, by the name of the weight.
type Stepped = (f64, BTreeMap<String, [Vec<f64>; 2]>);

fn stepped(
    session: &mut Session,
    model: &ir::import::Model,
    samples: usize,
    seq: usize,
) -> Stepped {
    session.init_weights(3, &|name, _| match name {
        name if name.contains("norm") || name.contains("ln") => Init::Ones,
        _ => Init::Normal { std: 0.05, zero_row: None },
    });
    let tokens: Vec<i32> = (0..samples * seq).map(|at| (at * at % 251) as i32).collect();
    let labels: Vec<i32> = tokens.iter().map(|token| (token * 7 + 3) % 251).collect();
    let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
    let scalars = Scalars {
        rate: 1e-3,
        correction1: 0.1,
        correction2: 0.001,
        clip: 1.0,
        ..Scalars::default()
    };
    let report = session.step(&batch, scalars).expect("the step runs");
    let of = |part| collect_weights(session, &model.weights, part);
    let both = of(Part::Grad).into_iter().zip(of(Part::Weight));
    let values =
        both.map(|(grad, weight)| (grad.name, [grad.values.to_f64(), weight.values.to_f64()]));
    (report.loss(), values.collect())
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most: f64, x| most.max(x.abs()))
}

/// Compiled for GPUs, a file has text, the same each time, that is listed, and runs on no core.
/// Sectors are those of the bytes or more, of elementwise maps of rows these, and not known of
/// kernels that ids decide.
fn assert_accesses_are_shown(told: &serde_json::Value) {
    let kernels = told["kernels"].as_array().expect("a list");
    let functions = kernels.iter().flat_map(|kernel| kernel["functions"].as_array());
    let functions: Vec<&serde_json::Value> = functions.flatten().collect();
    let ratio = |of: &serde_json::Value| of["sectors_over_least"].as_f64();
    let of = |tile: &str| {
        let is_it =
            |of: &&&serde_json::Value| of["tile"].as_str().is_some_and(|t| t.contains(tile));
        functions.iter().filter(is_it).map(|of| ratio(of)).collect::<Vec<_>>()
    };
    assert!(functions.iter().filter_map(|of| ratio(of)).all(|of| of >= 1.0), "{told:#}");
    assert!(of("vectors of").contains(&Some(1.0)), "{told:#}");
    assert!(of("one thread per id").iter().all(Option::is_none), "{told:#}");
    assert!(!of("one thread per id").is_empty(), "{told:#}");
}

#[test]
fn a_file_for_gpus_is_written_listed_and_not_run() {
    let scratch = Scratch::new("gpus");
    let config = r#"{"model_type": "llama", "vocab_size": 64, "max_position_embeddings": 16,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}"#;
    scratch.write("tiny/config.json", config);
    for name in ["a.gtl", "b.gtl"] {
        scratch.answer(&format!("compile tiny --ranks 2 --gbs 2 --arch sm_90a,sm_80 -o {name}"));
    }
    let read = |name: &str| std::fs::read(scratch.0.join(name)).expect("the file is there");
    assert_eq!(read("a.gtl"), read("b.gtl"));
    let told = scratch.json("inspect a.gtl --kernels --json");
    assert_eq!(told["archs"], serde_json::json!(["sm_80", "sm_90a"]));
    let kernels = told["kernels"].as_array().expect("a list");
    let launched = |kernel: &&serde_json::Value| kernel["launches"].as_u64() > Some(0);
    assert!(kernels.len() > 10 && kernels.iter().all(|kernel| launched(&kernel)), "{told:#}");
    for kernel in kernels {
        let by = kernel["routines"].as_object().expect("routines").values();
        let count: u64 = by.map(|count| count.as_u64().expect("a number")).sum();
        assert_eq!(Some(count), kernel["launches"].as_u64(), "{kernel:#}");
    }
    let least = |kernel: &serde_json::Value, device: &str| kernel["least_s"][device].as_f64();
    assert!(kernels.iter().all(|kernel| least(kernel, "h100") <= least(kernel, "a100")));
    assert_resources_fit(&told);
    assert_accesses_are_shown(&told);
    let page = without_nvrtc(&scratch, "inspect a.gtl --kernels");
    assert!(page.contains("one warp per query, one lane per key"), "{page}");
    assert!(page.contains("occupancy: not known; no compiler of CUDA C++"), "{page}");
    scratch.answer("compile tiny --ranks 2 --gbs 2 -o cpu.gtl");
    for (line, code, says) in [
        ("run a.gtl", 7, "without `--arch`"),
        ("inspect cpu.gtl --kernels", 4, "compile it with `--arch sm_80,sm_90a`"),
        ("compile tiny --arch sm_90,sm_80,sm_80", 2, "did you mean `sm_90a`?"),
        ("compile tiny --arch sm_90,sm_80,sm_80", 2, "`sm_80` is named twice"),
    ] {
        let output = scratch.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
        assert!(errors.contains(says), "{line}: {errors}");
    }
}

/// The answer of a command that finds no NVRTC, which saves the time that compiling takes too.
fn without_nvrtc(scratch: &Scratch, line: &str) -> String {
    let output = scratch.command(&[], line).env("GANTLINE_NVRTC", "nowhere").output();
    let output = output.expect("the program starts");
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("answers are UTF-8")
}

/// Where they are known, as many blocks are resident as an architecture has threads, registers and
/// shared memory for, and no more; nothing is spilled. Where not, no number is given.
fn assert_resources_fit(told: &serde_json::Value) {
    let is_known = told["compiler"].is_string();
    assert!(is_known || std::env::var_os("GANTLINE_REQUIRE_NVRTC").is_none(), "{told:#}");
    let mut count = 0;
    for kernel in told["kernels"].as_array().expect("a list") {
        for (arch, shared_bytes) in [("sm_80", 164 << 10), ("sm_90a", 228 << 10)] {
            for function in kernel["resources"][arch].as_array().expect("a list") {
                let number = |name: &str| function[name].as_u64();
                if !is_known {
                    assert!(number("registers").or(number("shared_bytes")).is_none(), "{function}");
                    continue;
                }
                count += 1;
                let of = |name: &str| number(name).unwrap_or_else(|| panic!("{name}: {function}"));
                let name = &function["name"];
                let mut all = kernel["functions"].as_array().expect("a list").iter();
                let threads = all.find(|of| of["name"] == *name).map(|of| of["threads"].as_u64());
                // Functions of sm_90a may be others than those that are listed.
                let Some(Some(threads)) = threads.filter(|_| arch == "sm_80") else { continue };
                let fits = |blocks: u64| {
                    let registers = of("registers").next_multiple_of(8) * threads;
                    let shared = (of("shared_bytes") + 1024).next_multiple_of(128);
                    blocks * threads <= 2048
                        && blocks * registers <= 65536
                        && blocks * shared <= shared_bytes
                        && blocks <= 32
                };
                let blocks = of("blocks_per_multiprocessor");
                assert!(blocks > 0 && fits(blocks) && !fits(blocks + 1), "{function}");
                assert_eq!(of("spill_bytes"), 0, "{function}");
                let share = (blocks * threads) as f64 / 2048.0;
                assert_eq!(function["occupancy"].as_f64(), Some(share), "{function}");
            }
        }
    }
    assert!(!is_known || count > 20, "{count} functions");
}

/// A plan that is searched for GPUs' kernels predicts the arena of their programs, whatever layers
/// are called, and stays within the memory that is asked for.
#[test]
fn memory_of_files_for_gpus_is_planned() {
    let scratch = Scratch::new("gpus-memory");
    let config = r#"{"model_type": "gpt2", "vocab_size": 8191, "n_positions": 64, "n_embd": 128,
        "n_layer": 2, "n_head": 2}"#;
    scratch.write("tiny/config.json", config);
    scratch.answer("export tiny --to graph --seq 64 -o tiny.graph");
    let graph = std::fs::read_to_string(scratch.0.join("tiny.graph")).expect("it is written");
    assert!(graph.contains("@block"), "{graph}");
    scratch.write("update.graph", &graph.replace("@block", "@update"));
    for (model, decisions) in [
        ("tiny", "--fix dp=2 --fix keep=full"),
        ("tiny", "--fix tp=2 --fix keep=none"),
        ("update.graph", "--fix dp=2 --fix zero=1"),
        ("update.graph", "--fix dp=2 --fix zero=0"),
    ] {
        let asked = format!("compile {model} --ranks 2 --gbs 64 --seq 64 {decisions}");
        let told = scratch.json(&format!("{asked} --arch sm_90a,sm_80 -o x.gtl --json"));
        let report = &told["report"];
        let arenas = report["arena_bytes"].as_array().expect("one a class");
        let most = arenas.iter().filter_map(serde_json::Value::as_f64).fold(0.0, f64::max);
        let predicted = &report["predictions"]["arena_bytes"]["value"];
        assert_eq!(predicted.as_f64(), Some(most), "{asked}");
    }
}

/// Asked for, products of f32 read tf32: the plan says so, and kernels do.
#[test]
fn a_file_for_gpus_may_round_products_to_tf32() {
    let scratch = Scratch::new("gpus-tf32");
    let config = r#"{"model_type": "llama", "vocab_size": 64, "max_position_embeddings": 16,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}"#;
    scratch.write("tiny/config.json", config);
    let asked = "compile tiny --ranks 2 --gbs 2 --arch sm_80,sm_90a";
    for (name, dtype) in [("a", "tf32"), ("b", "f32 --precision products=tf32"), ("exact", "f32")] {
        scratch.answer(&format!("{asked} --dtype {dtype} -o {name}.gtl"));
    }
    let read = |name: &str| std::fs::read(scratch.0.join(name)).expect("the file is there");
    assert_eq!(read("a.gtl"), read("b.gtl"));
    let kernels = |name: &str| -> serde_json::Value {
        let told = without_nvrtc(&scratch, &format!("inspect {name}.gtl --kernels --json"));
        serde_json::from_str(&told).expect("the answer is one document")
    };
    let [rounded, exact] = ["a", "exact"].map(kernels);
    let of = |told: &serde_json::Value| told["kernels"].as_array().expect("a list").clone();
    let mut count = 0;
    for (rounded, exact) in of(&rounded).iter().zip(of(&exact)) {
        let text = rounded["text"].as_str().expect("a kernel").replace(" by tf32", "");
        assert_eq!(text, exact["text"], "programs launch the same kernels");
        let tiles = rounded["functions"].to_string();
        if tiles.contains("rounded to TF32") {
            count += 1;
            let least = |told: &serde_json::Value| told["least_s"]["a100"].as_f64();
            assert!(least(rounded) <= least(&exact), "{rounded:#}");
        }
    }
    assert!(count > 10, "{count} kernels round");
    for (line, code, says) in [
        ("run a.gtl", 7, "without `--arch`"),
        ("train tiny --data x.bin --dtype tf32", 2, "use f32, with `--precision products=tf32`"),
        (
            "compile tiny --arch sm_80 --dtype tf32 --precision compute=bf16,saved=bf16",
            4,
            "products=tf32: operands are of bf16, not of f32",
        ),
        ("compile tiny --cluster h100 --arch sm_80 --dtype tf32", 4, "leave it out"),
    ] {
        let output = scratch.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
        assert!(errors.contains(says), "{line}: {errors}");
    }
}

/// A model compiled for training.
struct Trained {
    model: ir::import::Model,
    classes: Arc<Classes>,
    samples: usize,
    seq: usize,
}

impl Trained {
    fn new(
        description: &Description,
        mesh: (usize, usize),
        seq: usize,
        (precision, arch): (Precision, Option<Arch>),
    ) -> Trained {
        let wanted = wanted(mesh.0, mesh.1);
        let target = arch.map(Target::Cuda);
        let (model, module) = prepared_for(target, description, seq, &precision);
        let planned = plan(&module, seq, precision.compute, wanted).expect("the mesh fits");
        let plan = ir::Plan { precision, target: target.or(planned.target), ..planned };
        let Compiled { programs, kernels } = compile(&module, "loss", &plan).expect("it compiles");
        let ids = Ids::of(&module, "loss");
        let samples = plan.global_batch_size();
        let classes = Arc::new(Classes { programs, kernels, mesh: plan.mesh, ids });
        Trained { model, classes, samples, seq }
    }

    /// Whether launches have workspaces in frames.
    fn has_workspaces(&self) -> bool {
        let routines = self.classes.programs.iter().flat_map(|program| &program.routines);
        let mut instructions = routines.flat_map(|routine| &routine.instructions);
        instructions.any(|of| matches!(of, Instruction::Launch { workspace: Some(_), .. }))
    }

    /// A step on devices that the function makes; on the CPU where there is none.
    fn step(&self, device: Option<&dyn Fn() -> Box<dyn Device>>) -> Stepped {
        let deadline = Duration::from_secs(100);
        let options = Options { threads_per_rank: 1, deadline, tracing: Tracing::None, disk: None };
        let classes = Arc::clone(&self.classes);
        let session = match device {
            None => Session::start(classes, &options),
            Some(make) => Session::start_on(classes, &options, &|_| Ok(make())),
        };
        stepped(&mut session.expect("the ranks start"), &self.model, self.samples, self.seq)
    }

    /// A step of which each launch is executed by the shim.
    fn step_by_text(&self, name: &str, functions: fn(&Kernel) -> Functions) -> Stepped {
        let kernels = self.classes.kernels.iter();
        let library =
            Library::new(name, kernels.map(|kernel| (kernel.clone(), functions(kernel))).collect());
        let library = Arc::new(library.expect("there is a compiler"));
        let device = || Box::new(Shim(Arc::clone(&library))) as Box<dyn Device>;
        self.step(Some(&device))
    }
}

/// Runs a step twice, and compares.
fn check(name: &str, description: &Description, mesh: (usize, usize), seq: usize) {
    let trained = Trained::new(description, mesh, seq, (Precision::uniform(DType::F32), None));
    let (loss, expected) = trained.step(None);
    let (found, values) = trained.step_by_text(name, functions);
    assert!((found - loss).abs() <= 1e-5 * loss, "{name}: {found}, not {loss}");
    assert_eq!(expected.len(), values.len());
    for (weight, both) in &expected {
        for (what, at) in [("gradient", 0), ("weight", 1)] {
            let apart = both[at].iter().zip(&values[weight][at]).map(|(a, b)| a - b);
            let (apart, most) = (largest(&apart.collect::<Vec<_>>()), largest(&both[at]));
            // An update is divided by the root of its square, and has the sign alone where it is
            // small.
            let limit = if at == 0 { 1e-5 * most } else { 2e-3 };
            assert!(most > 0.0 && apart <= limit, "{name}: {what} of `{weight}` is {apart} off");
        }
    }
}

/// Runs a step in narrow types by text for an architecture: its gradients are not further from
/// those of F32 than twice the CPU's, and a little of them.
fn check_narrow(
    name: &str,
    description: &Description,
    mesh: (usize, usize),
    seq: usize,
    dtype: DType,
) {
    let narrow = (Precision::training(dtype), Some(Arch::Sm80));
    let narrow = Trained::new(description, mesh, seq, narrow);
    assert!(narrow.has_workspaces(), "{name}");
    let functions = |kernel: &Kernel| functions_for(kernel, Arch::Sm80);
    let by_matrices = |kernel: &Kernel| {
        let of_matrices = |f: &kernels::cuda::Function| matches!(f.tile, Tile::Tensor(_));
        functions(kernel).functions.iter().any(of_matrices)
    };
    let count = narrow.classes.kernels.iter().filter(|kernel| by_matrices(kernel)).count();
    assert!(count > 4, "{name}: {count} kernels multiply matrices of warps");
    let exact = (Precision::uniform(DType::F32), None);
    let exact = Trained::new(description, mesh, seq, exact).step(None);
    let [cpu, text] = [narrow.step(None), narrow.step_by_text(name, functions)];
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    for (weight, [want, _]) in &exact.1 {
        let distance = |found: &Stepped| {
            let apart = found.1[weight][0].iter().zip(want).map(|(a, b)| a - b);
            norm(&apart.collect::<Vec<f64>>())
        };
        let (found, limit) = (distance(&text), 2.0 * distance(&cpu) + norm(want) / 512.0);
        assert!(found <= limit, "{name}: gradient of `{weight}` is {found} off, {limit} at most");
    }
}

#[test]
fn whole_steps_in_narrow_types_are_as_near_as_those_of_the_cpu() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mini = preset("gpt2-mini").expect("a preset");
    check_narrow("gpt2-bf16", &mini, (1, 1), 32, DType::BF16);
    check_narrow("llama-f16", &llama(), (1, 1), 32, DType::F16);
    check_narrow("llama-bf16-2-2", &llama(), (2, 2), 32, DType::BF16);
    // A token passes all experts: of fewer, rounding may choose others.
    check_narrow("mixtral-bf16", &mixtral(3, 3), (1, 1), 32, DType::BF16);
}

/// Images between convolutions have channels last, so that all but the first one's are copied by
/// vectors, and their results stored by vectors, in both passes; what they compute is the same.
#[test]
fn images_on_gpus_have_channels_last() {
    let scratch = Scratch::new("gpus-images");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/end_to_end/residual.graph");
    scratch.answer(&format!("compile {path} --ranks 1 --dtype bf16 --arch sm_80 -o a.gtl"));
    let page = without_nvrtc(&scratch, "inspect a.gtl --kernels");
    let of_images: Vec<&str> = page.lines().filter(|line| line.contains(" of an image")).collect();
    let by_vectors = of_images
        .iter()
        .filter(|line| line.contains("major by 8 of an image") && !line.contains("stored by 1"));
    // Of an image of three channels, elements are copied, forward and for the gradient of kernels.
    let (found, all) = (by_vectors.count(), of_images.len());
    assert!(all >= 5 && found == all - 2, "{found} of {all}: {of_images:#?}");
    let description = ir::import::resolve(Path::new(path)).expect("it is read").description;
    // CUDA cores multiply exact f32: they read and store NCHW by more of each sector.
    for (precision, stays) in
        [(Precision::uniform(DType::F32), true), (Precision::training(DType::BF16), false)]
    {
        let [cpu, gpu] = [None, Some(Target::Cuda(Arch::Sm80))]
            .map(|target| prepared_for(target, &description, 192, &precision).1);
        assert_eq!(cpu == gpu, stays, "{precision}");
    }
    if compiler().is_some() {
        check_narrow("residual-bf16", &description, (1, 1), 192, DType::BF16);
        check_narrow("residual-f16-2", &description, (1, 2), 192, DType::F16);
    }
}

/// Layers that blocks of codes fill, on two ranks too.
fn wide_llama() -> Description {
    let config = r#"{"model_type": "llama", "vocab_size": 259, "max_position_embeddings": 128,
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": false}"#;
    read_config("config.json", config, "llama").expect("the config is read")
}

/// Products of a program with scales, and those of its layers without.
fn scaled_products(trained: &Trained) -> [usize; 2] {
    let Classes { programs, kernels, .. } = &*trained.classes;
    let blocks = programs[0].routines.iter().filter(|routine| routine.name.starts_with("block"));
    let launched = blocks.flat_map(|routine| &routine.instructions).filter_map(|of| match of {
        Instruction::Launch { kernel, .. } => Some(&kernels[*kernel]),
        _ => None,
    });
    let mut counts = [0, 0];
    for kernel in launched {
        let mut count = |product: &Product| counts[usize::from(product.scales.is_none())] += 1;
        if let Kernel::Product(product) = kernel {
            count(product);
        } else if let Kernel::Products(products) = kernel {
            products.parts.iter().for_each(|part| count(&part.product));
        }
    }
    counts
}

/// A step of GPUs that multiply 8 bits is, executed by the CPU, that of products which read the
/// numbers that codes are, to the bit; by their text, but for the order of sums and the codes that
/// are others for it: those of E5M2 have two bits.
#[test]
fn products_of_codes_train_as_those_of_numbers() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let llama = wide_llama();
    for (name, products, arch, mesh, limit) in [
        ("f8-sm90a", Products::F8E4M3, Arch::Sm90a, (1, 1), 2e-3),
        ("f8-sm89-2", Products::F8Hybrid, Arch::Sm89, (1, 2), 5e-2),
    ] {
        let precision = Precision { products, ..Precision::uniform(DType::F32) };
        let of = |arch| Trained::new(&llama, mesh, 128, (precision, arch));
        let (numbers, codes) = (of(None), of(Some(arch)));
        // Seven products of a layer, each with two gradients.
        assert_eq!(scaled_products(&numbers), [0, 21]);
        // Where ranks exchange what scales are repeated to, products read numbers.
        let [scaled, others] = scaled_products(&codes);
        assert!(scaled + others == 21 && others <= 2 * (mesh.1 - 1), "{name}: {scaled}, {others}");
        let functions: fn(&Kernel) -> Functions = if arch == Arch::Sm90a {
            |kernel| functions_for(kernel, Arch::Sm90a)
        } else {
            |kernel| functions_for(kernel, Arch::Sm89)
        };
        let (loss, expected) = numbers.step(None);
        for (found, limit) in
            [(codes.step(None), 0.0), (codes.step_by_text(name, functions), limit)]
        {
            assert!((found.0 - loss).abs() <= limit * loss, "{name}: {}, not {loss}", found.0);
            let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
            for (weight, [gradient, _]) in &expected {
                let apart = gradient.iter().zip(&found.1[weight][0]).map(|(a, b)| a - b);
                let distance = norm(&apart.collect::<Vec<f64>>()) / norm(gradient);
                assert!(distance <= limit, "{name}: gradient of `{weight}` is {distance:e} off");
            }
        }
    }
}

#[test]
fn whole_steps_equal_those_of_the_cpu() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mini = preset("gpt2-mini").expect("a preset");
    check("gpt2-1", &mini, (1, 1), 32);
    check("llama-1", &llama(), (1, 1), 32);
    check("llama-2-2", &llama(), (2, 2), 32);
    check("mixtral-1", &mixtral(4, 2), (1, 1), 16);
    check("mixtral-2", &mixtral(6, 2), (1, 2), 16);
}

fn qwen2() -> Description {
    let config = r#"{"model_type": "qwen2", "vocab_size": 259, "max_position_embeddings": 64,
        "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": true}"#;
    read_config("config.json", config, "qwen2").expect("the config is read")
}

fn gemma2() -> Description {
    let config = r#"{"model_type": "gemma2", "vocab_size": 259, "max_position_embeddings": 64,
        "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}"#;
    read_config("config.json", config, "gemma2").expect("the config is read")
}

/// The kernels of training steps of a model on some ranks.
fn trained(description: &Description, mesh: (usize, usize), precision: Precision) -> Vec<Kernel> {
    let (_, module) = prepared_as(description, 32, &precision);
    let wanted = wanted(mesh.0, mesh.1);
    let planned = plan(&module, 32, precision.compute, wanted).expect("the mesh fits the model");
    let planned = ir::Plan { precision, ..planned };
    compile(&module, "loss", &planned).expect("it is compiled").kernels
}

/// The kernels of decoding, of one token or more at once.
fn decoded(description: &Description, mesh: Mesh, tokens: usize) -> Vec<Kernel> {
    let (precision, logits) = (Precision::uniform(DType::F32), LogitsOf::Last);
    let wanted = DecodingOptions { tokens, capacity: 64, dtype: DType::F32, logits };
    let model = decoding(description, &wanted).expect("it decodes").model;
    let module = prepare_inference_as(model.module, DECODE, &precision).expect("it is prepared");
    let plan = plan_forward(&module, DECODE, mesh, [3, 1], precision).expect("the mesh fits");
    compile_inference(&module, DECODE, &plan).expect("it is compiled").kernels
}

/// The kernels of all programs that have to have text, each once.
pub(crate) fn all_kernels() -> Vec<Kernel> {
    let mini = preset("gpt2-mini").expect("a preset");
    let mut all: Vec<Kernel> = Vec::new();
    let mut add = |kernels: Vec<Kernel>| {
        for kernel in kernels {
            if !all.contains(&kernel) {
                all.push(kernel);
            }
        }
    };
    let f32 = Precision::uniform(DType::F32);
    for description in [&mini, &llama(), &qwen2(), &gemma2()] {
        for mesh in [(1, 1), (1, 2), (2, 2)] {
            add(trained(description, mesh, f32));
        }
        for tp in [1, 2] {
            for tokens in [1, 8] {
                add(decoded(description, Mesh { pp: 1, dp: 1, tp, ..Mesh::ONE }, tokens));
            }
        }
    }
    let codes = Precision { products: Products::F8Hybrid, ..Precision::training(DType::BF16) };
    add(Trained::new(&wide_llama(), (1, 1), 128, (codes, Some(Arch::Sm90a)))
        .classes
        .kernels
        .clone());
    add(trained(&mixtral(4, 2), (1, 1), f32));
    for dtype in [DType::BF16, DType::F16] {
        add(trained(&mixtral(4, 2), (1, 2), Precision::training(dtype)));
        add(trained(&mini, (1, 1), Precision::training(dtype)));
        add(trained(&llama(), (1, 2), Precision::training(dtype)));
    }
    all
}

/// Whether a function may use a stack: sines and cosines of f64 take one.
pub(crate) fn may_stack(text: &str) -> bool {
    ["sin_of(", "cos_of(", "cos(angle)"].iter().any(|call| text.contains(call))
}

/// Compiles texts of functions for an architecture, and says what is wrong with them.
fn compiled_for(nvrtc: &Nvrtc, texts: &[String], architecture: &str) -> Vec<String> {
    let text = device_prelude() + &texts.concat();
    let found = match nvrtc.compile(&text, architecture) {
        Ok(found) => found,
        Err(log) => return vec![format!("{architecture}: {log}")],
    };
    let mut wrong: Vec<String> =
        found.warnings.iter().map(|line| format!("{architecture}: {line}")).collect();
    assert_eq!(found.used.len(), texts.len(), "every function is compiled");
    for used in &found.used {
        let is_it = |text: &&String| text.contains(&format!(" {}(", used.name));
        let text = texts.iter().find(is_it).expect("what was compiled has text");
        let stacks = used.stack_bytes > 0 && !may_stack(text);
        if stacks || used.spill_bytes > 0 || used.shared_bytes > 48 << 10 || used.registers > 255 {
            let what = text.lines().next().unwrap_or_default();
            wrong.push(format!("{architecture}: {used:?}: {what}"));
        }
    }
    wrong
}

/// All programs have text, which is the same when it is made again, and compiles without spills.
#[test]
fn every_launch_compiles_for_gpus() {
    let kernels = all_kernels();
    let of = |kernel: &Kernel| functions_for(kernel, Arch::Sm80);
    let all: Vec<Functions> = kernels.iter().map(of).collect();
    let texts = |all: &[Functions]| -> Vec<String> {
        let functions = all.iter().flat_map(|of| &of.functions);
        functions
            .enumerate()
            .map(|(at, function)| function.text(&format!("function{at}")))
            .collect()
    };
    let first = texts(&all);
    assert!(all.iter().all(|of| !of.functions.is_empty()), "every kernel has a function");
    assert_eq!(first, texts(&all_kernels().iter().map(of).collect::<Vec<_>>()));
    let nvrtc = match Nvrtc::open() {
        Ok(nvrtc) => nvrtc,
        Err(absent) => {
            let is_wanted = std::env::var_os("GANTLINE_REQUIRE_NVRTC").is_some();
            assert!(!is_wanted, "{absent}");
            println!("skipped: {absent}");
            return;
        }
    };
    // A sample of each kind; `cargo bench --bench cuda` compiles all.
    let sample = |all: &[Functions]| -> Vec<String> {
        let mut kinds: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (at, function) in all.iter().flat_map(|of| &of.functions).enumerate() {
            let types: Vec<DType> = function.parameters.iter().map(|p| p.dtype).collect();
            let kind = format!("{} {types:?}", kind(&function.tile));
            kinds.entry(kind).or_default().push(at);
        }
        let texts = texts(all);
        kinds.values().map(|of| texts[of[of.len() / 2]].clone()).collect()
    };
    let by_warpgroups: Vec<Functions> = kernels
        .iter()
        .map(|kernel| functions_for(kernel, Arch::Sm90a))
        .filter(|of| of.functions.iter().any(|f| matches!(f.tile, Tile::Warpgroup(_))))
        .collect();
    assert!(by_warpgroups.len() > 4, "warpgroups multiply in narrow types");
    let rounded: Vec<Functions> = kernels
        .iter()
        .filter_map(reading_tf32)
        .map(|kernel| functions_for(&kernel, Arch::Sm80))
        .filter(|of| of.functions.iter().any(|f| is_rounded(&f.tile)))
        .collect();
    assert!(rounded.len() > 20, "products of F32 are rounded");
    let [older, newer, rounded] = [&all, &by_warpgroups, &rounded].map(|of| sample(of));
    println!("{} kernels, {} functions, {} compiled", kernels.len(), first.len(), older.len());
    let [older, newer, rounded] = [&older, &newer, &rounded].map(|texts| texts.chunks(32));
    let compiled = &|(architecture, texts): (&str, Vec<&[String]>)| -> Vec<String> {
        texts.into_iter().flat_map(|texts| compiled_for(&nvrtc, texts, architecture)).collect()
    };
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let start = |work| scope.spawn(move || compiled(work));
        let sm80 = older.clone().chain(rounded).collect();
        let work = [("sm_80", sm80), ("sm_90a", older.chain(newer).collect())];
        let threads = work.map(start);
        threads.into_iter().flat_map(|thread| thread.join().expect("it compiles")).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let text = device_prelude() + &first[0];
    let [once, again] = [0; 2].map(|_| nvrtc.compile(&text, "sm_90a").map(|code| code.bytes));
    assert!(once.is_ok() && once == again, "the same text has the same code");
}

/// What a target decides, such as workspaces and padded rows, changes no bit: programs for GPUs
/// that a CPU executes give what those for CPUs do.
#[test]
fn a_target_changes_no_bit() {
    let config = r#"{"model_type": "gpt2", "vocab_size": 261, "n_positions": 64, "n_embd": 96,
        "n_layer": 2, "n_head": 6}"#;
    let gpt2 = read_config("config.json", config, "gpt2").expect("the config is read");
    for (name, description, mesh, pitch) in [
        ("gpt2", gpt2, (1, 1), 272),
        ("llama", llama(), (1, 1), 272),
        // 130 and 129 words.
        ("llama-2-2", llama(), (2, 2), 144),
    ] {
        let step = |arch: Option<Arch>| {
            let kinds = (Precision::training(DType::BF16), arch);
            let trained = Trained::new(&description, mesh, 32, kinds);
            let is_padded = |kernel: &Kernel| {
                let is_apart = |product: &Product| product.m.iter().any(|of| of.c == pitch);
                if let Kernel::Products(p) = kernel {
                    return p.parts.iter().any(|part| is_apart(&part.product));
                }
                matches!(kernel, Kernel::Product(product) if is_apart(product))
            };
            let is_padded = trained.classes.kernels.iter().any(is_padded);
            assert_eq!(is_padded, arch.is_some(), "{name}");
            trained.step(None)
        };
        let [(loss, wanted), (found, values)] = [None, Some(Arch::Sm90a)].map(step);
        assert_eq!(found.to_bits(), loss.to_bits(), "{name}");
        assert_eq!(values, wanted, "{name}");
    }
}

/// The same kernel with products that read TF32, if its operands are of F32.
fn reading_tf32(kernel: &Kernel) -> Option<Kernel> {
    let Kernel::Product(product) = kernel else { return None };
    let rounded = Kernel::Product(Product { operands: Operands::Tf32, ..product.clone() });
    verify(&rounded).is_ok().then_some(rounded)
}

fn is_rounded(tile: &Tile) -> bool {
    matches!(tile, Tile::Tensor(TensorTile { elements: Elements::Tf32, .. }))
}

/// Runs a step by text whose products are rounded to TF32: its gradients are not further from those
/// of F64 than twice those of CPU kernels, which round the same operands.
///
/// Returns the largest distance relative to the gradient's norm.
fn check_rounded(name: &str, description: &Description, mesh: (usize, usize)) -> f64 {
    let single = Precision { products: Products::Tf32, ..Precision::uniform(DType::F32) };
    let [exact, trained] = [(Precision::uniform(DType::F64), None), (single, Some(Arch::Sm80))]
        .map(|kinds| Trained::new(description, mesh, 32, kinds));
    let functions = |kernel: &Kernel| functions_for(kernel, Arch::Sm80);
    let has_rounded = |kernel: &&Kernel| {
        functions(kernel).functions.iter().any(|function| is_rounded(&function.tile))
    };
    let count = trained.classes.kernels.iter().filter(has_rounded).count();
    assert!(count > 10, "{name}: {count} kernels round");
    let (_, exact) = exact.step(None);
    let (_, by_cpu) = trained.step(None);
    let (_, by_text) = trained.step_by_text(name, functions);
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut furthest: f64 = 0.0;
    for (weight, [want, _]) in &exact {
        let distance = |found: &BTreeMap<String, [Vec<f64>; 2]>| {
            let apart = found[weight][0].iter().zip(want).map(|(a, b)| a - b);
            norm(&apart.collect::<Vec<f64>>())
        };
        let (found, limit) = (distance(&by_text), 2.0 * distance(&by_cpu));
        assert!(found <= limit, "{name}: gradient of `{weight}` is {found} off, {limit} at most");
        furthest = furthest.max(found / norm(want));
    }
    assert!(furthest > 1e-5, "{name}: numbers are rounded: {furthest}");
    furthest
}

#[test]
fn whole_steps_in_tf32_are_as_near_as_rounding_explains() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mini = preset("gpt2-mini").expect("a preset");
    let gpt2 = check_rounded("tf32-gpt2", &mini, (1, 1));
    let llama = check_rounded("tf32-llama-2-2", &llama(), (2, 2));
    println!("gradients are off by {gpt2:.1e} and {llama:.1e} of their norm at most");
}

fn kind(tile: &Tile) -> String {
    match tile {
        Tile::Elementwise(_) => "elementwise".to_owned(),
        Tile::RowReduction(tile) => format!("row reduction by {}", tile.group),
        Tile::PartialSums(_) => "partial sums".to_owned(),
        Tile::Product(tile) => format!("product {} {:?}", tile.product.accumulate, tile.grouped),
        Tile::Tensor(tile) => {
            let TensorTile { product, copies, elements, shape, workspace, grouped, .. } = tile;
            let of = (product.accumulate, elements, shape.tile, grouped);
            format!("matrices {of:?} {copies:?} {workspace:?}")
        }
        Tile::SliceSum(tile) => format!("slices {}", tile.bias.is_some()),
        Tile::Warpgroup(tile) => {
            let [a, b] = &tile.operands;
            let is_mapped = tile.result.is_some();
            let of = (tile.product.accumulate, tile.shape, tile.grouped);
            format!("warpgroups {of:?} {a} {b} {is_mapped}")
        }
        Tile::Attention(tile) => format!("attention {:?}", tile.part),
        Tile::Flash(tile) => format!("flash {} by {}", tile.query_tile, tile.key_tile),
        Tile::FlashWarpgroup(tile) => format!("flash by warpgroups {}", tile.key_tile),
        Tile::FlashBackward(tile) => format!("flash backward by {}", tile.step),
        Tile::FlashWarpgroupBackward(tile) => format!("flash backward by warpgroups {}", tile.step),
        Tile::Lines(tile) => format!("lines {}", tile.lines.how.name()),
        Tile::Move(tile) => format!("move {tile}"),
        Tile::Routing(tile) => format!("routing {tile}"),
    }
}
