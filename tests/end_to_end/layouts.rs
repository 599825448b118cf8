//! Layouts that are written and layouts that are searched obey the same rules.

use serde_json::Value;

use crate::cli::Scratch;

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

/// What the program says of a layout: its exit code, and its document where there is one.
fn scored(scratch: &Scratch, job: &str, layout: &str) -> (Option<i32>, Option<Value>) {
    let mut command = scratch.command(&[], &format!("score {job} --json"));
    let output = command.args(["--config", layout]).output().expect("the program starts");
    (output.status.code(), serde_json::from_slice(&output.stdout).ok())
}

/// Neighbours of the best plan are layouts as any other: they can be scored, and cost the same
/// there. None that fits is faster than the best. They differ from it in what is named alone.
#[test]
fn neighbours_of_the_best_plan_obey_the_rules() {
    let scratch = Scratch::new("neighbours");
    let jobs = [
        "mixtral-8x7b --cluster l4 --devices 32 --gbs 128 --seq 256",
        "bert-large --cluster a100-pcie --devices 16 --gbs 8 --seq 512",
        "gpt3-175b --cluster b200 --devices 8 --gbs 32 --seq 512",
        "gpt2-xl --cluster h100 --devices 8 --gbs 8 --seq 1024",
        "llama-3-8b --cluster h100 --devices 32 --gbs 64 --seq 2048",
    ];
    let mut all = 0;
    for job in jobs {
        let best = scratch.json(&format!("explain {job} --json"));
        let plan = best["text"].as_str().expect("a plan");
        let step_s = number(&best["step_time_s"]);
        let without_devices: Vec<&str> = job.split(' ').collect();
        let score = [&without_devices[..3], &without_devices[5..]].concat().join(" ");
        for other in best["neighbours"].as_array().expect("a list") {
            let change = other["change"].as_str().expect("what changes");
            let layout = other["text"].as_str().expect("a plan");
            let (code, document) = scored(&scratch, &score, layout);
            let about = format!("{job}: {change}: {layout} beside {plan}");
            let document = document.unwrap_or_else(|| panic!("{about}: refused with {code:?}"));
            let seconds = number(&other["step_time_s"]);
            assert!((number(&document["step_time_s"]) / seconds - 1.0).abs() < 1e-9, "{about}");
            assert_eq!(document["fits"], other["fits"], "{about}");
            if other["fits"] == true {
                assert!(seconds >= step_s * (1.0 - 1e-9), "{about}: {seconds} and not {step_s}");
            }
            // Stages that are cut unevenly stay so.
            let stages = |text: &str| {
                text.split(' ').find(|word| word.starts_with("stages=")).map(str::to_owned)
            };
            if !change.starts_with("pp=") {
                assert_eq!(stages(layout), stages(plan), "{about}");
            }
            all += 1;
        }
    }
    assert!(all > 40, "{all}");
}

/// What a search does not have because it cannot be is refused where it is written, and is no row
/// of `fit`.
#[test]
fn no_verb_prices_what_cannot_be() {
    let scratch = Scratch::new("illegal");
    let job = "llama-3-8b --cluster h100 --gbs 8 --seq 512";
    for (layout, why) in [
        ("tp=4 cp=2 pp=2 dp=2 mbs=4 vpp=16 zero=1 order=cp.tp.dp.pp", "micro-batches"),
        ("tp=1 pp=8 dp=2 mbs=1 schedule=zb-h1", "too few"),
        ("tp=1 pp=4 dp=2 mbs=1 schedule=zb-h2", "too few"),
        ("tp=3 pp=1 dp=1 mbs=1", "does not divide 32"),
        ("tp=1 cp=16 pp=1 dp=1 mbs=1", "tokens a rank"),
        ("tp=1 pp=4 dp=1 mbs=1 vpp=3", "chunks"),
    ] {
        for verb in ["score", "compare"] {
            let flag = if verb == "score" { "--config" } else { "--with" };
            let devices = if verb == "score" { "" } else { " --devices 64" };
            let mut command = scratch.command(&[], &format!("{verb} {job}{devices}"));
            let output = command.args([flag, layout]).output().expect("the program starts");
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{verb} {layout}: {said}");
            assert!(said.contains("E3401") && said.contains(why), "{verb} {layout}: {said}");
        }
    }
    // 12 heads, whatever fits.
    for job in [
        "gpt2 --cluster h100 --devices 8 --gbs 8 --fix tp=8",
        "gpt2 --cluster h100 --devices 16 --gbs 1",
    ] {
        let [plan, fit] = ["plan", "fit"].map(|verb| scratch.run(&format!("{verb} {job}")));
        assert_eq!(plan.status.code(), fit.status.code(), "{job}");
        assert!(!String::from_utf8_lossy(&fit.stdout).contains("tp=8"), "{job}");
    }
    let rows = scratch.json("fit gpt2 --cluster h100 --devices 8 --gbs 8 --json");
    let rows = rows["rows"].as_array().expect("a list");
    assert!(rows.iter().all(|row| !row["plan"].as_str().is_some_and(|plan| plan.contains("tp=8"))));
}

/// A plan over groups that was written is not called the best.
#[test]
fn only_what_was_searched_is_called_the_best() {
    let scratch = Scratch::new("searched");
    let groups = "name = \"g\"\n[[group]]\nextends = \"preset:h100\"\n\
                  [[group]]\nextends = \"preset:a100\"\n";
    scratch.write("g.toml", groups);
    let line = "compare llama-3-8b --cluster g.toml --gbs 64 --seq 2048";
    let mut command = scratch.command(&[], line);
    let output = command.args(["--with", "tp=8 dp=1 mbs=1;-"]).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (written, best) = text.split_once("\nbest").expect("the best is beside it");
    assert!(written.contains("(1)") && !written.contains("no other is better"), "{text}");
    assert!(best.contains("step"), "{text}");
}
