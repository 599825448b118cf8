"""Writes small models of control flow, functions and narrow types with what ONNX Runtime computes.

    pip install onnx onnxruntime numpy safetensors
    python tests/reference/onnx_graphs.py tests/reference/onnx/graphs.safetensors

The file has the form of nodes.safetensors: `CASE/model`, `CASE/in/NAME` and `CASE/out/NAME`.
"""

import sys

import numpy as np
import onnxruntime
import safetensors.numpy
from onnx import TensorProto, checker, parser

from onnx_nodes import storable

HEADER = '<ir_version: 8, opset_import: ["" : 17, "own" : 1]>'

MODELS = {
    # The condition depends on an input: both branches are computed.
    "if_by_input": """
    agraph (float[3] x) => (float[3] y) {
      sum = ReduceSum<keepdims = 0>(x)
      zero = Constant<value_float = 0.0>()
      positive = Greater(sum, zero)
      y = If (positive) <
        then_branch = then () => (float[3] a) { a = Exp(x) },
        else_branch = other () => (float[3] b) { b = Neg(x) }
      >
    }""",
    # Ends by its condition before its count.
    "loop_until": """
    agraph (float[2] x) => (float[2] y, float[k, 2] all) {
      count = Constant<value_int = 9>()
      yes = Constant<value = bool {1}>()
      y, all = Loop (count, yes, x) <
        body = step (int64 i, bool goes, float[2] s) => (bool more, float[2] t, float[2] out) {
          three = Constant<value_int = 3>()
          more = Less(i, three)
          f = Cast<to = 1>(i)
          t = Add(s, f)
          out = Mul(t, x)
        }
      >
    }""",
    "nested_loops": """
    agraph (float[2] x) => (float[2] y) {
      two = Constant<value_int = 2>()
      yes = Constant<value = bool {1}>()
      y = Loop (two, yes, x) <
        body = outer (int64 i, bool a, float[2] s) => (bool b, float[2] t) {
          b = Identity(a)
          t = Loop (two, yes, s) <
            body = inner (int64 j, bool c, float[2] u) => (bool d, float[2] v) {
              d = Identity(c)
              k = Add(i, j)
              f = Cast<to = 1>(k)
              w = Add(u, f)
              v = Mul(w, x)
            }
          >
        }
      >
    }""",
    "scan_backwards": """
    agraph (float[3, 2] x, float[2] s0) => (float[2] s, float[2, 3] y) {
      s, y = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_axes = [1],
        scan_output_directions = [1],
        body = step (float[2] s_in, float[2] x_in) => (float[2] s_out, float[2] y_out) {
          s_out = Add(s_in, x_in)
          y_out = Mul(s_out, x_in)
        }
      > (s0, x)
    }""",
    "sequence_inside": """
    agraph (float[4, 2] x) => (float[2, 2] y, int64 n) {
      two = Constant<value_int = 2>()
      one = Constant<value_int = 1>()
      parts = SplitToSequence<axis = 0>(x, two)
      last = SequenceAt(parts, one)
      more = SequenceInsert(parts, last)
      n = SequenceLength(more)
      first = SequenceAt(more, two)
      y = Add(first, last)
    }""",
    # A function with an attribute, and one that calls another one.
    "functions": """
    agraph (float[3] x) => (float[3] y, float[3] z) {
      low = Constant<value_float = -0.5>()
      y = own.scaled<alpha = 2.0>(x, low)
      z = own.twice(x)
    }
    <domain: "own", opset_import: ["" : 17]>
    scaled <alpha> (x, low) => (y) {
      a = Elu<alpha : float = @alpha>(x)
      y = Clip(a, low)
    }
    <domain: "own", opset_import: ["" : 17, "own" : 1]>
    twice (x) => (y) {
      a = Abs(x)
      b = own.halved(a)
      y = Add(b, a)
    }
    <domain: "own", opset_import: ["" : 17]>
    halved (x) => (y) {
      two = Constant<value_float = 2.0>()
      y = Div(x, two)
    }""",
    # Numbers of f16 are rounded after every operator, integers wrap.
    "half": """
    agraph (float16[2, 3] x, float16[3, 2] w) => (float16[2, 2] y, float16[2, 3] z) {
      product = MatMul(x, w)
      y = Softmax(product)
      big = Mul(x, x)
      z = Mul(big, big)
    }""",
    "bytes": """
    agraph (uint8[4] a, int8[4] b) => (uint8[4] y, int32[4] z, int8[4] w) {
      wide = Cast<to = 6>(b)
      z = Mul(wide, wide)
      y = Cast<to = 2>(z)
      w = Cast<to = 3>(z)
    }""",
}

INPUTS = {
    "x": np.array([[0.5, -1.25, 3.0], [2.0, 0.1, -0.75]], np.float32),
    "w": np.array([[1.0, -0.5], [0.25, 2.0], [3.0, 0.125]], np.float32),
    "s0": np.array([1.0, -1.0], np.float32),
    "a": np.array([1, 2, 200, 255], np.uint8),
    "b": np.array([-128, -1, 100, 127], np.int8),
}


def inputs(model):
    """Numbers for each input, as many as it has elements."""
    found = {}
    for port in model.graph.input:
        kind = port.type.tensor_type
        dims = [dim.dim_value for dim in kind.shape.dim]
        numbers = np.resize(INPUTS[port.name], dims)
        half = kind.elem_type == TensorProto.FLOAT16
        found[port.name] = (numbers * 10).astype(np.float16) if half else numbers
    return found


def main():
    tensors = {}
    for name, text in MODELS.items():
        model = parser.parse_model(HEADER + text)
        checker.check_model(model)
        session = onnxruntime.InferenceSession(model.SerializeToString())
        given = inputs(model)
        results = session.run(None, given)
        tensors[f"{name}/model"] = np.frombuffer(model.SerializeToString(), np.uint8)
        for port, array in given.items():
            tensors[f"{name}/in/{port}"] = storable(array)
        for port, array in zip(model.graph.output, results):
            tensors[f"{name}/out/{port.name}"] = storable(np.asarray(array))
    kept = {key: np.ascontiguousarray(a).reshape(a.shape) for key, a in tensors.items()}
    safetensors.numpy.save_file(kept, sys.argv[1])
    print(f"{len(MODELS)} models in {sys.argv[1]}")


if __name__ == "__main__":
    main()
