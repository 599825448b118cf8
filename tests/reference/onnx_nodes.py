"""Runs the generated node cases of the onnx package through `gantline run`.

    pip install onnx numpy
    python tests/reference/onnx_nodes.py target/debug/gantline [--filter TEXT] [--list]
        [--sample FILE]

Each case is a model of one or a few nodes with its inputs and the outputs that the package
computed by numpy. Prints how many agree, how many are refused as unsupported, and every case that
is neither. The cases of onnx 1.16.2 are of opset 21, older operators' of the opset they had.

`--sample` writes the smallest case of each operator that agrees into one safetensors file, which
tests/end_to_end/onnx.rs reads: `CASE/model`, the bytes, `CASE/in/NAME` and `CASE/out/NAME`.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import Counter

import numpy as np
import onnx
from onnx.backend.test.case.node import collect_testcases


def value_name(name):
    """How a value is named in a module, and so the file of an output."""
    return re.sub(r"[^A-Za-z0-9.]", "_", name).strip("_") or "v"


def storable(array):
    """The array in a type that `.npy` inputs may have."""
    if array.dtype.kind in "iub":
        return array.astype(np.int64)
    return array if array.dtype == np.float64 else array.astype(np.float32)


def run(binary, case):
    """`pass`, `refused: why` or `fail: why`."""
    model, (inputs, outputs) = case.model, case.data_sets[0]
    stored = {tensor.name for tensor in model.graph.initializer}
    names = [i.name for i in model.graph.input if i.name not in stored]
    with tempfile.TemporaryDirectory() as out:
        out = pathlib.Path(out)
        onnx.save(model, out / "model.onnx")
        command = [binary, "run", str(out / "model.onnx"), "-o", str(out), "--json"]
        for at, name in enumerate(names):
            array = inputs[at] if at < len(inputs) else None
            if isinstance(array, onnx.TensorProto):
                array = onnx.numpy_helper.to_array(array)
            if not isinstance(array, (np.ndarray, np.generic)) or array.dtype.kind not in "iubf":
                array = np.zeros(0)
            array = storable(np.asarray(array))
            np.save(out / f"in{at}.npy", np.ascontiguousarray(array).reshape(array.shape))
            command += ["--input", f"{name}={out / f'in{at}.npy'}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 4:
            return "refused: " + done.stderr.splitlines()[0]
        if done.returncode != 0:
            return f"fail: exit {done.returncode}: " + " ".join(done.stderr.split())[:200]
        for at, output in enumerate(model.graph.output):
            wanted = np.asarray(outputs[at])
            found = np.load(out / f"{value_name(output.name)}.npy")
            if found.shape != wanted.shape:
                return f"fail: {output.name} is {found.shape}, not {wanted.shape}"
            tolerance = 0 if wanted.dtype.kind in "iub" else 1e-4
            wanted = wanted.astype(found.dtype)
            if not np.allclose(found, wanted, rtol=1e-3, atol=tolerance, equal_nan=True):
                return f"fail: {output.name} is {found.ravel()[:4]}, not {wanted.ravel()[:4]}"
    return "pass"


class Sample:
    """The smallest case of each operator."""

    def __init__(self):
        self.cases = {}

    def add(self, case):
        model, (inputs, outputs) = case.model, case.data_sets[0]
        if any(not isinstance(array, np.ndarray) for array in [*inputs, *outputs]):
            return
        names = [i.name for i in model.graph.input]
        tensors = {"model": np.frombuffer(model.SerializeToString(), np.uint8)}
        for name, array in zip(names, inputs):
            tensors[f"in/{name}"] = storable(array)
        for output, array in zip(model.graph.output, outputs):
            tensors[f"out/{output.name}"] = storable(array)
        size = sum(array.nbytes for array in tensors.values())
        operators = sorted({node.op_type for node in model.graph.node})
        key = operators[0] if len(operators) == 1 else None
        if key and (key not in self.cases or size < self.cases[key][0]):
            self.cases[key] = (size, case.name, tensors)

    def write(self, path, limit=2048):
        import safetensors.numpy

        kept = [found[1:] for found in self.cases.values() if found[0] <= limit]
        named = {
            f"{name}/{key}": np.ascontiguousarray(array).reshape(array.shape)
            for name, tensors in sorted(kept, key=lambda pair: pair[0])
            for key, array in tensors.items()
        }
        safetensors.numpy.save_file(named, path)
        print(f"{len(kept)} operators in {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("--filter", default="")
    parser.add_argument("--list", action="store_true", help="also print refused cases")
    parser.add_argument("--sample", help="write the smallest cases that agree")
    args = parser.parse_args()
    counts, reasons, sample = Counter(), Counter(), Sample()
    for case in sorted(collect_testcases(None), key=lambda case: case.name):
        if args.filter not in case.name or case.data_sets is None:
            continue
        result = run(args.binary, case)
        kind = result.split(":")[0]
        counts[kind] += 1
        if kind == "pass":
            sample.add(case)
        if kind == "refused":
            reasons[result] += 1
        if kind == "fail" or (args.list and kind == "refused"):
            print(f"{case.name}: {result}")
    if args.sample:
        sample.write(args.sample)
    for reason, count in reasons.most_common(40):
        print(f"{count:5} {reason}")
    total = sum(counts.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"onnx {onnx.__version__}: {total} cases, {kinds}")
    sys.exit(counts["fail"] > 0)


if __name__ == "__main__":
    main()
