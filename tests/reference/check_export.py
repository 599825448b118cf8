"""Loads what `gantline export --to hf` wrote with transformers, and compares the logits.

    python tests/reference/check_export.py DIRECTORY LOGITS.safetensors

`LOGITS.safetensors` holds `input_ids` and `logits`, as `families/*/expected.safetensors` do: for a
run of no steps of a case, that file itself. Everything is computed as `families.py` computes it.
No part of the test suite.
"""

import sys

import safetensors.torch
import torch
import transformers

import families
import make


def main():
    """Prints the largest difference over the largest logit; exits with 1 above 1e-5."""
    directory, reference = sys.argv[1:]
    torch.set_default_dtype(torch.float64)
    transformers.logging.set_verbosity_error()
    wanted = safetensors.torch.load_file(reference)
    # Weights of a run are as wide as the run was; from here on everything is float64.
    attention = families.implementation(transformers.AutoConfig.from_pretrained(directory))
    with families.Widen():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, attn_implementation=attention
        ).eval()
    with make.NoFloat32(), families.Widen(), torch.no_grad():
        logits = model(wanted["input_ids"], use_cache=False).logits
    error = ((logits - wanted["logits"]).abs().max() / wanted["logits"].abs().max()).item()
    print(f"{directory}: logits differ by {error:.1e}")
    sys.exit(error > 1e-5)


if __name__ == "__main__":
    main()
