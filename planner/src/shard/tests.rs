use codegen::partition::{Place, VALUE_AXES, partition};
use ir::import::{Options, import, read_config};
use ir::{DType, Mesh, Module};

use super::*;

const RATES: Rates = Rates {
    flops_per_s: 100e9,
    memory_bytes_per_s: 10e9,
    link: Link { latency_s: 10e-6, bandwidth_bytes_per_s: 5e9 },
};

fn prepared(config: &str, seq: usize) -> Module {
    let description = read_config("config.json", config, "test").unwrap();
    let options = Options { seq, dtype: DType::F32, dropout: None, documents: false };
    let module = import(&description, &options).unwrap().module;
    codegen::prepare::prepare_training(module, "loss").unwrap()
}

pub(crate) fn gpt2(config: &str, seq: usize) -> Module {
    prepared(config, seq)
}

pub(crate) fn llama(heads: usize, key_heads: usize, vocab: usize, seq: usize) -> Module {
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": {vocab}, "max_position_embeddings": 64,
            "hidden_size": {}, "num_hidden_layers": 2, "num_attention_heads": {heads},
            "num_key_value_heads": {key_heads}, "head_dim": 8, "intermediate_size": {},
            "tie_word_embeddings": {}}}"#,
        8 * heads,
        20 * heads,
        heads == 9,
    );
    prepared(&config, seq)
}

pub(crate) fn config(heads: usize, model: usize, vocab: usize, dropout: f64) -> String {
    format!(
        r#"{{"model_type": "gpt2", "vocab_size": {vocab}, "n_positions": 64, "n_embd": {model},
            "n_layer": 2, "n_head": {heads}, "resid_pdrop": {dropout}, "embd_pdrop": {dropout},
            "attn_pdrop": {dropout}}}"#
    )
}

fn request<'a>(module: &'a Module, dp: usize, tp: usize, sequence: bool) -> Request<'a> {
    Request {
        module,
        entry: "loss",
        dp,
        cp: 1,
        tp,
        experts: ExpertParallel::NONE,
        microbatch_size: 2,
        sequence,
        rates: RATES,
    }
}

/// Partition derives every choice again, on every rank.
fn assert_partitions(request: &Request<'_>, sharded: &Sharded) {
    let Request { dp, cp, tp, experts, .. } = *request;
    let mesh = Mesh { dp, cp, tp, ..Mesh::ONE };
    for layer in layers(request.module, request.entry).unwrap() {
        let function = request.module.function(&layer.function).unwrap();
        for rank in 0..mesh.ranks() {
            let place = Place {
                sizes: [dp, experts.ep, cp, tp],
                takes_tp: experts.takes_tp,
                coordinates: VALUE_AXES.map(|axis| match axis {
                    Axis::Dp | Axis::Ep => 0,
                    Axis::Pp | Axis::Cp | Axis::Tp => mesh.coordinate(rank, axis),
                }),
                microbatch_size: request.microbatch_size,
                target: None,
            };
            let local = partition(request.module, function, &sharded.functions[&layer.name], place);
            if let Err(why) = local {
                panic!("`{}` on {mesh}: {why}", layer.name);
            }
        }
    }
}

fn show(module: &Module, sharded: &Sharded, layer: &str) -> String {
    let layers = layers(module, "loss").unwrap();
    let layer = layers.iter().find(|l| l.name == layer).unwrap();
    let function = module.function(&layer.function).unwrap();
    let line = |v: &ir::Value| {
        let sharding = &sharded.functions[&layer.name][&v.name];
        format!("{}: {}\n", v.name, sharding.display(v.ty.ndim()))
    };
    function.values.iter().map(line).collect()
}

/// Also where ranks share tokens, if these are enough equal pieces.
fn assert_all_meshes(module: &Module, seq: usize) {
    let meshes = (1..=8).flat_map(|tp| [1, 2, 3].map(|cp| (tp, cp)));
    for (tp, cp) in meshes.filter(|(_, cp)| *cp == 1 || seq.is_multiple_of(2 * cp)) {
        for sequence in [false, true] {
            let dp = if tp <= 2 { 2 } else { 1 };
            let request = Request { cp, ..request(module, dp, tp, sequence) };
            match shard(&request) {
                Ok(sharded) => assert_partitions(&request, &sharded),
                Err(d) => panic!("{}", ir::diagnostic::render(&d, None)),
            }
        }
    }
}

#[test]
fn gpt2_partitions_on_all_meshes() {
    for (heads, model, vocab, seq) in [(4, 32, 64, 32), (9, 36, 259, 33), (9, 36, 259, 36)] {
        for dropout in [0.0, 0.1] {
            assert_all_meshes(&gpt2(&config(heads, model, vocab, dropout), seq), seq);
        }
    }
}

#[test]
fn llama_partitions_on_all_meshes() {
    for (heads, key_heads, vocab, seq) in [(8, 4, 64, 32), (9, 3, 259, 33), (6, 1, 64, 16)] {
        assert_all_meshes(&llama(heads, key_heads, vocab, seq), seq);
    }
}

#[test]
fn shared_key_heads_are_cut_with_their_queries_or_held_whole() {
    let layouts = |tp: usize| {
        let module = llama(8, 4, 64, 32);
        let sharded = shard(&request(&module, 1, tp, true)).unwrap();
        let line = |value: &str| {
            let text = show(&module, &sharded, "block");
            let start = format!("{value}: ");
            text.lines().find_map(|l| l.strip_prefix(&start)).unwrap().to_owned()
        };
        [line("q"), line("k"), line("mixed")]
    };
    let cut = "[dim0 @ dp, *, dim2 @ tp, *]";
    assert_eq!(layouts(4), [cut, cut, cut]);
    let [q, k, mixed] = layouts(8);
    assert_eq!((q.as_str(), mixed.as_str()), (cut, cut));
    // Half a head each: gathered for attention, which reads whole heads.
    assert_eq!(k, "[dim0 @ dp, *, *, dim3 @ tp]");
}

#[test]
fn a_block_is_cut_as_megatron_does() {
    let module = gpt2(&config(12, 768, 50257, 0.0), 64);
    let sharded = shard(&request(&module, 2, 4, true)).unwrap();
    let wanted = [
        ("block", "wq", "[*, dim1 @ tp, *]"),
        ("block", "wo", "[dim0 @ tp, *, *]"),
        ("block", "w_fc", "[*, dim1 @ tp]"),
        ("block", "b_fc", "[dim0 @ tp]"),
        ("block", "w_proj", "[dim0 @ tp, *]"),
        ("block", "n1", "[dim0 @ dp, dim1 @ tp, *]"),
        ("block", "mixed", "[dim0 @ dp, *, dim2 @ tp, *]"),
        ("block", "p_0", "[dim0 @ dp, *, *] partial sum tp"),
        ("block", "r", "[dim0 @ dp, dim1 @ tp, *]"),
        ("block", "d.w_fc", "[*, dim1 @ tp] partial sum dp"),
        ("block", "d.ln1_w", "[*] partial sum dp partial sum tp"),
        ("embed", "wte", "[dim0 @ tp, *]"),
        ("embed", "word", "[dim0 @ dp, *, *] partial sum tp"),
        ("embed", "d.wpe", "[dim0 @ tp, *] partial sum dp"),
        ("head", "w_lm", "[dim0 @ tp, *]"),
        ("head", "logits", "[dim0 @ dp, *, dim2 @ tp]"),
        ("head", "d.logits", "[dim0 @ dp, *, dim2 @ tp]"),
    ];
    for (layer, value, layout) in wanted {
        let text = show(&module, &sharded, layer);
        let line = format!("{value}: {layout}\n");
        assert!(text.contains(&line), "`%{value}` of `{layer}` is not {layout}:\n{text}");
    }
}

/// A weight that its first reader wants whole is stored in parts in which its gradient can be made:
/// that of experts is cut inside of them alone, though tokens are wider here.
#[test]
fn narrow_experts_are_stored_as_their_gradients_are_made() {
    let config = r#"{"model_type": "mixtral", "vocab_size": 259, "max_position_embeddings": 2048,
        "num_hidden_layers": 2, "hidden_size": 1280, "intermediate_size": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 6,
        "num_experts_per_tok": 2}"#;
    let module = prepared(config, 1024);
    let request = Request { microbatch_size: 4, ..request(&module, 1, 2, true) };
    let sharded = shard(&request).unwrap();
    assert_partitions(&request, &sharded);
}
