"""Whether the files of a prepared dataset are still those that its manifest was written for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlxlm.data.manifest import FILE, Manifest
from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import DataError


def verify_shards(folder: Path, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Compare every file of every shard with its digest in the manifest, a megabyte in memory at a time.

    Ends early, without an error, once `should_stop` says yes. Raises DataError, naming the file, for one that has
    changed or can't be read.
    """
    manifest = Manifest.read(folder)
    for shard in (*manifest.train.shards, *manifest.validation.shards):
        for name, expected in shard.digests.items():
            found = file_sha256(folder / name, DataError, should_stop)
            if found is None:
                return
            if found != expected:
                problem = f"{folder / name} has changed: its SHA-256 is not the one in {FILE}"
                raise DataError(problem, "an unchanged copy of this file, or preparing the data again for a new run")
