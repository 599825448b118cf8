#!/usr/bin/env python3
"""Fits the constants of device files to published timings of single kernels.

    python3 planner/calibration/fit.py DIRECTORY > constants.toml

DIRECTORY holds `gemm_aiconfigurator.csv`, `attention_prefill_aiconfigurator.csv` and
`comm_aiconfigurator_nccl_intranode.csv` (ai-dynamo/aiconfigurator, Apache-2.0, systems/data at
095f58a51, as CSV). No timing of a model is read. The search is random with a fixed seed, so that
the same tables give the same constants.

Products: floor + (waves^4 + memory^4)^(1/4) for the best tile, and the cast of the left operand
where it is narrower than two bytes, as in `estimate/rates.rs`.
Attention: floor + flops / (rate * keys / (keys + half)).
Collectives: the timings themselves, at powers of four bytes.
"""

import collections
import csv
import math
import random
import sys

PROCESSORS = {
    "A100-80GB": 108, "H100-80GB": 132, "H200-141GB": 132, "B200": 148, "GB200": 148,
    "B300": 148, "GB300": 148, "L40S": 142,
}
PEAK = {  # TFLOP/s, dense, of the datasheets
    ("A100-80GB", "bfloat16"): 312.0, ("H100-80GB", "bfloat16"): 989.5,
    ("H100-80GB", "fp8"): 1979.0, ("H200-141GB", "bfloat16"): 989.5,
    ("B200", "bfloat16"): 2250.0, ("B200", "fp8"): 4500.0,
    ("GB200", "bfloat16"): 2500.0, ("GB200", "fp8"): 5000.0, ("B200", "nvfp4"): 9000.0,
}
TILES = [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64)]
SAMPLE, STEPS = 400, 1500


def rows(directory, name):
    with open(f"{directory}/{name}") as file:
        yield from csv.DictReader(file)


def product_us(shape, p, bytes_each):
    m, n, k = shape
    best = math.inf
    for (a, b), share in zip(TILES, p["shares"]):
        waves = math.ceil(m / a) * math.ceil(n / b) / p["processors"]
        if waves <= 1:
            waves = 1
        else:
            waves = math.ceil(waves) * p["quantised"] + waves * (1 - p["quantised"])
        each = p["peak"] / p["processors"] * share
        best = min(best, waves * (2 * a * b * k / each + p["tile"]))
    memory = ((m * k + n * k) * bytes_each + m * n * 2) / p["bandwidth"]
    cast = m * k * (2 + bytes_each) / p["bandwidth"] if bytes_each < 2 else 0.0
    return p["floor"] + cast + (best**4 + memory**4) ** 0.25


def fit_product(table, processors, peak, bytes_each):
    rng = random.Random(1)
    chosen = sorted((s, t) for s, t in table.items() if s[0] >= 64 and 2 * math.prod(s) > 1e8)
    rng.shuffle(chosen)
    chosen = chosen[:SAMPLE]
    p = {
        "processors": processors, "peak": peak * 1e6, "bandwidth": 2e6, "floor": 2.5, "tile": 1.0,
        "quantised": 0.6, "shares": [0.85, 0.85, 0.75, 0.6, 0.6, 0.45, 0.3],
    }

    # Timings of narrow operands have the cast in them, so that their rates show in large products
    # alone: those count four times.
    weights = [4 if bytes_each < 2 and 2 * math.prod(s) > 1e11 else 1 for s, _ in chosen]

    def loss(q):
        off = (math.log(product_us(s, q, bytes_each) / t) for s, t in chosen)
        return sum(w * min(1.0, abs(o)) for w, o in zip(weights, off)) / sum(weights)

    best = loss(p)
    for _ in range(STEPS):
        q = dict(p, shares=list(p["shares"]))
        if rng.random() < 0.4:
            name = rng.choice(["floor", "tile", "quantised", "bandwidth"])
            q[name] *= math.exp(rng.gauss(0, 0.15))
            q["quantised"] = min(1.0, q["quantised"])
        else:
            i = rng.randrange(len(TILES))
            q["shares"][i] = min(1.0, q["shares"][i] * math.exp(rng.gauss(0, 0.1)))
        new = loss(q)
        if new < best:
            best, p = new, q
    off = sorted(abs(math.log(product_us(s, p, bytes_each) / t)) for s, t in table.items()
                 if s[0] >= 256)
    return p, off[len(off) // 2], sum(off) / len(off)


def products(directory):
    tables = collections.defaultdict(dict)
    for row in rows(directory, "gemm_aiconfigurator.csv"):
        shape = (int(row["m"]), int(row["n"]), int(row["k"]))
        tables[row["gpu"], row["dtype"]][shape] = float(row["latency_us"])
    for (gpu, dtype), peak in PEAK.items():
        bytes_each = {"fp8": 1, "nvfp4": 0.5625}.get(dtype, 2)
        p, median, mean = fit_product(tables[gpu, dtype], PROCESSORS[gpu], peak, bytes_each)
        tiles = ", ".join(f"[{a}, {b}, {s:.3f}]" for (a, b), s in zip(TILES, p["shares"]))
        print(f"# {gpu} {dtype}: {len(tables[gpu, dtype])} timings, "
              f"median {median:.3f}, mean {mean:.3f} off for 256 rows and more")
        name = {"fp8": "f8", "nvfp4": "f4"}.get(dtype, "half")
        print(f"[[device.product]]\narithmetic = \"{name}\"")
        print(f"peak_flops = {peak}e12\nfloor_s = {p['floor']:.2f}e-6\ntile_s = {p['tile']:.2f}e-6")
        print(f"quantised = {p['quantised']:.3f}\nbytes_per_s = {p['bandwidth'] / 1e6:.2f}e12")
        print(f"tiles = [{tiles}]\nspread = {mean:.3f}\n", flush=True)


def attention(directory):
    tables = collections.defaultdict(list)
    for row in rows(directory, "attention_prefill_aiconfigurator.csv"):
        batch, seq, heads = (int(row[c]) for c in ("batch_size", "seq_len", "num_heads"))
        flops = 2.0 * batch * heads * seq * seq * int(row["head_dim"])
        if seq >= 512 and batch * heads >= 16:
            tables[row["gpu"]].append((flops, seq, float(row["latency_us"])))
    for gpu, table in tables.items():
        best = None
        for rate in range(100, 700, 5):
            for half in range(100, 2600, 100):
                off = [abs(math.log((8 + f / (rate * 1e6 * s / (s + half))) / t))
                       for f, s, t in table[::7]]
                mean = sum(off) / len(off)
                if best is None or mean < best[0]:
                    best = (mean, rate, half)
        print(f"# {gpu}: {len(table)} timings of causal attention, mean {best[0]:.3f} off")
        print(f"forward_flops = {best[1]}e12\nhalf_keys = {best[2]}.0\n", flush=True)


def collectives(directory):
    tables = collections.defaultdict(dict)
    names = {"all_reduce": "all_reduce_us", "all_gather": "gather_us", "alltoall": "exchange_us"}
    for row in rows(directory, "comm_aiconfigurator_nccl_intranode.csv"):
        if row["collective"] in names and row["gpu"] in PROCESSORS:
            key = (row["gpu"], int(row["n_gpus"]))
            tables[key].setdefault(names[row["collective"]], {})[int(row["payload_bytes"])] = float(
                row["latency_us"])
    for (gpu, members), kinds in sorted(tables.items()):
        print(f"# {gpu}\n[[inner.timing]]\nmembers = {members}")
        for name, timings in kinds.items():
            values = [timings[4**power] for power in range(5, 15) if 4**power in timings]
            if 2**29 in timings:
                values.append(timings[2**29])
            print(f"{name} = [{', '.join(f'{value:.1f}' for value in values)}]")
        print(flush=True)


if __name__ == "__main__":
    collectives(sys.argv[1])
    attention(sys.argv[1])
    products(sys.argv[1])
