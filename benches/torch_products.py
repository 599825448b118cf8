"""The square products of `cargo bench --bench limits -- products` in PyTorch, on one thread."""

import time

import torch

torch.set_num_threads(1)
print(f"torch {torch.__version__}")
for side in (768, 1024, 2048, 3072):
    a, b = (torch.randn(side, side).bfloat16() for _ in range(2))
    forms = {"forward": lambda: a @ b, "dgrad": lambda: a @ b.t(), "wgrad": lambda: a.t() @ b}
    for name, product in forms.items():
        best = float("inf")
        for _ in range(25):
            start = time.perf_counter()
            product()
            best = min(best, time.perf_counter() - start)
        rate = 2 * side**3 / best
        print(f"  {side:>4} {name:<8} {best * 1e3:9.3f} ms {rate / 1e9:7.1f} Gflop/s")
