//! Damaged files of every format: a diagnostic or an answer, no panic, and no memory that the file
//! does not account for.
//!
//! `SEED=n` tries that seed alone.

use std::collections::BTreeMap;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use bytes::Bytes;
use gantline::argument::PathArg;
use gantline::job::{ADAMW, Question};
use gantline::run::{Run, SETTINGS, Settings};
use gantline::verbs::score::read::{Known, read as read_layout};
use gantline::verbs::validate::read as read_table;
use gantline::{artefact, import, plan, prepare};
use ir::diagnostic::render;
use ir::import::onnx::{Given, read_onnx};
use ir::import::{Options, preset, read_config};
use ir::random::mix;
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
use stats_alloc::Region;

use crate::{ALLOCATOR, ALONE};

/// Damaged copies of each file.
const MUTATIONS: u64 = 600;
/// Bytes that reading a file may allocate in all: so many, and so many for each byte of it.
/// Chosen: far below what a size in a file can ask for, above what an honest reading takes.
const BYTES_MAX: usize = 8 << 20;
const BYTES_PER_BYTE: usize = 400;

/// A format: a valid file of it, and how one is read. An error is a diagnostic's text.
struct Format {
    name: &'static str,
    valid: Vec<u8>,
    read: Box<dyn Fn(&[u8]) -> Result<(), Vec<Diagnostic>> + std::panic::RefUnwindSafe>,
}

/// As in the program, the panics of the library that reads tokenisers are no news. Their backtraces
/// would count as memory.
fn expect_panics_of_the_reader() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name() != Some(runtime::tokens::READER) {
            default(panic);
        }
    }));
}

#[test]
fn damaged_files_are_refused_without_panic_or_great_memory() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    expect_panics_of_the_reader();
    let scratch = scratch();
    for format in formats(&scratch) {
        let Format { name, valid, read } = &format;
        assert!(read(valid).is_ok(), "{name}: the file itself is read: {:?}", read(valid));
        let mut refused = 0;
        for seed in seeds() {
            let damaged = mutated(valid, seed);
            let bound = BYTES_MAX + BYTES_PER_BYTE * damaged.len();
            let region = Region::new(ALLOCATOR);
            let answer = catch_unwind(|| read(&damaged));
            let allocated = region.change().bytes_allocated;
            let answer = answer.unwrap_or_else(|_| panic!("{name}, SEED={seed} panics"));
            assert!(allocated < bound, "{name}, SEED={seed} allocates {allocated} bytes");
            if let Err(found) = answer {
                refused += 1;
                assert!((1..=20).contains(&found.len()), "{name}, SEED={seed}");
                let text = String::from_utf8_lossy(&damaged);
                for diagnostic in &found {
                    assert!(!diagnostic.headline.is_empty(), "{name}, SEED={seed}");
                    assert!(!render(diagnostic, Some(&text)).is_empty(), "{name}, SEED={seed}");
                }
            }
        }
        println!("{name}: {refused} of {} refused", seeds().count());
        assert!(refused > 0 || seeds().count() == 1, "{name}: no damage is ever found");
    }
    let _ = fs::remove_dir_all(&scratch);
}

fn seeds() -> std::ops::Range<u64> {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    seed.map_or(0..MUTATIONS, |seed| seed..seed + 1)
}

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutations");
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// A file with one to four bytes or runs changed, or with one of its numbers made large.
fn mutated(valid: &[u8], seed: u64) -> Vec<u8> {
    let mut state = mix(seed ^ 0x5eed_f00d);
    let mut below = |limit: usize| {
        state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
        (state % limit.max(1) as u64) as usize
    };
    // Most of a file of weights is weights: damage its head more often than its rest.
    let head = valid.len().min(2048);
    let mut bytes = valid.to_vec();
    for _ in 0..1 + below(4) {
        let reach = if below(2) == 0 { head.min(bytes.len()) } else { bytes.len() };
        let at = below(reach);
        match below(9) {
            _ if bytes.is_empty() => bytes.push(below(256) as u8),
            0 => bytes[at] = below(256) as u8,
            1 => bytes[at] ^= 1 << below(8),
            2 => bytes.insert(at, b"0919{}[],:\"-=%@ \n"[below(17)]),
            3 => drop(bytes.remove(at)),
            4 => {
                let end = (at + below(64)).min(bytes.len());
                let piece = bytes[at..end].to_vec();
                let to = below(bytes.len());
                bytes.splice(to..to, piece);
            }
            5 => bytes.truncate(at),
            6 => bytes[at] = 0xff,
            // A number of the text becomes one that no memory has room for.
            _ => {
                let from = bytes[at..].iter().position(u8::is_ascii_digit).map(|n| at + n);
                let Some(from) = from else { continue };
                let digits = bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
                let large: [&[u8]; 4] =
                    [b"4294967297", b"1099511627776", b"9223372036854775807", b"-1"];
                bytes.splice(from..from + digits, large[below(4)].to_vec());
            }
        }
    }
    bytes
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

fn formats(scratch: &Path) -> Vec<Format> {
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
    formats.push(Format {
        name: "artefact",
        valid: encode(&whole).unwrap(),
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
    let folder = draft.commit(vec![entry], serde_json::json!({"step": 1})).unwrap();
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

/// What `compile` puts into a file, of two stages and two tensor-parallel ranks.
fn contents() -> Contents {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/gpt2-tiny");
    let text = fs::read_to_string(reference.join("config.json")).unwrap();
    let description = read_config("config.json", &text, "tiny").unwrap();
    let model =
        import(&description, &Options { seq: 8, dtype: DType::F32, dropout: None }).unwrap();
    let mut limits = Limits::default();
    limits.fix(planner::limits::Knob::Pp, 2);
    limits.fix(planner::limits::Knob::Tp, 2);
    let question = Question {
        module: prepare(&model).unwrap(),
        model: model.name.clone(),
        cluster: Cluster::load("cpu-local").unwrap(),
        ranks: 4,
        global_batch_size: 2,
        seq: 8,
        precision: ir::precision::Precision::uniform(DType::F32),
        optimizer: ADAMW,
        clip: Some(1.0),
        limits,
    };
    let plan = plan(&question.job()).unwrap().plan;
    artefact::assemble(&model, &question, plan).unwrap()
}

const CALIBRATION: &str = "machine = \"a machine\"\nthreads = 2\nlaunch = \"1 us\"\n\
    rows = [[\"1 MiB\", \"10 GB/s\"]]\ncopy = [[\"1 KiB\", \"20 GB/s\"]]\n\
    [product]\nf32 = [[\"1 MFLOP\", \"50 GFLOP/s\"]]\n\
    [collective]\nlatency = \"5 us\"\nbandwidth = \"4 GB/s\"\n";

const MEGATRON: &str = "#!/bin/bash\nPARALLEL=(\n  --tensor-model-parallel-size 8\n\
    --sequence-parallel\n)\ntorchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
    ${PARALLEL[@]} --micro-batch-size 1 --global-batch-size 64 --seq-length 2048 \
    --recompute-granularity selective --use-distributed-optimizer\n";

const DEEPSPEED: &str = "{\n  \"train_batch_size\": 64,\n  \
    \"train_micro_batch_size_per_gpu\": 2,\n  \"gradient_accumulation_steps\": 2,\n  \
    \"zero_optimization\": {\"stage\": 3, \"offload_optimizer\": {\"device\": \"cpu\"}}\n}\n";

const TORCHTITAN: &str = "[training]\nlocal_batch_size = 8\nseq_len = 2048\n[parallelism]\n\
    pipeline_parallel_degree = 2\npipeline_parallel_schedule = \"1F1B\"\n";

/// A byte-level BPE with seven tokens.
const TOKENIZER: &str = r#"{"version":"1.0","truncation":null,"padding":null,
  "added_tokens":[],"normalizer":null,"post_processor":null,
  "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,
  "use_regex":true},
  "decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
  "model":{"type":"BPE","dropout":null,"unk_token":null,"fuse_unk":false,
  "continuing_subword_prefix":null,"end_of_word_suffix":null,
  "vocab":{"a":0,"b":1,"Ã":2,"©":3,"ab":4,"Ġ":5,"Ġab":6},"merges":["a b","Ġ ab"]}}"#;
