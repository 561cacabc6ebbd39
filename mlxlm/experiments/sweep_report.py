"""The result of a sweep: a ranking, how much of a difference the seed alone makes, a picture and a page."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from mlxlm.experiments.sweep import FINALISTS, Result, Sweep
from mlxlm.report.html import render_html
from mlxlm.utils.files import write_bytes
from mlxlm.utils.formatting import human_count, human_seconds
from mlxlm.utils.plots import LEGEND_SIZE, label_axes, new_figure, save_figure

PAGE_FILE = "sweep.html"
_MAX_LINES = 8  # of a panel; more combinations of the other options have one color


@dataclass(frozen=True)
class Rank:
    """A variant and the runs of the last round that it reached.

    Attributes:
        name: The variant.
        values: What it changes.
        results: Its finished runs of that round, one for each seed; or the one that failed or is not finished.
    """

    name: str
    values: dict[str, Any]
    results: tuple[Result, ...]

    @property
    def round(self) -> int:
        """The round, from 0."""
        return self.results[0].round

    @property
    def bits_per_byte(self) -> float:
        """The mean over the seeds; infinity without a finished run."""
        values = [r.bits_per_byte for r in self.results if r.finished and r.bits_per_byte is not None]
        return fmean(values) if values else math.inf


@dataclass(frozen=True)
class SeedNoise:
    """How much of a difference the seed alone makes.

    Attributes:
        deviation: Standard deviation between seeds, in bits per byte, pooled over the variants that have several.
        best: The best of these variants.
        next: The second best.
        difference: By how many bits per byte the best is better, on average over the seeds.
        margin: Half of the 95% confidence interval of the difference (Student's t).
    """

    deviation: float
    best: str
    next: str
    difference: float
    margin: float

    def __str__(self) -> str:
        told = f"{self.best} is better than {self.next}"
        if self.difference <= self.margin:
            told = f"{self.best} and {self.next} can't be told apart"
        return (
            f"{told}: {self.difference:.4f} ± {self.margin:.4f} bits per byte (95% interval); the seed alone changes a "
            f"result by {self.deviation:.4f} (standard deviation)"
        )


def rank(results: Sequence[Result]) -> list[Rank]:
    """Return the variants that have runs, the best first: by round, then by bits per byte."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    ranks = []
    for name, runs in by_name.items():
        latest = [r for r in runs if r.round == max(run.round for run in runs)]
        ranks.append(Rank(name, runs[0].values, tuple([r for r in latest if r.finished] or latest[:1])))
    return sorted(ranks, key=lambda r: (-r.round, r.bits_per_byte))


def seed_noise(ranks: Sequence[Rank]) -> SeedNoise | None:
    """Compare the two best variants that have several seeds; None if there are fewer than two."""
    groups = [(r, [run.bits_per_byte or math.nan for run in r.results]) for r in ranks[:FINALISTS] if r.results[1:]]
    if len(groups) < 2:
        return None
    freedom = sum(len(values) - 1 for _, values in groups)
    deviation = math.sqrt(sum((x - fmean(values)) ** 2 for _, values in groups for x in values) / freedom)
    (best, first), (second, others) = groups[:2]
    error = deviation * math.sqrt(1 / len(first) + 1 / len(others))
    return SeedNoise(deviation, best.name, second.name, fmean(others) - fmean(first), _student_t(freedom) * error)


def _student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t, within 3% from 2 degrees of freedom (Abramowitz & Stegun 1964, 26.7.5)."""
    z, n = 1.959964, freedom
    return (
        z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )  # fmt: skip


def table(ranks: Sequence[Rank], rounds: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of the ranking."""
    names = list(dict.fromkeys(name for r in ranks for name in r.values))
    header = (*names, "parameters", "round", "tokens", "seeds", "bits per byte", "", "time")
    return header, [(*(str(r.values.get(name, "-")) for name in names), *_cells(r, rounds)) for r in ranks]


def _cells(ranked: Rank, rounds: int) -> tuple[str, ...]:
    result, values = ranked.results[0], [r.bits_per_byte or math.nan for r in ranked.results]
    score, spread = "-" if math.isinf(ranked.bits_per_byte) else f"{ranked.bits_per_byte:.4f}", ""
    if not result.finished:
        spread = "diverged" if result.state == "failed" else f"step {result.step} of {result.steps}"
    elif len(values) > 1:
        spread = f"{min(values):.4f} to {max(values):.4f}"
    seconds = human_seconds(sum(r.elapsed for r in ranked.results))
    tokens, place = human_count(result.tokens), f"{ranked.round + 1} of {rounds}"
    return f"{result.parameters:,}", place, tokens, str(len(values)), score, spread, seconds


def plot_sweep(results: Sequence[Result], path: Path) -> None:
    """Draw bits per byte over the values of each option that varies; later rounds have larger dots.

    Runs of the first round are joined by lines if they differ only in the option of the panel.

    Raises:
        CheckpointError: The file can't be written.
    """
    done = [r for r in results if r.finished and r.bits_per_byte is not None]
    names = list(dict.fromkeys(name for r in results for name in r.values))
    figure = new_figure(max(6, 4.5 * len(names)), 4)
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        label_axes(axes, name, "" if name != names[0] else "validation (bits per byte)")
        _plot_option(axes, name, [r for r in done if name in r.values])
    save_figure(figure, path)


def _plot_option(axes: Any, name: str, results: Sequence[Result]) -> None:
    position = _axis(axes, [result.values[name] for result in results])
    others = [", ".join(f"{key}={v}" for key, v in r.values.items() if key != name) for r in results]
    lines = list(dict.fromkeys(others))
    colored = len(lines) <= _MAX_LINES
    for i, line in enumerate(lines):
        color, own = (
            f"C{i}" if colored else "C0",
            [r for r, other in zip(results, others, strict=True) if other == line],
        )
        first = sorted((position(r.values[name]), r.bits_per_byte) for r in own if r.round == 0)
        axes.plot([x for x, _ in first], [y for _, y in first], "-", color=color, lw=1, alpha=0.6)
        for r in own:
            x, size = position(r.values[name]), 4 + 2 * r.round
            axes.plot(x, r.bits_per_byte, "o", color=color, ms=size, alpha=0.8, mew=0)
        if colored and len(lines) > 1:
            axes.plot([], [], "o-", color=color, label=line.replace("$", r"\$"))
    if colored and len(lines) > 1:
        axes.legend(fontsize=LEGEND_SIZE)


def _axis(axes: Any, values: Sequence[Any]) -> Any:
    """Set up the axis of an option, and return the function from a value to its position."""
    numbers = [_number(value) for value in values]
    if numbers and all(number is not None for number in numbers):
        positive = [n for n in numbers if n]
        if len(positive) == len(numbers) and min(positive) > 0 and max(positive) >= 4 * min(positive):
            axes.set_xscale("log")
            if len(set(positive)) <= _MAX_LINES:
                axes.set_xticks(sorted(set(positive)), [f"{n:g}" for n in sorted(set(positive))])
                axes.minorticks_off()
        return _number
    kinds = list(dict.fromkeys(map(str, values)))
    axes.set_xticks(range(len(kinds)), kinds)
    return lambda value: kinds.index(str(value))


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def write_page(sweep: Sweep, ranks: Sequence[Rank], notes: Sequence[str]) -> Path:
    """Write the page with the table, the notes and the picture, and return its path."""
    header, rows = table(ranks, len(sweep.counts))
    links = [str(Path(r.results[0].path, "report.html").relative_to(sweep.path)) for r in ranks]
    page = render_html(
        Path(__file__).with_name("sweep.html"),
        title=f"{sweep.path.absolute().name}: {len(ranks)} variants",
        notes=notes,
        header=header,
        rows=list(zip(links, rows, strict=True)),
        picture=Markup(base64.b64encode((sweep.path / sweep.PLOT_FILE).read_bytes()).decode()),
    )
    write_bytes(sweep.path / PAGE_FILE, page.encode("utf-8", "replace"))
    return sweep.path / PAGE_FILE
