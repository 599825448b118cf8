"""Writes the reference values in this directory: tiny GPT-2 and Llama models in float64.

    python tests/reference/make.py

needs torch, transformers (5 or later), safetensors and numpy; README.md names the versions used.
For each case it writes `config.json` and `model.safetensors` exactly as transformers saves them,
and `expected.safetensors`, whose tensors README.md lists. It downloads nothing.

transformers computes some steps in float32 whatever the model's dtype: the mean square of
RMSNorm, the rotary table, the softmax of Llama's attention, the logits that enter the loss.
Reference values must be better than what is tested against them, so everything here runs inside
`Widen`, which turns every request for float32 into one for float64, and `NoFloat32`, which fails
on any tensor that is still narrower. `check_gradients` compares with finite differences.
"""

import json
import math
import shutil
import tempfile
from pathlib import Path

import numpy
import safetensors.torch
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
BATCH, SEQUENCE = 2, 16
PROMPT, GENERATED = 5, 24
ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-4, weight_decay=0.1)
STEPS = 5
MAX_NORM = 0.5
IGNORED = -100

# Prompts are drawn until every token of the greedy continuation leads the runner-up's logit by
# MARGIN, so that a float32 engine must find the same tokens, and VARIETY of them are different.
MARGIN = 0.01
VARIETY = 6

NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
NO_SPECIAL_TOKENS = dict(bos_token_id=None, eos_token_id=None)

CASES = {
    "gpt2-tiny": GPT2Config(
        vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4,
        **NO_DROPOUT, **NO_SPECIAL_TOKENS,
    ),
    "gpt2-untied": GPT2Config(
        vocab_size=61, n_positions=32, n_embd=32, n_layer=1, n_head=2, n_inner=48,
        activation_function="gelu_new", tie_word_embeddings=False,
        **NO_DROPOUT, **NO_SPECIAL_TOKENS,
    ),
    "llama-tiny": LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        **NO_SPECIAL_TOKENS,
    ),
    "llama-bias-tied": LlamaConfig(
        vocab_size=67, hidden_size=24, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=3, num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
        **NO_SPECIAL_TOKENS,
    ),
}

# The cases that also get `config.v4.json`, the same model as transformers 4 spells it.
SPELLED_IN_V4 = ["gpt2-untied", "llama-bias-tied"]
V4 = "4.51.3"


class Widen(TorchFunctionMode):
    """Replaces float32 by float64 in every call into torch."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double

        def widen(leaf):
            return torch.float64 if leaf is torch.float32 else leaf

        return function(*tree_map(widen, args), **tree_map(widen, kwargs or {}))


class NoFloat32(TorchDispatchMode):
    """Fails when an operation takes or returns a floating-point tensor narrower than float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                assert leaf.dtype == torch.float64, f"{function} uses {leaf.dtype}"
        return result


def build_model(config, random):
    """A model in evaluation mode whose every parameter, biases and norms too, is random."""
    family = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}[config.model_type]
    model = family._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.from_numpy(random.standard_normal(tuple(weight.shape)))
            if weight.ndim == 2:
                weight.copy_(0.2 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            else:
                weight.copy_(1 + 0.1 * noise)
    return model


def random_batch(config, random):
    """`input_ids`, and `labels` equal to them but for three ignored positions.

    Labels are not shifted: the model's loss compares position s with label s + 1.
    """
    input_ids = torch.from_numpy(random.integers(config.vocab_size, size=(BATCH, SEQUENCE)))
    labels = input_ids.clone()
    for b, s in [(0, 3), (0, SEQUENCE - 1), (1, 7)]:
        labels[b, s] = IGNORED
    return input_ids, labels


def gradients(model, batch):
    """Logits, loss and the gradient of every parameter, by name."""
    model.zero_grad()
    output = model(batch["input_ids"], labels=batch["labels"], use_cache=False)
    output.loss.backward()
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return output.logits.detach(), output.loss.detach(), grads


def check_gradients(model, batch, grads, random):
    """Compares one directional derivative per parameter with a five-point difference.

    With a step of 1e-3 its truncation and rounding errors are both about 1e-12; one float32
    rounding anywhere would disturb it by about 1e-4.
    """
    h = 1e-3
    worst = 0.0
    for name, weight in model.named_parameters():
        start = weight.detach().clone()
        direction = torch.from_numpy(random.standard_normal(tuple(weight.shape)))
        direction /= direction.norm()

        def loss_at(t):
            with torch.no_grad():
                weight.copy_(start + t * h * direction)
                return model(batch["input_ids"], labels=batch["labels"]).loss.item()

        near, far = loss_at(1) - loss_at(-1), loss_at(2) - loss_at(-2)
        with torch.no_grad():
            weight.copy_(start)
        error = abs((8 * near - far) / (12 * h) - (grads[name] * direction).sum().item())
        worst = max(worst, error)
    assert worst < 1e-9, f"finite differences are off by {worst:.1e}"
    return worst


def train(model, batch, max_norm):
    """The losses before each of `STEPS` AdamW updates, and the parameters after the last.

    Weight decay applies to every parameter. The model is left as it was.
    """
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **ADAMW)
    losses = []
    for _ in range(STEPS):
        _, loss, _ = gradients(model, batch)
        losses.append(loss)
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)
            assert norm > 1.1 * max_norm, f"the gradient norm {norm:.3f} is hardly clipped"
        optimizer.step()
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(start[name])
    return losses, weights


def generate(model, random):
    """A random prompt, its greedy continuation, and the least lead of a chosen token."""
    while True:
        prompt = torch.from_numpy(random.integers(model.config.vocab_size, size=(1, PROMPT)))
        tokens, lead = prompt, math.inf
        for _ in range(GENERATED):
            with torch.no_grad():
                last = model(tokens, use_cache=False).logits[0, -1]
            best, second = last.topk(2).values.tolist()
            lead = min(lead, best - second)
            tokens = torch.cat([tokens, last.argmax().reshape(1, 1)], dim=1)
        if lead >= MARGIN and tokens[0, PROMPT:].unique().numel() >= VARIETY:
            break
    cached = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, use_cache=True,
        max_new_tokens=GENERATED, pad_token_id=0,
    )
    assert torch.equal(tokens, cached), "generation with and without cache disagree"
    return prompt, tokens, lead


def spell_in_v4(config):
    """The dictionary of a saved `config.json`, as transformers `V4` would have saved it."""
    config = dict(config)
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = V4
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        assert rope["rope_type"] == "default"
        config["rope_theta"] = rope["rope_theta"]
        config["rope_scaling"] = None
    # Version 4 writes these only where they differ from their defaults, which these are.
    for key, default in [("add_cross_attention", False), ("pad_token_id", None)]:
        assert config.pop(key, default) == default
    return dict(sorted(config.items()))


def check_reload(case_dir, config_file, batch, logits):
    """The written directory, read by transformers with `config_file`, gives the same logits."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copy(case_dir / config_file, Path(copy) / "config.json")
        shutil.copy(case_dir / "model.safetensors", copy)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            copy, dtype="auto", attn_implementation="eager"
        )
        with torch.no_grad():
            again = model.eval()(batch["input_ids"], use_cache=False).logits
    assert torch.equal(logits, again), f"{case_dir.name}/{config_file} reloads differently"


def write_model(model, case_dir):
    """`config.json` and `model.safetensors`, and `config.v4.json` where the case has one."""
    case_dir.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        for file in ["config.json", "model.safetensors"]:
            shutil.copyfile(Path(saved) / file, case_dir / file)
    if case_dir.name in SPELLED_IN_V4:
        config = json.loads((case_dir / "config.json").read_text())
        text = json.dumps(spell_in_v4(config), indent=2) + "\n"
        (case_dir / "config.v4.json").write_text(text)


def write_case(name, config, random):
    """Computes, checks and writes one case."""
    model = build_model(config, random)
    input_ids, labels = random_batch(config, random)
    batch = {"input_ids": input_ids, "labels": labels}
    logits, loss, grads = gradients(model, batch)
    worst = check_gradients(model, batch, grads, random)

    expected = {**batch, "logits": logits, "loss": loss}
    expected |= {f"grad.{weight}": grad for weight, grad in grads.items()}
    for run, max_norm in [("adamw", None), ("clip", MAX_NORM)]:
        losses, weights = train(model, batch, max_norm)
        expected |= {f"{run}.{k}.loss": loss for k, loss in enumerate(losses)}
        expected |= {f"{run}.{STEPS}.{weight}": value for weight, value in weights.items()}
    expected["prompt"], expected["generated"], lead = generate(model, random)

    case_dir = HERE / name
    write_model(model, case_dir)
    saved = safetensors.torch.load_file(case_dir / "model.safetensors")
    assert {f"grad.{weight}" for weight in saved} == {key for key in expected if "grad." in key}
    assert all(value.dtype == torch.float64 for value in saved.values())
    for config_file in sorted(case_dir.glob("config*.json")):
        check_reload(case_dir, config_file.name, batch, logits)

    # One entry of metadata, since the order of several is not the same in every run.
    versions = [f"{it.__name__} {it.__version__}" for it in (torch, transformers, numpy)]
    expected = {key: value.contiguous() for key, value in expected.items()}
    content = safetensors.torch.save(expected, metadata={"made_with": ", ".join(versions)})
    (case_dir / "expected.safetensors").write_bytes(content)
    largest = max(grad.abs().max().item() for grad in grads.values())
    smallest = min(grad.abs().max().item() for grad in grads.values())
    print(
        f"{name}: loss {loss.item():.6f}, largest gradient {largest:.2e} (of the flattest weight "
        f"{smallest:.1e}), finite differences within {worst:.0e}, tokens lead by {lead:.3f}"
    )


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with NoFloat32(), Widen():
        for seed, (name, config) in enumerate(CASES.items()):
            write_case(name, config, numpy.random.default_rng(seed))


if __name__ == "__main__":
    main()
