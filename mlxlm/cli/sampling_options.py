"""The sampling options of `generate` and `chat`, declared once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

# Named as the fields of GenerationOptions, which has the defaults: they are repeated here as text only, so
# that `--help` needn't import MLX.
OPTIONS = (
    click.option("-t", "--temperature", type=float, help="0 takes the likeliest token.  [default: 0.7]"),
    click.option("--top-k", type=int, help="Only the K likeliest tokens; 0 is off.  [default: 0]"),
    click.option("--top-p", type=float, help="Only the likeliest of this sum; 1 is off.  [default: 1.0]"),
    click.option("--min-p", type=float, help="Only from this share of the best; 0 is off.  [default: 0.0]"),
    click.option("--typical-p", type=float, help="Only the most typical of this sum; 1 is off.  [default: 1.0]"),
    click.option("--xtc-probability", type=float, help="How often to exclude top choices; 0 is off.  [default: 0.0]"),
    click.option("--xtc-threshold", type=float, help="From which probability XTC does.  [default: 0.1]"),
    click.option("--repetition-penalty", type=float, help="Above 1: fewer repetitions.  [default: 1.0]"),
    click.option("--repetition-window", type=int, help="Tokens the penalty looks back on.  [default: 64]"),
    click.option("--presence-penalty", type=float, help="Less of what was said once; 0 is off.  [default: 0.0]"),
    click.option("--frequency-penalty", type=float, help="Less, each time it was said; 0 is off.  [default: 0.0]"),
    click.option("--dry-multiplier", type=float, help="DRY: above 0, fewer repeated phrases.  [default: 0.0]"),
    click.option("--dry-base", type=float, help="DRY: growth with a phrase's length.  [default: 1.75]"),
    click.option("--dry-allowed-length", type=int, help="DRY: tokens from which it acts.  [default: 2]"),
    click.option("--dry-window", type=int, help="DRY: tokens that it looks back on.  [default: 1024]"),
    click.option(
        "--dry-breakers",
        multiple=True,
        metavar="TEXT",
        help="DRY: what ends a phrase; may be given again.  [default: line ends and : \" *]",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=BIAS",
        help="Add a number to a token's logit; may be given again.",
    ),
    click.option(
        "--json-schema", metavar="FILE|JSON", help="Only texts that are JSON of this schema: a file, or JSON text."
    ),
    click.option("--regex", metavar="REGEX", help="Only texts that match this as a whole."),
    click.option("--choice", multiple=True, metavar="TEXT", help="Only one of these texts; may be given again."),
    click.option("--logprobs", type=int, metavar="N", help="Report log-probabilities: each token's, the N likeliest."),
    click.option("--seed", type=int, help="Equal seeds give equal texts.  [default: drawn]"),
    click.option("-n", "--max-tokens", type=int, help="Stop after so many tokens.  [default: 256]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be given again."),
)


def sampling_options(command: Callable | None = None, *, without: Collection[str] = ()) -> Callable:
    """Add the options to a command, which gets those that were given as `options`, a GenerationOptions.

    `without`: fields of GenerationOptions that the command has no use for, as in
    `@sampling_options(without=["logprobs"])`.
    """
    if command is None:
        return functools.partial(sampling_options, without=without)

    @functools.wraps(command)
    def with_options(**values: Any):
        from mlxlm.generation import GenerationOptions

        named = {f.name: values.pop(f.name) for f in fields(GenerationOptions) if f.name not in without}
        given = {name: value for name, value in named.items() if value not in (None, ())}
        if "json_schema" in given:
            given["json_schema"] = _schema_text(given["json_schema"])
        return command(options=GenerationOptions(**given), **values)

    for option in reversed(OPTIONS):
        with_options = option(with_options)
    with_options.__click_params__ = [p for p in with_options.__click_params__ if p.name not in without]
    return with_options


def _schema_text(given: str) -> str:
    """JSON text, or the content of the file that has this name."""
    from mlxlm.errors import GenerationError
    from mlxlm.generation.options import LARGEST_SCHEMA
    from mlxlm.reading import read_bytes

    if given.lstrip().startswith("{") or given in ("true", "false"):
        return given
    try:
        return read_bytes(Path(given), LARGEST_SCHEMA, GenerationError).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise GenerationError(f"{given} is not UTF-8: {error.reason} at byte {error.start}", "a JSON file") from None
