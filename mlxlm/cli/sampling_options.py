"""The sampling options of `generate` and `chat`, declared once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from mlxlm.cli.sections import option
from mlxlm.utils.errors import GenerationError

_length = functools.partial(option, "Length and end")
_sampling = functools.partial(option, "Sampling")
_repetition = functools.partial(option, "Repetition")
_constrained = functools.partial(option, "Constrained output")

# Named as the fields of GenerationOptions, which has the defaults: they are repeated here as text only, so
# that `--help` needn't import MLX.
OPTIONS = (
    _length("-n", "--max-tokens", type=int, help="Stop after so many tokens.  [default: 256]"),
    _length("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be given again."),
    _sampling(
        "-t",
        "--temp",
        "--temperature",
        "temperature",
        type=float,
        help="0 takes the likeliest token; more is freer.  [default: 0.7]",
    ),
    _sampling("--seed", type=int, help="Equal seeds give equal texts.  [default: drawn]"),
    _sampling("--top-k", type=int, help="Only the K likeliest tokens; 0 is off.  [default: 0]"),
    _sampling(
        "--top-p", type=float, help="Only the likeliest tokens, as many as have this probability.  [default: 1.0]"
    ),
    _sampling("--min-p", type=float, help="Only tokens at least this fraction as likely as the best.  [default: 0.0]"),
    _sampling(
        "--typical-p",
        type=float,
        help="Only the least surprising tokens, as many as have this probability.  [default: 1.0]",
    ),
    _sampling(
        "--xtc-probability",
        type=float,
        help="How often to drop the likeliest tokens (XTC), for less usual texts.  [default: 0.0]",
    ),
    _sampling(
        "--xtc-threshold",
        type=float,
        help="XTC drops all tokens this likely but the last of them.  [default: 0.1]",
    ),
    _sampling(
        "--logit-bias", multiple=True, metavar="ID=BIAS", help="Add a number to a token's logit; may be given again."
    ),
    _repetition("--repetition-penalty", type=float, help="Above 1: fewer repetitions.  [default: 1.0]"),
    _repetition("--repetition-context-size", type=int, help="Tokens that penalty looks back on.  [default: 64]"),
    _repetition("--presence-penalty", type=float, help="Less of what was said at all; 0 is off.  [default: 0.0]"),
    _repetition(
        "--frequency-penalty", type=float, help="Less of it for each time it was said; 0 is off.  [default: 0.0]"
    ),
    _repetition("--dry-multiplier", type=float, help="Above 0: fewer repeated phrases (DRY).  [default: 0.0]"),
    _repetition("--dry-base", type=float, help="DRY: growth with the length of the phrase.  [default: 1.75]"),
    _repetition("--dry-allowed-length", type=int, help="DRY: tokens of a phrase from which it acts.  [default: 2]"),
    _repetition("--dry-penalty-last-n", type=int, help="DRY: tokens that it looks back on.  [default: 1024]"),
    _repetition(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        multiple=True,
        metavar="TEXT",
        help='DRY: what ends a phrase, "" for nothing; may be given again.  [default: line ends and : " *]',
    ),
    _constrained(
        "--json-schema", metavar="FILE|JSON", help="Only texts that are JSON of this schema: a file, or JSON text."
    ),
    _constrained("--regex", metavar="REGEX", help="Only texts that match this as a whole."),
    _constrained("--choice", multiple=True, metavar="TEXT", help="Only one of these texts; may be given again."),
    option(
        "Output",
        "--logprobs",
        type=int,
        metavar="N",
        help="Report the log-probability of each token, and of the N likeliest.",
    ),
)

# Of a constrained text that isn't complete, by its finish_reason.
CONSTRAINT_HINTS = {"length": "a larger --max-tokens", "stop": "a --stop that it can't contain, or none"}


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
        try:
            options = GenerationOptions(**given)
        except GenerationError as error:
            raise click.UsageError(str(error)) from error
        return command(options=options, **values)

    for declared in reversed(OPTIONS):
        with_options = declared(with_options)
    with_options.__click_params__ = [p for p in with_options.__click_params__ if p.name not in without]
    return with_options


def _schema_text(given: str) -> str:
    """JSON text, or the content of the file that has this name."""
    from mlxlm.generation.options import MAX_SCHEMA_CHARS
    from mlxlm.utils.bounded_reads import decode_utf8, read_bytes

    if given.lstrip().startswith("{") or given in ("true", "false"):
        return given
    content = read_bytes(Path(given), MAX_SCHEMA_CHARS, GenerationError)
    return decode_utf8(content, given, GenerationError, "a JSON file", "utf-8-sig")
