"""`mlxlm sweep`: train combinations of options on the same data, the best of them longer and with other seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
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
_REDUCTION = "Train the best 1/N of the combinations N times as long, until three are left; 1: all.  [default: 3]"
_SEEDS = "Train the best three with N seeds each.  [default: 3]"
_TOKENS = "Number of tokens of the longest runs, such as 2e6.  [default: 20 per parameter of the first]"
_HELP_TEXTS = {
    "batch_size": "Sequences per forward pass.  [default: 16, or fitted to the time limit]",
    "max_seq_length": "Tokens per sequence.  [default: the model's context, at most 512]",
    "eval_every": "Steps between validations; 0: only at the end.  [default: 0]",
}


@click.command(cls=SectionedCommand)
@click.argument("data", nargs=-1)
@sweep_options("Sweep")
@option("Sweep", "--vary variations", str, _VARY, multiple=True, metavar="NAME=A,B,...")
@option("Sweep", "--samples", click.IntRange(2, 10_000), _SAMPLES, metavar="N")
@option("Sweep", "--reduction-factor", click.IntRange(1, 100), _REDUCTION, metavar="N", advanced=True)
@option("Sweep", "--seeds", click.IntRange(1, 100), _SEEDS, metavar="N", advanced=True)
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
    mlxlm sweep DATA --out FOLDER --minutes 20 --vary learning_rate=1e-3,1e-2

    Most combinations are trained on few tokens, the best on more (successive halving), and the best three with several
    seeds, which shows whether the best one is better by more than chance. Ctrl-C finishes the step and saves; --resume
    FOLDER continues.
    """  # noqa: D301 - click's paragraph without wrapping
    from mlxlm.experiments.sweep import Halving, Sweep
    from mlxlm.experiments.variant import Variation, vary

    variations = [Variation.parse(text) for text in options["variations"]]
    if data and not variations:
        raise click.UsageError("nothing varies (try: --vary learning_rate=1e-3,3e-3)")
    if options["overrides"] and any(variation.name == "preset" for variation in variations):
        raise click.UsageError("--set would have no effect: preset varies (try: --vary PART=VALUE)")
    variants = vary(variations, options["samples"], options["seed"] or 0) if data else []
    halving = Halving(**given_values({name: options[name] for name in ("reduction_factor", "seeds")}))
    run_sweep(Sweep, data, options, variants, halving, as_json)


def run_sweep(
    kind: type[Sweep],
    data: tuple[str, ...],
    options: dict[str, Any],
    variants: list[Variant],
    halving: Halving,
    as_json: bool,
) -> None:
    """Make the sweep of a command, or open that of --resume; train what is unfinished; print the result."""
    from mlxlm.experiments.sweep import Sweep
    from mlxlm.experiments.sweep_report import TABLE_HEADER, make_notes, rank, table_row, write_page

    runtime = pop_runtime_options(options)
    out = sweep_folder(data, options)
    if data:
        sources, weights = parse_weighted_sources(data)
        training_options.reject_unused_settings(options, sources)
        config, settings = training_options.chosen_config(options), training_options.given_settings(options)
        settings.setdefault("max_seq_length", training_options.default_max_seq_length(config))
        if options.get("overrides"):
            names = {"vocab_size": "--vocab-size", "max_position_embeddings": "--max-seq-length"}
            reserved = training_options.FLAGS | names
            config = with_overrides(config, options["overrides"], reserved, settings["max_seq_length"])
        if kind is Sweep:
            settings.setdefault("eval_every", 0)
        minutes, duty_cycle = options["minutes"], runtime["power"].duty_cycle
        sweep = kind.start(
            out,
            DataOptions(sources, weights, **training_options.data_settings(options)),
            config,
            variants,
            tokenizer=training_options.given_tokenizer(options),
            budget=train.Budget(tokens=options["tokens"], minutes=minutes, duty_cycle=duty_cycle),
            settings=settings,
            halving=halving,
            phase=phase,
        )
        training_options.print_read(sweep.data)
    else:
        sweep = kind.open(out)
    errors, exit_code = train_sweep(sweep, _runs(sweep), sweep.num_trials, **runtime)
    results = sweep.results()
    notes = [*errors, *make_notes(sweep, results)]
    page, plot = write_page(sweep, results, notes), sweep.path / sweep.PLOT_FILE
    if as_json:
        runs = [asdict(result) for result in results]
        render.emit_json({"path": str(out), "page": str(page), "plot": str(plot), "runs": runs, "notes": notes})
    else:
        render.print_table([*map(table_row, rank(results))], TABLE_HEADER)
        for note in notes:
            render.say(note, style="yellow")
        render.result(str(page))
    if exit_code == 1 and kind is Sweep and any(result.finished for result in results):
        return  # some combinations diverged, which is a result
    if exit_code:
        raise click.exceptions.Exit(exit_code)


def _runs(sweep: Sweep) -> Iterator[tuple[str, Callable[[], train.Run]]]:
    """The runs for `train_sweep`."""
    for trial in sweep.trials():
        name, rounds = trial.variant.name, len(sweep.counts)
        if rounds > 1:
            name += f", round {trial.round + 1} of {rounds}"
        if trial.repeat:
            name += f", seed {trial.repeat + 1} of {sweep.halving.seeds}"
        yield name, partial(sweep.open_run, trial, phase)
