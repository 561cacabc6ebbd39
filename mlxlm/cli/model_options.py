"""What commands with a MODEL share: completion of its name, and --offline."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from mlxlm.checkpoint.catalog import bundled_models, catalog
from mlxlm.checkpoint.local_models import hub_ids


class _ModelName(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions
    """A name of the catalog, a path, or a hub id."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete names of the catalog, hub ids of downloaded models, and files."""
        names = dict.fromkeys(bundled_models(), "ships with mlxlm")
        names |= {name: entry.description for name, entry in catalog().items()}
        names |= dict.fromkeys(hub_ids(), "in Hugging Face's cache")
        items = [CompletionItem(name, help=text) for name, text in names.items() if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *items]  # in this order, bash shows files if there is no name


MODEL = _ModelName()


def offline_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--offline` to a command."""
    text = "Download nothing; HF_HUB_OFFLINE=1 and MLXLM_OFFLINE=1 do the same."
    add = click.option("--offline", is_flag=True, expose_value=False, is_eager=True, help=text, callback=_set_offline)
    return add(command)


def _set_offline(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub, which reads it when it is imported, obeys it too
