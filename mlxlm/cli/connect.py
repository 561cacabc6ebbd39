"""`mlxlm connect`: the configuration with which an editor or agent uses a running server."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import click

from mlxlm.cli import render
from mlxlm.cli.clients import CLIENTS, to_json
from mlxlm.cli.options import SectionedCommand, option
from mlxlm.cli.running_server import Endpoint
from mlxlm.utils.errors import ConfigError, os_errors_as
from mlxlm.utils.files import atomic_write, unused_path
from mlxlm.utils.json_files import parse_json_object


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
        _write(file, text.encode(), settings.merge)
    else:
        render.say(f"In {file}{', next to what it has' if settings.merge else ''}:")
        render.result(text.rstrip("\n"))
    command = shlex.join(settings.start(endpoint, file))
    if client == "zed" and endpoint.key == "none":
        command = f"MLXLM_API_KEY=none {command}"  # it needs a key, also for a server without
    render.say(f"{'Start it with' if write else 'Then start it with'}: {command}")
    if client in ("zed", "codex") and endpoint.key != "none":
        render.say(f"{client} reads the key from the environment variable MLXLM_API_KEY.")


def _write(file: Path, content: bytes, merge: bool) -> None:
    """Write a configuration file. One with other content is copied first, and a link stays one.

    Args:
        file: The file.
        content: What it will contain.
        merge: Whether it is JSON whose other settings are kept.

    Raises:
        ConfigError: The file can't be written, or it has more than JSON, such as comments, which would be lost.
    """
    target = Path(os.path.realpath(file))
    with os_errors_as(ConfigError, "write", file):
        try:
            old, mode = target.read_bytes(), target.stat().st_mode & 0o777
        except FileNotFoundError:
            old, mode = b"", 0o600  # it may have a key
        if merge and old.strip():
            content = _merged(file, old, content)
        if content == old:
            render.say(f"{file} has it already")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if old:
            copy = unused_path(target.with_name(f"{target.name}.bak"))
            shutil.copy2(target, copy)
            render.say(f"copied the old {file.name} to {copy}")
        with atomic_write(target, ConfigError, mode=mode) as out:
            out.write(content)
    render.say(f"wrote {file}")


def _merged(file: Path, old: bytes, content: bytes) -> bytes:
    """The settings of a JSON file with ours."""
    hint = "a file without comments, or paste what the command prints without --write into it"
    settings = parse_json_object(old, str(file), ConfigError, hint)
    try:
        merged = _merge(settings, json.loads(content))
    except TypeError:
        raise ConfigError(f"{file} has another kind of value where these settings belong", hint) from None
    return to_json(merged).encode() if merged != settings else old


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new`, in objects of objects; that called mlxlm is replaced.

    Raises:
        TypeError: `old` has no object where `new` has one.
    """
    nested = {name for name, value in new.items() if isinstance(value, dict) and name != "mlxlm"}
    return {**old, **new, **{name: _merge(old.get(name, {}), new[name]) for name in nested}}
