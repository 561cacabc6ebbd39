"""`mlxlm compare-architectures`: train variants of a model on the same data and budget, and draw their curves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm import train
from mlxlm.cli import render, training_options
from mlxlm.cli.options import SectionedCommand, json_option, option
from mlxlm.cli.run_options import pop_runtime_options, runtime_options, sweep_folder, sweep_options
from mlxlm.cli.training import phase, train_sweep
from mlxlm.data.options import DataOptions, parse_weighted_sources
from mlxlm.families import compatibility_warning
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from mlxlm.experiments.architecture_comparison import Comparison, Result

_SIZE_TOLERANCE = 0.01  # larger relative differences of the parameter counts are mentioned
_VARIANT = (
    'A variant: "wide: hidden_size=256", "positions=alibi", alibi, swiglu, or base for no change. Settings such as '
    "dropout and learning_rate work too. Give two or more."
)
_TOKENS = "Number of tokens, such as 2e6.  [default: 20 per parameter of the first variant]"
_MINUTES = "Minutes for the slowest variant; the others get as many tokens."


@click.command("compare-architectures", cls=SectionedCommand)
@click.argument("data", nargs=-1)
@sweep_options("Comparison")
@option("Comparison", "--variant variants", str, _VARIANT, multiple=True, metavar="NAME: PART=VALUE, ...")
@training_options.model_options("Comparison", "Base model of the variants; see mlxlm models presets.  [default: 1m]")
@option("Training length", "--steps", int, "Number of steps of each variant.")
@option("Training length", "--tokens", float, _TOKENS)
@option("Training length", "--minutes", float, _MINUTES)
@training_options.data_options()
@training_options.setting_options(training_options.DISTILLATION)
@runtime_options
@json_option
def compare_architectures(data: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Train variants of a model on DATA, and plot their loss curves together.

    All variants share one tokenizer and see the same tokens. Each is an ordinary run in its own folder. Ctrl-C finishes
    the step and saves; --resume FOLDER continues what is unfinished.
    """
    runtime = pop_runtime_options(options)
    out = sweep_folder(data, options)
    comparison = _comparison(data, out, options, runtime["power"].duty_cycle)
    runs = [(variant.name, partial(comparison.open_run, variant, phase)) for variant in comparison.variants]
    errors, exit_code = train_sweep(comparison, runs, **runtime)
    results = comparison.results()
    notes = [*errors, *_notes(comparison, results)]
    if as_json:
        rows = [asdict(result) for result in results]
        render.emit_json({"path": str(out), "plot": str(comparison.plot()), "variants": rows, "notes": notes})
    else:
        render.print_table([*map(_row, results)], _HEADER)
        for note in notes:
            render.say(note, style="yellow")
        render.result(str(comparison.plot()))
    if exit_code:
        raise click.exceptions.Exit(exit_code)


def _comparison(data: tuple[str, ...], out: Path, options: dict[str, Any], duty_cycle: float) -> Comparison:
    from mlxlm.experiments.architecture_comparison import Comparison, Variant, start_comparison

    if not data:
        return Comparison.open(out)
    sources, weights = parse_weighted_sources(data)
    training_options.reject_unused_settings(options, sources)
    config = training_options.chosen_config(options)
    settings = training_options.given_settings(options)
    settings.setdefault("max_seq_length", training_options.default_max_seq_length(config))
    comparison = start_comparison(
        out,
        DataOptions(sources, weights, **training_options.data_settings(options)),
        config,
        [Variant.parse(text) for text in options["variants"]],
        tokenizer=training_options.given_tokenizer(options),
        budget=train.Budget(tokens=options["tokens"], minutes=options["minutes"], duty_cycle=duty_cycle),
        settings=settings,
        phase=phase,
    )
    training_options.print_read(comparison.data)
    return comparison


_HEADER = ("variant", "parameters", "tokens", "tokens/s", "time", "memory", "learning rate", "bits per byte")


def _row(result: Result) -> tuple[str, ...]:
    done = human_count(result.tokens) + ("" if result.finished else f" ({result.step} of {result.steps} steps)")
    return (
        result.name,
        f"{result.parameters:,}",
        done,
        f"{result.tokens_per_second:,.0f}",
        human_seconds(result.seconds),
        "-" if result.memory is None else human_bytes(result.memory),
        f"{result.learning_rate:.2g}",
        "-" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}",
    )


def _notes(comparison: Comparison, results: list[Result]) -> Iterator[str]:
    """What to keep in mind when reading the table."""
    sizes = sorted(results, key=lambda result: result.parameters)
    if sizes and sizes[-1].parameters > (1 + _SIZE_TOLERANCE) * sizes[0].parameters:
        more = 100 * (sizes[-1].parameters / sizes[0].parameters - 1)
        yield f"{sizes[-1].name} has {more:.0f}% more parameters than {sizes[0].name}, which is a part of its result"
    if not any("seed" in variant.settings for variant in comparison.variants):
        yield 'each variant has one seed; a second one shows how much is chance (--variant "again: seed=1")'
    for variant in comparison.variants:
        if warning := compatibility_warning(comparison.config_of(variant)):
            yield f"{variant.name}: {warning}"
