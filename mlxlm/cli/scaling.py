"""`mlxlm scaling`: fit scaling laws to a grid of small runs on your data, and plan larger models by them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.options import SectionedCommand, given_flags, given_values, json_option, option
from mlxlm.cli.run_options import RUNTIME_OPTIONS, pop_runtime_options, runtime_options
from mlxlm.cli.training_options import (
    data_options,
    data_settings,
    given_settings,
    given_tokenizer,
    print_skipped,
    reject_unused_settings,
    setting_options,
    unused_data_rules,
)
from mlxlm.utils.formatting import human_count, human_seconds

if TYPE_CHECKING:
    from mlxlm.experiments.scaling_analysis import Analysis, Prediction
    from mlxlm.experiments.scaling_grid import Grid

PLOT_FILE = "scaling.png"
_HOURS = {"h": 1.0, "min": 1 / 60, "m": 1 / 60, "d": 24.0}
_UNUSED_SETTINGS = (
    "eval_every",
    "sample_every",
    "sample_prompt",
    "sample_tokens",
    "save_total_limit",
    "decay_fraction",
)


@click.command(cls=SectionedCommand)
@click.argument("data", nargs=-1)
@option(
    "Grid",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for the runs; an existing one is continued.",
)
@option(
    "Grid",
    "--sizes",
    metavar="A,B,...",
    help="Model sizes in parameters, such as 0.1m,0.3m,1m, or presets.  [default: chosen for the time limit]",
)
@option(
    "Grid",
    "--tokens-per-parameter",
    metavar="A,B,...",
    help="Training lengths of each size, in tokens per parameter.  [default: 5,10,20,40]",
)
@option("Grid", "--tokens", metavar="A,B,...", help="Training lengths in tokens, such as 1e6,2e6,4e6.")
@option("Grid", "--minutes", type=float, help="Time for the whole grid, unless --sizes is given.  [default: 30]")
@option("Grid", "--hours", type=float, help="The same in hours.")
@option("Grid", "--fit-only", is_flag=True, help="Train nothing; fit the finished runs.")
@option(
    "Predictions",
    "--compute-budget",
    metavar="C",
    help="Predict the best model for this many operations, such as 1e15, or for a time on this machine, such as 2h.",
)
@option(
    "Predictions",
    "--predict",
    metavar="SIZE[:TOKENS]",
    help="Predict the loss of a preset or size, trained on 20 tokens per parameter or on TOKENS.",
)
@data_options(vocab_size="by the sizes")
@setting_options(_UNUSED_SETTINGS)
@runtime_options
@json_option
def scaling(
    data: tuple[str, ...],
    out: Path,
    *,
    compute_budget: str | None,
    predict: str | None,
    fit_only: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a grid of small models on DATA, and fit how the loss falls with parameters and tokens.

    L = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022). N is all parameters, with the embedding: it is a large
    part of small models, and tied to the head it computes for every token. D is training tokens. The loss is in nats
    per token of this tokenizer.

    Each model is an ordinary run in its own folder. Ctrl-C finishes the step and saves; the same command, or --out
    alone, continues what is unfinished. pretrain --hours --scaling-law FOLDER picks a model size by the result.
    """
    _parse_compute_budget(compute_budget)  # before hours of training
    if predict:
        _parse_size(predict)
    if fit_only and (flags := given_flags(RUNTIME_OPTIONS)):
        raise click.UsageError(f"{flags[0]} would have no effect: --fit-only trains nothing")
    runtime = pop_runtime_options(options)
    grid = _grid(data, out, options, fit_only)
    errors = [] if fit_only else _train(grid, runtime)
    _report(grid, errors, compute_budget, predict, as_json)
    if errors:
        raise click.exceptions.Exit(1)


def _grid(data: tuple[str, ...], out: Path, options: dict[str, Any], fit_only: bool) -> Grid:
    from mlxlm.cli.training import phase
    from mlxlm.data import DataOptions, Manifest
    from mlxlm.experiments.scaling_grid import Grid, start_grid
    from mlxlm.experiments.scaling_runs import GridOptions

    if not data or fit_only:
        if flags := [*(["DATA"] if data else []), *given_flags(options)]:
            why = "--fit-only trains nothing" if fit_only else "without DATA, --out continues with its own settings"
            raise click.UsageError(f"{why}: {flags[0]} would have no effect")
        return Grid.open(out)
    reject_unused_settings(
        {**options, "sample_every": True, "decay_fraction": None},
        (options["sizes"], ["minutes", "hours"], "--sizes chooses what is trained"),
        (options["minutes"] is not None, ["hours"], "--minutes says how long"),
        (options["tokens"], ["tokens_per_parameter"], "--tokens says how long each is trained"),
        *unused_data_rules(options, data),
    )
    minutes = options["minutes"] if options["hours"] is None else 60 * options["hours"]
    lengths = {name: _numbers(options[name]) for name in ("tokens_per_parameter", "tokens")}
    sizes = [_parameters(text) for text in _split(options["sizes"])]
    grid = start_grid(
        out,
        DataOptions(data, **data_settings(options)),
        GridOptions(sizes, **lengths, **given_values({"minutes": minutes})),
        tokenizer=given_tokenizer(options),
        settings=given_settings(options),
        phase=phase,
    )
    print_skipped(Manifest.read(grid.data).skipped)
    return grid


def _train(grid: Grid, runtime: dict[str, Any]) -> list[str]:
    """Train the unfinished runs; returns an error message for each that failed."""
    from mlxlm.cli.training import phase, train_sweep
    from mlxlm.plan.scaling_law import FULL_VALUE_EPOCHS

    epochs = max(run.tokens for run in grid.runs) / grid.unique_tokens
    if epochs > 1.2 * FULL_VALUE_EPOCHS:
        render.say(
            f"the text is short: the longest runs see it {epochs:.1f} times, and after {FULL_VALUE_EPOCHS:g} epochs "
            "it teaches less than new text would, which bends the law",
            style="yellow",
        )
    runs = []
    for planned in grid.runs:
        name = f"{human_count(planned.parameters)} parameters, {human_count(planned.tokens)} tokens"
        runs.append((name, partial(grid.open_run, planned, phase)))
    command = f"mlxlm scaling --out {shlex.quote(str(grid.path))}"

    def time_left(number: int) -> str:
        return f", about {human_seconds(grid.seconds_left(number) * 100 / runtime['power'].duty_cycle)} left"

    return train_sweep(runs, grid.tokenizer, command, time_left, **runtime)


def _report(grid: Grid, errors: list[str], compute_budget: str | None, predict: str | None, as_json: bool) -> None:
    """Fit the laws, make the predictions, write the files, and print the result."""
    from mlxlm.experiments.scaling_analysis import FILE, analyze, fit_warnings
    from mlxlm.experiments.scaling_plot import plot_scaling_law
    from mlxlm.utils.json_files import write_json

    points = grid.points()
    analysis = analyze(points, grid.by_ratio)
    notes, predictions, interval, flops = [*errors, *fit_warnings(analysis)], {}, None, None
    if analysis.joint is None and (predict or compute_budget):
        notes.append("without a joint fit nothing can be predicted")
    elif predict:
        predictions["predicted"] = analysis.predict(*_parse_size(predict, grid.vocab_size))
    if compute_budget and analysis.joint is not None:
        flops, in_hours = _parse_compute_budget(compute_budget)
        flops = grid.flops_per_second() * 3600 * flops if in_hours else flops
        predictions["best"], interval = analysis.compute_optimal(flops)
    notes += _warnings(predictions, grid)
    plot = grid.path / PLOT_FILE
    values = {**analysis.to_dict(), "parameters": "all, embedding included", "tokens_in_text": grid.unique_tokens}
    if points:
        plot_scaling_law(analysis, plot, grid.by_ratio)
        write_json(grid.path / FILE, values)
    if as_json:
        fields = {
            name: {**vars(prediction), "is_extrapolation": prediction.is_extrapolation}
            for name, prediction in predictions.items()
        }
        if "best" in fields:
            fields["best"]["parameters_interval"] = list(interval)
        plot_path = str(plot) if points else None
        render.emit_json({"path": str(grid.path), "plot": plot_path, **values, **fields, "notes": notes})
        return
    _print_tables(analysis)
    if "predicted" in predictions:
        render.result(f"predicted: {_line(predictions['predicted'])}")
    if "best" in predictions:
        low, high = map(human_count, interval)
        best = _line(predictions["best"])
        render.result(f"best for {flops:.3g} operations: {best}; parameters between {low} and {high}")
    for note in notes:
        render.say(note, style="yellow")
    if points:
        render.result(str(plot))


def _warnings(predictions: dict[str, Prediction], grid: Grid) -> Iterator[str]:
    for prediction in predictions.values():
        tokens = human_count(prediction.tokens)
        if prediction.is_extrapolation:
            factor = f"{prediction.extrapolation:.0f} times the operations of the largest run"
            yield f"{human_count(prediction.parameters)} parameters on {tokens} tokens are {factor}: a guess"
        if prediction.tokens > 4.8 * grid.unique_tokens:
            yield f"{tokens} tokens are {prediction.tokens / grid.unique_tokens:.1f} epochs of this text"


def _print_tables(analysis: Analysis) -> None:
    fit = analysis.joint
    rows = []
    for i, p in enumerate(analysis.points):
        law = ("-", "-")
        if fit is not None:
            law = (f"{fit.law.loss(p.parameters, p.tokens):.4f}", f"{100 * fit.residuals[i]:+.2f}%")
        ratio = f"{p.tokens / p.parameters:.1f}"
        rows.append((f"{p.parameters:,}", human_count(p.tokens), ratio, f"{p.loss:.4f}", *law))
    header = ("parameters", "tokens", "tokens per parameter", "loss", "fit", "residual")
    render.print_result(render.table(rows, header))
    rows = []
    for name, fit in (("L(N)", analysis.by_parameters), ("L(D)", analysis.by_tokens), ("L(N, D)", analysis.joint)):
        for part, value in (fit.law.to_dict() if fit else {}).items():
            low, high = fit.interval(lambda law, part=part: getattr(law, part))
            rows.append((name, part, f"{value:.4g}", f"{low:.4g} to {high:.4g}"))
    if rows:
        render.print_result(render.table(rows, ("law", "", "fitted", "90% interval")))
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


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(part) for part in _split(text)]
    except ValueError:
        raise click.UsageError(f"{text!r} is not a list of numbers such as 5,10,20") from None


def _parameters(text: str, vocab_size: int | None = None) -> float:
    """The parameter count of a preset, or of a size such as 50m."""
    from mlxlm.families import load_preset, preset_names
    from mlxlm.plan.model_sizes import parse_size

    if text in preset_names():
        changes = {} if vocab_size is None else {"vocab_size": vocab_size}
        return float(load_preset(text, **changes).parameter_count())
    return parse_size(text)


def _parse_size(text: str, vocab_size: int | None = None) -> tuple[float, float]:
    """Parse SIZE[:TOKENS] into (parameters, tokens); a preset gets this vocabulary size."""
    from mlxlm.plan.textbook import compute_optimal_tokens

    size, colon, tokens = text.partition(":")
    parameters = _parameters(size, vocab_size)
    try:
        count = float(tokens) if colon else compute_optimal_tokens(parameters)
    except ValueError:
        count = 0.0
    if not 0 < count < 1e18:
        raise click.UsageError(f"--predict {text!r} is not SIZE or SIZE:TOKENS, such as 50m or 50m:1e9")
    return parameters, count


def _parse_compute_budget(text: str | None) -> tuple[float, bool]:
    """Parse operations or a time; returns (number, whether it is hours)."""
    match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)(h|min|m|d)?", (text or "1").lower())
    try:
        value = float(match[1]) * _HOURS.get(match[2], 1.0)
        if not 0 < value < float("inf"):
            raise ValueError
    except (TypeError, ValueError):
        raise click.UsageError(f"--compute-budget {text!r} is neither operations (1e15) nor a time (2h)") from None
    return value, match[2] is not None
