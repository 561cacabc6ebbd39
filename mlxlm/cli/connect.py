"""`mlxlm connect`: the configuration with which an editor or agent uses a running server."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import click

from mlxlm.cli import render
from mlxlm.cli.clients import CLIENTS, Client, Endpoint
from mlxlm.cli.options import SectionedCommand, option
from mlxlm.utils.errors import ConfigError, os_errors_as
from mlxlm.utils.files import atomic_write, unused_path


@click.command(cls=SectionedCommand)
@click.argument("client", type=click.Choice(list(CLIENTS)))
@option("Server", "--server", str, "Address of the server.", default="http://127.0.0.1:8080", metavar="URL")
@option("Server", "--model", str, "Model to use.  [default: one that is loaded, or the first]", metavar="NAME")
@option("Output", "--write", bool, "Write the configuration file instead of printing its content.")
def connect(client: str, server: str, model: str | None, write: bool) -> None:
    """Show the configuration with which CLIENT uses a running server: see docs/clients.md.

    --write makes the file. One that exists is copied first; settings of yours in it are kept.
    """
    settings = CLIENTS[client]
    endpoint = Endpoint.find(server, model)
    file, text = settings.file, settings.settings(endpoint)
    if write:
        _write(settings, file, text)
    else:
        render.say(f"In {file}{', next to what it has' if settings.merge else ''}:")
        render.result(text.rstrip("\n"))
    command = settings.command.format(file=shlex.quote(str(file)), model=shlex.quote(endpoint.model))
    render.say(f"{'Start it with' if write else 'Then start it with'}: {command}")
    if client in ("zed", "codex") and endpoint.key != "none":
        render.say(f"{client} reads the key from the environment variable MLXLM_API_KEY.")


def _write(client: Client, file: Path, text: str) -> None:
    """Write a configuration file. A file with other content is copied first.

    Raises:
        ConfigError: The file can't be written, or it has more than JSON, such as comments, which would be lost.
    """
    target = file.resolve()  # a link stays one
    with os_errors_as(ConfigError, "write", file):
        old = target.read_text(encoding="utf-8") if target.exists() else ""
        if client.merge and old.strip():
            text = _merged(file, old, text)
        if text == old:
            render.say(f"{file} has it already")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if old:
            copy = unused_path(target.with_name(f"{target.name}.bak"))
            shutil.copy2(target, copy)
            render.say(f"copied the old {file.name} to {copy}")
        mode = target.stat().st_mode & 0o777 if old else 0o600  # it may have a key
        with atomic_write(target, ConfigError, mode=mode) as out:
            out.write(text.encode())
    render.say(f"wrote {file}")


def _merged(file: Path, old: str, text: str) -> str:
    """The settings of a JSON file with ours."""
    paste = f"paste what the command prints without --write into {file}"
    try:
        settings = json.loads(old)
    except ValueError:
        raise ConfigError(f"{file} has more than plain JSON, such as comments", paste) from None
    merged = _merge(settings, json.loads(text))
    if merged is None:
        raise ConfigError(f"{file} has another kind of value where its settings for models belong", paste)
    return json.dumps(merged, indent=2, ensure_ascii=False) + "\n" if merged != settings else old


def _merge(old: Any, new: dict[str, Any]) -> dict[str, Any] | None:
    """`old` with the values of `new`; what is called mlxlm is replaced. None where `old` has no object for them."""
    if not isinstance(old, dict):
        return None
    merged = dict(old)
    for name, value in new.items():
        if isinstance(value, dict) and name != "mlxlm":
            value = _merge(old.get(name, {}), value)
            if value is None:
                return None
        merged[name] = value
    return merged
