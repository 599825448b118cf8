//! Ranks that share experts give the loss and the gradients of the reference interpreter.

use ir::import::{Description, read_config};
use ir::plan::{Keep, Schedule, Zero};
use ir::{DType, Mesh, Plan};

use crate::mesh::{Case, check_batch};

/// Tokens of a sample.
const SEQ: usize = 10;

fn mesh([pp, dp, tp]: [usize; 3]) -> Mesh {
    Mesh { pp, dp, tp, ..Mesh::ONE }
}

/// Experts of which each token visits some.
fn mixtral(experts: usize, visited: usize) -> Description {
    let config = format!(
        r#"{{"model_type": "mixtral", "vocab_size": 259, "max_position_embeddings": 64,
        "num_hidden_layers": 3, "hidden_size": 24, "intermediate_size": 20,
        "num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": {experts},
        "num_experts_per_tok": {visited}}}"#
    );
    read_config("config.json", &config, "mixtral").expect("the config is read")
}

fn case(description: &Description, ep: usize, keep: Keep) -> Case<'_> {
    let (dropout, seq, samples, dtype, bound) = (0.0, SEQ, 12, DType::F64, 1e-10);
    Case { description, dropout, seq, samples, keep, dtype, bound, ep }
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
