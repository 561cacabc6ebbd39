"""What was found out about the kernels on this machine, kept between runs in the user's cache.

A record belongs to one device, system, MLX version and state of the kernels: with another of any of them it is
not used. It is only a cache: one that can't be read is as good as none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform as system
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.blas import load_blas
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.utils.errors import CheckpointError, MlxlmError, os_errors_as
from mlxlm.utils.json_files import write_json
from mlxlm.utils.resources import resource


def cache_path() -> Path:
    """Raises MlxlmError if there is no place for it."""
    return platform.cache_folder() / "kernels.json"


@cache
def device_key() -> str:
    """Device, system, MLX version, and a digest of the Metal sources and of the code that launches them."""
    digest = hashlib.sha256()
    for folder, endings in ((resource("metal_kernels"), (".metal", ".h")), (Path(__file__).parent, (".py",))):
        for file in sorted(folder.iterdir()):
            if file.suffix in endings:
                digest.update(file.read_bytes())
    if ON_CPU:
        device = f"{platform.chip()}, {platform.cpu_cores()} cores, {load_blas().name}"
    else:
        device = str(mx.device_info().get("device_name", platform.chip()))
    return f"{device}, {system.system()} {system.release()}, mlx {mx.__version__}, kernels {digest.hexdigest()[:16]}"


def fastest_path(case: str) -> str | None:
    """The path that was measured to be the fastest one for a case, if any was."""
    found = _record()["measured"].get(case)
    return found.get("fastest") if isinstance(found, dict) else None


def save_measurement(case: str, found: dict[str, Any]) -> None:
    """Keep a measurement: the fastest path and what was seen. Raises MlxlmError if the disk refuses."""
    _update(lambda record: record["measured"].update({case: found}))


def is_verified(kind: str) -> bool:
    """Whether the Metal kernels of a kind of case were seen to match their reference here."""
    return kind in _record()["verified"]


def save_verified(kind: str) -> None:
    """Remember that they do. Where that can't be written, they are tried again next time."""
    with suppress(MlxlmError):
        _update(lambda record: record["verified"].append(kind))


def _record() -> dict[str, Any]:
    try:
        return _of_machine(_read(cache_path()))
    except MlxlmError:
        return _of_machine({})


def _of_machine(everything: dict[str, Any]) -> dict[str, Any]:
    return everything.setdefault(device_key(), {"measured": {}, "verified": []})


@cache
def _read(file: Path) -> dict[str, Any]:
    """All machines' records; those that don't have the form of one are left out."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in content.items() if _is_record(v)} if isinstance(content, dict) else {}


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("measured"), dict)
        and isinstance(value.get("verified"), list)
        and all(isinstance(kind, str) for kind in value["verified"])
    )


def _update(change: Callable[[dict[str, Any]], Any]) -> None:
    """Change this machine's record in the file as it is now: another process may have written since."""
    file = cache_path()
    with os_errors_as(CheckpointError, "write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_suffix(".lock"), os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _read.cache_clear()
        everything = _read(file)
        change(_of_machine(everything))
        write_json(file, everything)
    finally:
        os.close(lock)
