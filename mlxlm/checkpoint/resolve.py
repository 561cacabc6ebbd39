"""Find the file or folder of a model by what a user types."""

from __future__ import annotations

import os
from pathlib import Path

from mlxlm.checkpoint import first_download, local_models
from mlxlm.checkpoint.catalog import CatalogEntry, bundled_models, catalog, closest_name
from mlxlm.checkpoint.download import download
from mlxlm.utils.errors import CheckpointError


def resolve(source: Path | str) -> Path:
    """Return the path of a model, which is downloaded if necessary.

    Args:
        source: An existing path, a bundled model, a name of the catalog, `ollama:NAME`, or a hub id, in this order.

    Raises:
        CheckpointError: There is no such model, with the closest name as a hint, or it can't be downloaded.
    """
    from mlxlm.checkpoint import hub

    name, path = str(source), find(source)
    if path is not None:
        return path
    if (entry := find_catalog_entry(name)) is not None:
        return download(entry)
    if name.startswith(local_models.OLLAMA_PREFIX):
        raise CheckpointError(f"ollama has no model {name.removeprefix(local_models.OLLAMA_PREFIX)}", "mlxlm models")
    if hub.is_id(name):
        return hub.download(name)
    raise no_such_model(name)


def find(source: Path | str) -> Path | None:
    """Return the path of a model that needs no download: as `resolve`, or None; always None for a hub id.

    Raises:
        CheckpointError: A file of a model of the catalog has changed, or a model of ollama has an adapter.
    """
    name = str(source)
    if os.path.exists(name):  # unlike Path.exists, False for a name that is too long
        return Path(name)
    if name in bundled_models():
        return bundled_models()[name]
    if name.startswith(local_models.OLLAMA_PREFIX):
        return local_models.find_ollama(name.removeprefix(local_models.OLLAMA_PREFIX))
    entry = find_catalog_entry(name)
    local = entry and local_models.find_entry(entry)
    if local and local.path.is_dir():
        first_download.check(local.path, name)
    return local.path if local else None


def fetch(name: str) -> None:
    """Download a model of the catalog, if `name` is one that isn't on this machine."""
    if find_catalog_entry(name) is not None:
        resolve(name)


def find_catalog_entry(name: str) -> CatalogEntry | None:
    """The entry that `name` stands for, unless a file, a folder or a bundled model has this name."""
    entry = catalog().get(name)
    return None if entry is None or os.path.exists(name) or name in bundled_models() else entry


def no_such_model(name: str) -> CheckpointError:
    """The error for a name that is no model."""
    if os.sep in name:
        return CheckpointError(f"there is no model folder {name}", "check the path, or a hub id (owner/name)")
    closest = closest_name(name)
    hint = closest or "mlxlm models, which lists names; a path; or a hub id, owner/name"
    return CheckpointError(f"there is no model {name!r}", hint)
