"""Exported models on this machine: Gantline beside ONNX Runtime, as the ratio of their times.

    python benches/onnx_runtime.py target/release/gantline [--threads N] [--rounds N]
        [--processor-time] [CASE...]

Both run on the same cores, with as many threads, in turns, each on the same file and inputs, ONNX
Runtime with all of its optimisations. A time is the median of all runs. Results are compared, too.
Where other programs use the machine, processor time says more than time that passes: with
`--processor-time` each is that of a run, by the difference of a command of 1 and one of many runs,
and no thread of ONNX Runtime waits in a loop.
Needs torch, torchvision, transformers, onnxscript and onnxruntime; nothing is downloaded: weights
are random. Models are exported once, into the folder of temporary files.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torchvision
import transformers
from torch import nn

FOLDER = Path(tempfile.gettempdir()) / "gantline-exports"
RUNS = 10


class First(nn.Module):
    """A model of transformers called with inputs by their names: its first result."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs):
        return self.model(**dict(zip(self.names, inputs)), return_dict=False)[0]


def tokens(batch, length, vocabulary):
    return torch.randint(0, vocabulary, (batch, length))


def bert():
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    mask = torch.ones(2, 128, dtype=torch.int64)
    mask[1, 100:] = 0
    inputs = {"input_ids": tokens(2, 128, config.vocab_size), "attention_mask": mask}
    return First(transformers.BertModel(config), list(inputs)), inputs


def gpt2():
    config = transformers.GPT2Config(use_cache=False)
    inputs = {"input_ids": tokens(1, 128, config.vocab_size)}
    inputs["attention_mask"] = torch.ones(1, 128, dtype=torch.int64)
    return First(transformers.GPT2LMHeadModel(config), list(inputs)), inputs


def convolutional(model):
    return model(), {"image": torch.randn(1, 3, 224, 224)}


def resnet18():
    return convolutional(torchvision.models.resnet18)


def mobilenet():
    return convolutional(torchvision.models.mobilenet_v2)


def convnext():
    return convolutional(torchvision.models.convnext_tiny)


def vit():
    config = transformers.ViTConfig(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536
    )
    inputs = {"pixel_values": torch.randn(1, 3, 224, 224)}
    return First(transformers.ViTModel(config), list(inputs)), inputs


BUILD = dict(
    bert=bert, resnet18=resnet18, vit=vit, gpt2=gpt2, mobilenet=mobilenet, convnext=convnext
)
CASES = {
    f"{name}-{exporter}": (build, exporter == "dynamo")
    for name, build in BUILD.items()
    for exporter in ("legacy", "dynamo")
}


def export(name):
    """Writes NAME.onnx and its inputs, and returns the path of the former and the inputs."""
    build, dynamo = CASES[name]
    path = FOLDER / f"{name}.onnx"
    stored = FOLDER / f"{name}.npz"
    if not (path.exists() and stored.exists()):
        FOLDER.mkdir(exist_ok=True)
        torch.manual_seed(0)
        model, inputs = build()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model.eval(), tuple(inputs.values()), str(path), dynamo=dynamo,
                opset_version=18 if dynamo else 17, input_names=list(inputs),
            )
        arrays = {key: value.numpy() for key, value in inputs.items()}
        for key, array in arrays.items():
            np.save(FOLDER / f"{name}.{key}.npy", array)
        np.savez(stored, **arrays)
    return path, dict(np.load(stored))


def processor_time(who, run):
    """What a function returns, and the seconds of user code that it took."""
    before = resource.getrusage(who).ru_utime
    result = run()
    return result, resource.getrusage(who).ru_utime - before


def time_gantline(binary, name, path, inputs, runs):
    """Times of runs, and the results."""
    words = [binary, "run", str(path), "--bench", str(runs), "--json", "-o", str(FOLDER / name)]
    for key in inputs:
        words += ["--input", f"{key}={FOLDER / f'{name}.{key}.npy'}"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stderr.splitlines():
        if "interpreter" in line:
            print(f"  {name}: {line}")
    document = json.loads(done.stdout)
    arrays = [np.load(FOLDER / name / port["file"]) for port in document["outputs"]]
    return document["seconds"], arrays


def time_runtime(session, inputs, runs):
    results = session.run(None, inputs)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        session.run(None, inputs)
        times.append(time.perf_counter() - start)
    return times, results


def seconds_of_a_run(who, timed):
    """Processor time of one run more."""
    (_, few), (_, many) = (processor_time(who, lambda: timed(n)) for n in (1, RUNS + 1))
    return (many - few) / RUNS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    names = [n for n in CASES if not args.cases or n.startswith(tuple(args.cases))]
    exported = {name: export(name) for name in names}
    # Both follow the cores that they may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    print(f"{'model':<18} {'Gantline':>10} {'ONNX Runtime':>14} {'ratio':>6} {'error':>9}")
    for name, (path, inputs) in exported.items():
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = args.threads
        if args.processor_time:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        ours, theirs = [], []

        def gantline(runs):
            return time_gantline(args.binary, name, path, inputs, runs)

        def runtime(runs):
            return time_runtime(session, inputs, runs)

        for _ in range(args.rounds):
            times, found = gantline(RUNS)
            ours += times
            times, wanted = runtime(RUNS)
            theirs += times
            if args.processor_time:
                ours = ours[:-RUNS] + [seconds_of_a_run(resource.RUSAGE_CHILDREN, gantline)]
                theirs = theirs[:-RUNS] + [seconds_of_a_run(resource.RUSAGE_SELF, runtime)]
        off = [np.abs(f - w).max() / np.abs(w).max() for f, w in zip(found, wanted, strict=True)]
        ours, theirs = statistics.median(ours), statistics.median(theirs)
        line = f"{name:<18} {ours * 1e3:>7.2f} ms {theirs * 1e3:>11.2f} ms"
        print(f"{line} {ours / theirs:>6.2f} {max(off):>9.1e}", flush=True)


if __name__ == "__main__":
    main()
