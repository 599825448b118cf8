"""Trains the cases of `families/` for two steps, exports them, and compares transformers' logits.

    python tests/reference/check_export.py target/debug/gantline [CASE...]

For each case, or those whose names start with one of the arguments, the drawn weights are written
as transformers saves them, `gantline train` takes two steps in float64, `gantline export --to hf`
writes a directory, transformers loads it, and `gantline run` computes the logits of the same
directory. Everything is computed as `families.py` computes it. No part of the test suite.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import safetensors.torch
import torch
import transformers

import families
import make

SEQ = 16
# Of the largest logit. Chosen: both compute in float64, and sum in other orders.
ERROR_MAX = 1e-12


def write_tokenizer(path, count):
    """A tokeniser whose token i is the word `wi`."""
    vocab = {f"w{i}": i for i in range(count)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    parts = dict.fromkeys(
        ["truncation", "padding", "normalizer", "post_processor", "decoder"], None
    )
    spaces = {"type": "WhitespaceSplit"}
    text = {"version": "1.0", "added_tokens": [], "pre_tokenizer": spaces, "model": model, **parts}
    path.write_text(json.dumps(text))


def write_model(case, folder):
    """The configuration of a case and its drawn weights; returns what is expected of it."""
    expected = safetensors.torch.load_file(families.FOLDER / case / "expected.safetensors")
    shapes = {k.removeprefix("grad."): tuple(v.shape) for k, v in expected.items() if "grad." in k}
    weights = {name: families.draw(case, name, dims) for name, dims in shapes.items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((families.FOLDER / case / "config.json").read_text())
    write_tokenizer(folder / "tokenizer.json", 41)
    return expected


def difference(gantline, case, folder):
    """How far the logits of an exported case are from transformers', and how far it moved."""
    model = folder / "model"
    model.mkdir()
    expected = write_model(case, model)
    random = numpy.random.default_rng(families.fnv1a(case) & 0xFFFFFFFF)
    words = (f"w{token}" for token in random.integers(0, 41, 2000))
    (folder / "text.txt").write_text(" ".join(words))
    numpy.save(folder / "ids.npy", expected["input_ids"].numpy())

    def run(*words):
        words = [gantline, *(str(word) for word in words)]
        subprocess.run(words, check=True, cwd=folder, capture_output=True, text=True)

    run("train", "model", "--data", "text.txt", "--steps", 2, "--seq", SEQ, "--gbs", 2,
        "--val-every", 0, "--dtype", "f64", "--out", "run")
    run("export", "run", "--to", "hf", "-o", "exported")
    run("run", "exported", "--input", "input_ids=ids.npy", "--dtype", "f64", "-o", "out")
    ours = torch.from_numpy(numpy.load(folder / "out" / "logits.npy"))
    # From here on everything is float64, as the weights are.
    config = transformers.AutoConfig.from_pretrained(folder / "exported")
    attention = families.implementation(config)
    with make.NoFloat32(), families.Widen(), torch.no_grad():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "exported", dtype=torch.float64, attn_implementation=attention
        )
        loaded.config._experts_implementation = "eager"
        theirs = loaded.eval()(expected["input_ids"], use_cache=False).logits
    scale = theirs.abs().max()
    moved = (theirs - expected["logits"]).abs().max() / scale
    return ((ours - theirs).abs().max() / scale).item(), moved.item()


def main():
    """Prints the difference of each case; exits with 1 where one is too large."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    gantline, wanted = str(Path(sys.argv[1]).resolve()), sys.argv[2:] or [""]
    failed = []
    for case in sorted(path.name for path in families.FOLDER.iterdir()):
        if not any(case.startswith(start) for start in wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                off, moved = difference(gantline, case, Path(folder))
            except subprocess.CalledProcessError as error:
                print(f"{case}: {error.stderr}")
                failed.append(case)
                continue
        print(f"{case}: logits differ by {off:.1e}; training moved them by {moved:.1e}", flush=True)
        if not off <= ERROR_MAX or moved < 1e-6:
            failed.append(case)
    print(f"failed: {failed}" if failed else "all agree")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
