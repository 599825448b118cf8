"""Prices plans in the model of Calculon (Isaev et al. 2023), with Calculon's own code.

    python tests/reference/calculon.py CHECKOUT score tests/calculon/*.json
    python tests/reference/calculon.py CHECKOUT compare --gantline target/release/gantline

CHECKOUT is a clone of github.com/calculon-ai/calculon (commit caa4b11, February 2024).

`score` prints what its model says of execution files, on A100 80GB of its `systems/a100_80g.json`.
A second line says the same with products and collectives of tensor parallelism overlapped as its
winners have them, which no plan here decides.

`compare` draws legal layouts of GPT-3 175B, exports each with `gantline export --to calculon`, and
lays the step time and memory that `gantline score` says beside Calculon's.
"""

import argparse
import json
import logging
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile

SEQUENCE = 2048
LAYERS = 96
UNLIMITED_GIB = 1e9


class Calculon:
    """The code of a checkout, quiet: its records of debugging take most of its time."""

    def __init__(self, checkout, model, system):
        if not os.path.isfile(os.path.join(checkout, "calculon", "llm", "llm.py")):
            sys.exit(
                f"{checkout} is no checkout of Calculon: there is no calculon/llm/llm.py\n"
                "git clone https://github.com/calculon-ai/calculon, and give its directory"
            )
        sys.path.insert(0, checkout)
        try:
            from calculon import System
            from calculon.llm import Llm
        except ImportError as error:
            sys.exit(f"{checkout} does not import: {error}\npip install psutil pandas numpy")
        self.llm, self.system_of = Llm, System
        self.log = logging.getLogger("quiet")
        self.log.setLevel(logging.CRITICAL)
        self.application = Llm.Application(read(os.path.join(checkout, model)))
        self.system = read(os.path.join(checkout, system))

    def run(self, execution, system):
        model = self.llm(self.application, self.log)
        system = self.system_of(system)
        model.compile(system, self.llm.Execution.from_json(execution))
        model.run(system)
        return model.get_stats_json(False)

    def price(self, execution):
        """Statistics of an execution and what refuses it, if anything: then as if memory were
        unlimited."""
        try:
            return self.run(execution, self.system), None
        except self.llm.Error as error:
            refused = str(error)
        larger = json.loads(json.dumps(self.system))
        larger["mem1"]["GiB"] = UNLIMITED_GIB
        try:
            return self.run(execution, larger), refused
        except self.llm.Error:
            return None, refused


def read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def overlapped(execution):
    """As Calculon's winners execute: collectives in a ring of tiles, and none twice."""
    if execution["tensor_par"] == 1:
        return execution
    return execution | {"tensor_par_overlap": "ring", "seq_par_ag_redo": False}


def score(calculon, paths):
    print(f"{'file':44} {'TP':4} {'samples/s':>9} {'step':>9} {'memory':>9}  {'MFU':>6}")
    for path in paths:
        execution = read(path)
        for name, execution in [("file", execution), ("ring", overlapped(execution))]:
            stats, refused = calculon.price(execution)
            if stats is None:
                print(f"{path:44} {name:4} refused: {refused}")
                continue
            memory = stats["proc_mem_tier1_cap_req"] / 1e9
            share = 100 * stats["total_efficiency"]
            print(
                f"{path:44} {name:4} {stats['sample_rate']:9.3f} {stats['total_time']:7.3f} s"
                f" {memory:6.2f} GB {share:6.1f} %  {refused or 'fits'}"
            )


def layout(draw, devices, batch):
    """A legal layout of a batch on devices, and None where what was drawn is not legal."""
    tensor = draw.choice([1, 2, 4, 8])
    stages = draw.choice([1, 2, 4, 8, 16, 32])
    if devices % (tensor * stages):
        return None
    data = devices // (tensor * stages)
    microbatch = draw.choice([1, 2, 4])
    if batch % (data * microbatch):
        return None
    chunks = draw.choice([n for n in (1, 2, 3, 4, 6, 12) if LAYERS // stages % n == 0])
    count = batch // data // microbatch
    if stages == 1 or count % stages:
        chunks = 1
    words = [f"tp={tensor} pp={stages} dp={data} mbs={microbatch}"]
    if chunks > 1:
        words.append(f"vpp={chunks}")
    if tensor > 1 and draw.random() < 0.7:
        words.append("sp")
    if data > 1 and draw.random() < 0.6:
        words.append("zero=1")
    if draw.random() < 0.5:
        words.append("recompute=full")
    return " ".join(words)


def gantline(program, *flags):
    done = subprocess.run([program, *flags], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):  # 3: it does not fit, and is priced all the same
        raise ValueError(f"{' '.join(flags)}: {done.stderr.strip()}")
    return done.stdout


def both(calculon, program, text, batch, folder):
    """Seconds and bytes of a layout, ours and Calculon's."""
    size = ["--gbs", str(batch), "--seq", str(SEQUENCE), "--json"]
    said = gantline(program, "score", "gpt3-175b", "--cluster", "a100", "--config", text, *size)
    ours = json.loads(said)
    plan, out = os.path.join(folder, "plan.json"), os.path.join(folder, "execution.json")
    with open(plan, "w", encoding="utf-8") as file:
        json.dump({"text": text, "gbs": batch, "seq": SEQUENCE, "layers": LAYERS}, file)
    gantline(program, "export", plan, "--to", "calculon", "-o", out)
    stats, refused = calculon.price(read(out))
    if stats is None:
        raise ValueError(f"Calculon refuses {text}: {refused}")
    ours = ours["step_time_s"], ours["peak_mem_bytes"]
    return *ours, stats["total_time"], stats["proc_mem_tier1_cap_req"]


def tau(left, right):
    """Kendall's tau-b of two lists."""
    agree = ties_left = ties_right = pairs = 0
    for i in range(len(left)):
        for j in range(i):
            pairs += 1
            a, b = left[i] - left[j], right[i] - right[j]
            ties_left += a == 0
            ties_right += b == 0
            agree += (a * b > 0) - (a * b < 0)
    return agree / math.sqrt((pairs - ties_left) * (pairs - ties_right))


def compare(calculon, args):
    draw = random.Random(args.seed)
    sizes = [(64, 64), (512, 1536), (1024, 1536)]
    print(f"seed {args.seed}; ratio: ours over Calculon's")
    print(f"{'devices':>7} {'n':>4} {'tau':>6} {'r log':>6} {'ratio p10':>9} {'p50':>6} {'p90':>6}"
          f" {'memory p50':>10} {'tau':>6}")
    everything = []
    with tempfile.TemporaryDirectory() as folder:
        for devices, batch in sizes:
            seen = {}
            for _ in range(100 * args.count):
                text = layout(draw, devices, batch)
                if text is not None and text not in seen:
                    seen[text] = both(calculon, args.gantline, text, batch, folder)
                if len(seen) == args.count:
                    break
            rows = list(seen.values())
            everything.extend(rows)
            if args.rows:
                for text, row in seen.items():
                    print(devices, text, *(f"{value:.4g}" for value in row), sep=",")
            line(devices, rows)
    line("all", everything)


def line(name, rows):
    ours, our_bytes, theirs, their_bytes = zip(*rows)
    ratios = statistics.quantiles([a / b for a, b in zip(ours, theirs)], n=10)
    memory = statistics.median(a / b for a, b in zip(our_bytes, their_bytes))
    logs = statistics.correlation([math.log(a) for a in ours], [math.log(b) for b in theirs])
    print(
        f"{name:>7} {len(rows):4} {tau(ours, theirs):6.3f} {logs:6.3f} {ratios[0]:9.3f}"
        f" {ratios[4]:6.3f} {ratios[8]:6.3f} {memory:10.3f} {tau(our_bytes, their_bytes):6.3f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout")
    parser.add_argument("--model", default="models/gpt3-175B.json")
    parser.add_argument("--system", default="systems/a100_80g.json")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("score").add_argument("files", nargs="+")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("--gantline", default="target/release/gantline")
    comparing.add_argument("--count", type=int, default=70, help="layouts for each size")
    comparing.add_argument("--seed", type=int, default=1)
    comparing.add_argument("--rows", action="store_true", help="print every layout too")
    args = parser.parse_args()
    calculon = Calculon(args.checkout, args.model, args.system)
    if args.verb == "score":
        score(calculon, args.files)
    else:
        compare(calculon, args)


if __name__ == "__main__":
    main()
