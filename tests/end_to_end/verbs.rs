//! The verbs around planning and running, from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::CommandFactory;
use gantline::cli::Cli;
use ir::text::parse_module;
use planner::configuration::Configuration;
use runtime::weights::Weights;
use serde_json::{Value, json};

use crate::cli::{Scratch, tiny};

/// The verbs, `help` aside.
fn verbs() -> Vec<clap::Command> {
    let mut program = Cli::command();
    program.build();
    program.get_subcommands().filter(|verb| verb.get_name() != "help").cloned().collect()
}

#[test]
fn shells_complete_every_verb_and_flag() {
    let scratch = Scratch::new("completions");
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let text = scratch.answer(&format!("completions {shell}"));
        for verb in verbs() {
            assert!(text.contains(verb.get_name()), "{shell}: {}", verb.get_name());
            for flag in verb.get_arguments().filter_map(clap::Arg::get_long) {
                assert!(text.contains(flag), "{shell}: --{flag}");
            }
        }
    }
    // The shell at hand takes it.
    fs::write(scratch.0.join("words"), scratch.answer("completions bash")).expect("it is written");
    if let Ok(output) = Command::new("bash").args(["-n"]).arg(scratch.0.join("words")).output() {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn every_verb_has_a_manual_page() {
    let scratch = Scratch::new("man");
    let listed = scratch.answer("man -o pages");
    let page = |name: &str| fs::read_to_string(scratch.0.join("pages").join(name)).expect("a page");
    assert!(page("gantline.1").contains("gantline\\-plan(1)"), "{}", page("gantline.1"));
    for verb in verbs() {
        let name = format!("gantline-{}.1", verb.get_name());
        assert!(listed.contains(&name), "{listed}");
        let page = page(&name);
        assert!(page.contains(".SH SYNOPSIS"), "{name}");
        for flag in verb.get_arguments().filter_map(clap::Arg::get_long) {
            let flag = format!("\\-\\-{}", flag.replace('-', "\\-"));
            assert!(page.contains(&flag), "{name}: {flag}");
        }
    }
    for below in ["gantline-cluster-show.1", "gantline-checkpoint-verify.1"] {
        assert!(listed.contains(below), "{listed}");
        assert!(page(below).contains(".SH SYNOPSIS"), "{below}");
    }
    assert_eq!(scratch.answer("man plan").trim(), page("gantline-plan.1").trim());
    assert_eq!(scratch.run("man plam").status.code(), Some(2));
}

#[test]
fn the_doctor_sees_the_machine() {
    let scratch = Scratch::new("doctor");
    let cores = std::thread::available_parallelism().expect("there are cores").get();
    let document = scratch.json("doctor --json");
    assert_eq!(document["schema"], "gantline.doctor/1");
    assert_eq!(document["cores"], cores);
    // A library lies where the linker would look first.
    scratch.write("lib/libnccl.so", "");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gantline"));
    let folder = scratch.0.join("lib");
    command.args(["doctor", "--json"]).env("LD_LIBRARY_PATH", &folder);
    command
        .env("SLURM_PROCID", "3")
        .env("SLURM_STEP_NUM_TASKS", "8")
        .env("SLURM_STEP_NODELIST", "a[1-2]");
    for variable in ["PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK", "MASTER_ADDR"] {
        command.env_remove(variable);
    }
    let output = command.output().expect("the program starts");
    let document: Value = serde_json::from_slice(&output.stdout).expect("a document");
    let libraries = document["libraries"].as_array().expect("a list");
    let nccl = libraries.iter().find(|library| library["name"] == "NCCL").expect("it is listed");
    assert_eq!(nccl["file"], folder.join("libnccl.so").display().to_string());
    assert!(nccl["way_out"].is_null());
    for library in libraries {
        assert_eq!(library["file"].is_null(), library["way_out"].is_string(), "{library}");
    }
    assert_eq!(document["launcher"]["name"], "Slurm");
    assert_eq!(document["launcher"]["ranks"], "8");
    assert!(scratch.answer("doctor").contains(&format!("cores    {cores}")));
}

/// A library that answers as the driver of some GPUs does; none where there is no C compiler.
fn driver(scratch: &Scratch, status: i32, count: i32) -> Option<PathBuf> {
    let code = format!(
        "#include <string.h>\n#include <stddef.h>\n\
         int cuInit(unsigned flags) {{ return {status}; }}\n\
         int cuDeviceGetCount(int *n) {{ *n = {count}; return 0; }}\n\
         int cuDeviceGet(int *device, int ordinal) {{ *device = ordinal; return 0; }}\n\
         int cuDeviceGetName(char *name, int length, int device) {{\n\
             strncpy(name, \"NVIDIA H100 80GB HBM3\", length); return 0; }}\n\
         int cuDeviceTotalMem_v2(size_t *bytes, int device) {{\n\
             *bytes = 85520809984; return 0; }}\n"
    );
    let folder = scratch.0.join(format!("driver-{status}-{count}"));
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join("driver.c"), code).expect("it is written");
    let mut compiler = Command::new("cc");
    compiler.current_dir(&folder).args(["-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"]);
    compiler.status().ok().filter(|status| status.success()).map(|_| folder)
}

/// What is found on a machine is a cluster that other verbs take.
#[test]
fn a_machine_is_detected_with_and_without_gpus() {
    let scratch = Scratch::new("detect");
    let cores = std::thread::available_parallelism().expect("there are cores").get();
    let detect = |folder: &Path, line: &str| {
        let mut command = scratch.command(&[], line);
        command.env("LD_LIBRARY_PATH", folder).output().expect("the program starts")
    };
    let (Some(none), Some(some)) = (driver(&scratch, 100, 0), driver(&scratch, 0, 4)) else {
        println!("skipped: no C compiler");
        return;
    };
    let output = detect(&none, "cluster detect -o cores.toml");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read_to_string(scratch.0.join("cores.toml")).expect("it was written");
    assert!(text.starts_with("# the driver sees no GPU\n"), "{text}");
    let cluster = scratch.json("cluster show cores.toml --json");
    assert_eq!(cluster["device"]["cores"], cores);
    let output = detect(&some, "cluster detect -o gpus.toml");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let cluster = scratch.json("cluster show gpus.toml --json");
    assert_eq!(cluster["devices_per_node"], 4);
    assert_eq!(cluster["device"]["memory_bytes"]["value"], 85_520_809_984.0);
    let fit = scratch.run("fit llama-3-8b --cluster gpus.toml --devices 4 --gbs 4 --seq 2048");
    assert_eq!(fit.status.code(), Some(0), "{}", String::from_utf8_lossy(&fit.stderr));
    let output = detect(&some, "cluster detect --json");
    let document: Value = serde_json::from_slice(&output.stdout).expect("a document");
    assert_eq!(document["gpus"].as_array().map(Vec::len), Some(4), "{document:#}");
    assert_eq!(document["gpus"][3]["preset"], "h100");
    assert!(document["absent"].is_null());
}

/// An answer is the same with and without a cache, and one that was damaged is found again.
#[test]
fn answers_are_kept_by_what_they_depend_on() {
    let scratch = Scratch::new("cache");
    let cluster = |bandwidth: u32| {
        let text = "name = \"own\"\nextends = \"preset:h100\"\n[[level]]\nname = \"nvlink\"";
        scratch.write("own.toml", &format!("{text}\nbandwidth = \"{bandwidth} GB/s\"\n"));
    };
    cluster(450);
    let line = "plan llama-3-8b --cluster own.toml --devices 8 --gbs 8 --seq 2048";
    let folder = scratch.0.join("cache/gantline/answers");
    let kept = || -> Vec<PathBuf> {
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let plain = scratch.answer(&format!("{line} --no-cache"));
    assert!(kept().is_empty(), "{:?}", kept());
    assert_eq!(scratch.answer(line), plain);
    let [file] = &kept()[..] else { panic!("one answer is kept: {:?}", kept()) };
    let whole = fs::read(file).expect("it was kept");
    assert_eq!(scratch.answer(line), plain);
    // What is kept is what is printed.
    let other = "another answer\n";
    let hash = blake3::hash(other.as_bytes()).to_hex();
    fs::write(file, format!("gantline-answer/1 3 {hash}\n{other}")).expect("it is written");
    let output = scratch.run(line);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(3), other.as_bytes()));
    for damage in [&whole[..whole.len() - 1], &b""[..], &[0xff; 200]] {
        fs::write(file, damage).expect("it is written");
        assert_eq!(scratch.answer(line), plain);
        assert!(fs::read(file).expect("it was kept") == whole, "it is not written again");
    }
    // Another question is another file: other flags, other content of the same file.
    scratch.answer(&format!("{line} --json"));
    assert_eq!(kept().len(), 2);
    cluster(225);
    assert_ne!(scratch.answer(line), plain);
    assert_eq!(kept().len(), 3);
    // What cannot be kept is an answer all the same.
    fs::remove_dir_all(scratch.0.join("cache")).expect("it was there");
    scratch.write("cache", "a file");
    cluster(450);
    assert_eq!(scratch.answer(line), plain);
}

/// Products of f32 that is rounded to tf32 are planned for where devices have them: as `score`
/// prices the same layout, faster than without, and kept in the file of a plan.
#[test]
fn f32_may_be_rounded_in_products() {
    let scratch = Scratch::new("tf32");
    let asked = "llama-3-8b --cluster a100 --devices 8 --gbs 16 --seq 2048";
    let number = |value: &Value| value.as_f64().expect("a number");
    let plan = |dtype: &str, more: &str| {
        scratch.json(&format!("plan {asked} --dtype {dtype} --json{more}"))
    };
    let [exact, rounded] = [plan("f32", ""), plan("tf32", " -o plan.json")];
    assert_eq!(rounded["dtype"], "tf32");
    assert!(number(&rounded["step_time_s"]) < 0.5 * number(&exact["step_time_s"]), "{rounded:#}");
    let line = asked.replace("--devices 8 ", "");
    let scored = scratch.json(&format!("score {line} --from plan.json --json --dtype tf32"));
    assert_eq!(scored["step_time_s"], rounded["step_time_s"]);
    let scored = scratch.json(&format!("score {line} --from plan.json --json"));
    assert_eq!(scored["step_time_s"], rounded["step_time_s"]);
    let text = rounded["text"].as_str().expect("a layout");
    let mut compare = scratch.command(&[], &format!("compare {asked} --dtype tf32 --json"));
    let compared = compare.args(["--with", text]).output().expect("the program starts");
    let compared: Value = serde_json::from_slice(&compared.stdout).expect("a document");
    assert_eq!(compared["plans"][0]["step_time_s"], rounded["step_time_s"]);
    let served = scratch.json(&format!("fit {asked} --dtype tf32 --for inference --json"));
    assert_eq!(served["dtype"], "tf32");
    let line = asked.replace("a100 --devices 8", "v100");
    for verb in ["plan", "fit"] {
        let output = scratch.run(&format!("{verb} {line} --dtype tf32"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{verb}: {errors}");
        assert!(errors.contains("no products in tf32"), "{verb}: {errors}");
    }
}

/// A layout for inference is scored as the plan of the same layout says.
#[test]
fn layouts_for_inference_are_scored_as_they_are_planned() {
    let scratch = Scratch::new("score-for");
    let model = "llama-3-70b --cluster h100 --seq 4096";
    for purpose in ["prefill", "decode"] {
        for (tp, pp, copies) in [(8, 1, 2), (4, 2, 2), (2, 8, 1)] {
            let limits = format!("--fix tp={tp} --fix pp={pp}");
            let plan = format!("plan {model} --devices 16 {limits} --for {purpose} --json");
            let planned = scratch.json(&plan);
            let flags = format!("--tp {tp} --pp {pp} --dp {copies}");
            let line = format!("score {model} {flags} --for {purpose} --json");
            let scored = scratch.json(&line);
            assert_eq!(scored["rows"], planned["rows"], "{line}");
            assert_eq!(scored["fits"], true, "{line}");
        }
    }
    // Too many sequences at once do not fit; a prompt still does.
    let line = format!("score {model} --tp 8 --gbs 100000");
    assert_eq!(scratch.run(&format!("{line} --for decode")).status.code(), Some(3));
    assert_eq!(scratch.run(&format!("{line} --for prefill")).status.code(), Some(0));
    let output = scratch.run(&format!("score {model} --tp 8 --cp 2 --zero 1 --for decode"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("no context parallelism") && errors.contains("no gradients"));
    assert_eq!(scratch.run(&format!("score {model} --tp 3 --for decode")).status.code(), Some(2));
    assert_eq!(scratch.run(&format!("score {model} --tp 8")).status.code(), Some(2));
}

/// A node of each of two kinds.
const MIXED: &str = "name = \"mixed\"\n[[group]]\nextends = \"preset:h100\"\n\
                     [[group]]\nextends = \"preset:a100\"\n";

/// A batch is shared over groups: the plan says which ranks do what, and no group alone is faster.
#[test]
fn devices_of_two_kinds_share_a_batch() {
    let scratch = Scratch::new("groups");
    scratch.write("mixed.toml", MIXED);
    let asked = "llama-3-8b --gbs 64 --seq 8192";
    let shares = format!("{asked} --cluster mixed.toml --devices 16 --fix pp=1");
    let plan = scratch.json(&format!("plan {shares} --json"));
    assert_eq!(plan["kind"], "shares");
    let groups = plan["groups"].as_array().expect("a list");
    let number = |value: &Value| value.as_f64().expect("a number");
    let all = |key: &str| groups.iter().map(|group| number(&group[key])).collect::<Vec<f64>>();
    assert_eq!((all("first_rank"), all("ranks")), (vec![0.0, 8.0], vec![8.0, 8.0]), "{plan:#}");
    let samples = all("samples");
    assert!(samples[0] > samples[1] && samples[1] > 0.0, "{plan:#}");
    assert_eq!(samples.iter().sum::<f64>(), 64.0);
    let slowest = all("step_time_s").into_iter().fold(0.0, f64::max);
    let whole = slowest + number(&plan["exchange_s"]);
    assert!((number(&plan["step_time_s"]) / whole - 1.0).abs() < 1e-12, "{plan:#}");
    for alone in ["h100", "a100"] {
        let alone = scratch.json(&format!("plan {asked} --cluster {alone} --devices 8 --json"));
        assert!(number(&alone["step_time_s"]) > whole, "{alone:#}");
    }
    let page = scratch.answer(&format!("plan {shares}"));
    assert!(page.contains("0..7") && page.contains("8..15"), "{page}");
    // Stages on both groups may be faster; the faster group then has more layers.
    let line = scratch.json(&format!("plan {asked} --cluster mixed.toml --devices 16 --json"));
    assert!(number(&line["step_time_s"]) <= whole, "{line:#}");
    if line["kind"] == "stages" {
        let parts = line["groups"].as_array().expect("a list");
        let layers: BTreeMap<&str, f64> = parts
            .iter()
            .map(|part| (part["group"].as_str().expect("a name"), number(&part["layers"])))
            .collect();
        assert!(layers["h100"] > layers["a100"], "{line:#}");
        assert_eq!(layers.values().sum::<f64>(), 32.0, "{line:#}");
    }
    // The layouts of the plan cost what the plan says, and are compared with the best of all.
    let texts = groups.iter().map(|group| group["text"].as_str().expect("a layout"));
    let texts = texts.collect::<Vec<_>>().join("; ");
    let score = |texts: &str, more: &str| {
        let line = format!("score {asked} --cluster mixed.toml {more}");
        let mut command = scratch.command(&[], line.trim_end());
        command.args(["--config", texts]).output().expect("the program starts")
    };
    let scored = score(&texts, "--json");
    let scored: Value = serde_json::from_slice(&scored.stdout).expect("a document");
    assert!((number(&scored["step_time_s"]) / whole - 1.0).abs() < 1e-9, "{scored:#}");
    let large = score("dp=8; -", "");
    assert_eq!(large.status.code(), Some(3), "{}", String::from_utf8_lossy(&large.stdout));
    for (wrong, way_out) in [("dp=8", "one for each group"), ("dp=7; dp=8", "has 8")] {
        let refused = score(wrong, "");
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{errors}");
        assert!(errors.contains(way_out), "{errors}");
    }
    let line = format!("compare {asked} --cluster mixed.toml --json");
    let mut command = scratch.command(&[], &line);
    let compared = command.args(["--with", &texts]).output().expect("the program starts");
    let compared: Value = serde_json::from_slice(&compared.stdout).expect("a document");
    let steps: Vec<f64> = compared["plans"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|plan| number(&plan["step_time_s"]))
        .collect();
    assert!(steps.len() == 2 && steps[1] <= steps[0], "{compared:#}");
    let few = scratch.run(&format!("plan {asked} --cluster mixed.toml --devices 8"));
    assert_eq!(few.status.code(), Some(2));
}

/// Bills and explanations of groups are those of their plan; fewer groups are never faster.
#[test]
fn groups_are_billed_and_explained() {
    let scratch = Scratch::new("bills");
    scratch.write("mixed.toml", MIXED);
    let asked = "llama-3-8b --gbs 64 --seq 8192 --cluster mixed.toml";
    let number = |value: &Value| value.as_f64().expect("a number");
    let plan = |flags: &str| scratch.json(&format!("plan {asked} --json{flags}"));
    let fastest = plan("");
    let step_s = number(&fastest["step_time_s"]);
    let cost = scratch.json(&format!("cost {asked} --tokens 1B --price 2 --watts 1000 --json"));
    let steps = (1e9 / (64.0 * 8192.0_f64)).ceil();
    let expected = &cost["expected"];
    assert!((number(&expected["time_s"]) / (steps * step_s) - 1.0).abs() < 1e-9, "{cost:#}");
    let hours = 16.0 * steps * step_s / 3600.0;
    assert!((number(&expected["money"]) / (2.0 * hours) - 1.0).abs() < 1e-9, "{cost:#}");
    assert!((number(&expected["energy_kwh"]) / hours - 1.0).abs() < 1e-9, "{cost:#}");
    let explained = scratch.json(&format!("explain {asked} --json"));
    assert_eq!(number(&explained["step_time_s"]), step_s);
    let others = explained["others"].as_array().expect("a list");
    assert!(others.len() >= 2, "{explained:#}");
    assert!(others.iter().all(|other| number(&other["step_time_s"]) >= step_s), "{explained:#}");
    let fit = scratch.json(&format!("fit {asked} --json"));
    assert_eq!((&fit["fits"], &fit["step_time_s"]), (&Value::Bool(true), &fastest["step_time_s"]));
    // Device time: the faster devices alone; memory: less than the fastest plan needs.
    let cheap = plan(" --objective cost");
    let device_s = |plan: &Value| number(&plan["used_devices"]) * number(&plan["step_time_s"]);
    assert!(device_s(&cheap) < device_s(&fastest), "{cheap:#}");
    let sparing = plan(" --objective energy --watts 1000");
    assert!((number(&sparing["energy_j"]) / (1000.0 * device_s(&cheap)) - 1.0).abs() < 1e-9);
    let fullest = |plan: &Value| {
        let groups = plan["groups"].as_array().expect("a list").iter();
        groups.filter_map(|group| group["peak_mem_bytes"].as_f64()).fold(0.0, f64::max)
    };
    assert!(fullest(&plan(" --objective memory")) < fullest(&fastest));
    let slow = scratch.json(&format!("size {asked} --tokens 1B --deadline 30d --json"));
    assert_eq!(number(&slow["devices"]), 8.0, "{slow:#}");
    let usual = asked.replace("--gbs 64 ", "");
    let size = scratch.json(&format!("size {usual} --tokens 1B --deadline 30d --json"));
    assert_eq!(size["gbs"], 1024, "{size:#}");
    // Without a word on what they draw, they are priced at the limits of their boards.
    let of_boards = scratch.json(&format!("plan {asked} --objective energy --json"));
    assert!(number(&of_boards["energy_j"]) > 0.0, "{of_boards:#}");
}

/// What is cheap depends on what the user says that groups cost; bills add it up, and say from when
/// the prices are.
#[test]
fn groups_have_prices_of_their_own() {
    let scratch = Scratch::new("prices");
    let number = |value: &Value| value.as_f64().expect("a number");
    let write = |prices: [f64; 2]| {
        let group = |preset: &str, price: f64| {
            format!(
                "[[group]]\nextends = \"preset:{preset}\"\n[group.deployment.price]\n\
                 per_device_hour = \"{price} EUR\"\nas_of = 2026-05-01\nsource = \"a list\"\n"
            )
        };
        let groups = group("h100", prices[0]) + &group("a100", prices[1]);
        scratch.write("mixed.toml", &format!("name = \"mixed\"\n{groups}"));
    };
    let asked = "llama-3-8b --gbs 64 --seq 4096 --cluster mixed.toml";
    let used = |plan: &Value| -> Vec<String> {
        let groups = plan["groups"].as_array().expect("a list").iter();
        let groups = groups.filter(|group| group["plan"].is_string() || group["text"].is_string());
        groups.map(|group| group["group"].as_str().expect("a name").to_owned()).collect()
    };
    // The same devices are the cheaper ones at one price, and not at another.
    for (prices, cheap) in [([2.0, 2.0], "h100"), ([20.0, 2.0], "a100")] {
        write(prices);
        let plan = scratch.json(&format!("plan {asked} --objective cost --json"));
        assert_eq!(used(&plan), [cheap], "{prices:?}: {plan:#}");
        let price = if cheap == "h100" { prices[0] } else { prices[1] };
        let money = 8.0 * price * number(&plan["step_time_s"]) / 3600.0;
        assert!((number(&plan["money"]) / money - 1.0).abs() < 1e-9, "{plan:#}");
        let fastest = scratch.json(&format!("plan {asked} --json"));
        assert!(number(&fastest["money"]) > money, "{fastest:#}");
        let bill = format!("cost {asked} --tokens 1B");
        let cost = scratch.json(&format!("{bill} --json"));
        let paid = number(&fastest["money"]) * number(&cost["steps"]);
        assert!((number(&cost["expected"]["money"]) / paid - 1.0).abs() < 1e-9, "{cost:#}");
        // What a flag says counts before what files say.
        let flag = scratch.json(&format!("{bill} --price 3 --json"));
        let hours = number(&flag["expected"]["device_hours"]);
        assert!((number(&flag["expected"]["money"]) / (3.0 * hours) - 1.0).abs() < 1e-9);
        let page = scratch.answer(&bill);
        assert!(page.contains("EUR as of 2026-05-01 (a list)"), "{page}");
    }
    let shown = scratch.answer("cluster show mixed.toml");
    assert!(shown.contains("per_device_hour = \"20 EUR\""), "{shown}");
}

/// What a data set costs on CPUs is what the steps of their plan take.
#[test]
fn ranks_of_cpus_are_billed() {
    let scratch = tiny("cpu-bill");
    let asked = "tiny --ranks 2 --seq 16 --gbs 4";
    let plan = scratch.json(&format!("plan {asked} --json"));
    let cost = scratch.json(&format!("cost {asked} --tokens 1M --price 2 --watts 100 --json"));
    let number = |value: &Value| value.as_f64().expect("a number");
    let steps = (1e6 / 64.0_f64).ceil();
    assert_eq!((number(&cost["steps"]), &cost["devices"]), (steps, &json!(2)), "{cost:#}");
    for (run, time) in
        [("low", "step_time_low_s"), ("expected", "step_time_s"), ("high", "step_time_high_s")]
    {
        let (run, seconds) = (&cost[run], steps * number(&plan[time]));
        assert!((number(&run["time_s"]) / seconds - 1.0).abs() < 1e-9, "{cost:#}");
        let hours = 2.0 * seconds / 3600.0;
        assert!((number(&run["money"]) / (2.0 * hours) - 1.0).abs() < 1e-9, "{cost:#}");
        assert!((number(&run["energy_kwh"]) / (0.1 * hours) - 1.0).abs() < 1e-9, "{cost:#}");
    }
    let late = scratch.run(&format!("cost {asked} --tokens 1T --deadline 1s"));
    assert_eq!(late.status.code(), Some(3));
}

/// Plans over groups are exported where they are one layout; else it is said why, and the share of
/// one group is.
#[test]
fn plans_over_groups_are_exported_as_far_as_they_can_be() {
    let scratch = Scratch::new("export-groups");
    scratch.write("mixed.toml", MIXED);
    let asked = "llama-3-8b --gbs 64 --seq 8192 --cluster mixed.toml --devices 16";
    let plan = scratch.json(&format!("plan {asked} --fix pp=1 --json -o plan.json"));
    let groups = plan["groups"].as_array().expect("a list");
    for tool in ["megatron", "deepspeed", "torchtitan", "calculon"] {
        let refused = scratch.run(&format!("export plan.json --to {tool}"));
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(4), "{tool}: {errors}");
        assert!(errors.contains("--group") && errors.contains("`h100` has the most"), "{errors}");
    }
    for group in groups {
        let name = group["group"].as_str().expect("a name");
        let line = format!("export plan.json --lossy --to megatron --group {name} -o one.txt");
        assert_eq!(scratch.run(&line).status.code(), Some(0), "{group:#}");
        let line = format!(
            "score llama-3-8b --profile gantline --cluster {name} --from one.txt --seq 8192"
        );
        let scored = scratch.json(&format!("{line} --devices 8 --json"));
        let c: Configuration = group["text"].as_str().expect("a text").parse().expect("a layout");
        let again: Configuration =
            scored["configuration"].as_str().expect("a text").parse().expect("a layout");
        // Placement and partial shards have no term there.
        let told = |c: &Configuration| (c.tp, c.dp, c.cp, c.pp, c.microbatch, c.zero.stage);
        assert_eq!(told(&again), told(&c), "{name}");
    }
    let wrong = scratch.run("export plan.json --to megatron --group h10");
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("did you mean `h100`?"));
    // Stages that lie alike on both are one pipeline.
    let line = scratch.json(&format!("plan {asked} --json"));
    let mut line = line.clone();
    if line["kind"] == "stages" {
        let text = |at: usize| line["groups"][at]["text"].as_str().expect("a text").to_owned();
        let c: [Configuration; 2] = [0, 1].map(|at| text(at).parse().expect("a layout"));
        let alike = Configuration { pp: c[0].pp, stage_layers: vec![], ..c[0].clone() };
        let joined = alike == Configuration { pp: c[0].pp, stage_layers: vec![], ..c[1].clone() };
        scratch.write("line.json", &line.to_string());
        let code = scratch.run("export line.json --to megatron --lossy").status.code();
        assert_eq!(code, Some(if joined { 0 } else { 4 }), "{line:#}");
    }
    line["kind"] = json!("other");
    scratch.write("broken.json", &line.to_string());
    assert_eq!(scratch.run("export broken.json --to megatron").status.code(), Some(6));
}

/// A limit of memory is kept by every verb, and what it refuses says what would fit.
#[test]
fn memory_is_limited_by_a_flag() {
    let scratch = Scratch::new("limited");
    scratch.write("mixed.toml", MIXED);
    let number = |value: &Value| value.as_f64().expect("a number");
    let gib = f64::from(1 << 30);
    for on in ["h100 --devices 8", "mixed.toml"] {
        let asked = format!("llama-3-8b --gbs 64 --seq 4096 --cluster {on}");
        let plan = |flags: &str| scratch.json(&format!("plan {asked}{flags} --json"));
        let fullest = |plan: &Value| match plan["groups"].as_array() {
            Some(groups) => {
                let needs = groups.iter().filter_map(|group| group["peak_mem_bytes"].as_f64());
                needs.fold(0.0, f64::max)
            }
            None => number(&plan["peak_mem_bytes"]),
        };
        let (free, tight) = (plan(""), plan(" --max memory=40GiB"));
        assert!(fullest(&free) > 40.0 * gib && fullest(&tight) <= 40.0 * gib, "{tight:#}");
        assert!(number(&tight["step_time_s"]) > number(&free["step_time_s"]));
        let step_s = number(&tight["step_time_s"]);
        let explained = scratch.json(&format!("explain {asked} --json --max memory=40GiB"));
        assert_eq!(number(&explained["step_time_s"]), step_s, "{on}");
        let line = format!("compare {asked} --max memory=40GiB --json");
        let with = if on == "mixed.toml" { "tp=8; tp=8" } else { "tp=8" };
        let mut command = scratch.command(&[], &line);
        let compared = command.args(["--with", with]).output().expect("it starts");
        let compared: Value = serde_json::from_slice(&compared.stdout).expect("a document");
        let best = compared["plans"].as_array().and_then(|plans| plans.last()).expect("a plan");
        assert_eq!(number(&best["step_time_s"]), step_s, "{on}");
        for verb in ["plan", "fit"] {
            let line = format!("{verb} {asked} --max memory=3GiB --fix offload=off");
            let refused = scratch.run(&line);
            let errors = String::from_utf8_lossy(&refused.stderr);
            assert_eq!(refused.status.code(), Some(3), "{line}: {errors}");
            let enough = errors.split("with `--max memory=").nth(1);
            let enough = enough.and_then(|rest| rest.split('`').next()).expect("a way out");
            let line = line.replace("3GiB", enough);
            assert_eq!(scratch.run(&line).status.code(), Some(0), "{line}");
        }
    }
    let asked = "llama-3-8b --cluster h100 --tokens 1B --deadline 30d --json";
    let devices = |flags: &str| number(&scratch.json(&format!("size {asked}{flags}"))["devices"]);
    assert!(devices(" --max memory=8GiB --fix offload=off") > devices(""));
    // What fits on more devices is within the limits.
    let asked = "plan llama-3-70b --cluster rtx4090 --ranks 8 --gbs 16 --forbid offload";
    let refused = scratch.run(&format!("{asked} --seq 2048"));
    let errors = String::from_utf8_lossy(&refused.stderr);
    let near = errors.split("devices this fits: ").nth(1).expect("a way out");
    assert!(near.contains("tp=") && !near.contains("offload"), "{near}");
    // They are the fewest, to an eighth of the power of two that they are below.
    let count = errors.split(" devices this fits").next().and_then(|text| text.rsplit(' ').next());
    let count: u32 = count.and_then(|count| count.parse().ok()).expect("a number");
    for (devices, code) in [(count, 0), (count - count.next_power_of_two() / 8, 3)] {
        let line = asked.replace("--ranks 8", &format!("--ranks {devices}"));
        let found = scratch.run(&format!("{line} --seq 2048"));
        assert_eq!(found.status.code(), Some(code), "{devices} devices");
    }
}

/// Of CPUs it is the memory that the ranks of a node share: each limit below what the last answer
/// needs has a slower plan that keeps it, down to one that none keeps but with values on a disk.
#[test]
fn memory_of_cpus_is_limited_by_a_flag() {
    let scratch = Scratch::new("limited-cpus");
    let (mut before_s, mut limit, mut plans) = (0.0, u64::MAX, 0);
    loop {
        let line =
            format!("plan gpt2-mini --ranks 4 --max memory={limit}B --json --forbid offload");
        let answer = scratch.run(&line);
        if answer.status.code() == Some(3) {
            break;
        }
        let answer: Value = serde_json::from_slice(&answer.stdout).expect("a document");
        let best = &answer["plans"][0];
        let [need, have] = ["need_bytes", "have_bytes"].map(|key| best[key].as_u64().unwrap());
        let step_s = best["step_time_s"].as_f64().unwrap();
        assert!(need <= have && have <= limit && step_s >= before_s, "{line}: {best}");
        (before_s, limit, plans) = (step_s, need - 1, plans + 1);
    }
    assert!(plans > 3, "{plans}");
    let answer = scratch.json(&format!("plan gpt2-mini --ranks 4 --max memory={limit}B --json"));
    let best = &answer["plans"][0];
    let text = best["plan"].as_str().expect("a plan");
    let need = best["need_bytes"].as_u64().expect("bytes");
    assert!(text.contains("=disk") && need <= limit, "{best}");
    let fits = scratch.json("fit gpt2-mini --ranks 4 --max memory=120MiB --json");
    let rows = fits["rows"].as_array().expect("rows");
    let fit = |row: &Value| row["need_bytes"].as_u64().unwrap() <= 120 << 20;
    assert!(rows.iter().any(fit) && !rows.iter().all(fit), "{fits:#}");
    assert!(rows.iter().all(|row| row["have_bytes"] == 120 << 20), "{fits:#}");
}

/// Rewriting is exact, and each pass leaves a module that reads back and verifies.
#[test]
fn rules_are_verified_and_passes_are_written() {
    let scratch = tiny("rules");
    let mut command = scratch.command(&[], "verify tiny --ranks 1 --seq 9 --bisect-rules --json");
    let output = command.env("DUMP", "passes").output().expect("the program starts");
    let document: Value = serde_json::from_slice(&output.stdout).expect("one document");
    assert_eq!((output.status.code(), &document["ok"]), (Some(0), &json!(true)), "{document}");
    assert_eq!(document["culprit"], Value::Null);
    assert!(!document["rules"].as_array().expect("rules").is_empty(), "{document}");
    for name in ["00-import", "01-recognise", "02-autodiff", "03-inline", "04-simplify"] {
        let path = scratch.0.join("passes").join(format!("{name}.graph"));
        let text = fs::read_to_string(&path).expect("the pass is written");
        let module = parse_module(name, &text).expect("it reads back");
        assert_eq!(ir::verify::verify(&module), [], "{name}");
    }
    fs::write(scratch.0.join("file"), "").expect("it is written");
    let mut command = scratch.command(&[], "verify tiny --ranks 2 --seq 9");
    let output = command.env("DUMP", "file").output().expect("the program starts");
    assert_eq!(output.status.code(), Some(7), "a file is no directory");
}

/// What is exported is scored as the plan itself was, step for step.
#[test]
fn a_plan_is_exported_to_other_tools_and_scored_back() {
    let scratch = Scratch::new("export-plan");
    let fixed = "--fix placement=usual --fix offload=off --fix cp=1 --fix schedule=1f1b";
    let megatron = "--fix zero=1 --fix shard=0 --fix pp=4";
    let calculon = "--fix zero=1 --fix shard=0 --fix recompute=full --fix vpp=2";
    for (tool, fixes) in [("megatron", megatron), ("calculon", calculon)] {
        let asked = "gpt3-175b --cluster h100 --devices 64 --gbs 64 --seq 2048";
        scratch.answer(&format!("plan {asked} {fixed} {fixes} -o plan.json"));
        let text = fs::read_to_string(scratch.0.join("plan.json")).expect("it was written");
        let plan: Value = serde_json::from_str(&text).expect("a document");
        scratch.answer(&format!("export plan.json --to {tool} -o {tool}.txt"));
        let score = format!(
            "score gpt3-175b --profile gantline --cluster h100 --from {tool}.txt --seq 2048"
        );
        let scored = scratch.json(&format!("{score} --devices 64 --json"));
        assert_eq!(scored["configuration"], plan["text"], "{tool}");
        assert_eq!(scored["step_time_s"], plan["step_time_s"], "{tool}");
        // How kernels and collectives execute is the style's, not the layout's.
        let style = [
            "datatype",
            "fused_activation",
            "attention_type",
            "tensor_par_overlap",
            "data_par_overlap",
        ];
        let left = if tool == "calculon" { json!(style) } else { json!([]) };
        assert_eq!(scored["left_out"], left, "{tool}");
    }
    let direct = scratch.json("score gpt3-175b --cluster h100 --from plan.json --json");
    assert!(direct["step_time_s"].is_number());
    scratch.write("none.txt", "nothing");
    assert_eq!(scratch.run("score gpt3-175b --from none.txt").status.code(), Some(6));
    scratch.write("run.sh", "torchrun x.py --micro-batch-size 1 --global-batch-size 8");
    assert_eq!(scratch.run("score gpt3-175b --from run.sh").status.code(), Some(2));
    assert_eq!(scratch.run("export run.sh --to megatron").status.code(), Some(6));
}

/// Watts are the user's, or those of the board's datasheet: energy is their product with time, and
/// unknown of a device that no table names.
#[test]
fn energy_needs_watts_and_is_their_product_with_time() {
    let scratch = Scratch::new("energy");
    let asked = "llama-3-8b --devices 8 --gbs 8 --seq 2048";
    let cost = |more: &str| scratch.json(&format!("cost {asked} --tokens 1B --json {more}"));
    let other = "name = \"other\"\nextends = \"preset:h100\"\n[device]\nname = \"other\"\n";
    scratch.write("other.toml", other);
    let unknown = cost("--cluster other.toml");
    assert_eq!(unknown["expected"]["energy_kwh"], Value::Null);
    let page = scratch.answer(&format!("cost {asked} --tokens 1B --cluster other.toml"));
    assert!(page.contains("energy is not known: write `--watts N`"), "{page}");
    let kwh = |document: &Value, part: &str| document[part]["energy_kwh"].as_f64().expect("kWh");
    let of_board = cost("--cluster h100");
    let hours = of_board["expected"]["device_hours"].as_f64().expect("hours");
    assert!((kwh(&of_board, "expected") / (0.7 * hours) - 1.0).abs() < 1e-9, "{of_board:#}");
    let page = scratch.answer(&format!("cost {asked} --tokens 1B --cluster h100"));
    assert!(page.contains("energy at 700 W per device"), "{page}");
    let known = cost("--cluster h100 --watts 1000");
    assert!((kwh(&known, "expected") / hours - 1.0).abs() < 1e-9, "{known:#}");
    assert!(kwh(&known, "low") < kwh(&known, "expected"));
    // A device that waits for less draws less, and no more than a busy one.
    scratch.write(
        "own.toml",
        "name = \"own\"\nextends = \"preset:h100\"\n[device.power]\nbusy = \"1 kW\"\n\
         idle = \"200 W\"\n",
    );
    let own = kwh(&cost("--cluster own.toml"), "expected");
    assert!(0.2 * hours < own && own < hours, "{own} of {hours}");
    let refused = scratch.run(&format!("plan {asked} --cluster other.toml --objective energy"));
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("write `--watts N`"));
    let plan = |aim: &str| {
        scratch.json(&format!("plan {asked} --cluster own.toml --objective {aim} --json"))
    };
    let energy = |document: &Value| document["energy_j"].as_f64().expect("joules");
    assert!(energy(&plan("energy")) <= energy(&plan("time")));
}

#[test]
fn a_model_is_exported_as_text_and_picture() {
    let scratch = tiny("export");
    scratch.answer("export tiny --to graph --seq 16 -o tiny.graph");
    let text = fs::read_to_string(scratch.0.join("tiny.graph")).expect("the text is there");
    let module = parse_module("tiny.graph", &text).expect("it reads back");
    // The text is a model: the same size, the same verdict.
    let params =
        |model: &str| scratch.json(&format!("inspect {model} --seq 16 --json"))["params"].clone();
    assert_eq!(params("tiny.graph"), params("tiny"));
    let verdict = scratch.json("verify tiny.graph --ranks 2 --seq 16 --json");
    assert_eq!(verdict["ok"], true);
    assert_eq!(verdict["dtype"], "f32", "that of the text");
    assert_eq!(scratch.run("verify tiny.graph --ranks 2 --dtype f64").status.code(), Some(2));
    // An arrow for each operand and result.
    let picture = scratch.answer("export tiny --to dot --seq 16");
    let layers = module.functions.iter().filter(|f| f.kind == ir::Kind::Layer);
    let arrows: usize = layers
        .clone()
        .map(|f| f.results.len() + f.nodes.iter().map(|n| n.operands.len()).sum::<usize>())
        .sum();
    assert_eq!(picture.matches(" -> ").count(), arrows);
    assert_eq!(picture.matches("subgraph").count(), layers.count());
    assert_eq!(picture.matches('{').count(), picture.matches('}').count());
    if let Ok(output) = Command::new("dot").args(["-V"]).output() {
        assert!(output.status.success());
    }
}

/// What a run of a run that learns nothing exports are the very weights that it began with, under
/// the names that transformers gave a model of this kind.
#[test]
fn a_run_is_exported_as_it_came() {
    let scratch = tiny("export-run");
    let flags = "--data text --seq 16 --gbs 2 --ranks 2 --tp 2 --val-every 0";
    scratch.answer(&format!("train tiny {flags} --from-scratch --steps 2 --out first"));
    let files = scratch.answer("export first --to hf -o a");
    assert!(files.contains("a/model.safetensors") && files.contains("a/config.json"), "{files}");
    scratch.answer(&format!("train a {flags} --steps 1 --lr 0 --out second"));
    scratch.answer("export second --to hf -o b");
    let read = |name: &str| fs::read(scratch.0.join(name)).expect("it is written");
    assert!(read("a/model.safetensors") == read("b/model.safetensors"));
    assert_eq!(read("a/config.json"), read("b/config.json"));

    let names = |folder: &Path| -> BTreeSet<String> {
        let weights = Weights::open(folder).expect("the weights open");
        let names = weights.tensors().map(|(name, _)| name);
        let stored = names.filter(|name| !ir::import::is_buffer(name) && *name != "lm_head.weight");
        stored.map(str::to_owned).collect()
    };
    let theirs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/gpt2-tiny");
    assert_eq!(names(&scratch.0.join("a")), names(&theirs));

    // What is exported continues texts as the run does, and is not written over.
    let line =
        |from: &str| format!("generate {from} --prompt line --max-tokens 4 --temperature 0 --json");
    assert_eq!(scratch.json(&line("a"))["tokens"], scratch.json(&line("first"))["tokens"]);
    for wrong in ["export first --to hf -o a", "export tiny --to hf -o c", "export first --to hf"] {
        assert_eq!(scratch.run(wrong).status.code(), Some(2), "{wrong}");
    }
}

/// Configs of models that are not built are read by every verb that asks the planner about GPUs.
#[test]
fn sized_configs_are_planned_for() {
    let scratch = Scratch::new("sized");
    let configs = [
        ("bert", r#"{"model_type": "bert"}"#, 110_106_428_u64),
        ("t5", r#"{"model_type": "t5"}"#, 60_506_624),
    ];
    for (name, config, params) in configs {
        scratch.write(&format!("{name}/config.json"), config);
        let asked = format!("{name} --cluster h100 --devices 64 --gbs 1024 --seq 512");
        let plan = scratch.json(&format!("plan {asked} --json"));
        assert_eq!(plan["params"], params, "{name}");
        assert_eq!(plan["model"], name);
        let text = plan["text"].as_str().expect("a configuration").to_owned();
        // What is planned is scored and compared as it was predicted.
        let score = format!("score {name} --cluster h100 --gbs 1024 --seq 512 --json");
        let mut command = scratch.command(&[], &score);
        let output = command.args(["--config", &text]).output().expect("the program starts");
        let score: Value = serde_json::from_slice(&output.stdout).expect("a document");
        assert_eq!(score["step_time_s"], plan["step_time_s"], "{name}");
        assert!(scratch.json(&format!("fit {asked} --json"))["fits"].is_boolean());
        let cost = scratch.json(&format!("cost {asked} --tokens 1B --json"));
        assert_eq!(cost["step_time_s"], plan["step_time_s"], "{name}");
    }
    let with = "compare bert --cluster h100 --devices 8 --gbs 64 --with dp=8 --json";
    assert_eq!(scratch.json(with)["plans"].as_array().map(Vec::len), Some(2));
    let size = "size t5 --cluster h100 --seq 512 --tokens 1B --deadline 300d --json";
    assert!(scratch.json(size)["devices"].is_number());
    // What cannot be built says so, wherever it would have to be.
    for verb in ["inspect", "verify", "compile", "generate"] {
        let more = if verb == "compile" { " -o x.gtl" } else { "" };
        let output = scratch.run(&format!("{verb} t5{more}"));
        assert_ne!(output.status.code(), Some(0), "{verb}");
        assert_ne!(output.status.code(), Some(1), "{verb}");
    }
}

/// Models that are no transformers are planned for on GPUs as others are: nothing is cut that they
/// do not have.
#[test]
fn any_module_is_planned_for() {
    let scratch = Scratch::new("any");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    for (name, seq, units) in [("resnet", 192, 2), ("dlrm", 9, 4), ("t5", 12, 2)] {
        let path = folder.join(format!("{name}.graph")).display().to_string();
        let built = scratch.json(&format!("inspect {path} --seq {seq} --json"));
        let asked = format!("{path} --cluster h100 --devices 8 --gbs 64");
        let plan = scratch.json(&format!("plan {asked} --json"));
        assert_eq!(plan["params"], built["params"], "{name}");
        let plans = plan["plans"].as_array().expect("plans");
        for plan in plans.iter().chain(plan["frontier"].as_array().expect("plans")) {
            let layout = &plan["plan"];
            assert_eq!((&layout["cp"], &layout["sequence_parallel"]), (&json!(1), &json!(false)));
            assert_eq!(units % layout["tp"].as_u64().expect("a count"), 0, "{name}: {layout}");
        }
        let fit = scratch.json(&format!("fit {asked} --json"));
        assert_eq!(fit["fits"], true, "{name}");
        assert!(scratch.answer(&format!("explain {asked}")).contains("Where a step goes"));
        let three = scratch.run(&format!("plan {asked} --fix tp=8"));
        assert_eq!(three.status.code(), Some(3), "{name}");
        let score =
            scratch.json(&format!("score {path} --cluster h100 --gbs 64 --config dp=8 --json"));
        assert!(score["step_time_s"].as_f64() >= plan["step_time_s"].as_f64(), "{name}");
    }
}

/// Questions that are answered by a document each.
const ANSWERED: &[&str] = &[
    "inspect tiny --json",
    "plan tiny --ranks 2 --tp 2 --json",
    "fit tiny --ranks 2 --json",
    "explain tiny --ranks 2 --tp 2 --json",
    "verify tiny --ranks 2 --seq 9 --json",
    "verify tiny --ranks 1 --seq 9 --bisect-rules --json",
    "compile tiny --ranks 2 --tp 2 --seq 16 --gbs 2 -o t.gtl --json",
    "inspect t.gtl --json",
    "run t.gtl --bench 2 --json",
    "run t.gtl --json",
    "train tiny --data text --from-scratch --steps 2 --seq 16 --gbs 2 --out run --json",
    "checkpoint ls run --json",
    "generate run --prompt line --max-tokens 2 --json",
    "generate run --prompt line --max-tokens 2 --beams 3 --json",
    "generate run --prompts prompts.jsonl --max-tokens 2 --json",
    "doctor --json",
    "compare llama-3-8b --cluster h100 --devices 8 --gbs 8 --seq 2048 --with tp=8 --json",
    "cost llama-3-8b --cluster h100 --devices 8 --gbs 8 --seq 2048 --tokens 1B --json",
    "size llama-3-8b --cluster h100 --seq 2048 --tokens 1B --deadline 300d --json",
    "score llama-3-8b --cluster h100 --config tp=8 --gbs 8 --seq 2048 --json",
    "explain llama-3-8b --cluster h100 --devices 8 --gbs 8 --seq 2048 --json",
    "fit llama-3-8b --cluster h100 --devices 8 --gbs 8 --seq 2048 --json",
    "sweep llama-3-8b --cluster h100 --devices 8 --gbs 8 --seq 2048 --json",
    "fit llama-3-8b --cluster h100 --devices 8 --seq 2048 --largest mbs --json",
    "cluster ls --json",
    "models --json",
    "cluster show h100 --json",
    "cluster detect --json",
    "plan llama-3-8b --cluster mixed.toml --devices 16 --gbs 16 --seq 2048 --json",
    "explain llama-3-8b --cluster mixed.toml --gbs 16 --seq 2048 --json",
    "fit llama-3-8b --cluster mixed.toml --gbs 16 --seq 2048 --json",
    "compare llama-3-8b --cluster mixed.toml --gbs 16 --seq 2048 --with dp=8;dp=8 --json",
    "inspect tiny --fusions --json",
    "fit llama-3-8b --cluster h100 --devices 8 --seq 2048 --for inference --json",
    "fit llama-3-8b --cluster h100 --seq 2048 --for inference --largest gbs --json",
    "explain llama-3-8b --cluster h100 --devices 8 --seq 2048 --for inference --json",
    "explain llama-3-8b --cluster h100 --devices 8 --gbs 64 --what-if memory=141GB --json",
    "compare llama-3-8b --cluster h100 --seq 2048 --for inference --with tp=8 --json",
    "cost llama-3-8b --cluster h100 --seq 2048 --for inference --tokens 1B --json",
    "size llama-3-8b --cluster h100 --seq 2048 --for inference --token-time 9ms --json",
];

/// Each answer is what its schema says, with all that it requires.
#[test]
fn documents_are_as_their_schemas_say() {
    let scratch = tiny("schema");
    scratch.write("mixed.toml", MIXED);
    scratch.write("prompts.jsonl", "\"line\"\n{\"prompt\": \"a\", \"max_tokens\": 3}\n");
    let mut seen = BTreeSet::new();
    let mut documents: Vec<Value> = ANSWERED.iter().map(|line| scratch.json(line)).collect();
    let runs = Path::new(env!("CARGO_MANIFEST_DIR")).join("planner/tests/measured_runs.csv");
    documents.push(scratch.json(&format!("validate {} --json", runs.display())));
    let compiled = documents.iter().find(|document| document["schema"] == "gantline.compile/1");
    documents.push(compiled.expect("it is compiled")["report"].clone());
    let onnx = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/onnx").join("mlp");
    let onnx = onnx.display();
    documents.push(scratch.json(&format!("inspect {onnx}.onnx --dim batch=3 --json")));
    let line = format!("run {onnx}.onnx --input x={onnx}.x.npy --dim batch=3 --bench 1 --json");
    documents.push(scratch.json(&line));
    let arch = "compile tiny --arch sm_80 --seq 16 --gbs 1 -o gpu.gtl";
    assert!(scratch.run(arch).status.success());
    documents.push(scratch.json("inspect gpu.gtl --kernels --json"));
    let no = scratch.run("plan tiny --ranks 2 --max memory=1kB --json");
    documents.push(serde_json::from_slice(&no.stdout).expect("a document"));
    for document in &documents {
        let name = document["schema"].as_str().expect("a document says what it is");
        let schema = scratch.json(&format!("schema {name}"));
        let wrong = contradictions(&schema, document, name);
        assert!(wrong.is_empty(), "{name}: {wrong:?}\n{document:#}");
        seen.insert(name.to_owned());
    }
    // Every schema is that of a document which was looked at.
    let listed = scratch.answer("schema");
    assert_eq!(listed.lines().count(), seen.len(), "{listed}{seen:?}");
    assert_eq!(scratch.json("schema plan"), scratch.json("schema gantline.plan/1"));
    assert_eq!(scratch.run("schema plam").status.code(), Some(2));
    // What a document lacks or has in another form is seen, also inside its lists.
    let schema = scratch.json("schema plan");
    let mut broken = documents[1].clone();
    broken["gap"] = Value::from("none");
    broken["ranks"] = Value::from(-1);
    broken["breakdown"]["update_s"] = Value::Null;
    broken["not_executed"] = Value::from(vec![1]);
    broken.as_object_mut().expect("an object").remove("plans");
    let wrong = contradictions(&schema, &broken, "plan");
    assert_eq!(wrong.len(), 5, "{wrong:?}");
}

/// What in a value is not as a schema says: a part of JSON Schema, written again.
fn contradictions(schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let wrong = |what: &str| vec![format!("{at} is {value}, not {what}")];
    let Some(schema) = schema.as_object() else { return Vec::new() };
    if let Some(any) = schema.get("anyOf").or(schema.get("oneOf")) {
        let mut any = any.as_array().expect("a list").iter();
        let fits = any.any(|schema| contradictions(schema, value, at).is_empty());
        return if fits { Vec::new() } else { wrong("any of its forms") };
    }
    if schema.get("const").is_some_and(|constant| constant != value) {
        return wrong(&schema["const"].to_string());
    }
    if schema.get("enum").is_some_and(|all| !all.as_array().expect("a list").contains(value)) {
        return wrong(&schema["enum"].to_string());
    }
    let is_of = |kind: &Value| match kind.as_str().expect("a type") {
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.is_u64() || value.is_i64(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "null" => value.is_null(),
        other => panic!("the type {other}"),
    };
    let fits = match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(is_of),
        Some(kind) => is_of(kind),
        None => true,
    };
    let least = schema.get("minimum").and_then(Value::as_f64).unwrap_or(f64::NEG_INFINITY);
    if !fits || value.as_f64().is_some_and(|value| value < least) {
        return wrong(&Value::from(schema.clone()).to_string());
    }
    let mut all = Vec::new();
    for (place, value) in value.as_array().into_iter().flatten().enumerate() {
        let at = format!("{at}[{place}]");
        all.extend(schema.get("items").into_iter().flat_map(|s| contradictions(s, value, &at)));
    }
    if let Some(object) = value.as_object() {
        let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
        let missing = required.filter(|key| !object.contains_key(key.as_str().expect("a key")));
        all.extend(missing.map(|key| format!("{at} lacks {key}")));
        for (key, value) in object {
            let own = schema.get("properties").and_then(|properties| properties.get(key));
            let own = own.or(schema.get("additionalProperties"));
            let at = format!("{at}.{key}");
            all.extend(own.into_iter().flat_map(|schema| contradictions(schema, value, &at)));
        }
    }
    all
}

/// A cluster file says how many devices there are; who asks about fewer says so.
#[test]
fn all_devices_of_a_cluster_are_used_unless_fewer_are_asked_for() {
    let scratch = Scratch::new("all-devices");
    let file = "extends = \"preset:h100\"\n[deployment]\nnodes = 3\n";
    fs::write(scratch.0.join("three.toml"), file).expect("it is written");
    let ranks = |more: &str| {
        let line = "plan llama-3-8b --cluster three.toml --gbs 48 --seq 2048 --json";
        scratch.json(&format!("{line}{more}"))["ranks"].clone()
    };
    assert_eq!(ranks(""), 24);
    assert_eq!(ranks(" --devices 8"), 8);
}
