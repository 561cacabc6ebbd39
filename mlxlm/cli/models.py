"""`mlxlm models`: list models, download them and remove them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.checkpoint.catalog import CatalogEntry, HubSource, bundled_models, catalog
from mlxlm.checkpoint.local_models import HUB, INCOMPLETE, LocalModel, find_entry, folder_size, local_models
from mlxlm.cli import render
from mlxlm.cli.model_options import MODEL
from mlxlm.cli.options import json_option
from mlxlm.utils.errors import MlxlmError
from mlxlm.utils.formatting import human_bytes, human_count

if TYPE_CHECKING:
    from mlxlm.plan.machines import Machine

_COLUMNS = {
    "name": "name",
    "parameters": "params",
    "bytes": "size",
    "context_length": "context",
    "license": "license",
    "memory": "memory",
    "fits": "fits",
    "location": "on disk",
}
_OTHERS = {"name": "other models", "bytes": "size", "memory": "memory", "fits": "fits", "location": "of"}


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    """List the models that mlxlm knows by name, and others on this machine.

    Without a subcommand, this is mlxlm models list.
    """
    if ctx.invoked_subcommand is None:
        _print_models(as_json)
    elif as_json:
        raise click.UsageError("--json belongs after the subcommand: mlxlm models list --json")


@models.command("list")
@json_option
def list_models(as_json: bool) -> None:
    """List the models that mlxlm knows by name, and others on this machine.

    Every command takes what the first column shows as its MODEL. "memory" is about the most that a chat of up to
    4,096 tokens takes. Where a download is incomplete, pull continues it, and rm removes it.
    """
    _print_models(as_json)


@models.command()
@click.argument("name", shell_complete=lambda _ctx, _param, text: [name for name in catalog() if name.startswith(text)])
def pull(name: str) -> None:
    """Download a model, or continue its download. NAME is one of the list, or a hub id, owner/name."""
    from mlxlm.checkpoint import hub
    from mlxlm.checkpoint.download import check_files, download
    from mlxlm.checkpoint.resolve import no_such_model

    entry = catalog().get(name)
    if entry is None:
        if not hub.is_id(name):
            raise no_such_model(name)
        render.result(str(hub.download(name)))
        return
    local = find_entry(entry)
    if local is not None:
        check_files(entry, local.path)
        render.say(f"{name} is on this machine already")
    render.result(str(download(entry) if local is None else local.path))


@models.command()
@click.argument("name", type=MODEL)
@click.option("--yes", is_flag=True, help="Don't ask.")
def rm(name: str, yes: bool) -> None:
    """Remove a downloaded model. NAME is one of the list, or a hub id.

    Models in the folders of ollama and LM Studio are not removed.
    """
    from mlxlm.checkpoint.remove import plan_removal

    removal = plan_removal(name)
    what = f"{removal.path}, {human_bytes(removal.bytes)}"
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(f"--yes is needed without a terminal, to remove {what}")
    if not yes:
        click.confirm(f"Remove {what}?", abort=True, err=True)
    removal.execute()
    render.say(f"removed {what}")


def _print_models(as_json: bool) -> None:
    from mlxlm.plan.machines import this_machine

    machine = this_machine(measure=False)
    known = [_bundled(name, folder, machine) for name, folder in bundled_models().items()]
    known += [_entry(entry, machine) for entry in catalog().values() if entry.name not in bundled_models()]
    paths = {model["path"] for model in known}
    others = [_local(model, machine) for model in local_models() if str(model.path) not in paths]
    if as_json:
        render.emit_json({"machine_memory": machine.memory, "models": known, "others": others})
        return
    _print_table(known, _COLUMNS)
    if others:
        render.result("")
        _print_table(others, _OTHERS)
    tested = ", ".join(model["name"] for model in known if model["tested"])
    render.say(f"\nTested with mlxlm: {tested}. The sizes of the others are estimates.", style="dim")
    for model in known:
        if not model["pinned"]:
            first = (
                f"keeps the revision of its first download, {model['revision']}" if model["revision"] else "isn't here"
            )
            render.say(f"{model['name']} has no pinned revision, and {first}.", style="dim")
    render.say("mlxlm chat NAME downloads a model if necessary.", style="dim")


def _print_table(models: Sequence[dict[str, Any]], columns: dict[str, str]) -> None:
    rows = [[_cell(field, model[field]) for field in columns] for model in models]
    render.print_table(rows, list(columns.values()))


def _entry(entry: CatalogEntry, machine: Machine) -> dict[str, Any]:
    from mlxlm.checkpoint import hub
    from mlxlm.plan.advice import entry_fit

    fit, local = entry_fit(entry, machine), find_entry(entry)
    source = next((source for source in entry.sources if isinstance(source, HubSource)), None)
    location = local and local.location
    if source and not local and hub.cached_bytes(source.repository):
        location = HUB + INCOMPLETE
    names = ("name", "description", "parameters", "bytes", "license", "restrictions", "context_length", "tested")
    place = {
        "path": local and str(local.path),
        "location": location,
        "revision": source and hub.revision(source),
        "pinned": bool(entry.sha256 or (source and source.revision)),
    }
    return {name: getattr(entry, name) for name in names} | {"memory": fit.memory, "fits": fit.fits} | place


def _bundled(name: str, folder: Path, machine: Machine) -> dict[str, Any]:
    from mlxlm.families import load_config
    from mlxlm.plan.advice import chat_fit

    config = load_config(folder)
    fit = chat_fit(config, machine)
    return {
        "name": name,
        "description": "Ships with mlxlm.",
        "parameters": config.parameter_count(),
        "bytes": folder_size(folder),
        "license": "mit",
        "restrictions": None,
        "context_length": config.max_position_embeddings,
        "tested": True,
        "memory": fit.memory,
        "fits": fit.fits,
        "path": str(folder),
        "location": "mlxlm",
        "revision": None,
        "pinned": True,
    }


def _local(model: LocalModel, machine: Machine) -> dict[str, Any]:
    from mlxlm.plan.advice import chat_fit
    from mlxlm.plan.model_lookup import find_config

    facts = {"name": model.name, "path": str(model.path), "bytes": model.bytes, "location": model.location}
    try:
        fit = chat_fit(find_config(model.path), machine)
    except MlxlmError:  # the planner knows the architectures of mlxlm's own decoder only
        return {**facts, "memory": None, "fits": None}
    return {**facts, "memory": fit.memory, "fits": fit.fits}


def _cell(field: str, value: Any) -> str:
    if value is None:
        return "-" if field == "location" else "?"
    if field in ("bytes", "memory"):
        return human_bytes(value)
    if field == "parameters":
        return human_count(value)
    return {True: "yes", False: "no"}[value] if field == "fits" else str(value)
