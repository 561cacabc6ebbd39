"""Fills the reference of the command line with the help of each command, as `--help` prints it.

mkdocs-click would list the options without their sections, and omit the examples after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from mlxlm.cli.main import app

_PLACE = "<!-- help of all commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the place holder of a page by a section for each command."""
    if _PLACE not in markdown:
        return markdown
    return markdown.replace(_PLACE, "\n".join(_sections(app, "mlxlm")))


def _sections(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    context = click.Context(command, parent, name, terminal_width=80, **command.context_settings)
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    for subname in command.list_commands(context) if isinstance(command, click.Group) else ():
        if (subcommand := command.get_command(context, subname)) is not None:
            yield from _sections(subcommand, subname, context)
