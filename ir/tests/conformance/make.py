"""Writes ops.txt: what PyTorch and NumPy compute of each op on a few numbers.

    python make.py > ops.txt

A case is the words of an op as a module's text has them, a line for each operand, and the result:
after `=` where every bit is meant, after `~N` within N units in the last place. Sums and products
of exact results are of small whole numbers, so that no order of adding them matters.
"""

import numpy as np
import torch
from torch.nn.functional import conv2d, conv_transpose2d

NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.uint32: "u32", torch.bool: "bool",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
}
NAN, INF = float("nan"), float("inf")


def text(x):
    """`f32[2, 3] 1.0 2.0 …`: the type, then the numbers in row-major order."""
    dims = ", ".join(str(size) for size in x.shape)
    if x.dtype.is_floating_point:
        numbers = [repr(number) for number in x.double().flatten().tolist()]
    else:
        numbers = [str(int(number)) for number in x.flatten().tolist()]
    return " ".join([f"{NAMES[x.dtype]}[{dims}]", *numbers])


def case(op, operands, result, ulps=0):
    lines = [op, *("  " + text(x) for x in operands)]
    lines.append(("= " if ulps == 0 else f"~{ulps} ") + text(result))
    print("\n".join(lines) + "\n")


def f32(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def whole(*sizes, dtype=torch.float32, seed=0):
    """Small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, sizes, generator=generator).to(dtype)


def elementwise():
    edges = f32(0.0, -0.0, 0.5, -0.75, 1.0, -1.5, 3.0, -7.25, 40.0, -40.0, 1e-30, INF, -INF, NAN)
    for dtype in (torch.float32, torch.float64):
        x = edges.to(dtype)
        for name, of, ulps in [
            ("neg", torch.neg, 0), ("abs", torch.abs, 0), ("exp", torch.exp, 4),
            ("sqrt", torch.sqrt, 0), ("tanh", torch.tanh, 4), ("erf", torch.erf, 4),
            ("sin", torch.sin, 4), ("cos", torch.cos, 4), ("floor", torch.floor, 0),
        ]:
            case(name, [x], of(x.double()).to(dtype), ulps)
        positive = torch.tensor([1e-30, 0.25, 1.0, 2.0, 10.0, 12345.0, INF], dtype=dtype)
        case("log", [positive], torch.log(positive.double()).to(dtype), 4)
        case("rsqrt", [positive], torch.rsqrt(positive.double()).to(dtype), 4)
        mantissa, exponent = np.frexp(np.array([1.0, 1.5, 3.0, -5.0, 0.1, -1e-3]))
        power = torch.tensor(np.sign(mantissa) * np.ldexp(0.5, exponent)).to(dtype)
        case("power_floor", [torch.tensor([1.0, 1.5, 3.0, -5.0, 0.1, -1e-3]).to(dtype)], power)
    a = f32(1.0, -2.5, 0.0, -0.0, 7.0, INF, INF, NAN, 1.0, 3.0)
    b = f32(3.0, 0.5, -0.0, 0.0, -2.0, INF, -INF, 1.0, NAN, 0.0)
    for name, of in [
        ("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div),
    ]:
        case(name, [a, b], of(a, b))
    # Which of two zeros is the larger one is open.
    c, d = f32(1.0, -2.5, 7.0, INF, NAN, 1.0, -3.0), f32(3.0, 0.5, -2.0, -INF, 1.0, NAN, -3.0)
    case("max", [c, d], torch.maximum(c, d))
    case("min", [c, d], torch.minimum(c, d))
    base, power = f32(2.0, 2.0, 9.0, -2.0, -2.0, 0.0, 5.0), f32(3.0, -1.0, 0.5, 3.0, 2.0, 0.0, 0.0)
    case("pow", [base, power], torch.pow(base.double(), power.double()).float(), 4)
    for dtype in (torch.int32, torch.int64):
        most = torch.iinfo(dtype).max
        i = torch.tensor([7, -7, 7, -7, most, 5, 0], dtype=dtype)
        j = torch.tensor([2, 2, -2, -2, 1, 3, 9], dtype=dtype)
        case("add", [i, j], i + j)
        case("sub", [-i, j], -i - j)
        case("mul", [i, j], i * j)
        case("div", [i, j], torch.div(i, j, rounding_mode="floor"))
        case("max", [i, j], torch.maximum(i, j))
        case("min", [i, j], torch.minimum(i, j))
        case("neg", [i], -i)
        case("abs", [i], i.abs())
        case("lt", [i, j], i < j)
    for name, of in [("eq", torch.eq), ("lt", torch.lt), ("le", torch.le)]:
        case(name, [a, b], of(a, b))
    case("select", [a < b, a, b], torch.where(a < b, a, b))


def casts():
    x = f32(0.0, -0.0, 1.0, 1.00390625, 1.01171875, -2.7, 3.14159265, 1e-40, 65504.0, INF, NAN)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        case(f"cast {NAMES[dtype]}", [x], x.to(dtype))
    small = f32(0.0, 0.3, -0.7, 1.06, -2.9, 17.0, 200.0, 0.001953125, 0.0146484375)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        case(f"cast {NAMES[dtype]}", [small], small.to(dtype))
        case("cast f32", [small.to(dtype)], small.to(dtype).float())
    numbers = f32(0.0, 0.9, -0.9, 2.5, -2.5, 1e6)
    for dtype in (torch.int32, torch.int64):
        case(f"cast {NAMES[dtype]}", [numbers], numbers.to(dtype))
    i = torch.tensor([0, 1, -3, 16777217, -2147483648], dtype=torch.int32)
    case("cast f32", [i], i.float())
    case("cast bf16", [i], i.to(torch.bfloat16))
    case("cast i64", [i], i.long())
    case("cast f32", [i > 0], (i > 0).float())


def products():
    for einsum, a, b in [
        ("mk,kn->mn", (3, 4), (4, 5)), ("bmk,kn->bmn", (2, 3, 4), (4, 5)),
        ("bik,bjk->bij", (2, 3, 4), (2, 5, 4)), ("k,k->", (6,), (6,)), ("i,j->ji", (3,), (2,)),
        ("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)), ("abc,cb->a", (2, 3, 4), (4, 3)),
    ]:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x, y = whole(*a, dtype=dtype), whole(*b, dtype=dtype, seed=1)
            result = torch.einsum(einsum, x.double(), y.double()).to(dtype)
            # The sign of a sum that is zero is open.
            case(f"contract {einsum}", [x, y], result, 1)
    # Codes with a scale for each row and 128 columns.
    x, y = whole(3, 256).to(torch.float8_e4m3fn), whole(5, 256, seed=1).to(torch.float8_e4m3fn)
    p, q = whole(3, 2, seed=2).abs() + 0.5, whole(5, 2, seed=3).abs() + 0.5
    wide = [codes.double() * s.double().repeat_interleave(128, 1) for codes, s in [(x, p), (y, q)]]
    case("scaled_contract mk,nk->mn", [x, y, p, q], torch.einsum("mk,nk->mn", *wide).float(), 1)


def convolutions():
    x = whole(2, 4, 6, 5)
    for groups, kernel, stride, padding, dilation in [
        (1, (3, 3), (1, 1), (0, 0), (1, 1)), (1, (3, 3), (2, 1), (1, 2), (1, 1)),
        (2, (2, 3), (1, 2), (1, 1), (2, 1)), (4, (3, 1), (1, 1), (1, 0), (1, 1)),
    ]:
        w = whole(8, 4 // groups, *kernel, seed=4)
        y = conv2d(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups)
        lists = {"stride": stride, "before": padding, "after": padding, "dilation": dilation}
        words = " ".join(f"{name}={list(sizes)}" for name, sizes in lists.items())
        case(f"conv {words}", [x, w], y, 1)
    # A transposed convolution spreads its operand and flips its kernels.
    w = whole(4, 3, 3, 3, seed=5)
    y = conv_transpose2d(x, w, stride=2)
    flipped = w.flip(2, 3).transpose(0, 1).contiguous()
    words = "conv stride=[1, 1] before=[2, 2] after=[2, 2] dilation=[1, 1] spread=[2, 2]"
    case(words, [x, flipped], y, 1)


def reductions():
    x = whole(2, 3, 4)
    holes = x.clone()
    holes[1, 2, 0] = NAN
    for dims in ([0], [2], [0, 2], [0, 1, 2]):
        case(f"reduce sum dims={dims}", [x], x.sum(dims))
        case(f"reduce max dims={dims}", [holes], holes.amax(dims))
        case(f"reduce min dims={dims}", [holes], holes.amin(dims))
    case("reduce sum dims=[1]", [x.int()], x.int().sum(1, dtype=torch.int32))
    case("prod dims=[1]", [x], x.prod(1))
    for dim in (0, 1, 2):
        first = torch.tensor(np.argmax(holes.numpy(), axis=dim), dtype=torch.int32)
        case(f"argmax dim={dim}", [holes], first)
        case(f"cumulative sum dim={dim}", [x], x.cumsum(dim))
        case(f"cumulative max dim={dim}", [x], x.cummax(dim).values)
        case(f"cumulative min dim={dim}", [x], x.cummin(dim).values)
        order = torch.sort(holes, dim=dim, stable=True).indices.int()
        case(f"sort ascending dim={dim}", [holes], order)
        order = torch.sort(holes, dim=dim, stable=True, descending=True).indices.int()
        case(f"sort descending dim={dim}", [holes], order)
        case(f"top_k dim={dim} count=2", [holes], order.narrow(dim, 0, 2).contiguous())


def moves():
    x = whole(2, 3, 4)
    case("reshape", [x], x.reshape(4, 6))
    case("transpose perm=[2, 0, 1]", [x], x.permute(2, 0, 1).contiguous())
    case("broadcast new=[0, 2]", [f32(1.0, 2.0, 3.0)], f32(1, 2, 3)[None, :, None].repeat(2, 1, 2))
    case("slice dim=2 start=1 size=2", [x], x[:, :, 1:3].contiguous())
    case("pad dim=1 before=1 after=2", [x], torch.nn.functional.pad(x, (0, 0, 1, 2)))
    case("reverse dims=[0, 2]", [x], x.flip(0, 2))
    case("concat dim=1", [x, x[:, :1].contiguous()], torch.cat([x, x[:, :1]], 1))
    line = f32(*range(9))
    index = torch.tensor([[w * 2 + e * 3 for e in range(2)] for w in range(3)])
    windows = line[index]
    case("window dim=0 size=2 stride=2 dilation=3", [line], windows)
    folded = torch.zeros(9).index_add(0, index.flatten(), windows.flatten())
    case("fold dim=0 size=2 stride=2 dilation=3", [windows], folded)
    case("iota dim=1 start=3", [], torch.arange(3, 7, dtype=torch.int32).repeat(2, 1))
    case("constant 0.5", [], torch.full((2, 2), 0.5))


def indices():
    table, ids = whole(5, 3), torch.tensor([[4, 0], [2, 2]], dtype=torch.int32)
    case("gather dim=0 start=0", [table, ids], table[ids.long()])
    # Of a table that begins with row 2, others are zero.
    inside = torch.tensor([2, 6, 1, 7, 4], dtype=torch.int32)
    rows = torch.cat([table, torch.zeros(1, 3)])
    at = torch.tensor([0, 4, 5, 5, 2])
    case("gather dim=0 start=2", [table, inside], rows[at])
    updates = whole(2, 2, 3, seed=6)
    added = torch.zeros(5, 3).index_add(0, ids.flatten().long(), updates.flatten(0, 1))
    case("scatter_add dim=0 start=0", [ids, updates], added)
    once = torch.tensor([3, 0, 9], dtype=torch.int32)
    written = table.clone()
    written[[3, 0]] = updates.flatten(0, 1)[:2]
    rows = updates.flatten(0, 1)[:3].contiguous()
    case("scatter dim=0 start=0", [table, once, rows], written)
    x, update = whole(2, 6), whole(2, 2, seed=7)
    for at, start in [(1, 1), (5, 4), (-3, 0)]:
        place = torch.tensor(at, dtype=torch.int32)
        whole_row = x.clone()
        whole_row[:, start : start + 2] = update
        case("dynamic_update_slice dim=1", [x, update, place], whole_row)
        case("dynamic_slice dim=1 size=2", [x, place], x[:, start : start + 2].contiguous())
    places = torch.tensor([3, 0], dtype=torch.int32)
    each = torch.stack([x[0, 3:5], x[1, 0:2]])
    case("dynamic_slice dim=1 size=2", [x, places], each)


print(f"# PyTorch {torch.__version__.split('+')[0]}, NumPy {np.__version__}\n")
for part in (elementwise, casts, products, convolutions, reductions, moves, indices):
    part()
