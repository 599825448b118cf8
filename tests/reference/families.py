"""Writes `families/`: reference values of tiny models of every decoder family, in float64.

    python tests/reference/families.py [CASE...]

needs what `make.py` needs and computes with what it defines: nothing is narrower than float64, and
gradients agree with finite differences. No weights are written. They are drawn by `draw`, whose
every step is exact or rounded once, so that the test draws the same bits; README.md says how.

Where TRANSFORMERS_4 names a directory, made by `pip install --target DIR --no-deps
transformers==4.51.3 huggingface_hub==0.34.4 tokenizers==0.21.4`, that version writes
`config.v4.json` of some cases.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import safetensors.torch
import torch
import transformers

import make

FOLDER = Path(__file__).resolve().parent / "families"
MASK = (1 << 64) - 1
PROJECTIONS = 4

# Of finite differences.
DIRECTIONS = 4
STEPS = [1e-3, 2e-4, 5e-5, 5e-6]

# Tokens that follow the prompt: with it, one more than a cache of 16 holds.
make.GENERATED = 12
make.VARIETY = 4

def case_list():
    """(name, family, fields of the configuration): at least three of a family."""
    cases = []

    def family(model_type, common, **variants):
        for variant, fields in variants.items():
            merged = {"vocab_size": 41, **common, **fields}
            cases.append((f"{model_type}-{variant}", model_type, merged))

    def rope(kind="default", **more):
        return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}

    gpt2 = dict(n_positions=32, n_embd=16, n_layer=2, n_head=2, **make.NO_DROPOUT)
    family(
        "gpt2", gpt2,
        layers_scaled=dict(
            scale_attn_by_inverse_layer_idx=True, n_embd=18, n_head=3, n_inner=24,
        ),
        unscaled=dict(scale_attn_weights=False, activation_function="relu", n_inner=20),
        gelu=dict(activation_function="gelu", tie_word_embeddings=False, layer_norm_epsilon=1e-3),
    )
    llama = dict(
        hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )
    family(
        "llama", {**llama, **rope()},
        heads=dict(hidden_size=24, num_attention_heads=3, head_dim=4, tie_word_embeddings=True),
        padded=dict(pad_token_id=7, hidden_act="gelu_pytorch_tanh"),
        linear=rope("linear", factor=2.5),
        dynamic_short=dict(max_position_embeddings=24, **rope("dynamic", factor=2.0)),
        dynamic_long=dict(max_position_embeddings=8, **rope("dynamic", factor=3.0)),
        yarn=rope("yarn", factor=4.0, original_max_position_embeddings=8),
        yarn_mscale=rope(
            "yarn", factor=2.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=0.5,
            mscale=0.7, mscale_all_dim=0.9, truncate=False,
        ),
        yarn_attention=rope(
            "yarn", factor=2.0, original_max_position_embeddings=16, attention_factor=1.3,
        ),
        longrope_short=rope(
            "longrope", factor=2.0, original_max_position_embeddings=24,
            short_factor=[1.0, 1.1, 1.3, 1.7], long_factor=[1.5, 2.0, 3.0, 4.0],
        ),
        longrope_long=rope(
            "longrope", factor=8.0, original_max_position_embeddings=4,
            short_factor=[1.0, 1.1, 1.3, 1.7], long_factor=[1.5, 2.0, 3.0, 4.0],
        ),
        llama3=dict(
            head_dim=8,
            **rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
    )
    family(
        "qwen2", {**llama, **rope(), "num_key_value_heads": 2},
        plain={},
        windows=dict(
            use_sliding_window=True, sliding_window=5, max_window_layers=1, num_key_value_heads=1,
        ),
        listed=dict(
            use_sliding_window=True, sliding_window=3, num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=3, hidden_size=12,
        ),
        unused_window=dict(use_sliding_window=False, sliding_window=4, rms_norm_eps=1e-3),
    )
    family(
        "qwen3", {**llama, **rope(), "head_dim": 8},
        plain={},
        biased=dict(attention_bias=True, head_dim=4, tie_word_embeddings=True),
        windows=dict(
            use_sliding_window=True, sliding_window=4, max_window_layers=1,
            num_attention_heads=3, hidden_size=18, head_dim=6, **rope("linear", factor=2.0),
        ),
    )
    family(
        "mixtral", {**llama, **rope(), "intermediate_size": 6, "num_local_experts": 4},
        plain={},
        one=dict(num_experts_per_tok=1, sliding_window=5, tie_word_embeddings=True),
        many=dict(
            num_local_experts=5, num_experts_per_tok=3, num_attention_heads=3, hidden_size=24,
            head_dim=4, num_hidden_layers=1, rms_norm_eps=1e-3,
        ),
    )
    family(
        "qwen3_moe",
        {**llama, **rope(), "moe_intermediate_size": 6, "num_experts": 4, "num_experts_per_tok": 2},
        plain=dict(head_dim=4),
        normed=dict(norm_topk_prob=True, num_experts=5, num_experts_per_tok=3, head_dim=6),
        windows=dict(
            use_sliding_window=True, sliding_window=4, num_attention_heads=3, hidden_size=18,
            head_dim=6, attention_bias=True, tie_word_embeddings=True, num_hidden_layers=1,
        ),
    )
    family(
        "qwen2_moe",
        {
            **llama, **rope(), "moe_intermediate_size": 6, "shared_expert_intermediate_size": 10,
            "num_experts": 4, "num_experts_per_tok": 2,
        },
        plain={},
        normed=dict(
            norm_topk_prob=True, num_experts=5, num_experts_per_tok=3, qkv_bias=False,
            tie_word_embeddings=True,
        ),
        windows=dict(
            use_sliding_window=True, sliding_window=4, max_window_layers=1,
            num_attention_heads=3, hidden_size=18, num_key_value_heads=3,
        ),
    )
    family(
        "olmoe",
        {**llama, **rope(), "intermediate_size": 6, "num_experts": 4, "num_experts_per_tok": 2},
        plain={},
        normed=dict(norm_topk_prob=True, num_experts=5, num_experts_per_tok=3, pad_token_id=7),
        biased=dict(
            attention_bias=True, num_attention_heads=3, hidden_size=18, num_key_value_heads=3,
            num_hidden_layers=1, tie_word_embeddings=True,
        ),
    )
    deepseek = dict(
        hidden_size=16, intermediate_size=20, moe_intermediate_size=6, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=None, max_position_embeddings=32,
        kv_lora_rank=6, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6,
        n_routed_experts=6, num_experts_per_tok=2, first_k_dense_replace=1,
    )
    family(
        "deepseek_v2", {**deepseek, **rope()},
        groups=dict(
            topk_method="group_limited_greedy", n_group=3, topk_group=2, num_experts_per_tok=3,
            routed_scaling_factor=1.7, n_shared_experts=1,
        ),
        lite=dict(
            q_lora_rank=None, norm_topk_prob=False, tie_word_embeddings=True, pad_token_id=7,
            **rope(
                "yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=4.0,
                beta_slow=0.5, mscale=0.7, mscale_all_dim=0.9,
            ),
        ),
        biased=dict(
            attention_bias=True, mlp_bias=True, num_attention_heads=3, hidden_size=18,
            v_head_dim=11, kv_lora_rank=4, rms_norm_eps=1e-3, **rope("linear", factor=2.0),
        ),
        dense=dict(first_k_dense_replace=2, topk_method="greedy", n_group=1, topk_group=1),
    )
    family(
        "deepseek_v3", {**deepseek, **rope(), "n_group": 3, "topk_group": 2},
        groups=dict(num_experts_per_tok=3, qk_nope_head_dim=5, kv_lora_rank=7),
        yarn=dict(
            n_group=2, topk_group=1, attention_bias=True, num_experts_per_tok=3,
            **rope(
                "yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0,
                mscale_all_dim=1.0,
            ),
        ),
        whole=dict(
            n_group=1, topk_group=1, rope_interleave=False, norm_topk_prob=False,
            num_attention_heads=3, v_head_dim=10, first_k_dense_replace=0, num_hidden_layers=1,
            tie_word_embeddings=True, n_shared_experts=2,
        ),
        plain_queries=dict(
            q_lora_rank=None, rope_interleave=False, attention_bias=True, pad_token_id=7,
            routed_scaling_factor=1.0, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=6,
            num_hidden_layers=3, **rope("linear", factor=2.0, mscale_all_dim=0.8),
        ),
    )
    family(
        "mistral", {**llama, **rope(), "head_dim": None},
        window=dict(sliding_window=5),
        full=dict(sliding_window=None, head_dim=4, tie_word_embeddings=True),
        yarn=dict(
            sliding_window=6, hidden_size=24, num_attention_heads=3,
            **rope("yarn", factor=2.0, original_max_position_embeddings=16),
        ),
    )
    family(
        "ministral", {**llama, **rope(), "head_dim": 8},
        windows=dict(sliding_window=5),
        mixed=dict(
            sliding_window=4, layer_types=["full_attention", "sliding_attention"],
            tie_word_embeddings=True,
        ),
        full=dict(
            sliding_window=4, layer_types=["full_attention"] * 2, head_dim=4,
            num_attention_heads=3, hidden_size=18,
        ),
    )
    family(
        "gemma", {**llama, **rope(), "head_dim": 8},
        plain={},
        untied=dict(tie_word_embeddings=False, attention_bias=True, head_dim=4, hidden_act="gelu"),
        heads=dict(
            num_attention_heads=3, num_key_value_heads=3, hidden_size=12, head_dim=6,
            pad_token_id=3,
        ),
    )
    gemma2 = {**llama, **rope(), "head_dim": 8, "query_pre_attn_scalar": 8}
    family(
        "gemma2", gemma2,
        capped=dict(sliding_window=5, attn_logit_softcapping=1.5, final_logit_softcapping=9.0),
        uncapped=dict(
            sliding_window=4, attn_logit_softcapping=None, final_logit_softcapping=None,
            query_pre_attn_scalar=21, attention_bias=True, num_attention_heads=3, hidden_size=18,
        ),
        listed=dict(
            sliding_window=3, layer_types=["full_attention", "sliding_attention"], head_dim=4,
            tie_word_embeddings=False, attn_logit_softcapping=0.8,
        ),
    )

    def two_ropes(local, whole):
        return {"rope_parameters": {"sliding_attention": local, "full_attention": whole}}

    local = {"rope_type": "default", "rope_theta": 100.0}
    family(
        "gemma3_text", gemma2,
        pattern=dict(
            num_hidden_layers=3, sliding_window=4, sliding_window_pattern=2, intermediate_size=12,
            **two_ropes(local, {"rope_type": "default", "rope_theta": 10000.0}),
        ),
        scaled=dict(
            sliding_window=5, layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=13, attention_bias=True, num_attention_heads=3, hidden_size=18,
            **two_ropes(local, {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0}),
        ),
        capped=dict(
            sliding_window=6, final_logit_softcapping=9.0, attn_logit_softcapping=1.0,
            tie_word_embeddings=False, head_dim=4,
            layer_types=["full_attention", "sliding_attention"],
            **two_ropes(local, {"rope_type": "default", "rope_theta": 500.0}),
        ),
    )
    family(
        "phi", {**llama, **rope(partial_rotary_factor=0.5)},
        plain=dict(num_key_value_heads=None),
        normed=dict(qk_layernorm=True, hidden_act="gelu", num_attention_heads=3, hidden_size=24),
        partial=dict(
            tie_word_embeddings=True, hidden_act="relu", layer_norm_eps=1e-3,
            **rope(partial_rotary_factor=0.75),
        ),
        whole=rope("linear", partial_rotary_factor=1.0, factor=2.0),
    )
    phi3 = dict(pad_token_id=None, original_max_position_embeddings=32)
    factors = dict(short_factor=[1.0, 1.2, 1.5, 2.0], long_factor=[1.5, 2.0, 3.0, 5.0])
    family(
        "phi3", {**llama, **phi3, **rope(partial_rotary_factor=1.0)},
        plain={},
        window=dict(sliding_window=5, num_attention_heads=3, hidden_size=24, hidden_act="gelu"),
        partial=dict(tie_word_embeddings=True, **rope(partial_rotary_factor=0.5)),
        longrope_short=dict(
            original_max_position_embeddings=20,
            **rope("longrope", partial_rotary_factor=1.0, **factors),
        ),
        longrope_long=dict(
            original_max_position_embeddings=4,
            **rope("longrope", partial_rotary_factor=1.0, **factors),
        ),
    )
    neox = {key: llama[key] for key in llama if key != "num_key_value_heads"}
    family(
        "gpt_neox", {**neox, **rope(partial_rotary_factor=0.25)},
        parallel={},
        serial=dict(
            use_parallel_residual=False, attention_bias=False, hidden_act="gelu_new",
            **rope(partial_rotary_factor=1.0),
        ),
        heads=dict(
            num_attention_heads=3, hidden_size=24, tie_word_embeddings=True, layer_norm_eps=1e-3,
            **rope("linear", partial_rotary_factor=0.5, factor=2.0),
        ),
    )
    gptj = dict(n_positions=32, n_embd=16, n_layer=2, n_head=2)
    family(
        "gptj", gptj,
        partial=dict(rotary_dim=4),
        whole=dict(rotary_dim=8, n_inner=20, activation_function="relu"),
        heads=dict(rotary_dim=2, n_embd=18, n_head=3, n_inner=24, activation_function="gelu"),
    )
    family(
        "gpt_bigcode", gpt2,
        one_key=dict(n_head=3, n_embd=18),
        many_keys=dict(multi_query=False, tie_word_embeddings=False, n_inner=20),
        unscaled=dict(scale_attn_weights=False, activation_function="gelu"),
    )
    opt = dict(
        hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, dropout=0.0, word_embed_proj_dim=16,
    )
    family(
        "opt", opt,
        pre_norm=dict(pad_token_id=5),
        post_norm=dict(do_layer_norm_before=False, word_embed_proj_dim=12),
        projected=dict(
            word_embed_proj_dim=10, num_attention_heads=3, hidden_size=18, pad_token_id=None,
            activation_function="gelu", tie_word_embeddings=False,
        ),
        bare=dict(enable_bias=False, layer_norm_elementwise_affine=False, pad_token_id=None),
        no_last_norm=dict(_remove_final_layer_norm=True, pad_token_id=None),
    )
    bloom = dict(hidden_size=16, n_layer=2, n_head=2)
    family(
        "bloom", bloom,
        power=dict(n_head=4),
        heads=dict(n_head=3, hidden_size=12, tie_word_embeddings=False),
        after_norm=dict(
            apply_residual_connection_post_layernorm=True, layer_norm_epsilon=1e-3, n_head=5,
            hidden_size=20, n_layer=1,
        ),
    )
    mpt = dict(d_model=16, n_heads=2, n_layers=2, max_seq_len=32, expansion_ratio=4)
    family(
        "mpt", mpt,
        plain=dict(attn_config={}),
        clipped=dict(
            attn_config={"clip_qkv": 0.4, "softmax_scale": 0.7},
            n_heads=3, d_model=12, tie_word_embeddings=False,
        ),
        heads=dict(attn_config={"qk_ln": False}, n_heads=5, d_model=20, n_layers=1),
    )
    falcon = dict(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
        ffn_hidden_size=24,
    )
    family(
        "falcon", {**falcon, **rope()},
        multi_query={},
        separate_keys=dict(multi_query=False, num_attention_heads=2, bias=True),
        serial=dict(parallel_attn=False, tie_word_embeddings=False),
        alibi=dict(
            alibi=True, multi_query=False, parallel_attn=False, bias=True, num_attention_heads=3,
            hidden_size=12,
        ),
        alibi_parallel=dict(alibi=True, activation="relu"),
        new=dict(new_decoder_architecture=True, num_kv_heads=2),
        new_one_norm=dict(
            new_decoder_architecture=True, num_kv_heads=1, num_ln_in_parallel_attn=1, bias=True,
            **rope("linear", factor=2.0),
        ),
        new_alibi=dict(new_decoder_architecture=True, num_kv_heads=2, alibi=True),
    )
    family(
        "olmo2", {**llama, **rope(), "pad_token_id": None},
        plain={},
        biased=dict(attention_bias=True, tie_word_embeddings=True, num_key_value_heads=2),
        padded=dict(
            pad_token_id=1, num_attention_heads=3, hidden_size=24, rms_norm_eps=1e-3,
            **rope("yarn", factor=2.0, original_max_position_embeddings=16),
        ),
    )
    family(
        "granite", {**llama, **rope()},
        multiplied=dict(
            embedding_multiplier=3.0, logits_scaling=1.7, residual_multiplier=0.6,
            attention_multiplier=0.3,
        ),
        biased=dict(
            attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_attention_heads=3,
            hidden_size=24, attention_multiplier=0.35, embedding_multiplier=2.0,
        ),
        plain=dict(attention_multiplier=0.5, logits_scaling=0.5),
    )
    family(
        "cohere", {**llama, **rope(), "pad_token_id": None},
        plain=dict(logit_scale=0.5),
        normed=dict(use_qk_norm=True, attention_bias=True, logit_scale=1.5),
        heads=dict(
            num_attention_heads=3, hidden_size=24, tie_word_embeddings=False, pad_token_id=0,
            layer_norm_eps=1e-3, logit_scale=1.0,
        ),
    )
    family(
        "stablelm", {**llama, **rope(partial_rotary_factor=0.25)},
        serial={},
        parallel=dict(
            use_parallel_residual=True, use_qkv_bias=True, **rope(partial_rotary_factor=0.5),
        ),
        normed=dict(
            qk_layernorm=True, num_attention_heads=3, hidden_size=24, hidden_act="gelu",
            tie_word_embeddings=True, layer_norm_eps=1e-3, **rope(partial_rotary_factor=1.0),
        ),
        normed_parallel=dict(qk_layernorm=True, use_parallel_residual=True),
    )
    family(
        "starcoder2", {**llama, **rope()},
        plain={},
        window=dict(sliding_window=5, num_attention_heads=3, hidden_size=24),
        bare=dict(use_bias=False, tie_word_embeddings=False, hidden_act="gelu", norm_epsilon=1e-3),
    )
    family(
        "smollm3", {**llama, **rope(), "pad_token_id": None},
        interval=dict(no_rope_layer_interval=2),
        listed=dict(
            no_rope_layers=[0, 1], attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
        ),
        windows=dict(
            use_sliding_window=True, sliding_window=4, no_rope_layer_interval=2,
            num_attention_heads=3, hidden_size=24,
        ),
    )
    return cases


# Cases whose generated text ends before the prompt's length reaches the place where transformers
# computes other rotary frequencies than those that cached keys were rotated with.
GENERATED = {"llama-dynamic_long": 3}

# Cases whose configuration transformers 4.51.3 writes too.
V4_CASES = {
    "gpt2-layers_scaled", "gpt2-unscaled", "llama-heads", "llama-padded", "llama-linear",
    "llama-dynamic_long", "llama-yarn", "llama-longrope_long", "llama-llama3", "qwen2-plain",
    "qwen2-windows", "qwen3-plain", "qwen3-windows", "mistral-window", "mistral-full",
    "gemma-plain", "gemma-untied", "gemma2-capped", "gemma2-uncapped", "gemma3_text-pattern",
    "phi-plain", "phi-normed", "phi-whole", "phi3-window", "phi3-partial", "phi3-longrope_long",
    "gpt_neox-parallel", "gpt_neox-serial", "gpt_neox-heads", "gptj-partial",
    "gpt_bigcode-one_key", "gpt_bigcode-many_keys", "opt-pre_norm", "opt-post_norm", "opt-bare",
    "bloom-power", "bloom-after_norm", "mpt-plain", "mpt-clipped", "falcon-multi_query",
    "falcon-alibi", "falcon-new", "falcon-new_one_norm", "olmo2-plain", "granite-multiplied",
    "granite-biased", "cohere-plain", "cohere-normed", "stablelm-parallel", "stablelm-normed",
    "starcoder2-plain", "starcoder2-window",
}
V4_SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import transformers
for path, model_type, head, fields in json.load(sys.stdin):
    config = transformers.AutoConfig.for_model(model_type, **fields)
    config.architectures = [head]
    config.torch_dtype = "float64"
    open(path, "w").write(config.to_json_string())
"""


def spell_in_v4(model_type, fields):
    """The arguments of a configuration as transformers 4 calls them."""
    fields = dict(fields)
    rope = fields.pop("rope_parameters", None)
    if model_type == "gemma":
        fields["hidden_activation"] = fields.pop("hidden_act", None)
    if rope is None:
        return fields
    if "full_attention" in rope:
        fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    is_neox = model_type == "gpt_neox"
    fields["rotary_emb_base" if is_neox else "rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        partial = rope.pop("partial_rotary_factor")
        fields["rotary_pct" if is_neox else "partial_rotary_factor"] = partial
    if rope["rope_type"] != "default":
        kind = rope.pop("rope_type")
        fields["rope_scaling"] = {"type" if model_type == "phi3" else "rope_type": kind, **rope}
    return fields


def write_in_v4(cases, directory):
    """Writes `config.v4.json` with the transformers 4 that is installed in a directory."""
    wanted = []
    for case, model_type, fields in cases:
        if case not in V4_CASES:
            continue
        fields = {"bos_token_id": None, "eos_token_id": None, **spell_in_v4(model_type, fields)}
        if model_type == "mpt":
            fields["attn_config"] = {"attn_pdrop": 0, **fields["attn_config"]}
        head = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        (FOLDER / case).mkdir(parents=True, exist_ok=True)
        wanted.append([str(FOLDER / case / "config.v4.json"), model_type, head, fields])
    command = [sys.executable, "-c", V4_SCRIPT, directory]
    subprocess.run(command, check=True, input=json.dumps(wanted), text=True)


def fnv1a(text):
    """FNV-1a, 64 bits."""
    state = 0xCBF29CE484222325
    for byte in text.encode():
        state = (state ^ byte) * 0x100000001B3 & MASK
    return state


def uniform(name, count):
    """Numbers -1 ≤ x < 1 of splitmix64, whose state starts at the hash of a name."""
    with numpy.errstate(over="ignore"):
        step = numpy.uint64(0x9E3779B97F4A7C15)
        z = numpy.uint64(fnv1a(name)) + step * numpy.arange(1, count + 1, dtype=numpy.uint64)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z = z ^ (z >> numpy.uint64(31))
    return 2.0 * ((z >> numpy.uint64(11)) * 2.0**-53) - 1.0


def draw(case, name, dims):
    """The values of a weight."""
    numbers = uniform(f"{case}:{name}", int(numpy.prod(dims)))
    if name.endswith("bias"):
        values = 0.2 * numbers
    elif len(dims) == 1 or "norm" in name:
        values = 1.0 + 0.2 * numbers
    else:
        values = 0.5 * numbers
    return torch.from_numpy(values.reshape(dims))


def implementation(config):
    """How transformers computes attention: written out, but for the ALiBi of Falcon.

    Written out, transformers 5.23 adds that one twice, to the scores and in the mask.
    """
    return "sdpa" if getattr(config, "alibi", False) else "eager"


def build_model(case, config):
    """A model in evaluation mode with the case's weights, and the tensors that are stored.

    For each of these, the parameter or buffer that it is of, and which elements of that, in its
    own shape: transformers computes with the experts of a layer as one tensor, and stores each by
    itself.
    """
    attention = implementation(config)
    # Grouped products of experts have no float64.
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    places, first = {}, 0
    with torch.no_grad():
        starts = {}
        weights = {**dict(model.named_parameters()), **stored_buffers(model)}
        for name, weight in weights.items():
            starts[name] = first
            weight.copy_(torch.arange(first, first + weight.numel()).reshape(weight.shape))
            first += weight.numel()
        for key, values in saved_weights(model).items():
            least = int(values.min())
            name = max((n for n in starts if starts[n] <= least), key=starts.get)
            places[key] = (name, (values - starts[name]).long())
        for key, (name, elements) in places.items():
            weights[name].view(-1)[elements] = draw(case, key, tuple(elements.shape))
    assert sum(elements.numel() for _, elements in places.values()) == first
    return model.eval(), places


def stored_buffers(model):
    """What is stored beside the parameters, and has no gradient."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # Without copies of what is tied.
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


def stored(places, values):
    """What belongs to parameters, as the tensors that are stored."""
    return {key: values[name].reshape(-1)[elements] for key, (name, elements) in places.items()}


def saved_weights(model):
    """The tensors that transformers saves."""
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        return safetensors.torch.load_file(Path(saved) / "model.safetensors")


def projections(case, name, values):
    """Sums of all values, each times a drawn number: what stands for a tensor."""
    flat = values.reshape(-1).numpy()
    numbers = [uniform(f"{case}:{name}:{k}", flat.size) for k in range(PROJECTIONS)]
    return torch.tensor([float((row * flat).sum()) for row in numbers], dtype=torch.float64)


def configuration(model_type, fields):
    """The configuration, without special tokens but those that are asked for."""
    special = {"bos_token_id": None, "eos_token_id": None}
    return transformers.AutoConfig.for_model(model_type, **{**special, **fields})


def check_saved(case, folder, model, expected):
    """What transformers saves has the weights of `expected`, and loads again to equal logits."""
    for file in sorted(folder.glob("config*.json")):
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            stored = safetensors.torch.load_file(Path(saved) / "model.safetensors")
            wanted = {key.removeprefix("grad.") for key in expected if key.startswith("grad.")}
            assert set(stored) == wanted, f"{case}: {set(stored) ^ wanted}"
            (Path(saved) / "config.json").write_text(file.read_text())
            again = transformers.AutoModelForCausalLM.from_pretrained(
                saved, dtype="auto", attn_implementation=implementation(model.config)
            )
            again.config._experts_implementation = "eager"
        with torch.no_grad():
            logits = again.eval()(expected["input_ids"], use_cache=False).logits
        error = (logits - expected["logits"]).abs().max().item()
        assert error == 0.0, f"{case}: {file.name} loads to logits that differ by {error:.1e}"


def write_case(case, model_type, fields):
    """Computes, checks and writes one case."""
    random = numpy.random.default_rng(fnv1a(case) & 0xFFFFFFFF)
    model, places = build_model(case, configuration(model_type, fields))
    count = sum(weight.numel() for weight in model.parameters())
    assert count <= 10_000, f"{case} has {count} parameters"
    input_ids, labels = make.random_batch(model.config, random)
    if model.config.pad_token_id is not None:
        input_ids[0, 4] = input_ids[1, 9] = model.config.pad_token_id
    batch = {"input_ids": input_ids, "labels": labels}
    logits, loss, grads = make.gradients(model, batch)
    worst = check_gradients(model, batch, grads, random)

    expected = {**batch, "logits": logits, "loss": loss}
    buffers = stored_buffers(model)
    grads |= {name: torch.zeros_like(buffer) for name, buffer in buffers.items()}
    expected |= {f"grad.{key}": grad for key, grad in stored(places, grads).items()}
    losses, weights = make.train(model, batch, None)
    weights |= buffers
    expected["adamw.loss"] = torch.stack(losses)
    trained = stored(places, {name: weight.detach() for name, weight in weights.items()})
    expected |= {f"adamw.{name}": projections(case, name, w) for name, w in trained.items()}
    make.GENERATED = GENERATED.get(case, 12)
    make.VARIETY = min(4, make.GENERATED)
    expected["prompt"], expected["generated"], lead = make.generate(model, random)

    folder = FOLDER / case
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        (folder / "config.json").write_text((Path(saved) / "config.json").read_text())
    check_saved(case, folder, model, expected)
    versions = [f"{it.__name__} {it.__version__}" for it in (torch, transformers, numpy)]
    expected = {key: value.contiguous() for key, value in expected.items()}
    content = safetensors.torch.save(expected, metadata={"made_with": ", ".join(versions)})
    (folder / "expected.safetensors").write_bytes(content)
    print(f"{case}: {count} parameters, loss {loss.item():.4f}, differences within {worst:.0e}, "
          f"tokens lead by {lead:.3f}, {len(content)} bytes", flush=True)


def check_gradients(model, batch, grads, random):
    """Compares derivatives along drawn directions through all weights with five-point differences.

    As `make.check_gradients` does for each weight alone, but that the best of several steps
    counts: curved losses and those with kinks need short ones, whose rounding errors are larger.
    A row that is padding has no gradient though the loss depends on it, and stays where it is.
    """
    weights = dict(model.named_parameters())
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    embedding = model.get_input_embeddings()

    def loss_at(distance, direction):
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(start[name] + distance * direction[name])
            return model(batch["input_ids"], labels=batch["labels"]).loss.item()

    worst = 0.0
    for _ in range(DIRECTIONS):
        direction = {
            name: torch.from_numpy(random.standard_normal(tuple(weight.shape)))
            for name, weight in weights.items()
        }
        for name, weight in weights.items():
            if weight is embedding.weight and embedding.padding_idx is not None:
                direction[name][embedding.padding_idx] = 0.0
        norm = sum((it**2).sum() for it in direction.values()).sqrt()
        direction = {name: it / norm for name, it in direction.items()}
        slope = sum((grads[name] * direction[name]).sum().item() for name in weights)
        errors = []
        for h in STEPS:
            near = loss_at(h, direction) - loss_at(-h, direction)
            far = loss_at(2 * h, direction) - loss_at(-2 * h, direction)
            errors.append(abs((8 * near - far) / (12 * h) - slope))
            if errors[-1] < 1e-10:
                break
        worst = max(worst, min(errors))
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(start[name])
    assert worst < 1e-9, f"finite differences are off by {worst:.1e}"
    return worst


class Widen(make.Widen):
    """Replaces bfloat16 too: Falcon's ALiBi is rounded to it, whatever the model's dtype."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.bfloat16:
            function = torch.Tensor.double
        return super().__torch_function__(function, types, args, kwargs)


def main():
    """Writes the cases whose names start with one of the arguments, or all."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wanted = sys.argv[1:] or [""]
    cases = [case for case in case_list() if any(case[0].startswith(start) for start in wanted)]
    if "TRANSFORMERS_4" in os.environ:
        write_in_v4(cases, os.environ["TRANSFORMERS_4"])
    with make.NoFloat32(), Widen():
        for case, model_type, fields in cases:
            write_case(case, model_type, fields)


if __name__ == "__main__":
    main()
