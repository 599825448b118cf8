//! `compile` and `run` of an artefact, from outside.

use std::fs;
use std::io::{Cursor, Read, Write};
use std::path::Path;

use ir::DType;
use ir::program::Step;
use ir::text::{parse_plan, parse_program};
use runtime::artefact::{Limits, encode, read};
use runtime::npy;
use runtime::weights::Weights;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use crate::cli::{Scratch, tiny};

/// The members of an artefact.
pub(crate) const MEMBERS: [&str; 6] = [
    "kernels.postcard",
    "manifest.json",
    "module.graph",
    "plan.plan",
    "programs.postcard",
    "report.json",
];

/// An artefact with one member changed, and the zip's own sums right.
fn repacked(artefact: &[u8], changed: &str, change: &dyn Fn(Vec<u8>) -> Vec<u8>) -> Vec<u8> {
    let mut zip = ZipArchive::new(Cursor::new(artefact)).expect("an artefact is a zip");
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let mut out = ZipWriter::new(Cursor::new(Vec::new()));
    for index in 0..zip.len() {
        let mut member = zip.by_index(index).expect("a member");
        let mut bytes = Vec::new();
        member.read_to_end(&mut bytes).expect("a member is read");
        let name = String::from_utf8_lossy(member.name_raw()).into_owned();
        let bytes = if name == changed { change(bytes) } else { bytes };
        out.start_file(name, options).expect("a member is begun");
        out.write_all(&bytes).expect("a member is written");
    }
    out.finish().expect("the zip is written").into_inner()
}

/// Artefacts that are damaged, for `golden/diag`: `t.gtl` is whole.
pub(crate) fn wrong_artefacts(scratch: &Scratch) {
    scratch.answer("compile tiny --ranks 2 --seq 16 --gbs 2 --mbs 1 -o t.gtl");
    let whole = fs::read(scratch.0.join("t.gtl")).expect("the artefact is there");
    let write = |name: &str, bytes: &[u8]| {
        fs::write(scratch.0.join(name), bytes).expect("a file is written");
    };
    write("text.gtl", b"no artefact");
    write("cut.gtl", &whole[..whole.len() / 2]);
    for member in MEMBERS {
        let flip = |mut bytes: Vec<u8>| {
            // In the manifest, the first hash: what else stands there differs by machine.
            let hash = bytes.windows(10).position(|w| w == b"\"blake3\": ");
            let at = hash.map_or(bytes.len() / 2, |hash| hash + 12);
            bytes[at] ^= 1;
            bytes
        };
        let stem = member.split_once('.').expect("members have an extension").0;
        write(&format!("flipped-{stem}.gtl"), &repacked(&whole, member, &flip));
    }
    // A flipped byte that nobody has packed again fails the zip's own sum.
    let mut raw = whole.clone();
    let at = raw.windows(12).position(|w| w == b"module.graph").expect("a name") + 40;
    raw[at] ^= 1;
    write("flipped.gtl", &raw);
    let old = |bytes: Vec<u8>| {
        let text = String::from_utf8(bytes).expect("the manifest is text");
        let version = format!("\"gantline\": \"{}\"", env!("CARGO_PKG_VERSION"));
        assert!(text.contains(&version), "{text}");
        text.replace(&version, "\"gantline\": \"0.0.1\"").into_bytes()
    };
    write("old.gtl", &repacked(&whole, "manifest.json", &old));
}

#[test]
fn an_artefact_is_timed_beside_its_prediction() {
    let scratch = tiny("artefact");
    let line = "compile tiny --ranks 2 --tp 2 --mbs 2 --seq 32 --gbs 4 -o t.gtl --json";
    let compiled = scratch.json(line);
    assert_eq!(compiled["schema"], "gantline.compile/1");
    let bytes = fs::read(scratch.0.join("t.gtl")).expect("the artefact is there");
    assert_eq!(compiled["bytes"], bytes.len());
    assert_eq!(compiled["blake3"], blake3::hash(&bytes).to_hex().as_str());
    let ran = scratch.json("run t.gtl --bench 5 --json");
    let number = |key: &str| ran[key].as_f64().unwrap_or_else(|| panic!("{key} in {ran}"));
    let (low, median, high) =
        (number("step_time_low_s"), number("step_time_s"), number("step_time_high_s"));
    assert!(0.0 < low && low <= median && median <= high, "{ran}");
    let rate = 128.0 / median;
    assert!((number("tokens_per_s") / rate - 1.0).abs() < 1e-9, "{ran}");
    assert_eq!(
        ran["predicted_step_time_s"],
        compiled["report"]["predictions"]["step_time_s"]["value"]
    );
    // 256 tokens that are all about as likely.
    assert!((number("loss") - 256.0_f64.ln()).abs() < 0.1, "{ran}");
    let text = scratch.answer("run t.gtl --bench 5");
    for word in ["median of 5", "predicted", "tokens/s"] {
        assert!(text.contains(word), "{text}");
    }
}

/// What is printed of a compiled file is all that its plan and its programs say.
#[test]
fn a_compiled_file_is_printed_and_reads_back() {
    let scratch = tiny("artefact-text");
    let line = "compile tiny --ranks 4 --tp 2 --pp 2 --mbs 1 --seq 16 --gbs 4 -o t.gtl --json";
    let compiled = scratch.json(line);
    let contents = read(&scratch.0.join("t.gtl"), &Limits::default()).expect("it is read");
    let text = scratch.answer("inspect t.gtl");
    let mut parts = text.split("\nprogram ");
    let (plan, kernels) =
        parts.next().and_then(|first| first.split_once("\n# ")).expect("a plan and kernels");
    assert_eq!(parse_plan("plan", plan).expect("a plan"), contents.plan);
    let lines: Vec<String> =
        contents.kernels.iter().enumerate().map(|(at, kernel)| format!("k{at} {kernel}")).collect();
    assert_eq!(kernels.lines().skip(1).collect::<Vec<_>>(), lines, "{kernels}");
    let programs: Vec<_> = parts
        .map(|rest| parse_program("program", &format!("program {rest}\n")).expect("a program"))
        .collect();
    assert_eq!(programs.len(), 4, "two stages of two ranks");
    assert_eq!(programs, contents.programs);
    assert_eq!(scratch.json("inspect t.gtl --json")["blake3"], compiled["blake3"]);
    let refused = scratch.run("inspect t.gtl --fusions");
    assert_eq!(refused.status.code(), Some(2));
}

/// A plan of two ranks, in a file, computes what one rank does without a file.
#[test]
fn an_artefact_computes_what_its_model_does() {
    let scratch = Scratch::new("artefact-values");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/gpt2-tiny");
    let expected = Weights::open(&folder.join("expected.safetensors")).expect("the values open");
    let mut dims = Vec::new();
    for (tensor, file) in [("input_ids", "ids.npy"), ("labels", "labels.npy")] {
        dims = expected.get(tensor).expect("the tensor is there").dims.clone();
        let numbers = expected.read_f64(tensor, None).expect("it is read");
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| (*x as i64).to_le_bytes()).collect();
        npy::write(&scratch.0.join(file), DType::I64, &dims, &bytes).expect("it is written");
    }
    let model = folder.display();
    let data = "--input input_ids=ids.npy --labels labels.npy --grad";
    scratch.answer(&format!("run {model} {data} --dtype f64 -o plain"));
    let size = format!("--gbs {} --seq {}", dims[0], dims[1]);
    let line = format!("compile {model} {size} --ranks 2 --tp 2 --dropout 0 --dtype f64 -o x.gtl");
    scratch.answer(&line);
    scratch.answer(&format!("run x.gtl --weights {model} {data} -o compiled"));
    let open = |name: &str| {
        let weights = Weights::open(&scratch.0.join(name).join("grads.safetensors"));
        weights.expect("gradients are written")
    };
    let (plain, compiled) = (open("plain"), open("compiled"));
    assert!(plain.tensors().count() > 10);
    for (name, _) in plain.tensors() {
        let read = |from: &Weights| from.read_f64(name, None).expect("both have it");
        let differences = read(&plain).into_iter().zip(read(&compiled)).map(|(a, b)| (a - b).abs());
        let worst = differences.fold(0.0, f64::max);
        assert!(worst < 1e-10, "{name}: {worst}");
    }
    let loss = |name: &str| fs::read(scratch.0.join(name).join("loss.npy")).expect("a loss");
    let number = |bytes: Vec<u8>| {
        let last = bytes.last_chunk().expect("the array has an element");
        f64::from_le_bytes(*last)
    };
    assert!((number(loss("plain")) - number(loss("compiled"))).abs() < 1e-10);
    // Weights of another model are refused.
    let other = folder.with_file_name("llama-tiny");
    let output = scratch.run(&format!("run x.gtl --weights {}", other.display()));
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("E5013"));
}

/// Programs whose hashes are right and whose references fit, and that would wait for ever, read
/// what nobody wrote, or leave a gradient out: refused before anything runs.
#[test]
fn programs_that_were_made_to_hang_are_refused() {
    let scratch = tiny("artefact-made");
    scratch.answer("compile tiny --ranks 2 --pp 2 --mbs 1 --seq 16 --gbs 2 -o whole.gtl");
    let whole = read(&scratch.0.join("whole.gtl"), &Limits::default()).expect("it is read");
    type Change = fn(&mut Vec<Step>);
    let changes: [(&str, Change); 4] = [
        ("nothing is sent", |steps| steps.retain(|step| !matches!(step, Step::Send { .. }))),
        ("nothing is received", |steps| steps.retain(|s| !matches!(s, Step::Receive { .. }))),
        ("all is turned round", |steps| steps.reverse()),
        ("half is left out", |steps| steps.truncate(steps.len() / 2)),
    ];
    for (what, change) in changes {
        for rank in 0..2 {
            let mut made = whole.clone();
            change(&mut made.programs[rank].steps);
            let bytes = encode(&made).expect("it is encoded");
            fs::write(scratch.0.join("made.gtl"), bytes).expect("it is written");
            let output = scratch.run("run made.gtl --bench 1");
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(6), "{what} on {rank}: {errors}");
            assert!(errors.contains("error[E21"), "{what} on {rank}: {errors}");
        }
    }
}

#[test]
fn another_machine_is_refused() {
    let scratch = tiny("artefact-machine");
    let file = "name = \"big\"\nextends = \"preset:cpu-local\"\n[device]\ncores = 1000\n\
                isa = \"rvv\"\n";
    scratch.write("big.toml", file);
    scratch.answer("compile tiny --cluster big.toml --ranks 2 --tp 2 --seq 16 --gbs 2 -o big.gtl");
    let output = scratch.run("run big.gtl --bench 1");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{errors}");
    assert!(errors.contains("compiled for 1000 cores"), "{errors}");
    assert!(errors.contains("compiled for the instruction set `rvv`"), "{errors}");
    assert!(output.stdout.is_empty());
}

/// Neither the number of threads nor the directory changes a byte.
#[test]
fn equal_questions_give_equal_bytes() {
    let scratch = tiny("artefact-equal");
    let file = "name = \"fixed\"\nextends = \"preset:cpu-local\"\n[device]\ncores = 2\n\
                isa = \"portable\"\n[device.memory]\ncapacity = \"1 GiB\"\n";
    scratch.write("fixed.toml", file);
    let line = "compile tiny --cluster fixed.toml --ranks 4 --tp 2 --pp 2 --mbs 2 --seq 32 -o";
    scratch.answer(&format!("{line} first.gtl"));
    scratch.answer(&format!("{line} again.gtl"));
    let read = |name: &str| fs::read(scratch.0.join(name)).expect("the artefact is there");
    assert!(read("first.gtl") == read("again.gtl"));
    let program = env!("CARGO_BIN_EXE_gantline");
    let mut pinned = std::process::Command::new("taskset");
    pinned.current_dir(&scratch.0).args(["-c", "0", program]);
    pinned.args(line.split(' ')).arg("pinned.gtl");
    match pinned.output() {
        Ok(output) if output.status.success() => assert!(read("first.gtl") == read("pinned.gtl")),
        _ => println!("skipped: no `taskset` to take cores away"),
    }
}
