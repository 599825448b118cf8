"""Collectives of four processes over gloo: the peer of `cargo bench --bench exchange`.

    python benches/torch_exchange.py

Prints the median microseconds of an all-reduce in f32, of an all-gather of as many bytes, and of a
message there and back. Needs torch; nothing is downloaded.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 4


def timed(count, call):
    times = []
    for turn in range(count + 2):
        dist.barrier()
        start = time.perf_counter()
        call()
        if turn > 1:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def run(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29643")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    peer = (rank + RANKS // 2) % RANKS
    for size in (1 << 10, 1 << 16, 1 << 20, 1 << 26):
        count = 9 if size > 1 << 20 else 200
        whole = torch.zeros(size // 4)
        piece = torch.ones(size // 4 // RANKS)
        pieces = list(whole.chunk(RANKS))

        def swap():
            first, second = (dist.send, dist.recv) if rank < peer else (dist.recv, dist.send)
            first(whole, peer)
            second(whole, peer)

        reduce = timed(count, lambda: dist.all_reduce(whole))
        gather = timed(count, lambda: dist.all_gather(pieces, piece))
        message = timed(count, swap)
        if rank == 0:
            print(f"{size:>10} {reduce:>8.0f} us {gather:>8.0f} us {message:>8.0f} us", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    print("     bytes  all-reduce  all-gather  message there and back", flush=True)
    mp.spawn(run, nprocs=RANKS)
