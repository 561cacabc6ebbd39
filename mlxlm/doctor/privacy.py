"""Removes what identifies a person from texts: paths below home folders, and the name of the computer."""

from __future__ import annotations

import re
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

_HOMES = re.compile(r"/(?:Users|home)/[^/\s\"':]+|/root(?=/)")
_TEMPORARY = re.compile(r"(?:/private)?/var/folders/[^/\s]+/[^/\s]+/T\b")  # macOS: one folder per user


def without_personal_data(value: Any) -> Any:
    """Return a JSON value in which no text has a home folder, a user's temporary folder or the computer's name."""
    if isinstance(value, dict):
        return {name: without_personal_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_personal_data(item) for item in value]
    if not isinstance(value, str):
        return value
    for text, replacement in _names():
        value = value.replace(text, replacement)
    return _TEMPORARY.sub("TMPDIR", _HOMES.sub("~", value))


@cache
def _names() -> list[tuple[str, str]]:
    """Texts of this machine to replace, the longest path first."""
    paths = {str(Path(__file__).parents[1]): "mlxlm"}
    try:
        paths[str(Path.home())] = "~"
        paths[tempfile.gettempdir()] = "TMPDIR"
    except (RuntimeError, OSError):  # no home folder, or no folder to write to
        pass
    ordered = sorted(paths.items(), key=lambda item: -len(item[0]))
    names = [(text, replacement) for text, replacement in ordered if len(text) > 2]
    host = socket.gethostname()
    return [*names, *((name, "HOST") for name in (host, host.partition(".")[0]) if len(name) >= 6)]
