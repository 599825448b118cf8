//! Every file that is read, and how: a valid one of each format, and its reader.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use gantline::argument::PathArg;
use gantline::job::{ADAMW, PlanRequest};
use gantline::run::{Run, SETTINGS, Settings};
use gantline::verbs::score::read::{Known, read as read_layout};
use gantline::verbs::validate::read as read_table;
use gantline::{artefact, import, plan, prepare};
use ir::import::onnx::{Given, read_onnx};
use ir::import::{Options, preset, read_config};
use ir::text::{parse_module, parse_plan, parse_program};
use ir::{DType, Diagnostic, Span};
use planner::calibration::Calibration;
use planner::cluster::{Cluster, PRESETS};
use planner::estimate::row::COLUMNS;
use planner::limits::Limits;
use planner::machine::Machine;
use runtime::artefact::{Contents, Limits as FileLimits, decode, encode};
use runtime::checkpoint::{Slice, Store};
use runtime::metrics::{Lines, series};
use runtime::npy;
use runtime::tokens::Tokenizer;
use runtime::weights::Weights;
use serde_json::{Value, json};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// A format: a valid file of it, and how one is read. An error is a diagnostic's text.
pub(crate) struct Format {
    pub(crate) name: &'static str,
    pub(crate) valid: Vec<u8>,
    pub(crate) read: Box<dyn Fn(&[u8]) -> Result<(), Vec<Diagnostic>> + std::panic::RefUnwindSafe>,
}

/// As in the program, the panics of the library that reads tokenisers are no news. Their backtraces
/// would count as memory.
pub(crate) fn expect_panics_of_the_reader() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name() != Some(runtime::tokens::READER) {
            default(panic);
        }
    }));
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn diagnostics<T>(read: Result<T, runtime::Failure>) -> Result<(), Vec<Diagnostic>> {
    match read {
        Ok(_) => Ok(()),
        Err(runtime::Failure::Input(found)) => Err(found),
        Err(runtime::Failure::World(error)) => panic!("the world failed: {error}"),
    }
}

/// All formats; files are written below a directory.
pub(crate) fn formats(scratch: &Path) -> Vec<Format> {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/gpt2-tiny");
    let whole = contents();
    let mut formats = vec![
        of_text("plan", whole.plan.to_string(), |text| parse_plan("x.plan", text)),
        of_text("program", whole.programs[0].to_string(), |text| parse_program("x.program", text)),
        of_text("graph", whole.module.to_string(), |text| parse_module("x.graph", text)),
        of_text(
            "config.json",
            fs::read_to_string(reference.join("config.json")).unwrap(),
            |text| read_config("config.json", text, "damaged"),
        ),
        of_text("calibration", CALIBRATION.to_owned(), |text| Calibration::parse("x.toml", text)),
    ];
    for (name, preset) in PRESETS {
        formats.push(of_text(name, preset.to_owned(), |text| {
            let instruction_set = "avx2".to_owned();
            let machine = Machine { cores: 2, memory_bytes: 1 << 33, instruction_set };
            Cluster::parse("x.toml", text, &machine)
        }));
    }
    let artefact = encode(&whole).unwrap();
    formats.extend(members(&artefact));
    formats.push(fields(&whole));
    formats.push(Format {
        name: "artefact",
        valid: artefact,
        read: Box::new(|bytes| decode("x.gtl", bytes, &FileLimits::default()).map(drop)),
    });
    let file = scratch.join("model.safetensors");
    // The head, and as few weights as possible.
    let weights = fs::read(reference.join("model.safetensors")).unwrap();
    formats.push(of_file("safetensors", weights, file, |path| diagnostics(Weights::open(path))));
    let array = scratch.join("array.npy");
    npy::write(&array, DType::F32, &[3, 5], &[0; 60]).unwrap();
    let bytes = fs::read(&array).unwrap();
    formats.push(of_file("npy", bytes, array, |path| diagnostics(npy::read(path))));
    let file = scratch.join("tokenizer.json");
    formats.push(of_file("tokenizer.json", TOKENIZER.as_bytes().to_vec(), file, |path| {
        diagnostics(Tokenizer::choose(Some(path), None, 7))
    }));
    formats.push(settings(scratch));
    formats.push(onnx());
    formats.push(metrics(scratch));
    formats.extend(layouts());
    formats.push(table(scratch));
    formats.extend(manifests(scratch));
    formats
}

fn of_text<T: 'static>(
    name: &'static str,
    valid: String,
    read: impl Fn(&str) -> Result<T, Vec<Diagnostic>> + std::panic::RefUnwindSafe + 'static,
) -> Format {
    let read = Box::new(move |bytes: &[u8]| read(&text(bytes)).map(drop));
    Format { name, valid: valid.into_bytes(), read }
}

fn of_file(
    name: &'static str,
    valid: Vec<u8>,
    path: PathBuf,
    read: impl Fn(&Path) -> Result<(), Vec<Diagnostic>> + std::panic::RefUnwindSafe + 'static,
) -> Format {
    let read = Box::new(move |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        read(&path)
    });
    Format { name, valid, read }
}

/// The description of a run.
fn settings(scratch: &Path) -> Format {
    let folder = scratch.join("run");
    fs::create_dir_all(&folder).unwrap();
    let run = Run { folder: folder.clone() };
    run.write_settings(&Settings::defaults(&preset("gpt2-mini").unwrap(), 1000, 64)).unwrap();
    let path = folder.join(SETTINGS);
    let valid = fs::read(&path).unwrap();
    of_file("run.toml", valid, path, move |_| match Run::open(&folder) {
        Ok(_) => Ok(()),
        Err(gantline::failure::Failure::Input(found)) => Err(found),
        // Not UTF-8: the system's word for it.
        Err(gantline::failure::Failure::World(_)) => Ok(()),
    })
}

/// A graph whose weights are in the file.
fn onnx() -> Format {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/onnx");
    let valid = fs::read(folder.join("mlp.onnx")).unwrap();
    let read = |bytes: &[u8]| {
        let dims = BTreeMap::from([("batch".to_owned(), 2)]);
        let given = Given { dims, ..Given::default() };
        let mut open = |_: &str| Err("there is no other file".to_owned());
        read_onnx("x.onnx", "x", Bytes::copy_from_slice(bytes), &given, &mut open).map(drop)
    };
    Format { name: "onnx", valid, read: Box::new(read) }
}

/// The journal of a run: lines that are no lines are left out, so that nothing is refused but what
/// cannot be read at all.
fn metrics(scratch: &Path) -> Format {
    let path = scratch.join("metrics.jsonl");
    let mut lines = Lines::create(&path).unwrap();
    for step in 1..20 {
        lines.append(step, &[("loss", 2.5.into()), ("lr", 1e-3.into())]).unwrap();
    }
    let valid = fs::read(&path).unwrap();
    of_file("metrics", valid, path, |path| {
        let series = series(path, "loss").unwrap();
        Lines::resume(path, 10).unwrap();
        let is_whole = series.len() == 19;
        let wrong = || vec![Diagnostic::error("E0000", Span::default(), "lines are missing")];
        is_whole.then_some(()).ok_or_else(wrong)
    })
}

/// Layouts of other tools, as `score --from` reads them.
fn layouts() -> [Format; 4] {
    let of = |name: &'static str, source: &'static str, text: &str| {
        of_text(name, text.to_owned(), move |text| {
            let known = Known { layers: 32, devices: Some(16), ..Known::default() };
            read_layout(source, text, known)
        })
    };
    let calculon = include_str!("../calculon/winner-64.json");
    [
        of("script of Megatron-LM", "run.sh", MEGATRON),
        of("JSON of DeepSpeed", "ds.json", DEEPSPEED),
        of("JSON of Calculon", "x.json", calculon),
        of("TOML of torchtitan", "titan.toml", TORCHTITAN),
    ]
}

/// A table of measured runs.
fn table(scratch: &Path) -> Format {
    let path = scratch.join("runs.csv");
    let row = |id: &str| format!("{id}{}\n", ",8".repeat(COLUMNS.len()));
    let valid = format!("row_id,{}\n{}{}", COLUMNS.join(","), row("a"), row("\"b, c\""));
    of_file("table", valid.into_bytes(), path, |path| {
        match read_table(&PathArg::from(path.as_os_str().to_owned())) {
            Ok(_) => Ok(()),
            Err(gantline::failure::Failure::Input(found)) => Err(found),
            Err(gantline::failure::Failure::World(error)) => panic!("the world failed: {error}"),
        }
    })
}

/// The manifest of a checkpoint: as it is, and with a hash that fits what is damaged.
fn manifests(scratch: &Path) -> [Format; 2] {
    let root = scratch.join("checkpoints");
    let store = Store::new(&root, None);
    let draft = store.begin(1).unwrap();
    let (dims, bytes): (&[usize], &[u8]) = (&[2, 4], &[1; 32]);
    let slice = |name, block| Slice { name, dtype: DType::F32, dims, block, bytes };
    let slices = [slice("w", &[0..2, 0..4]), slice("w/state0", &[0..2, 0..4])];
    let entry = draft.write("rank-0", &slices).unwrap();
    let folder = draft.commit(vec![entry], json!({"step": 1})).unwrap();
    let path = folder.join("manifest.json");
    let valid = fs::read(&path).unwrap();
    let body = valid[..valid.len() - HASH_TAIL].to_vec();
    let (first, second) = (root.clone(), root);
    let hashed = path.clone();
    let read = move |bytes: &[u8]| {
        let hash = blake3::hash(bytes).to_hex();
        let mut whole = bytes.to_vec();
        whole.extend(format!(",\n  \"blake3\": \"{hash}\"\n}}\n").bytes());
        fs::write(&hashed, &whole).unwrap();
        diagnostics(Store::new(&second, None).open(1))
    };
    [
        of_file("manifest", valid, path, move |_| diagnostics(Store::new(&first, None).open(1))),
        Format { name: "manifest with its hash", valid: body, read: Box::new(read) },
    ]
}

/// Bytes of a manifest after what its hash is over.
const HASH_TAIL: usize = ",\n  \"blake3\": \"".len() + 64 + "\"\n}\n".len();

/// The members of an artefact, each damaged in a file whose hashes are right.
fn members(artefact: &[u8]) -> Vec<Format> {
    let parts = unpacked(artefact);
    let names =
        ["kernels.postcard", "module.graph", "plan.plan", "programs.postcard", "report.json"];
    let of = |name: &'static str| {
        let valid = parts[name].clone();
        let parts = parts.clone();
        let read = move |bytes: &[u8]| {
            decode("x.gtl", &forged(&parts, name, bytes), &FileLimits::default()).map(drop)
        };
        Format { name, valid, read: Box::new(read) }
    };
    names.map(of).into()
}

/// The members of an artefact.
pub(crate) fn unpacked(artefact: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut zip = ZipArchive::new(Cursor::new(artefact)).unwrap();
    let mut parts = BTreeMap::new();
    for index in 0..zip.len() {
        let mut member = zip.by_index(index).unwrap();
        let mut bytes = Vec::new();
        member.read_to_end(&mut bytes).unwrap();
        parts.insert(String::from_utf8_lossy(member.name_raw()).into_owned(), bytes);
    }
    parts
}

/// An artefact with another member, whose size and hash the manifest has.
pub(crate) fn forged(parts: &BTreeMap<String, Vec<u8>>, name: &str, bytes: &[u8]) -> Vec<u8> {
    let mut manifest: Value = serde_json::from_slice(&parts["manifest.json"]).unwrap();
    let hash = blake3::hash(bytes).to_hex().to_string();
    manifest["members"][name] = json!({"bytes": bytes.len(), "blake3": hash});
    let manifest = serde_json::to_vec(&manifest).unwrap();
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (part, there) in parts {
        zip.start_file(part.as_str(), options).unwrap();
        let bytes = match part.as_str() {
            "manifest.json" => &manifest,
            part if part == name => bytes,
            _ => there,
        };
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// The fields of an artefact's programs, each of which may be any number: offsets, sizes, slots,
/// routines, kernels, stages.
fn fields(whole: &Contents) -> Format {
    let valid = serde_json::to_vec(&whole.programs).unwrap();
    let whole = whole.clone();
    let read = move |bytes: &[u8]| {
        decode("x.gtl", &with_programs(&whole, bytes)?, &FileLimits::default()).map(drop)
    };
    Format { name: "fields of programs", valid, read: Box::new(read) }
}

/// An artefact with the programs that a JSON text says.
pub(crate) fn with_programs(whole: &Contents, text: &[u8]) -> Result<Vec<u8>, Vec<Diagnostic>> {
    let wrong = |why: String| vec![Diagnostic::error("E0000", Span::default(), why)];
    let programs = serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))?;
    encode(&Contents { programs, ..whole.clone() }).map_err(|error| wrong(error.to_string()))
}

/// What `compile` puts into a file, of two stages and two tensor-parallel ranks.
pub(crate) fn contents() -> Contents {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/gpt2-tiny");
    let text = fs::read_to_string(reference.join("config.json")).unwrap();
    let description = read_config("config.json", &text, "tiny").unwrap();
    let model = import(
        &description,
        &Options { seq: 8, dtype: DType::F32, dropout: None, documents: false },
    )
    .unwrap();
    let mut limits = Limits::default();
    limits.fix(planner::limits::Decision::Pp, 2);
    limits.fix(planner::limits::Decision::Tp, 2);
    let question = PlanRequest {
        module: prepare(&model).unwrap(),
        model: model.name.clone(),
        cluster: Cluster::load("cpu-local").unwrap(),
        ranks: 4,
        global_batch_size: 2,
        seq: 8,
        precision: ir::precision::Precision::uniform(DType::F32),
        optimizer: ADAMW,
        clip: Some(1.0),
        lora: None,
        limits,
    };
    let plan = plan(&question.job()).unwrap().plan;
    artefact::assemble(&model, &question, plan, &[]).unwrap()
}

pub(crate) const CALIBRATION: &str = "machine = \"a machine\"\nthreads = 2\nlaunch = \"1 us\"\n\
    rows = [[\"1 MiB\", \"10 GB/s\"]]\ncopy = [[\"1 KiB\", \"20 GB/s\"]]\n\
    [product]\nf32 = [[\"1 MFLOP\", \"50 GFLOP/s\"]]\n\
    [collective]\nlatency = \"5 us\"\nbandwidth = \"4 GB/s\"\n";

pub(crate) const MEGATRON: &str = "#!/bin/bash\nPARALLEL=(\n  --tensor-model-parallel-size 8\n\
    --sequence-parallel\n)\ntorchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
    ${PARALLEL[@]} --micro-batch-size 1 --global-batch-size 64 --seq-length 2048 \
    --recompute-granularity selective --use-distributed-optimizer\n";

pub(crate) const DEEPSPEED: &str = "{\n  \"train_batch_size\": 64,\n  \
    \"train_micro_batch_size_per_gpu\": 2,\n  \"gradient_accumulation_steps\": 2,\n  \
    \"zero_optimization\": {\"stage\": 3, \"offload_optimizer\": {\"device\": \"cpu\"}}\n}\n";

pub(crate) const TORCHTITAN: &str = "[training]\nlocal_batch_size = 8\nseq_len = 2048\n\
    [parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = \"1F1B\"\n";

/// A byte-level BPE with seven tokens.
pub(crate) const TOKENIZER: &str = r#"{"version":"1.0","truncation":null,"padding":null,
  "added_tokens":[],"normalizer":null,"post_processor":null,
  "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,
  "use_regex":true},
  "decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
  "model":{"type":"BPE","dropout":null,"unk_token":null,"fuse_unk":false,
  "continuing_subword_prefix":null,"end_of_word_suffix":null,
  "vocab":{"a":0,"b":1,"Ã":2,"©":3,"ab":4,"Ġ":5,"Ġab":6},"merges":["a b","Ġ ab"]}}"#;
