"""What a quantized model costs: sizes, divergence from its source, errors by layer; and the picture of it."""

from __future__ import annotations

import io
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxlm.files import write_bytes

_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+?)(?:_proj)?$")
_OUTSIDE = {"model.embed_tokens": "embedding", "model.embed_positions": "positions", "lm_head": "head"}
_COLORS = {2: "#7f0000", 3: "#d7301f", 4: "#fc8d59", 5: "#74a9cf", 6: "#2b8cbe", 8: "#045a8d"}


@dataclass(frozen=True)
class Measured:
    """Source and result on a text that neither calibration nor search has seen.

    kl: mean KL(source || result), nats per token. top1: share of tokens with the same most likely next one.
    hidden: relative error of the hidden states after the embedding and each layer. speed: tokens per second of
    decoding, None where a model doesn't fit into memory.
    """

    text: str
    tokens: int
    kl: float
    top1: float
    bits_per_byte_before: float
    bits_per_byte_after: float
    hidden: dict[str, float] = field(repr=False)
    speed_before: float | None
    speed_after: float | None

    @property
    def bits_per_byte_change(self) -> float:
        return self.bits_per_byte_after - self.bits_per_byte_before


@dataclass(frozen=True)
class Report:
    """What was written and what it cost.

    formats: matrix (as in the files) -> group_size, bits and mode; None in 16 bits. regrouped and skipped: matrices
    whose rows the group size doesn't divide: the size they got, or the width that no size divides.
    errors: module -> relative error, of its "outputs" on the calibration text, or of its "weights" where there is
    none (`error_of` says which). bits: module -> its bits. bytes: of all files that a runtime needs, so without
    those of this report.
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
    regrouped: dict[str, int]
    skipped: dict[str, int]
    bits: dict[str, int] = field(repr=False)
    errors: dict[str, float] = field(repr=False)
    error_of: str
    calibration: str | None
    measured: Measured | None
    seconds: float
    warnings: list[str]

    def worst(self, n: int = 5) -> list[str]:
        """The modules with the largest errors, worst first."""
        return sorted(self.errors, key=self.errors.get, reverse=True)[:n]

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        if self.measured is not None:
            values["measured"]["bits_per_byte_change"] = self.measured.bits_per_byte_change
        return {**values, "worst": self.worst()}


def draw(report: Report, path: Path) -> None:
    """Draw the error of each matrix by layer, colour by bits, and below it that of the hidden states."""
    from matplotlib.figure import Figure  # half a second: only where a picture is drawn
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9, 6.5 if report.measured else 4.2), layout="constrained")
    panels = figure.subplots(2 if report.measured else 1, 1, squeeze=False)[:, 0]
    layers = _by_kind(report)
    used: set[int] = set()
    shapes = []
    for marker, (kind, points) in zip("os^vDP*XhH<>d", layers.items(), strict=False):
        x, y, bits = zip(*sorted(points), strict=True)
        panels[0].plot(x, y, lw=0.6, color="#bbb", zorder=1)
        panels[0].scatter(x, y, c=[_COLORS[b] for b in bits], marker=marker, s=26, zorder=2)
        shapes.append(Line2D([], [], marker=marker, ls="", color="#555", label=kind))
        used.update(bits)
    dots = [Line2D([], [], marker="o", ls="", color=_COLORS[b], label=f"{b} bits") for b in sorted(used)]
    panels[0].legend(handles=shapes + dots, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel(f"relative error of {report.error_of}")
    if report.measured is not None:
        hidden = list(report.measured.hidden.values())
        panels[1].plot(range(-1, len(hidden) - 1), hidden, "o-", ms=3, color="#045a8d")
        panels[1].set_ylim(bottom=0)
        panels[1].set_ylabel("relative error of hidden states")
        figure.suptitle(
            f"{report.bits_per_weight:.2f} bits per weight, {report.method}: KL {report.measured.kl:.4f} nats/token, "
            f"top-1 {100 * report.measured.top1:.1f} %, {report.measured.bits_per_byte_change:+.4f} bits/byte",
            fontsize=10,
        )
    panels[-1].set_xlabel("layer (-1: embedding)")
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.xaxis.get_major_locator().set_params(integer=True)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_bytes(path, picture.getvalue())


def _by_kind(report: Report) -> dict[str, list[tuple[int, float, int]]]:
    """Kind of matrix -> (layer, error, bits) of each; embedding and head are outside the layers."""
    last = max((int(m[1]) for name in report.errors if (m := _LAYER.match(name))), default=-1)
    found: dict[str, list[tuple[int, float, int]]] = {}
    for module, error in report.errors.items():
        match = _LAYER.match(module)
        kind = match[2] if match else _OUTSIDE.get(module, module.rpartition(".")[2])
        layer = int(match[1]) if match else (last + 1 if module == "lm_head" else -1)
        found.setdefault(kind, []).append((layer, error, report.bits[module]))
    return found
