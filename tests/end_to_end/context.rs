//! Ranks that share the tokens of samples give the loss and the gradients of the reference
//! interpreter.

use ir::import::{Description, read_config};
use ir::plan::{Keep, Schedule, Zero};
use ir::{Axis, DType, ExpertParallel, Mesh, Plan};
use runtime::npy;

use crate::cli::tiny;
use crate::mesh::{Case, check_batch, gpt2, llama};

/// A multiple of twice 2, 3 and 4.
const SEQ: usize = 24;

fn mesh([pp, dp, cp, tp]: [usize; 4]) -> Mesh {
    Mesh { pp, dp, cp, tp, ..Mesh::ONE }
}

fn case(description: &Description, keep: Keep) -> Case<'_> {
    let (dropout, seq, samples, dtype, bound) = (0.0, SEQ, 6, DType::F64, 1e-10);
    Case { description, dropout, seq, samples, keep, dtype, bound, experts: ExpertParallel::NONE }
}

/// Layers with a window and layers without, soft caps, and fewer heads of keys than of queries.
fn gemma2() -> Description {
    let config = r#"{"model_type": "gemma2", "vocab_size": 259, "max_position_embeddings": 64,
        "num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 80, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 7,
        "query_pre_attn_scalar": 16}"#;
    read_config("config.json", config, "gemma2").expect("the config is read")
}

#[test]
fn ranks_that_share_tokens_agree_with_the_interpreter() {
    let few = [[1, 1, 2, 1], [1, 1, 3, 1], [1, 2, 2, 1], [2, 1, 2, 2], [1, 1, 4, 1], [3, 1, 2, 1]];
    let few = few.map(mesh);
    check_batch(case(&gpt2(), Keep::Full), &few, &|_| {});
    check_batch(case(&llama(), Keep::AllButAttention), &few, &|_| {});
    check_batch(case(&gemma2(), Keep::None), &few[1..4], &|_| {});
    // Parts of tokens are cut again by three ranks, across the two pieces that each part is of.
    check_batch(case(&llama(), Keep::Full), &[mesh([1, 1, 2, 3])], &|_| {});
}

/// A sum over all tokens before one has no pieces along them, and is computed whole; so are two
/// blocks of 128 tokens, which are no four pieces.
#[test]
fn what_is_not_cut_by_tokens_is_planned_all_the_same() {
    let scratch = tiny("context");
    let graph = scratch.answer("export tiny --to graph --seq 16");
    let logits = "%logits: f32[B, 16, 256] = contract";
    let (before, after) = graph.split_once(logits).expect("the head makes logits");
    let (contracted, rest) = after.split_once(" %n ").expect("of what is normed");
    let sum = "%n2: f32[B, 16, 16] = cumulative sum dim=1 %n";
    let text = format!("{before}{sum}\n    {logits}{contracted} %n2 {rest}");
    scratch.write("summed.graph", &text);
    let answer = scratch.answer("verify summed.graph --ranks 4");
    assert!(answer.contains("cp=2") && answer.contains("cp=4"), "{answer}");
    let flags = "--ranks 2 --calibration none";
    let answer = scratch.answer(&format!("plan summed.graph --gbs 1 {flags}"));
    assert!(answer.contains("cp=2"), "{answer}");
    let answer = scratch.answer(&format!("plan gpt2-mini --dtype f8 --gbs 1 {flags}"));
    assert!(answer.contains("tp=2") && answer.contains("cp=2"), "{answer}");
}

/// One sample trains on four ranks as on one, and the run says its logits, for which no ranks share
/// tokens.
#[test]
fn a_sample_is_shared_by_ranks() {
    let scratch = tiny("shared");
    let flags =
        "--data text --from-scratch --calibration none --seq 16 --gbs 1 --steps 3 --lr 0.01";
    let loss = |more: &str, run: &str| {
        scratch.answer(&format!("train tiny {flags} {more} --out {run}"));
        let lines = std::fs::read_to_string(scratch.0.join(run).join("metrics.jsonl"));
        let lines = lines.expect("a run has metrics");
        let numbers = lines.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        let losses = numbers.filter_map(|line: serde_json::Value| line["loss"].as_f64());
        losses.collect::<Vec<f64>>()
    };
    let one = loss("--ranks 1", "one");
    for (mesh, run) in [("cp=4", "four"), ("cp=2,pp=2", "two"), ("cp=2,tp=2,zero=3", "three")] {
        let shared = loss(&format!("--ranks 4 --fix {mesh}"), run);
        assert_eq!(shared.len(), one.len());
        let off = |(a, b): (&f64, &f64)| (a - b).abs() / b;
        let worst = shared.iter().zip(&one).map(off).fold(0.0, f64::max);
        assert!(one.len() >= 3 && worst < 1e-4, "{mesh}: {shared:?} and {one:?}");
    }
    let ids: Vec<u8> = (0..16_i64).flat_map(i64::to_le_bytes).collect();
    npy::write(&scratch.0.join("ids.npy"), DType::I64, &[1, 16], &ids).expect("it is written");
    let logits = |ranks: usize| {
        let out = format!("logits{ranks}");
        scratch.answer(&format!("run two --input input_ids=ids.npy --ranks {ranks} -o {out}"));
        npy::read(&scratch.0.join(out).join("logits.npy")).expect("logits").dims
    };
    assert_eq!(logits(4), logits(1));
}

/// Whatever rank draws for it, an element of the whole is dropped or is not.
#[test]
fn ranks_that_share_tokens_drop_the_same_elements() {
    let meshes = [[1, 2, 2, 1], [1, 1, 3, 1], [2, 1, 2, 3]].map(mesh);
    for (description, keep) in [(gpt2(), Keep::None), (llama(), Keep::Full)] {
        check_batch(Case { dropout: 0.1, ..case(&description, keep) }, &meshes, &|_| {});
    }
}

/// Pieces of weights over all ranks that hold them, or over some, and the other schedules.
#[test]
fn ranks_that_share_tokens_share_weights_too() {
    let [gpt2, llama] = [gpt2(), llama()];
    let shared = |stage: u8, shard: u32| move |plan: &mut Plan| plan.zero = Zero { stage, shard };
    let dense = case(&gpt2, Keep::Full);
    check_batch(dense, &[mesh([1, 2, 2, 1])], &shared(1, 0));
    check_batch(dense, &[mesh([2, 2, 2, 1])], &shared(2, 0));
    check_batch(dense, &[mesh([1, 2, 2, 2])], &shared(3, 0));
    let dense = case(&llama, Keep::AllButAttention);
    check_batch(dense, &[mesh([1, 2, 2, 1]), mesh([1, 1, 2, 1])], &shared(3, 2));
    check_batch(dense, &[mesh([1, 1, 4, 1]), mesh([1, 3, 2, 1])], &shared(2, 2));
    check_batch(dense, &[mesh([1, 3, 2, 1])], &shared(3, 1));
    let turned = Mesh { order: [Axis::Cp, Axis::Tp, Axis::Pp, Axis::Dp], ..mesh([2, 2, 2, 1]) };
    check_batch(dense, &[turned], &|plan| {
        (plan.zero, plan.schedule) = (Zero { stage: 1, shard: 0 }, Schedule::ZeroBubbleH1);
    });
}
