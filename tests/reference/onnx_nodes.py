"""Runs the generated node cases of the onnx package through `gantline run`.

    pip install onnx numpy safetensors
    python tests/reference/onnx_nodes.py target/debug/gantline [--filter TEXT] [--list]
        [--sample FILE]

Each case is a model of one or a few nodes with its inputs and the outputs that the package
computed by numpy. Prints how many agree, how many are refused as unsupported, and every case that
is neither. The cases of onnx 1.23.2 are of opset 28, older operators' of the opset they had.

`--sample` writes the smallest case of each operator and set of types that agrees into one
safetensors file, which ir/tests/ir/onnx.rs reads: `CASE/model`, the bytes, `CASE/in/NAME` and
`CASE/out/NAME`.
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


def numbers(value):
    """The array of a value of a case; none for sequences, optional values and texts."""
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    if not isinstance(value, (np.ndarray, np.generic)):
        return None
    array = np.asarray(value)
    # Types of ml_dtypes are of kind V.
    return array if array.dtype.kind in "iubfV" else None


def is_whole(array):
    return array.dtype.kind in "iub" or re.fullmatch(r"u?int\d+", array.dtype.name)


def storable(array):
    """The array in a type that safetensors files and kernels share."""
    if is_whole(array):
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
            array = numbers(inputs[at]) if at < len(inputs) else None
            array = np.zeros(0) if array is None else array
            # Numpy's own types are read as they are.
            array = array if array.dtype.isbuiltin == 1 else storable(array)
            np.save(out / f"in{at}.npy", np.ascontiguousarray(array).reshape(array.shape))
            command += ["--input", f"{name}={out / f'in{at}.npy'}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 4:
            return "refused: " + done.stderr.splitlines()[0]
        if done.returncode != 0:
            return f"fail: exit {done.returncode}: " + " ".join(done.stderr.split())[:200]
        for at, output in enumerate(model.graph.output):
            wanted = numbers(outputs[at])
            if wanted is None:
                return f"fail: {output.name} is no tensor"
            found = np.load(out / f"{value_name(output.name)}.npy")
            if found.shape != wanted.shape:
                return f"fail: {output.name} is {found.shape}, not {wanted.shape}"
            # Those of bf16 were rounded after every step.
            loose = 10 if wanted.dtype.name == "bfloat16" else 1
            tolerance = 0 if is_whole(wanted) else 1e-4 * loose
            wanted, found = storable(wanted), storable(found)
            if not np.allclose(found, wanted, rtol=1e-3 * loose, atol=tolerance, equal_nan=True):
                return f"fail: {output.name} is {found.ravel()[:4]}, not {wanted.ravel()[:4]}"
    return "pass"


class Sample:
    """The smallest case of each operator and set of types."""

    def __init__(self):
        self.cases = {}

    def add(self, case):
        model, (inputs, outputs) = case.model, case.data_sets[0]
        inputs, outputs = ([numbers(value) for value in values] for values in (inputs, outputs))
        if any(array is None for array in [*inputs, *outputs]):
            return
        types = tuple(sorted({array.dtype.name for array in [*inputs, *outputs]}))
        names = [i.name for i in model.graph.input]
        tensors = {"model": np.frombuffer(model.SerializeToString(), np.uint8)}
        for name, array in zip(names, inputs):
            tensors[f"in/{name}"] = storable(array)
        for output, array in zip(model.graph.output, outputs):
            tensors[f"out/{output.name}"] = storable(array)
        size = sum(array.nbytes for array in tensors.values())
        operators = sorted({node.op_type for node in model.graph.node})
        key = (operators[0], types) if len(operators) == 1 else None
        if key and (key not in self.cases or size < self.cases[key][0]):
            self.cases[key] = (size, case.name, tensors)

    def write(self, path, limit=4096):
        """The smallest case of each operator, and others of other types that are much smaller."""
        import safetensors.numpy

        kept, seen = [], set()
        for (operator, _), found in sorted(self.cases.items(), key=lambda pair: pair[1][0]):
            if found[0] <= (limit / 6 if operator in seen else limit):
                kept.append(found[1:])
            seen.add(operator)
        named = {
            f"{name}/{key}": np.ascontiguousarray(array).reshape(array.shape)
            for name, tensors in sorted(kept, key=lambda pair: pair[0])
            for key, array in tensors.items()
        }
        safetensors.numpy.save_file(named, path)
        print(f"{len(kept)} cases in {path}")


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
