"""System prompts by name: text files in the configuration folder."""

from __future__ import annotations

import re
from pathlib import Path

from mlxlm.backend import platform
from mlxlm.utils.bounded_reads import decode_utf8, read_bytes
from mlxlm.utils.errors import GenerationError
from mlxlm.utils.files import atomic_new_file

_MAX_BYTES = 1 << 20
_NAME = re.compile(r"[\w-][\w.-]*")


def saved_names() -> list[str]:
    """Return the names of the saved system prompts."""
    return sorted(path.stem for path in _folder().glob("*.txt") if _NAME.fullmatch(path.stem))


def resolve(text: str) -> str:
    """Return the system prompt of a name such as "@teacher"; any other text is a system prompt itself.

    Raises:
        GenerationError: No system prompt is saved with this name, or its file can't be read.
    """
    if not text.startswith("@"):
        return text
    path = _path(text[1:])
    if not path.exists():
        names = ", ".join(f"@{name}" for name in saved_names())
        hint = names or f"a text, or a file {path}"
        raise GenerationError(f"there is no system prompt {text}", hint)
    return decode_utf8(
        read_bytes(path, _MAX_BYTES, GenerationError), str(path), GenerationError, None, "utf-8-sig"
    ).strip()


def save(name: str, text: str) -> Path:
    """Save a system prompt, and return its file. Raise GenerationError if there is one with this name."""
    path = _path(name)
    with atomic_new_file(path, GenerationError, "another name") as file:
        file.write(f"{text}\n".encode())
    return path


def _path(name: str) -> Path:
    name = name.removeprefix("@")
    if not _NAME.fullmatch(name):
        raise GenerationError(f"{name!r} is not a name of a system prompt", "one word of letters and digits")
    return _folder() / f"{name}.txt"


def _folder() -> Path:
    return platform.config_folder() / "system-prompts"
