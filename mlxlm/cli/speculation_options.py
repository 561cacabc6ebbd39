"""The options of `generate` and `chat` about proposed tokens, declared once, and how both load their models."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli.sections import option
from mlxlm.cli.spinner import waiting
from mlxlm.utils.errors import one_line

if TYPE_CHECKING:
    from mlxlm.generation import LoadedModel
    from mlxlm.generation.speculative import Speculation

_memory = functools.partial(option, "Memory and speed")

OPTIONS = (
    _memory("--draft", metavar="MODEL", help="A small model that proposes tokens: the same text, sooner."),
    _memory("--lookup", is_flag=True, help="Propose what followed the same words earlier: the same text, sooner."),
)


def speculation_options(command: Callable) -> Callable:
    """Add the options to a command. It gets `speculation`: None where nothing is to propose tokens, else a function
    that makes the Speculation, and loads the draft model for it."""

    @functools.wraps(command)
    def with_options(*, draft: str | None, lookup: bool, **values: Any):
        if draft is not None and lookup:
            raise click.UsageError("either --draft or --lookup")

        def make() -> Speculation:
            from mlxlm.generation.drafters import DraftModel, NgramLookup
            from mlxlm.generation.speculative import Speculation

            return Speculation(NgramLookup() if lookup else DraftModel(load_model(draft)))

        return command(speculation=make if draft is not None or lookup else None, **values)

    for declared in reversed(OPTIONS):
        with_options = declared(with_options)
    return with_options


def load_model(model: str) -> LoadedModel:
    """The model of this name, with a sign of life meanwhile. A path is made absolute: what is kept with it may be
    used from another folder."""
    from mlxlm.generation import load

    with waiting(f"loading {one_line(model)}"):
        return load(os.path.abspath(model) if os.path.exists(model) else model)
