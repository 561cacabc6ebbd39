"""Tokens per second before and after: two models take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.generation import Context, generate_tokens

_DECODED = 256  # tokens of one continuation
_TURNS, SECONDS = 3, 1.0  # the first turn, before them, warms up; each lasts so long


def decode_speeds(
    before: Checkpoint, after: Checkpoint, prompt: Sequence[int]
) -> tuple[float | None, float | None, str | None]:
    """Tokens per second of both in continuing `prompt`, the median of some turns each, and what to know of it."""
    bytes_per_weight = 8 if ON_CPU else 3  # of the two together
    room, context = 0.6 * platform.total_memory(), before.config.max_position_embeddings
    if bytes_per_weight * before.config.parameter_count() > room:
        return None, None, "not measured: the two models don't fit into memory together"
    count = min(_DECODED, context - len(prompt))
    if count < 2:
        return None, None, "not measured: the context is too short"
    models = [load_checkpoint(checkpoint)[0] for checkpoint in (before, after)]
    rates: list[list[float]] = [[], []]
    for turn in range(1 + _TURNS):
        for rate, model in zip(rates, models, strict=True):
            rate.append(_rate(model, prompt, count, SECONDS if turn else 0.0))
    note = "weights are computed in float32 on a CPU, so bits don't change the speed" if ON_CPU else None
    return *(statistics.median(rate[1:]) for rate in rates), note


def _rate(model: nn.Module, prompt: Sequence[int], count: int, seconds: float) -> float:
    """Tokens per second after the first of each continuation of up to `count` tokens, over `seconds` at least."""
    spent, found = 0.0, 0
    while True:
        begun = None
        for _ in generate_tokens(Context(model), prompt, lambda logits: mx.argmax(logits, axis=-1), count):
            now = time.monotonic()
            if begun is not None:
                spent, found = spent + now - begun, found + 1
                if spent >= seconds:
                    return found / spent
            begun = now
