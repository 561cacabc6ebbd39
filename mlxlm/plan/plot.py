"""A plan in one picture: where the memory goes, and where the operations go as texts get longer."""

from __future__ import annotations

from pathlib import Path

from mlxlm.plan.planner import Plan
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.files import write_figure
from mlxlm.utils.formatting import human_count

KINDS = (".png", ".svg", ".pdf")


def draw(plan: Plan, path: Path | str) -> None:
    """Write the picture to a file. Raises ConfigError for another kind of file, or a folder that isn't there."""
    path = Path(path)
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"{path} is no kind of picture that can be drawn", f"a name with {', '.join(KINDS)}")
    from matplotlib.figure import Figure  # half a second: only where a picture is drawn

    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(f"{human_count(plan.parameter_count)} parameters in {plan.config.num_hidden_layers} layers")
    memory, operations = figure.subplots(2, 1, height_ratios=[3, 4])
    _draw_memory(plan, memory)
    _draw_operations(plan, operations)
    write_figure(path, figure)


def _draw_memory(plan: Plan, axes) -> None:
    """Two stacked bars, in GB: training at its peak, and use."""
    training = plan.memory.breakdown()
    if "activations" in training:  # those of the layers, all together
        training = {f"{name}, all layers" if name == "activations" else name: n for name, n in training.items()}
    use = {"weights": plan.inference.weights, "cache": plan.inference.cache}
    colours = iter(("#4878a8", "#8fb2d4", "#b9cbdc", "#d97a4a", "#b8b8b8", "#8abf8a", "#c9a0c9", "#e6b86a", "#7fb7b7"))
    names = dict.fromkeys([*training, *use])
    colour = {name: next(colours) for name in names}
    for row, parts in enumerate((training, use)):
        left = 0.0
        for name, size in parts.items():
            label = name if row == 0 or name not in training else None
            axes.barh(row, size / 1e9, left=left, color=colour[name], label=label, height=0.6)
            left += size / 1e9
    longest = max(plan.memory.total, plan.inference.total)
    if plan.fits is not None and plan.fits.memory < 2 * longest:  # else the bars would be slivers
        axes.axvline(plan.fits.memory / 1e9, color="#333", ls="--", lw=1, label="memory of the machine")
    axes.set_yticks([0, 1], ["training", "use"])
    axes.invert_yaxis()
    axes.set_xlabel("GB")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    how = plan.training
    axes.set_title(f"{how.batch_size} x {how.max_seq_length} tokens, {how.optimizer}", fontsize=10)


def _draw_operations(plan: Plan, axes) -> None:
    """Shares of the forward pass over the length of the text."""
    flops_by_length = plan.flops_by_length
    names = list(flops_by_length.shares[0])
    shares = [[100 * at[name] for at in flops_by_length.shares] for name in names]
    axes.stackplot(flops_by_length.lengths, shares, labels=[name.replace("_", " ") for name in names], alpha=0.85)
    axes.set_xscale("log", base=2)
    axes.set_xticks(flops_by_length.lengths, [f"{n:,}" for n in flops_by_length.lengths])
    axes.set_xlim(flops_by_length.lengths[0], flops_by_length.lengths[-1])
    axes.set_ylim(0, 100)
    axes.set_xlabel("tokens of the text")
    axes.set_ylabel("% of the forward operations")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
