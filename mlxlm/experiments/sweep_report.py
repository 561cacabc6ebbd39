"""The result of a sweep: a ranking, how much of a difference the seed alone makes, a picture and a page."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from mlxlm.experiments.sweep import FINALISTS, Comparison, Result, Sweep
from mlxlm.families import compatibility_warning
from mlxlm.report import REPORT_FILE, plot_runs, read_run
from mlxlm.report.html import render_html
from mlxlm.utils.files import write_bytes
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds
from mlxlm.utils.plots import LEGEND_SIZE, label_axes, new_figure, save_figure

PAGE_FILE = "sweep.html"
_MAX_LINES = 8  # of a panel; more combinations of the other options have one color


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


Runs = tuple[Result, ...]  # of a variant, in the last round that it reached: the finished ones, or else one


def rank(results: Sequence[Result]) -> list[Runs]:
    """Return the runs of each variant, those of the best variant first: by round, then by bits per byte."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    latest = [[r for r in runs if r.round == max(run.round for run in runs)] for runs in by_name.values()]
    ranks = [tuple([r for r in runs if r.finished] or runs[:1]) for runs in latest]
    return sorted(ranks, key=lambda runs: (-runs[0].round, _mean(runs)))


def _mean(runs: Runs) -> float:
    """The mean bits per byte; infinity without a finished run."""
    return fmean(_scores(runs)) if runs[0].finished else math.inf


def _scores(runs: Runs) -> list[float]:
    return [math.nan if run.bits_per_byte is None else run.bits_per_byte for run in runs]


def seed_noise(ranks: Sequence[Runs]) -> SeedNoise | None:
    """Compare the two best variants that have several seeds; None if there are fewer than two."""
    groups = [(runs[0].name, _scores(runs)) for runs in ranks[:FINALISTS] if runs[1:]]
    if len(groups) < 2:
        return None
    freedom = sum(len(scores) - 1 for _, scores in groups)
    deviation = math.sqrt(sum((x - fmean(scores)) ** 2 for _, scores in groups for x in scores) / freedom)
    (best, first), (second, others) = groups[:2]
    error = deviation * math.sqrt(1 / len(first) + 1 / len(others))
    return SeedNoise(deviation, best, second, fmean(others) - fmean(first), _student_t(freedom) * error)


def _student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t, within 3% from 2 degrees of freedom (Abramowitz & Stegun 1964, 26.7.5)."""
    z, n = 1.959964, freedom
    return (
        z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )  # fmt: skip


TABLE_HEADER = ("variant", "round", "parameters", "tokens", "tokens/s", "time", "memory", "seeds", "bits per byte", "")


def table_row(runs: Runs) -> tuple[str, ...]:
    """Return the cells of a variant in the ranking."""
    result, scores, note = runs[0], _scores(runs), ""
    if not result.finished:
        note = "diverged" if result.state == "failed" else f"step {result.step} of {result.steps}"
    elif len(scores) > 1:
        note = f"{min(scores):.4f} to {max(scores):.4f}"
    return (
        result.name, str(result.round + 1), f"{result.parameters:,}", human_count(result.tokens),
        f"{result.tokens_per_second:,.0f}", human_seconds(result.elapsed),
        "-" if result.memory is None else human_bytes(result.memory), str(len(scores)),
        f"{_mean(runs):.4f}" if result.finished else "-", note,
    )  # fmt: skip


def make_notes(sweep: Sweep, results: Sequence[Result]) -> Iterator[str]:
    """What to keep in mind when reading the ranking."""
    if noise := seed_noise(rank(results)):
        yield str(noise)
    elif any(result.finished for result in results):
        yield "no two variants have several seeds: a difference between them may be chance"
    warnings = {variant.name: compatibility_warning(sweep.config_of(variant)) for variant in sweep.variants}
    yield from (f"{name}: {warning}" for name, warning in warnings.items() if warning)


def plot_sweep(results: Sequence[Result], path: Path) -> None:
    """Draw bits per byte over the values of each option that varies; later rounds have larger dots.

    Runs of the first round are joined by lines if they differ only in the option of the panel.
    """
    done = [r for r in results if r.finished and r.bits_per_byte is not None]
    names = list(dict.fromkeys(name for r in results for name in r.values))
    figure = new_figure(max(6, 4.5 * len(names)), 4)
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        label_axes(axes, name, "" if name != names[0] else "validation (bits per byte)")
        own = [r for r in done if name in r.values]
        position = _set_up_axis(axes, [r.values[name] for r in own])
        groups: dict[str, list[Result]] = {}
        for r in own:
            groups.setdefault(", ".join(f"{key}={v}" for key, v in r.values.items() if key != name), []).append(r)
        has_legend = 1 < len(groups) <= _MAX_LINES
        for i, (label, group) in enumerate(groups.items()):
            color = f"C{i}" if has_legend else "C0"
            first = sorted((position(r.values[name]), r.bits_per_byte) for r in group if r.round == 0)
            label = label.replace("$", r"\$")  # which would start a formula
            axes.plot([x for x, _ in first], [y for _, y in first], color=color, lw=1, alpha=0.6, label=label)
            for r in group:
                axes.plot(position(r.values[name]), r.bits_per_byte, "o", color=color, ms=4 + 2 * r.round, alpha=0.8)
        if has_legend:
            axes.legend(fontsize=LEGEND_SIZE)
    save_figure(figure, path)


def _set_up_axis(axes: Any, values: Sequence[Any]) -> Callable[[Any], float]:
    """Label an axis with the values of an option, and return the function from a value to its position."""
    try:
        numbers = sorted({float(value) for value in values})
    except ValueError:
        kinds = list(dict.fromkeys(map(str, values)))
        axes.set_xticks(range(len(kinds)), kinds)
        return lambda value: kinds.index(str(value))
    if numbers and 0 < 4 * numbers[0] <= numbers[-1]:
        axes.set_xscale("log")
    if len(numbers) <= _MAX_LINES:
        axes.set_xticks(numbers, [f"{n:g}" for n in numbers])
        axes.minorticks_off()
    return float


def write_page(sweep: Sweep, results: Sequence[Result], notes: Sequence[str]) -> Path:
    """Write the picture, and the page with the ranking, the notes and the picture. Returns the path of the page."""
    picture, page, ranks = sweep.path / sweep.PLOT_FILE, sweep.path / PAGE_FILE, rank(results)
    if isinstance(sweep, Comparison):
        plot_runs({result.name: read_run(Path(result.path)) for result in results}, picture)
    else:
        plot_sweep(results, picture)
    link, rows = Markup('<a href="{}">{}</a>'), []
    for runs in ranks:
        report = Path(runs[0].path, REPORT_FILE).relative_to(sweep.path)
        rows.append((link.format(quote(str(report)), runs[0].name), *table_row(runs)[1:]))
    html = render_html(
        Path(__file__).with_name("sweep.html"),
        title=f"{sweep.path.absolute().name}: {len(ranks)} variants",
        notes=notes,
        header=TABLE_HEADER,
        rows=rows,
        picture=Markup(base64.b64encode(picture.read_bytes()).decode()),
    )
    write_bytes(page, html.encode("utf-8", "replace"))
    return page
