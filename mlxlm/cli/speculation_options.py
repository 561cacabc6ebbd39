"""The options of `generate` and `chat` about proposed tokens, declared once, and how both load their models."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli.sections import option
from mlxlm.cli.spinner import spinner
from mlxlm.utils.errors import one_line

if TYPE_CHECKING:
    from mlxlm.generation import LoadedModel
    from mlxlm.generation.speculative import SpeculativeDecoder

_memory = functools.partial(option, "Memory and speed")

OPTIONS = (
    _memory("--draft-model", metavar="MODEL", help="A small model that proposes tokens: the same text, sooner."),
    _memory(
        "--prompt-lookup", is_flag=True, help="Propose what followed the same words earlier: the same text, sooner."
    ),
)


def speculation_options(command: Callable) -> Callable:
    """Add the options to a command. It gets `speculation`: None where nothing is to propose tokens, else a function
    that makes the Speculation, and loads the draft model for it."""

    @functools.wraps(command)
    def with_options(*, draft_model: str | None, prompt_lookup: bool, **values: Any):
        if draft_model is not None and prompt_lookup:
            raise click.UsageError("either --draft-model or --prompt-lookup")

        def make() -> SpeculativeDecoder:
            from mlxlm.generation.drafters import DraftModel, PromptLookup
            from mlxlm.generation.speculative import SpeculativeDecoder

            return SpeculativeDecoder(PromptLookup() if prompt_lookup else DraftModel(load_model(draft_model)))

        return command(speculation=make if draft_model is not None or prompt_lookup else None, **values)

    for declared in reversed(OPTIONS):
        with_options = declared(with_options)
    return with_options


def load_model(model: str) -> LoadedModel:
    """The model of this name, with a sign of life meanwhile. A path is made absolute: what is kept with it may be
    used from another folder."""
    from mlxlm.generation import load

    with spinner(f"loading {one_line(model)}"):
        return load(os.path.abspath(model) if os.path.exists(model) else model)
