"""The options of all commands: made from the fields of settings classes, in sections of the help, and checked.

`--help` lists the common options, `--help-all` all of them.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from mlxlm.backend.platform import prevent_sleep
from mlxlm.checkpoint.catalog import bundled_models, catalog
from mlxlm.checkpoint.hub import without_address
from mlxlm.checkpoint.local_models import hub_ids
from mlxlm.config.option import declaration, default_text, options_of, types_of
from mlxlm.data.options import DataOptions
from mlxlm.utils.errors import ArgumentError, CheckpointError, MlxlmError

PATH = click.Path(path_type=Path)
EXISTING_PATH = click.Path(exists=True, path_type=Path)
SHOW_ALL = "mlxlm.help_all"  # in the meta of a context: whether the help has all options
_IN_ALL_COMMANDS = ("debug", "offline", "allow_sleep")  # which `--help` omits, too, if it omits any
DTYPES = ["float32", "float16", "bfloat16"]
_ADAPTER = "Merge a LoRA adapter of PEFT or mlx_lm."
SOURCES_HELP = (
    "Sources are text files, .jsonl, .json, .csv and .tsv files (all also as .gz or .zst), .parquet and .arrow files "
    "(pip install 'mlxlm[data]'), folders of them, folders written by Hugging Face's save_to_disk, "
    "hf://datasets/OWNER/NAME on its hub, or - for stdin."
)

_TYPES: dict[str, Any] = {"float": float, "int": int, "Path": PATH}  # of a field, and of its option


def option(
    section: str, names: str, kind: Any, text: str, *, advanced: bool = False, **settings: Any
) -> Callable[..., Any]:
    """`click.option` for an option that the help lists under the heading `section`.

    Args:
        section: The heading.
        names: Its names, such as "-p --prompt".
        kind: Its type: bool for a flag, a list of choices, or a type as in click.
        text: The help text.
        advanced: Whether only `--help-all` lists it.
        settings: Further arguments of `click.option`. A default is shown in the help.
    """
    if kind is bool:
        settings["is_flag"] = True
    elif isinstance(kind, click.IntRange | click.FloatRange):
        settings.setdefault("metavar", "N")
    if settings.get("default") is not None:
        settings["show_default"] = True
    kind = click.Choice(kind) if isinstance(kind, list | tuple) else kind
    settings |= {"type": kind, "help": text, "section": section, "advanced": advanced}
    return click.option(*names.split(), cls=_SectionOption, **settings)


def field_option(
    field: Field[Any],
    text: str | None = None,
    *,
    section: str | None = None,
    default: str | None = None,
    common: bool | None = None,
    kind: Any = None,
) -> Callable[..., Any]:
    """The option of a field of a settings class. Its value is None, or () for a list, if it isn't given.

    Args:
        field: The field, made by `mlxlm.config.option.option`.
        text: A help text for this command, with its default; None for those of the field.
        section: A heading for this command; None for that of the field.
        default: What this command does by default; None for the default of the field.
        common: Whether `--help` lists it; None as the field says.
        kind: The type of what is typed; None for that of the field.
    """
    declared, types = declaration(field), types_of(field)
    is_list = types[0].startswith(("tuple", "Mapping", "Sequence"))
    if kind is None and declared.choices:
        kind = list(declared.choices)
    kind = kind or next((k for name, k in _TYPES.items() if name in types), str)
    kind = bool if types[0] == "bool" else kind
    if text is None or is_list:
        text = (text or declared.help) + (" Repeatable." if is_list else "")
        if (shown := default or default_text(field)) is not None:
            text += f"  [default: {shown}]"
    settings: dict[str, Any] = {"multiple": True} if is_list else {"default": None}
    if declared.metavar:
        settings["metavar"] = declared.metavar
    names = " ".join((*flags_of(field), field.name))
    advanced = not (declared.common if common is None else common)
    return option(section or declared.section or "Options", names, kind, text, advanced=advanced, **settings)


def flags_of(field: Field[Any]) -> list[str]:
    """The names of an option on the command line: ["-n", "--max-tokens"]."""
    if (names := declaration(field).names) is not None:
        return names.split()
    flag = "--" + field.name.replace("_", "-")
    can_be_off = types_of(field)[0] == "bool" and field.default is not False
    return [f"{flag}/--no-{flag[2:]}" if can_be_off else flag]


class _SectionOption(click.Option):
    def __init__(self, *arguments: Any, section: str, advanced: bool, **settings: Any):
        super().__init__(*arguments, **settings)
        self.section, self.advanced = section, advanced


class SectionedCommand(click.Command):
    """A command whose help groups its options into sections, in the order in which they first appear.

    Options without a section are listed last, under "Options". `--help` omits advanced options, and what follows a form
    feed in the description; `--help-all` has everything.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; click's error for an option without its value lacks the context."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Its errors name options, and an ArgumentError is a UsageError."""
        MlxlmError.show_argument = self._show_argument
        try:
            return super().invoke(ctx)
        except ArgumentError as error:
            raise click.UsageError(str(error)) from error

    def _show_argument(self, name: str, value: str | None) -> str | None:
        """The option of this command for an argument that an error names."""
        shown = _longest_name(self, name)
        return shown if shown is None or value in (None, "True") else f"{shown} {value}"

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options, and `--help-all` if `--help` omits some."""
        params = super().get_params(ctx)
        if self._has_advanced:
            text = "Show this message with all options, and exit."
            flags: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
            params.append(click.Option(["--help-all"], help=text, callback=_print_full_help, **flags))
        return params

    @property
    def _has_advanced(self) -> bool:
        return any(getattr(parameter, "advanced", False) for parameter in self.params)

    def _is_shown(self, ctx: click.Context, parameter: click.Parameter) -> bool:
        if ctx.meta.get(SHOW_ALL) or not self._has_advanced:
            return True
        return not getattr(parameter, "advanced", False) and parameter.name not in _IN_ALL_COMMANDS

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description."""
        before, _, after = inspect.cleandoc(self.help or "").partition("\f")
        text = before.rstrip() + (f"\n\n{after.strip()}" if after and ctx.meta.get(SHOW_ALL) else "")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one definition list for each section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None and self._is_shown(ctx, parameter):
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        sections["Options"] = sections.pop("Options")
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=26)


def _print_full_help(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[SHOW_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


class _Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions
    """A number of bytes: 8GB, 1.5GiB, 512MB, 1000000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse it."""
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([KMGT]?)(I?)B?", str(value).strip().upper())
        size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ") if match else 1e15
        if size >= 1e15:
            self.fail(f"{value!r} is not a size (try: 8GB)", param, ctx)
        return int(size)


SIZE = _Size()


def add_options(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that adds `options` to a command, in this order."""
    return lambda command: functools.reduce(lambda decorated, add: add(decorated), reversed(options), command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")


def allow_sleep_option(section: str) -> Callable[..., Any]:
    """`--allow-sleep`. Without it the machine stays awake until the command ends."""
    text = "Let a Mac fall asleep meanwhile. By default only its display does."
    return option(section, "--allow-sleep", bool, text, expose_value=False, callback=_stay_awake)


def _stay_awake(context: click.Context, _parameter: click.Parameter, allow_sleep: bool) -> None:
    if not allow_sleep and not context.resilient_parsing:
        context.with_resource(prevent_sleep())


def adapter_option(section: str = "Options", advanced: bool = False) -> Callable[..., Any]:
    """`--adapter`, under a heading of this command."""
    return option(section, "--adapter", PATH, _ADAPTER, metavar="FOLDER|ID", advanced=advanced)


def data_option(name: str, section: str, **settings: Any) -> Callable[..., Any]:
    """The option of a field of DataOptions, under a heading of this command. `settings`: see `field_option`."""
    return field_option(options_of(DataOptions)[name], section=section, **settings)


def flag(name: str) -> str:
    """The option of the current command with this parameter name, as it is typed: "--max-tokens"."""
    return _longest_name(click.get_current_context().command, name) or f"--{name.replace('_', '-')}"


def _longest_name(command: click.Command, name: str) -> str | None:
    """The longest of the names of a command's option; None if it has no option with this parameter name."""
    options = (parameter for parameter in command.params if isinstance(parameter, click.Option))
    return next((max(option.opts, key=len) for option in options if option.name == name), None)


def given_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have a value, for a function that has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


def given_flags(names: Iterable[str]) -> list[str]:
    """Return those of the options that are on the command line, as they are typed."""
    return [flag(name) for name in names if is_given(name)]


def is_given(*names: str) -> bool:
    """Whether one of these options is on the command line, rather than left at its default."""
    source = click.get_current_context().get_parameter_source
    return any(source(name) is click.core.ParameterSource.COMMANDLINE for name in names)


def reject_unused_options(options: Mapping[str, Any], *rules: tuple[object, Collection[str], str]) -> None:
    """Raise UsageError for an option that would have no effect.

    Args:
        options: Values by parameter name. None, False and () stand for an option that isn't given.
        rules: (condition, names, reason): if the condition is true, options of these names have no effect, for
            this reason.
    """
    for condition, names, reason in rules:
        values = {name: options.get(name) for name in names}
        unused = [name for name, value in values.items() if value not in (None, ()) and value is not False]
        if condition and unused:
            raise click.UsageError(f"{' and '.join(map(flag, unused))} would have no effect: {reason}")


class _ModelName(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions
    """A name of the catalog, a path, a hub id, or the address of a page of the hub, which becomes a hub id."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return what to open."""
        try:
            return without_address(value)
        except CheckpointError as error:
            self.fail(str(error), param, ctx)

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
