"""`mlxlm scaling`: fit scaling laws to a grid of small runs on one's own data, and plan larger ones by them."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.machine_options import MACHINE_OPTIONS, machine_options, pop_machine_options
from mlxlm.cli.run_options import (
    data_options,
    given_options,
    given_settings,
    print_skipped,
    reject_unused_options,
    setting_options,
    unused_data_rules,
)
from mlxlm.utils.formatting import human_count, human_seconds

if TYPE_CHECKING:
    from mlxlm.experiments.scaling_analysis import Analysis, Prediction
    from mlxlm.experiments.scaling_grid import Grid

PLOT_FILE = "scaling.png"
_HOURS = {"h": 1.0, "min": 1 / 60, "m": 1 / 60, "d": 24.0}
_WITHOUT = ("eval_every", "sample_every", "sample_prompt", "sample_tokens", "save_total_limit", "decay_fraction")


@click.command()
@click.argument("data", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder; one that is there goes on.")
@click.option("--sizes", metavar="A,B,...", help="Parameters, such as 0.1m,0.3m,1m, or presets (default: by the time).")
@click.option("--tokens-per-parameter", metavar="A,B,...", help="How long each is trained.  [default: 5,10,20,40]")
@click.option("--tokens", metavar="A,B,...", help="The same in tokens, such as 1e6,2e6,4e6.")
@click.option("--minutes", type=float, help="What the grid may work, where --sizes are not given.  [default: 30]")
@click.option("--hours", type=float, help="The same in hours.")
@data_options(vocab_size="by the sizes")
@setting_options(_WITHOUT)
@machine_options
@click.option(
    "--compute-budget", metavar="C", help="The best model for so many operations, such as 1e15, or for 2h here."
)
@click.option("--predict", metavar="SIZE[:TOKENS]", help="The loss of a preset or size (default: 20 tokens each).")
@click.option("--fit-only", is_flag=True, help="Train nothing: fit what is finished.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def scaling(data, out, compute_budget, predict, fit_only, as_json, **options: Any) -> None:
    """Train a grid of small models on DATA, fit how the loss falls with parameters and tokens, and plan by it.

    L = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022) with N all parameters, the embedding included: with small
    vocabularies it is a large part, and tied to the head it works for every token. D are training tokens, and the loss
    is in nats per token of this tokenizer.

    Each is an ordinary run in a folder of its own. Ctrl-C finishes the step and saves; the same command, or --out
    alone, goes on with what is unfinished. pretrain --hours --scaling-law FOLDER chooses a model by the result.
    """
    _parse_compute_budget(compute_budget)  # before hours of training
    if predict:
        _parse_size(predict)
    if fit_only and (idle := given_options(MACHINE_OPTIONS)):
        raise click.UsageError(f"{idle[0]} would have no effect: --fit-only trains nothing")
    how = pop_machine_options(options)
    grid = _grid(data, out, options, fit_only)
    failed = [] if fit_only else _train(grid, how)
    _report(grid, failed, compute_budget, predict, as_json)
    if failed:
        raise click.exceptions.Exit(1)


def _grid(data: tuple[str, ...], out: Path, options: dict[str, Any], fit_only: bool) -> Grid:
    from mlxlm.cli.training import phase
    from mlxlm.data import Manifest
    from mlxlm.experiments.scaling_grid import Grid, start_grid

    if not data or fit_only:
        given = [*(["DATA"] if data else []), *given_options(options)]
        if given:
            why = "--fit-only trains nothing" if fit_only else "without DATA --out goes on as it began"
            raise click.UsageError(f"{why}, and {given[0]} would have no effect")
        return Grid.open(out)
    reject_unused_options(
        {**options, "sample_every": True, "decay_fraction": None},
        (options["sizes"], ["minutes", "hours"], "--sizes say what is trained"),
        (options["minutes"] is not None, ["hours"], "--minutes says how long"),
        (options["tokens"], ["tokens_per_parameter"], "--tokens says how long each is trained"),
        *unused_data_rules(options, data),
    )
    minutes = options["minutes"] if options["hours"] is None else 60 * options["hours"]
    same = ("vocab_size", "tokenizer", "text_column", "validation")
    names = ("tokenizer_type", "validation_fraction", "on_bad_input")
    given = {name: options[name] for name in names if options[name] is not None}
    given |= {} if minutes is None else {"minutes": minutes}
    grid = start_grid(
        out, data, sizes=[_parameters(text) for text in _list(options["sizes"])],
        ratios=_numbers(options["tokens_per_parameter"]), tokens=_numbers(options["tokens"]),
        settings=given_settings(options), phase=phase, **{name: options[name] for name in same}, **given,
    )  # fmt: skip
    print_skipped(Manifest.read(grid.data).skipped)
    return grid


def _train(grid: Grid, how: dict[str, Any]) -> list[str]:
    from mlxlm.cli.sweep import train_sweep
    from mlxlm.cli.training import phase
    from mlxlm.plan.scaling_law import FULL_VALUE_EPOCHS

    most = max(cell.tokens for cell in grid.cells) / grid.unique_tokens
    if most > 1.2 * FULL_VALUE_EPOCHS:
        render.say(
            f"the text is short: the longest runs see it {most:.1f} times, and after {FULL_VALUE_EPOCHS:g} passes it teaches "
            "less than new text would, which bends the law",
            style="yellow",
        )
    runs = []
    for cell in grid.cells:
        name = f"{human_count(cell.parameters)} parameters, {human_count(cell.tokens)} tokens"
        runs.append((name, partial(grid.run, cell, phase)))
    command = f"mlxlm scaling --out {shlex.quote(str(grid.path))}"

    def left(number: int) -> str:
        return f", about {human_seconds(grid.seconds_left(number) * 100 / how['power'].duty_cycle)} left"

    return train_sweep(runs, grid.tokenizer, command, left, **how)


def _report(grid: Grid, failed: list[str], compute_budget: str | None, predict: str | None, as_json: bool) -> None:
    from mlxlm.experiments.scaling_analysis import FILE, analyze, fit_warnings
    from mlxlm.experiments.scaling_plot import plot_scaling_law
    from mlxlm.utils.files import write_json

    points = grid.points()
    found = analyze(points, grid.by_ratio)
    said, plans = [*failed, *fit_warnings(found)], {}
    if found.joint is None and (predict or compute_budget):
        said.append("without a joint fit nothing can be predicted")
    elif predict:
        plans["predicted"] = found.predict(*_parse_size(predict, grid.vocab_size))
    if compute_budget and found.joint is not None:
        flops, in_hours = _parse_compute_budget(compute_budget)
        flops = grid.flops_per_second() * 3600 * flops if in_hours else flops
        plans["best"], around = found.best(flops)
    plot = grid.path / PLOT_FILE
    values = {**found.to_dict(), "parameters": "all, embedding included", "tokens_in_text": grid.unique_tokens}
    if points:
        plot_scaling_law(found, plot, grid.by_ratio)
        write_json(grid.path / FILE, values)
    for plan in plans.values():
        if plan.far:
            said.append(
                f"{human_count(plan.parameters)} parameters on {human_count(plan.tokens)} tokens are "
                f"{plan.extrapolation:.0f} times the operations of the largest run here: a guess more than a prediction"
            )
        if plan.tokens > 4.8 * grid.unique_tokens:
            said.append(
                f"{human_count(plan.tokens)} tokens are {plan.tokens / grid.unique_tokens:.1f} passes over this text"
            )
    if as_json:
        shown = {name: {**vars(plan), "far": plan.far} for name, plan in plans.items()}
        if "best" in shown:
            shown["best"]["parameters_interval"] = list(around)
        drawn = str(plot) if points else None
        render.emit_json({"path": str(grid.path), "plot": drawn, **values, **shown, "notes": said})
        return
    _tables(found)
    if "predicted" in plans:
        render.result(f"predicted: {_line(plans['predicted'])}")
    if "best" in plans:
        low, high = map(human_count, around)
        render.result(f"best for {flops:.3g} operations: {_line(plans['best'])}; parameters between {low} and {high}")
    for note in said:
        render.say(note, style="yellow")
    if points:
        render.result(str(plot))


def _tables(found: Analysis) -> None:
    fit = found.joint
    rows = []
    for i, p in enumerate(found.points):
        law = ("-", "-") if fit is None else (
            f"{fit.law.loss(p.parameters, p.tokens):.4f}", f"{100 * fit.residuals[i]:+.2f}%",
        )  # fmt: skip
        ratio = f"{p.tokens / p.parameters:.1f}"
        rows.append((f"{p.parameters:,}", human_count(p.tokens), ratio, f"{p.loss:.4f}", *law))
    header = ("parameters", "tokens", "tokens per parameter", "loss", "fit", "off by")
    render.print_result(render.table(rows, header))
    rows = []
    for name, fit in (("L(N)", found.by_parameters), ("L(D)", found.by_tokens), ("L(N, D)", found.joint)):
        for part, value in (fit.law.to_dict() if fit else {}).items():
            low, high = fit.interval(lambda law, part=part: getattr(law, part))
            rows.append((name, part, f"{value:.4g}", f"{low:.4g} to {high:.4g}"))
    if rows:
        render.print_result(render.table(rows, ("law", "", "fitted", "9 of 10 times")))
    if found.check:
        point, (low, high) = found.check.point, found.check.interval
        render.result(
            f"left out of the fit, the largest run ({human_count(point.parameters)} parameters, "
            f"{human_count(point.tokens)} tokens) would be predicted at {found.check.predicted:.4f} ({low:.4f} to "
            f"{high:.4f}); measured {point.loss:.4f}"
        )


def _line(plan: Prediction) -> str:
    low, high = plan.interval
    return (
        f"{human_count(plan.parameters)} parameters on {human_count(plan.tokens)} tokens reach {plan.loss:.4f} nats "
        f"per token ({low:.4f} to {high:.4f})"
    )


def _list(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(part) for part in _list(text)]
    except ValueError:
        raise click.UsageError(f"{text!r} is no list of numbers, such as 5,10,20") from None


def _parameters(text: str, vocab_size: int | None = None) -> float:
    """Of a preset, or a number of them."""
    from mlxlm.families import load_preset, preset_names
    from mlxlm.plan.model_sizes import parse_size

    if text in preset_names():
        changes = {} if vocab_size is None else {"vocab_size": vocab_size}
        return float(load_preset(text, **changes).parameter_count())
    return parse_size(text)


def _parse_size(text: str, vocab_size: int | None = None) -> tuple[float, float]:
    """Parameters and tokens of SIZE[:TOKENS], of a preset with this vocabulary."""
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
    """A number, and whether it is hours."""
    found = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)(h|min|m|d)?", (text or "1").lower())
    try:
        value = float(found[1]) * _HOURS.get(found[2], 1.0)
        if not 0 < value < float("inf"):
            raise ValueError
    except (TypeError, ValueError):
        raise click.UsageError(f"--compute-budget {text!r} is neither operations (1e15) nor a time (2h)") from None
    return value, found[2] is not None
