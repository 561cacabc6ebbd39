"""Prints the results of `mlxlm evaluate --suite`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlxlm.cli import render

if TYPE_CHECKING:
    from mlxlm.evaluate.suite.estimates import Estimate
    from mlxlm.evaluate.suite.suite import Score, SuiteResult


def print_suite(result: SuiteResult) -> None:
    """Print the scores as tables on stdout, with 95 % confidence intervals in brackets."""
    grammar = [score for score in result.scores if score.group == "grammar"]
    rows = [(_condition(s), _share(s.estimate)) for s in grammar]
    render.print_table(rows, ("minimal pairs", f"accuracy (chance 50%), {grammar[0].count} each"))
    tasks = [score for score in result.scores if score.group == "tasks"]
    choices = [score for score in tasks if score.exact_match is not None]
    if choices:
        render.result("")
        render.print_table(
            [
                (s.name, s.condition, _share(s.estimate), f"{s.chance:.0%}", _share(s.exact_match))
                for s in choices
                if s.exact_match is not None
            ],
            ("task", "", "accuracy", "chance", "exact match"),
        )
    repeated: dict[str, list[Score]] = {}
    for score in tasks:
        if score.exact_match is None:
            repeated.setdefault(score.condition, []).append(score)
    if repeated:
        render.result("")
        render.print_table(
            [
                ("induction", condition, _number(new.estimate), _number(again.estimate), _share(reduction.estimate))
                for condition, (new, again, reduction) in repeated.items()
            ],
            ("task", "", "bits per byte, new", "repeated", "loss reduction"),
        )
    text = [score for score in result.scores if score.group == "text"]
    render.result("")
    values = [(s.metric, _share(s.estimate)) for s in text if s.metric != "loss"]
    render.print_table(values, ("next-token predictions", ""))
    render.result("")
    losses = [(s.condition.removesuffix(" before"), _number(s.estimate)) for s in text if s.metric == "loss"]
    render.print_table(losses, ("tokens before", "loss (nats per token)"))
    if result.left_out:
        render.say(f"too long for the model's context: {'; '.join(result.left_out)}", style="yellow")


def print_checkpoints(results: Mapping[int, SuiteResult]) -> None:
    """Print the scores over all conditions of each checkpoint."""
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for step, result in results.items():
        for score in result.scores:
            if score.condition == "all":
                cells = rows.setdefault((score.name, score.metric), {})
                cells[step] = f"{score.estimate.value:.3f}"
    table = [(*names, *(cells.get(step, "") for step in results)) for names, cells in rows.items()]
    render.print_table(table, ("", "", *(f"step {step}" for step in results)))


def _condition(score: Score) -> str:
    return score.condition or score.name


def _share(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def _number(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
