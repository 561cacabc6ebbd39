"""A picture of the evaluation suite's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxlm.evaluate.suite.estimates import Estimate
from mlxlm.evaluate.suite.suite import ACCURACY, ALL, LOSS_REDUCTION, SuiteResult
from mlxlm.utils.plots import LEGEND_SIZE, label_axes, new_figure

FORMATS = (".png", ".svg", ".pdf")


def suite_figure(result: SuiteResult) -> Any:
    """Draw grammar, tasks, reliability and loss by position, with 95 % confidence intervals, as a matplotlib figure."""
    figure = new_figure(11, 8)
    grammar, tasks, reliability, positions = figure.subplots(2, 2).flatten()

    pairs = [score for score in result.scores if score.group == "grammar"][::-1]
    label_axes(grammar, "accuracy", title="minimal pairs")
    grammar.errorbar(
        [s.estimate.value for s in pairs],
        range(len(pairs)),
        xerr=_errors([s.estimate for s in pairs]),
        fmt="o",
        ms=4,
        lw=1,
    )
    grammar.axvline(0.5, color="#888", ls=":")
    grammar.set_yticks(range(len(pairs)), ["all" if s.condition == ALL else s.name for s in pairs])
    grammar.set_xlim(0, 1)

    label_axes(tasks, "words, pairs, digits or open brackets", title="tasks (loss reduction for induction)")
    chosen = [s for s in result.scores if s.group == "tasks" and s.metric in (ACCURACY, LOSS_REDUCTION)]
    for name in dict.fromkeys(s.name for s in chosen):
        scores = [s for s in chosen if s.name == name and s.condition != ALL]
        sizes, values = [int(s.condition.split()[0]) for s in scores], [s.estimate.value for s in scores]
        tasks.errorbar(
            sizes, values, yerr=_errors([s.estimate for s in scores]), fmt="o-", ms=4, lw=1, capsize=2, label=name
        )
    tasks.axhline(0.25, color="#888", ls=":", label="chance (brackets ⅓, induction 0)")
    tasks.set_xscale("log", base=2)
    tasks.xaxis.set_major_formatter("{x:.0f}")
    tasks.set_ylim(top=1.02)
    tasks.legend(fontsize=LEGEND_SIZE)

    label_axes(reliability, "confidence", "accuracy", "reliability of next-token predictions")
    reliability.plot([0, 1], [0, 1], color="#888", ls=":", label="calibrated")
    bins = result.reliability
    confidence, accuracy = [b.confidence for b in bins], [b.accuracy for b in bins]
    shares = [b.count / sum(b.count for b in bins) for b in bins]
    reliability.bar(confidence, shares, width=0.06, color="#cde", label="share of predictions")
    values = [a.value for a in accuracy]
    reliability.errorbar(confidence, values, yerr=_errors(accuracy), fmt="o-", ms=4, lw=1, capsize=2)
    reliability.legend(fontsize=LEGEND_SIZE)

    losses = [score for score in result.scores if score.metric == "loss"]
    label_axes(positions, "tokens before it in the context", "loss (nats per token)", "loss by position")
    places = range(len(losses))
    positions.errorbar(
        places,
        [s.estimate.value for s in losses],
        yerr=_errors([s.estimate for s in losses]),
        fmt="o-",
        ms=4,
        lw=1,
        capsize=2,
    )
    positions.set_xticks(places, [s.condition.removesuffix(" before") for s in losses], rotation=40, ha="right")
    return figure


def _errors(estimates: Sequence[Estimate]) -> list[list[float]]:
    """The lengths of the error bars, which matplotlib wants positive."""
    below, above = ([e.value - e.low for e in estimates], [e.high - e.value for e in estimates])
    return [[max(0.0, length) for length in side] for side in (below, above)]
