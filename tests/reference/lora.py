"""Writes what peft computes for adapted models of this directory, in float64.

    python tests/reference/lora.py

needs what `make.py` needs, and peft; README.md names the versions used. For each case it draws
adapters, none of them zero, and writes `lora/CASE.safetensors`: the adapters and their gradients
under peft's names, the loss, and the merged weights. It proves as it runs that gradients agree with
finite differences, and that the frozen weights have none.
"""

from pathlib import Path

import numpy
import peft
import safetensors.torch
import torch
import transformers

from make import NoFloat32, Widen

HERE = Path(__file__).resolve().parent
CASES = {
    "gpt2-tiny": dict(r=4, lora_alpha=6, target_modules=["c_attn", "c_proj", "c_fc"],
                      fan_in_fan_out=True),
    "llama-tiny": dict(r=3, lora_alpha=16,
                       target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]),
}


def adapted(name, settings, random):
    """The model of a case with drawn adapters."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        HERE / name, attn_implementation="eager", dtype=torch.float64)
    model = peft.get_peft_model(base, peft.LoraConfig(
        task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **settings))
    model = model.double().eval()
    with torch.no_grad():
        for parameter in trained(model).values():
            noise = random.standard_normal(tuple(parameter.shape))
            parameter.copy_(0.2 * torch.from_numpy(noise))
    return model


def trained(model):
    """The adapters under the names in files of peft."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in named)
    return {name.replace(".default", ""): p for name, p in named.items()}


def loss_of(model, batch):
    return model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss


def check_gradients(model, batch, random):
    """Compares one directional derivative per adapter with a five-point difference."""
    step = 1e-4
    for name, parameter in trained(model).items():
        direction = torch.from_numpy(random.standard_normal(tuple(parameter.shape)))
        start, total = parameter.detach().clone(), 0.0
        with torch.no_grad():
            for times, factor in [(-2, 1), (-1, -8), (1, 8), (2, -1)]:
                parameter.copy_(start + times * step * direction)
                total += factor * loss_of(model, batch).item()
            parameter.copy_(start)
        difference = total / (12 * step)
        exact = (parameter.grad * direction).sum().item()
        assert abs(difference - exact) < 1e-8 * max(1.0, abs(exact)), (name, difference, exact)


def main():
    torch.set_num_threads(1)
    for number, (name, settings) in enumerate(CASES.items()):
        random = numpy.random.default_rng(number)
        batch = safetensors.torch.load_file(HERE / name / "expected.safetensors")
        with Widen():
            model = adapted(name, settings, random)
            with NoFloat32():
                loss = loss_of(model, batch)
                loss.backward()
                check_gradients(model, batch, random)
            frozen = [p for p in model.parameters() if not p.requires_grad]
            assert frozen and all(p.grad is None for p in frozen)
            tensors = {"loss": loss.detach().reshape(1)}
            for key, parameter in trained(model).items():
                tensors[key] = parameter.detach().clone()
                tensors[f"grad.{key}"] = parameter.grad.clone()
            changed = {key.split(".lora_")[0].removeprefix("base_model.model.") + ".weight"
                       for key in trained(model)}
            merged = model.merge_and_unload()
            state = merged.state_dict()
            tensors.update({f"merged.{key}": state[key].clone() for key in changed})
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        safetensors.torch.save_file(tensors, HERE / "lora" / f"{name}.safetensors")
        print(name, loss.item(), len(tensors), "tensors")


if __name__ == "__main__":
    main()
