//! Plans for GPU clusters: what is searched for is a plan that is legal, and its text is what every
//! command reads.

use ir::Module;
use ir::import::{Options, import, resolve};
use ir::text::parse_plan;
use planner::check::check;
use planner::cluster::Cluster;
use planner::elaborate::name_of;

use crate::cli::tiny;
use crate::scratch::Scratch;

/// The module of a preset that a plan is of.
fn module(plan: &ir::Plan) -> Module {
    let description = resolve(&plan.model).expect("it is a preset").description;
    let options = Options {
        seq: plan.seq,
        dtype: plan.precision.accumulate,
        dropout: None,
        documents: false,
    };
    let model = import(&description, &options).expect("it is imported");
    let module = codegen::prepare::prepare_training_as(model.module, "loss", &plan.precision);
    module.expect("it is prepared")
}

/// What the search finds for GPUs is a plan: legal, read back byte for byte, with the name that is
/// printed.
#[test]
fn plans_that_are_found_for_gpus_are_legal() {
    let scratch = Scratch::new("gpu-plans");
    let limits = "--forbid cp --forbid ep";
    let mut schedules = std::collections::BTreeSet::new();
    for (model, cluster, devices, gbs, more) in [
        ("gpt2", "h100", 8, 64, ""),
        ("gpt2-xl", "a100", 16, 128, "--fix pp=4"),
        ("llama-3-8b", "h100", 64, 256, ""),
        ("llama-2-13b", "a100-40gb", 32, 128, ""),
        ("qwen2.5-7b", "h100", 16, 64, "--fix recompute=full"),
        ("gpt3-175b", "h100", 256, 256, ""),
        ("gpt-22b", "a100", 64, 128, "--fix schedule=zb-h1,pp=8"),
        ("opt-66b", "h200", 64, 64, "--fix schedule=gpipe,pp=2"),
        ("mistral-7b", "b200", 8, 32, "--fix zero=3"),
        ("llama-3.1-405b", "h100", 512, 512, ""),
        ("falcon-40b", "a100", 64, 64, "--fix tp=8"),
        ("mpt-30b", "v100", 128, 128, "--dtype f16"),
    ] {
        let asked = format!("{model} --cluster {cluster} --devices {devices} --gbs {gbs}");
        let line = format!("plan {asked} --seq 1024 {limits} {more} --json -o x.plan");
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        let answer = scratch.json(&line);
        let text = std::fs::read_to_string(scratch.0.join("x.plan")).expect("it is written");
        let plan = parse_plan("x.plan", &text).unwrap_or_else(|wrong| panic!("{line}: {wrong:?}"));
        assert_eq!(plan.to_string(), text, "{line}");
        assert!(text.lines().count() <= 400, "{line}: {} lines", text.lines().count());
        let mut there = Cluster::load(cluster).expect("it is a preset");
        there.nodes = devices;
        let module = module(&plan);
        let wrong = check(&module, "loss", &plan, &there);
        assert!(wrong.is_empty(), "{line}: {wrong:?}\n{text}");
        let name = name_of(&module, "loss", &plan).expect("it has a name");
        assert_eq!(answer["text"], name.to_string(), "{line}");
        assert_eq!(plan.global_batch_size(), gbs, "{line}");
        schedules.insert((plan.schedule, plan.chunks_per_stage() > 1));
    }
    assert!(schedules.len() > 2, "{schedules:?}");
}

/// The text of a plan costs what its name costs, in every command, and what it lacks is named.
#[test]
fn every_command_reads_the_text_of_a_plan() {
    let scratch = Scratch::new("plan-texts");
    let asked = "gpt2-xl --cluster a100 --gbs 64 --seq 1024";
    let plan = scratch.json(&format!("plan {asked} --devices 16 --fix pp=2 --json -o x.plan"));
    let on = "gpt2-xl --cluster a100";
    let scored = scratch.json(&format!("score {on} --from x.plan --json"));
    let explained = scratch.json(&format!("explain {on} --plan x.plan --json"));
    for other in [&scored["step_time_s"], &explained["step_time_s"]] {
        assert_eq!(*other, plan["step_time_s"]);
    }
    assert_eq!(scored["configuration"], plan["text"]);
    scratch.run(&format!("plan {asked} --devices 16 --fix pp=2 -o x.json"));
    let [text, document] = ["x.plan", "x.json"]
        .map(|file| scratch.answer(&format!("export {file} --to megatron --lossy")));
    assert_eq!(text, document);
    // A plan of another model, a plan that was changed, and one of a later version.
    let errors = |line: &str, code: i32| {
        let output = scratch.run(line);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
        errors
    };
    let other = errors("score gpt2 --cluster a100 --from x.plan", 2);
    assert!(other.contains("the plan is for `gpt2-xl`"), "{other}");
    let whole = std::fs::read_to_string(scratch.0.join("x.plan")).expect("it is written");
    let changed: Vec<&str> = whole.lines().filter(|line| !line.contains("%d.wq:")).collect();
    scratch.write("changed.plan", &changed.join("\n"));
    for line in [
        "export changed.plan --to megatron --lossy".to_owned(),
        format!("score {on} --from changed.plan"),
    ] {
        let changed = errors(&line, 6);
        assert!(changed.contains("E3306") && changed.contains("gradient of `%wq`"), "{changed}");
    }
    // The plan says for which devices it is, as text and as JSON.
    let (text, json) = (
        scratch.json("score gpt2-xl --from x.plan --json"),
        scratch.json("score gpt2-xl --from x.json --json"),
    );
    assert_eq!([&text["cluster"], &json["cluster"]], ["a100", "a100"]);
    // One call keeps nothing, which no name says.
    let kept =
        whole.replacen("layer block keep full\n", "layer block keep full\n    keep none 1..2\n", 1);
    assert_ne!(kept, whole);
    scratch.write("kept.plan", &kept);
    let kept = errors("export kept.plan --to megatron --lossy", 6);
    assert!(kept.contains("decisions of the plan"), "{kept}");
    scratch.write("later.plan", &whole.replacen("plan 2 ", "plan 3 ", 1));
    let later = errors(&format!("score {on} --from later.plan"), 6);
    assert!(later.contains("E1023") && later.contains("version 3"), "{later}");
}

/// A plan is compiled for other devices than it was made for, where programs carry it out; where
/// they do not, every decision that they lack is named.
#[test]
fn plans_for_gpus_are_compiled_where_they_can_be() {
    let scratch = tiny("plan-compiled");
    let asked = "gpt2-mini --cluster h100 --devices 4 --gbs 8 --seq 32 --dtype f32";
    let fixed = "--fix zero=0,offload=off,vpp=1,schedule=gpipe,pp=2,cp=1,recompute=attention";
    scratch.answer(&format!("plan {asked} {fixed} -o x.plan"));
    let on = "gpt2-mini --ranks 4 --gbs 8 --seq 32";
    let compiled = scratch.answer(&format!("compile {on} --plan x.plan -o x.gtl"));
    // It is for what the plan is for, with what the plan predicts.
    assert!(compiled.contains("needs   4 ranks, cuda with sm_90a"), "{compiled}");
    assert!(compiled.contains(" on h100, predicted ") && !compiled.contains("nothing for"));
    // What no flag says is as the plan has it; what one says has to be.
    scratch.answer("compile gpt2-mini --plan x.plan -o same.gtl");
    let read = |name: &str| std::fs::read(scratch.0.join(name)).expect("it is written");
    assert_eq!(read("same.gtl"), read("x.gtl"));
    scratch.answer("compile gpt2-mini --cluster h100 --plan x.plan -o there.gtl");
    assert_eq!(read("there.gtl"), read("x.gtl"));
    assert_eq!(scratch.run("compile gpt2-mini --plan x.plan --gbs 4").status.code(), Some(2));
    // What is compiled computes what one rank does: in f32, and in bf16, which GPUs usually take.
    let verified = scratch.json("verify gpt2-mini --plan x.plan --json");
    assert_eq!(verified["meshes"][0]["pp"], 2, "{verified:#}");
    let narrow = "tiny --cluster h100 --devices 4 --gbs 8 --seq 16";
    scratch.answer(&format!("plan {narrow} {fixed} -o narrow.plan"));
    let verified = scratch.json("verify tiny --plan narrow.plan --json");
    assert_eq!(verified["dtype"], "bf16", "{verified:#}");
    let compiled = scratch.answer("compile tiny --plan narrow.plan -o narrow.gtl");
    assert!(compiled.contains("in bf16"), "{compiled}");
    let shared = fixed.replace("zero=0", "zero=1").replace("gpipe", "1f1b");
    scratch.answer(&format!("plan {narrow} {shared} -o shared.plan"));
    let verified = scratch.json("verify tiny --plan shared.plan --json");
    assert_eq!(verified["meshes"][0]["dp"], 2, "{verified:#}");
    let interleaved = fixed.replace("gpipe", "1f1b").replace("vpp=1", "vpp=2");
    scratch.answer(&format!("plan {asked} {interleaved} -o chunks.plan"));
    let verified = scratch.json("verify gpt2-mini --plan chunks.plan --json");
    assert_eq!(verified["meshes"][0]["pp"], 2, "{verified:#}");
    for stage in [2, 3] {
        let fixed = fixed.replace("zero=0", &format!("zero={stage}")).replace("gpipe", "1f1b");
        scratch.answer(&format!("plan {narrow} {fixed} -o split.plan"));
        let verified = scratch.json("verify tiny --plan split.plan --json");
        assert_eq!(verified["meshes"][0]["dp"], 2, "{verified:#}");
    }
    scratch
        .answer(&format!("plan {asked} --fix offload-parameters=host,pp=2,dp=2,zero=1 -o y.plan"));
    assert_eq!(scratch.run("verify gpt2-mini --plan y.plan").status.code(), Some(4));
    assert_eq!(scratch.run("verify gpt2-mini --plan x.plan --seq 8").status.code(), Some(2));
    let refused = scratch.run(&format!("compile {on} --plan y.plan -o y.gtl"));
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(4), "{errors}");
    assert!(errors.contains("offload"), "{errors}");
}

/// A plan for more devices than a machine is for is executed in small, on the model that it is for
/// and on a smaller one of the same layers.
#[test]
fn plans_for_clusters_are_verified_in_small() {
    let scratch = tiny("in-small");
    let config = r#"{"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 16,
        "n_positions": 128, "vocab_size": 256, "bos_token_id": null, "eos_token_id": null,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}"#;
    scratch.write("small/config.json", config);
    let asked = "gpt2-mini --cluster h100 --devices 64 --gbs 128 --seq 128 --dtype f32";
    let fixed = "offload=off,cp=1,tp=4,pp=4,mbs=2,shard=0";
    for more in ["zero=3,vpp=1,schedule=1f1b", "zero=1,vpp=1,schedule=zb-h1", "zero=0,vpp=1"] {
        scratch.answer(&format!("plan {asked} --fix {fixed},{more} -o x.plan"));
        for model in ["gpt2-mini", "small"] {
            let verified = scratch.json(&format!("verify {model} --plan x.plan --shrink --json"));
            let mesh = &verified["meshes"][0];
            assert!(mesh["pp"] == 2 && mesh["dp"] == 2 && mesh["tp"] == 2, "{verified:#}");
        }
    }
    let told = scratch.run("verify small --plan x.plan --shrink");
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(
        told.contains("in small [pp=2, dp=2, tp=2]: dp, ") && !told.contains("not in"),
        "{told}"
    );
    // Shards over some of the ranks with copies stay so: four ranks have two copies.
    let hybrid = "--fix offload=off,cp=1,tp=4,dp=16,zero=3,shard=4,vpp=1 -o hybrid.plan";
    scratch.answer(&format!("plan {asked} {hybrid}"));
    let verified = scratch.json("verify small --plan hybrid.plan --shrink --json");
    assert!(verified["meshes"][0]["dp"] == 4, "{verified:#}");
    // Positions of a sequence as long as their table are no part of it.
    let asked = "small --cluster h100 --devices 8 --gbs 16 --seq 128 --dtype f32";
    scratch.answer(&format!("plan {asked} --fix dp=8,zero=3,shard=0 -o full.plan"));
    scratch.answer("verify small --plan full.plan --shrink");
    // What is wrong with the whole plan is not shrunk away.
    let text = std::fs::read_to_string(scratch.0.join("full.plan")).expect("it is written");
    for (there, wrong, code) in
        [("zero 3", "zero 3 over 3", "E3301"), ("stages 5", "stages 0", "E3302")]
    {
        assert!(text.contains(there), "{text}");
        scratch.write("wrong.plan", &text.replacen(there, wrong, 1));
        let refused = scratch.run("verify small --plan wrong.plan --shrink");
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(6) && errors.contains(code), "{errors}");
    }
    // Whole, it is for another model, and for more ranks than are sensible.
    assert_eq!(scratch.run("verify small --plan x.plan").status.code(), Some(2));
    assert_eq!(scratch.run("verify small --ranks 2 --shrink").status.code(), Some(2));
}

/// Stages of CPUs are interleaved as well, where the batch allows it.
#[test]
fn stages_of_cpus_are_interleaved() {
    let scratch = tiny("chunks-of-cpus");
    let asked = "tiny --ranks 2 --gbs 8 --seq 16";
    scratch.answer(&format!("plan {asked} --fix pp=2,vpp=2,mbs=1 -o x.plan"));
    let plan = std::fs::read_to_string(scratch.0.join("x.plan")).expect("it is written");
    assert!(plan.contains("schedule interleaved stages 1 2 3 4"), "{plan}");
    let verified = scratch.json("verify tiny --plan x.plan --json");
    assert_eq!(verified["meshes"][0]["pp"], 2, "{verified:#}");
    // One micro-batch cannot go round two stages.
    let output = scratch.run(&format!("plan {asked} --fix pp=2,vpp=2,mbs=8"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{errors}");
    assert!(errors.contains("pp divides the micro-batches"), "{errors}");
}

/// A product reads a weight in one layer and a sum reads it in another: its late gradient is added
/// to the other one, whatever the order of the calls.
#[test]
fn late_gradients_are_added_to_others_of_their_weight() {
    let scratch = Scratch::new("late-gradients");
    scratch.write("shared.graph", include_str!("shared.graph"));
    scratch.answer("plan shared.graph --ranks 2 --gbs 4 --fix pp=2,mbs=4 -o x.plan");
    let plan = std::fs::read_to_string(scratch.0.join("x.plan")).expect("it is written");
    let schedule = plan.lines().find(|line| line.contains("schedule")).expect("there is one");
    let late = plan.replacen(schedule, "  schedule zb-h1 stages 3 4", 1);
    assert!(late != plan, "{plan}");
    scratch.write("late.plan", &late);
    let verified = scratch.json("verify shared.graph --plan late.plan --json");
    assert_eq!(verified["meshes"][0]["pp"], 2, "{verified:#}");
}

/// Each cell of a sweep is what `plan` answers about it; the file has the same rows, and the map
/// names the best one.
#[test]
fn a_sweep_is_many_plans() {
    let scratch = Scratch::new("sweep");
    let line = "sweep gpt2-xl --cluster h100,a100 --devices 4,8 --gbs 32,64 --seq 1k";
    let swept = scratch.json(&format!("{line} --json -o rows.csv"));
    let rows = swept["rows"].as_array().expect("a list");
    assert_eq!(rows.len(), 8);
    for row in rows {
        let cluster = row["cluster"].as_str().expect("a name");
        let asked = format!("--devices {} --gbs {} --seq 1024", row["devices"], row["gbs"]);
        let plan = scratch.json(&format!("plan gpt2-xl --cluster {cluster} {asked} --json"));
        assert_eq!(row["plan"], plan["text"], "{row}");
        for key in ["step_time_s", "tokens_per_s_per_device", "mfu"] {
            assert_eq!(row[key], plan[key], "{key} of {row}");
        }
        // A sweep compiles nothing.
        let memory = &plan["memory"];
        let expected = if memory["from"] == "compiled" { &memory["expected"] } else { memory };
        let parts = expected.as_object().expect("bytes by role").iter();
        let parts = parts.filter(|(name, _)| name.ends_with("_bytes"));
        let total: f64 = parts.filter_map(|(_, bytes)| bytes.as_f64()).sum();
        assert_eq!(row["peak_mem_bytes"], total, "{row}");
    }
    let file = std::fs::read_to_string(scratch.0.join("rows.csv")).expect("it is written");
    let lines: Vec<&str> = file.lines().collect();
    assert_eq!(lines.len(), 9, "{file}");
    assert!(lines[0].starts_with("cluster,devices,gbs,seq,fits,plan,step_time_s"), "{file}");
    let map = scratch.answer(line);
    let speed = |row: &&serde_json::Value| row["tokens_per_s"].as_f64();
    let fastest = rows.iter().max_by(|a, b| {
        let each = |row: &&serde_json::Value| row["tokens_per_s_per_device"].as_f64();
        each(a).partial_cmp(&each(b)).expect("numbers")
    });
    let fastest = fastest.filter(|row| speed(row).is_some()).expect("something fits");
    let best = map.lines().find(|line| line.starts_with("best")).expect("it is named");
    assert!(best.contains(fastest["plan"].as_str().expect("a plan")), "{map}");
    // Nothing fits anywhere, and what is too much or about CPUs.
    let nothing = scratch.run("sweep gpt3-175b --cluster t4 --devices 1,2 --gbs 8");
    assert_eq!(nothing.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&nothing.stdout).contains("no plan  for 2 of 2"));
    let many = (1..70).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
    let many = format!("sweep gpt2 --cluster h100 --devices {many} --gbs {many}");
    assert_eq!(scratch.run(&many).status.code(), Some(2));
    assert_eq!(scratch.run("sweep gpt2 --cluster cpu-local").status.code(), Some(2));
}

/// The largest that fits, fits; the next that was tried does not; `plan` says the same of both.
#[test]
fn the_largest_that_fits_is_found() {
    let scratch = Scratch::new("largest");
    let asked = "llama-3-8b --cluster h100 --devices 8";
    for (what, gbs) in [("seq", "--gbs 8"), ("mbs", "--seq 2048")] {
        let found = scratch.json(&format!("fit {asked} {gbs} --largest {what} --json"));
        let [largest, next] = ["largest", "next"].map(|key| found[key].as_u64().expect("a count"));
        assert!(largest < next && next - largest <= (largest / 32).max(128), "{found:#}");
        assert_eq!(found["plan"]["fits"], true);
        let plan = |number: u64| match what {
            "seq" => scratch.run(&format!("plan {asked} {gbs} --seq {number} --json")),
            _ => {
                let gbs = 8 * number;
                scratch.run(&format!("plan {asked} --gbs {gbs} --seq 2048 --mbs {number} --json"))
            }
        };
        let own = plan(largest);
        let own: serde_json::Value = serde_json::from_slice(&own.stdout).expect("a document");
        assert_eq!(own["text"], found["plan"]["text"], "{what}={largest}");
        assert_eq!(plan(next).status.code(), Some(3), "{what}={next}");
    }
    // A table of positions ends, and CPUs are no GPUs.
    let short = scratch.json("fit gpt2 --cluster h100 --devices 1 --largest seq --json");
    assert_eq!(short["largest"], 1024);
    let wrong = ["fit gpt2 --largest seq", "fit gpt2 --cluster h100 --seq 64 --largest seq"];
    for line in wrong {
        assert_eq!(scratch.run(line).status.code(), Some(2), "{line}");
    }
}

/// Failures make a run longer by what they and saves take, of more devices by more.
#[test]
fn failures_cost_time_and_money() {
    let scratch = Scratch::new("failures");
    let cost = |more: &str| {
        let line = format!("cost llama-3-8b --cluster h100 --gbs 1024 --tokens 1T --price 2{more}");
        scratch.json(&format!("{line} --json"))
    };
    let number = |value: &serde_json::Value| value.as_f64().expect("a number");
    let failing = " --mtbf 50000h --save 30s --restart 10m";
    let mut shares = Vec::new();
    for devices in [64, 512] {
        let devices = format!(" --devices {devices}");
        let [sound, failed] = ["", failing].map(|more| cost(&format!("{devices}{more}")));
        assert_eq!(sound["interrupted"], serde_json::Value::Null);
        let goodput = number(&failed["interrupted"]["goodput"]);
        for key in ["time_s", "device_hours", "money"] {
            let ratio = number(&sound["expected"][key]) / number(&failed["expected"][key]);
            assert!((ratio / goodput - 1.0).abs() < 1e-9, "{key}{devices}");
        }
        shares.push(goodput);
    }
    assert!(1.0 > shares[0] && shares[0] > shares[1] && shares[1] > 0.8, "{shares:?}");
    let alone = "cost llama-3-8b --cluster h100 --tokens 1T --mtbf 5h";
    assert_eq!(scratch.run(alone).status.code(), Some(2));
    let serving = "cost llama-3-8b --cluster h100 --for inference --tokens 1M --mtbf 5h --save 1s";
    assert_eq!(scratch.run(serving).status.code(), Some(2));
    // Devices that fail before anything is saved.
    let at = "llama-3-8b --cluster h100 --gbs 64 --tokens 1B --mtbf 10s --save 30s";
    let output = scratch.run(&format!("cost {at} --devices 8"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("next to nothing of the time counts"), "{errors}");
    let size = scratch.run(&format!("size {at} --deadline 10d"));
    let [page, errors] = [&size.stdout, &size.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(!size.status.success() && !page.contains("inf") && !errors.contains("inf"), "{page}");
    // A limit of their power is what they draw.
    let kwh = |more: &str| {
        let line = format!("cost llama-3-8b --cluster h100 --devices 8 --gbs 64 --tokens 1B{more}");
        number(&scratch.json(&format!("{line} --json"))["expected"]["energy_kwh"])
    };
    assert!(kwh(" --assume power=300W") < kwh(""));
}

/// Flags and the words of a name have one spelling, and say the same.
#[test]
fn flags_and_names_have_one_spelling() {
    let scratch = Scratch::new("spelling");
    let score = |rest: &str| scratch.json(&format!("score llama-3-8b --gbs 64 {rest} --json"));
    let name = "tp=2 pp=4 dp=4 mbs=1 recompute=layers:4 schedule=zb-h1 offload-optimizer=host";
    let words = name.replace(' ', ",");
    let mut command = scratch.command(&[], "score llama-3-8b --gbs 64 --json --config");
    let output = command.arg(name).output().expect("it starts");
    let named: serde_json::Value = serde_json::from_slice(&output.stdout).expect(&words);
    let flags = score(
        "--tp 2 --pp 4 --dp 4 --recompute layers:4 --schedule zb-h1 --offload-optimizer host",
    );
    assert_eq!(flags["configuration"], named["configuration"]);
    assert_eq!(flags["step_time_s"], named["step_time_s"]);
    let wrong = scratch.run("score llama-3-8b --gbs 64 --tp 8 --recompute ful --schedule 1f1");
    let errors = String::from_utf8_lossy(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(2), "{errors}");
    for said in ["--recompute", "did you mean `recompute=full`?", "--schedule"] {
        assert!(errors.contains(said), "{said}: {errors}");
    }
}
