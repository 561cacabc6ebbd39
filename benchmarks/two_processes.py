"""Training throughput of one process with two BLAS threads, and of two processes with one thread each, alternating.

    python benchmarks/two_processes.py [--models 1m,5m] [--rounds 9] [--steps 4]

A step is 2 x 8 sequences of 256 tokens: one process accumulates two batches; two processes take one each, and MLX's
ring sums the gradients. Prints each round with the load of the machine, and the median ratio: above 1, two processes
are faster.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {
    "1m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
           "intermediate_size": 344, "vocab_size": 2048},
    "5m": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
           "intermediate_size": 688, "vocab_size": 4096},
}  # fmt: skip
BATCH, LENGTH, BATCHES = 8, 256, 2


def work(name: str) -> None:
    """Train in this process: rank 0 reads how many steps to do, and prints tokens per second."""
    import numpy as np

    from mlxlm.backend.mlx import mx
    from mlxlm.backend.process_group import join_process_group
    from mlxlm.config import ModelConfig
    from mlxlm.data import Batch
    from mlxlm.model import Decoder
    from mlxlm.train import TrainSettings
    from mlxlm.train.step import TrainStep

    config = ModelConfig(tie_word_embeddings=True, **SHAPES[name])
    with join_process_group() as process_group:
        model = Decoder(config)
        model.init_weights(0)
        shape = {"batch_size": BATCH, "max_seq_length": LENGTH, "grad_accumulation_steps": BATCHES}
        step = TrainStep(model, TrainSettings(steps=1000, learning_rate=1e-3, **shape), process_group)
        random = np.random.default_rng(process_group.rank)
        tokens = random.integers(
            0, config.vocab_size, (process_group.batches_per_process(BATCHES), BATCH, LENGTH + 1), dtype=np.int32
        )
        batches = [Batch(one) for one in tokens]
        mx.eval(step(batches, 1e-3), step.state)
        while steps := process_group.broadcast_object(
            int(sys.stdin.readline() or 0) if process_group.rank == 0 else None
        ):
            start = time.perf_counter()
            for _ in range(steps):
                mx.eval(step(batches, 1e-3), step.state)
            if process_group.rank == 0:
                print(steps * BATCHES * BATCH * LENGTH / (time.perf_counter() - start), flush=True)


def started(name: str, **environment: str) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, __file__, "--work", name], env=os.environ | environment, **pipes)


def measured(process: subprocess.Popen, steps: int) -> float:
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def compare(name: str, rounds: int, steps: int, folder: Path) -> None:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    (folder / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{s.getsockname()[1]}"] for s in servers]))
    for server in servers:
        server.close()
    ring = {"MLX_HOSTFILE": str(folder / "hosts.json"), "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    one = started(name, MKL_NUM_THREADS="2", OPENBLAS_NUM_THREADS="2")
    two = [started(name, MLX_RANK=str(rank), **ring) for rank in range(2)]
    ratios = []
    for _ in range(rounds):
        single, double = measured(one, steps), measured(two[0], steps)
        ratios.append(double / single)
        print(f"{name}: {single:7,.0f} {double:7,.0f} tokens/s  {ratios[-1]:.2f}  load {os.getloadavg()[0]:.1f}")
    print(f"{name}: median ratio {statistics.median(ratios):.2f}")
    for process in (one, *two):
        process.communicate("0\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="1m,5m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            compare(name, options.rounds, options.steps, Path(folder))


if __name__ == "__main__":
    main()
