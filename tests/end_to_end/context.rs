//! Ranks that share the tokens of samples give the loss and the gradients of the reference
//! interpreter.

use ir::import::{Description, read_config};
use ir::plan::{Keep, Schedule, Zero};
use ir::{Axis, DType, Mesh, Plan};

use crate::mesh::{Case, check_batch, gpt2, llama};

/// A multiple of twice 2, 3 and 4.
const SEQ: usize = 24;

fn mesh([pp, dp, cp, tp]: [usize; 4]) -> Mesh {
    Mesh { pp, dp, cp, tp, ..Mesh::ONE }
}

fn case(description: &Description, keep: Keep) -> Case<'_> {
    let (dropout, seq, samples, dtype, bound) = (0.0, SEQ, 6, DType::F64, 1e-10);
    Case { description, dropout, seq, samples, keep, dtype, bound }
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
