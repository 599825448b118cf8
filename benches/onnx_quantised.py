"""Models that ONNX Runtime's quantiser made: Gantline beside ONNX Runtime, and both beside f32.

    python benches/onnx_quantised.py target/release/gantline [--threads N] [--rounds N]
        [--processor-time] [CASE...]

Both run on the same cores, with as many threads, in turns, each on the same file and inputs, ONNX
Runtime with all of its optimisations. A time is the median of all runs; with `--processor-time` it
is that of a run of all threads, by the difference of a command of 1 and one of many runs, and no
thread of ONNX Runtime waits in a loop. Memory is the most that the process of `gantline run` held.
Of each model there are the f32 one and the quantised one, whose name ends in `-8`. Results are
compared: numbers of 8 bits may differ by one where a quotient is rounded.
Needs numpy, onnx and onnxruntime; nothing is downloaded: weights are random. Models are made once,
into the folder of temporary files.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization

FOLDER = Path(tempfile.gettempdir()) / "gantline-quantised"
RUNS = 10
# A program that says how much memory its child held.
PEAK = "import resource,subprocess,sys;r=subprocess.run(sys.argv[1:]);"
PEAK += "print('peak',resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,file=sys.stderr);"
PEAK += "sys.exit(r.returncode)"


def model(nodes, weights, dims):
    """A model of one input `x` and one output `y`, whose dims are known."""
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "model", [x], [y], tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 8
    return onnx.shape_inference.infer_shapes(made)


def feed_forward(rows, width, layers):
    """Layers of `width` to four times as many and back, added to their input."""
    random, nodes, weights, x = np.random.default_rng(0), [], {}, "x"
    for at in range(layers):
        sizes = [(width, 4 * width), (4 * width, width)]
        for name, (k, n) in zip((f"up{at}", f"down{at}"), sizes):
            weights[name] = (random.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32)
            weights[f"{name}b"] = random.standard_normal(n).astype(np.float32) * 0.1
        names = [f"{letter}{at}" for letter in "abcde"]
        a, b, c, d, e = names
        nodes += [
            helper.make_node("MatMul", [x, f"up{at}"], [a]),
            helper.make_node("Add", [a, f"up{at}b"], [b]),
            helper.make_node("Relu", [b], [c]),
            helper.make_node("MatMul", [c, f"down{at}"], [d]),
            helper.make_node("Add", [d, f"down{at}b"], [e]),
            helper.make_node("Add", [e, x], ["y" if at == layers - 1 else f"x{at}"]),
        ]
        x = f"x{at}"
    return model(nodes, weights, [rows, width])


def convolutions(channels, size, layers):
    """Convolutions of 3 × 3, each followed by a rectifier."""
    random, nodes, weights, x = np.random.default_rng(0), [], {}, "x"
    for at in range(layers):
        w = random.standard_normal((channels, channels, 3, 3)) / np.sqrt(9 * channels)
        weights[f"w{at}"] = w.astype(np.float32)
        weights[f"b{at}"] = random.standard_normal(channels).astype(np.float32) * 0.1
        y = "y" if at == layers - 1 else f"x{at}"
        nodes += [
            helper.make_node("Conv", [x, f"w{at}", f"b{at}"], [f"c{at}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{at}"], [y]),
        ]
        x = y
    return model(nodes, weights, [1, channels, size, size])


class Calibration(quantization.CalibrationDataReader):
    """One sample."""

    def __init__(self, x):
        self.samples = iter([{"x": x}])

    def get_next(self):
        return next(self.samples, None)


def dynamically(source, target, _):
    quantization.quantize_dynamic(source, target)


def statically(source, target, x):
    quantization.quantize_static(
        source, target, Calibration(x), quant_format=quantization.QuantFormat.QOperator,
        activation_type=quantization.QuantType.QUInt8, op_types_to_quantize=["MatMul", "Conv"],
    )


CASES = {
    "feed-forward": (lambda: feed_forward(128, 768, 4), dynamically),
    "feed-forward-static": (lambda: feed_forward(128, 768, 4), statically),
    "one-row": (lambda: feed_forward(1, 768, 4), dynamically),
    "convolutions": (lambda: convolutions(64, 56, 4), statically),
}


def files(name):
    """The paths of the model, of the quantised one and of the input, made where they are not."""
    build, quantise = CASES[name]
    paths = [FOLDER / f"{name}.onnx", FOLDER / f"{name}-8.onnx", FOLDER / f"{name}.npy"]
    if not all(path.exists() for path in paths):
        FOLDER.mkdir(exist_ok=True)
        made = build()
        dims = [d.dim_value for d in made.graph.input[0].type.tensor_type.shape.dim]
        x = np.random.default_rng(1).standard_normal(dims).astype(np.float32)
        onnx.save(made, paths[0])
        np.save(paths[2], x)
        quantise(paths[0], paths[1], x)
    return paths


def time_gantline(binary, path, x, runs):
    """Times of runs, the result, and the most MiB that the process held."""
    words = [sys.executable, "-c", PEAK, binary, "run", str(path), "--bench", str(runs), "--json"]
    words += ["-o", str(FOLDER / "out"), "--input", f"x={x}"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stderr.splitlines():
        if "interpreter" in line:
            print(f"  {path.name}: {line}")
    peak = int(re.search(r"peak (\d+)", done.stderr).group(1)) / 1024
    document = json.loads(done.stdout)
    return document["seconds"], np.load(FOLDER / "out" / document["outputs"][0]["file"]), peak


def time_runtime(session, x, runs):
    result = session.run(None, {"x": x})[0]
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        session.run(None, {"x": x})
        times.append(time.perf_counter() - start)
    return times, result


def seconds_of_a_run(who, timed):
    """Processor time of one run more."""
    used = []
    for runs in (1, RUNS + 1):
        before = resource.getrusage(who).ru_utime
        timed(runs)
        used.append(resource.getrusage(who).ru_utime - before)
    return (used[1] - used[0]) / RUNS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    print(f"{'model':<24} {'Gantline':>11} {'memory':>9} {'ONNX Runtime':>13} ratio  error")
    for name in [n for n in CASES if not args.cases or n in args.cases]:
        *models, stored = files(name)
        x = np.load(stored)
        for path in models:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = args.threads
            if args.processor_time:
                options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
            ours, theirs = [], []

            def gantline(runs):
                return time_gantline(args.binary, path, stored, runs)

            def runtime(runs):
                return time_runtime(session, x, runs)

            for _ in range(args.rounds):
                if args.processor_time:
                    ours.append(seconds_of_a_run(resource.RUSAGE_CHILDREN, gantline))
                    theirs.append(seconds_of_a_run(resource.RUSAGE_SELF, runtime))
                else:
                    ours += gantline(RUNS)[0]
                    theirs += runtime(RUNS)[0]
            (_, found, peak), (_, wanted) = gantline(1), runtime(1)
            off = np.abs(found - wanted).max() / np.abs(wanted).max()
            ours, theirs = statistics.median(ours), statistics.median(theirs)
            line = f"{path.stem:<24} {ours * 1e3:>8.2f} ms {peak:>5.0f} MiB"
            line += f" {theirs * 1e3:>10.2f} ms {ours / theirs:>5.2f} {off:>6.0e}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
