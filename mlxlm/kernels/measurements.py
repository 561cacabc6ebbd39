"""Benchmark and self-check results of the kernels, saved in the user's cache folder.

A record is only valid for one device, system, MLX version and state of the kernels. An unreadable file counts as empty.
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
    """Return the path of the results file. Raises MlxlmError if there is no cache folder."""
    return platform.cache_folder() / "kernels.json"


@cache
def device_key() -> str:
    """Identify the machine: device, system, MLX version, and a digest of the Metal sources and the code around them."""
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
    """Return the path that was measured to be fastest for a case, None if it was not measured."""
    fastest: str | None = _record()["measured"].get(case, {}).get("fastest")
    return fastest


def save_measurement(case: str, measurement: dict[str, Any]) -> None:
    """Save a measurement (`Measurement.to_dict`). Raises MlxlmError if the file can't be written."""
    _update(lambda record: record["measured"].update({case: measurement}))


def is_verified(name: str) -> bool:
    """Whether the Metal kernels of these cases passed their check on this machine."""
    return name in _record()["verified"]


def save_verified(name: str) -> None:
    """Save that the Metal kernels of these cases passed. If the file can't be written, they are checked again."""
    with suppress(MlxlmError):
        _update(lambda record: record["verified"].append(name))


def _record() -> dict[str, Any]:
    try:
        return _of_machine(_read(cache_path()))
    except MlxlmError:
        return _of_machine({})


def _of_machine(records: dict[str, Any]) -> dict[str, Any]:
    return records.setdefault(device_key(), {"measured": {}, "verified": []})


@cache
def _read(file: Path) -> dict[str, Any]:
    """Read the records of all machines."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _update(change: Callable[[dict[str, Any]], Any]) -> None:
    """Update this machine's record in the file under a lock: another process may have written it since."""
    file = cache_path()
    with os_errors_as(CheckpointError, "write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_suffix(".lock"), os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _read.cache_clear()
        records = _read(file)
        change(_of_machine(records))
        write_json(file, records)
    finally:
        os.close(lock)
