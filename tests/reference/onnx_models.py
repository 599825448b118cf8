"""Writes tests/reference/onnx: small ONNX models, inputs, and outputs by onnx's own evaluator.

    pip install onnx numpy
    python tests/reference/onnx_models.py tests/reference/onnx

`mlp` is two products; `blocks` three layers of a transformer as exporters write them, with sizes
computed by `Shape` and norms written out, and its weights in a file of their own; `convnet` a
convolution, a residual block of groups, pools and a head.
"""

import pathlib
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

RNG = np.random.default_rng(7)


class Graph:
    """Nodes and weights of a model as it is written."""

    def __init__(self):
        self.nodes, self.weights, self.count = [], [], 0

    def weight(self, name, *dims, scale=0.5):
        array = (RNG.standard_normal(dims) * scale).astype(np.float32)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def constant(self, value, dtype=np.float32):
        return self("Constant", value=numpy_helper.from_array(np.array(value, dtype)))

    def __call__(self, operator, *inputs, output=None, **attributes):
        self.count += 1
        output = output or f"/{operator}_{self.count}_output_0"
        self.nodes.append(
            helper.make_node(
                operator, inputs, [output], name=f"/{operator}_{self.count}", **attributes
            )
        )
        return output

    def model(self, name, inputs, outputs, opset):
        graph = helper.make_graph(self.nodes, name, inputs, outputs, self.weights)
        sets = [helper.make_opsetid("", opset)]
        return helper.make_model(graph, opset_imports=sets, ir_version=8, producer_name="tests")


def value(name, *dims):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


def mlp():
    g = Graph()
    h = g("Gemm", "x", g.weight("w1", 16, 6), g.weight("b1", 16), transB=1)
    h = g("Relu", h)
    g("Gemm", h, g.weight("w2", 16, 5), g.weight("b2", 5), output="y")
    return g.model("mlp", [value("x", "batch", 6)], [value("y", "batch", 5)], 13)


def norm(g, x, at, width):
    mean = g("ReduceMean", x, axes=[-1])
    centred = g("Sub", x, mean)
    square = g("Pow", centred, g.constant(2.0))
    variance = g("ReduceMean", square, axes=[-1])
    deviation = g("Sqrt", g("Add", variance, g.constant(1e-5)))
    normal = g("Div", centred, deviation)
    scaled = g("Mul", normal, g.weight(f"{at}.weight", width))
    return g("Add", scaled, g.weight(f"{at}.bias", width))


def heads(g, x, at, width, count, perm):
    batch = g("Gather", g("Shape", x), g.constant(0, np.int64), axis=0)
    length = g("Gather", g("Shape", x), g.constant(1, np.int64), axis=0)
    y = g("MatMul", x, g.weight(f"{at}.weight", width, width))
    y = g("Add", y, g.weight(f"{at}.bias", width))
    first = g.constant([0], np.int64)
    dims = [g("Unsqueeze", batch, first), g("Unsqueeze", length, first)]
    shape = g("Concat", *dims, g.constant([count, width // count], np.int64), axis=0)
    return g("Transpose", g("Reshape", y, shape), perm=perm), dims


def layer(g, x, at, width, count):
    h = norm(g, x, f"{at}.norm1", width)
    q, dims = heads(g, h, f"{at}.q", width, count, [0, 2, 1, 3])
    k, _ = heads(g, h, f"{at}.k", width, count, [0, 2, 3, 1])
    v, _ = heads(g, h, f"{at}.v", width, count, [0, 2, 1, 3])
    scores = g("Div", g("MatMul", q, k), g.constant(np.sqrt(width // count)))
    mixed = g("MatMul", g("Softmax", scores, axis=-1), v)
    mixed = g("Transpose", mixed, perm=[0, 2, 1, 3])
    mixed = g("Reshape", mixed, g("Concat", *dims, g.constant([width], np.int64), axis=0))
    x = g("Add", x, g("MatMul", mixed, g.weight(f"{at}.out.weight", width, width)))
    h = norm(g, x, f"{at}.norm2", width)
    h = g("MatMul", h, g.weight(f"{at}.up.weight", width, 2 * width))
    e = g("Add", g("Erf", g("Div", h, g.constant(np.sqrt(2.0)))), g.constant(1.0))
    h = g("Mul", g("Mul", h, e), g.constant(0.5))
    return g("Add", x, g("MatMul", h, g.weight(f"{at}.down.weight", 2 * width, width)))


def blocks():
    g, x = Graph(), "x"
    for at in range(3):
        x = layer(g, x, f"layers.{at}", 8, 2)
    g("Identity", x, output="y")
    return g.model("blocks", [value("x", "batch", "seq", 8)], [value("y", "batch", "seq", 8)], 13)


def normalised(g, x, at, channels):
    weights = [g.weight(f"{at}.{part}", channels) for part in ["scale", "shift", "mean"]]
    g.weights.append(
        numpy_helper.from_array(RNG.uniform(0.5, 2, channels).astype(np.float32), f"{at}.var")
    )
    return g("BatchNormalization", x, *weights, f"{at}.var", epsilon=1e-5)


def convnet():
    g = Graph()
    h = g("Conv", "x", g.weight("stem", 8, 3, 3, 3), g.weight("stem.bias", 8), strides=[2, 2],
          pads=[1, 1, 1, 1], kernel_shape=[3, 3])
    h = g("Relu", normalised(g, h, "norm0", 8))
    h = g("MaxPool", h, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    r = g("Conv", h, g.weight("depth", 8, 2, 3, 3), group=4, pads=[2, 2, 2, 2], dilations=[2, 2])
    r = g("Clip", normalised(g, r, "norm1", 8), g.constant(0.0), g.constant(6.0))
    h = g("Add", h, g("Conv", r, g.weight("point", 8, 8, 1, 1)))
    h = g("AveragePool", h, kernel_shape=[2, 2], strides=[1, 1], count_include_pad=1,
          pads=[0, 0, 1, 1])
    h = g("Flatten", g("GlobalAveragePool", h))
    g("Gemm", h, g.weight("head", 4, 8), g.weight("head.bias", 4), transB=1, output="y")
    return g.model("convnet", [value("x", 2, 3, 13, 15)], [value("y", 2, 4)], 17)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    inputs = {"mlp": (3, 6), "blocks": (2, 5, 8), "convnet": (2, 3, 13, 15)}
    for make in [mlp, blocks, convnet]:
        name, model = make.__name__, make()
        onnx.checker.check_model(model)
        x = RNG.standard_normal(inputs[name]).astype(np.float32)
        (y,) = ReferenceEvaluator(model).run(None, {"x": x})
        np.save(folder / f"{name}.x.npy", x)
        np.save(folder / f"{name}.y.npy", y)
        path = folder / f"{name}.onnx"
        if name == "blocks":
            (folder / "blocks.data").unlink(missing_ok=True)
            onnx.save(model, path, save_as_external_data=True, location="blocks.data",
                      size_threshold=0)
        else:
            onnx.save(model, path)


if __name__ == "__main__":
    main()
