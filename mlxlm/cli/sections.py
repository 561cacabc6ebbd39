"""Options that stand in sections of a command's help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def option(section: str, *names: str, **settings: Any) -> Callable:
    """`click.option`, for an option that stands in this section."""
    return click.option(*names, cls=_Option, section=section, **settings)


class _Option(click.Option):
    def __init__(self, *arguments: Any, section: str, **settings: Any):
        super().__init__(*arguments, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help has a heading for each section, in the order in which they first appear, and "Options" for
    the options without one."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
