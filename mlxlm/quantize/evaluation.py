"""What quantization costs on a text: divergence from the source, loss, errors of hidden states, speed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, nn
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.convert.compare import Comparison, compare
from mlxlm.convert.verify import Progress
from mlxlm.generation import greedy_tokens
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.quantize.report import QuantizationMetrics
from mlxlm.quantize.text import EvalText
from mlxlm.utils.errors import CheckpointError

_MAX_NEW_TOKENS = 256  # of one continuation
_TURNS, SECONDS = 3, 1.0  # measured turns of each model after one to warm up, and the duration of each
_PROMPT_TOKENS = 16  # of the speed measurement


def compare_with_source(
    source: Checkpoint, result: Checkpoint, text: EvalText, progress: Progress, label: str = ""
) -> Comparison:
    """Compare a quantized model with its source on the evaluation text.

    Raises:
        CheckpointError: The KL divergence is not finite.
    """

    def on_layer(done: int, total: int) -> None:
        progress(f"comparing with the source{label}", done, total)

    comparison = compare(source, result, text.documents, progress=on_layer)
    if not math.isfinite(comparison.kl):
        raise CheckpointError("the KL divergence of the result from its source is not finite", "more bits")
    return comparison


def evaluate(source: Checkpoint, result: Checkpoint, text: EvalText, progress: Progress) -> QuantizationMetrics:
    """Evaluate a quantized model on a text, and measure its decoding speed."""
    comparison = compare_with_source(source, result, text, progress)
    progress("measuring speed", 0, 1)
    before, after, note = decode_speeds(source, result, text.documents[0][:_PROMPT_TOKENS])
    progress("measuring speed", 1, 1)
    bits_per_byte = comparison.tokens / text.bytes / math.log(2)  # of a loss of 1 nat per token
    return QuantizationMetrics(
        text=text.name,
        tokens=comparison.tokens,
        context_length=comparison.context_length,
        stride=comparison.stride,
        kl=comparison.kl,
        top1_agreement=comparison.top1_agreement,
        bits_per_byte_before=bits_per_byte * comparison.loss_a,
        bits_per_byte_after=bits_per_byte * comparison.loss_b,
        hidden_state_errors=comparison.layers,
        speed_before=before,
        speed_after=after,
        speed_note=note,
    )


def decode_speeds(
    before: Checkpoint, after: Checkpoint, prompt: Sequence[int]
) -> tuple[float | None, float | None, str | None]:
    """Tokens per second of two models after `prompt`, the median of some turns, and a note; None if not measured."""
    if ON_CPU:
        return None, None, "not measured: on a CPU all weights are computed in float32, whatever their bits"
    room, context = 0.6 * platform.total_memory(), before.config.max_position_embeddings
    if 3 * before.config.parameter_count() > room:  # bytes of both models
        return None, None, "not measured: the two models don't fit in memory together"
    count = min(_MAX_NEW_TOKENS, context - len(prompt))
    if count < 2:
        return None, None, "not measured: the context is too short"
    models = [load_checkpoint(checkpoint)[0] for checkpoint in (before, after)]
    rates: list[list[float]] = [[], []]
    for turn in range(1 + _TURNS):
        for rate, model in zip(rates, models, strict=True):
            rate.append(_rate(model, prompt, count, SECONDS if turn else 0.0))
    speed_before, speed_after = (statistics.median(rate[1:]) for rate in rates)
    return speed_before, speed_after, None


def _rate(model: nn.Module, prompt: Sequence[int], count: int, seconds: float) -> float:
    """Tokens per second over at least `seconds`, without the first token of each continuation of `count` tokens."""
    step, elapsed, generated = DecodeStep(model), 0.0, 0
    while True:
        last = None
        for _ in greedy_tokens(step, prompt, count):
            now = time.monotonic()
            if last is not None:
                elapsed, generated = elapsed + now - last, generated + 1
                if elapsed >= seconds:
                    return generated / elapsed
            last = now
