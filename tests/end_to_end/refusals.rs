//! Questions about GPUs that have no answer say why, and answers are those of what was asked.

use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::cli::Scratch;

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

/// Runs a line with one flag more, whose value has spaces.
fn with(scratch: &Scratch, line: &str, flag: &str, value: &str) -> (Option<i32>, String, Value) {
    let output = scratch.command(&[], line).args([flag, value]).output().expect("it starts");
    let document = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned(), document)
}

/// Each line ends with its exit code and says what is wrong; none is answered.
#[test]
fn what_cannot_be_answered_is_refused() {
    let scratch = Scratch::new("refusals");
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    let resnet = models.join("resnet.graph").display().to_string();
    let group = "[[group]]\nextends = \"preset:h100\"\n";
    scratch.write("mix.toml", &format!("{group}{group}"));
    let h100 = "extends = \"preset:h100\"\n";
    scratch.write("far.toml", &format!("{h100}[deployment]\nnodes = 9223372036854775807\n"));
    let cpus = "extends = \"preset:cpu-local\"\n";
    scratch.write("cpus.toml", &format!("{cpus}[deployment]\nnodes = 9223372036854775807\n"));
    let wide = format!("{h100}[deployment]\ndevices_per_node = 1099511627776\n");
    scratch.write("wide.toml", &wide);
    scratch.write("measured.toml", "");
    let columns = "row_id,layers,hidden,heads,seq_len,gpu,n_gpus,global_batch\n";
    let row = "a,32,4096,32,2048,a100,8,8\n";
    scratch.write("twice.csv", &format!("{columns}{row}{row}"));
    let p = "llama-3-8b --cluster h100 --gbs 64";
    for (line, code, said) in [
        (format!("plan {p} --calibration measured.toml"), 2, "the cluster has GPUs"),
        (format!("plan {p} --optimizer sgd"), 2, "priced with adamw"),
        (format!("fit {p} --optimizer none"), 2, "priced with adamw"),
        (format!("plan {p} --dtype f64"), 2, "products in f64"),
        (format!("plan {p} --fix tp=4,tp=8"), 2, "contradict"),
        (format!("plan {p} --tp 8 --fix tp=4"), 2, "contradict"),
        (format!("plan {p} --tp 8 --max tp=4"), 2, "`--fix tp=8` and `--max tp=4` contradict"),
        (format!("fit {p} --fix tp=8 --forbid tp"), 2, "`--forbid tp` contradict"),
        (format!("cost {p} --tokens -3"), 2, "at least 0"),
        (format!("plan {resnet} --cluster h100 --seq 7"), 2, "no 7 tokens"),
        (format!("fit {resnet} --cluster h100 --for inference"), 4, "no attention"),
        ("plan bert-large --cluster h100 --for decode".into(), 4, "no attention to earlier"),
        ("inspect grok-1".into(), 4, "can be planned but not built"),
        ("plan grok-1 --ranks 2".into(), 4, "can be planned but not built"),
        ("plan nosuch --cluster h100".into(), 2, "grok-1"),
        ("plan gpt2 --cluster h100 --seq 2048".into(), 2, "longer than the model's 1024"),
        ("size gpt2 --tokens 1B --deadline 1d".into(), 2, "--cluster h100"),
        ("compare gpt2 --with tp=2".into(), 2, "explain --plan"),
        ("plan gpt2-mini --ranks 2 --max memory=1MiB".into(), 3, "without `--max memory=1MiB`"),
        (format!("plan {p} --for decode --fix zero=3"), 2, "have no `zero`"),
        ("score bert-large --tp 1 --for prefill".into(), 4, "no attention to earlier"),
        ("plan gpt2 --cluster t4 --dtype bf16".into(), 2, "no products in bf16"),
        ("score llama-3-8b --cluster a100 --dtype f8 --gbs 8".into(), 2, "no products in f8"),
        ("plan tiny --watts 10".into(), 2, "--watts"),
        ("plan tiny --budget 1s".into(), 2, "--budget"),
        ("plan gpt2 --cluster mix.toml --nodes 4".into(), 2, "the cluster has groups"),
        ("plan gpt2 --cluster mix.toml --optimizer sgd".into(), 2, "priced with adamw"),
        ("plan gpt2 --cluster far.toml".into(), 6, "more than 1073741824"),
        ("plan gpt2 --cluster cpus.toml".into(), 6, "more than 1073741824"),
        ("plan gpt2 --cluster h100 --nodes 1000000000".into(), 2, "devices, more than"),
        (
            "size gpt2 --cluster wide.toml --tokens 1B --deadline 1d".into(),
            6,
            "more than 1073741824",
        ),
        ("size gpt2 --cluster h100 --devices 8 --tokens 1B --deadline 1d".into(), 2, "looks for"),
        (format!("cost {p} --tokens 1e300T"), 2, "at most 1e18"),
        ("score llama-3-8b --tp 8 --for decode --style nope".into(), 2, "no execution profile"),
        ("score llama-3-8b --tp 8 --for decode --profile megatron-lm".into(), 2, "profile"),
        ("score llama-3-8b --dp 1073741824 --pp 32 --for decode".into(), 2, "than there can be"),
        ("score llama-3-8b --tp 3 --gbs 64".into(), 2, "does not divide 32"),
        ("score llama-3-8b --tp 64 --gbs 64".into(), 2, "does not divide 32"),
        ("score llama-3-8b --ep 3 --dp 3 --gbs 63".into(), 2, "does not divide 1 experts"),
        ("validate twice.csv".into(), 6, "the `row_id` `a`"),
    ] {
        let output = scratch.run(&line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
        assert!(errors.contains(said), "{line}: {errors}");
    }
}

/// Files that cannot be read, and those of something else, are told with their place.
#[test]
fn wrong_files_are_refused() {
    let scratch = Scratch::new("wrong-files");
    std::fs::write(scratch.0.join("raw"), [0xff, 0xfe, 0x00]).expect("it is written");
    scratch.write("cut.toml", "extends = \"preset:h100\n");
    scratch.write("none.toml", "extends = \"preset:h100\"\n[deployment]\nnodes = 0\n");
    scratch.write("cut.json", "{\"train_batch_size\": 8,");
    scratch.answer("plan llama-3-8b --cluster h100 --devices 8 --gbs 8 --fix pp=1 -o llama.json");
    for (line, code, said) in [
        ("plan llama-3-8b --cluster raw", 6, "not UTF-8"),
        ("plan llama-3-8b --cluster cut.toml", 6, "cut.toml:1:"),
        ("plan llama-3-8b --cluster none.toml", 6, "write a whole number of 1"),
        ("score llama-3-8b --from raw", 6, "not UTF-8"),
        ("validate raw", 6, "not UTF-8"),
        ("score llama-3-8b --from cut.json", 6, "cut.json:1:"),
        ("explain gpt2 --cluster h100 --plan llama.json", 2, "is for `llama-3-8b`"),
        ("cluster show h10", 2, "--> CLUSTER"),
        ("cluster validate no.toml", 2, "--> CLUSTER"),
    ] {
        let output = scratch.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
        assert!(errors.contains(said), "{line}: {errors}");
    }
}

/// So are layouts that make no sense.
#[test]
fn layouts_that_cannot_be_are_refused() {
    let scratch = Scratch::new("no-layouts");
    let score = "score llama-3-8b --gbs 64";
    for (layout, said) in [
        ("pp=2 stages=32.0", "no layer"),
        ("recompute=layers:999", "999 layers"),
        ("tp=8 tp=4", "twice"),
    ] {
        let (code, errors, _) = with(&scratch, score, "--config", layout);
        assert_eq!(code, Some(2), "{layout}: {errors}");
        assert!(errors.contains(said), "{layout}: {errors}");
    }
}

/// `fit` keeps to limits as `plan` does; what is compared is as `score` says, on its own ranks.
#[test]
fn verbs_agree_about_layouts() {
    let scratch = Scratch::new("agree");
    let asked = "llama-3-8b --cluster h100 --gbs 64";
    let only = "--fix zero=0,tp=1,pp=1,cp=1,offload=off,recompute=none";
    for verb in ["plan", "fit"] {
        let output = scratch.run(&format!("{verb} {asked} {only}"));
        assert_eq!(output.status.code(), Some(3), "{verb}");
    }
    let fit = scratch.json(&format!("fit {asked} --fix zero=3 --json"));
    let rows = fit["rows"].as_array().expect("rows");
    assert!(
        !rows.is_empty()
            && rows
                .iter()
                .all(|row| { row["plan"].as_str().is_some_and(|plan| plan.contains("zero=3")) }),
        "{fit:#}"
    );
    let fit = scratch.json(&format!("fit {asked} --json"));
    let rows = fit["rows"].as_array().expect("rows").iter();
    let fits: Vec<bool> = rows
        .map(|row| {
            let fits = number(&row["need_bytes"]) <= number(&fit["have_bytes"]);
            assert_eq!(row["fits"], fits, "{row:#}");
            fits
        })
        .collect();
    assert!(fits.contains(&true) && fits.contains(&false), "{fit:#}");
    let page = scratch.answer(&format!("fit {asked}"));
    // One more says that there is an answer.
    let marks = ["✓", "✗"].map(|mark| page.matches(mark).count());
    let count = |wanted: bool| fits.iter().filter(|fits| **fits == wanted).count();
    assert_eq!(marks, [count(true) + 1, count(false)], "{page}");
    let compare = format!("compare {asked} --json");
    for layout in ["tp=4 mbs=1 sp", "tp=2 dp=4 zero=1", "tp=8 mbs=1 sp recompute=full"] {
        let (_, _, compared) = with(&scratch, &compare, "--with", layout);
        let (_, _, scored) = with(&scratch, &format!("score {asked} --json"), "--config", layout);
        for value in ["mfu", "step_time_s", "tokens_per_s_per_device"] {
            let (ours, theirs) = (number(&compared["plans"][0][value]), number(&scored[value]));
            assert!((ours / theirs - 1.0).abs() < 1e-12, "{layout}: {value} {ours} and {theirs}");
        }
    }
    let (code, errors, _) = with(&scratch, &compare, "--with", "dp=8 cp=3");
    assert_eq!(code, Some(2), "{errors}");
    let (code, errors, _) = with(&scratch, &compare, "--with", "dp=8 cp=2");
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("16 ranks on 8 devices"), "{errors}");
}

/// `fit` says why the answer is no, to programs too; a wrong question has no answer.
#[test]
fn no_has_a_reason() {
    let scratch = Scratch::new("reasons");
    let group = "[[group]]\nextends = \"preset:h100\"\n";
    scratch.write("mix.toml", &format!("{group}{group}"));
    for (line, why) in [
        ("fit llama-3-8b --cluster h100 --max memory=2GiB --fix offload=off", "fits in memory"),
        ("fit llama-3-8b --cluster mix.toml --gbs 7 --fix dp=16", "`--fix dp=16` leaves"),
        ("fit llama-3-8b --cluster mix.toml --max memory=2GiB", "fits"),
    ] {
        let output = scratch.run(&format!("{line} --json"));
        let told: Value = serde_json::from_slice(&output.stdout).expect("a document");
        assert_eq!((output.status.code(), &told["fits"]), (Some(3), &Value::Bool(false)), "{line}");
        let reason = told["reason"].as_str().expect("a reason");
        assert!(reason.contains(why), "{line}: {reason}");
        let errors = scratch.run(line).stderr;
        assert!(String::from_utf8_lossy(&errors).contains(reason), "{line}: {reason}");
    }
    for line in ["fit llama-3-8b --cluster h100 --ranks 3", "fit gpt2 --cluster mix.toml --nodes 4"]
    {
        let output = scratch.run(&format!("{line} --fix tp=2,tp=4 --json"));
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(2), &b""[..]), "{line}");
    }
}

/// Every verb that plans tells programs why the answer is no: which bytes of which rank, and what
/// is near. What is near is an answer.
#[test]
fn no_is_a_document() {
    let scratch = Scratch::new("no-document");
    let asked = "mistral-7b --cluster rtx4090 --devices 4 --gbs 16 --seq 2048 --forbid offload";
    let tight = "gpt2-mini --ranks 2 --max memory=1MiB";
    for (line, code) in [
        (format!("plan {asked}"), "E3201"),
        (format!("explain {asked}"), "E3201"),
        (format!("cost {asked} --tokens 1B"), "E3201"),
        (format!("plan {tight}"), "E3201"),
        (format!("plan {asked} --fix tp=3"), "E3203"),
        ("plan gpt2-mini --ranks 2 --gbs 4 --fix mbs=3".into(), "E3203"),
        ("plan gpt2-mini --ranks 97 --gbs 7".into(), "E3204"),
    ] {
        let output = scratch.run(&format!("{line} --json"));
        let errors = String::from_utf8_lossy(&output.stderr);
        let told: Value = serde_json::from_slice(&output.stdout).expect("a document");
        assert_eq!(output.status.code(), Some(3), "{line}: {errors}");
        assert_eq!((&told["fits"], &told["code"]), (&Value::Bool(false), &code.into()), "{line}");
        let reason = told["reason"].as_str().expect("a reason");
        assert!(errors.contains(reason) && errors.contains(code), "{line}: {errors}");
        if code != "E3201" {
            assert!(
                told["smallest"].is_null() && told["nearest"] == Value::Array(vec![]),
                "{line}"
            );
            continue;
        }
        let smallest = &told["smallest"];
        let [need, have] = [&smallest["need_bytes"], &told["have_bytes"]].map(number);
        let memory = smallest["memory"].as_object().expect("parts");
        let bytes = |name: &String| line.contains("gpt2") || name.ends_with("_bytes");
        let parts = memory.iter().filter(|(name, _)| bytes(name)).map(|(_, part)| number(part));
        assert!(need > have && smallest["rank"].is_u64(), "{line}: {told:#}");
        let sum: f64 = parts.sum();
        assert!(line.contains("gpt2") || (sum / need - 1.0).abs() < 1e-9, "{line}: {sum}, {need}");
        let near = told["nearest"].as_array().expect("a list");
        assert!(near.iter().all(|near| errors.contains(near["text"].as_str().expect("a plan"))));
        assert!(!near.is_empty(), "{line}: {told:#}");
    }
    let told = scratch.run(&format!("plan {asked} --json")).stdout;
    let told: Value = serde_json::from_slice(&told).expect("a document");
    let near = &told["nearest"][0];
    let score = "score mistral-7b --cluster rtx4090 --gbs 16 --seq 2048";
    let (code, _, _) = with(&scratch, score, "--config", near["text"].as_str().expect("a plan"));
    assert_eq!(code, Some(0), "{near:#}");
    // The fewest devices that are enough have a reason where there are none.
    for (line, why) in [
        ("size llama-3-8b --cluster h100 --tokens 1T --deadline 1s", "at their peak"),
        ("size llama-3-8b --cluster h100 --tokens 1T --deadline 80d --nodes 1", "takes"),
        ("size llama-3-8b --cluster h100 --tokens 1B --deadline 5d --nodes 1 --fix tp=3", "tp=3"),
    ] {
        let output = scratch.run(&format!("{line} --json"));
        let told: Value = serde_json::from_slice(&output.stdout).expect("a document");
        let reason = told["reason"].as_str().expect("a reason");
        assert!(output.status.code() == Some(3) && reason.contains(why), "{line}: {told:#}");
        let page = scratch.run(line).stdout;
        assert!(String::from_utf8_lossy(&page).contains(reason), "{line}");
    }
}

/// Where more devices are needed, the fewest are told, to an eighth of twice as many, and what they
/// do is what is planned for them.
#[test]
fn the_fewest_more_devices_are_told() {
    let scratch = Scratch::new("more-devices");
    let asked = "plan llama-3-70b --cluster rtx4090 --gbs 840 --seq 2048 --json --devices";
    let on = |devices: u64| {
        let output = scratch.run(&format!("{asked} {devices}"));
        (output.status.code(), serde_json::from_slice::<Value>(&output.stdout).expect("a document"))
    };
    let (_, told) = on(8);
    let near = &told["nearest"][0];
    let devices = near["devices"].as_u64().expect("a number");
    let [(fits, plan), (fewer, _)] = [on(devices), on(devices - 2)];
    assert!((9..16).contains(&devices) && fits == Some(0) && fewer == Some(3), "{near:#}");
    let [now, then] = [near, &plan].map(|plan| number(&plan["step_time_s"]));
    assert!((now / then - 1.0).abs() < 1e-9, "{now} s and {then} s");
}

/// The limits that leave nothing are named, those alone; the values that are proposed in their
/// place leave something.
#[test]
fn limits_that_leave_nothing_are_named() {
    let scratch = Scratch::new("causes");
    let asked = "plan llama-3-8b --cluster h100 --devices 8 --gbs 64 --seq 2048";
    for (asked, limits, named, instead) in [
        (asked, "--fix tp=3,zero=1", "`--fix tp=3` leaves", &["tp=2", "tp=4"][..]),
        (asked, "--fix mbs=3 --forbid cp", "`--fix mbs=3` leaves", &["mbs=2", "mbs=4"]),
        (asked, "--fix pp=5 --max tp=4", "`--fix pp=5` leaves", &["pp=4", "pp=8"]),
        (
            asked,
            "--fix tp=8 --fix pp=2 --max mbs=1",
            "`--fix pp=2` and `--fix tp=8` together leave",
            &["pp=1", "tp=4"],
        ),
        (asked, "--fix vpp=3", "`--fix vpp=3` leaves", &["vpp=2", "vpp=4"]),
        ("plan gpt2-mini --ranks 2 --gbs 4", "--fix dp=4", "`--fix dp=4` leaves", &["dp=2"]),
    ] {
        let output = scratch.run(&format!("{asked} {limits}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{limits}: {errors}");
        assert!(errors.contains("E3203") && errors.contains(named), "{limits}: {errors}");
        for other in instead {
            assert!(errors.contains(&format!("--fix {other}`")), "{limits}: {errors}");
        }
    }
}

/// A plan's document says one thing: what of it was changed is no plan.
#[test]
fn edited_plans_are_refused() {
    let scratch = Scratch::new("edited");
    let plan = scratch.json("plan llama-3-8b --cluster h100 --gbs 64 --json");
    let mut changed = Vec::new();
    for tp in [Value::from(0), Value::from("x"), Value::from(8)] {
        let mut other = plan.clone();
        other["plan"]["tp"] = tp;
        changed.push(other);
    }
    let mut other = plan.clone();
    other.as_object_mut().expect("an object").remove("text");
    changed.push(other);
    for other in &changed {
        scratch.write("plan.json", &other.to_string());
        let output = scratch.run("score llama-3-8b --cluster h100 --from plan.json");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(6), "{errors}");
    }
    scratch.write("plan.json", &plan.to_string());
    let scored = scratch.json("score llama-3-8b --cluster h100 --from plan.json --json");
    assert_eq!(scored["step_time_s"], plan["step_time_s"]);
}

/// `size` looks beyond the nodes of a file, and not beyond those that it is given.
#[test]
fn sizes_are_looked_for_beyond_a_file() {
    let scratch = Scratch::new("sizes");
    scratch.write("one.toml", "extends = \"preset:h100\"\n[deployment]\nnodes = 1\n");
    let line = "size llama-3-8b --tokens 1B --deadline 1h --json --cluster";
    let [file, preset] = ["one.toml", "h100"].map(|c| scratch.json(&format!("{line} {c}")));
    assert_eq!(file["devices"], preset["devices"]);
    assert!(number(&file["devices"]) > 8.0 && file["gbs"] == 1024, "{file:#}");
    let few = scratch.run(&format!("{line} h100 --nodes 1"));
    assert_eq!(few.status.code(), Some(3));
}

/// A plan for GPUs is one answer, however it is asked for, and the file of it is explained.
#[test]
fn plans_for_gpus_are_one_answer() {
    let scratch = Scratch::new("one-answer");
    let asked = "llama-3-8b --cluster h100 --gbs 64";
    let plan = scratch.json(&format!("plan {asked} --json"));
    let layout = scratch.answer(&format!("plan {asked} --name"));
    assert_eq!(plan["text"], layout.trim());
    let page = scratch.answer(&format!("plan {asked}"));
    assert_eq!(scratch.answer(&format!("plan {asked} -o p.json")), page);
    let read = |file: &str| std::fs::read_to_string(scratch.0.join(file)).expect("it was written");
    assert_eq!(serde_json::from_str::<Value>(&read("p.json")).expect("a document"), plan);
    assert_eq!(scratch.answer(&format!("plan {asked} -o p.txt")), page);
    assert_eq!(scratch.answer(&format!("plan {asked} --plan")), read("p.txt"));
    let other = scratch.json(&format!("plan {asked} --fix pp=2 --json -o other.json"));
    for (file, plan) in [("p.txt", &plan), ("p.json", &plan), ("other.json", &other)] {
        let said = scratch.json(&format!("explain llama-3-8b --cluster h100 --plan {file} --json"));
        assert_eq!(said["text"], plan["text"], "{file}");
        assert_eq!(said["step_time_s"], plan["step_time_s"], "{file}");
        assert_eq!(said["fastest"]["text"], layout.trim(), "{file}");
        let gap = number(&said["step_time_s"]) / number(&said["bound_s"]) - 1.0;
        assert!((number(&said["gap"]) - gap).abs() < 1e-9, "{file}: {gap} and {}", said["gap"]);
        let page = scratch.answer(&format!("explain llama-3-8b --cluster h100 --plan {file}"));
        let is_it = plan["text"] == layout.trim();
        let verdict =
            if is_it { "It is the fastest that fits" } else { "The fastest that fits, -" };
        assert!(page.contains(verdict), "{page}");
    }
    // Where no flag says it, the cluster is the plan's.
    let own = scratch.json("explain llama-3-8b --plan p.json --json");
    assert_eq!(own["step_time_s"], plan["step_time_s"]);
    for (line, code) in [
        ("explain gpt2 --plan p.json", 2),
        ("explain llama-3-8b --cluster h100 --devices 16 --plan p.txt", 2),
        ("explain gpt2 --cluster h100 --plan none.txt", 2),
    ] {
        assert_eq!(scratch.run(line).status.code(), Some(code), "{line}");
    }
}

/// No plan computes more than its devices can in the type that it is planned in, which is one that
/// they have.
#[test]
fn no_plan_is_above_the_peak() {
    let scratch = Scratch::new("peaks");
    for cluster in ["t4", "v100", "mi250x"] {
        for (model, dtypes) in
            [("gpt2", ["", " --dtype f32"]), ("llama-3-8b", ["", " --dtype f16"])]
        {
            for dtype in dtypes {
                let asked = format!("{model} --cluster {cluster} --gbs 64 --seq 512{dtype}");
                let plan = scratch.json(&format!("plan {asked} --devices 32 --json"));
                let mfu = number(&plan["mfu"]);
                assert!((0.01..0.8).contains(&mfu), "{asked}: {mfu}");
                let text = plan["text"].as_str().expect("a layout");
                let score = format!("score {asked} --json");
                let (_, _, scored) = with(&scratch, &score, "--config", text);
                let ratio = number(&scored["mfu"]) / mfu;
                assert!((ratio - 1.0).abs() < 1e-12, "{asked}: {ratio}");
                let is_usual = ["bf16", "f16"].iter().any(|usual| plan["dtype"] == *usual);
                assert!(is_usual || dtype == " --dtype f32", "{asked}: {}", plan["dtype"]);
            }
        }
    }
}

/// So many sequences are shared by the copies, some of which may have none: no device makes more
/// tokens than its share.
#[test]
fn sequences_are_those_that_are_asked_for() {
    let scratch = Scratch::new("sequences");
    let asked = "llama-3-8b --cluster h100 --for decode --seq 4096 --json";
    for sequences in [1, 4, 9, 64] {
        let plan = scratch.json(&format!("plan {asked} --gbs {sequences}"));
        for row in plan["rows"].as_array().expect("rows") {
            assert_eq!(row["sequences"], sequences, "{row:#}");
            let rate = f64::from(sequences) / number(&row["token_s"]) / 8.0;
            let told = number(&row["tokens_per_s_per_device"]);
            assert!((told / rate - 1.0).abs() < 1e-12, "{sequences} sequences: {row:#}");
            let alone = number(&row["token_s_alone"]);
            assert!(alone <= number(&row["token_s"]), "{sequences} sequences: {row:#}");
        }
    }
}

/// A model is the same under its name and as the graph that it is exported to.
#[test]
fn graphs_are_their_models() {
    let scratch = Scratch::new("as-graph");
    let group = "[[group]]\nextends = \"preset:h100\"\n[group.deployment]\nnodes = 1\n";
    scratch.write("mix.toml", &format!("{group}{group}"));
    for (model, seq) in [("gpt2-mini", 64), ("llama-3-8b", 512)] {
        scratch.answer(&format!("export {model} --to graph --seq {seq} --dtype bf16 -o x.graph"));
        let [own, graph] = [format!("{model} --seq {seq}"), "x.graph".to_owned()];
        let parts = |of: &str| {
            let told = scratch.json(&format!("inspect {of} --json"));
            let parts = told["layers"].as_array().expect("layers").iter();
            let parts = parts.map(|part| {
                ["count", "params", "flops_forward_per_token"].map(|key| part[key].clone())
            });
            parts.collect::<Vec<_>>()
        };
        assert_eq!(parts(&own), parts(&graph), "{model}");
        for cluster in ["h100", "mix.toml"] {
            let asked = format!("--cluster {cluster} --gbs 16");
            let plan =
                |of: &str| scratch.json(&format!("plan {of} {asked} --fix pp=1,tp=1 --json"));
            let [ours, theirs] = [plan(&own), plan(&graph)];
            assert_eq!(theirs["seq"], seq, "{theirs:#}");
            for (key, off) in [("flops_per_step", 1e-9), ("tokens_per_s", 0.25), ("mfu", 0.25)] {
                // Plans over groups have rates alone.
                if cluster == "h100" || key == "tokens_per_s" {
                    let ratio = number(&theirs[key]) / number(&ours[key]);
                    assert!((ratio - 1.0).abs() < off, "{model}: {key} {ratio}");
                }
            }
            let cost = |of: &str| scratch.json(&format!("cost {of} {asked} --tokens 1B --json"));
            let [ours, theirs] = [cost(&own), cost(&graph)].map(|told| told["steps"].clone());
            assert!(ours == theirs && ours.is_number(), "{model} on {cluster}: {ours}, {theirs}");
        }
    }
    let moe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/moe.graph");
    let told = scratch.json(&format!("inspect {} --json", moe.display()));
    let held = |part: &Value| number(&part["params"]) * number(&part["count"]);
    let parts = told["layers"].as_array().expect("layers");
    assert_eq!(parts.iter().map(held).sum::<f64>(), number(&told["params"]), "{told:#}");
}

/// What is asked about stands above every answer, and numbers keep the digits that matter.
#[test]
fn bills_say_what_they_are_for() {
    let scratch = Scratch::new("bill-pages");
    let asked = "llama-3-8b --cluster h100 --tokens 1M --price 2.5 --watts 700";
    let size = scratch.answer(&format!("size {asked} --deadline 1h"));
    for part in ["model    llama-3-8b", "h100, 8 devices a node", "1,024 samples", "money", "kWh"] {
        assert!(size.contains(part), "{part}: {size}");
    }
    let told = scratch.json(&format!("cost {asked} --gbs 8 --seq 512 --json"));
    let page = scratch.answer(&format!("cost {asked} --gbs 8 --seq 512"));
    let row = page.lines().find(|line| line.trim().starts_with("money")).expect("a row");
    let shown: f64 = row.split_whitespace().nth(3).and_then(|n| n.parse().ok()).expect("a number");
    let money = number(&told["expected"]["money"]);
    assert!(money < 10.0 && (shown / money - 1.0).abs() < 0.01, "{shown} of {money}");
    let plan = "plan gpt2 --cluster h100 --objective energy --gbs 8 --watts 700";
    let page = scratch.answer(plan);
    let joules = number(&scratch.json(&format!("{plan} --json"))["energy_j"]);
    assert!((10.0..100.0).contains(&joules) && page.contains(&format!("{joules:.1} J")), "{page}");
}

/// A reader that goes away does not turn a no into a yes.
#[test]
fn a_closed_pipe_keeps_the_exit_code() {
    let scratch = Scratch::new("closed");
    for (line, code) in
        [("score llama-3-8b --tp 1 --gbs 8", 3), ("score llama-3-8b --tp 8 --gbs 8 --mbs 1", 0)]
    {
        let mut command = scratch.command(&[], line);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        drop(child.stdout.take());
        assert_eq!(child.wait().expect("it ends").code(), Some(code), "{line}");
    }
}

/// An answer that cannot be written is none.
#[test]
fn a_full_disk_is_told() {
    let scratch = Scratch::new("full");
    for line in ["plan llama-3-8b --cluster h100 --gbs 64", "cluster ls --json"] {
        let Ok(full) = std::fs::OpenOptions::new().write(true).open("/dev/full") else { return };
        let output = scratch.command(&[], line).stdout(full).output().expect("it starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(7), "{line}: {errors}");
        assert!(errors.contains("No space left") && errors.contains("make room"), "{errors}");
    }
}

/// A plan over groups is none of one kind of devices, and is called so.
#[test]
fn plans_over_groups_are_called_so() {
    let scratch = Scratch::new("of-groups");
    let group = |name: &str| format!("[[group]]\nextends = \"preset:{name}\"\n");
    scratch.write("mixed.toml", &(group("h100") + &group("a100")));
    scratch.answer("plan gpt2 --cluster mixed.toml --gbs 64 --seq 512 --json -o gp.json");
    for line in ["score gpt2 --from gp.json", "explain gpt2 --cluster h100 --plan gp.json"] {
        let output = scratch.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{line}: {errors}");
        assert!(errors.contains("over groups"), "{line}: {errors}");
    }
}

/// A plan over groups that is in a file is explained beside the fastest one.
#[test]
fn plans_over_groups_are_explained() {
    let scratch = Scratch::new("explain-groups");
    let group = |name: &str| format!("[[group]]\nextends = \"preset:{name}\"\n");
    scratch.write("mixed.toml", &(group("h100") + &group("a100")));
    let asked = "gpt2 --cluster mixed.toml";
    let plan = scratch.json(&format!("plan {asked} --gbs 64 --seq 512 --json -o best.json"));
    let fix = "--fix zero=3,tp=2";
    let other =
        scratch.json(&format!("plan {asked} --gbs 64 --seq 512 {fix} --json -o other.json"));
    for (file, given) in [("best.json", &plan), ("other.json", &other)] {
        let told = scratch.json(&format!("explain {asked} --plan {file} --json"));
        let fastest = &told["fastest"];
        for (found, expected) in [(&told, given), (fastest, &plan)] {
            let ratio = number(&found["step_time_s"]) / number(&expected["step_time_s"]);
            assert!((ratio - 1.0).abs() < 1e-9, "{file}: {ratio}");
        }
        assert_eq!((&told["fits"], &told["infeasible"]), (&Value::Bool(true), &Value::Null));
        let page = scratch.answer(&format!("explain {asked} --plan {file}"));
        let verdict =
            if file == "best.json" { "It is the fastest" } else { "The fastest that fits, -" };
        assert!(page.contains(verdict), "{page}");
    }
    let none = scratch.answer(&format!("explain {asked} --plan best.json --max memory=768MiB"));
    assert!(none.contains("No plan is found beside it") && none.contains("does not fit"), "{none}");
    let output = scratch.run("explain llama-3-8b --cluster mixed.toml --plan best.json");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("is for `gpt2`"), "{errors}");
}
