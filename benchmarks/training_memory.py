"""Peak memory of a training step, for mlxlm and plain MLX, and bytes per parameter by optimizer and dtypes.

    python benchmarks/training_memory.py [--lengths 512,2048,8192] [--ways plain,default,grad_checkpoint]
    python benchmarks/training_memory.py --lengths "" [--settings optimizer=adamw,optimizer_state=int8,...]

The first table has a vocabulary of 32,000. A model of 4 layers, hidden size 256, 4 heads, one sequence per step, AdamW,
float32, compiled. "plain" uses MLX's own attention, SwiGLU and `mlx.nn.losses.cross_entropy` on whole logits, and keeps
all activations; "default" is mlxlm's step: the loss in chunks, attention in blocks from 1,024 tokens on;
"grad_checkpoint" also recomputes activations (`--grad-checkpoint`). Each measurement has its own process with at most
four fifths of the machine's memory, and is of the second step. "peak" is MLX's count of live arrays, "resident" the
largest size of the process, with the buffers that MLX keeps for reuse.

The second table, of one sequence of 32 tokens, has the peak divided by the number of parameters (28M), measured and as
planned by `mlxlm plan`. A setting is one or more fields of `TrainSettings`, joined by "+".
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
from common import limit_memory, peak_memory, plain_mlx, report, run_or_none, train_settings

WAYS = ("plain", "default", "grad_checkpoint")
SETTINGS = (
    *("optimizer=adamw", "ema_decay=0.9", "optimizer_state=bfloat16", "optimizer_state=int8"),
    *("param_dtype=bfloat16", "param_dtype=bfloat16+optimizer_state=int8"),
    *("optimizer=lion", "optimizer=lion+optimizer_state=int8", "optimizer=muon", "optimizer=adafactor"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--step", nargs=2, metavar=("WAY", "LENGTH"), help="measure once, in this process")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--setting", help="measure once, in this process")
    options = parser.parse_args()
    if options.step:
        print(json.dumps(step(options.step[0], int(options.step[1]))))
        return
    if options.setting:
        print(json.dumps(bytes_per_parameter(options.setting)))
        return
    settings = {
        name: run_or_none([sys.executable, __file__, "--setting", name])
        for name in filter(None, options.settings.split(","))
    }
    results: dict[int, dict[str, Any]] = {}
    for length in map(int, filter(None, options.lengths.split(","))):
        commands = {way: [sys.executable, __file__, "--step", way, str(length)] for way in options.ways.split(",")}
        results[length] = {way: run_or_none(command) for way, command in commands.items()}
    rows = [(f"T {length:,} {way}", cell(row, row.get("plain"), way)) for length, row in results.items() for way in row]
    rows += [
        (name, f"{found['measured']:.2f} bytes per parameter, planned {found['planned']:.2f}" if found else "failed")
        for name, found in settings.items()
    ]
    report("one training step", rows, {"benchmark": "training_memory", "lengths": results, "settings": settings})


def cell(row: dict[str, Any], plain: dict[str, Any] | None, way: str) -> str:
    """A cell of the table."""
    if (values := row[way]) is None:
        return "out of memory"
    ratio = f" ({values['peak_mb'] / plain['peak_mb']:.2f} of plain)" if plain and way != "plain" else ""
    return f"peak {values['peak_mb']:,} MB{ratio}, resident {values['resident_mb']:,} MB, {values['seconds']:.1f} s"


def step(way: str, length: int) -> dict[str, Any]:
    """Measure the second training step in this process."""
    from mlxlm.backend.mlx import mx
    from mlxlm.config import ModelConfig
    from mlxlm.data import Batch
    from mlxlm.model import Decoder
    from mlxlm.train import TrainSettings
    from mlxlm.train.memory_limits import limit_buffer_cache, memory_limits
    from mlxlm.train.step import TrainStep

    limit_memory()
    config = ModelConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=688, vocab_size=32_000,
        max_position_embeddings=length, tie_word_embeddings=True,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(0)
    settings = TrainSettings(steps=10, learning_rate=1e-3, batch_size=1, grad_checkpoint=way == "grad_checkpoint")
    train_step = TrainStep(model, settings)
    batch = [Batch(np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1)).astype(np.int32))]
    with plain_mlx() if way == "plain" else memory_limits():
        mx.eval(train_step(batch, 1e-3), train_step.state)
        if way != "plain":
            limit_buffer_cache()
        mx.reset_peak_memory()
        start = time.perf_counter()
        mx.eval(train_step(batch, 1e-3), train_step.state)
        seconds = time.perf_counter() - start
    megabytes = {"peak_mb": round(mx.get_peak_memory() / 1e6), "resident_mb": round(peak_memory() / 1e6)}
    return {**megabytes, "seconds": round(seconds, 2)}


def bytes_per_parameter(setting: str) -> dict[str, float]:
    """Measure and plan the peak of a step, in bytes per parameter."""
    from mlxlm.config import ModelConfig
    from mlxlm.plan import Training, training_memory
    from mlxlm.train import TrainSettings
    from mlxlm.train.step_benchmark import probe

    config = ModelConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=1408, vocab_size=4096,
        max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    shape = {"batch_size": 1, "max_seq_length": 32}
    settings = TrainSettings(steps=10, learning_rate=1e-3, **shape, **train_settings(setting))
    count, planned = config.parameter_count(), training_memory(config, Training.from_settings(settings)).total
    return {"measured": probe(config, settings).memory / count, "planned": planned / count}


if __name__ == "__main__":
    main()
