"""The result of `mlxlm scaling`: the fitted laws and the predictions, as tables, as JSON and in the grid's folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from mlxlm.cli import render
from mlxlm.experiments.scaling_analysis import FILE, Analysis, Prediction, analyze, fit_warnings, plot_scaling_law
from mlxlm.experiments.scaling_grid import Grid
from mlxlm.utils.formatting import human_count
from mlxlm.utils.json_files import write_json

PLOT_FILE = "scaling.png"


def report(
    grid: Grid,
    errors: list[str],
    compute_budget: tuple[float, bool] | None,
    prediction: tuple[float, float] | None,
    as_json: bool,
) -> None:
    """Fit the laws, make the predictions, write the files, and print the result.

    Args:
        grid: The grid.
        errors: Messages of runs that failed.
        compute_budget: A number of operations or hours, and whether it is hours.
        prediction: The parameters and tokens of a run to predict.
        as_json: Whether to print JSON.
    """
    points = grid.points()
    analysis = analyze(points, grid.by_ratio)
    notes = [*errors, *fit_warnings(analysis)]
    fields: dict[str, Any] = {}
    lines, predictions = [], []
    if analysis.joint is None and (prediction or compute_budget):
        notes.append("without a joint fit nothing can be predicted")
    else:
        if prediction:
            predicted = analysis.predict(*prediction)
            predictions.append(predicted)
            fields["predicted"] = _fields(predicted)
            lines.append(f"predicted: {_line(predicted)}")
        if compute_budget:
            amount, in_hours = compute_budget
            flops = grid.flops_per_second() * 3600 * amount if in_hours else amount
            best, (low, high) = analysis.compute_optimal(flops)
            predictions.append(best)
            fields["best"] = {**_fields(best), "parameters_interval": [low, high]}
            between = f"parameters between {human_count(low)} and {human_count(high)}"
            lines.append(f"best for {flops:.3g} operations: {_line(best)}; {between}")
    for each in predictions:
        notes += _warnings(each, grid.unique_tokens)
    values = {**analysis.to_dict(), "parameters": "all, embedding included", "tokens_in_text": grid.unique_tokens}
    plot = None
    if points:
        plot = str(grid.path / PLOT_FILE)
        plot_scaling_law(analysis, grid.path / PLOT_FILE, grid.by_ratio)
        write_json(grid.path / FILE, values)
    if as_json:
        render.emit_json({"path": str(grid.path), "plot": plot, **values, **fields, "notes": notes})
        return
    _print_tables(analysis)
    for line in lines:
        render.result(line)
    for note in notes:
        render.say(note, style="yellow")
    if plot:
        render.result(plot)


def _fields(prediction: Prediction) -> dict[str, Any]:
    return {**vars(prediction), "is_extrapolation": prediction.is_extrapolation}


def _warnings(prediction: Prediction, unique_tokens: int) -> Iterator[str]:
    tokens = human_count(prediction.tokens)
    if prediction.is_extrapolation:
        factor = f"{prediction.extrapolation:.0f} times the operations of the largest run"
        yield f"{human_count(prediction.parameters)} parameters on {tokens} tokens are {factor}: a guess"
    if prediction.tokens > 4.8 * unique_tokens:
        yield f"{tokens} tokens are {prediction.tokens / unique_tokens:.1f} epochs of this text"


def _print_tables(analysis: Analysis) -> None:
    joint = analysis.joint
    rows: list[tuple[str, ...]] = []
    for i, p in enumerate(analysis.points):
        fitted = ("-", "-")
        if joint is not None:
            fitted = (f"{joint.law.loss(p.parameters, p.tokens):.4f}", f"{100 * joint.residuals[i]:+.2f}%")
        ratio = f"{p.tokens / p.parameters:.1f}"
        rows.append((f"{p.parameters:,}", human_count(p.tokens), ratio, f"{p.loss:.4f}", *fitted))
    header = ("parameters", "tokens", "tokens per parameter", "loss", "fit", "residual")
    render.print_table(rows, header)
    rows = []
    for name, fit in (("L(N)", analysis.by_parameters), ("L(D)", analysis.by_tokens), ("L(N, D)", joint)):
        if fit is None:
            continue
        for part, value in asdict(fit.law).items():
            low, high = fit.interval(attrgetter(part))
            rows.append((name, part, f"{value:.4g}", f"{low:.4g} to {high:.4g}"))
    if rows:
        render.print_table(rows, ("law", "", "fitted", "90% interval"))
    if analysis.check:
        point, (low, high) = analysis.check.point, analysis.check.interval
        render.result(
            f"if the largest run ({human_count(point.parameters)} parameters, {human_count(point.tokens)} tokens) is "
            f"left out of the fit, it is predicted at {analysis.check.predicted:.4f} ({low:.4f} to {high:.4f}); "
            f"measured {point.loss:.4f}"
        )


def _line(prediction: Prediction) -> str:
    low, high = prediction.interval
    return (
        f"{human_count(prediction.parameters)} parameters on {human_count(prediction.tokens)} tokens reach "
        f"{prediction.loss:.4f} nats per token ({low:.4f} to {high:.4f})"
    )
