//! The command line from outside: exit codes, messages, and what answers hold.

use std::fs;
use std::path::{Path, PathBuf};

use ir::DType;
use ir::import::{Options, Weight, import, read_config};
use runtime::execute::Values;
use runtime::load::{join_weights, write_named};
use serde_json::Value;

use crate::artefact::wrong_artefacts;
pub(crate) use crate::scratch::{Scratch, text};

pub(crate) const TINY: &str = r#"{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16,
  "n_positions": 32, "vocab_size": 256, "bos_token_id": null, "eos_token_id": null,
  "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"#;

pub(crate) fn tiny(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("tiny/config.json", TINY);
    scratch.write("text/a.txt", &text());
    scratch
}

/// Files for the wrong uses in `golden/diag`.
fn wrong_files(scratch: &Scratch) {
    scratch.write("bad/config.json", "{\n  \"model_type\": \"gpt2\",\n  \"n_layer\": -3\n}\n");
    scratch.write("broken/config.json", "{ \"model_type\": ");
    scratch.write("vit/config.json", "{\"model_type\": \"vit\"}");
    scratch.write("bert/config.json", "{\"model_type\": \"bert\"}");
    scratch.write("bad.toml", "name = \"x\"\nextends = \"preset:cpu-local\"\nnoodles = 3\n");
    scratch.write("bad.plan", "plan tiny on mars\n");
    scratch.write("empty/nothing.txt", "");
    scratch.write("short.txt", "too short");
    scratch.write("damaged/run.toml", "schema = 3\n");
    scratch.write("few/config.json", &TINY.replace("256", "100"));
    scratch.write("image.raw", "a\0b");
    scratch.write("partial/config.json", TINY);
    write_weights_but_one(&scratch.0.join("partial"));
    scratch.answer("train tiny --data text --from-scratch --steps 1 --out done");
    scratch.write("good.plan", &scratch.answer("plan tiny --plan"));
    scratch.write("other.txt", &text().replace("line", "verse"));
    let graph =
        "module m\n  func @loss(%w: f32[4]) {\n    %y: f32[4] = add %w %w\n    return %y\n  }\n";
    scratch.write("own.graph", graph);
    wrong_artefacts(scratch);
}

/// The weights of the tiny model, without one of them.
fn write_weights_but_one(folder: &Path) {
    let description = read_config("config.json", TINY, "tiny").expect("the config reads");
    let options = Options { seq: 8, dtype: DType::F32, dropout: Some(0.0), documents: false };
    let model = import(&description, &options).expect("the model is imported");
    let mut zeros = |weight: &Weight| {
        let bytes = vec![0; 4 * weight.count() as usize];
        Ok::<_, String>(Values { dtype: DType::F32, dims: weight.dims.clone(), bytes })
    };
    let mut tensors = join_weights(&model.weights, &mut zeros).expect("zeros fail nowhere");
    tensors.retain(|tensor| !tensor.name.ends_with("h.1.mlp.c_fc.bias"));
    write_named(&folder.join("model.safetensors"), &tensors).expect("the weights are written");
}

/// Each file of `golden/diag`: the line, `=> exit CODE`, what stderr says.
#[test]
fn wrong_uses_are_told() {
    let scratch = tiny("wrong");
    wrong_files(&scratch);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/diag");
    let mut files: Vec<PathBuf> = fs::read_dir(&golden)
        .expect("the golden files are there")
        .map(|entry| entry.expect("an entry is read").path())
        .collect();
    files.sort();
    assert!(files.len() >= 20, "every way to be wrong has a golden file");
    let is_updated = std::env::var_os("UPDATE_GOLDEN").is_some();
    let mut differences = String::new();
    for file in files {
        let there = fs::read_to_string(&file).expect("a golden file is text");
        let line = there.lines().next().unwrap_or_default();
        let line = line.strip_prefix("gantline ").expect("a golden file begins with the line");
        let output = scratch.run(line);
        let code = output.status.code().unwrap_or(-1);
        let errors = String::from_utf8_lossy(&output.stderr);
        let found = format!("gantline {line}\n=> exit {code}\n{errors}");
        assert!(code != 0 && code != 1 && code != 101, "{found}");
        if is_updated {
            fs::write(&file, found).expect("a golden file is written");
        } else if found != there {
            let name = file.display();
            differences += &format!("{name}\n--- there\n{there}\n--- found\n{found}\n");
        }
    }
    assert!(differences.is_empty(), "UPDATE_GOLDEN=1 rewrites them\n{differences}");
}

#[test]
fn gpt2_has_the_published_size_and_operations() {
    let document = Scratch::new("inspect").json("inspect gpt2 --json");
    assert_eq!(document["schema"], "gantline.inspect/1");
    assert_eq!(document["params"], 124_439_808);
    assert_eq!(document["layer_count"], 12);
    assert_eq!(document["weight_bytes"], 4 * 124_439_808_u64);
    // A token passes 12 layers of 4 M² + 8 M² multiplications and additions, half of a square of
    // attention over 1024 tokens, and the table of 50257 rows.
    let (m, s) = (768.0, 1024.0);
    let forward = 12.0 * (24.0 * m * m + 2.0 * s * m) + 2.0 * m * 50257.0;
    assert_eq!(document["flops_forward_per_token"], forward);
    assert_eq!(document["flops_backward_per_token"], 2.0 * forward);
    let layers = document["layers"].as_array().expect("there are layers");
    let sum: u64 = layers
        .iter()
        .map(|l| l["params"].as_u64().unwrap_or(0) * l["count"].as_u64().unwrap_or(0))
        .sum();
    assert_eq!(sum, 124_439_808);
}

#[test]
fn equal_questions_have_equal_plans() {
    let scratch = tiny("plan");
    let line = "plan tiny --ranks 4 --seq 32 --plan";
    let plan = scratch.answer(line);
    assert_eq!(plan, scratch.answer(line));
    assert!(plan.starts_with("plan 2 tiny on ["), "{plan}");
    let read = ir::text::parse_plan("plan", &plan).expect("a plan reads back");
    assert_eq!(read.mesh.ranks(), 4);
    let document = scratch.json("plan tiny --ranks 4 --tensor-model-parallel-size 2 --json");
    assert_eq!(document["plans"][0]["mesh"]["tp"], 2);
    assert!(document["step_time_s"].as_f64().expect("a number") > 0.0);
    for line in ["fit tiny --ranks 2", "explain tiny --ranks 2"] {
        let text = scratch.answer(line);
        assert!(text.lines().all(|l| l.chars().count() <= 110), "{text}");
        assert!(!text.contains('\x1b'), "there is no colour in a pipe");
    }
}

#[test]
fn a_plan_file_is_explained_beside_the_plan_that_is_found() {
    let scratch = tiny("explain");
    let question = "tiny --seq 16 --gbs 4";
    let found = scratch.json(&format!("plan {question} --ranks 2 --json"));
    let seconds = |name: &str| found[name].as_f64().expect("a number");
    assert!(seconds("step_time_low_s") < seconds("step_time_s"), "{found}");
    assert!(seconds("step_time_s") < seconds("step_time_high_s"), "{found}");
    // The slower one of two ways to use both ranks; what is asked follows from the file.
    let fixes = ["dp=2", "tp=2", "pp=2"];
    let mut slowest = (0.0, String::new());
    for fix in fixes {
        let file = format!("{}.plan", &fix[..2]);
        let line =
            format!("plan {question} --ranks 2 --optimizer none --fix {fix} --json -o {file}");
        let step_s = scratch.json(&line)["step_time_s"].as_f64().expect("a number");
        if step_s > slowest.0 {
            slowest = (step_s, file);
        }
    }
    let explained = scratch.json(&format!("explain tiny --plan {} --json", slowest.1));
    assert_eq!(explained["step_time_s"].as_f64(), Some(slowest.0), "{explained}");
    let gap = explained["gap"].as_f64().expect("a number");
    let fastest = explained["alternatives"][0]["step_time_s"].as_f64().expect("a number");
    assert!(gap > 0.0 && fastest < slowest.0, "{explained}");
    let text = scratch.answer(&format!("explain tiny --plan {}", slowest.1));
    assert!(text.contains("slower than the fastest plan"), "{text}");
}

/// A search that was cut off does not say that nothing fits, and says nothing of other objectives.
#[test]
fn a_search_says_what_it_knows() {
    let scratch = tiny("known");
    let asked = "plan llama-3-8b --cluster h100 --devices 8 --gbs 64 --seq 8192";
    let cut = scratch.run(&format!("{asked} --budget 0.0000001s"));
    let said = String::from_utf8_lossy(&cut.stderr).into_owned();
    assert!(said.contains("E3205") && !said.contains("E3201"), "{said}");
    assert_eq!(cut.status.code(), Some(2), "{said}");
    let plan = |more: &str| scratch.json(&format!("{asked} {more} --json"));
    let small = plan("--objective memory");
    assert!(small["bound_s"].is_null(), "{small:#}");
    let [fastest, smallest] = ["time", "memory"].map(|what| plan(&format!("--objective {what}")));
    let frontier = plan("--objective pareto");
    let frontier = frontier["frontier"].as_array().expect("a list");
    let (first, last) = (&frontier[0], &frontier[frontier.len() - 1]);
    assert_eq!(first["step_time_s"], fastest["step_time_s"]);
    // It is the fastest of those that need hardly more than the least.
    let peak = last["peak_mem_bytes"].as_f64().expect("bytes");
    // A frontier is one of the closed form.
    let expected = smallest["memory"]["expected"].as_object().expect("it is compiled");
    let parts = expected.iter().filter(|(name, _)| name.ends_with("_bytes"));
    let bytes: f64 = parts.filter_map(|(_, bytes)| bytes.as_f64()).sum();
    assert!((0.99..1.01).contains(&(bytes / peak)), "{smallest:#}");
    let seconds = |plan: &Value| plan["step_time_s"].as_f64().expect("seconds");
    assert!(seconds(&smallest) <= seconds(last), "{smallest:#}");
}

/// The cheapest plan is that of the number of devices which makes it so, of all numbers.
#[test]
fn the_cheapest_plan_is_that_of_any_number_of_devices() {
    let scratch = Scratch::new("cheapest");
    for (asked, most) in [
        ("gpt2-xl --cluster rtx4090 --gbs 24", 12),
        ("llama-3-8b --cluster a100 --gbs 48 --seq 4096", 24),
        ("llama-3-8b --cluster rtx4090 --gbs 48 --seq 1024", 16),
    ] {
        let plan = |more: &str| scratch.json(&format!("plan {asked} {more} --json"));
        let price = |plan: &Value| {
            let step_s = plan["step_time_s"].as_f64()?;
            Some(plan["devices"].as_f64().expect("a number") * step_s)
        };
        let cheapest = plan(&format!("--objective cost --devices {most}"));
        let all = (1..=most).map(|devices| {
            let output = scratch.run(&format!("plan {asked} --devices {devices} --json"));
            let plan = serde_json::from_slice(&output.stdout).expect("a document");
            price(&plan).unwrap_or(f64::INFINITY)
        });
        let least = all.fold(f64::INFINITY, f64::min);
        let cheapest = price(&cheapest).expect("a plan");
        assert!((cheapest / least - 1.0).abs() < 1e-9, "{asked}: {least} and {cheapest}");
    }
}

/// The fewest devices that meet a deadline are a node more than what does not, and the cheapest of
/// all numbers of nodes are those that `size` says; each row is what `cost` says of its devices.
#[test]
fn the_fewest_and_the_cheapest_devices_that_meet_a_deadline_are_found() {
    let scratch = Scratch::new("size");
    let asked = "llama-3-8b --cluster a100 --gbs 840 --seq 2048 --tokens 5B --price 3";
    let number = |value: &Value| value.as_f64().expect("a number");
    let on = |nodes: u32| {
        let cost = format!("cost {asked} --devices {} --json", 8 * nodes);
        let cost = scratch.json(&cost);
        let of = |key: &str| number(&cost["expected"][key]);
        [of("time_s"), of("money")]
    };
    let all: Vec<[f64; 2]> = (1..=21).map(on).collect();
    let mut others = 0;
    for hours in [6, 10, 15] {
        let deadline_s = 3600.0 * f64::from(hours);
        let size = scratch.json(&format!("size {asked} --deadline {hours}h --json"));
        let enough = |nodes: usize| all[nodes - 1][0] <= deadline_s;
        let [fewest, cheapest] =
            ["devices", "cheapest_devices"].map(|key| number(&size[key]) as usize / 8);
        assert!(enough(fewest) && (fewest == 1 || !enough(fewest - 1)), "{size:#}");
        others += usize::from(cheapest != fewest);
        let most = 3 * fewest;
        let prices = (1..=most).filter(|nodes| enough(*nodes)).map(|nodes| all[nodes - 1][1]);
        assert_eq!(all[cheapest - 1][1], prices.fold(f64::INFINITY, f64::min), "{size:#}");
        let rows = size["tried"].as_array().expect("a list");
        let told: Vec<usize> = rows.iter().map(|row| number(&row["devices"]) as usize).collect();
        assert!(told.is_sorted_by(|a, b| a < b), "{told:?}");
        for row in rows {
            let [time_s, money] = all[number(&row["devices"]) as usize / 8 - 1];
            assert_eq!([number(&row["time_s"]), number(&row["money"])], [time_s, money]);
        }
    }
    assert!(others > 0, "the fewest devices are always the cheapest");
}

/// What `explain` says of other memory is what the planner finds for such devices.
#[test]
fn memory_is_worth_what_devices_with_it_would_do() {
    let scratch = tiny("memory");
    let asked = "llama-3-8b --devices 8 --gbs 64 --seq 8192";
    let explained = scratch.json(&format!("explain {asked} --cluster h100 --json"));
    let number = |value: &Value| value.as_f64().expect("a number");
    let step_s = number(&explained["step_time_s"]);
    for other in explained["other_memory"].as_array().expect("a list") {
        let bytes = number(&other["memory_bytes"]) as u64;
        let file = format!(
            "name = \"other\"\nextends = \"preset:h100\"\n[device.memory]\n\
             capacity = \"{bytes} B\"\nreserved = \"0 B\"\n"
        );
        scratch.write("other.toml", &file);
        let plan = check_found(&scratch, &other["best"], &format!("{asked} --cluster other.toml"));
        let more = number(&plan["step_time_s"]) - step_s;
        let larger = bytes as f64 > number(&explained["have_bytes"]);
        assert!(if larger { more <= 0.0 } else { more >= 0.0 }, "{bytes}: {more}");
    }
    assert!(number(&explained["seconds_saved_per_gib"]) > 0.0, "{explained:#}");
    // What is faster does not fit; with all else searched it is what `plan` finds.
    let mut searched = 0;
    for neighbour in explained["neighbours"].as_array().expect("a list") {
        let fits = neighbour["fits"].as_bool().expect("a flag");
        assert!(!fits || number(&neighbour["step_time_s"]) >= step_s, "{neighbour:#}");
        if !neighbour["best"].is_null() {
            let change = neighbour["change"].as_str().expect("a decision");
            let fixed = format!("{asked} --cluster h100 --fix {change}");
            check_found(&scratch, &neighbour["best"], &fixed);
            searched += 1;
        }
    }
    assert!(searched > 5, "{explained:#}");
}

/// What is best in closed form is what `plan` finds, or, where that says that its program does not
/// fit, a little faster.
fn check_found(scratch: &Scratch, best: &Value, asked: &str) -> Value {
    let plan = scratch.json(&format!("plan {asked} --json"));
    let [best, found] = [best, &plan].map(|of| of["step_time_s"].as_f64().expect("a number"));
    if best != found {
        assert!(best <= found && found < 1.01 * best, "{asked}: {best} {found}");
        let page = scratch.answer(&format!("plan {asked}"));
        assert!(page.contains("does not fit: ") && page.contains(" compiled, of "), "{page}");
    }
    plan
}

#[test]
fn a_plan_file_that_does_not_fit_is_refused_with_the_fullest_rank() {
    let scratch = tiny("fits");
    let little = "name = \"little\"\nextends = \"preset:cpu-local\"\n\
                  [device.memory]\ncapacity = \"64 KiB\"\n";
    scratch.write("little.toml", little);
    scratch.answer("plan tiny --ranks 2 --seq 16 --gbs 2 -o tiny.plan");
    let question = "tiny --cluster little.toml --ranks 2 --seq 16 --gbs 2 --plan tiny.plan";
    let lines = [
        format!("train {question} --data text --from-scratch --steps 1 --out run"),
        format!("train {question} --data text --from-scratch --steps 1 --out run --dry-run"),
        format!("compile {question} -o tiny.gtl"),
    ];
    for line in lines {
        let output = scratch.run(&line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{line}: {errors}");
        let says = |words: &str| errors.contains(words);
        assert!(says("of memory, there is 64.0 KiB") && says("rank 0 holds"), "{line}: {errors}");
    }
    assert!(!scratch.0.join("run").exists() && !scratch.0.join("tiny.gtl").exists());
}

#[test]
fn every_mesh_of_four_ranks_is_verified() {
    let scratch = tiny("verify");
    let document = scratch.json("verify tiny --ranks 4 --seq 9 --json");
    assert_eq!(document["ok"], true);
    let meshes = document["meshes"].as_array().expect("there are meshes");
    assert!(meshes.iter().any(|mesh| mesh["tp"] == 2 && mesh["pp"] == 2), "{document}");
}

#[test]
fn a_run_is_trained_resumed_and_continued() {
    let scratch = tiny("train");
    let flags = "--data text --from-scratch --ranks 2 --seq 16 --val-every 4";
    let whole = scratch.json(&format!("train tiny {flags} --steps 8 --out whole --json"));
    assert!(whole["loss"].as_f64() < whole["loss_first"].as_f64(), "{whole}");
    assert_eq!(whole["steps"], 8);

    // Four steps and four more are eight, to the last digit.
    scratch.json(&format!("train tiny {flags} --steps 4 --out half --json"));
    let resumed = scratch.json("train --resume half --steps 8 --json");
    assert_eq!(resumed["loss"], whole["loss"]);
    assert_eq!(resumed["validation_loss"], whole["validation_loss"]);

    // A run is a model as any other.
    let [own, trained] =
        ["tiny", "whole"].map(|model| scratch.json(&format!("inspect {model} --json")));
    assert_eq!(own["params"], trained["params"]);
    assert!(
        own["params"].is_number() && scratch.answer("export whole --to dot").contains("digraph")
    );

    for file in ["metrics.jsonl", "loss.svg", "run.toml", "run.plan", "model/config.json"] {
        assert!(scratch.0.join("whole").join(file).is_file(), "{file}");
    }
    let line = "generate whole --prompt line --max-tokens 8 --temperature 0 --json";
    let told = scratch.json(line);
    assert_eq!(told["tokens"].as_array().map(Vec::len), Some(8));
    assert_eq!(told["text"], scratch.json(&format!("{line} --tp 2"))["text"]);
}

#[test]
fn a_dry_run_writes_nothing() {
    let scratch = tiny("dry");
    let line = "train tiny --data text --from-scratch --steps 3 --out run --dry-run";
    let told = scratch.answer(line);
    for what in ["memory   ", "parameters", "time     ", "for 3 steps", "disk     "] {
        assert!(told.contains(what), "{told}");
    }
    assert!(!scratch.0.join("run").exists());
}

#[test]
fn help_is_an_answer() {
    let scratch = Scratch::new("help");
    for line in ["--help", "help train", "--version", "plan --help"] {
        assert!(!scratch.answer(line).is_empty());
    }
}
