"""What a quantized model costs: sizes, divergence from its source, errors by layer, speed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, nn
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.checkpoint.mlx_lm import WritableCheckpoint
from mlxlm.convert.compare import Comparison, compare
from mlxlm.convert.metadata import Check
from mlxlm.convert.verify import Progress
from mlxlm.generation import greedy_tokens
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.quantize.calibration_text import EvalText
from mlxlm.quantize.quantization_plan import layer_index
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.plots import TITLE_SIZE, label_axes, legend_outside, new_figure, save_figure

_MAX_NEW_TOKENS = 256  # of one continuation
_TURNS, SECONDS = 3, 1.0  # measured turns of each model after one to warm up, and the duration of each
_PROMPT_TOKENS = 16  # of the speed measurement
_SAME_FIELDS = ("tokens", "context_length", "stride", "kl", "top1_agreement")  # of Comparison
_OUTSIDE_LAYERS = {"model.embed_tokens": "embedding", "model.embed_positions": "positions", "lm_head": "head"}
_COLORS = {2: "#7f0000", 3: "#d7301f", 4: "#fc8d59", 5: "#74a9cf", 6: "#2b8cbe", 8: "#045a8d"}  # by bits


@dataclass(frozen=True)
class QuantizationMetrics:
    """The quantized model compared with its source on a text that isn't used for calibration.

    A search with `max_kl` measures its candidates on this text.

    Attributes:
        text: Name of the text.
        tokens: Number of predicted tokens.
        context_length: Tokens of a window.
        stride: Tokens from the start of one window to the next.
        kl: Mean KL(source || result), nats per token.
        top1_agreement: Share of tokens for which both have the same most likely next token.
        bits_per_byte_before: Of the source.
        bits_per_byte_after: Of the result.
        hidden_state_errors: Relative error of the hidden states after the embedding and each layer.
        speed_before: Decoding speed of the source, tokens per second; None if the two don't fit in memory together.
        speed_after: The same of the result.
        speed_note: Why the speed wasn't measured, or what limits it.
    """

    text: str
    tokens: int
    context_length: int
    stride: int
    kl: float
    top1_agreement: float
    bits_per_byte_before: float
    bits_per_byte_after: float
    hidden_state_errors: dict[str, float] = field(repr=False)
    speed_before: float | None
    speed_after: float | None
    speed_note: str | None

    @property
    def bits_per_byte_change(self) -> float:
        """Increase of the bits per byte."""
        return self.bits_per_byte_after - self.bits_per_byte_before


@dataclass(frozen=True)
class QuantizationReport:
    """What was written and what it costs.

    Attributes:
        source: Path or hub id that was quantized.
        path: The output.
        method: "rtn", "gptq" or "awq".
        settings: Fields of QuantizationSettings that aren't the defaults.
        dtype: Dtype of scales, biases and everything that isn't quantized.
        parameters: Number of parameters.
        source_bytes: Bytes of the source's tensors.
        bytes: Bytes of all files that a runtime needs, without this report.
        source_bits_per_weight: Average over all parameters of the source.
        bits_per_weight: The same of the output.
        formats: Matrix, as in the files -> group_size, bits and mode; None for 16 bits.
        reduced_group_sizes: Matrix -> its group size, if the requested one doesn't divide its width.
        skipped: Matrix -> its width, if no group size divides it.
        bits: Module -> bits.
        errors: Module -> relative error of `error_of`.
        rounded_experts: Module -> the number of its experts that were rounded to nearest instead of calibrated,
            because they read too little of the calibration text.
        error_of: "outputs" on the calibration text, or "weights" for rtn. For embeddings and other matrices that aren't
            calibrated, the error of the weights is given. Errors are those before `recover`.
        calibration_text: Name of the text; None without calibration.
        metrics: The evaluation; None if it was left out.
        metrics_before_recovery: The same before `recover`; None without it.
        seconds: Duration.
        checks: What was compared after writing; empty without verification.
        warnings: Reasons to read the report with care.
    """

    source: str
    path: str
    method: str
    settings: dict[str, Any]
    dtype: str
    parameters: int
    source_bytes: int
    bytes: int
    source_bits_per_weight: float
    bits_per_weight: float
    formats: dict[str, dict[str, Any] | None] = field(repr=False)
    reduced_group_sizes: dict[str, int]
    skipped: dict[str, int]
    bits: dict[str, int] = field(repr=False)
    errors: dict[str, float] = field(repr=False)
    rounded_experts: dict[str, int] = field(repr=False)
    error_of: str
    calibration_text: str | None
    metrics: QuantizationMetrics | None
    metrics_before_recovery: QuantizationMetrics | None
    seconds: float
    checks: list[Check]
    warnings: list[str]

    def worst_layers(self, n: int = 5) -> list[str]:
        """The modules with the largest errors, worst first; without embeddings if errors are of outputs."""
        tables = {"model.embed_positions", "model.embed_tokens_per_layer"}
        tables |= {"model.embed_tokens"} if "lm_head" in self.bits else set()
        ranked = [name for name in self.errors if self.error_of == "weights" or name not in tables]
        return sorted(ranked, key=lambda name: self.errors[name], reverse=True)[:n]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        values = asdict(self)
        for name in ("metrics", "metrics_before_recovery"):
            if (metrics := getattr(self, name)) is not None:
                values[name]["bits_per_byte_change"] = metrics.bits_per_byte_change
        return {**values, "worst_layers": self.worst_layers()}


def compare_with_source(
    source: WritableCheckpoint,
    result: WritableCheckpoint,
    text: EvalText,
    progress: Progress,
    label: str = "",
) -> Comparison:
    """Compare a quantized model with its source on the evaluation text.

    Raises:
        CheckpointError: The KL divergence is not finite.
    """
    on_layer = partial(progress, f"comparing with the source{label}")
    comparison = compare(source, result, text.documents, progress=on_layer)
    if not math.isfinite(comparison.kl):
        raise CheckpointError("the KL divergence of the result from its source is not finite", "more bits")
    return comparison


def evaluate(
    source: WritableCheckpoint, result: WritableCheckpoint, text: EvalText, progress: Progress
) -> QuantizationMetrics:
    """Evaluate a quantized model on a text, and measure its decoding speed."""
    comparison = compare_with_source(source, result, text, progress)
    progress("measuring speed", 0, 1)
    before, after, note = decode_speeds(source, result, text.documents[0][:_PROMPT_TOKENS])
    progress("measuring speed", 1, 1)
    bits_per_byte = comparison.tokens / text.bytes / math.log(2)  # of a loss of 1 nat per token
    return QuantizationMetrics(
        text=text.name,
        **{name: getattr(comparison, name) for name in _SAME_FIELDS},
        bits_per_byte_before=bits_per_byte * comparison.loss_a,
        bits_per_byte_after=bits_per_byte * comparison.loss_b,
        hidden_state_errors=comparison.layers,
        speed_before=before,
        speed_after=after,
        speed_note=note,
    )


def decode_speeds(
    before: WritableCheckpoint, after: WritableCheckpoint, prompt: Sequence[int]
) -> tuple[float | None, float | None, str | None]:
    """Tokens per second of two models after `prompt`, the median of some turns, and a note; None if not measured."""
    room, context = 0.6 * platform.total_memory(), before.config.max_position_embeddings
    nbytes = sum(tensor.nbytes for model in (before, after) for tensor in model.tensors.values())
    if nbytes * (2 if ON_CPU else 1) > room:  # a CPU computes in float32
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


def plot_quantization(report: QuantizationReport, path: Path) -> None:
    """Draw the error of each matrix by layer, colored by bits, and below it the error of the hidden states.

    Raises:
        CheckpointError: The file can't be written.
    """
    metrics = report.metrics
    errors = list(metrics.hidden_state_errors.values()) if metrics else []  # none if the model only runs as a whole
    figure = new_figure(9, 6.5 if errors else 4.2)
    panels = figure.subplots(2 if errors else 1, 1, squeeze=False)[:, 0]
    title = f"{Path(report.path).name}: {report.bits_per_weight:.2f} bits per weight, {report.method}"
    label_axes(panels[0], y=f"relative error of {report.error_of}")
    _plot_matrices(panels[0], report)
    if errors:
        label_axes(panels[1], y="relative error of hidden states")
        panels[1].plot(range(-1, len(errors) - 1), errors, "o-", ms=3, color=_COLORS[8])
    if metrics is not None:
        title += (
            f": KL {metrics.kl:.4f} nats/token, top-1 {100 * metrics.top1_agreement:.1f} %, "
            f"{metrics.bits_per_byte_change:+.4f} bits/byte"
        )
    figure.suptitle(title, fontsize=TITLE_SIZE)
    panels[-1].set_xlabel("layer")
    last = _last_layer(report)
    outside = {-1: "embedding"} | ({last + 1: "head"} if "lm_head" in report.errors else {})
    for panel in panels:
        panel.margins(y=0.08)
        panel.set_ylim(0, panel.get_ylim()[1])
        panel.set_xlim(-1.5, max(last, *outside) + 0.5)
        panel.set_xticks([*range(0, last + 1, max(last, 0) // 16 + 1), *outside])
        panel.xaxis.set_major_formatter(lambda x, _position: outside.get(round(x), f"{x:.0f}"))
    save_figure(figure, path)


def _plot_matrices(axes: Any, report: QuantizationReport) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bits_used: set[int] = set()
    handles: list[Any] = []
    for marker, (kind, points) in zip(cycle("os^vDP*XhH<>d"), _errors_by_kind(report).items(), strict=False):
        x, y, bits = zip(*sorted(points), strict=True)
        axes.plot(x, y, lw=0.6, color="#bbb", zorder=1)
        axes.scatter(x, y, c=[_COLORS[b] for b in bits], marker=marker, s=26, zorder=2)
        handles.append(Line2D([], [], marker=marker, ls="", color="#555", label=kind))
        bits_used.update(bits)
    handles += [Patch(color=_COLORS[b], label=f"{b} bits") for b in sorted(bits_used)]
    legend_outside(axes, handles=handles)


def _last_layer(report: QuantizationReport) -> int:
    return max((layer for name in report.errors if (layer := layer_index(name)) is not None), default=-1)


def _errors_by_kind(report: QuantizationReport) -> dict[str, list[tuple[int, float, int]]]:
    """Kind of matrix -> (layer, error, bits) of each; the embedding is layer -1, the head follows the last layer."""
    last = _last_layer(report)
    kinds: dict[str, list[tuple[int, float, int]]] = {}
    for module, error in report.errors.items():
        kind = _OUTSIDE_LAYERS.get(module, module.rpartition(".")[2].removesuffix("_proj"))
        layer = layer_index(module)
        if layer is None:
            layer = last + 1 if module == "lm_head" else -1
        kinds.setdefault(kind, []).append((layer, error, report.bits[module]))
    return kinds
