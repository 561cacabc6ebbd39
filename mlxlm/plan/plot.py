"""Draws a plan: where the memory goes, and where the operations go as texts get longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxlm.plan.planner import Plan
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.formatting import human_count
from mlxlm.utils.plots import TITLE_SIZE, legend_outside, new_figure, save_figure

FORMATS = (".png", ".svg", ".pdf")
_COLORS = ("#4878a8", "#8fb2d4", "#b9cbdc", "#d97a4a", "#b8b8b8", "#8abf8a", "#c9a0c9", "#e6b86a", "#7fb7b7")


def plot_plan(plan: Plan, path: Path | str) -> None:
    """Write the picture to a file.

    Raises:
        ConfigError: The file's suffix is not one of `FORMATS`, or its folder doesn't exist.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path} is not a picture format that can be written", f"a name with {', '.join(FORMATS)}")
    figure = new_figure(10, 7)
    figure.suptitle(f"{human_count(plan.parameter_count)} parameters in {plan.config.num_hidden_layers} layers")
    memory, operations = figure.subplots(2, 1, height_ratios=[3, 4])
    _plot_memory(plan, memory)
    _plot_operations(plan, operations)
    save_figure(figure, path)


def _plot_memory(plan: Plan, axes: Any) -> None:
    """Two stacked bars, in GB: training at its peak, and inference."""
    training = plan.memory.breakdown()
    if "activations" in training:
        training = {f"{name}, all layers" if name == "activations" else name: n for name, n in training.items()}
    inference = {"weights": plan.inference.weights, "cache": plan.inference.cache}
    colors = dict(zip(dict.fromkeys([*training, *inference]), _COLORS, strict=False))
    for row, parts in enumerate((training, inference)):
        left = 0.0
        for name, size in parts.items():
            label = name if row == 0 or name not in training else None
            axes.barh(row, size / 1e9, left=left, color=colors[name], label=label, height=0.6)
            left += size / 1e9
    longest = max(plan.memory.total, plan.inference.total)
    if plan.fits is not None and plan.fits.memory < 2 * longest:  # else the bars would be slivers
        axes.axvline(plan.fits.memory / 1e9, color="#333", ls="--", lw=1, label="memory of the machine")
    axes.set_yticks([0, 1], ["training", "inference"])
    axes.invert_yaxis()
    axes.set_xlabel("GB")
    legend_outside(axes)
    options = plan.training
    axes.set_title(f"{options.batch_size} x {options.max_seq_length} tokens, {options.optimizer}", fontsize=TITLE_SIZE)


def _plot_operations(plan: Plan, axes: Any) -> None:
    """Shares of the forward pass over the length of the text."""
    lengths = [flops.length for flops in plan.flops_by_length]
    names = list(plan.flops_by_length[0].shares)
    percentages = [[100 * flops.shares[name] for flops in plan.flops_by_length] for name in names]
    axes.stackplot(lengths, percentages, labels=[name.replace("_", " ") for name in names], alpha=0.85)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.set_xlim(lengths[0], lengths[-1])
    axes.set_ylim(0, 100)
    axes.set_xlabel("tokens of the text")
    axes.set_ylabel("% of the forward operations")
    legend_outside(axes)
