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
    click.option("-t", "--temperature", type=float, show_default="0.7", help="0 takes the likeliest token."),
    click.option("--top-k", type=int, show_default="0", help="Only the K likeliest tokens; 0 is off."),
    click.option("--top-p", type=float, show_default="1.0", help="Only the likeliest of this sum; 1 is off."),
    click.option("--min-p", type=float, show_default="0.0", help="Only from this share of the best; 0 is off."),
    click.option("--repetition-penalty", type=float, show_default="1.0", help="Above 1: fewer repetitions."),
    click.option("--repetition-window", type=int, show_default="64", help="Tokens the penalty looks back on."),
    click.option("--seed", type=int, show_default="drawn", help="Equal seeds give equal texts."),
    click.option("-n", "--max-tokens", type=int, show_default="256", help="Stop after so many tokens."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be given again."),
)


def sampling_options(command: Callable) -> Callable:
    """Add the options to a command, which gets those that were given as `options`, a GenerationOptions."""

    @functools.wraps(command)
    def with_options(**values: Any):
        from mlxlm.generate import GenerationOptions

        named = {field.name: values.pop(field.name) for field in fields(GenerationOptions)}
        given = {name: value for name, value in named.items() if value is not None}
        return command(options=GenerationOptions(**given), **values)

    for option in reversed(OPTIONS):
        with_options = option(with_options)
    return with_options
