"""Writes resnet, dlrm, t5 and moe: tiny models that are no dense decoder-only transformers.

Beside them lies `routed`: moe with the composite `experts`, which no exporter writes.

    python tests/models/make.py tests/models

An image is its pixels as tokens, a row of a table its features, and a pair of sentences the one
after the other, so that all of them are fed as tokens and labels. `resnet` normalises by groups of
channels, since means over a batch would differ between micro-batches.
"""

import pathlib
import sys

DTYPE = "f32"


class Function:
    """The text of a function as it is written; methods return the names of values."""

    def __init__(self, name, params):
        self.name, self.params, self.lines, self.types = name, dict(params), [], dict(params)
        self.count = 0

    def __call__(self, op, *operands, dims=None, dtype=DTYPE, name=None, attributes=""):
        self.count += 1
        name = name or f"v{self.count}"
        ty = f"{dtype}[{', '.join(map(str, dims))}]"
        words = [op, attributes, *(f"%{o}" for o in operands)]
        self.lines.append(f"    %{name}: {ty} = {' '.join(w for w in words if w)}")
        self.types[name] = ty
        return name

    def dims(self, value):
        ty = self.types[value]
        inside = ty[ty.index("[") + 1 : -1]
        return [d if d == "B" else int(d) for d in inside.split(", ") if d]

    def number(self, value, like, dtype=DTYPE):
        return self("constant", dims=self.dims(like), dtype=dtype, attributes=repr(float(value)))

    def each(self, op, *operands, dtype=DTYPE):
        return self(op, *operands, dims=self.dims(operands[0]), dtype=dtype)

    def reshape(self, x, *dims):
        return self("reshape", x, dims=dims)

    def broadcast(self, x, dims, new, dtype=DTYPE):
        return self("broadcast", x, dims=dims, dtype=dtype, attributes=f"new={new}")

    def reduce(self, how, x, over):
        kept = [d for at, d in enumerate(self.dims(x)) if at not in over]
        return self("reduce", x, dims=kept, attributes=f"{how} dims={over}")

    def contract(self, text, a, b):
        left, right, result = text.replace("->", ",").split(",")
        sizes = dict(zip(left, self.dims(a))) | dict(zip(right, self.dims(b)))
        return self("contract", a, b, dims=[sizes[c] for c in result], attributes=text)

    def relu(self, x):
        return self.each("max", x, self.number(0, x))

    def softmax(self, x, dim):
        back = lambda y: self.broadcast(y, self.dims(x), [dim])
        e = self.each("exp", self.each("sub", x, back(self.reduce("max", x, [dim]))))
        return self.each("div", e, back(self.reduce("sum", e, [dim])))

    def loss(self, logits, labels):
        """The sum of cross-entropies of `[N, classes]`, and how many labels count."""
        n, classes = self.dims(logits)
        wide = lambda y, dtype=DTYPE: self.broadcast(y, [n, classes], [1], dtype)
        top = self.reduce("max", logits, [1])
        e = self.each("exp", self.each("sub", logits, wide(top)))
        lse = self.each("add", top, self.each("log", self.reduce("sum", e, [1])))
        index = self("iota", dims=[n, classes], dtype="i32", attributes="dim=1 start=0")
        hit = self.each("eq", index, wide(labels, "i32"), dtype="bool")
        picked = self("select", hit, logits, self.number(0, logits), dims=[n, classes])
        gap = self.each("sub", lse, self.reduce("sum", picked, [1]))
        valid = self.each("le", self.number(0, labels, "i32"), labels, dtype="bool")
        zero, one = self.number(0, gap), self.number(1, gap)
        loss = self("select", valid, gap, zero, dims=[n])
        count = self("select", valid, one, zero, dims=[n])
        return self.reduce("sum", loss, [0]), self.reduce("sum", count, [0])

    def finish(self, *results):
        params = ", ".join(f"%{name}: {ty}" for name, ty in self.params.items())
        ends = " ".join(f"%{r}" for r in results)
        body = "\n".join(self.lines)
        return f"  func @{self.name}({params}) {{\n{body}\n    return {ends}\n  }}\n"


class Model:
    """A module: layers, and the entries that call them."""

    def __init__(self, name, seq):
        self.name, self.seq, self.layers, self.calls, self.weights = name, seq, [], [], {}

    def layer(self, function, *results):
        self.layers.append(function.finish(*results))
        function.results = [function.types[r] for r in results]
        return function

    def call(self, layer, result, shared=(), **values):
        """Calls a layer; parameters that are no values are weights of this call, or shared."""
        operands = []
        for name, ty in layer.params.items():
            if name in values:
                operands.append(values[name])
            else:
                weight = name if name in shared else f"{result}.{name}"
                self.weights[weight] = ty
                operands.append(weight)
        self.calls.append((layer, result, operands))
        return result

    def text(self):
        labels = {"tokens": f"i32[B, {self.seq}]", "labels": f"i32[B, {self.seq}]"}
        text = f"module {self.name}\n" + "".join(self.layers)
        for entry, last in [("loss", "loss"), ("logits", "logits")]:
            calls = [c for c in self.calls if c[1] not in ("loss", "logits") or c[1] == last]
            used = {o for call in calls for o in call[2]}
            params = {n: t for n, t in (self.weights | labels).items() if n in used}
            function = Function(entry, params)
            for layer, result, operands in calls:
                names = [result, f"{result}.count"][: len(layer.results)]
                defined = ", ".join(f"%{n}: {t}" for n, t in zip(names, layer.results))
                passed = " ".join(f"%{o}" for o in operands)
                function.lines.append(f"    {defined} = call @{layer.name} {passed}")
            results = [last, "loss.count"] if last == "loss" else [last]
            text += function.finish(*results)
        return text


def t(*dims, dtype=DTYPE):
    return f"{dtype}[{', '.join(map(str, dims))}]"


def conv(f, x, w, stride, pad):
    n, _, height, width = f.dims(x)
    o, _, kh, kw = f.dims(w)
    size = lambda extent, kernel: (extent + 2 * pad - kernel) // stride + 1
    attributes = f"stride=[{stride}, {stride}] before=[{pad}, {pad}] after=[{pad}, {pad}]"
    attributes += " dilation=[1, 1] spread=[1, 1]"
    dims = [n, o, size(height, kh), size(width, kw)]
    return f("conv", x, w, dims=dims, attributes=attributes)


def group_norm(f, x, scale, bias, groups=2):
    n, c, height, width = dims = f.dims(x)
    apart = f.reshape(x, n, groups, c // groups, height, width)
    over, size = [2, 3, 4], c // groups * height * width
    mean = lambda y: f.each("div", f.reduce("sum", y, over), f.number(size, short))
    short = f("constant", dims=[n, groups], attributes="1e-05")
    back = lambda y: f.broadcast(y, f.dims(apart), over)
    centred = f.each("sub", apart, back(mean(apart)))
    variance = mean(f.each("mul", centred, centred))
    rstd = f.each("rsqrt", f.each("add", variance, short))
    normal = f.reshape(f.each("mul", centred, back(rstd)), *dims)
    scaled = f.each("mul", normal, f.broadcast(scale, dims, [0, 2, 3]))
    return f.each("add", scaled, f.broadcast(bias, dims, [0, 2, 3]))


def resnet(classes=10, size=8, width=4):
    """A stem with a pool, two blocks, one that halves the image with more channels, a head."""
    m = Model("resnet", 3 * size * size)
    norm = lambda at, c: {f"scale{at}": t(c), f"bias{at}": t(c)}
    tokens = {"tokens": t("B", m.seq, dtype="i32")}

    f = Function("stem", tokens | {"w": t(width, 3, 3, 3)} | norm(0, width))
    pixels = f("cast", "tokens", dims=["B", m.seq])
    pixels = f.each("div", pixels, f.number(classes, pixels))
    x = f.reshape(pixels, "B", 3, size, size)
    x = f.relu(group_norm(f, conv(f, x, "w", 1, 1), "scale0", "bias0"))
    half = size // 2
    rows = f(
        "window", x, dims=["B", width, half, 2, size], attributes="dim=2 size=2 stride=2 dilation=1"
    )
    rows = f.reduce("max", rows, [3])
    cols = f(
        "window",
        rows,
        dims=["B", width, half, half, 2],
        attributes="dim=3 size=2 stride=2 dilation=1",
    )
    stem = m.layer(f, f.reduce("max", cols, [4]))

    def block(name, c, wide, extent, stride):
        params = {"x": t("B", c, extent, extent), "w1": t(wide, c, 3, 3)} | norm(1, wide)
        params |= {"w2": t(wide, wide, 3, 3)} | norm(2, wide)
        if stride != 1:
            params |= {"w3": t(wide, c, 1, 1)}
        f = Function(name, params)
        y = f.relu(group_norm(f, conv(f, "x", "w1", stride, 1), "scale1", "bias1"))
        y = group_norm(f, conv(f, y, "w2", 1, 1), "scale2", "bias2")
        past = "x" if stride == 1 else conv(f, "x", "w3", stride, 0)
        return m.layer(f, f.relu(f.each("add", y, past)))

    same = block("block", width, width, half, 1)
    down = block("down", width, 2 * width, half, 2)
    last = {
        "x": t("B", 2 * width, half // 2, half // 2),
        "w": t(classes, 2 * width),
        "b": t(classes),
    }

    def scores(f):
        area = (half // 2) ** 2
        total = f.reduce("sum", "x", [2, 3])
        mean = f.each("div", total, f.number(area, total))
        y = f.contract("bc,kc->bk", mean, "w")
        return f.each("add", y, f.broadcast("b", f.dims(y), [0]))

    f = Function("head", last | {"labels": t("B", m.seq, dtype="i32")})
    first = f("slice", "labels", dims=["B", 1], dtype="i32", attributes="dim=1 start=0 size=1")
    label = f("reshape", first, dims=["B"], dtype="i32")
    head = m.layer(f, *f.loss(scores(f), label))
    f = Function("head_logits", last)
    logits = m.layer(f, scores(f))

    x = m.call(stem, "stem", tokens="tokens")
    x = m.call(same, "block1", x=x)
    x = m.call(same, "block2", x=x)
    x = m.call(down, "block3", x=x)
    m.call(head, "loss", shared=("w", "b"), x=x, labels="labels")
    m.call(logits, "logits", shared=("w", "b"), x=x)
    return m.text()


def dlrm(classes=16, dense=4, tables=5, width=6):
    """Dense features through one perceptron, ids through tables, products of all pairs, another."""
    m = Model("dlrm", dense + tables)
    tokens = {"tokens": t("B", m.seq, dtype="i32")}

    f = Function("bottom", tokens | {"w1": t(8, dense), "b1": t(8), "w2": t(width, 8)})
    ids = f(
        "slice", "tokens", dims=["B", dense], dtype="i32", attributes=f"dim=1 start=0 size={dense}"
    )
    x = f("cast", ids, dims=["B", dense])
    x = f.each("log", f.each("add", x, f.number(1, x)))
    h = f.contract("bi,oi->bo", x, "w1")
    h = f.relu(f.each("add", h, f.broadcast("b1", f.dims(h), [0])))
    bottom = m.layer(f, f.relu(f.contract("bi,oi->bo", h, "w2")))

    names = [f"table{at}" for at in range(tables)]
    f = Function("interact", tokens | {"x": t("B", width)} | {n: t(classes, width) for n in names})
    features = [f.reshape("x", "B", 1, width)]
    for at, table in enumerate(names):
        ids = f(
            "slice",
            "tokens",
            dims=["B", 1],
            dtype="i32",
            attributes=f"dim=1 start={dense + at} size=1",
        )
        features.append(f("gather", table, ids, dims=["B", 1, width], attributes="dim=0 start=0"))
    count = tables + 1
    z = f("concat", *features, dims=["B", count, width], attributes="dim=1")
    pairs = f.contract("bid,bjd->bij", z, z)
    index = lambda dim: f("iota", dims=f.dims(pairs), dtype="i32", attributes=f"dim={dim} start=0")
    below = f.each("lt", index(2), index(1), dtype="bool")
    lower = f("select", below, pairs, f.number(0, pairs), dims=f.dims(pairs))
    flat = f.reshape(lower, "B", count * count)
    joined = f("concat", "x", flat, dims=["B", width + count * count], attributes="dim=1")
    interact = m.layer(f, joined)

    last = {"x": t("B", width + count * count), "w1": t(12, width + count * count), "b1": t(12)}
    last |= {"w2": t(classes, 12)}

    def scores(f):
        h = f.contract("bi,oi->bo", "x", "w1")
        h = f.relu(f.each("add", h, f.broadcast("b1", f.dims(h), [0])))
        return f.contract("bi,oi->bo", h, "w2")

    f = Function("top", last | {"labels": t("B", m.seq, dtype="i32")})
    first = f("slice", "labels", dims=["B", 1], dtype="i32", attributes="dim=1 start=0 size=1")
    label = f("reshape", first, dims=["B"], dtype="i32")
    top = m.layer(f, *f.loss(scores(f), label))
    f = Function("top_logits", last)
    logits = m.layer(f, scores(f))

    x = m.call(bottom, "bottom", tokens="tokens")
    x = m.call(interact, "pairs", tokens="tokens", x=x)
    shared = ("w1", "b1", "w2")
    m.call(top, "loss", shared=shared, x=x, labels="labels")
    m.call(logits, "logits", shared=shared, x=x)
    return m.text()


def losses(f, logits, labels):
    """The sums over the batch and the tokens, one token after the other."""
    _, length, vocab = f.dims(logits)
    sums, counts = [], []
    for at in range(length):
        one = f("slice", logits, dims=["B", 1, vocab], attributes=f"dim=1 start={at} size=1")
        attributes = f"dim=1 start={at} size=1"
        label = f("slice", labels, dims=["B", 1], dtype="i32", attributes=attributes)
        label = f("reshape", label, dims=["B"], dtype="i32")
        loss, count = f.loss(f.reshape(one, "B", vocab), label)
        sums.append(loss)
        counts.append(count)
    total = lambda parts: (
        parts[0] if len(parts) == 1 else f.each("add", total(parts[:-1]), parts[-1])
    )
    return total(sums), total(counts)


def t5(vocab=20, length=6, model=8, heads=2, dim=4, wide=12, layers=2):
    """An encoder of one half of the tokens and a decoder of the other, with relative positions."""
    m = Model("t5", 2 * length)
    reach = 3
    rows = 2 * reach + 1

    def norm(f, x, scale):
        n, s, c = dims = f.dims(x)
        square = f.reduce("sum", f.each("mul", x, x), [2])
        mean = f.each("div", square, f.number(c, square))
        rstd = f.each("rsqrt", f.each("add", mean, f.number(1e-6, mean)))
        normal = f.each("mul", x, f.broadcast(rstd, dims, [2]))
        return f.each("mul", normal, f.broadcast(scale, dims, [0, 1]))

    def attention(f, x, memory, at, bias=None, causal=False):
        q = f.contract("bsm,hdm->bshd", x, f"wq{at}")
        k = f.contract("btm,hdm->bthd", memory, f"wk{at}")
        v = f.contract("btm,hdm->bthd", memory, f"wv{at}")
        scores = f.contract("bshd,bthd->bhst", q, k)
        dims = f.dims(scores)
        if bias:
            square = dims[2:]
            index = lambda d: f("iota", dims=square, dtype="i32", attributes=f"dim={d} start=0")
            away = f.each("sub", index(1), index(0), dtype="i32")
            away = f.each("max", away, f.number(-reach, away, "i32"), dtype="i32")
            away = f.each("min", away, f.number(reach, away, "i32"), dtype="i32")
            row = f.each("add", away, f.number(reach, away, "i32"), dtype="i32")
            found = f("gather", bias, row, dims=[*square, heads], attributes="dim=0 start=0")
            turned = f("transpose", found, dims=[heads, *square], attributes="perm=[2, 0, 1]")
            scores = f.each("add", scores, f.broadcast(turned, dims, [0]))
        if causal:
            index = lambda d: f("iota", dims=dims, dtype="i32", attributes=f"dim={d} start=0")
            seen = f.each("le", index(3), index(2), dtype="bool")
            hidden = f.number(-1e9, scores)
            scores = f("select", seen, scores, hidden, dims=dims)
        mixed = f.contract("bhst,bthd->bshd", f.softmax(scores, 3), v)
        return f.contract("bshd,mhd->bsm", mixed, f"wo{at}")

    def weights(at):
        return {
            f"wq{at}": t(heads, dim, model),
            f"wk{at}": t(heads, dim, model),
            f"wv{at}": t(heads, dim, model),
            f"wo{at}": t(model, heads, dim),
        }

    def forward(f, x):
        h = f.relu(f.contract("bsm,fm->bsf", norm(f, x, "scale"), "up"))
        return f.each("add", x, f.contract("bsf,mf->bsm", h, "down"))

    mlp = {"scale": t(model), "up": t(wide, model), "down": t(model, wide)}
    half = t("B", length, model)

    def embedding(name, start):
        f = Function(name, {"tokens": t("B", m.seq, dtype="i32"), "table": t(vocab, model)})
        ids = f(
            "slice",
            "tokens",
            dims=["B", length],
            dtype="i32",
            attributes=f"dim=1 start={start} size={length}",
        )
        dims = ["B", length, model]
        return m.layer(f, f("gather", "table", ids, dims=dims, attributes="dim=0 start=0"))

    source, target = embedding("source", 0), embedding("target", length)
    f = Function(
        "encode", {"x": half, "scale1": t(model)} | weights(1) | {"bias": t(rows, heads)} | mlp
    )
    n = norm(f, "x", "scale1")
    y = f.each("add", "x", attention(f, n, n, 1, "bias"))
    encode = m.layer(f, forward(f, y))
    f = Function(
        "decode",
        {"x": half, "memory": half, "scale1": t(model)}
        | weights(1)
        | {"bias_t": t(rows, heads), "scale2": t(model)}
        | weights(2)
        | mlp,
    )
    n = norm(f, "x", "scale1")
    y = f.each("add", "x", attention(f, n, n, 1, "bias_t", causal=True))
    y = f.each("add", y, attention(f, norm(f, y, "scale2"), "memory", 2))
    decode = m.layer(f, forward(f, y))

    last = {"x": half, "scale_out": t(model), "w": t(vocab, model)}
    scores = lambda f: f.contract("bsm,vm->bsv", norm(f, "x", "scale_out"), "w")
    f = Function("head", last | {"labels": t("B", m.seq, dtype="i32")})
    ids = f(
        "slice",
        "labels",
        dims=["B", length],
        dtype="i32",
        attributes=f"dim=1 start={length} size={length}",
    )
    logits = scores(f)
    head = m.layer(f, *losses(f, logits, ids))
    f = Function("head_logits", last)
    end = m.layer(f, scores(f))

    shared = ("table", "bias", "bias_t", "scale_out", "w")
    memory = m.call(source, "source", shared, tokens="tokens")
    for at in range(layers):
        memory = m.call(encode, f"encoder{at}", shared, x=memory)
    x = m.call(target, "target", shared, tokens="tokens")
    for at in range(layers):
        x = m.call(decode, f"decoder{at}", shared, x=x, memory=memory)
    m.call(head, "loss", shared, x=x, labels="labels")
    m.call(end, "logits", shared, x=x)
    return m.text()


def moe(vocab=20, length=5, model=6, experts=4, chosen=2, wide=7, layers=2):
    """Tokens to the experts that a router chooses, each with room for all tokens of a sample."""
    m = Model("moe", length)
    tokens = {"tokens": t("B", m.seq, dtype="i32")}
    x = t("B", length, model)

    f = Function("embed", tokens | {"table": t(vocab, model)})
    dims = ["B", length, model]
    embed = m.layer(f, f("gather", "table", "tokens", dims=dims, attributes="dim=0 start=0"))

    weights = {"router": t(model, experts), "gate": t(experts, model, wide)}
    weights |= {"up": t(experts, model, wide), "down": t(experts, wide, model)}
    f = Function("routed", {"x": x} | weights)
    p = f.softmax(f.contract("bsm,me->bse", "x", "router"), 2)
    count = f"dim=2 count={chosen}"
    best = f("top_k", p, dims=["B", length, chosen], dtype="i32", attributes=count)
    each = ["B", length, chosen, experts]
    index = f("iota", dims=each, dtype="i32", attributes="dim=3 start=0")
    hit = f.each("eq", index, f.broadcast(best, each, [3], "i32"), dtype="bool")
    one = f("constant", dims=each, attributes="1.0")
    mask = f.reduce("sum", f("select", hit, one, f.number(0, one), dims=each), [2])
    taken = f.each("mul", p, mask)
    share = f.each("div", taken, f.broadcast(f.reduce("sum", taken, [2]), f.dims(p), [2]))
    # A token's place at an expert: how many tokens before it go there.
    until = f("cumulative", mask, dims=f.dims(mask), attributes="sum dim=1")
    place = f.each("sub", until, mask)
    rooms = ["B", length, experts, length]
    room = f("iota", dims=rooms, attributes="dim=3 start=0")
    there = f.each("eq", room, f.broadcast(place, rooms, [3]), dtype="bool")
    wide_mask = f.broadcast(mask, rooms, [3])
    sent = f("select", there, wide_mask, f.number(0, wide_mask), dims=rooms)
    inputs = f.contract("bsec,bsm->becm", sent, "x")
    gate = f.contract("becm,emf->becf", inputs, "gate")
    up = f.contract("becm,emf->becf", inputs, "up")
    one = f.number(1, gate)
    silu = f.each("div", gate, f.each("add", one, f.each("exp", f.each("neg", gate))))
    made = f.contract("becf,efm->becm", f.each("mul", silu, up), "down")
    back = f.each("mul", sent, f.broadcast(share, rooms, [3]))
    routed = m.layer(f, f.each("add", "x", f.contract("bsec,becm->bsm", back, made)))

    last = {"x": x, "w": t(vocab, model)}
    f = Function("head", last | {"labels": t("B", m.seq, dtype="i32")})
    head = m.layer(f, *losses(f, f.contract("bsm,vm->bsv", "x", "w"), "labels"))
    f = Function("head_logits", last)
    end = m.layer(f, f.contract("bsm,vm->bsv", "x", "w"))

    shared = ("table", "w")
    x = m.call(embed, "embed", shared, tokens="tokens")
    for at in range(layers):
        x = m.call(routed, f"layer{at}", shared, x=x)
    m.call(head, "loss", shared, x=x, labels="labels")
    m.call(end, "logits", shared, x=x)
    return m.text()


def main():
    folder = pathlib.Path(sys.argv[1])
    for model in [resnet, dlrm, t5, moe]:
        (folder / f"{model.__name__}.graph").write_text(model())


if __name__ == "__main__":
    main()
