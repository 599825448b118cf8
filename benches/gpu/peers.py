"""The kernels of `cargo bench --bench gpu` in PyTorch on the same GPU, and a table of both.

    python benches/gpu/peers.py LINES...

Each file has the lines that the bench printed. Products are cuBLASLt's, attention is the fastest of
PyTorch's back ends (the backward pass deterministic and as it comes), what moves memory is laid
beside the bandwidth that the bench measured for a copy. Launches of a compiled file are summed, and
laid beside the same step of the peer where `--step MODEL,BATCH,SEQ` says which: eager and compiled.
"""

import json
import math
import statistics
import sys
import warnings

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

warnings.filterwarnings("ignore")
ROUNDS, ROUND_S, SETS_BYTES, SETS = 7, 0.012, 300 << 20, 12


def timed(run, sets):
    """Median seconds of `run(set)`, set after set, and the largest over the least."""

    def round_of(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for at in range(count):
            run(sets[at % len(sets)])
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    round_of(3)
    count = max(3, min(400, int(ROUND_S / round_of(5))))
    rounds = sorted(round_of(count) for _ in range(ROUNDS))
    return rounds[ROUNDS // 2], rounds[-1] / rounds[0]


def random(*shape):
    return torch.rand(*shape, device="cuda", dtype=torch.float32).mul_(2).sub_(1).bfloat16()


def sets_of(make, size):
    return [make() for _ in range(max(1, min(SETS, SETS_BYTES // size)))]


def product(line):
    m, n, k, form = (line[key] for key in ("m", "n", "k", "form"))
    shapes = {
        "forward": lambda: (random(m, k), random(k, n)),
        "dgrad": lambda: (random(m, k), random(n, k).t()),
        "wgrad": lambda: (random(k, m).t(), random(k, n)),
    }
    make = lambda: (*shapes[form](), torch.empty(m, n, device="cuda", dtype=torch.bfloat16))
    sets = sets_of(make, 2 * (m * k + k * n + m * n))
    return timed(lambda s: torch.mm(s[0], s[1], out=s[2]), sets)


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(line):
    b, h, g, s, d = (line[key] for key in ("batch", "heads", "kv_heads", "length", "dim"))
    backward = line["pass"] == "backward"

    def make():
        shape = lambda heads: random(b, s, heads, d).transpose(1, 2).requires_grad_(backward)
        return shape(h), shape(g), shape(g), random(b, s, h, d).transpose(1, 2)

    found = {}
    for name, backend in BACKENDS.items():
        for deterministic in (False, True) if backward else (False,):
            try:
                torch.use_deterministic_algorithms(deterministic)
                with sdpa_kernel(backend):
                    call = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=line["causal"], enable_gqa=h != g
                    )
                    sets = sets_of(make, 2 * b * s * d * (2 * h + 2 * g))
                    if backward:
                        sets = [(*of, call(*of[:3])) for of in sets]
                        run = lambda of: torch.autograd.grad(
                            of[4], of[:3], of[3], retain_graph=True
                        )
                    else:
                        run = lambda of: call(*of[:3])
                    key = name + (" deterministic" if deterministic else "")
                    found[key] = timed(run, sets)[0]
            except RuntimeError:
                pass
            finally:
                torch.use_deterministic_algorithms(False)
    return found


def step(model, batch, seq):
    from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config._attn_implementation = "sdpa"
    found = {}
    for name in ("eager", "compiled"):
        net = GPT2LMHeadModel(config).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        forward = torch.compile(net) if name == "compiled" else net
        tokens = torch.randint(0, config.vocab_size, (batch, seq), device="cuda")

        def run(_):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = forward(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
            optimizer.step()

        try:
            found[name] = timed(run, [None])[0]
        except Exception as error:  # what the compiler of the peer refuses is said
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}")
    return found


def rate(line, s):
    return line["flops"] / s / 1e12


def main():
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
    lines, launches, wanted = [], [], None
    for path in sys.argv[1:]:
        if path.startswith("--step="):
            wanted = path.removeprefix("--step=").split(",")
            continue
        lines += [json.loads(line) for line in open(path) if line.startswith("{")]
    bandwidth, ratios = None, {}
    for line in lines:
        if "failed" in line:
            print(f"FAILED {line.get('name', '')}: {line['failed'][:300]}")
            continue
        kind, name, s = line["kind"], line["name"], line["s"]
        shown = f"{name[:40]:<24} {s * 1e3:9.4f} ms ±{(line['spread'] - 1) * 100:3.0f} %"
        if kind == "copy":
            bandwidth = line["bytes"] / s
            print(f"{shown} {bandwidth / 1e12:7.3f} TB/s")
        elif kind == "memory":
            share = line["bytes"] / s / bandwidth
            ratios.setdefault("memory", []).append((share, name))
            print(f"{shown} {share:7.3f} of the copy's bandwidth")
        elif kind == "product":
            peer, _ = product(line)
            ratios.setdefault("products", []).append((peer / s, name))
            rates = f"{rate(line, s):6.0f} TF/s, cuBLASLt {rate(line, peer):6.0f}"
            print(f"{shown} {rates}, {peer / s:5.3f} ×")
        elif kind == "attention":
            found = attention(line)
            if found:
                best = min(found, key=found.get)
                ratios.setdefault(line["pass"], []).append((found[best] / s, name))
                peers = ", ".join(f"{key} {found[best] / found[key]:.2f}" for key in found)
                ratio = f"{best} {found[best] / s:5.3f} × ({peers})"
                print(f"{shown} {rate(line, s):6.0f} TF/s, {ratio}")
        elif kind == "launch":
            launches.append(line)
        torch.cuda.empty_cache()
    for what, of in ratios.items():
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in of))
        print(f"{what}: geometric mean {mean:.3f}, least {min(of)[0]:.3f} ({min(of)[1]})")
    if launches:
        weight = lambda line: line["launches"] * line["s"]
        total = sum(map(weight, launches))
        print(f"launches of a step: {sum(l['launches'] for l in launches)}, {total * 1e3:.2f} ms")
        for line in sorted(launches, key=weight, reverse=True)[:25]:
            least = max(line["bytes"] / (bandwidth or 3e12), line["flops"] / 8e14)
            print(
                f"  {weight(line) / total * 100:5.1f} % {line['launches']:>4} × "
                f"{line['s'] * 1e6:8.1f} us, {least / line['s']:5.2f} of the roofline: "
                f"{line['name'][:90]}"
            )
        if wanted:
            for name, s in step(wanted[0], int(wanted[1]), int(wanted[2])).items():
                print(f"  {name}: {s * 1e3:.2f} ms a step, {s / total:.3f} × ours")


main()
