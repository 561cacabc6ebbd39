"""Decoding speed of two models, measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.generation import Context, generate_tokens

_MAX_NEW_TOKENS = 256  # of one continuation
_TURNS, SECONDS = 3, 1.0  # measured turns of each model after one to warm up, and the duration of each


def decode_speeds(
    before: Checkpoint, after: Checkpoint, prompt: Sequence[int]
) -> tuple[float | None, float | None, str | None]:
    """Tokens per second of two models after `prompt`, the median of some turns, and a note; None if not measured."""
    bytes_per_weight = 8 if ON_CPU else 3  # of both models
    room, context = 0.6 * platform.total_memory(), before.config.max_position_embeddings
    if bytes_per_weight * before.config.parameter_count() > room:
        return None, None, "not measured: the two models don't fit in memory together"
    count = min(_MAX_NEW_TOKENS, context - len(prompt))
    if count < 2:
        return None, None, "not measured: the context is too short"
    models = [load_checkpoint(checkpoint)[0] for checkpoint in (before, after)]
    rates: list[list[float]] = [[], []]
    for turn in range(1 + _TURNS):
        for rate, model in zip(rates, models, strict=True):
            rate.append(_rate(model, prompt, count, SECONDS if turn else 0.0))
    note = "on a CPU all weights are computed in float32, so quantization doesn't change the speed" if ON_CPU else None
    return *(statistics.median(rate[1:]) for rate in rates), note


def _rate(model: nn.Module, prompt: Sequence[int], count: int, seconds: float) -> float:
    """Tokens per second over at least `seconds`, without the first token of each continuation of `count` tokens."""
    elapsed, generated = 0.0, 0
    while True:
        last = None
        for _ in generate_tokens(Context(model), prompt, lambda logits: mx.argmax(logits, axis=-1), count):
            now = time.monotonic()
            if last is not None:
                elapsed, generated = elapsed + now - last, generated + 1
                if elapsed >= seconds:
                    return generated / elapsed
            last = now
