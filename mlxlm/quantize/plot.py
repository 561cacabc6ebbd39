"""Draws the errors of a quantized model by layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mlxlm.quantize.report import QuantizationReport
from mlxlm.utils.plots import TITLE_SIZE, label_axes, legend_outside, new_figure, save_figure

_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+?)(?:_proj)?$")
_OUTSIDE_LAYERS = {"model.embed_tokens": "embedding", "model.embed_positions": "positions", "lm_head": "head"}
_COLORS = {2: "#7f0000", 3: "#d7301f", 4: "#fc8d59", 5: "#74a9cf", 6: "#2b8cbe", 8: "#045a8d"}  # by bits


def plot_quantization(report: QuantizationReport, path: Path) -> None:
    """Draw the error of each matrix by layer, colored by bits, and below it the error of the hidden states.

    Raises:
        CheckpointError: The file can't be written.
    """
    metrics = report.metrics
    figure = new_figure(9, 6.5 if metrics else 4.2)
    panels = figure.subplots(2 if metrics else 1, 1, squeeze=False)[:, 0]
    title = f"{Path(report.path).name}: {report.bits_per_weight:.2f} bits per weight, {report.method}"
    label_axes(panels[0], y=f"relative error of {report.error_of}")
    _plot_matrices(panels[0], report)
    if metrics is not None:
        errors = list(metrics.hidden_state_errors.values())
        label_axes(panels[1], y="relative error of hidden states")
        panels[1].plot(range(-1, len(errors) - 1), errors, "o-", ms=3, color=_COLORS[8])
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
    for marker, (kind, points) in zip("os^vDP*XhH<>d", _errors_by_kind(report).items(), strict=False):
        x, y, bits = zip(*sorted(points), strict=True)
        axes.plot(x, y, lw=0.6, color="#bbb", zorder=1)
        axes.scatter(x, y, c=[_COLORS[b] for b in bits], marker=marker, s=26, zorder=2)
        handles.append(Line2D([], [], marker=marker, ls="", color="#555", label=kind))
        bits_used.update(bits)
    handles += [Patch(color=_COLORS[b], label=f"{b} bits") for b in sorted(bits_used)]
    legend_outside(axes, handles=handles)


def _last_layer(report: QuantizationReport) -> int:
    return max((int(m[1]) for name in report.errors if (m := re.match(r"model\.layers\.(\d+)\.", name))), default=-1)


def _errors_by_kind(report: QuantizationReport) -> dict[str, list[tuple[int, float, int]]]:
    """Kind of matrix -> (layer, error, bits) of each; the embedding is layer -1, the head follows the last layer."""
    last = _last_layer(report)
    kinds: dict[str, list[tuple[int, float, int]]] = {}
    for module, error in report.errors.items():
        match = _LAYER.match(module)
        kind = match[2] if match else _OUTSIDE_LAYERS.get(module, module.rpartition(".")[2])
        layer = int(match[1]) if match else (last + 1 if module == "lm_head" else -1)
        kinds.setdefault(kind, []).append((layer, error, report.bits[module]))
    return kinds
