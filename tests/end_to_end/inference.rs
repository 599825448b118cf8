//! Logits and generated text against PyTorch's, with a cache and without.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use codegen::compile::Compiled;
use codegen::inference::compile_inference;
use codegen::prepare::prepare_inference;
use gantline::generation::{Generator, Options};
use ir::ids::Ids;
use ir::import::{Description, Model, import, read_config};
use ir::{DType, Mesh};
use planner::inference::plan_forward;
use runtime::beams::{BeamSearch, Hypothesis};
use runtime::execute::{Batch, Classes, Session};
use runtime::generate::{Ending, NextLogits, NextLogitsOfMany, Sampling, generate};
use runtime::in_flight::Request;
use runtime::load::load_weights;
use runtime::trace::Tracing;
use runtime::weights::Weights;
use serde_json::{Value, json};

use crate::cli::tiny;

const CASES: [&str; 4] = ["gpt2-tiny", "gpt2-untied", "llama-tiny", "llama-bias-tied"];

/// The entry `logits` of a session, which reads a whole sequence each time.
const LOGITS: usize = 0;

fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(case)
}

fn description(case: &str) -> Description {
    let text = std::fs::read_to_string(folder(case).join("config.json")).expect("a config");
    read_config("config.json", &text, case).expect("the config reads")
}

fn expected(case: &str) -> Weights {
    Weights::open(&folder(case).join("expected.safetensors")).expect("the values open")
}

fn tokens(case: &str, tensor: &str) -> Vec<u32> {
    let numbers = expected(case).read_f64(tensor, None).expect("the tensor reads");
    numbers.iter().map(|x| *x as u32).collect()
}

fn fill(case: &str, session: &mut Session, model: &Model) {
    let weights = Weights::open(&folder(case)).expect("the weights open");
    let count = load_weights(session, &model.weights, &weights).expect("the weights fit");
    assert_eq!(count, model.param_count());
}

fn mesh(pp: usize, dp: usize, tp: usize) -> Mesh {
    Mesh { pp, dp, tp, ..Mesh::ONE }
}

/// The meshes on which a case is run: `tp` up to its number of heads.
fn meshes(case: &str) -> Vec<Mesh> {
    let mut meshes = vec![mesh(1, 1, 1), mesh(1, 1, 2), mesh(2, 1, 1)];
    if case != "gpt2-untied" {
        meshes.extend([mesh(1, 1, 3), mesh(2, 1, 2)]);
    }
    meshes
}

/// A session of the entry `logits` for so many samples on each rank.
fn logits_session(case: &str, seq: usize, samples: usize, mesh: Mesh, dtype: DType) -> Session {
    let options = ir::import::Options { seq, dtype, dropout: Some(0.0), documents: false };
    let model = import(&description(case), &options).expect("the model is imported");
    let module = prepare_inference(model.module.clone(), "logits").expect("it is prepared");
    let plan = plan_forward(
        &module,
        "logits",
        mesh,
        [samples, seq],
        ir::precision::Precision::uniform(dtype),
    )
    .unwrap_or_else(|why| panic!("{case} {mesh}: {why:?}"));
    let compiled = compile_inference(&module, "logits", &plan);
    let compiled = compiled.unwrap_or_else(|d| panic!("{}", ir::diagnostic::render(&d, None)));
    let Compiled { programs, kernels } = compiled;
    let classes = Classes { programs, kernels, mesh, ids: Ids::of(&module, "logits") };
    let options = runtime::execute::Options {
        threads_per_rank: 1,
        deadline: Duration::from_secs(60),
        tracing: Tracing::None,
        disk: None,
    };
    let mut session = Session::start(Arc::new(classes), &options).expect("the ranks start");
    fill(case, &mut session, &model);
    session
}

/// The model without a cache: all tokens are read again for each.
struct Uncached {
    session: Session,
    read: Vec<i32>,
    seq: usize,
    logits: Vec<f32>,
}

impl NextLogits for Uncached {
    fn read(&mut self, tokens: &[u32]) -> Result<&[f32], runtime::Failure> {
        self.read.extend(tokens.iter().map(|token| *token as i32));
        let mut padded = self.read.clone();
        padded.resize(self.seq, 0);
        self.session.infer(LOGITS, &Batch { tokens: &padded, ..Batch::default() })?;
        let output = self.session.output(LOGITS, 0).expect("it is here");
        let vocab = output.dims[2];
        let row = &output.to_f64()[(self.read.len() - 1) * vocab..self.read.len() * vocab];
        self.logits = row.iter().map(|x| *x as f32).collect();
        Ok(&self.logits)
    }

    fn capacity(&self) -> usize {
        self.seq
    }
}

fn check_text(case: &str, dtype: DType) {
    let (prompt, text) = (tokens(case, "prompt"), tokens(case, "generated"));
    let ending = Ending { tokens_max: text.len() - prompt.len(), stops: Vec::new() };
    let mut all = |_| ControlFlow::Continue(());
    for mesh in [meshes(case), vec![mesh(1, 2, 1), mesh(1, 2, 2)]].concat() {
        let options = Options {
            capacity: text.len() - 1,
            sequences: 1,
            mesh,
            dtype,
            threads_per_rank: 1,
            target: None,
        };
        let mut load = |session: &mut Session, model: &Model| {
            fill(case, session, model);
            Ok(())
        };
        let generator = Generator::new(&description(case), &options, &mut load);
        let mut generator = generator.unwrap_or_else(|why| panic!("{case} {mesh}: {why:?}"));
        // The second time, the caches hold what the first left.
        for _ in 0..2 {
            let new = generator.generate(&prompt, &Sampling::GREEDY, &ending, &mut all);
            let new = new.expect("the text is generated");
            assert_eq!([&prompt[..], &new].concat(), text, "{case} {mesh} {dtype} with a cache");
        }
    }
    let seq = text.len() - 1;
    let session = logits_session(case, seq, 1, mesh(1, 1, 1), dtype);
    let mut uncached = Uncached { session, read: Vec::new(), seq, logits: Vec::new() };
    let new = generate(&mut uncached, &prompt, &Sampling::GREEDY, &ending, &mut all);
    let new = new.expect("the text is generated");
    assert_eq!([&prompt[..], &new].concat(), text, "{case} {dtype} without a cache");
}

/// Sequences of which each is read anew for every token.
struct Reread {
    model: Uncached,
    sequences: Vec<Vec<u32>>,
    logits: Vec<f32>,
}

impl NextLogitsOfMany for Reread {
    fn sequences(&self) -> usize {
        self.sequences.len()
    }

    fn capacity(&self) -> usize {
        self.model.seq
    }

    fn begin(&mut self, sequence: usize, prompt: &[u32]) -> Result<&[f32], runtime::Failure> {
        self.sequences[sequence] = prompt.to_vec();
        self.model.read.clear();
        self.model.read(prompt)
    }

    fn copy(&mut self, from: usize, to: usize) {
        self.sequences[to] = self.sequences[from].clone();
    }

    fn go_on(&mut self, tokens: &[Option<u32>]) -> Result<&[f32], runtime::Failure> {
        self.logits.clear();
        for (sequence, token) in self.sequences.iter_mut().zip(tokens) {
            sequence.push(token.unwrap_or(0));
            self.model.read.clear();
            self.logits.extend_from_slice(self.model.read(sequence)?);
        }
        Ok(&self.logits)
    }
}

/// Sequences whose caches are copied from each other are the likeliest of a model without caches,
/// on any mesh.
#[test]
fn beams_are_those_of_a_model_without_caches() {
    for case in CASES {
        let (dtype, beams, new) = (DType::F64, 3, 7);
        let prompt = tokens(case, "prompt");
        let seq = prompt.len() + new - 1;
        for (length_penalty, stops) in [(1.0, vec![]), (0.0, vec![1, 5]), (2.0, vec![3])] {
            let ending = Ending { tokens_max: new, stops };
            let session = logits_session(case, seq, 1, mesh(1, 1, 1), dtype);
            let model = Uncached { session, read: Vec::new(), seq, logits: Vec::new() };
            let sequences = vec![Vec::new(); beams];
            let mut reread = Reread { model, sequences, logits: Vec::new() };
            let search = BeamSearch { beams, length_penalty };
            let wanted = search.search(&mut reread, &prompt, &ending).expect("texts are found");
            for mesh in [mesh(1, 1, 1), mesh(1, 2, 1), mesh(1, 1, 2)] {
                let options = Options {
                    capacity: seq,
                    sequences: beams,
                    mesh,
                    dtype,
                    threads_per_rank: 1,
                    target: None,
                };
                let mut load = |session: &mut Session, model: &Model| {
                    fill(case, session, model);
                    Ok(())
                };
                let generator = Generator::new(&description(case), &options, &mut load);
                let mut generator = generator.unwrap_or_else(|why| panic!("{case}: {why:?}"));
                for _ in 0..2 {
                    let found = generator.search(&prompt, length_penalty, &ending);
                    let found = found.expect("texts are found");
                    let texts = |all: &[Hypothesis]| -> Vec<_> {
                        all.iter().map(|one| (one.tokens.clone(), one.is_stopped)).collect()
                    };
                    assert_eq!(texts(&found), texts(&wanted), "{case} {mesh}");
                    for (a, b) in found.iter().zip(&wanted) {
                        assert!((a.score - b.score).abs() < 1e-5, "{case} {mesh}: {a:?} {b:?}");
                    }
                }
            }
        }
    }
}

/// Texts of several lengths that are continued side by side are those that are continued alone, to
/// the token, on any mesh: more of them than sequences, and some that end before others.
#[test]
fn texts_side_by_side_are_those_alone() {
    for case in CASES {
        let all = [tokens(case, "prompt"), tokens(case, "generated")].concat();
        let request = |at: usize| Request {
            prompt: all[at % 3..][..1 + at * 3 % 7].to_vec(),
            sampling: Sampling {
                temperature: [0.0, 0.9][at % 2],
                top_k: None,
                top_p: None,
                seed: at as u32,
            },
            ending: Ending { tokens_max: 1 + at * 5 % 8, stops: vec![at as u32] },
        };
        let requests: Vec<Request> = (0..7).map(request).collect();
        for (mesh, dtype) in [
            (mesh(1, 1, 1), DType::F32),
            (mesh(1, 2, 1), DType::F32),
            (mesh(1, 1, 2), DType::F32),
            (mesh(2, 1, 1), DType::F64),
        ] {
            let texts = |sequences: usize| -> Vec<(Vec<u32>, bool)> {
                let options = Options {
                    capacity: 14,
                    sequences,
                    mesh,
                    dtype,
                    threads_per_rank: 1,
                    target: None,
                };
                let mut load = |session: &mut Session, model: &Model| {
                    fill(case, session, model);
                    Ok(())
                };
                let generator = Generator::new(&description(case), &options, &mut load);
                let mut generator = generator.unwrap_or_else(|why| panic!("{case}: {why:?}"));
                let mut found = vec![(Vec::new(), false); requests.len()];
                let done = generator.continue_all(&requests, &mut |at, one| {
                    let one = one.unwrap_or_else(|why| panic!("{case} {mesh}: {why:?}"));
                    found[at] = (one.tokens, one.is_stopped);
                });
                done.unwrap_or_else(|why| panic!("{case} {mesh}: {why:?}"));
                found
            };
            let alone = texts(1);
            assert!(alone.iter().any(|(text, _)| text.len() > 5), "{alone:?}");
            assert_eq!(texts(3), alone, "{case} {mesh} {dtype}");
        }
    }
}

#[test]
fn the_text_is_pytorchs_with_a_cache_and_without() {
    for case in CASES {
        for dtype in [DType::F64, DType::F32] {
            check_text(case, dtype);
        }
    }
}

#[test]
fn logits_are_pytorchs() {
    for case in CASES {
        let ids: Vec<i32> = tokens(case, "input_ids").iter().map(|x| *x as i32).collect();
        let theirs = expected(case).read_f64("logits", None).expect("the tensor reads");
        let largest = theirs.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        for (dtype, bound) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
            for mesh in [meshes(case), vec![mesh(1, 2, 1), mesh(1, 2, 2)]].concat() {
                let samples = 2 / mesh.dp;
                let mut session = logits_session(case, ids.len() / 2, samples, mesh, dtype);
                let batch = Batch { tokens: &ids, ..Batch::default() };
                session.infer(LOGITS, &batch).expect("the entry runs");
                let ours = session.output(LOGITS, 0).expect("it is here").to_f64();
                assert_eq!(ours.len(), theirs.len());
                let off = ours.iter().zip(&theirs).fold(0.0_f64, |m, (a, b)| m.max((a - b).abs()));
                assert!(off / largest <= bound, "{case} {mesh} {dtype}: {:e}", off / largest);
            }
        }
    }
}

#[test]
fn a_prompt_in_pieces_is_a_prompt_at_once() {
    let case = "llama-tiny";
    let options = Options {
        capacity: 16,
        sequences: 1,
        mesh: mesh(1, 1, 1),
        dtype: DType::F64,
        threads_per_rank: 2,
        target: None,
    };
    let mut load = |session: &mut Session, model: &Model| {
        fill(case, session, model);
        Ok(())
    };
    let generator = Generator::new(&description(case), &options, &mut load);
    let mut generator = generator.unwrap_or_else(|why| panic!("{why:?}"));
    let ids = &tokens(case, "input_ids")[..16];
    let values = expected(case);
    let vocab = values.get("logits").expect("there are logits").dims[2];
    let theirs = values.read_f64("logits", Some(&[0..1, 15..16, 0..vocab]));
    let theirs = theirs.expect("the tensor reads");
    let mut results = Vec::new();
    for pieces in [&[16][..], &[5, 11], &[1, 14, 1], &[7, 7, 2]] {
        let decoder = generator.decoder();
        decoder.reset();
        let (mut from, mut logits) = (0, Vec::new());
        for piece in pieces {
            logits = decoder.read(&ids[from..from + piece]).expect("the tokens are read").to_vec();
            from += piece;
        }
        results.push(logits);
    }
    for logits in &results {
        for (a, b) in logits.iter().zip(&theirs) {
            assert!((f64::from(*a) - b).abs() <= 1e-5, "{a} for {b}");
        }
    }
}

/// Texts that are continued side by side are told with their scores, the best first; files beside
/// a model say what ends one.
#[test]
fn the_likeliest_texts_are_found() {
    let scratch = tiny("beams");
    let flags = "--data text --seq 16 --gbs 2 --val-every 0 --from-scratch --steps 2";
    scratch.answer(&format!("train tiny {flags} --out run"));
    scratch.answer("export run --to hf -o model");
    let line = "generate model --prompt line --max-tokens 5";
    let beams = |answer: &Value| -> Vec<(Vec<Value>, f64)> {
        let beams = answer["beams"].as_array().expect("there are beams").iter();
        let tokens = |beam: &Value| beam["tokens"].as_array().expect("tokens").clone();
        beams.map(|beam| (tokens(beam), beam["score"].as_f64().expect("a score"))).collect()
    };
    let answer = scratch.json(&format!("{line} --beams 4 --json"));
    let found = beams(&answer);
    assert_eq!(found.len(), 4);
    assert!(
        found.iter().all(|(tokens, _)| tokens.len() == 5) && found.is_sorted_by(|a, b| a.1 >= b.1)
    );
    assert_eq!(answer["tokens"], answer["beams"][0]["tokens"]);
    let cut = scratch.json(&format!("{line} --beams 4 --tp 2 --json"));
    assert_eq!(
        beams(&cut).iter().map(|b| &b.0).collect::<Vec<_>>(),
        found.iter().map(|b| &b.0).collect::<Vec<_>>()
    );
    let one = scratch.json(&format!("{line} --beams 1 --json"));
    let greedy = scratch.json(&format!("{line} --temperature 0 --json"));
    assert_eq!(one["tokens"], greedy["tokens"]);
    let text = scratch.answer(&format!("{line} --beams 4 --length-penalty 0"));
    assert!(text.starts_with("line"), "{text}");
    // The second token of the best text ends it.
    let stop = &found[0].0[1];
    scratch.write("model/generation_config.json", &json!({ "eos_token_id": [stop] }).to_string());
    let answer = scratch.json(&format!("{line} --beams 4 --length-penalty 0 --json"));
    let stopped = answer["beams"].as_array().expect("beams").iter();
    assert!(stopped.clone().any(|beam| beam["finish_reason"] == "stop"), "{answer}");
    let greedy = scratch.json(&format!("{line} --temperature 0 --json"));
    assert!(!greedy["tokens"].as_array().expect("tokens").contains(stop), "{greedy}");
    scratch.write("model/generation_config.json", "{");
    for (wrong, code, said) in [
        ("--beams 2 --top-k 3", 2, "--top-k"),
        ("--length-penalty 2", 2, "--beams"),
        ("--beams 0", 2, "--beams"),
        ("--beams 100000000", 2, "at most 1024"),
        ("--beams 2 --length-penalty inf", 2, "-10 to 10"),
        ("--beams 2", 6, "E5021"),
    ] {
        let output = scratch.run(&format!("{line} {wrong}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{wrong}: {errors}");
        assert!(errors.contains(said), "{wrong}: {errors}");
    }
}

/// Many texts of a file are continued as each of them alone, whatever goes on beside it; what the
/// file says wrongly is told with its line.
#[test]
fn prompts_of_a_file_are_continued_as_each_alone() {
    let scratch = tiny("prompts");
    let flags = "--data text --seq 16 --gbs 2 --val-every 0 --from-scratch --steps 2";
    scratch.answer(&format!("train tiny {flags} --out run"));
    let prompts = ["line", "a", "the second line", "li", "ne 3"];
    let lines = prompts.iter().enumerate().map(|(at, prompt)| match at % 2 {
        0 => json!(prompt).to_string(),
        _ => json!({ "prompt": prompt, "max_tokens": 2 + at }).to_string(),
    });
    scratch.write("prompts.jsonl", &lines.collect::<Vec<_>>().join("\n\n"));
    let alone = |at: usize| {
        let new = if at.is_multiple_of(2) { 4 } else { 2 + at };
        let seed = 9 + at;
        let line = format!("generate run --max-tokens {new} --seed {seed} --json --prompt");
        let mut command = scratch.command(&[], &line);
        let output = command.arg(prompts[at]).output().expect("the program starts");
        serde_json::from_slice(&output.stdout).expect("the answer is one document")
    };
    let alone: Vec<Value> = (0..prompts.len()).map(alone).collect();
    let line = "generate run --prompts prompts.jsonl --max-tokens 4 --seed 9";
    for flags in
        ["--slots 8", "--slots 1", "--slots 2 --dp 2", "--tp 2", "--pp 2 --slots 3", "--dp 99"]
    {
        let found = scratch.json(&format!("{line} --json {flags}"));
        let texts = found["texts"].as_array().expect("texts");
        assert_eq!(texts.len(), prompts.len(), "{flags}");
        for (one, alone) in texts.iter().zip(&alone) {
            for key in ["text", "tokens", "prompt_tokens", "finish_reason"] {
                assert_eq!(one[key], alone[key], "{flags}");
            }
        }
        let new: usize = texts.iter().map(|one| one["tokens"].as_array().map_or(0, Vec::len)).sum();
        assert_eq!(found["new_tokens"], new as u64, "{flags}");
        let count = |key: &str| found[key].as_u64().expect("a count");
        assert!(count("slots") * count("replicas") <= 6, "no slot is for nothing: {found}");
    }
    let told = scratch.answer(line);
    let wanted: Vec<&str> = alone.iter().map(|one| one["text"].as_str().expect("a text")).collect();
    assert_eq!(told.trim_end(), wanted.join("\n").trim_end());
    scratch.write("empty", "\n");
    scratch.write("wrong", "\"a\"\n{\"prompt\": \"a\", \"tokens\": 3}\n");
    scratch.write("long", &json!("a".repeat(400)).to_string());
    scratch.write("nothing", "\"\"");
    for (flags, code, said) in [
        ("--prompts empty", 2, "has no prompts"),
        ("--prompts absent", 2, "there is no file"),
        ("--prompts wrong", 6, "2 | {\"prompt\": \"a\", \"tokens\": 3}"),
        ("--prompts long", 2, "E4060"),
        ("--prompts nothing", 2, "1 | \"\""),
        ("--prompts prompts.jsonl --beams 2", 2, "--beams"),
        ("--slots 2", 2, "--prompts"),
        ("--prompts prompts.jsonl --dp 0", 2, "--dp"),
    ] {
        let output = scratch.run(&format!("generate run {flags}"));
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{flags}: {told}");
        assert!(told.contains(said), "{flags}: {told}");
    }
}

/// Plans of inference are found for the ranks of CPUs, are files, and are carried out: whatever
/// they decide, texts are the same.
#[test]
fn plans_of_inference_are_carried_out() {
    let scratch = tiny("serving-plan");
    let flags = "--data text --seq 16 --gbs 2 --val-every 0 --from-scratch --steps 2";
    scratch.answer(&format!("train tiny {flags} --out run"));
    scratch.write("prompts.jsonl", "\"line\"\n\"a second line\"\n\"3\"\n");
    let line = "generate run --prompts prompts.jsonl --max-tokens 3 --json";
    let texts = |flags: &str| scratch.json(&format!("{line} {flags}"))["texts"].clone();
    let tokens = |texts: &Value| -> Vec<Value> {
        texts.as_array().expect("texts").iter().map(|one| one["tokens"].clone()).collect()
    };
    let wanted = tokens(&texts("--slots 8"));
    let asked = "plan tiny --for inference --seq 16 --gbs 4";
    for (at, flags) in ["--ranks 1", "--ranks 2 --tp 2", "--ranks 2 --pp 2", "--ranks 4 --dp 2"]
        .into_iter()
        .enumerate()
    {
        let found = scratch.json(&format!("{asked} {flags} --json -o {at}.plan"));
        assert_eq!(found["fits"], true, "{found}");
        let text = std::fs::read_to_string(scratch.0.join(format!("{at}.plan"))).expect("a plan");
        assert_eq!(scratch.answer(&format!("{asked} {flags} --plan")).trim_end(), text.trim_end());
        assert!(text.contains("\n  inference buckets 1 8 16\n"), "{text}");
        let answer = scratch.json(&format!("{line} --plan {at}.plan"));
        assert_eq!(tokens(&answer["texts"]), wanted, "{flags}");
        let best = &found["recommended"];
        assert_eq!(answer["slots"], best["slots"], "{flags}");
        assert_eq!(answer["replicas"], best["copies"], "{flags}");
    }
    let page = scratch.answer("plan tiny --for inference --ranks 2 --input-len 8 --output-len 8");
    assert!(page.contains("✓ take") && page.contains("slots"), "{page}");
}

/// What no plan of inference has room or time for is told with the figure that it lacks; plans of
/// other steps, and edited ones, are refused.
#[test]
fn plans_that_continue_no_texts_are_refused() {
    let scratch = tiny("no-serving-plan");
    let flags = "--data text --seq 16 --gbs 2 --val-every 0 --from-scratch --steps 2";
    scratch.answer(&format!("train tiny {flags} --out run"));
    scratch.write("prompts.jsonl", "\"line\"\n\"3\"\n");
    let line = "generate run --prompts prompts.jsonl --max-tokens 3 --json";
    let asked = "plan tiny --for inference --seq 16 --gbs 4";
    scratch.answer(&format!("{asked} --ranks 1 -o 0.plan"));
    for (flags, said) in [
        ("--first-token-time 0.00001ms", "a prompt"),
        ("--token-time 0.00001ms", "a token takes"),
        ("--max memory=1kB", "lacks"),
    ] {
        let none = scratch.run(&format!("plan tiny --for decode {flags}"));
        assert_eq!(none.status.code(), Some(3), "{flags}");
        assert!(String::from_utf8_lossy(&none.stdout).contains(said), "{flags}: {none:?}");
    }
    let both = scratch.json(&format!("{asked} --plan --json"));
    assert_eq!(both["schema"], "gantline.inference/1", "{both}");
    scratch.answer("plan tiny --seq 16 --gbs 2 -o training.plan");
    let text = std::fs::read_to_string(scratch.0.join("0.plan")).expect("a plan");
    scratch.write(
        "adamw.plan",
        &text.replace("optimizer none", "optimizer sgd decay=0 decay_biases=0"),
    );
    scratch.write("long.plan", &text.replace("data seq=16", "data seq=4096"));
    scratch.write("many.plan", &text.replace("size=4 ", "size=40000000 "));
    scratch.write("codes.plan", &text.replace("dtype=f32", "dtype=f8e4m3"));
    scratch.write("pieces.plan", &text.replace("buckets 1 8 16", "buckets 1 8 17"));
    scratch.write("buckets.plan", &text.replace("buckets 1 8", "buckets 8"));
    scratch.write("other.plan", &text.replace("plan 2 tiny", "plan 2 other"));
    for (asked, code, said) in [
        (format!("{line} --plan training.plan"), 2, "E5006"),
        (format!("{line} --plan adamw.plan"), 6, "E3309"),
        (format!("{line} --plan long.plan"), 2, "E5006"),
        (format!("{line} --plan many.plan"), 3, "E3308"),
        (format!("{line} --plan codes.plan"), 2, "E5006"),
        (format!("{line} --plan pieces.plan"), 6, "E3309"),
        (format!("{line} --plan buckets.plan"), 6, "E1021"),
        (format!("{line} --plan other.plan"), 2, "E5006"),
        (format!("{line} --plan 0.plan --tp 2"), 2, "--tp"),
        ("generate run --prompt a --plan 0.plan".to_owned(), 2, "--prompts"),
        ("verify tiny --plan 0.plan".to_owned(), 2, "E5006"),
        ("verify tiny --plan 0.plan --shrink".to_owned(), 2, "E5006"),
        ("explain tiny --plan 0.plan".to_owned(), 2, "E5006"),
        ("compile tiny --plan 0.plan -o x.gtl".to_owned(), 2, "E5006"),
        (format!("train tiny {flags} --out other --plan 0.plan"), 2, "E5006"),
        ("score tiny --from 0.plan --cluster h100 --gbs 8".to_owned(), 2, "E5006"),
        ("plan tiny --for inference --fix cp=2".to_owned(), 2, "cp"),
        ("plan tiny --for inference --kv-dtype f8".to_owned(), 2, "--kv-dtype"),
        ("plan tiny --for inference --ranks 2 --tp 3".to_owned(), 3, "E3203"),
        ("plan tiny --for inference --name".to_owned(), 2, "--name"),
        ("plan tiny --for inference --seq 4096".to_owned(), 2, "--seq"),
        ("plan tiny --for inference --nodes 2 --ranks 2".to_owned(), 2, "--nodes"),
    ] {
        let output = scratch.run(&asked);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains(said), "{asked}: {told}");
        assert_eq!(output.status.code(), Some(code), "{asked}: {told}");
    }
}

/// What pads a prompt to the length of a piece is a token of the prompt: one that it does not have
/// may stand for nothing finite.
#[test]
fn padding_takes_nothing_from_a_prompt() {
    let scratch = tiny("padding");
    let flags = "--data text --seq 16 --gbs 2 --val-every 0 --from-scratch --steps 2";
    scratch.answer(&format!("train tiny {flags} --out run"));
    scratch.answer("export run --to hf -o model");
    scratch.write("prompts.jsonl", "\"abc\"\n\"a longer one\"\n\"x\"\n");
    let line = "generate model --prompts prompts.jsonl --max-tokens 3 --temperature 0 --json";
    let wanted = scratch.json(line)["texts"].clone();
    let path = scratch.0.join("model/model.safetensors");
    let mut bytes = std::fs::read(&path).expect("there are weights");
    let (size, rest) = bytes.split_at_mut(8);
    let size = u64::from_le_bytes(size.try_into().expect("eight bytes")) as usize;
    let (header, data) = rest.split_at_mut(size);
    let header: Value = serde_json::from_slice(header).expect("a header");
    let tensors = header.as_object().expect("tensors").iter();
    let table = tensors.filter(|(name, _)| name.ends_with("wte.weight")).map(|(_, told)| told);
    let table = table.clone().next().expect("a table of tokens");
    let start = table["data_offsets"][0].as_u64().expect("an offset") as usize;
    let width = table["shape"][1].as_u64().expect("a width") as usize;
    assert_eq!(table["dtype"], "F32");
    for token in [0, usize::from(b'q')] {
        let row = &mut data[start + 4 * width * token..][..4 * width];
        row.chunks_exact_mut(4).for_each(|number| number.copy_from_slice(&f32::NAN.to_le_bytes()));
    }
    std::fs::write(&path, &bytes).expect("the weights are written");
    let texts = |found: &Value| -> Vec<Value> {
        found.as_array().expect("texts").iter().map(|one| one["tokens"].clone()).collect()
    };
    assert_eq!(texts(&scratch.json(line)["texts"]), texts(&wanted));
    // A text that has such a token is told by its line, and takes nothing from the others.
    scratch.write("prompts.jsonl", "\"abc\"\n\"q\"\n\"a longer one\"\n\"x\"\n");
    for flags in ["", " --slots 1", " --dp 2 --slots 2"] {
        let output = scratch.run(&format!("{line}{flags}"));
        assert_eq!(output.status.code(), Some(6), "{flags}");
        let found: Value = serde_json::from_slice(&output.stdout).expect("a document");
        assert_eq!(texts(&found["texts"]), texts(&wanted), "{flags}");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("E4061") && told.contains("2 | \"q\""), "{flags}: {told}");
    }
}
