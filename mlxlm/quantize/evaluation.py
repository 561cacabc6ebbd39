"""What quantization costs on a text: divergence from the source, loss, errors of hidden states, speed."""

from __future__ import annotations

import math

from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.convert.compare import Comparison, compare
from mlxlm.convert.verify import Progress
from mlxlm.quantize.report import QuantizationMetrics
from mlxlm.quantize.speed import decode_speeds
from mlxlm.quantize.text import EvalText
from mlxlm.utils.errors import CheckpointError

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

    comparison = compare(source, result, text.documents, text_bytes=text.bytes, progress=on_layer)
    if not math.isfinite(comparison.kl):
        raise CheckpointError("the KL divergence of the result from its source is not finite", "more bits")
    return comparison


def evaluate(source: Checkpoint, result: Checkpoint, text: EvalText, progress: Progress) -> QuantizationMetrics:
    """Evaluate a quantized model on a text, and measure its decoding speed."""
    comparison = compare_with_source(source, result, text, progress)
    progress("measuring speed", 0, 1)
    before, after, note = decode_speeds(source, result, text.documents[0][:_PROMPT_TOKENS])
    progress("measuring speed", 1, 1)
    return QuantizationMetrics(
        text=text.name,
        tokens=comparison.tokens,
        context_length=comparison.context_length,
        stride=comparison.stride,
        kl=comparison.kl,
        top1_agreement=comparison.top1_agreement,
        bits_per_byte_before=comparison.bits_per_byte_a,
        bits_per_byte_after=comparison.bits_per_byte_b,
        hidden_state_errors=comparison.layers,
        speed_before=before,
        speed_after=after,
        speed_note=note,
    )
