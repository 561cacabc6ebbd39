"""Peak memory and time of one training step as the length grows: plain MLX attention beside blockwise.

    python benchmarks/attention_memory.py [--lengths 512,1024,2048,4096,8192] [--rounds 3]

A model of 4 layers, 8 heads of 64, one sequence a step, AdamW. "plain" is `mx.fast.scaled_dot_product_attention`,
"mlx" what mlxlm takes for short lengths; the gradient of both keeps all probabilities. "blockwise" is what mlxlm
takes from 1,024 on where there is no Metal. Each measurement has a process of its own, with four fifths of the
machine's memory at most; peak memory is MLX's own count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import numpy as np
from common import median, report

PATHS = ("plain", "mlx", "blockwise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", nargs=2, metavar=("PATH", "LENGTH"), help="one measurement, in this process")
    options = parser.parse_args()
    if options.step:
        print(json.dumps(step(options.step[0], int(options.step[1]))))
        return
    found, rows = {}, []
    for length in (int(n) for n in options.lengths.split(",")):
        runs = {path: [] for path in PATHS}
        for _ in range(options.rounds):
            for path in PATHS:
                if None not in runs[path]:
                    runs[path].append(measured(path, length))
        found[length] = {path: None if None in r else summary(r) for path, r in runs.items()}
        rows.append((f"{length:,}", "   ".join(cell(path, found[length]) for path in PATHS)))
    report("one training step, peak memory and time", rows, {"benchmark": "attention_memory", "lengths": found})


def summary(runs: list[dict]) -> dict:
    return {
        "peak_mb": round(median([r["peak_mb"] for r in runs])),
        "seconds": round(median([r["seconds"] for r in runs]), 3),
    }


def cell(path: str, found: dict) -> str:
    if found[path] is None:
        return f"{path}: out of memory"
    ratio = f" ({found[path]['seconds'] / found['plain']['seconds']:.2f} of plain)" if found["plain"] else ""
    return f"{path}: {found[path]['peak_mb']:,} MB, {found[path]['seconds']:.2f} s{ratio}"


def measured(path: str, length: int) -> dict | None:
    """One measurement in a new process, or None if it died, which a lack of memory does to it."""
    command = [sys.executable, __file__, "--step", path, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"{length} {path}: {done.stdout.strip() or done.stderr.strip()[-200:] or done.returncode}", file=sys.stderr)
    return json.loads(done.stdout) if done.returncode == 0 else None


def step(path: str, length: int) -> dict:
    from mlxlm import kernels
    from mlxlm.backend import platform
    from mlxlm.backend.mlx import mx
    from mlxlm.config import ModelConfig
    from mlxlm.data import Batch
    from mlxlm.model import Decoder
    from mlxlm.model import attention as of_model
    from mlxlm.train import TrainSettings
    from mlxlm.train.step import TrainStep

    limit_memory(platform.total_memory())
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
        of_model.attention = plain
    with kernels.use_kernels("auto" if path == "plain" else path):
        mx.eval(train_step([Batch(tokens)], 1e-3), train_step.state)
        mx.reset_peak_memory()
        start = time.perf_counter()
        mx.eval(train_step([Batch(tokens)], 1e-3), train_step.state)
    return {"peak_mb": mx.get_peak_memory() / 1e6, "seconds": time.perf_counter() - start}


def limit_memory(most: int) -> None:
    """Fail rather than drive the machine into swapping."""
    import resource

    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (int(0.8 * most), int(0.8 * most)))


if __name__ == "__main__":
    main()
