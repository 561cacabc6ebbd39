"""Remove downloaded models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxlm.backend import platform
from mlxlm.checkpoint import hub
from mlxlm.checkpoint.catalog import HubSource, bundled_models, catalog
from mlxlm.checkpoint.local_models import HUB, OLLAMA_PREFIX, OWN, find_entry
from mlxlm.utils.errors import CheckpointError, os_errors_as


@dataclass(frozen=True)
class Removal:
    """What will be removed: a file or folder, its size, and the function that does it."""

    path: Path
    bytes: int
    execute: Callable[[], None]


def plan_removal(name: str) -> Removal:
    """Find what to remove for a name of the catalog or a hub id, without removing it.

    Raises:
        CheckpointError: There is no such model, or it isn't mlxlm's to remove.
    """
    if name in bundled_models():
        raise CheckpointError(f"{name} ships with mlxlm", "pip uninstall mlxlm")
    if name.startswith(OLLAMA_PREFIX):
        raise CheckpointError(f"{name} is ollama's", f"ollama rm {name.removeprefix(OLLAMA_PREFIX)}")
    if name not in catalog():
        return _hub_removal(name)
    entry = catalog()[name]
    local = find_entry(entry)
    repository = next((source.repository for source in entry.sources if isinstance(source, HubSource)), None)
    if repository and (local.location == HUB if local else platform.cached_repository(repository).is_dir()):
        return _hub_removal(repository)
    if local is None:
        raise CheckpointError(f"{name} isn't on this machine", "mlxlm models, which shows where models are")
    if local.location != OWN:
        raise CheckpointError(f"{local.path} belongs to {local.location}", f"{local.location} itself")

    def remove() -> None:
        with os_errors_as(CheckpointError, "remove", local.path):
            local.path.unlink()

    return Removal(local.path, local.bytes, remove)


def _hub_removal(id: str) -> Removal:
    """Remove a whole repository from Hugging Face's cache, or what an interrupted download left of it."""
    folder = platform.cached_repository(id)
    if not hub.is_id(id) or not folder.is_dir():
        raise CheckpointError(f"{id} isn't in Hugging Face's cache", "mlxlm models, which shows where models are")

    def remove() -> None:
        with os_errors_as(CheckpointError, "remove", folder):
            shutil.rmtree(folder)

    return Removal(folder, hub.cached_bytes(id), remove)
