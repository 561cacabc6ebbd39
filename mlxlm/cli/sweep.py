"""`mlxlm sweep`: train combinations of options on the same data, the best of them longer and with other seeds."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm import train
from mlxlm.cli import render, training_options
from mlxlm.cli.options import SectionedCommand, given_values, json_option, option
from mlxlm.cli.run_options import (
    override_option,
    pop_runtime_options,
    runtime_options,
    sweep_folder,
    sweep_options,
    with_overrides,
)
from mlxlm.cli.training import phase, train_sweep
from mlxlm.data.options import DataOptions, parse_weighted_sources

if TYPE_CHECKING:
    from mlxlm.experiments.sweep import Halving, Sweep
    from mlxlm.experiments.variant import Variant

_VARY = (
    "An option and its values: a setting of pretrain (learning_rate), a part of the model as in --set "
    "(hidden_size=64,128), or preset. With --samples also a range, learning_rate=1e-4..1e-2. Repeatable."
)
_SAMPLES = "Draw N combinations at random.  [default: all]"
_REDUCTION = (
    "Train all combinations on 1/N of the tokens and the best 1/N of them longer, until three are left; 1: train all "
    "to the end.  [default: 3]"
)
_SEEDS = "Train the best three with N seeds each.  [default: 3]"
_TOKENS = "Number of tokens of the longest runs, such as 2e6.  [default: 20 per parameter of the first]"
_HELP_TEXTS = {
    "batch_size": "Sequences per forward pass.  [default: 16, or fitted to the time limit]",
    "eval_every": "Steps between validations; 0: only at the end.  [default: 0]",
}


@click.command(cls=SectionedCommand)
@click.argument("data", nargs=-1)
@sweep_options("Sweep")
@option("Sweep", "--vary variations", str, _VARY, multiple=True, metavar="NAME=A,B,...")
@option("Sweep", "--samples", click.IntRange(2, 10_000), _SAMPLES, metavar="N")
@option("Sweep", "--reduction-factor", click.IntRange(1, 100), _REDUCTION, metavar="N")
@option("Sweep", "--seeds", click.IntRange(1, 100), _SEEDS, metavar="N")
@training_options.model_options("Model", "Base model; see mlxlm models presets.  [default: 1m]")
@override_option
@option("Training length", "--steps", int, "Number of steps of the longest runs.")
@option("Training length", "--tokens", float, _TOKENS)
@option("Training length", "--minutes", float, "Time limit of the whole sweep.")
@training_options.data_options()
@training_options.setting_options(help_texts=_HELP_TEXTS)
@runtime_options
@json_option
def sweep(data: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Find the best options for DATA: train combinations of them, and rank them by bits per byte.

    \b
    mlxlm sweep DATA --out FOLDER --vary learning_rate=1e-3,3e-3,1e-2 --vary hidden_size=64,128 --minutes 20

    Most combinations are trained on few tokens, the best on more (successive halving), and the best three with several
    seeds, which shows whether the best one is better by more than chance. Each run is an ordinary run in its own
    folder. Ctrl-C finishes the step and saves; --resume FOLDER continues what is unfinished.
    """  # noqa: D301 - click's paragraph without wrapping
    from mlxlm.experiments.sweep import Halving, Sweep
    from mlxlm.experiments.sweep_report import plot_sweep, rank, seed_noise, table, write_page
    from mlxlm.experiments.variant import Variation, vary

    runtime = pop_runtime_options(options)
    out = sweep_folder(data, options)

    def variants() -> list[Variant]:
        variations = [Variation.parse(text) for text in options["variations"]]
        if not variations:
            raise click.UsageError("nothing varies (try: --vary learning_rate=1e-3,3e-3)")
        if options["overrides"] and any(variation.name == "preset" for variation in variations):
            raise click.UsageError("--set would have no effect: preset varies (try: --vary PART=VALUE)")
        return vary(variations, options["samples"], options["seed"] or 0)

    halving = Halving(**given_values({name: options[name] for name in ("reduction_factor", "seeds")}))
    opened = open_sweep(Sweep, data, out, options, variants, halving, runtime["power"].duty_cycle)
    errors, exit_code = train_sweep_runs(opened, **runtime)
    results = opened.results()
    ranks = rank(results)
    noise, header = seed_noise(ranks), table(ranks, len(opened.counts))
    notes = [str(noise)] if noise else []
    if noise is None and any(result.finished for result in results):
        notes.append("no two combinations have several finished seeds: a difference between them may be chance")
    notes += errors
    if ranks and ranks[0].results[0].finished:
        notes.append(f"options of the best: {_arguments(ranks[0].values)}")
    plot_sweep(results, opened.path / opened.PLOT_FILE)
    page = write_page(opened, ranks, notes)
    if as_json:
        values = {"path": str(out), "page": str(page), "seed_noise": noise and asdict(noise), "notes": notes}
        render.emit_json({**values, "runs": [asdict(result) for result in results]})
    else:
        render.print_table(header[1], header[0])
        for note in notes:
            render.result(note)
        render.result(str(page))
    if exit_code and not (errors and any(result.finished for result in results) and exit_code == 1):
        raise click.exceptions.Exit(exit_code)


def open_sweep(
    kind: type[Sweep],
    data: tuple[str, ...],
    out: Path,
    options: dict[str, Any],
    variants: Callable[[], list[Variant]],
    halving: Halving,
    duty_cycle: float,
) -> Sweep:
    """Open the sweep of --resume, or make one from the options of the command."""
    if not data:
        return kind.open(out)
    sources, weights = parse_weighted_sources(data)
    training_options.reject_unused_settings(options, sources)
    config = training_options.chosen_config(options)
    settings = training_options.given_settings(options)
    settings.setdefault("max_seq_length", training_options.default_max_seq_length(config))
    if options.get("overrides"):
        names = {"vocab_size": "--vocab-size", "max_position_embeddings": "--max-seq-length"}
        reserved = training_options.FLAGS | names
        config = with_overrides(config, options["overrides"], reserved, settings["max_seq_length"])
    if halving.seeds > 1 or halving.reduction_factor > 1:
        settings.setdefault("eval_every", 0)
    opened = kind.start(
        out,
        DataOptions(sources, weights, **training_options.data_settings(options)),
        config,
        variants(),
        tokenizer=training_options.given_tokenizer(options),
        budget=train.Budget(tokens=options["tokens"], minutes=options["minutes"], duty_cycle=duty_cycle),
        settings=settings,
        halving=halving,
        phase=phase,
    )
    training_options.print_skipped(opened.data)
    return opened


def train_sweep_runs(opened: Sweep, **runtime: Any) -> tuple[list[str], int]:
    """Train the unfinished runs of a sweep. Returns what `train_sweep` does."""
    several = opened.num_trials > len(opened.variants)
    last = len(opened.counts)
    runs = (
        (
            f"{trial.variant.name}{f', round {trial.round + 1} of {last}' * several}"
            f"{f', seed {trial.repeat + 1} of {opened.halving.seeds}' if trial.repeat else ''}",
            partial(opened.open_run, trial, phase),
        )
        for trial in opened.trials()
    )
    return train_sweep(opened, runs, opened.num_trials, **runtime)


def _arguments(values: dict[str, Any]) -> str:
    """Options of `mlxlm pretrain`."""
    flags = training_options.FLAGS | {"preset": "--preset"}
    pairs = [(flags[n], str(v)) if n in flags else ("--set", f"{n}={v}") for n, v in values.items()]
    return shlex.join([text for pair in pairs for text in pair])
