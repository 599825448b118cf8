"""Gives the files of plans for other tools to these tools' own parsers.

    python benches/tools.py GANTLINE [PLANS] [SEED]

GANTLINE is the program, PLANS how many plans of each tool are wanted (50), SEED where they begin.
Needs `pip install deepspeed torch` and, with its dependencies left out, `torchtitan==0.2.1` and
`tyro`; no GPU. A tool whose package is not there is said to be skipped.
"""

import json
import random
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

MODELS = {
    "deepspeed": ["gpt2-xl", "llama-3-8b", "llama-2-13b", "qwen2.5-7b"],
    "torchtitan": ["llama-3-8b", "llama-3-70b"],
}


def deepspeed_parser():
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    # There is one process, and the ranks are those of the plan.
    comm.get_rank = lambda group=None: 0

    def parse(folder, devices):
        config = json.loads((folder / "ds_config.json").read_text())
        ranks = devices // config.get("tensor_parallel", {}).get("autotp_size", 1)
        ranks //= config.get("sequence_parallel_size", 1)

        class Mesh:
            get_data_parallel_world_size = staticmethod(lambda: ranks)

        read = DeepSpeedConfig(config, mpu=Mesh())
        asked = config["zero_optimization"]["stage"]
        assert read.zero_optimization_stage == asked, (read.zero_optimization_stage, asked)
        assert read.train_batch_size == config["train_batch_size"]

    return parse


def torchtitan_parser():
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    def parse(folder, devices):
        path = folder / "train.toml"
        read = ConfigManager().parse_args(["--job.config_file", str(path)])
        p = read.parallelism
        ParallelDims(
            dp_replicate=p.data_parallel_replicate_degree,
            dp_shard=p.data_parallel_shard_degree,
            cp=p.context_parallel_degree,
            tp=p.tensor_parallel_degree,
            pp=p.pipeline_parallel_degree,
            ep=p.expert_parallel_degree,
            etp=p.expert_tensor_parallel_degree,
            world_size=devices,
        )
        written = tomllib.loads(path.read_text())
        for table, values in written.items():
            for name, value in values.items():
                assert getattr(getattr(read, table), name) == value, (table, name)
        if p.pipeline_parallel_degree > 1:
            layers = {"8B": 32, "70B": 80}[written["model"]["flavor"]]
            ends = [
                p.pipeline_parallel_first_stage_less_layers,
                p.pipeline_parallel_last_stage_less_layers,
            ]
            chunks = p.pipeline_parallel_degree
            if p.pipeline_parallel_layers_per_stage:
                chunks = -(-(layers + sum(ends)) // p.pipeline_parallel_layers_per_stage)
            assert chunks % p.pipeline_parallel_degree == 0
            generate_llm_fqn_per_model_part(chunks, layers, *ends)

    return parse


def asked(tool, draw):
    """A random request, of which some have no plan."""
    devices = draw.choice([8, 16, 32, 64])
    line = [draw.choice(MODELS[tool]), "--cluster", draw.choice(["a100", "h100", "h200"])]
    line += ["--devices", str(devices), "--gbs", str(devices * draw.choice([2, 4, 16]))]
    line += ["--seq", draw.choice(["1024", "2048", "4096"])]
    for name, values in [
        ("tp", [1, 2, 4]),
        ("cp", [1, 2]),
        ("pp", [1, 2, 4] if tool == "torchtitan" else [1]),
        ("mbs", [1, 2]),
        ("zero", [0, 1, 2, 3]),
        ("recompute", ["none", "attention", "full"]),
        ("offload", ["off", "on"]),
    ]:
        if draw.random() < 0.4:
            line += ["--fix", f"{name}={draw.choice(values)}"]
    return devices, line


def main():
    program, wanted, seed = sys.argv[1], int((sys.argv + [50])[2]), int((sys.argv + [0, 1])[3])
    for tool, make in [("deepspeed", deepspeed_parser), ("torchtitan", torchtitan_parser)]:
        try:
            parse = make()
        except ImportError as missing:
            print(f"{tool}: skipped, {missing}")
            continue
        draw, plans = random.Random(seed), set()
        while len(plans) < wanted:
            devices, line = asked(tool, draw)
            with tempfile.TemporaryDirectory() as folder:
                command = [program, "plan", *line, "--for-tool", tool, "--json", "-o", folder]
                found = subprocess.run(command, capture_output=True, text=True)
                if found.returncode == 0:
                    text = json.loads(found.stdout)["text"]
                    parse(Path(folder), devices)
                    read = [program, "score", line[0], "--cluster", line[2], "--seq", line[8]]
                    read += ["--from", f"{folder}/run.sh", "--json"]
                    back = json.loads(subprocess.run(read, capture_output=True, text=True).stdout)
                    assert back["configuration"] == text, (line, text, back["configuration"])
                    plans.add((line[0], text))
                elif found.returncode not in (2, 3):
                    sys.exit(f"{' '.join(command)}: {found.stderr}")
        print(f"{tool}: {len(plans)} plans accepted and read back, from seed {seed}")


main()
