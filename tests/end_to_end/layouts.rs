//! Layouts that are written and layouts that are searched obey the same rules.

use planner::configuration::{Configuration, Place, Recompute};
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
        "llama-3-8b --cluster h100 --devices 8 --gbs 64 --seq 8192",
    ];
    let (mut all, mut nearer) = (0, 0);
    for job in jobs {
        let best = scratch.json(&format!("explain {job} --json"));
        let plan = best["text"].as_str().expect("a plan");
        let step_s = number(&best["step_time_s"]);
        let without_devices: Vec<&str> = job.split(' ').collect();
        let score = [&without_devices[..3], &without_devices[5..]].concat().join(" ");
        let neighbours = best["neighbours"].as_array().expect("a list");
        let fastest_first = neighbours.is_sorted_by_key(|other| number(&other["step_time_s"]));
        assert!(fastest_first, "{best:#}");
        for other in neighbours {
            let change = other["change"].as_str().expect("what changes");
            let layout = other["text"].as_str().expect("a plan");
            let (code, document) = scored(&scratch, &score, layout);
            let about = format!("{job}: {change}: {layout} beside {plan}");
            let document = document.unwrap_or_else(|| panic!("{about}: refused with {code:?}"));
            let seconds = number(&other["step_time_s"]);
            assert!((number(&document["step_time_s"]) / seconds - 1.0).abs() < 1e-9, "{about}");
            // What a program moves to the host is more than the closed form says, and what it
            // leaves on the device is less.
            if !layout.contains("offload-") {
                assert_eq!(document["fits"], other["fits"], "{about}");
            }
            if other["fits"] == true {
                assert!(seconds >= step_s * (1.0 - 1e-9), "{about}: {seconds} and not {step_s}");
            }
            let reason = other["reason"].as_str().expect("a reason");
            if let (true, Some((part, _))) = (other["fits"] == true, reason.split_once(" +")) {
                assert_eq!(part, grown(&best["breakdown"], &document["breakdown"]), "{about}");
            }
            // With all else searched it is the best of all that have the change.
            let searched = &other["best"];
            if !searched.is_null() {
                let least = number(&searched["step_time_s"]);
                assert!(searched["fits"] == true && least >= step_s * (1.0 - 1e-9), "{about}");
                let is_no_slower = other["fits"] != true || least <= seconds * (1.0 + 1e-9);
                assert!(is_no_slower, "{about}: {searched:#}");
                nearer += usize::from(other["fits"] == true && least < 0.99 * seconds);
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
    assert!(all > 40 && nearer > 0, "{all}, {nearer}");
}

/// The part of a step that takes the most longer than in another.
fn grown(before: &Value, after: &Value) -> String {
    let parts = before.as_object().expect("parts").keys();
    let more = |part: &&String| number(&after[*part]) - number(&before[*part]);
    let most = parts.max_by(|a, b| more(a).total_cmp(&more(b))).expect("a step has parts");
    most.trim_end_matches("_s").to_owned()
}

/// All wait for the rank whose experts have the most tokens: the more it has, the longer a step is,
/// and in the end experts lie over fewer ranks. Models without experts have none.
#[test]
fn busy_ranks_of_experts_cost_time() {
    let scratch = Scratch::new("imbalance");
    let job = "mixtral-8x7b --cluster h100 --devices 64 --gbs 128 --seq 4096";
    let of = |times: &str| scratch.json(&format!("plan {job} --imbalance {times} --json"));
    let plans = ["1", "1.5", "4"].map(of);
    let steps = plans.each_ref().map(|plan| number(&plan["step_time_s"]));
    assert_eq!(steps[0], number(&scratch.json(&format!("plan {job} --json"))["step_time_s"]));
    assert!(steps[0] < steps[1] && steps[1] <= steps[2], "{steps:?}");
    let score = job.replace(" --devices 64", "");
    for (plan, times) in plans.iter().zip(["1", "1.5", "4"]) {
        let text = plan["text"].as_str().expect("a plan");
        let (_, scored) = scored(&scratch, &format!("{score} --imbalance {times}"), text);
        assert_eq!(scored.expect("a document")["step_time_s"], plan["step_time_s"], "{text}");
    }
    for (line, said) in [
        ("plan llama-3-8b --cluster h100 --imbalance 2", "has no experts"),
        ("plan gpt2-mini --imbalance 2", "name GPUs"),
        ("plan mixtral-8x7b --cluster h100 --imbalance 0.5", "1.3"),
    ] {
        let refused = scratch.run(line);
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(2) && errors.contains(said), "{line}: {errors}");
    }
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
        ("tp=1 pp=4 dp=1 mbs=1 vpp=9", "chunks"),
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

/// What `plan` prints of groups is what `score` and `compare` take, and costs the same there.
#[test]
fn printed_plans_over_groups_are_scored() {
    let scratch = Scratch::new("printed");
    let groups = "name = \"g\"\n[[group]]\nextends = \"preset:h100\"\n\
                  [[group]]\nextends = \"preset:a100\"\n";
    scratch.write("g.toml", groups);
    let asked = "llama-3-8b --cluster g.toml --gbs 64 --seq 2048";
    let mut kinds = Vec::new();
    for limits in ["", " --fix pp=1", " --objective cost"] {
        let plan = scratch.json(&format!("plan {asked}{limits} --json -o plan.json"));
        let score = "score llama-3-8b --cluster g.toml --from plan.json --json";
        assert_eq!(scratch.json(score)["groups"], plan["groups"], "{limits}");
        let text = scratch.answer(&format!("plan {asked}{limits} --name"));
        for (verb, flag) in [("score", "--config"), ("compare", "--with")] {
            let mut command = scratch.command(&[], &format!("{verb} {asked} --json"));
            let output = command.args([flag, text.trim()]).output().expect("it starts");
            let errors = String::from_utf8_lossy(&output.stderr);
            let told: Value = serde_json::from_slice(&output.stdout).expect(&errors);
            let told = if verb == "score" { &told } else { &told["plans"][0] };
            assert_eq!(told["kind"], plan["kind"], "{text}");
            let ratio = number(&told["step_time_s"]) / number(&plan["step_time_s"]);
            assert!((ratio - 1.0).abs() < 1e-12, "{verb} {text}: {ratio}");
        }
        kinds.push(plan["kind"].clone());
    }
    assert!(kinds.contains(&"shares".into()), "{kinds:?}");
    scratch.write("one.json", "{\"train_batch_size\": 8}");
    let one = scratch.run("score llama-3-8b --cluster g.toml --from one.json --gbs 64");
    assert_eq!(one.status.code(), Some(6), "{}", String::from_utf8_lossy(&one.stderr));
    for (layouts, said) in [
        ("h10: tp=8; a100: tp=8", "did you mean `h100`?"),
        ("h100: tp=8; h100: tp=8", "more layouts of `h100`"),
        ("h100: tp=8; tp=8", "of no group"),
        ("h100: pp=8 stages=1.1; a100: pp=8 stages=15.15", "layers for 2 stages"),
    ] {
        let mut command = scratch.command(&[], &format!("score {asked}"));
        let output = command.args(["--config", layouts]).output().expect("it starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{layouts}: {errors}");
        assert!(errors.contains(said), "{layouts}: {errors}");
    }
}

/// A plan in a file is explained where it is the fastest, and where nothing fits.
#[test]
fn every_plan_is_explained() {
    let scratch = Scratch::new("every");
    let asked = "llama-3-8b --cluster h100 --gbs 64 --seq 2048";
    let plan = scratch.json(&format!("plan {asked} --json -o plan.json"));
    let page = scratch.answer(&format!("explain {asked} --plan plan.json"));
    assert!(page.contains("It is the fastest that fits"), "{page}");
    // Shares of the step are those of the whole.
    let shares = page.lines().skip_while(|line| !line.starts_with("Where")).skip(1);
    let shares = shares.take_while(|line| line.starts_with("  "));
    let shares = shares.filter_map(|line| line.split('%').next()?.split(' ').next_back());
    let shares: Vec<f64> = shares.map(|share| share.parse().expect("a share")).collect();
    assert!(shares.len() > 3 && (shares.iter().sum::<f64>() - 100.0).abs() < 0.5, "{page}");
    let line = format!("explain {asked} --plan plan.json --max memory=2GiB --fix offload=off");
    let page = scratch.answer(&line);
    for said in ["It does not fit", "No plan is found beside it", "Where a step goes"] {
        assert!(page.contains(said), "{said}: {page}");
    }
    let told = scratch.json(&format!("{line} --json"));
    assert_eq!((&told["step_time_s"], &told["fits"]), (&plan["step_time_s"], &false.into()));
    assert!(told["infeasible"].is_string() && told["fastest"].is_null(), "{told:#}");
    // With other memory the limits are the same.
    let limited = scratch.json(&format!("explain {asked} --fix pp=2 --json"));
    for other in limited["other_memory"].as_array().expect("a list") {
        let text = other["best"]["text"].as_str().expect("a plan");
        assert!(text.contains(" pp=2 "), "{text}");
    }
    // What the limits leave no plan for is explained too; what cannot be is not.
    let other = scratch.answer(&format!("explain {asked} --plan plan.json --fix tp=8,dp=2"));
    assert!(other.contains("No plan is found beside it"), "{other}");
    let wrong = scratch.run(&format!("explain {asked} --plan plan.json --dtype f64"));
    assert_eq!(wrong.status.code(), Some(2));
}

/// Passes that are replayed take as long as the search says, within what its formula leaves out.
#[test]
fn plans_are_replayed() {
    let scratch = Scratch::new("replayed");
    for asked in [
        "llama-3-8b --cluster h100 --devices 8 --gbs 64 --seq 2048 --fix pp=1",
        "gpt3-175b --cluster a100 --devices 64 --gbs 64 --seq 2048 --fix pp=8,mbs=1",
        "llama-3-8b --cluster a100 --devices 16 --gbs 32 --seq 2048 --fix pp=4,schedule=zb-h1",
    ] {
        let plan = scratch.json(&format!("plan {asked} --json"));
        let ratio = number(&plan["simulated_step_time_s"]) / number(&plan["step_time_s"]);
        assert!((ratio - 1.0).abs() < 0.02, "{asked}: {ratio}");
    }
}

/// The order of axes that is fixed is that of the plan, and no slower than the best of any order.
#[test]
fn orders_of_axes_are_fixed() {
    let scratch = Scratch::new("orders");
    let asked = "llama-3-8b --cluster a100 --devices 16 --gbs 32 --seq 2048 --fix tp=4,pp=2";
    let free = scratch.json(&format!("plan {asked} --json"));
    let order = "pp.dp.cp.tp";
    let fixed = scratch.json(&format!("plan {asked},order={order} --json"));
    let text = fixed["text"].as_str().expect("a layout");
    assert!(text.contains(&format!("order={order}")), "{text}");
    assert!(number(&fixed["step_time_s"]) > number(&free["step_time_s"]), "{text}");
    let (code, told) = scored(&scratch, "llama-3-8b --cluster a100 --gbs 32 --seq 2048", text);
    assert_eq!(code, Some(0));
    let ratio = told.map(|told| number(&told["step_time_s"]) / number(&fixed["step_time_s"]));
    assert!(ratio.is_some_and(|ratio| (ratio - 1.0).abs() < 1e-9), "{ratio:?}");
    let refused = scratch.run(&format!("plan {asked},placement=tp.pp --json"));
    assert_eq!(refused.status.code(), Some(2));
}

/// The rows of `fit` are the strategies that they are called, on all devices; where limits leave
/// none of them, what fits is the plan that is found.
#[test]
fn strategies_are_what_they_are_called() {
    let scratch = Scratch::new("strategies");
    let asked = "llama-3-8b --cluster h100 --devices 24 --gbs 48 --seq 2048";
    let fit = scratch.json(&format!("fit {asked} --json"));
    let mut seen = 0;
    for row in fit["rows"].as_array().expect("a list") {
        let name = row["strategy"].as_str().expect("a name");
        let plan: Configuration = row["plan"].as_str().expect("a text").parse().expect("a layout");
        assert_eq!(plan.ranks(), 24, "{name}");
        for word in name.split(" + ") {
            let is_so = match word {
                "ddp" => plan.zero.stage == 0,
                "zero1" => plan.zero.stage == 1,
                "zero2" => plan.zero.stage == 2,
                "zero3" => plan.zero.stage == 3,
                "tp8" => (plan.tp, plan.sequence_parallel) == (8, true),
                "pp3" => plan.pp == 3,
                "recompute" => plan.recompute == Recompute::Full,
                "optimizer on host" => plan.offload.optimizer == Place::Host,
                _ => false,
            };
            assert!(is_so, "{word} of {name}: {plan}");
            seen += 1;
        }
    }
    assert_eq!(seen, 17, "{fit:#}");
    let limits = "--fix tp=4,pp=2";
    let [fit, plan] = ["fit", "plan"].map(|verb| {
        scratch.json(&format!(
            "{verb} llama-3-8b --cluster h100 --devices 16 --gbs 48 {limits} --json"
        ))
    });
    assert_eq!((fit["rows"].as_array().map(Vec::len), &fit["fits"]), (Some(0), &true.into()));
    assert_eq!(fit["fastest"]["text"], plan["text"]);
}
