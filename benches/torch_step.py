"""A training step of GPT-2 124M in PyTorch eager: the peer of `cargo bench --bench step`.

    python benches/torch_step.py [threads]

Batch 1, f32, no dropout, AdamW; random weights and tokens. Prints the median seconds of a step.
Needs torch and transformers; nothing is downloaded.
"""

import statistics
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
torch.manual_seed(0)
config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
print("torch", torch.__version__, "threads", torch.get_num_threads())
for seq in (256, 1024):
    tokens = torch.randint(0, config.vocab_size, (1, seq))
    times = []
    for step in range(8 if seq == 256 else 5):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - start)
    print(f"seq {seq}: {statistics.median(times[1:]):.3f} s")
