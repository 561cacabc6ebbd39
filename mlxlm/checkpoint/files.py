"""Writes that a crash can't leave half done: a temporary name, a flush to disk, a rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxlm.errors import CheckpointError, os_errors_as


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Fill a temporary folder; on success it is flushed to disk and becomes `path`, else it is removed.

    Raises CheckpointError if `path` exists already or the disk refuses.
    """
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path} exists already", "another name for the output")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with os_errors_as(CheckpointError, "write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            for file in temporary.rglob("*"):
                _flush(file)
            _flush(temporary)
            os.rename(temporary, path)
            _flush(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file as a whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with os_errors_as(CheckpointError, "write", path):
        try:
            temporary.write_text(text, encoding="utf-8")
            _flush(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
