"""`--set NAME=VALUE`: a decoder's parts from the command line, the same for all commands that make one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from mlxlm.cli import render

if TYPE_CHECKING:
    from mlxlm.config import ModelConfig


def set_option(command):
    """Adds `--set`, the parameter `parts`."""
    text = "A part of the model, such as positions=alibi, norm=layer, feed_forward=geglu. Can be repeated."
    return click.option("--set", "parts", multiple=True, metavar="NAME=VALUE", help=text)(command)


def configured(
    config: ModelConfig, parts: Sequence[str], decided: Mapping[str, str], context: int | None = None
) -> ModelConfig:
    """`config` with the parts that `--set` gave; says what other tools will make of such a model.

    decided: parts that another option of the command decides, and which. context: tokens that the model will see,
    where that is decided, too; some parts go by it. Raises ConfigError.
    """
    from mlxlm.config.overrides import parse, with_parts
    from mlxlm.families import caveat, resolve_model_type

    if parts and context is not None:
        config = config.with_changes(max_position_embeddings=context)
    config = resolve_model_type(with_parts(config, parse(parts), decided))
    if parts and (note := caveat(config)):
        render.say(note, style="yellow")
    return config
