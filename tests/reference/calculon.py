"""Prices plans in the model of Calculon (Isaev et al. 2023), with Calculon's own code.

    python tests/reference/calculon.py CHECKOUT score tests/calculon/*.json
    python tests/reference/calculon.py CHECKOUT compare --gantline target/release/gantline

CHECKOUT is a clone of github.com/calculon-ai/calculon (commit caa4b11, February 2024).

Knobs that no plan here decides are Calculon's own: whether tensor parallelism's collectives run
beside products, whether what was gathered is kept, whether attention keeps its scores. `plain` is
without overlap, as `gantline export` writes it; `free` is with those knobs as Calculon likes best.

`score` prints what its model says of execution files on A100 80GB of its `systems/a100_80g.json`.

`compare` draws legal layouts of GPT-3 175B, exports each with `gantline export --to calculon`, and
lays the step time and memory that `gantline score` says beside Calculon's.
"""

import argparse
import collections
import itertools
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


def plain(execution):
    """Without overlap; what was gathered is gathered again where that saves memory."""
    gathers = execution["tensor_par_comm_type"] == "rs_ag"
    again = gathers and execution["activation_recompute"] != "full"
    return execution | {"tensor_par_overlap": "none", "seq_par_ag_redo": again}


def free(calculon, execution):
    """Statistics with Calculon's own knobs at their best, and `None` where nothing fits."""
    scores = {"attn_only": ["attn_only", "none"]}
    found = []
    for overlap, again in itertools.product(
        ["ring", "none"] if execution["tensor_par"] > 1 else ["none"],
        scores.get(execution["activation_recompute"], [execution["activation_recompute"]]),
    ):
        knobs = {"tensor_par_overlap": overlap, "activation_recompute": again}
        stats, refused = calculon.price(execution | {"seq_par_ag_redo": False} | knobs)
        if refused is None:
            found.append(stats)
    return min(found, key=lambda stats: stats["total_time"], default=None)


def score(calculon, paths):
    print(f"{'file':36} {'':5} {'samples/s':>9} {'step':>9} {'memory':>9} {'MFU':>8}")
    for path in paths:
        execution = read(path)
        stats, refused = calculon.price(plain(execution))
        for name, stats, refused in [
            ("plain", stats, refused),
            ("free", free(calculon, execution), None),
        ]:
            if stats is None:
                print(f"{path:36} {name:5} refused: {refused or 'it does not fit'}")
                continue
            memory = stats["proc_mem_tier1_cap_req"] / 1e9
            share = 100 * stats["total_efficiency"]
            print(
                f"{path:36} {name:5} {stats['sample_rate']:9.3f} {stats['total_time']:7.3f} s"
                f" {memory:6.2f} GB {share:6.1f} %  {refused or ''}".rstrip()
            )


def layouts(devices, batch):
    """The legal layouts of a batch on devices that both tools can say, in a fixed order."""
    found = []
    for tensor, stages in itertools.product([1, 2, 4, 8], [1, 2, 4, 8, 16, 32]):
        data, rest = divmod(devices, tensor * stages)
        if rest or data == 0:
            continue
        for microbatch in [n for n in (1, 2, 3, 4, 6, 8) if batch % (data * n) == 0]:
            even = batch // data // microbatch % stages == 0
            chunks = [n for n in (1, 2, 3, 4, 6, 8, 12) if LAYERS // stages % n == 0]
            for chunk, sharded, zero, again in itertools.product(
                chunks if stages > 1 and even else [1],
                ["", " sp"] if tensor > 1 else [""],
                ["", " zero=1"] if data > 1 else [""],
                ["", " recompute=full"],
            ):
                words = f"tp={tensor} pp={stages} dp={data} mbs={microbatch}"
                words += f" vpp={chunk}" if chunk > 1 else ""
                found.append(words + sharded + zero + again)
    return found


def gantline(program, *flags):
    done = subprocess.run([program, *flags], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):  # 3: it does not fit, and is priced all the same
        raise ValueError(f"{' '.join(flags)}: {done.stderr.strip()}")
    return done.stdout


Prices = collections.namedtuple(
    "Prices", "text ours our_bytes fits theirs their_bytes fits_theirs free"
)


def both(calculon, program, text, batch, folder):
    """Seconds and bytes of a layout, ours and Calculon's."""
    size = ["--gbs", str(batch), "--seq", str(SEQUENCE), "--json"]
    said = gantline(program, "score", "gpt3-175b", "--cluster", "a100", "--config", text, *size)
    ours = json.loads(said)
    plan, out = os.path.join(folder, "plan.json"), os.path.join(folder, "execution.json")
    with open(plan, "w", encoding="utf-8") as file:
        json.dump({"text": text, "gbs": batch, "seq": SEQUENCE, "layers": LAYERS}, file)
    gantline(program, "export", plan, "--to", "calculon", "-o", out)
    execution = read(out)
    stats, refused = calculon.price(execution)
    freely = free(calculon, execution)
    if stats is None:
        raise ValueError(f"Calculon refuses {text}: {refused}")
    return Prices(
        text,
        ours["step_time_s"],
        ours["peak_mem_bytes"],
        ours["fits"],
        stats["total_time"],
        stats["proc_mem_tier1_cap_req"],
        refused is None,
        freely["total_time"] if freely else math.inf,
    )


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
    print(f"seed {args.seed}; ratios: ours over Calculon's")
    print(
        f"{'devices':>8} {'layouts':>8} {'tau':>6} {'r':>6} {'p10':>6} {'p50':>6} {'p90':>6}"
        f" {'memory':>7} {'tau':>6}"
    )
    everything = []
    with tempfile.TemporaryDirectory() as folder:
        for devices, batch in [(64, 64), (512, 1536), (1024, 1536)]:
            drawn = every = layouts(devices, batch)
            if args.count < len(every):
                drawn = draw.sample(every, args.count)
            rows = [both(calculon, args.gantline, text, batch, folder) for text in drawn]
            everything.extend(rows)
            for row in rows if args.rows else []:
                print(devices, *row, sep=",")
            line(str(devices), rows)
            line("that fit", [row for row in rows if row.fits and row.fits_theirs])
            if len(rows) == len(every):
                regret(rows)
    line("all", everything)
    line("that fit", [row for row in everything if row.fits and row.fits_theirs])


def line(name, rows):
    """Kendall's tau and Pearson's r of logarithms of times, and ratios of times and of bytes."""
    if len(rows) < 3:
        print(f"{name:>8} {len(rows):8}")
        return
    _, ours, our_bytes, _, theirs, their_bytes, _, _ = zip(*rows)
    ratios = statistics.quantiles([a / b for a, b in zip(ours, theirs)], n=10)
    memory = statistics.median(a / b for a, b in zip(our_bytes, their_bytes))
    logs = statistics.correlation([math.log(a) for a in ours], [math.log(b) for b in theirs])
    print(
        f"{name:>8} {len(rows):8} {tau(ours, theirs):6.3f} {logs:6.3f} {ratios[0]:6.3f}"
        f" {ratios[4]:6.3f} {ratios[8]:6.3f} {memory:7.3f} {tau(our_bytes, their_bytes):6.3f}"
    )


def regret(rows):
    """What each tool's choice costs in the model of the other, among what fits both."""
    ours = min((row for row in rows if row.fits), key=lambda row: row.ours, default=None)
    if ours is None:
        return
    for name, time in [("plain", lambda row: row.theirs), ("free", lambda row: row.free)]:
        fit = [row for row in rows if row.fits and (row.fits_theirs or name == "free")]
        theirs = min(fit, key=time)
        print(
            f"{name:>8} ours {ours.text}: {time(ours):.3f} s, {time(ours) / time(theirs) - 1:+.1%};"
            f" Calculon's {theirs.text}: {time(theirs):.3f} s, {theirs.ours / ours.ours - 1:+.1%}"
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
    comparing.add_argument("--count", type=int, default=70, help="layouts for each size, at most")
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
