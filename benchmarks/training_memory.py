"""Peak memory of a training step beside plain MLX, at a vocabulary of 32,000.

    python benchmarks/training_memory.py [--lengths 512,2048,8192] [--ways plain,default,recompute]

A model of 4 layers, hidden 256, 4 heads, one sequence a step, AdamW, float32, compiled. "plain" takes
`mx.fast.scaled_dot_product_attention`, `mlx.nn.losses.cross_entropy` on whole logits, and keeps all activations;
"default" is mlxlm's step: the loss in chunks, attention in blocks from 1,024 on; "recompute" also makes each layer's
activations twice (`--grad-checkpoint`). Each measurement has a process of its own, of at most four fifths of the machine's
memory, and is that of the second step. "peak" is MLX's count of the arrays alive at once, "resident" the process's
largest size, with the buffers that MLX keeps for use again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
from common import peak_memory, report

WAYS = ("plain", "default", "grad_checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--step", nargs=2, metavar=("WAY", "LENGTH"), help="one measurement, in this process")
    options = parser.parse_args()
    if options.step:
        print(json.dumps(step(options.step[0], int(options.step[1]))))
        return
    found: dict[int, dict[str, Any]] = {}
    for length in map(int, options.lengths.split(",")):
        found[length] = {way: measured(way, length) for way in options.ways.split(",")}
    rows = [(f"T {length:,} {way}", cell(row, row.get("plain"), way)) for length, r in found.items() for row in [r]
            for way in row]  # fmt: skip
    report("one training step, vocabulary 32,000", rows, {"benchmark": "training_memory", "lengths": found})


def cell(row: dict[str, Any], plain: dict[str, Any] | None, way: str) -> str:
    if (it := row[way]) is None:
        return "out of memory"
    ratio = f" ({it['peak_mb'] / plain['peak_mb']:.2f} of plain)" if plain and way != "plain" else ""
    return f"peak {it['peak_mb']:,} MB{ratio}, resident {it['resident_mb']:,} MB, {it['seconds']:.1f} s"


def measured(way: str, length: int) -> dict[str, Any] | None:
    """One measurement in a new process, or None if it died, which a lack of memory does to it."""
    command = [sys.executable, __file__, "--step", way, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"{length} {way}: {done.stdout.strip() or done.stderr.strip()[-200:] or done.returncode}", file=sys.stderr)
    return json.loads(done.stdout) if done.returncode == 0 else None


def step(way: str, length: int) -> dict[str, Any]:
    from mlxlm.backend import platform
    from mlxlm.backend.mlx import mx
    from mlxlm.config import ModelConfig
    from mlxlm.data import Batch
    from mlxlm.model import Decoder
    from mlxlm.train import TrainSettings
    from mlxlm.train.memory_limits import limit_buffer_cache, memory_limits
    from mlxlm.train.step import TrainStep

    limit_memory(platform.total_memory())
    config = ModelConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=688, vocab_size=32_000,
        max_position_embeddings=length, tie_word_embeddings=True,
    )  # fmt: skip
    if way == "plain":
        make_plain()
    model = Decoder(config)
    model.init_weights(0)
    settings = TrainSettings(steps=10, learning_rate=1e-3, batch_size=1, grad_checkpoint=way == "grad_checkpoint")
    train_step = TrainStep(model, settings)
    batch = [Batch(np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1)).astype(np.int32))]
    with nullcontext() if way == "plain" else memory_limits():
        mx.eval(train_step(batch, 1e-3), train_step.state)
        if way != "plain":
            limit_buffer_cache()
        mx.reset_peak_memory()
        start = time.perf_counter()
        mx.eval(train_step(batch, 1e-3), train_step.state)
        seconds = time.perf_counter() - start
    megabytes = {"peak_mb": round(mx.get_peak_memory() / 1e6), "resident_mb": round(peak_memory() / 1e6)}
    return {**megabytes, "seconds": round(seconds, 2)}


def make_plain() -> None:
    """Put MLX's own attention and loss where mlxlm has others."""
    from mlxlm.backend.mlx import mx, nn
    from mlxlm.model import attention as of_model
    from mlxlm.train import step as of_training

    def attention(queries, keys, values, scale, **_):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")

    def summed_loss(model, tokens, _segments, _weights):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="sum")

    of_model.attention, of_training.summed_loss = attention, summed_loss


def limit_memory(most: int) -> None:
    """Fail rather than drive the machine into swapping."""
    import resource

    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (int(0.8 * most), int(0.8 * most)))


if __name__ == "__main__":
    main()
