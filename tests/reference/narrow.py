"""How far PyTorch in bf16 and f16 is from the truth, for the families of `families/`.

    python tests/reference/narrow.py [PREFIX...] > tests/reference/narrow.json

For each case the loss and all gradients of one step are computed from its weights and batch, in two
ways: weights and activations in the narrow type, and weights of f32 under `torch.autocast`, which
keeps the stream of residuals in f32, too. The distance to `expected.safetensors`, which is f64, is
the root of the mean of the squared relative differences of the loss and of each gradient, in parts
of its norm; of one that is tiny beside the others, in parts of a thousandth of the largest norm.
The loss of f16 is multiplied by 1024 while gradients flow back.
"""

import json
import math
import sys

import safetensors.torch
import torch
import transformers

import families

SCALE = {"bf16": 1.0, "f16": 1024.0}


def step(model, batch, scale):
    """The loss and the gradients of a step, as f64."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    (loss * scale).backward()
    grads = {name: weight.grad.double() / scale for name, weight in model.named_parameters()}
    return loss.double().item(), grads


def distance(expected, names, loss, grads):
    """How far a step is from the one that is expected."""
    truth = {name: expected[f"grad.{names[name]}"] for name in grads}
    floor = 1e-3 * max(grad.norm().item() for grad in truth.values())
    squares = ((loss - expected["loss"].item()) / expected["loss"].item()) ** 2
    for name, grad in grads.items():
        part = (grad - truth[name]).norm().item() / max(truth[name].norm().item(), floor)
        squares += part**2
    return math.sqrt(squares / (1 + len(grads)))


def distances(case, model_type, fields):
    """The distances of a case, by type and way."""
    config = families.configuration(model_type, fields)
    expected = safetensors.torch.load_file(families.FOLDER / case / "expected.safetensors")
    batch = {key: expected[key] for key in ("input_ids", "labels")}
    found = {}
    for kind, dtype in {"bf16": torch.bfloat16, "f16": torch.float16}.items():
        # `to` rounds in place, so that each way has a model of its own.
        single, names = families.build_model(case, config)
        single = single.float()
        with torch.autocast("cpu", dtype=dtype):
            found[f"{kind} autocast"] = distance(expected, names, *step(single, batch, SCALE[kind]))
        narrow, _ = families.build_model(case, config)
        narrow = narrow.to(dtype)
        found[kind] = distance(expected, names, *step(narrow, batch, SCALE[kind]))
    return found


def main():
    """Prints the distances of the cases whose names start with one of the arguments."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wanted = sys.argv[1:] or ["gpt2-", "llama-", "qwen2-"]
    found = {}
    for case, model_type, fields in families.case_list():
        if any(case.startswith(start) for start in wanted):
            torch.set_default_dtype(torch.float64)
            found[case] = distances(case, model_type, fields)
            print(case, found[case], file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
