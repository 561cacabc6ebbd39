"""The choice of a model for `mlxlm chat` without MODEL."""

from __future__ import annotations

import sys

import click

from mlxlm.checkpoint.catalog import CatalogEntry, default_entry
from mlxlm.checkpoint.local_models import find_entry
from mlxlm.checkpoint.resolve import find, find_catalog_entry, no_such_model
from mlxlm.cli.download_progress import license_text
from mlxlm.cli.render import say
from mlxlm.cli.spinner import spinner
from mlxlm.utils.formatting import human_bytes


def choose_model(yes: bool) -> str:
    """Return the name of the model to chat with.

    In a terminal, this asks for one: the default of the catalog, the largest that fits, or any other.

    Args:
        yes: Take the default without asking.

    Raises:
        click.UsageError: There is no terminal to ask in.
    """
    default = default_entry()
    if yes:
        return default.name
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(
            f"MODEL is missing (try: --yes for {default.name}, {human_bytes(default.bytes)}; a name of mlxlm models; "
            "or --continue)"
        )
    with spinner("measuring this machine"):
        choices = _choices(default)
    say("Which model?\n")
    for number, (entry, why) in enumerate(choices, start=1):
        say(f"  {number}  {entry.name:<13} {why}")
        say(f"     {'':<13} {_facts(entry)}\n", style="dim")
    say("Enter takes the first. A name of mlxlm models, a path and a hub id work too.", style="dim")
    names = [entry.name for entry, _ in choices]
    answer: str = click.prompt("Model", default="1", err=True, value_proc=lambda text: _chosen(text, names))
    return answer


def _choices(default: CatalogEntry) -> list[tuple[CatalogEntry, str]]:
    from mlxlm.plan.advice import best_entry

    ready = "on this machine already" if find_entry(default) else "there in seconds"
    choices = [(default, f"small, {ready}")]
    best = best_entry()
    if best is not None and best.parameters > default.parameters:
        choices.append((best, "the largest that leaves half of the memory free"))
    return choices


def _facts(entry: CatalogEntry) -> str:
    from mlxlm.plan.advice import entry_fit
    from mlxlm.plan.machines import this_machine

    memory = human_bytes(entry_fit(entry, this_machine(measure=False)).memory)
    download = "no download" if find_entry(entry) else f"{human_bytes(entry.bytes)} to download"
    tested = "" if entry.tested else ", untested"
    return f"{download}, {memory} of memory, {license_text(entry)}{tested}"


def _chosen(text: str, names: list[str]) -> str:
    """Return the name that the answer stands for, or raise UsageError, after which click asks again."""
    from mlxlm.checkpoint import hub

    text = text.strip()
    if text.isdecimal() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if find_catalog_entry(text) is None and find(text) is None and not hub.is_id(text):
        raise click.UsageError(str(no_such_model(text)))
    return text
