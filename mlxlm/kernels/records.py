"""What was found out about the kernels on this machine, kept between runs in the user's cache.

A record belongs to one chip, one MLX version and one state of the Metal sources: with another of any of them it is
not used. It is only a cache: one that can't be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxlm import platform
from mlxlm._mlx import mx
from mlxlm.errors import MlxlmError
from mlxlm.files import write_json
from mlxlm.resources import resource


def path() -> Path:
    return platform.cache_folder() / "kernels.json"


@cache
def machine() -> str:
    """Chip, device, MLX version and a digest of the Metal sources."""
    digest = hashlib.sha256()
    for file in sorted(resource("metal_kernels").iterdir()):
        if file.suffix in (".metal", ".h"):
            digest.update(file.read_bytes())
    device = "GPU" if mx.default_device() == mx.Device(mx.gpu) else "CPU"
    return f"{platform.chip()}, {device}, mlx {version('mlx')}, kernels {digest.hexdigest()[:16]}"


def fastest(case: str) -> str | None:
    """The path that was measured to be the fastest one for a case, if any was."""
    found = _record()["measured"].get(case)
    return found.get("fastest") if isinstance(found, dict) else None


def measured(cases: dict[str, dict[str, Any]]) -> None:
    """Keep measurements: by case, the fastest path and what was seen. Raises MlxlmError if the disk refuses."""
    record = _record()
    record["measured"].update(cases)
    _write(record)


def is_verified(kind: str) -> bool:
    """Whether the Metal kernels of a kind of case were seen to match their reference here."""
    return kind in _record()["verified"]


def verified(kind: str) -> None:
    """Remember that they do. A full or read-only disk only means that they are tried again next time."""
    record = _record()
    record["verified"] = sorted({*record["verified"], kind})
    with suppress(MlxlmError):
        _write(record)


def _record() -> dict[str, Any]:
    return _read_all(path()).setdefault(machine(), {"measured": {}, "verified": []})


@cache
def _read_all(file: Path) -> dict[str, Any]:
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


def _write(record: dict[str, Any]) -> None:
    file = path()
    everything = {**_read_all(file), machine(): record}
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, everything)
