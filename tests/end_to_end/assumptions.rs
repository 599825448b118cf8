//! What users state of the executor, of adapters, of prices and of other hardware, as flags.

use serde_json::Value;

use crate::scratch::Scratch;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// A fact is taken by every verb, printed by each with all others, and marked.
#[test]
fn facts_are_stated_and_printed_everywhere() {
    let scratch = Scratch::new("assume");
    let at = "llama-3-8b --cluster h100 --gbs 64 --seq 4096";
    let facts = "--assume optimizer=adam-8bit,fragmentation=10%";
    for line in [
        format!("plan {at} --devices 8"),
        format!("fit {at} --devices 8"),
        format!("explain {at} --devices 8"),
        format!("cost {at} --devices 8 --tokens 1B"),
        format!("size {at} --tokens 1B --deadline 2d --nodes 2"),
        format!("compare {at} --devices 8 --with dp=8"),
        "sweep llama-3-8b --cluster h100 --devices 8 --gbs 64 --seq 4096".to_owned(),
        format!("score {at} --config dp=8"),
    ] {
        let output = scratch.run(&format!("{line} {facts} --json"));
        let document: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|why| panic!("{line}: {why}\n{output:?}"));
        let all = document["executor"]["assumptions"].as_array().expect("there are some");
        let stated: Vec<&str> = all
            .iter()
            .filter(|one| one["stated"] == true)
            .map(|one| one["name"].as_str().unwrap_or_default())
            .collect();
        assert_eq!(stated, ["optimizer", "fragmentation"], "{line}");
        assert!(all.len() > 15, "{line}");
        let output = scratch.run(&format!("{line} {facts}"));
        let page = String::from_utf8_lossy(&output.stdout);
        assert!(page.contains("stated   optimizer adam-8bit, fragmentation "), "{line}: {page}");
        assert!(page.contains(" gradients 4 B, "), "{line}: {page}");
    }
}

/// Without facts the answer is that of the profile; each moves what it is about.
#[test]
fn facts_change_answers() {
    let scratch = Scratch::new("assume-answers");
    let plan = "--config dp=8 --zero 3 --recompute full";
    let at = format!("score llama-3-8b --cluster h100 --gbs 64 --seq 8192 {plan} --json");
    let [base, narrow, capped, counted] =
        ["", "--assume moments=0,masters=none", "--assume power=500W", "--assume flops=6n"]
            .map(|facts| scratch.json(format!("{at} {facts}").trim_end()));
    let bytes = |answer: &Value| number(&answer["memory"]["optimizer_bytes"]);
    assert_eq!(bytes(&narrow), 0.0);
    assert!(number(&capped["step_time_s"]) > number(&base["step_time_s"]));
    assert_eq!(counted["step_time_s"], base["step_time_s"]);
    assert!(number(&counted["mfu"]) < number(&base["mfu"]));
}

/// Answers about inference list what their price depends on, whoever asks, and nothing of training.
#[test]
fn facts_of_inference_are_printed_everywhere() {
    let scratch = Scratch::new("assume-inference");
    let at = "llama-3-8b --cluster h100 --seq 4096 --for inference";
    let facts = "--assume cuda-graphs,reserve=3GiB --kv-dtype f8";
    for line in [
        format!("plan {at} --devices 8"),
        format!("fit {at} --devices 8"),
        format!("explain {at} --devices 8"),
        format!("compare {at} --devices 8 --with tp=8"),
        format!("cost {at} --devices 8 --tokens 1B"),
        format!("size {at} --token-time 9ms"),
        format!("score {at} --tp 8"),
    ] {
        let document = scratch.json(&format!("{line} {facts} --json"));
        let all = document["executor"]["assumptions"].as_array().expect("there are some");
        let of = |is_asked: &dyn Fn(&Value) -> bool| -> Vec<&str> {
            let asked = all.iter().filter(|one| is_asked(one));
            asked.map(|one| one["name"].as_str().unwrap_or_default()).collect()
        };
        assert_eq!(of(&|one| one["stated"] == true), ["kv-cache", "cuda-graphs", "reserve"]);
        for lacking in ["optimizer", "gradients", "overlap-gradients", "fragmentation", "flops"] {
            assert!(!of(&|_| true).contains(&lacking), "{line}: {lacking}");
        }
        // Keys and values of 8 heads of 128 elements, in one byte each.
        let cache = all.iter().find(|one| one["name"] == "kv-cache").expect("it is listed");
        assert_eq!(cache["value"], "f8 (2048 bytes a token and layer)");
        let page = scratch.answer(&format!("{line} {facts}"));
        assert!(page.contains("engine   gantline: this compiler"), "{line}: {page}");
        assert!(
            page.contains("assumes  weights 2 B, products fastest, attention flash-best,"),
            "{line}: {page}"
        );
        let stated = "stated   kv-cache f8 (2048 bytes a token and layer), cuda-graphs yes,";
        assert!(page.contains(stated), "{line}: {page}");
    }
}

/// Each fact of inference changes what it is about, by what it says.
#[test]
fn facts_change_answers_about_inference() {
    let scratch = Scratch::new("assume-inference-answers");
    let row = |more: &str| {
        let at = "llama-3-70b --cluster h100 --devices 8 --gbs 8 --seq 8192 --for inference";
        scratch.json(&format!("fit {at} --fix tp=8,pp=1{more} --json"))["rows"][0].clone()
    };
    let base = row("");
    let with = |facts: &str| row(&format!(" --assume {facts}"));
    let of = |row: &Value, key: &str| number(&row[key]);
    // Of a device, a billion bytes are reserved where nothing is stated.
    let more = of(&with("reserve=3GiB"), "need_bytes") - of(&base, "need_bytes");
    assert!((more - (3.0 * f64::from(1 << 30) - 1e9)).abs() < 1.0, "{more}");
    // Eighty layers launch four products each, each of which the host takes 50 µs for.
    let eager = with("cuda-graphs=no");
    assert!(of(&eager, "token_s_alone") > 80.0 * 4.0 * 50e-6, "{eager:#}");
    assert_eq!(with("cuda-graphs"), base);
    // What is collected over ranks is no longer waited for, and all else is.
    let alone = |facts: &str| of(&with(facts), "token_s_alone");
    let [half, whole] = ["overlap-tp=50%", "overlap-tp=1"].map(alone);
    let saved = [of(&base, "token_s_alone") - half, half - whole];
    assert!(saved[0] > 0.0 && (saved[0] / saved[1] - 1.0).abs() < 1e-6, "{saved:?}");
    // A new token waits for memory, and a prompt for products, whose clocks follow the power.
    let capped = with("power=350W");
    let times = |key: &str| of(&capped, key) / of(&base, key);
    assert!(times("prompt_s") > 1.2 && times("token_s_alone") < times("prompt_s"), "{capped:#}");
    assert!(of(&with("straggler=10%"), "prompt_s") > of(&with("straggler=0"), "prompt_s"));
    assert!(of(&with("attention=materialised"), "prompt_s") > 1.05 * of(&base, "prompt_s"));
    let experts = |more: &str| {
        let at = "mixtral-8x7b --cluster h100 --devices 8 --gbs 64 --seq 4096 --for decode";
        let found = scratch.json(&format!("fit {at} --fix tp=1,ep=8{more} --json"));
        number(&found["rows"][0]["token_s"])
    };
    assert!(experts(" --assume imbalance=3") > experts(""));
}

/// What does not go together is refused, with the way out.
#[test]
fn wrong_facts_are_refused() {
    let scratch = Scratch::new("assume-refused");
    let at = "llama-3-8b --cluster h100 --devices 8";
    for (line, said) in [
        (format!("plan {at} --assume optimiser=adamw"), "did you mean `optimizer`?"),
        (format!("plan {at} --assume attention=flash-3"), "flash-best"),
        (format!("plan {at} --assume optimizer=sgd,moments=4"), "contradict each other"),
        (format!("plan {at} --assume power=900W"), "700 W at most"),
        (format!("plan {at} --imbalance 2 --assume imbalance=1.5"), "stated twice"),
        (format!("plan {at} --assume imbalance=1.5"), "has no experts"),
        (format!("plan {at} --for inference --assume optimizer=sgd"), "`optimizer` is of training"),
        (
            format!("cost {at} --tokens 1B --for inference --assume flops=6n"),
            "`flops` is of training",
        ),
        (format!("fit {at} --for decode --assume weights=f32"), "write `--weight-dtype FORMAT`"),
        ("plan gpt2-mini --ranks 2 --assume cuda-graphs".to_owned(), "the cluster has CPUs"),
        (
            format!("plan {at} --for-tool megatron --assume optimizer=muon -o dir"),
            "`optimizer` is stated",
        ),
        (format!("plan {at} --for-tool megatron --lora rank=8 -o dir"), "adapters are asked for"),
        (format!("plan {at} --lora rank=8,targets=queries"), "q_proj"),
        ("plan gpt2-mini --ranks 2 --lora rank=2,weights=nf4".to_owned(), "E1204"),
        (format!("explain {at} --what-if nic=2"), "did you mean `nics`?"),
        (format!("explain {at} --what-if device=b2000"), "did you mean `b200`?"),
        ("explain gpt2-mini --ranks 2 --what-if nics=2".to_owned(), "the cluster has CPUs"),
        (format!("cost {at} --tokens 1B --price 2.5dollars"), "three letters"),
    ] {
        let output = scratch.run(&line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() != Some(0) && errors.contains(said), "{line}: {errors}");
    }
}

/// Shells complete facts from the same table as the help, and so do the docs list them.
#[test]
fn facts_are_completed_helped_and_documented() {
    let scratch = Scratch::new("assume-help");
    let shell = String::from_utf8_lossy(&scratch.run("completions fish").stdout).into_owned();
    let help = String::from_utf8_lossy(&scratch.run("plan --help").stdout).into_owned();
    let docs = std::fs::read_to_string("docs/tools.md").expect("the page is there");
    for fact in &planner::estimate::profile::FACTS {
        assert!(help.contains(fact.about), "help: {}", fact.name);
        assert!(docs.contains(&format!("`{}`", fact.name)), "docs: {}", fact.name);
        for word in fact.words {
            assert!(shell.contains(&format!("{}={}", fact.name, word.name)), "{}", fact.name);
            assert!(docs.contains(&format!("`{}`", word.name)), "docs: {}", word.name);
        }
    }
}

/// Adapters are priced for our executor and for tools, and fit where the whole model does not.
#[test]
fn adapters_are_priced_on_gpus() {
    let scratch = Scratch::new("assume-lora");
    let at = "llama-3-70b --cluster h100 --devices 8 --gbs 8 --seq 2048 --json";
    let [lora, quantised] = ["", ",weights=nf4-dq"]
        .map(|base| scratch.json(&format!("plan {at} --lora rank=16,targets=all-linear{base}")));
    assert!(number(&quantised["peak_mem_bytes"]) > 0.0 && number(&lora["step_time_s"]) > 0.0);
    let tool = scratch.json(&format!("plan {at} --lora rank=16 --for-tool torchtitan"));
    assert_eq!(tool["executor"]["for_tool"]["name"], "torchtitan@0.2");
    let one = "score llama-3-70b --cluster h100 --gbs 1 --seq 512 --json";
    let fits = |lora: &str| {
        let output = scratch.run(format!("{one} --config recompute=full {lora}").trim_end());
        let document: Value = serde_json::from_slice(&output.stdout).expect("a document");
        document["fits"] == true
    };
    assert!(!fits("") && !fits("--lora rank=16"));
    assert!(fits("--lora rank=16,weights=nf4-dq"));
}

/// A sweep with adapters has the plans that `plan` finds with them, which fit where those of the
/// whole model do not.
#[test]
fn adapters_are_swept() {
    let scratch = Scratch::new("sweep-lora");
    let lora = "--lora rank=16,targets=all-linear,weights=nf4-dq";
    let sizes = "llama-3-70b --cluster h100 --forbid offload";
    let sweep = format!("sweep {sizes} --devices 1,8 --gbs 8 --seq 2048");
    let whole = scratch.run(&format!("{sweep} --json"));
    let whole: Value = serde_json::from_slice(&whole.stdout).expect("a document");
    assert_eq!(whole["rows"][0]["fits"], false, "{whole:#}");
    let swept = scratch.json(&format!("{sweep} {lora} --json"));
    let rows = swept["rows"].as_array().expect("there are rows");
    for row in rows {
        let at = format!("{sizes} --devices {} --gbs 8 --seq 2048 {lora}", row["devices"]);
        let plan = scratch.json(&format!("plan {at} --json"));
        assert_eq!((&row["plan"], &row["step_time_s"]), (&plan["text"], &plan["step_time_s"]));
    }
    let page = scratch.answer(&format!("{sweep} {lora}"));
    assert!(page.contains("adapters 207,093,760 parameters are trained"), "{page}");
    let refused = scratch.run(&format!("{sweep} --lora rank=8,targets=queries"));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("q_proj"));
}

/// Where products of our own kernels are slower than the device's fastest, a note names the device;
/// none where another executor is priced, or the user states what products are.
#[test]
fn slow_products_are_noted() {
    let scratch = Scratch::new("assume-products");
    scratch.write(
        "mixed.toml",
        "name = \"mixed\"\n[[group]]\nextends = \"preset:h100\"\n\
         [[group]]\nextends = \"preset:b200\"\n",
    );
    scratch.write(
        "older.toml",
        "name = \"older\"\nextends = \"preset:h100\"\n[device]\nisa = \"sm_80\"\n",
    );
    let noted = |line: &str| {
        let found = scratch.run(&format!("plan llama-3-8b --gbs 16 --seq 4096 {line}"));
        let [page, notes] =
            [found.stdout, found.stderr].map(|of| String::from_utf8_lossy(&of).into_owned());
        assert!(found.status.success(), "{line}: {notes}");
        (page, notes.matches("mma.sync here").count())
    };
    let (page, notes) = noted("--cluster b200 --devices 8");
    assert!(page.contains("executor gantline: products by mma.sync, FlashAttention-2"), "{page}");
    assert_eq!(notes, 1);
    assert_eq!(noted("--cluster older.toml --devices 8").1, 1);
    assert_eq!(noted("--cluster mixed.toml").1, 1);
    let served = "--cluster b200 --devices 8 --for inference";
    assert_eq!(noted(served).1, 1);
    for line in [
        "--cluster h100 --devices 8",
        "--cluster b200 --devices 8 --for-tool megatron",
        "--cluster b200 --devices 8 --assume products=fastest",
        &format!("{served} --engine tensorrt-llm"),
    ] {
        assert_eq!(noted(line).1, 0, "{line}");
    }
}

/// Other hardware is laid beside that which there is; prices are printed in their currency.
#[test]
fn other_hardware_and_prices_are_answered() {
    let scratch = Scratch::new("assume-hardware");
    let at = "llama-3-8b --cluster h100 --devices 16 --gbs 64 --seq 4096";
    let found = scratch.json(&format!("explain {at} --what-if nics=2,device=b200 --json"));
    let rows = found["rows"].as_array().expect("there are rows");
    let names: Vec<&str> = rows.iter().filter_map(|row| row["hardware"].as_str()).collect();
    assert_eq!(names, ["as it is", "nics=2", "device=b200", "all of these"]);
    let seconds: Vec<f64> = rows.iter().map(|row| number(&row["best"]["step_time_s"])).collect();
    // No kernels of this compiler are written for what makes a B200 fast, and the answer says so.
    assert!(seconds[1] < seconds[0] && seconds[2] > seconds[0], "{seconds:?}");
    let is_noted = |row: &Value| row["note"].as_str().is_some_and(|note| note.contains("mma.sync"));
    assert_eq!(rows.iter().map(is_noted).collect::<Vec<_>>(), [false, false, true, true]);
    let fastest = "--assume products=fastest,attention=flash-best";
    let stated = scratch.json(&format!("explain {at} {fastest} --what-if device=b200 --json"));
    let [before, after] = [0, 1].map(|row| number(&stated["rows"][row]["best"]["step_time_s"]));
    assert!(before == seconds[0] && after < 0.7 * before, "{before}, {after}");
    let plan = scratch.json(&format!("plan {at} --json"));
    assert_eq!(rows[0]["best"]["step_time_s"], plan["step_time_s"]);
    let page = scratch.run(&format!("fit {at} --what-if memory=141GB"));
    let page = String::from_utf8_lossy(&page.stdout).into_owned();
    assert!(page.contains("as it is") && page.contains("memory=131"), "{page}");
    let bill = scratch.run(&format!("cost {at} --tokens 1B --price 2.5EUR"));
    let bill = String::from_utf8_lossy(&bill.stdout).into_owned();
    assert!(bill.contains("money, EUR") && bill.contains("2.5 EUR"), "{bill}");
    let bill = scratch.json(&format!("cost {at} --tokens 1B --price 2.5 --json"));
    assert_eq!(bill["currency"], "USD");
}
