"""Fills the reference: the help of each command, as `--help-all` prints it, and the tables of all options.

mkdocs-click would list the options without their sections, and omit the examples after them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click

from mlxlm.cli.main import app
from mlxlm.cli.options import SHOW_ALL, flags_of
from mlxlm.config.option import declaration, default_text, options_of, valid_text
from mlxlm.generation.logit_filters import FILTERS

_COMMANDS = "<!-- help of all commands -->"
_FILTERS = "<!-- the filters in their order -->"
_OPTIONS = re.compile(r"<!-- options of ([\w.]+)\.(\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the place holders of a page: by a section for each command, by a table for each settings class."""
    markdown = markdown.replace(_FILTERS, ", ".join(f"`{one.option}`" for one in FILTERS))
    markdown = _OPTIONS.sub(lambda match: _table(getattr(import_module(match[1]), match[2])), markdown)
    return markdown.replace(_COMMANDS, "\n".join(_sections(app, "mlxlm"))) if _COMMANDS in markdown else markdown


def _table(settings: type) -> str:
    """The options of a settings class: name, names on the command line, valid values, default, help."""
    rows = [("Option", "Command line", "Value", "Default", ""), ("---",) * 5]
    for name, field in options_of(settings).items():
        option = declaration(field)
        flags = ", ".join(f"`{flag}`" for flag in flags_of(field)) if option.section else ""
        rows.append((f"`{name}`", flags, valid_text(field), default_text(field) or "", option.help))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _sections(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    context = click.Context(command, parent, name, terminal_width=80, **command.context_settings)
    context.meta[SHOW_ALL] = True
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    for subname in command.list_commands(context) if isinstance(command, click.Group) else ():
        if (subcommand := command.get_command(context, subname)) is not None:
            yield from _sections(subcommand, subname, context)
