"""`--set NAME=VALUE`: a decoder's parts from the command line, the same for all commands that make one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from mlxlm.cli import render

if TYPE_CHECKING:
    from mlxlm.config import ModelConfig


def override_option(command):
    """Adds `--set`, the parameter `overrides`."""
    text = "A part of the model, such as positions=alibi, norm=layer, feed_forward=geglu. Can be repeated."
    return click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help=text)(command)


def with_overrides(
    config: ModelConfig, overrides: Sequence[str], reserved: Mapping[str, str], context: int | None = None
) -> ModelConfig:
    """`config` with the parts that `--set` gave; says what other tools will make of such a model.

    reserved: parts that another option of the command decides, and which. context: tokens that the model will see,
    where that is decided, too; some parts go by it. Raises ConfigError.
    """
    from mlxlm.config.overrides import apply_overrides, parse_overrides
    from mlxlm.families import compatibility_warning, resolve_model_type

    if overrides and context is not None:
        config = config.with_changes(max_position_embeddings=context)
    config = resolve_model_type(apply_overrides(config, parse_overrides(overrides), reserved))
    if overrides and (note := compatibility_warning(config)):
        render.say(note, style="yellow")
    return config
