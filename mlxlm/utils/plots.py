"""What all matplotlib pictures share: figures, grids, legends, axes of counts, files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from mlxlm.utils.files import write_bytes

TITLE_SIZE, LEGEND_SIZE = 10, 8


def new_figure(width: float, height: float) -> Any:
    """A figure of this size in inches. Importing matplotlib takes half a second, so it happens only here."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def label_axes(axes: Any, x: str = "", y: str = "", title: str = "", *, grid: bool = True) -> None:
    """Set labels and title, and draw a light grid if `grid`."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=TITLE_SIZE)
    if grid:
        axes.grid(alpha=0.3, which="both")


def legend_outside(axes: Any, **options: Any) -> None:
    """Draw the legend to the right of the axes."""
    axes.legend(fontsize=LEGEND_SIZE, loc="upper left", bbox_to_anchor=(1, 1), **options)


def count_axis(axis: Any, *, log: bool = False) -> None:
    """Label an axis of counts as 100k, 200k, 500k, 1M.

    A logarithmic axis is labelled at 1, 2 and 5 of each decade, since many axes have less than a decade.
    """
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    if log:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(EngFormatter(sep=""))


def save_figure(figure: Any, path: Path, *, dpi: int = 120) -> None:
    """Write a figure in the format of the file's suffix. Raises CheckpointError if that fails."""
    image = io.BytesIO()
    figure.savefig(image, dpi=dpi, format=path.suffix[1:].lower())
    write_bytes(path, image.getvalue())
