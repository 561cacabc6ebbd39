"""Peak memory and time of one training step by sequence length, for plain MLX attention and blockwise attention.

    python benchmarks/attention_memory.py [--lengths 512,1024,2048,4096,8192] [--rounds 3]

A model of 4 layers, 8 heads of 64, one sequence a step, AdamW. "plain" is `mx.fast.scaled_dot_product_attention`,
"mlx" is what mlxlm uses for short lengths; the gradient of both keeps all probabilities. "blockwise" is what mlxlm
uses from 1,024 tokens on without Metal. Each measurement has its own process with at most four fifths of the machine's
memory; peak memory is counted by MLX.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np
from common import limit_memory, median, report, run_or_none

PATHS = ("plain", "mlx", "blockwise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", nargs=2, metavar=("PATH", "LENGTH"), help="measure once, in this process")
    options = parser.parse_args()
    if options.step:
        print(json.dumps(step(options.step[0], int(options.step[1]))))
        return
    results, rows = {}, []
    for length in (int(n) for n in options.lengths.split(",")):
        runs = {path: [] for path in PATHS}
        for _ in range(options.rounds):
            for path in PATHS:
                if None not in runs[path]:
                    runs[path].append(run_or_none([sys.executable, __file__, "--step", path, str(length)]))
        results[length] = {path: None if None in r else summary(r) for path, r in runs.items()}
        rows.append((f"{length:,}", "   ".join(cell(path, results[length]) for path in PATHS)))
    report("one training step, peak memory and time", rows, {"benchmark": "attention_memory", "lengths": results})


def summary(runs: list[dict]) -> dict:
    """The medians of some runs."""
    return {
        "peak_mb": round(median([r["peak_mb"] for r in runs])),
        "seconds": round(median([r["seconds"] for r in runs]), 3),
    }


def cell(path: str, results: dict) -> str:
    """A cell of the table."""
    if results[path] is None:
        return f"{path}: out of memory"
    ratio = f" ({results[path]['seconds'] / results['plain']['seconds']:.2f} of plain)" if results["plain"] else ""
    return f"{path}: {results[path]['peak_mb']:,} MB, {results[path]['seconds']:.2f} s{ratio}"


def step(path: str, length: int) -> dict:
    """Measure one training step in this process."""
    from mlxlm import kernels
    from mlxlm.backend.mlx import mx
    from mlxlm.config import ModelConfig
    from mlxlm.data import Batch
    from mlxlm.model import Decoder
    from mlxlm.model import attention as attention_module
    from mlxlm.train import TrainSettings
    from mlxlm.train.step import TrainStep

    limit_memory()
    config = ModelConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1376, vocab_size=1024,
        max_position_embeddings=length, tie_word_embeddings=True,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(0)
    settings = TrainSettings(steps=10, learning_rate=1e-3, batch_size=1)
    train_step = TrainStep(model, settings)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1))

    def plain(queries, keys, values, scale, **_):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")

    if path == "plain":
        attention_module.attention = plain
    with kernels.use_kernels("auto" if path == "plain" else path):
        mx.eval(train_step([Batch(tokens)], 1e-3), train_step.state)
        mx.reset_peak_memory()
        start = time.perf_counter()
        mx.eval(train_step([Batch(tokens)], 1e-3), train_step.state)
    return {"peak_mb": mx.get_peak_memory() / 1e6, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
