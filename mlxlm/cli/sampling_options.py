"""The sampling options of `generate` and `chat`, declared once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

# Named as the fields of GenerationOptions, which has the defaults: they are repeated here as text only, so
# that `--help` needn't import MLX.
OPTIONS = (
    click.option("-t", "--temperature", type=float, help="0 takes the likeliest token.  [default: 0.7]"),
    click.option("--top-k", type=int, help="Only the K likeliest tokens; 0 is off.  [default: 0]"),
    click.option("--top-p", type=float, help="Only the likeliest of this sum; 1 is off.  [default: 1.0]"),
    click.option("--min-p", type=float, help="Only from this share of the best; 0 is off.  [default: 0.0]"),
    click.option("--repetition-penalty", type=float, help="Above 1: fewer repetitions.  [default: 1.0]"),
    click.option("--repetition-window", type=int, help="Tokens the penalty looks back on.  [default: 64]"),
    click.option("--seed", type=int, help="Equal seeds give equal texts.  [default: drawn]"),
    click.option("-n", "--max-tokens", type=int, help="Stop after so many tokens.  [default: 256]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be given again."),
)


def sampling_options(command: Callable) -> Callable:
    """Add the options to a command, which gets those that were given as `options`, a GenerationOptions."""

    @functools.wraps(command)
    def with_options(**values: Any):
        from mlxlm.generation import GenerationOptions

        named = {field.name: values.pop(field.name) for field in fields(GenerationOptions)}
        given = {name: value for name, value in named.items() if value is not None}
        return command(options=GenerationOptions(**given), **values)

    for option in reversed(OPTIONS):
        with_options = option(with_options)
    return with_options
