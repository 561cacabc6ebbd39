"""`mlxlm compare-architectures`: train variants of a model on the same data and budget, and draw their curves."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.machine_options import machine_options, pop_machine_options
from mlxlm.cli.run_options import (
    DEFAULT_MAX_SEQ_LENGTH,
    data_options,
    given_options,
    given_settings,
    print_skipped,
    reject_unused_options,
    setting_options,
    unused_data_rules,
)
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from mlxlm.experiments.architecture_comparison import Comparison, Result

_APART = 0.01  # parameter counts that differ by more than this share are remarked on


@click.command("compare-architectures")
@click.argument("data", nargs=-1)
@click.option(
    "--variant", "variants", multiple=True, metavar="NAME: PART=VALUE, ...",
    help='What one of them changes, such as "wide: hidden_size=256", "positions=alibi", alibi, swiglu, or base for '
    "nothing. Two or more; also dropout, learning_rate and other settings.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder; one that is there goes on.")
@click.option("--preset", default=None, help="What the variants vary, see mlxlm presets.  [default: 1m]")
@click.option("--config", type=click.Path(path_type=Path), help="A config.json instead of a preset.")
@data_options()
@click.option("--steps", type=int, help="How long to train each of them, in steps,")
@click.option("--tokens", type=float, help="in tokens (such as 2e6; default: 20 per parameter of the first),")
@click.option("--minutes", type=float, help="or in minutes for the slowest; the others see as many tokens.")
@setting_options()
@machine_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def compare_architectures(data, variants, out, as_json, **options: Any) -> None:
    """Train variants of a model on DATA, with one tokenizer, for the same tokens, and draw their curves in one picture.

    Each is an ordinary run in a folder of its own. Ctrl-C finishes the step and saves; the same command, or --out
    alone, goes on with what is unfinished.
    """
    how = pop_machine_options(options)
    comparison = _comparison(data, variants, out, options, how["power"].duty_cycle)
    failed = _train(comparison, how)
    found = comparison.results()
    notes = [*failed, *_notes(comparison, found)]
    if as_json:
        rows = [result.to_dict() for result in found]
        render.emit_json({"path": str(out), "plot": str(comparison.plot()), "variants": rows, "notes": notes})
    else:
        render.print_result(render.table([*map(_row, found)], _HEADER))
        for note in notes:
            render.say(note, style="yellow")
        render.result(str(comparison.plot()))
    if failed:
        raise click.exceptions.Exit(1)


def _comparison(
    data: tuple[str, ...], variants: tuple[str, ...], out: Path, options: dict[str, Any], duty_cycle: float
) -> Comparison:
    from mlxlm.cli.training import phase
    from mlxlm.data import Manifest, parse_weighted_sources
    from mlxlm.experiments.architecture_comparison import Comparison, Variant, start_comparison
    from mlxlm.families import load_config, load_preset

    if not data:
        if given := given_options(["variants", *options]):
            raise click.UsageError(f"without DATA --out goes on as it began, and {given[0]} would have no effect")
        return Comparison.open(out)
    data, weights = parse_weighted_sources(data)
    reject_unused_options(
        options,
        (options["preset"] and options["config"], ["preset"], "--config chooses the model"),
        *unused_data_rules(options, data),
    )
    config = load_config(options["config"]) if options["config"] else load_preset(options["preset"] or "1m")
    settings = given_settings(options)
    settings.setdefault("max_seq_length", min(DEFAULT_MAX_SEQ_LENGTH, config.max_position_embeddings))
    same = ("text_column", "tokenizer", "vocab_size", "validation", "minutes", "tokens")
    names = ("tokenizer_type", "validation_fraction", "on_bad_input")
    given = {name: options[name] for name in names if options[name] is not None}
    comparison = start_comparison(
        out,
        data,
        config,
        [Variant.read(text) for text in variants],
        weights=weights,
        settings=settings,
        duty_cycle=duty_cycle,
        phase=phase,
        **{name: options[name] for name in same},
        **given,
    )
    print_skipped(Manifest.read(comparison.data).skipped)
    return comparison


def _train(comparison: Comparison, how: dict[str, Any]) -> list[str]:
    """Train what is unfinished, until a stop is asked for; returns what went wrong, a line for each variant."""
    from mlxlm.cli.sweep import train_sweep
    from mlxlm.cli.training import phase

    runs = [(variant.name, partial(comparison.run, variant, phase)) for variant in comparison.variants]
    command = f"mlxlm compare-architectures --out {shlex.quote(str(comparison.path))}"
    return train_sweep(runs, comparison.tokenizer, command, **how)


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


def _notes(comparison: Comparison, found: list[Result]) -> Iterator[str]:
    """What to keep in mind when reading the table."""
    from mlxlm.families import compatibility_warning

    sizes = sorted(found, key=lambda result: result.parameters)
    if sizes and sizes[-1].parameters > (1 + _APART) * sizes[0].parameters:
        more = 100 * (sizes[-1].parameters / sizes[0].parameters - 1)
        yield f"{sizes[-1].name} has {more:.0f} % more parameters than {sizes[0].name}: a part of its result is size"
    if not any("seed" in variant.settings for variant in comparison.variants):
        yield 'one seed each: how much is chance, another one says (--variant "again: seed=1")'
    for variant in comparison.variants:
        if note := compatibility_warning(comparison.config_of(variant)):
            yield f"{variant.name}: {note}"
