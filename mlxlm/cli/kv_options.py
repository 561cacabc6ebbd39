"""The options of `generate` and `chat` about keys and values, declared once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from mlxlm.cli.sections import option
from mlxlm.utils.errors import GenerationError

_memory = functools.partial(option, "Memory and speed")

OPTIONS = (
    _memory(
        "--max-kv-size",
        type=int,
        metavar="N",
        help="Hold at most N tokens of a text; the oldest are forgotten, so that memory is bounded.  [default: all]",
    ),
    _memory(
        "--kv-keep",
        type=int,
        metavar="N",
        help="With --max-kv-size: first tokens that are never forgotten.  [default: 4]",
    ),
    _memory(
        "--kv-bits",
        metavar="BITS",
        help="8 or 4 bits for keys and values, or both apart, such as 8,4 or none,4.  [default: the model's type]",
    ),
)


def kv_options(command: Callable) -> Callable:
    """Add the options to a command, which gets them as `kv`, a KVOptions."""

    @functools.wraps(command)
    def with_options(*, max_kv_size: int | None, kv_keep: int | None, kv_bits: str | None, **values: Any):
        if kv_keep is not None and max_kv_size is None:
            raise click.UsageError("--kv-keep needs --max-kv-size")
        from mlxlm.cache import KVOptions

        try:
            kv = KVOptions.of(size=max_kv_size, keep=kv_keep, bits=kv_bits)
        except GenerationError as error:
            raise click.UsageError(str(error)) from error
        return command(kv=kv, **values)

    for declared in reversed(OPTIONS):
        with_options = declared(with_options)
    return with_options
