//! A head whose logits are not kept computes them in pieces of its rows.

use ir::import::{Description, preset, read_config};
use ir::plan::Keep;
use ir::program::{Contents, Exchange, Instruction, Program};
use ir::{DType, ExpertParallel, Mesh, Module, Plan};
use planner::link::Link;
use runtime::execute::{Batch, Scalars};

use crate::mesh::{batch, random_weights};
use crate::model::{Wanted, load, plan, plan_sharing, prepared, session};

const SEQ: usize = 512;
const VOCAB: usize = 4301;

/// One layer, and logits that are worth their chunks on two ranks: 512 rows of 4301 are 18 MB.
fn wide(tied: bool, seq: usize) -> Description {
    let text = format!(
        r#"{{"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": {seq},
        "vocab_size": {VOCAB}, "tie_word_embeddings": {tied},
        "bos_token_id": null, "eos_token_id": null}}"#
    );
    read_config("config.json", &text, "wide-gpt2").expect("the config reads")
}

/// A plan in which everything is kept but what the head computes, or that too.
fn planned(module: &Module, seq: usize, dtype: DType, wanted: Wanted, head: Keep) -> Plan {
    let mut plan = plan(module, seq, dtype, wanted).expect("it fits");
    plan.functions.get_mut("head").expect("there is a head").keep = head;
    plan
}

/// The bytes of the largest value that is neither a weight nor made of weights.
fn largest(program: &Program) -> u64 {
    let values = program.buffers.iter().filter(|b| b.contents == Contents::Activation);
    let locals = program.routines.iter().flat_map(|routine| &routine.locals);
    values.map(|b| b.bytes).chain(locals.map(|local| local.bytes)).max().unwrap_or(0)
}

/// The loss and the gradients do not depend on whether logits are computed at once, with one
/// micro-batch or with several that add to each other's gradients, on one rank or two, which may
/// have unequal parts of the vocabulary.
#[test]
fn logits_in_pieces_give_the_same_loss_and_gradients() {
    let meshes = [[1, 1, 1], [2, 1, 1], [1, 1, 2], [1, 2, 1]];
    let [one, data, tensor, context] = meshes;
    for (tied, mesh, samples) in
        [(true, one, 2), (false, one, 1), (true, data, 2), (true, tensor, 2), (true, context, 1)]
    {
        let [dp, cp, tp] = mesh;
        let seq = SEQ * cp;
        let (model, module) = prepared(&wide(tied, seq), seq, DType::F64, 0.0);
        let weights = random_weights(&model, 5);
        let (tokens, labels) = batch(3, samples, seq, VOCAB as u64);
        let wanted = Wanted {
            mesh: Mesh { dp, cp, tp, ..Mesh::ONE },
            microbatch_size: 1,
            microbatch_count: samples / dp,
            keep: Keep::Full,
            sequence: false,
        };
        let whole = (SEQ * (VOCAB / tp) * 8) as u64;
        let [kept, pieces] = [Keep::Full, Keep::None].map(|head| {
            let plan = planned(&module, seq, DType::F64, wanted, head);
            let mut session = session(&module, &plan);
            load(&mut session, &weights);
            let largest = largest(session.classes().program_of(0));
            let is_whole = largest >= whole;
            assert_eq!(is_whole, head == Keep::Full, "{largest} bytes of {whole}, {head:?}");
            let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
            let step = session.step(&batch, Scalars::default()).expect("the step runs");
            let evaluated = session.evaluate(&batch).expect("the loss is evaluated");
            let grads = model.weights.iter().map(|w| {
                let grad = session.read_grad(&w.name).expect("there is a gradient");
                (w.name.clone(), grad.to_f64())
            });
            let grads: Vec<(String, Vec<f64>)> = grads.collect();
            ([step.loss_sum, evaluated.loss_sum], grads)
        });
        for (x, y) in kept.0.iter().zip(&pieces.0) {
            assert!((x - y).abs() <= 1e-10 * x.abs(), "loss {x} and {y}");
        }
        let all = kept.1.iter().flat_map(|(_, grad)| grad);
        let scale = all.fold(0.0_f64, |m, g| m.max(g.abs()));
        for ((name, x), (_, y)) in kept.1.iter().zip(&pieces.1) {
            let error = x.iter().zip(y).fold(0.0_f64, |m, (a, b)| m.max((a - b).abs()));
            assert!(error <= 1e-10 * scale, "{name}: {error:e} of {scale:e}");
            assert!(x.iter().any(|g| *g != 0.0), "{name} moves");
        }
    }
}

/// A head whose shards of the vocabulary are as large as hidden states on all ranks or on some runs
/// in as many pieces on all: each rank makes the same exchanges, those of logits for each piece.
#[test]
fn ranks_agree_on_pieces_whatever_their_shards() {
    // Far fewer than words, so that the vocabulary is cut over ranks.
    const ROWS: usize = 2048;
    // Shards of 8 MiB and a little more.
    const PIECES: usize = 2;
    for vocab in [8192, 8193, 8199] {
        let text = format!(
            r#"{{"model_type": "gpt2", "n_layer": 1, "n_head": 8, "n_embd": 1024,
            "n_positions": {ROWS}, "vocab_size": {vocab}, "tie_word_embeddings": true,
            "bos_token_id": null, "eos_token_id": null}}"#
        );
        let description = read_config("config.json", &text, "narrow-gpt2").expect("it reads");
        let (_, module) = prepared(&description, ROWS, DType::F32, 0.0);
        let wanted = Wanted {
            mesh: Mesh { pp: 1, dp: 1, tp: 8, ..Mesh::ONE },
            microbatch_size: 1,
            microbatch_count: 1,
            keep: Keep::Full,
            sequence: false,
        };
        let exchanges = |program: &Program| {
            let all = program.routines.iter().flat_map(|routine| &routine.instructions);
            let reduced = all.filter_map(|instruction| {
                let Instruction::Collective { exchange, elements, .. } = instruction else {
                    return None;
                };
                matches!(exchange, Exchange::AllReduce(_)).then_some(*elements)
            });
            reduced.collect::<Vec<usize>>()
        };
        let [kept, pieces] = [Keep::Full, Keep::None].map(|head| {
            let plan = planned(&module, ROWS, DType::F32, wanted, head);
            let compiled = codegen::compile::compile(&module, "loss", &plan).expect("it compiles");
            let all: Vec<Vec<usize>> = compiled.programs.iter().map(exchanges).collect();
            println!("vocabulary {vocab}: {:?}", all[0]);
            assert!(all.iter().all(|own| *own == all[0]), "vocabulary {vocab}: {all:?}");
            all[0].clone()
        });
        let parts = |all: &[usize]| all.iter().filter(|own| **own == ROWS / PIECES).count();
        let (whole, parts) = (parts(&kept), parts(&pieces));
        let is_cut = whole == 0 && parts >= PIECES && parts.is_multiple_of(PIECES);
        assert!(is_cut, "vocabulary {vocab}: {parts} exchanges of pieces, {whole} without them");
    }
}

/// GPT-2 at 1,024 tokens, one sample: logits of 196 MiB are a quarter of that at a time, and so are
/// their gradients. The planner is offered both, as it chooses what each layer keeps.
#[test]
fn the_arena_of_gpt2_shrinks_by_its_logits() {
    let (seq, description) = (1024, preset("gpt2").expect("a preset"));
    let (_, module) = prepared(&description, seq, DType::F32, 0.0);
    let wanted = Wanted {
        mesh: Mesh::ONE,
        microbatch_size: 1,
        microbatch_count: 1,
        keep: Keep::Full,
        sequence: false,
    };
    let [kept, pieces] = [Keep::Full, Keep::None].map(|head| {
        let plan = planned(&module, seq, DType::F32, wanted, head);
        let compiled = codegen::compile::compile(&module, "loss", &plan).expect("it compiles");
        compiled.programs[0].clone()
    });
    let logits = (seq * 50257 * 4) as u64;
    let [before, after] = [&kept, &pieces].map(|program| program.arena_bytes >> 20);
    println!("arena {before} MiB with logits kept, {after} MiB with logits in pieces");
    assert_eq!([largest(&kept), largest(&pieces)], [logits, logits / 4]);
    assert!(kept.arena_bytes - pieces.arena_bytes >= 5 * logits / 4);
}

/// One layer, whose tokens two ranks dispatch to each other in four pieces: rows of two experts of
/// each token of both are 80 MiB.
#[test]
fn tokens_in_pieces_give_the_same_loss_and_gradients() {
    const ROWS: usize = 2048;
    const PIECES: usize = 4;
    let text = format!(
        r#"{{"model_type": "mixtral", "vocab_size": 40, "max_position_embeddings": {ROWS},
        "num_hidden_layers": 1, "hidden_size": 1280, "intermediate_size": 24,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "num_local_experts": 6, "num_experts_per_tok": 2}}"#
    );
    let description = read_config("config.json", &text, "routed").expect("the config reads");
    let (model, module) = prepared(&description, ROWS, DType::F64, 0.0);
    let weights = random_weights(&model, 7);
    let (tokens, labels) = batch(4, 4, ROWS, 40);
    let [whole, pieces, again] =
        [(1, Keep::Full), (2, Keep::Full), (2, Keep::None)].map(|(ep, keep)| {
            let mesh = Mesh { dp: 2, ..Mesh::ONE };
            let (microbatch_size, microbatch_count, sequence) = (1, 2, false);
            let wanted = Wanted { mesh, microbatch_size, microbatch_count, keep, sequence };
            let link = Link { latency_s: 1e-6, bandwidth_bytes_per_s: 1e9 };
            let plan = plan_sharing(
                &module,
                (ROWS, DType::F64),
                wanted,
                (link, ExpertParallel::along(ep)),
            );
            let mut session = session(&module, &plan.expect("it fits"));
            load(&mut session, &weights);
            let routines = &session.classes().program_of(0).routines;
            let dispatches = routines.iter().map(|routine| {
                let is_it = |i: &&Instruction| {
                    matches!(i, Instruction::Collective { exchange: Exchange::Dispatch(_), .. })
                };
                routine.instructions.iter().filter(is_it).count()
            });
            let most = dispatches.max().unwrap_or(0);
            assert_eq!(most, if ep > 1 { 2 * PIECES } else { 0 }, "tokens and their gradients");
            let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
            let step = session.step(&batch, Scalars::default()).expect("the step runs");
            let grads = model.weights.iter().map(|w| {
                let grad = session.read_grad(&w.name).expect("there is a gradient");
                (w.name.clone(), grad.to_f64())
            });
            let grads: Vec<(String, Vec<f64>)> = grads.collect();
            (step.loss_sum, grads)
        });
    for other in [pieces, again] {
        assert!((whole.0 - other.0).abs() <= 1e-10 * whole.0.abs(), "{} {}", whole.0, other.0);
        for ((name, x), (_, y)) in whole.1.iter().zip(&other.1) {
            let scale = x.iter().fold(0.0_f64, |m, g| m.max(g.abs()));
            let error = x.iter().zip(y).fold(0.0_f64, |m, (a, b)| m.max((a - b).abs()));
            assert!(error <= 1e-10 * scale, "{name}: {error:e} of {scale:e}");
            assert!(scale > 0.0, "{name} moves");
        }
    }
}
