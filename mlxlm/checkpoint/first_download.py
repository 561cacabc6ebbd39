"""Remembers the digests of a snapshot's first download, so that files that change later don't go unnoticed.

They are kept beside the snapshot in the hub's cache, and are removed with it.
"""

from __future__ import annotations

import re
from pathlib import Path

from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.json_files import read_json_object, write_json

_FILE = "mlxlm.json"  # in the folder of a repository: {"revision": commit, "sha256": {file: digest}}
_MAX_BYTES = 1 << 20
_LARGE = 64 << 20  # bytes; smaller files are always read, in a tenth of a second
_SHA256 = re.compile(r"[0-9a-f]{64}")  # the name of a large file in the cache


def recorded_revision(repository: Path) -> str | None:
    """The commit whose digests are kept for a repository in the hub's cache, or None."""
    return _read(repository)[0]


def record(snapshot: Path) -> None:
    """Keep the digests of a snapshot's files, unless they are kept already."""
    if recorded_revision(snapshot.parents[1]) != snapshot.name:
        digests = {file.name: _digest(file, whole=True) for file in sorted(snapshot.iterdir()) if file.is_file()}
        write_json(snapshot.parents[1] / _FILE, {"revision": snapshot.name, "sha256": digests})


def check(snapshot: Path, name: str, whole: bool = False) -> None:
    """Compare a snapshot with the digests that are kept.

    Args:
        snapshot: Its folder in the hub's cache.
        name: The model, for the error.
        whole: Read large files, too, instead of trusting the digest that is their name in the cache.

    Raises:
        CheckpointError: A file has another digest.
    """
    revision, digests = _read(snapshot.parents[1])
    if revision != snapshot.name:
        return
    for file, digest in digests.items():
        if (snapshot / file).is_file() and _digest(snapshot / file, whole) != digest:
            hint = f"mlxlm models rm {name}, then mlxlm models pull {name}"
            raise CheckpointError(f"{snapshot / file} has changed since its first download", hint)


def _read(repository: Path) -> tuple[str | None, dict[str, str]]:
    if not (repository / _FILE).is_file():
        return None, {}
    values = read_json_object(repository / _FILE, _MAX_BYTES, CheckpointError, f"remove {repository / _FILE}")
    revision, digests = values.get("revision"), values.get("sha256")
    if not isinstance(revision, str) or not isinstance(digests, dict):
        raise CheckpointError(f"{repository / _FILE} has no revision and sha256", f"remove {repository / _FILE}")
    return revision, digests


def _digest(file: Path, whole: bool) -> str | None:
    name = file.resolve().name
    is_digest = not whole and file.stat().st_size >= _LARGE and _SHA256.fullmatch(name)
    return name if is_digest else file_sha256(file, CheckpointError)
