"""What a quantized model costs: sizes, divergence from its source, errors by layer; and the picture of it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxlm.convert.metadata import Check
from mlxlm.utils.files import write_figure

_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+?)(?:_proj)?$")
_OUTSIDE = {"model.embed_tokens": "embedding", "model.embed_positions": "positions", "lm_head": "head"}
_COLORS = {2: "#7f0000", 3: "#d7301f", 4: "#fc8d59", 5: "#74a9cf", 6: "#2b8cbe", 8: "#045a8d"}


@dataclass(frozen=True)
class QuantizationMetrics:
    """Source and result on a text that calibration has not seen, in windows of `context_length` tokens that move on by
    `stride`. A search that ends at a KL divergence has measured its candidates on this text.

    kl: mean KL(source || result), nats per token. top1: share of tokens with the same most likely next one.
    hidden_state_errors: relative error of the hidden states after the embedding and each layer. speed: tokens per second of
    decoding, None where the two models don't fit into memory together; speed_note: what to know of it.
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
        return self.bits_per_byte_after - self.bits_per_byte_before


@dataclass(frozen=True)
class QuantizationReport:
    """What was written and what it cost.

    formats: matrix (as in the files) -> group_size, bits and mode; None in 16 bits. regrouped and skipped: matrices
    whose rows the group size doesn't divide: the size they got, or the width that no size divides.
    errors: module -> relative error, of its "outputs" on the calibration text, or of its "weights" where there is
    none (`error_of` says which; a table that is no head has no outputs to err in, its weights' error is given).
    bits: module -> its bits. bytes: of all files that a runtime needs, so without those of this report.
    checks: what was compared after writing, see `check`.
    """

    source: str
    path: str
    method: str
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
    error_of: str
    calibration_text: str | None
    metrics: QuantizationMetrics | None
    seconds: float
    checks: list[Check]
    warnings: list[str]

    def worst_layers(self, n: int = 5) -> list[str]:
        """The modules with the largest errors, worst first; of errors of outputs only those."""
        tables = {"model.embed_positions"} | ({"model.embed_tokens"} if "lm_head" in self.bits else set())
        ranked = [name for name in self.errors if self.error_of == "weights" or name not in tables]
        return sorted(ranked, key=self.errors.get, reverse=True)[:n]

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        if self.metrics is not None:
            values["metrics"]["bits_per_byte_change"] = self.metrics.bits_per_byte_change
        return {**values, "worst_layers": self.worst_layers()}


def draw(report: QuantizationReport, path: Path) -> None:
    """Draw the error of each matrix by layer, colour by bits, and below it that of the hidden states."""
    from matplotlib.figure import Figure  # half a second: only where a picture is drawn
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 6.5 if report.metrics else 4.2), layout="constrained")
    panels = figure.subplots(2 if report.metrics else 1, 1, squeeze=False)[:, 0]
    layers = _by_kind(report)
    used: set[int] = set()
    shapes = []
    for marker, (kind, points) in zip("os^vDP*XhH<>d", layers.items(), strict=False):
        x, y, bits = zip(*sorted(points), strict=True)
        panels[0].plot(x, y, lw=0.6, color="#bbb", zorder=1)
        panels[0].scatter(x, y, c=[_COLORS[b] for b in bits], marker=marker, s=26, zorder=2)
        shapes.append(Line2D([], [], marker=marker, ls="", color="#555", label=kind))
        used.update(bits)
    colors = [Patch(color=_COLORS[b], label=f"{b} bits") for b in sorted(used)]
    panels[0].legend(handles=shapes + colors, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    panels[0].set_ylabel(f"relative error of {report.error_of}")
    title = f"{Path(report.path).name}: {report.bits_per_weight:.2f} bits per weight, {report.method}"
    if report.metrics is not None:
        hidden_state_errors = list(report.metrics.hidden_state_errors.values())
        panels[1].plot(range(-1, len(hidden_state_errors) - 1), hidden_state_errors, "o-", ms=3, color="#045a8d")
        panels[1].set_ylabel("relative error of hidden states")
        title += (
            f": KL {report.metrics.kl:.4f} nats/token, top-1 {100 * report.metrics.top1_agreement:.1f} %, "
            f"{report.metrics.bits_per_byte_change:+.4f} bits/byte"
        )
    figure.suptitle(title, fontsize=10)
    panels[-1].set_xlabel("layer")
    last = _last_layer(report)
    outside = {-1: "embedding"} | ({last + 1: "head"} if "lm_head" in report.errors else {})
    for panel in panels:
        panel.margins(y=0.08)
        panel.set_ylim(0, panel.get_ylim()[1])
        panel.grid(alpha=0.3)
        panel.set_xlim(-1.5, max(last, *outside) + 0.5)
        panel.set_xticks([*range(0, last + 1, max(last, 0) // 16 + 1), *outside])
        panel.xaxis.set_major_formatter(lambda x, _position: outside.get(round(x), f"{x:.0f}"))
    write_figure(path, figure)


def _last_layer(report: QuantizationReport) -> int:
    return max((int(m[1]) for name in report.errors if (m := re.match(r"model\.layers\.(\d+)\.", name))), default=-1)


def _by_kind(report: QuantizationReport) -> dict[str, list[tuple[int, float, int]]]:
    """Kind of matrix -> (layer, error, bits) of each; embedding and head are outside the layers."""
    last = _last_layer(report)
    found: dict[str, list[tuple[int, float, int]]] = {}
    for module, error in report.errors.items():
        match = _LAYER.match(module)
        kind = match[2] if match else _OUTSIDE.get(module, module.rpartition(".")[2])
        layer = int(match[1]) if match else (last + 1 if module == "lm_head" else -1)
        found.setdefault(kind, []).append((layer, error, report.bits[module]))
    return found
