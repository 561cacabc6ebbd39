"""`mlxlm upload`: publish a model on the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mlxlm.checkpoint import hub
from mlxlm.checkpoint.download import resolve
from mlxlm.cli import render
from mlxlm.cli.options import MODEL, SectionedCommand
from mlxlm.utils.formatting import human_bytes


@click.command(cls=SectionedCommand)
@click.argument("source", type=MODEL)
@click.argument("repository")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--license", help="License in the model card, as the hub names it: mit, apache-2.0, llama3.2.")
@click.option("--card", "card_only", is_flag=True, help="Print the model card, and upload nothing.")
@click.option("--yes", is_flag=True, help="Don't ask.")
def upload(source: str, repository: str, *, private: bool, license: str | None, card_only: bool, yes: bool) -> None:
    """Upload SOURCE to REPOSITORY, owner/name, on the Hugging Face hub.

    SOURCE is a folder with safetensors, a run (its best checkpoint) or a .gguf file. If it has no README.md, a new
    repository gets a model card with its size, the cost of its quantization, and how it was trained. Log in first with
    hf auth login.
    """
    from mlxlm.convert.model_card import model_card
    from mlxlm.convert.upload import model_files
    from mlxlm.convert.upload import upload as run_upload

    if not hub.is_id(repository) or ":" in repository or "@" in repository:
        raise click.UsageError(f"{repository} is not an id of the hub (try: owner/name)")
    path = Path(resolve(source))
    files = model_files(path)
    if card_only:
        render.result(model_card(path, repository, license).rstrip())
        return
    size = human_bytes(sum(file.stat().st_size for file in files.values()))
    what = f"{', '.join(files)} ({size}) to https://huggingface.co/{repository}"
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(f"--yes is needed without a terminal, to upload {what}")
    if not yes:
        click.confirm(f"Upload {what}?", abort=True, err=True)
    render.result(run_upload(path, repository, license=license, private=private))
