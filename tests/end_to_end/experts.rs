//! Ranks that share experts give the loss and the gradients of the reference interpreter.

use ir::import::{Description, read_config};
use ir::plan::{Keep, Place, Schedule, Zero};
use ir::{DType, ExpertParallel, Mesh, Plan};
use runtime::weights::Weights;

use crate::cli::tiny;
use crate::mesh::{Case, check_batch};
use crate::model::mixtral;
use crate::scratch::Scratch;

/// Tokens of a sample.
const SEQ: usize = 10;

fn mesh([pp, dp, tp]: [usize; 3]) -> Mesh {
    Mesh { pp, dp, tp, ..Mesh::ONE }
}

fn case(description: &Description, ep: usize, keep: Keep) -> Case<'_> {
    let (dropout, seq, samples, dtype, bound) = (0.0, SEQ, 12, DType::F64, 1e-10);
    let experts = ExpertParallel::along(ep);
    Case { description, dropout, seq, samples, keep, dtype, bound, experts }
}

#[test]
fn ranks_that_share_experts_agree_with_the_interpreter() {
    let model = mixtral(6, 2);
    let none = |_: &mut Plan| {};
    check_batch(case(&model, 1, Keep::Full), &[mesh([1, 2, 1]), mesh([1, 1, 2])], &none);
    check_batch(case(&model, 2, Keep::Full), &[mesh([1, 2, 1]), mesh([1, 4, 1])], &none);
    check_batch(case(&model, 3, Keep::None), &[mesh([1, 3, 1]), mesh([2, 6, 1])], &none);
    check_batch(case(&model, 2, Keep::AllButAttention), &[mesh([2, 2, 2])], &none);
    check_batch(case(&model, 2, Keep::Full), &[mesh([1, 4, 3])], &none);
    // One expert a rank, of which a token visits several.
    check_batch(case(&mixtral(4, 3), 4, Keep::Full), &[mesh([1, 4, 1])], &none);
    check_batch(case(&mixtral(2, 1), 2, Keep::None), &[mesh([3, 2, 1])], &none);
}

/// Some of the ranks share one copy of all weights, and of their experts those that have the same.
#[test]
fn ranks_that_share_experts_share_copies_of_weights() {
    let model = mixtral(4, 2);
    let mesh = |[dp, cp]: [usize; 2]| Mesh { dp, cp, ..Mesh::ONE };
    for (ep, stage, shard, sizes) in [
        (2, 1, 4, [8, 1]),
        (2, 2, 2, [4, 1]),
        (2, 3, 4, [8, 1]),
        (4, 3, 4, [4, 2]),
        (2, 2, 4, [4, 2]),
    ] {
        let zero = |plan: &mut Plan| plan.zero = Zero { stage, shard };
        let case = Case { seq: 12, samples: 16, ..case(&model, ep, Keep::Full) };
        check_batch(case, &[mesh(sizes)], &zero);
    }
}

/// Ranks that share the tokens of a sample share experts, alone or with those of other samples.
#[test]
fn ranks_that_share_tokens_share_experts() {
    let model = mixtral(6, 2);
    let of = |ep: usize, keep: Keep| Case { seq: 12, ..case(&model, ep, keep) };
    let mesh = |[pp, dp, cp, tp]: [usize; 4]| Mesh { pp, dp, cp, tp, ..Mesh::ONE };
    let none = |_: &mut Plan| {};
    let zero = |stage: u8| move |plan: &mut Plan| plan.zero = Zero { stage, shard: 0 };
    check_batch(of(2, Keep::Full), &[mesh([1, 1, 2, 1]), mesh([1, 2, 2, 1])], &none);
    check_batch(of(6, Keep::None), &[mesh([1, 3, 2, 1]), mesh([1, 2, 3, 1])], &none);
    check_batch(of(2, Keep::Full), &[mesh([2, 3, 2, 2])], &none);
    check_batch(of(2, Keep::Full), &[mesh([1, 2, 2, 1])], &zero(1));
    check_batch(of(2, Keep::AllButAttention), &[mesh([1, 3, 2, 1])], &zero(3));
    check_batch(of(6, Keep::Full), &[mesh([1, 3, 2, 1])], &zero(2));
}

/// Ranks that share the tokens of a layer's boundary share experts too, alone or with those of
/// other samples and tokens: each has whole experts.
#[test]
fn ranks_along_tp_share_experts() {
    let model = mixtral(8, 2);
    let of = |ep: usize, keep: Keep| {
        let experts = ExpertParallel { ep, takes_tp: true };
        Case { experts, seq: 12, ..case(&model, 1, keep) }
    };
    let mesh = |[pp, dp, cp, tp]: [usize; 4]| Mesh { pp, dp, cp, tp, ..Mesh::ONE };
    let none = |_: &mut Plan| {};
    let zero = |stage: u8, shard: u32| move |plan: &mut Plan| plan.zero = Zero { stage, shard };
    check_batch(of(2, Keep::Full), &[mesh([1, 1, 1, 2]), mesh([1, 2, 1, 2])], &none);
    check_batch(of(4, Keep::None), &[mesh([1, 2, 1, 2]), mesh([2, 1, 1, 4])], &none);
    check_batch(of(4, Keep::AllButAttention), &[mesh([1, 4, 1, 2])], &none);
    // With those that share tokens, or one copy for each of these.
    check_batch(of(4, Keep::Full), &[mesh([1, 1, 2, 2]), mesh([2, 2, 2, 2])], &none);
    check_batch(of(8, Keep::Full), &[mesh([1, 2, 2, 2])], &zero(1, 0));
    check_batch(of(2, Keep::Full), &[mesh([1, 2, 2, 2])], &none);
    for stage in [1, 2, 3] {
        check_batch(of(4, Keep::Full), &[mesh([1, 4, 1, 2])], &zero(stage, 0));
        check_batch(of(2, Keep::None), &[mesh([1, 2, 1, 2])], &zero(stage, 0));
        check_batch(of(4, Keep::Full), &[mesh([1, 4, 1, 2])], &zero(stage, 2));
    }
    let schedule = |plan: &mut Plan| plan.schedule = Schedule::ZeroBubbleH1;
    check_batch(of(4, Keep::Full), &[mesh([2, 2, 1, 2])], &schedule);
}

/// An expert that every token visits runs on its own rank's tokens, beside those that are shared.
#[test]
fn experts_that_all_tokens_visit_run_beside_those_that_are_shared() {
    let config = r#"{"model_type": "qwen2_moe", "vocab_size": 259, "max_position_embeddings": 64,
        "num_hidden_layers": 2, "hidden_size": 24, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}"#;
    let model = read_config("config.json", config, "qwen2-moe").expect("the config is read");
    check_batch(case(&model, 2, Keep::Full), &[mesh([1, 2, 2]), mesh([2, 2, 1])], &|_| {});
    let offload = |plan: &mut Plan| plan.offload.parameters = Place::Disk;
    check_batch(case(&model, 4, Keep::None), &[mesh([1, 4, 1])], &offload);
}

/// Keys and values of a rank's heads come from what all heads share, and experts from groups that
/// are compared with a correction; the first layer is dense, and a layer of either kind is a stage.
#[test]
fn compressed_keys_and_corrected_routers_agree_with_the_interpreter() {
    let config = r#"{"model_type": "deepseek_v3", "vocab_size": 259, "max_position_embeddings": 64,
        "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 20, "n_group": 4,
        "moe_intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 7, "n_routed_experts": 8, "num_experts_per_tok": 3, "topk_group": 2,
        "first_k_dense_replace": 1}"#;
    let model = read_config("config.json", config, "deepseek-v3").expect("the config is read");
    let zero = |stage: u8| move |plan: &mut Plan| plan.zero = Zero { stage, shard: 0 };
    check_batch(case(&model, 1, Keep::AllButAttention), &[mesh([1, 1, 4])], &|_| {});
    check_batch(case(&model, 2, Keep::Full), &[mesh([1, 2, 2]), mesh([2, 2, 1])], &zero(1));
    check_batch(case(&model, 2, Keep::None), &[mesh([1, 4, 1])], &zero(2));
    check_batch(case(&model, 2, Keep::Full), &[mesh([2, 2, 2])], &zero(3));
    let older = config.replace("deepseek_v3", "deepseek_v2");
    let config = older.replace("\"q_lora_rank\": 14", "\"q_lora_rank\": null");
    let model = read_config("config.json", &config, "deepseek-v2").expect("the config is read");
    check_batch(case(&model, 4, Keep::Full), &[mesh([1, 4, 2])], &zero(3));
}

/// What no gradient reaches is in checkpoints of every type and plan, and exported as it was.
#[test]
fn corrections_of_routers_are_kept_by_training() {
    let scratch = tiny("corrections");
    let config = r#"{"model_type": "deepseek_v3", "vocab_size": 256, "num_hidden_layers": 2,
        "max_position_embeddings": 32, "hidden_size": 16, "intermediate_size": 20, "n_group": 2,
        "moe_intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
        "q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
        "v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1,
        "first_k_dense_replace": 1}"#;
    scratch.write("deep/config.json", config);
    let flags = "--data text --from-scratch --calibration none --seq 16 --gbs 8 --val-every 0";
    for (run, on, then) in [
        ("one", "--ranks 1", "--ranks 2 --fix ep=2"),
        ("four", "--ranks 4 --fix tp=2,ep=2,zero=1", "--ranks 4 --fix tp=1,ep=4"),
        ("mixed", "--ranks 2 --fix ep=2 --dtype bf16", "--ranks 2 --fix ep=1"),
    ] {
        scratch.answer(&format!("train deep {flags} --steps 2 {on} --out {run}"));
        scratch.answer(&format!("train --calibration none --steps 3 {then} --resume {run}"));
        scratch.answer(&format!("export {run} --to hf -o of-{run}"));
        let file = scratch.0.join(format!("of-{run}/model.safetensors"));
        let written = Weights::open(&file).expect("weights");
        let name = "model.layers.1.mlp.gate.e_score_correction_bias";
        assert_eq!(written.read_f64(name, None).expect("the correction"), [0.0; 4], "{run}");
        scratch.answer(&format!("inspect of-{run}"));
        let line = format!("generate {run} --prompt line --max-tokens 4 --temperature 0 --json");
        let from = line.replace(run, &format!("of-{run}"));
        assert_eq!(scratch.json(&line)["tokens"], scratch.json(&from)["tokens"], "{run}");
    }
}

/// Copies of experts are on fewer ranks than those of other weights, and so are their pieces.
#[test]
fn ranks_that_share_experts_share_weights_too() {
    let model = mixtral(4, 2);
    let zero = |stage: u8| move |plan: &mut Plan| plan.zero = Zero { stage, shard: 0 };
    for stage in [1, 2, 3] {
        let meshes = [mesh([1, 4, 1]), mesh([2, 2, 1])];
        check_batch(case(&model, 2, Keep::Full), &meshes, &zero(stage));
    }
    check_batch(case(&model, 4, Keep::None), &[mesh([1, 4, 2])], &zero(3));
    check_batch(case(&model, 2, Keep::Full), &[mesh([2, 4, 1])], &zero(1));
    let schedule = |plan: &mut Plan| plan.schedule = Schedule::ZeroBubbleH1;
    check_batch(case(&model, 2, Keep::Full), &[mesh([2, 2, 1])], &schedule);
}

/// Whatever rank draws for it, an element of the whole is dropped or is not.
#[test]
fn ranks_that_share_experts_drop_the_same_elements() {
    let model = mixtral(4, 2);
    let dropped = Case { dropout: 0.1, ..case(&model, 2, Keep::Full) };
    check_batch(dropped, &[mesh([1, 2, 1]), mesh([1, 4, 2])], &|_| {});
}

/// The losses that a run tells.
fn losses(scratch: &Scratch, run: &str) -> Vec<f64> {
    let lines = std::fs::read_to_string(scratch.0.join(run).join("metrics.jsonl"));
    let lines = lines.expect("a run has metrics");
    let numbers = lines.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    numbers.filter_map(|line: serde_json::Value| line["loss"].as_f64()).collect()
}

/// Experts of which a rank has the only copies are updated and rounded where they are, whatever is
/// shared of other weights: the losses are the same.
#[test]
fn experts_without_copies_stay_where_they_are() {
    let scratch = tiny("one-copy");
    let config = r#"{"model_type": "mixtral", "vocab_size": 256, "max_position_embeddings": 32,
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}"#;
    scratch.write("mix/config.json", config);
    let flags = "--data text --from-scratch --calibration none --seq 16 --gbs 8 --lr 0.05 \
                 --val-every 0 --steps 3 --ranks 4 --dtype bf16 --precision parameters=bf16 \
                 --precision master=f32";
    let mut first = None;
    for (states, offload) in [("f32", "device"), ("f8e4m3", "device"), ("f32", "host")] {
        for zero in 0..4 {
            let run = format!("{states}-{offload}-{zero}");
            let fixed = format!("ep=4,dp=4,mbs=1,zero={zero},offload-optimizer={offload}");
            let line = format!("train mix {flags} --precision states={states} --fix {fixed}");
            scratch.answer(&format!("{line} --out {run}"));
            let losses = losses(&scratch, &run);
            assert_eq!(losses.len(), 3, "{run}");
            let first: &Vec<f64> = first.get_or_insert_with(|| losses.clone());
            let most = if states == "f32" { 1e-4 } else { 1e-2 };
            let off = losses.iter().zip(first).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
            assert!(off < most, "{run}: {losses:?}, not {first:?}");
        }
    }
}

/// A mixture of experts trains on four ranks as on one, whoever has which expert, goes on under
/// another plan, and is exported with one tensor for each expert.
#[test]
fn a_mixture_of_experts_is_trained_resumed_and_exported() {
    let scratch = tiny("mixture");
    let config = r#"{"model_type": "mixtral", "vocab_size": 256, "max_position_embeddings": 32,
        "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}"#;
    scratch.write("mix/config.json", config);
    let flags = "--data text --from-scratch --calibration none --seq 16 --gbs 8 --lr 0.01";
    let on = "--val-every 0 --save-every 4 --steps 4";
    scratch.answer(&format!("train mix {flags} {on} --ranks 1 --out one"));
    let one = losses(&scratch, "one");
    for (run, mesh) in [("two", "ep=2"), ("four", "ep=4,zero=3"), ("mixed", "tp=2,ep=2")] {
        scratch.answer(&format!("train mix {flags} {on} --ranks 4 --fix {mesh} --out {run}"));
        let shared = losses(&scratch, run);
        assert_eq!(shared.len(), one.len());
        let off = |(a, b): (&f64, &f64)| (a - b).abs() / b;
        let worst = shared.iter().zip(&one).map(off).fold(0.0, f64::max);
        assert!(worst < 1e-5, "{mesh}: {shared:?} and {one:?}");
    }
    // The checkpoint of ranks that share experts, on ranks that do not, and the other way round.
    for (run, on) in [("four", "--ranks 2 --fix dp=2,ep=1"), ("one", "--ranks 2 --fix ep=2")] {
        scratch.answer(&format!("train --calibration none --steps 6 {on} --resume {run}"));
    }
    let [a, b] = ["four", "one"].map(|run| losses(&scratch, run));
    assert_eq!((a.len(), b.len()), (6, 6));
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4), "{a:?} and {b:?}");
    scratch.answer("export four --to hf -o written");
    let written = Weights::open(&scratch.0.join("written/model.safetensors")).expect("weights");
    let name = "model.layers.1.block_sparse_moe.experts.3.w2.weight";
    assert_eq!(written.get(name).expect("an expert's own").dims, [16, 24]);
    scratch.answer("inspect written");
    let verified = scratch.answer("verify mix --ranks 4 --seq 8");
    assert!(verified.contains("ep=4") && verified.contains("ep=2"), "{verified}");
    // Experts that are not trained have no gradients, and orders of narrow numbers are known.
    scratch.answer("verify mix --ranks 2 --seq 8 --lora rank=2,targets=all-linear");
    let adapted = "--lora rank=2,targets=all-linear --ranks 2 --fix ep=2,zero=0 --out adapted";
    scratch.answer(&format!("train mix {flags} --steps 2 {adapted}"));
    for dtype in ["bf16", "f16"] {
        let verified = scratch.answer(&format!("verify mix --ranks 2 --seq 8 --dtype {dtype}"));
        assert!(verified.contains("ep=2"), "{verified}");
    }
    scratch.answer("generate written --prompt line --max-tokens 3 --dtype bf16");
}
