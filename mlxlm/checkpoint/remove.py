"""Remove downloaded models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxlm.backend import platform
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
    if local is None:
        raise CheckpointError(f"{name} isn't on this machine", "mlxlm models, which shows where models are")
    if local.location == HUB:
        return _hub_removal(next(source.repository for source in entry.sources if isinstance(source, HubSource)))
    if local.location != OWN:
        raise CheckpointError(f"{local.path} belongs to {local.location}", f"{local.location} itself")

    def remove() -> None:
        with os_errors_as(CheckpointError, "remove", local.path):
            local.path.unlink()

    return Removal(local.path, local.bytes, remove)


def _hub_removal(id: str) -> Removal:
    """Remove a whole repository from Hugging Face's cache."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        cache = huggingface_hub.scan_cache_dir(platform.model_cache())
    except errors.CacheNotFound:
        repository = None
    else:
        repository = next((repo for repo in cache.repos if repo.repo_type == "model" and repo.repo_id == id), None)
    if repository is None:
        raise CheckpointError(f"{id} isn't in Hugging Face's cache", "mlxlm models, which shows where models are")
    strategy = cache.delete_revisions(*(revision.commit_hash for revision in repository.revisions))
    return Removal(repository.repo_path, strategy.expected_freed_size, strategy.execute)
