"""Writes `exports/`: what PyTorch's two exporters make of tiny models, and what these compute.

    python tests/reference/exports.py [CASE...]
    python tests/reference/exports.py --fill DIRECTORY [CASE...]

needs torch, transformers, onnx, onnxscript, onnxruntime, numpy and safetensors. The second form
writes ONNX files with weights, which any tool reads, and the inputs as `CASE.NAME.npy`. README.md
describes the files.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import safetensors.numpy
import torch

from exported_models import case_list
from families import uniform

FOLDER = Path(__file__).resolve().parent / "exports"

# Elements that a stored tensor has at most. Larger ones of weights are drawn.
STORED_MAX = 64
# Elements of tables, such as masks and those of rotary embeddings, which are stored.
TABLE_MAX = 4096


def scale_of(name, parameter):
    """Middle and width of a parameter's values, so that no layer makes them much larger."""
    if name.endswith("running_mean") or "bias" in name.split(".")[-1]:
        return 0.0, 0.2
    if parameter.dim() < 2 or "norm" in name:
        return 1.0, 0.2
    fan_in = parameter.numel() / parameter.shape[0]
    return 0.0, round(min(0.5, (3 / fan_in) ** 0.5), 2)


def drawn(recipe):
    """The values that a recipe `NAME_MIDDLE_WIDTH_COUNT` stands for."""
    name, middle, width, count = recipe.split("_")
    return (float(middle) + float(width) * uniform(name, int(count))).astype(np.float32)


def randomise(model):
    """Draws all parameters and statistics, and tells (bits of all values, the scale of each)."""
    bits, middles, widths = [], [], []
    named = dict(model.named_parameters())
    named |= {k: b for k, b in model.named_buffers() if k.endswith(("running_mean", "running_var"))}
    for name, parameter in named.items():
        middle, width = scale_of(name, parameter)
        values = drawn(f"{name.replace('_', '-')}_{middle}_{width}_{parameter.numel()}")
        parameter.data.copy_(torch.from_numpy(values.reshape(parameter.shape)))
        bits.append(values.view(np.uint32))
        middles.append(np.full(len(values), middle))
        widths.append(np.full(len(values), width))
    if not bits:
        return np.empty(0, np.uint32), [], []
    return tuple(np.concatenate(part) for part in (bits, middles, widths))


def export(case, model, inputs, folder):
    path = folder / f"{case.name}.onnx"
    options = dict(opset_version=case.opset, dynamo=case.dynamo, input_names=list(inputs))
    args = tuple(torch.from_numpy(array) for array in inputs.values())
    if case.open and case.dynamo:
        names = {name for axes in case.open.values() for name in axes.values()}
        dims = {name: torch.export.Dim(name) for name in names}
        shapes = [{axis: dims[n] for axis, n in case.open[i].items()} for i in inputs]
        options["dynamic_shapes"] = (tuple(shapes),)
    elif case.open:
        options["dynamic_axes"] = case.open
    if case.dynamo:
        options["external_data"] = False
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, args, str(path), **options)
        wanted = model(*args)
    wanted = wanted if isinstance(wanted, (tuple, list)) else [wanted]
    return onnx.load(path), [tensor.numpy() for tensor in wanted]


def run(model, inputs):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    taken = {port.name for port in session.get_inputs()}
    feed = {name: array for name, array in inputs.items() if name in taken}
    names = [port.name for port in session.get_outputs()]
    return feed, dict(zip(names, session.run(names, feed)))


def strip(model):
    """Removes what is said to people, which for one exporter is most of the file."""
    def parts(graph):
        yield from graph.node
        yield from graph.initializer
        yield from graph.input
        yield from graph.output

    for holder in [model, model.graph, *parts(model.graph)]:
        for field in ("doc_string", "metadata_props"):
            if field in holder.DESCRIPTOR.fields_by_name:
                holder.ClearField(field)
    for function in model.functions:
        for holder in [function, *function.node]:
            holder.ClearField("doc_string")
            holder.ClearField("metadata_props")
        function.ClearField("value_info")
    model.graph.ClearField("value_info")


def replace_weights(case, model, bits, middles, widths):
    """Puts recipes in the places of the weights."""
    order = np.argsort(bits)
    known = bits[order]
    # Weights of convolutions into which a batch norm is folded are no weights of the model.
    folded = {name for node in model.graph.node if node.op_type == "Conv" for name in node.input}
    for index, tensor in enumerate(model.graph.initializer):
        count = int(np.prod(tensor.dims))
        if tensor.data_type != onnx.TensorProto.FLOAT or count <= STORED_MAX:
            continue
        values = onnx.numpy_helper.to_array(tensor).reshape(-1)
        places = np.searchsorted(known, values.view(np.uint32)).clip(max=max(len(known) - 1, 0))
        if len(known) and (known[places] == values.view(np.uint32)).all():
            middle, width = middles[order[places[0]]], widths[order[places[0]]]
        elif tensor.name in folded:
            middle = round(float(values.mean()), 2) + 0.0
            width = round(float(values.std()) * 3**0.5, 2)
        else:
            assert count <= TABLE_MAX, f"{case.name}: {tensor.name} {list(tensor.dims)}"
            print(f"  stored: {tensor.name} {list(tensor.dims)}")
            continue
        set_recipe(tensor, f"{case.name}.{index}_{middle:g}_{width:g}_{count}")


def set_recipe(tensor, recipe):
    for field in ("raw_data", "float_data"):
        tensor.ClearField(field)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", recipe


def filled(model):
    """The model with the weights that its recipes stand for."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    for tensor in whole.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.raw_data = drawn(tensor.external_data[0].value).tobytes()
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
    return whole


def check_near(case, what, found, wanted):
    off = np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1.0)
    assert found.shape == wanted.shape and off < 1e-4, f"{case.name}: {what} is {off} off"


def write_case(case):
    torch.manual_seed(0)
    # One operator for a whole layer, which no exporter knows.
    torch.backends.mha.set_fastpath_enabled(False)
    model, inputs = case.build()
    model.eval()
    weights = randomise(model)
    with tempfile.TemporaryDirectory() as folder:
        exported, wanted = export(case, model, inputs, Path(folder))
    for port in exported.graph.output:
        assert port.name, case.name
    strip(exported)
    _, found = run(exported, inputs)
    for array, (name, value) in zip(wanted, found.items()):
        check_near(case, f"the exported {name}", value, array)
    replace_weights(case, exported, *weights)
    feed, outputs = run(filled(exported), inputs)
    for name, value in outputs.items():
        assert np.isfinite(value).all(), f"{case.name}: {name}"
    onnx.save(exported, FOLDER / f"{case.name}.onnx")
    values = {f"in/{name}": array for name, array in feed.items()}
    values |= {f"out/{name}": array for name, array in outputs.items()}
    values = {name: np.ascontiguousarray(array) for name, array in values.items()}
    safetensors.numpy.save_file(values, FOLDER / f"{case.name}.safetensors")
    size = sum((FOLDER / f"{case.name}.{end}").stat().st_size for end in ("onnx", "safetensors"))
    largest = max(float(np.abs(value).max()) for value in outputs.values())
    print(f"{case.name}: {len(exported.graph.node)} nodes, {size:,} bytes, up to {largest:.3g}")


def fill(folder, cases):
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        whole = filled(onnx.load(FOLDER / f"{case.name}.onnx", load_external_data=False))
        onnx.save(whole, folder / f"{case.name}.onnx")
        values = safetensors.numpy.load_file(FOLDER / f"{case.name}.safetensors")
        for name, array in values.items():
            if name.startswith("in/"):
                np.save(folder / f"{case.name}.{name.removeprefix('in/')}.npy", array)


def main():
    names = sys.argv[1:]
    target = None
    if names[:1] == ["--fill"]:
        target, names = Path(names[1]), names[2:]
    chosen = [c for c in case_list() if not names or c.name.startswith(tuple(names))]
    if target:
        return fill(target, chosen)
    FOLDER.mkdir(exist_ok=True)
    for case in chosen:
        write_case(case)


if __name__ == "__main__":
    main()
