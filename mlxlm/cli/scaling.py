"""`mlxlm scaling`: fit scaling laws to a grid of small runs on your data, and plan larger models by them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render, training_options
from mlxlm.cli.options import SectionedCommand, given_flags, given_values, json_option, option
from mlxlm.cli.run_options import (
    RUNTIME_OPTIONS,
    pop_runtime_options,
    runtime_options,
    sweep_folder,
    sweep_options,
)
from mlxlm.cli.training import phase, train_sweep
from mlxlm.data.options import DataOptions
from mlxlm.families import load_preset, preset_names
from mlxlm.utils.formatting import human_count, human_seconds

if TYPE_CHECKING:
    from mlxlm.experiments.scaling_grid import Grid

_HOURS = {"h": 1.0, "min": 1 / 60, "m": 1 / 60, "d": 24.0}
_UNUSED_SETTINGS = (
    *("eval_every", "sample_every", "sample_prompt", "sample_tokens"),
    *("save_total_limit", "decay_fraction"),
    *training_options.DISTILLATION,
)
_SIZES = "Model sizes in parameters, such as 0.1m,0.3m,1m, or presets.  [default: chosen for the time limit]"
_RATIOS = "Training lengths of each size, in tokens per parameter.  [default: 5,10,20,40]"
_MINUTES = "Time for the whole grid, unless --sizes is given.  [default: 30]"
_COMPUTE_BUDGET = (
    "Predict the best model for this many operations, such as 1e15, or for a time on this machine, such as 2h."
)
_PREDICT = "Predict the loss of a preset or size, trained on 20 tokens per parameter or on TOKENS."


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 5,10,20") from None


def _parameters(text: str, vocab_size: int | None = None) -> float:
    """The parameter count of a preset, or of a size such as 50m."""
    from mlxlm.plan.model_sizes import parse_size

    if text in preset_names():
        return float(load_preset(text, **given_values({"vocab_size": vocab_size})).parameter_count())
    return parse_size(text)


def parse_size(text: str, vocab_size: int | None = None) -> tuple[float, float]:
    """Parse SIZE[:TOKENS] into (parameters, tokens); a preset gets this vocabulary size."""
    from mlxlm.plan.flops import TOKENS_PER_PARAMETER

    size, colon, tokens = text.partition(":")
    parameters = _parameters(size, vocab_size)
    try:
        count = float(tokens) if colon else TOKENS_PER_PARAMETER * parameters
    except ValueError:
        count = 0.0
    if not 0 < count < 1e18:
        raise click.BadParameter(f"{text!r} is not SIZE or SIZE:TOKENS, such as 50m or 50m:1e9")
    return parameters, count


def _compute_budget(text: str) -> tuple[float, bool]:
    """Parse operations or a time; returns (number, whether it is hours)."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e\+?\d+)?(h|min|m|d)?", text.lower())
    value = float(match[1] + (match[2] or "")) * _HOURS.get(match[3], 1.0) if match else 0.0
    if match is None or not 0 < value < float("inf"):
        raise click.BadParameter(f"{text!r} is neither operations (1e15) nor a time (2h)")
    return value, match[3] is not None


@click.command(cls=SectionedCommand)
@click.argument("data", nargs=-1)
@sweep_options("Grid")
@option(
    "Grid", "--sizes", lambda text: [_parameters(part.strip()) for part in text.split(",")], _SIZES, metavar="A,B,..."
)
@option("Grid", "--tokens-per-parameter", _numbers, _RATIOS, metavar="A,B,...")
@option("Grid", "--tokens", _numbers, "Training lengths in tokens, such as 1e6,2e6,4e6.", metavar="A,B,...")
@option("Grid", "--minutes", float, _MINUTES)
@option("Grid", "--hours", float, "The same in hours.")
@option("Grid", "--fit-only", bool, "Fit the finished runs, without training.")
@option("Predictions", "--compute-budget", lambda text: _compute_budget(text) and text, _COMPUTE_BUDGET, metavar="C")
@option("Predictions", "--predict", lambda text: parse_size(text) and text, _PREDICT, metavar="SIZE[:TOKENS]")
@training_options.data_options(vocab_size="by the sizes")
@training_options.setting_options(_UNUSED_SETTINGS)
@runtime_options
@json_option
def scaling(
    data: tuple[str, ...],
    compute_budget: str | None,
    predict: str | None,
    fit_only: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a grid of small models on DATA, and fit how the loss falls with parameters and tokens.

    L = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022).

    Each model is an ordinary run in its own folder. Ctrl-C finishes the step and saves; --resume FOLDER continues
    what is unfinished. pretrain --hours --scaling-law FOLDER picks a model size by the result.
    \f

    N is the number of parameters, including the embedding, which in a small model is a large part and also the output
    head. D is the number of training tokens. The loss is in nats per token of this tokenizer.
    """  # noqa: D301 - click's form feed: --help ends there
    from mlxlm.cli.scaling_report import report

    if fit_only and (flags := given_flags(RUNTIME_OPTIONS)):
        raise click.UsageError(f"{flags[0]} would have no effect: --fit-only trains nothing")
    runtime = pop_runtime_options(options)
    grid = _grid(data, sweep_folder(data, options), options, fit_only)
    errors, exit_code = ([], 0) if fit_only else _train(grid, runtime)
    prediction = parse_size(predict, grid.vocab_size) if predict else None
    budget = _compute_budget(compute_budget) if compute_budget else None
    report(grid, errors, budget, prediction, as_json)
    if exit_code:
        raise click.exceptions.Exit(exit_code)


def _grid(data: tuple[str, ...], out: Path, options: dict[str, Any], fit_only: bool) -> Grid:
    from mlxlm.experiments.scaling_grid import Grid, GridOptions, start_grid

    if not data:
        return Grid.open(out)
    if fit_only:
        raise click.UsageError("--fit-only trains nothing: DATA would have no effect (try: --resume FOLDER --fit-only)")
    training_options.reject_unused_settings(
        {**options, "sample_every": True, "decay_fraction": None},
        data,
        (options["sizes"], ["minutes", "hours"], "--sizes chooses what is trained"),
        (options["minutes"] is not None, ["hours"], "--minutes says how long"),
        (options["tokens"], ["tokens_per_parameter"], "--tokens says how long each is trained"),
    )
    minutes = options["minutes"] if options["hours"] is None else 60 * options["hours"]
    lengths = {name: options[name] for name in ("sizes", "tokens_per_parameter", "tokens")}
    sizes = GridOptions(**given_values({**lengths, "minutes": minutes}))
    text = DataOptions(data, **training_options.data_settings(options))
    tokenizer, settings = training_options.given_tokenizer(options), training_options.given_settings(options)
    grid = start_grid(out, text, sizes, tokenizer=tokenizer, settings=settings, phase=phase)
    training_options.print_read(grid.data)
    return grid


def _train(grid: Grid, runtime: dict[str, Any]) -> tuple[list[str], int]:
    """Train the unfinished runs. Returns what `train_sweep` does."""
    from mlxlm.plan.scaling_law import FULL_VALUE_EPOCHS

    epochs = max(run.tokens for run in grid.runs) / grid.unique_tokens
    if epochs > 1.2 * FULL_VALUE_EPOCHS:
        render.say(
            f"the text is short: the longest runs take {epochs:.1f} epochs, and more than {FULL_VALUE_EPOCHS:g} "
            "improve a model less than new text would, which makes the fit worse",
            style="yellow",
        )
    runs = []
    for planned in grid.runs:
        name = f"{human_count(planned.parameters)} parameters, {human_count(planned.tokens)} tokens"
        runs.append((name, partial(grid.open_run, planned, phase)))

    def time_left(number: int) -> str:
        return f", about {human_seconds(grid.seconds_left(number) * 100 / runtime['power'].duty_cycle)} left"

    return train_sweep(grid, runs, len(runs), time_left, **runtime)
