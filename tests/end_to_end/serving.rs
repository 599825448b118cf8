//! The verbs about inference on GPUs, from outside.

use serde_json::Value;

use crate::cli::Scratch;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("a number: {value}"))
}

fn rows(document: &Value) -> &[Value] {
    document["rows"].as_array().expect("rows")
}

fn is_near(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-9
}

const RATES: [&str; 5] = [
    "prompt_s",
    "prompt_tokens_per_s_per_device",
    "token_s_alone",
    "token_s",
    "tokens_per_s_per_device",
];

/// What fits comes first, the most tokens per second first; the first is the one to take, and what
/// does not fit has no rates.
#[test]
fn ways_to_lie_are_sorted_and_one_is_recommended() {
    let scratch = Scratch::new("serving-sorted");
    for (asked, key) in [
        ("fit llama-3-70b --devices 16 --for inference", "tokens_per_s_per_device"),
        ("fit llama-3-70b --devices 16 --for inference --gbs 40", "tokens_per_s_per_device"),
        ("fit deepseek-v3 --devices 32 --for decode", "tokens_per_s_per_device"),
        ("plan mixtral-8x7b --devices 8 --for prefill", "prompt_tokens_per_s_per_device"),
    ] {
        let line = format!("{asked} --cluster h100 --seq 4096");
        let document = scratch.json(&format!("{line} --json"));
        let fitting: Vec<&Value> =
            rows(&document).iter().filter(|row| row["fits"] == true).collect();
        let (first, last) = rows(&document).split_at(fitting.len());
        assert!(!last.is_empty() && first.len() > 3, "{line}");
        assert!(first.iter().all(|row| row["fits"] == true), "{line}: {document:#}");
        let figures: Vec<f64> = first.iter().map(|row| number(&row[key])).collect();
        assert!(figures.is_sorted_by(|a, b| a >= b), "{line}: {figures:?}");
        for row in last {
            assert!(RATES.iter().all(|rate| row[rate].is_null()), "{line}: {row:#}");
        }
        assert_eq!(document["recommended"]["layout"], first[0]["layout"], "{line}");
        let page = scratch.answer(&line);
        let best = first[0]["layout"].as_str().expect("a layout");
        assert!(page.contains(&format!("✓ take {best}, ")), "{line}: {page}");
        let refused: Vec<&str> = page.lines().filter(|line| line.starts_with("  ✗")).collect();
        assert!(refused.iter().all(|line| !line.contains(" ms") && line.ends_with('-')), "{page}");
    }
    // Where nothing fits it is said what is missing.
    let line = "fit deepseek-v3 --cluster h100 --devices 8 --seq 4096 --for inference";
    let output = scratch.run(&format!("{line} --json"));
    assert_eq!(output.status.code(), Some(3));
    let document: Value = serde_json::from_slice(&output.stdout).expect("a document");
    let least = rows(&document).iter().map(|row| number(&row["need_bytes"]));
    let missing = least.fold(f64::INFINITY, f64::min) - number(&document["have_bytes"]);
    assert!(is_near(number(&document["missing_bytes"]), missing), "{document:#}");
}

/// The longest context is that of the sequences that the row says, over all copies.
#[test]
fn the_longest_context_is_of_the_batch_that_is_stated() {
    let scratch = Scratch::new("serving-longest");
    let asked = "fit llama-3-70b --cluster h100 --devices 16 --seq 8192 --for inference";
    for (layout, copies) in [("tp=8,pp=1", 2.0), ("tp=1,pp=8", 2.0), ("tp=4,pp=4", 1.0)] {
        let row = |more: &str| {
            let document = scratch.json(&format!("{asked} --fix {layout}{more} --json"));
            assert_eq!(rows(&document).len(), 1, "{document:#}");
            rows(&document)[0].clone()
        };
        let one = row("");
        assert_eq!(number(&one["longest_context_sequences"]), copies, "{layout}");
        let longest = number(&one["longest_context"]);
        for sequences in [2.0, 32.0, 64.0] {
            let many = row(&format!(" --gbs {sequences}"));
            assert_eq!(number(&many["longest_context_sequences"]), sequences, "{layout}");
            assert_eq!(number(&many["sequences"]), sequences, "{layout}");
            // As many tokens in all, but for working memory.
            let each = number(&many["longest_context"]);
            let share = each * sequences / copies / longest;
            assert!((0.97..=1.0001).contains(&share), "{layout} {sequences}: {share}");
            // A context of so many tokens fits, and one of a few more does not: longer prompts than
            // these are worked on in pieces that are no larger.
            assert!(each > 8192.0 * 2.0, "{layout} {sequences}: {each}");
            let line = asked.replace("8192", &(0.99 * each).floor().to_string());
            let line = format!("{line} --fix {layout} --gbs {sequences}");
            assert_eq!(scratch.run(&line).status.code(), Some(0), "{line}");
            let line =
                line.replace(&(0.99 * each).floor().to_string(), &(1.01 * each).ceil().to_string());
            assert_eq!(scratch.run(&line).status.code(), Some(3), "{line}");
        }
    }
    let page = scratch.answer(&format!("{asked} --gbs 32"));
    assert!(page.contains("8,192 tokens, 32 sequences at once"), "{page}");
}

/// Experts may lie over the ranks of several copies, and are then exchanged with.
#[test]
fn copies_may_share_experts() {
    let scratch = Scratch::new("serving-experts");
    let asked = "mixtral-8x7b --cluster h100 --seq 4096 --for decode --json";
    let plan = |more: &str| scratch.json(&format!("plan {asked} --devices 8{more}"));
    let all = plan("");
    let of = |tp: u32, ep: u32| {
        let is = |row: &&Value| row["tp"] == tp && row["pp"] == 1 && row["ep"] == ep;
        rows(&all).iter().find(is).unwrap_or_else(|| panic!("tp={tp} ep={ep}: {all:#}"))
    };
    let bytes = |row: &Value| number(&row["weights_bytes"]);
    // 32 layers of 8 experts of three products of 4,096 · 14,336, of which a rank has an eighth.
    let experts = 2.0 * 32.0 * 8.0 * 3.0 * 4096.0 * 14336.0;
    let saved = bytes(of(1, 1)) - bytes(of(1, 8));
    assert!(is_near(saved, experts * 7.0 / 8.0), "{saved} of {experts}");
    let fixed = plan(" --fix tp=2,ep=4");
    assert!(rows(&fixed).iter().all(|row| row["tp"] == 2 && row["ep"] == 4), "{fixed:#}");
    let scored = scratch.json(&format!("score {asked} --tp 2 --dp 4 --ep 4"));
    assert_eq!(rows(&scored)[0], *of(2, 4));
    for (wrong, way_out) in
        [("--tp 2 --dp 4 --ep 3", "multiple of tp"), ("--tp 2 --dp 3 --ep 4", "write a dp")]
    {
        let output = scratch.run(&format!("score {asked} {wrong}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(way_out), "{errors}");
    }
}

/// All verbs speak of the same copies: parts sum to what `plan` says a token takes, and layouts
/// that are written beside it cost what they do there.
#[test]
fn verbs_about_inference_agree() {
    let scratch = Scratch::new("serving-agree");
    let asked = "llama-3-70b --cluster h100 --devices 16 --seq 4096 --for inference";
    let plan = scratch.json(&format!("plan {asked} --json"));
    let best = &plan["recommended"];
    let explained = scratch.json(&format!("explain {asked} --json"));
    let token = &explained["token"];
    assert_eq!(explained["row"]["layout"], best["layout"]);
    let parts = token["breakdown"].as_object().expect("parts").values().map(number);
    assert!((parts.sum::<f64>() / number(&token["time_s"]) - 1.0).abs() < 1e-9);
    assert!(number(&token["time_s"]) <= number(&best["token_s"]) * 1.00001, "{token:#}");
    let prompt = &explained["prompt"];
    assert!((number(&prompt["time_s"]) / number(&best["prompt_s"]) - 1.0).abs() < 1e-4);
    let bytes = explained["memory"].as_object().expect("bytes").values().map(number);
    assert!(is_near(bytes.sum(), number(&best["need_bytes"])), "{explained:#}");
    // A quarter more memory: as many sequences more as a GiB holds, for each GiB.
    let larger = &explained["other_memory"][1];
    let copies = number(&best["copies"]);
    let gib = 0.25 * number(&explained["have_bytes"]) / f64::from(1 << 30);
    let more = number(&larger["row"]["sequences"]) - number(&best["sequences"]);
    let expected = copies * gib * number(&explained["sequences_per_gib"]);
    assert!((more / expected - 1.0).abs() < 0.05, "{more} and {expected}");
    // No neighbour is better, and each is what the plan says of it.
    let neighbours = explained["neighbours"].as_array().expect("a list");
    assert!(!neighbours.is_empty(), "{explained:#}");
    for other in neighbours {
        let same = rows(&plan).iter().find(|row| row["layout"] == other["layout"]).expect("a row");
        assert_eq!(same["token_s"], other["token_s"]);
        assert!(other["more_tokens_per_s_per_device"].as_f64().is_none_or(|more| more <= 0.0));
    }
    let mut command = scratch.command(&[], &format!("compare {asked} --json --beside a100"));
    let output = command.args(["--with", "tp=4 pp=2"]).output().expect("the program starts");
    let compared: Value = serde_json::from_slice(&output.stdout).expect("a document");
    let same = rows(&plan).iter().find(|row| row["tp"] == 4 && row["pp"] == 2).expect("a row");
    let [written, own, other] = &compared["plans"].as_array().expect("a list")[..] else {
        panic!("three plans: {compared:#}")
    };
    for key in ["token_s", "prompt_s", "sequences", "need_bytes", "copies"] {
        assert_eq!((&written[key], &own[key]), (&same[key], &best[key]), "{key}");
    }
    let alone = scratch.json(&format!("plan {} --json", asked.replace("h100", "a100")));
    assert_eq!(other["token_s"], alone["recommended"]["token_s"]);
    // With another tp or pp, experts lie as is best there.
    let routed = "mixtral-8x7b --cluster h100 --devices 8 --seq 4096 --for inference --json";
    let [plan, explained] =
        ["plan", "explain"].map(|verb| scratch.json(&format!("{verb} {routed}")));
    let best = &explained["row"];
    let neighbours = explained["neighbours"].as_array().expect("a list");
    for (decision, other) in [("tp", "pp"), ("pp", "tp")] {
        let along = |row: &&Value| row[other] == best[other] && row[decision] != best[decision];
        let near = neighbours.iter().find(along).expect("a neighbour");
        let same = |row: &&Value| row["tp"] == near["tp"] && row["pp"] == near["pp"];
        let first = rows(&plan).iter().find(same).expect("a row");
        assert_eq!(first["layout"], near["layout"], "{decision}");
    }
    let page = scratch.answer(&format!("explain {asked}"));
    for word in ["weights read", "KV read", "arithmetic", "launches", "tensor", "A GiB more"] {
        assert!(page.contains(word), "{word}: {page}");
    }
}

/// Tokens take what the rates of `plan` say, and cost what the devices do meanwhile.
#[test]
fn tokens_of_inference_are_billed() {
    let scratch = Scratch::new("serving-bill");
    let asked = "llama-3-70b --cluster h100 --devices 16 --seq 4096 --for inference";
    let best = scratch.json(&format!("plan {asked} --json"))["recommended"].clone();
    let all = |key: &str| 16.0 * number(&best[key]);
    let [decode, prefill] = ["tokens_per_s_per_device", "prompt_tokens_per_s_per_device"].map(all);
    let bill = format!("cost {asked} --price 2.5 --watts 700 --json");
    let cost = scratch.json(&format!("{bill} --tokens 1B --prompt-tokens 3B"));
    let seconds = 1e9 / decode + 3e9 / prefill;
    assert!(is_near(number(&cost["expected"]["time_s"]), seconds), "{cost:#}");
    let money = 16.0 * seconds / 3600.0 * 2.5;
    assert!(is_near(number(&cost["expected"]["money"]), money), "{cost:#}");
    let per_million = number(&cost["expected"]["money_per_million_tokens"]);
    assert!(is_near(per_million, money / 1000.0), "{cost:#}");
    assert!(is_near(number(&cost["expected"]["energy_kwh"]), 0.7 * 16.0 * seconds / 3600.0));
    let [low, high] = ["low", "high"].map(|run| number(&cost[run]["time_s"]));
    assert!(low < 0.95 * seconds && high > 1.05 * seconds && high < 2.0 * seconds, "{cost:#}");
    // A rate: devices are paid while they wait.
    let rate = (0.5 * decode).round();
    let hour = scratch.json(&format!("{bill} --rate {rate}"));
    assert!(is_near(number(&hour["expected"]["utilisation"]), rate / decode), "{hour:#}");
    assert!(is_near(number(&hour["expected"]["money"]), 16.0 * 2.5), "{hour:#}");
    let both = scratch.json(&format!("{bill} --rate {rate} --tokens 1B --prompt-tokens 2B"));
    let busy = rate / decode + 2.0 * rate / prefill;
    assert!(is_near(number(&both["expected"]["utilisation"]), busy), "{both:#}");
    let code = |more: String| scratch.run(format!("{bill} {more}").trim_end()).status.code();
    assert_eq!(code(format!("--rate {}", 2.0 * decode)), Some(3));
    assert_eq!(code("--tokens 1T --deadline 1h".to_owned()), Some(3));
    assert_eq!(code("--prompt-tokens 1B --rate 10".to_owned()), Some(2));
    assert_eq!(code(String::new()), Some(2));
    // What is asked of inference is not asked of training.
    let training = bill.replace("--for inference", "--gbs 64");
    for wrong in ["--rate 10", "--tokens 1B --prompt-tokens 1B", "--token-time 5ms", ""] {
        let output = scratch.run(format!("{training} {wrong}").trim_end());
        assert_eq!(output.status.code(), Some(2), "{wrong}");
    }
}

/// The fewest devices that are enough: of fewer, no number is, however they are laid out.
#[test]
fn no_fewer_devices_are_enough() {
    let scratch = Scratch::new("serving-size");
    let model = "llama-3-8b --cluster h100 --seq 4096";
    for (token_time, rate) in [("9ms", 5_000.0), ("30ms", 21_000.0), ("4ms", 700.0)] {
        let line = format!("size {model} --for inference --token-time {token_time} --rate {rate}");
        let size = scratch.json(&format!("{line} --json"));
        let enough = number(&size["devices"]) as u32;
        assert!((2..40).contains(&enough), "{line}: {size:#}");
        let given = |devices: u32| {
            let line = format!("plan {model} --devices {devices} --for decode --json");
            let output = scratch.run(&format!("{line} --token-time {token_time}"));
            let plan: Value = serde_json::from_slice(&output.stdout).expect("a document");
            let best = plan["recommended"]["tokens_per_s_per_device"].as_f64();
            best.unwrap_or(0.0) * f64::from(devices)
        };
        assert!(given(enough) >= rate, "{line}: {size:#}");
        for fewer in 1..enough {
            assert!(given(fewer) < rate, "{line}: {fewer} devices give {}", given(fewer));
        }
    }
    let line = format!("size {model} --for inference");
    for (more, code) in [
        ("--token-time 100us", 3),
        ("--token-time 9", 2),
        ("--token-time 1ms", 3),
        ("", 2),
        ("--rate 10 --devices 8", 2),
        ("--gbs 1000", 0),
        ("--tokens 1B --deadline 1d", 0),
    ] {
        let output = scratch.run(format!("{line} {more}").trim_end());
        assert_eq!(output.status.code(), Some(code), "{more}");
    }
}

/// Devices of two kinds: the cheaper ones where the user says what both cost, else the fewest.
#[test]
fn the_cheapest_kind_of_devices_is_found() {
    let scratch = Scratch::new("serving-kinds");
    let group = |preset: &str, price: &str| {
        format!(
            "[[group]]\nextends = \"preset:{preset}\"\n[group.deployment]\nnodes = 4\n\
             [group.deployment.price]\nper_device_hour = \"{price} EUR\"\nas_of = 2026-05-01\n"
        )
    };
    let size = |h100: &str, a100: &str| {
        let text = format!("name = \"two\"\n{}{}", group("h100", h100), group("a100", a100));
        scratch.write("two.toml", &text);
        let asked = "llama-3-70b --cluster two.toml --seq 4096 --rate 4000";
        scratch.json(&format!("size {asked} --for inference --json"))
    };
    let [dear, cheap] = [size("3", "3"), size("30", "3")];
    for verb in ["plan", "explain", "cost --tokens 1B", "compare --with tp=8"] {
        let line = format!("{verb} llama-3-70b --cluster two.toml --for inference");
        let refused = scratch.run(&line);
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{line}: {errors}");
        assert!(errors.contains("or `size`, which looks at each"), "{line}: {errors}");
    }
    assert_eq!((&dear["cluster"], &cheap["cluster"]), (&"h100".into(), &"a100".into()));
    assert!(number(&cheap["devices"]) > number(&dear["devices"]), "{cheap:#}");
    let hourly = number(&rows(&cheap)[0]["money_per_hour"]);
    assert_eq!(hourly, 3.0 * number(&cheap["devices"]));
    assert!(rows(&cheap).iter().all(|row| number(&row["money_per_hour"]) >= hourly));
}

/// Requests with lengths: what `plan`, `explain`, `cost` and `size` say of them is one thing, and
/// follows from passes.
#[test]
fn requests_are_answered_as_their_passes_are() {
    let scratch = Scratch::new("serving-requests");
    let asked = "llama-3-8b --cluster h100 --devices 4 --for inference --json";
    let requests = "--input-len 2000 --output-len 500";
    let best = |more: &str| {
        let plan = scratch.json(format!("plan {asked} {more}").trim_end());
        assert_eq!(plan["fits"], true, "{more}: {plan:#}");
        plan["recommended"].clone()
    };
    let row = best(requests);
    let flight = &row["in_flight"];
    assert_eq!(flight["token_s"], row["token_s"]);
    let rate = number(&row["sequences"]) / number(&row["token_s"]) / 4.0;
    assert!(is_near(number(&row["tokens_per_s_per_device"]), rate), "{row:#}");
    let together = &row["static_batch"];
    let later = 499.0 * number(&together["token_s"]);
    let total = number(&together["prompt_s"]) + later;
    assert!(is_near(number(&together["total_s"]), total), "{row:#}");
    // Each pass works on the prompts of those that are done.
    let prompts = number(&flight["prompt_tokens"]) * 500.0 / 2000.0;
    assert!((prompts - number(&flight["sequences"])).abs() <= 1.0, "{row:#}");
    // A bill of new tokens holds the prompts that come with them.
    let bill = scratch.json(&format!("cost {asked} {requests} --tokens 1B --price 2"));
    let seconds = 1e9 / (4.0 * number(&row["tokens_per_s_per_device"]));
    assert!(is_near(number(&bill["expected"]["time_s"]), seconds), "{bill:#}");
    assert_eq!(number(&bill["prompt_tokens"]), 4e9);
    let explained = scratch.json(&format!("explain {asked} {requests}"));
    let parts = explained["token"]["breakdown"].as_object().expect("parts").values().map(number);
    assert!((parts.sum::<f64>() / number(&row["token_s"]) - 1.0).abs() < 1e-4, "{explained:#}");
    let bytes = explained["memory"].as_object().expect("bytes").values().map(number);
    assert!(is_near(bytes.sum(), number(&row["need_bytes"])), "{explained:#}");
    let size = asked.replace(" --devices 4", "");
    let rate = 3.9 * number(&row["tokens_per_s_per_device"]);
    let enough = scratch.json(&format!("size {size} {requests} --rate {rate}"));
    assert_eq!(enough["devices"], 4, "{enough:#}");
    // Less to hold, less to read, and less to work on give more tokens per second.
    let rate = |more: &str| number(&best(&format!("{requests}{more}"))["tokens_per_s_per_device"]);
    let plain = rate("");
    for more in ["--kv-dtype f8", "--kv-dtype int4 --weight-dtype int4", "--shared-prefix 1500"] {
        assert!(rate(&format!(" {more}")) > 1.02 * plain, "{more}");
    }
    let limit = " --token-time 15ms";
    let drafts = "--draft-tokens 4 --acceptance";
    assert!(rate(&format!("{limit} {drafts} 0.9")) > 1.3 * rate(limit));
    assert!(rate(&format!("{limit} {drafts} 0")) < rate(limit));
    // A limit on passes is kept beside prompts, too.
    assert!(number(&best(&format!("{requests}{limit}"))["token_s"]) <= 0.015);
    let soon = best(&format!("{requests} --first-token-time 40ms"));
    assert!(number(&soon["prompt_s"]) <= 0.04 && number(&row["prompt_s"]) > 0.04, "{soon:#}");
}

/// What does not go together is refused with a way out.
#[test]
fn contradicting_requests_are_refused() {
    let scratch = Scratch::new("serving-refused");
    let wrong = |model: &str, more: &str, said: &str| {
        let output = scratch.run(&format!("plan {model} --cluster h100 --devices 4 {more}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{more}: {errors}");
        assert!(errors.contains(said), "{more}: {errors}");
    };
    for (more, said) in [
        ("--input-len 2048", "--output-len"),
        ("--input-len 2k --output-len 2k --seq 4k", "--seq"),
        ("--input-len 1k --output-len 10 --shared-prefix 1k", "write fewer"),
        ("--draft-tokens 3", "--acceptance"),
        ("--draft-tokens 3 --acceptance 1.5", "from 0 to 1"),
        ("--draft-tokens 3 --acceptance 0.5 --draft llama-2-7b", "same tokenizer"),
        ("--kv-dtype fp9", "int4"),
        ("--engine triton", "tensorrt-llm"),
    ] {
        wrong("llama-3-8b", &format!("--for inference {more}"), said);
    }
    wrong("llama-3-8b", "--kv-dtype f8 --token-time 10ms", "`--for inference`");
    let encodes = "--for inference --input-len 100 --output-len 9 --shared-prefix 10";
    wrong("t5-11b", encodes, "as a whole");
}

/// The largest number of sequences or tokens fits, and the next does not; so do slots of a replica.
#[test]
fn the_largest_fits_and_the_next_does_not() {
    let scratch = Scratch::new("serving-largest");
    let at = "llama-3-70b --cluster h100 --devices 16 --for inference";
    for (what, beside) in [
        ("gbs", " --seq 4096"),
        ("gbs", " --seq 4096 --token-time 20ms"),
        ("gbs", " --input-len 2000 --output-len 100 --kv-dtype f8"),
        ("seq", " --gbs 24"),
        ("seq", ""),
        ("seq", " --first-token-time 2s"),
    ] {
        let line = format!("fit {at}{beside}");
        let found = scratch.json(&format!("{line} --largest {what} --json"));
        for (key, code) in [("largest", 0), ("next", 3)] {
            let line = format!("{line} --{what} {}", found[key]);
            assert_eq!(scratch.run(&line).status.code(), Some(code), "{line}: {found:#}");
        }
        assert!(number(&found["row"]["need_bytes"]) <= number(&found["have_bytes"]), "{found:#}");
        let page = scratch.answer(&format!("{line} --largest {what}"));
        assert!(page.contains(" is the largest: tp="), "{page}");
    }
    // Slots of a replica: those of two replicas of the same layout are twice as many.
    let slots = |devices: usize, what: &str| {
        let line = format!("fit llama-3-70b --cluster h100 --devices {devices} --seq 4096");
        let line = format!("{line} --for inference --fix tp=8,pp=1 --largest {what} --json");
        number(&scratch.json(&line)["largest"])
    };
    assert_eq!(slots(16, "gbs"), 2.0 * slots(16, "mbs"));
    assert_eq!(slots(16, "mbs"), slots(8, "mbs"));
    // A table of positions has an end, whatever memory holds.
    let line = "fit gpt2 --cluster h100 --devices 1 --for inference --largest seq";
    assert_eq!(scratch.json(&format!("{line} --json"))["largest"], 1024);
    let line = "fit llama-3-70b --cluster h100 --devices 1 --for inference --largest";
    for (line, code, said) in [
        (format!("{line} seq"), 3, "nothing fits at any seq"),
        (format!("{line} mbs --seq 64"), 3, "nothing fits at any mbs"),
        (format!("{line} seq --seq 64"), 2, "`--seq` is given"),
        (format!("{line} gbs --gbs 64"), 2, "`--gbs` is given"),
        (format!("{line} mbs").replace("inference", "prefill"), 2, "`--for inference`"),
        (format!("{line} gbs").replace("--for inference ", ""), 2, "`--largest mbs`"),
        ("fit gpt2-mini --ranks 2 --for inference --largest mbs".to_owned(), 2, "CPUs"),
    ] {
        let output = scratch.run(&line);
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(output.status.code() == Some(code) && text.contains(said), "{line}: {text}");
    }
}

/// Short requests, many of which a pass has room for.
const IN_FLIGHT: &str = "mixtral-8x7b --devices 8 --input-len 4 --output-len 4 \
                         --pass-tokens 1000000 --fix tp=1,pp=1,ep=8";

/// Without a limit copies take as many sequences as fit, but no more than help: where fewer are
/// taken than fit, twice as many give hardly more, and half of them would give less.
#[test]
fn sequences_are_as_many_as_help() {
    let scratch = Scratch::new("serving-enough");
    for (asked, is_bounded) in [
        ("mixtral-8x7b --devices 8 --seq 4 --fix tp=1,pp=1,ep=8", true),
        ("mixtral-8x7b --devices 64 --seq 16 --fix tp=8,pp=1,ep=8", true),
        ("gpt2 --devices 1 --seq 64", true),
        ("gpt2 --devices 1 --input-len 20 --output-len 400", false),
        (IN_FLIGHT, true),
        ("llama-3-70b --devices 8 --seq 8192 --fix tp=8,pp=1", false),
        ("mixtral-8x7b --devices 8 --seq 32768 --fix tp=1,pp=1,ep=8", false),
    ] {
        let line = format!("plan {asked} --cluster h100 --for inference");
        let row = |more: &str| scratch.json(&format!("{line}{more} --json"))["rows"][0].clone();
        let taken = row("");
        let rate = |row: &Value| number(&row["tokens_per_s_per_device"]);
        let [all, fitting] = ["sequences", "sequences_that_fit"].map(|key| number(&taken[key]));
        assert_eq!(all < fitting, is_bounded, "{line}: {taken:#}");
        let of_copy = all / number(&taken["copies"]);
        let half = (of_copy / 2.0).floor() * number(&taken["copies"]);
        let half = row(&format!(" --gbs {half}"));
        assert!(rate(&taken) > 1.019 * rate(&half), "{line}: {half:#}");
        let page = scratch.answer(&line);
        assert_eq!(page.contains(" sequences fit; twice as many as "), is_bounded, "{page}");
        if is_bounded {
            let twice = row(&format!(" --gbs {}", 2.0 * all));
            assert!(rate(&twice) < 1.021 * rate(&taken), "{line}: {twice:#}");
            assert!(number(&taken["token_s"]) < 120.0 * number(&taken["token_s_alone"]), "{line}");
        }
    }
}
