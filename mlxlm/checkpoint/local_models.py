"""Models on this machine: in mlxlm's own folder, Hugging Face's cache, and the folders of ollama and LM Studio."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxlm.backend import platform
from mlxlm.checkpoint import hub
from mlxlm.checkpoint.catalog import CatalogEntry, HubSource, bundled_models, catalog
from mlxlm.checkpoint.locations import GGUF_PART, gguf_models, gguf_quantization, has_all_safetensors
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.json_files import read_json_object

OWN, HUB, OLLAMA, LM_STUDIO = "mlxlm", "Hugging Face", "ollama", "LM Studio"
GIVEN = "given"  # on the command line, or in a folder that it names
INCOMPLETE = ", incomplete"
OLLAMA_PREFIX = "ollama:"
_MAX_MANIFEST = 1 << 20  # bytes; they have about a thousand
# Of a layer of a manifest. The others are a template, a system prompt, parameters, a license and an image encoder,
# without which the model is the same.
_MODEL_LAYER, _ADAPTER_LAYER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_WEIGHTS = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        name: What to type to use it: a hub id, `ollama:NAME`, or its path.
        path: Its file or folder.
        bytes: Its size.
        location: Whose folder it is in: `OWN`, `HUB`, `OLLAMA`, `LM_STUDIO` or `GIVEN`, with `INCOMPLETE` if files are
            missing.
        id: What requests to a server call it, such as `owner/name`; "" for its name.
    """

    name: str
    path: Path
    bytes: int
    location: str
    id: str = ""


def own_file(entry: CatalogEntry) -> Path | None:
    """Where mlxlm itself keeps a model that is a single file. It may not exist."""
    return platform.download_folder() / entry.file if entry.file and entry.sha256 else None


def find_entry(entry: CatalogEntry) -> LocalModel | None:
    """Find a model of the catalog in mlxlm's folder or Hugging Face's cache."""
    own = own_file(entry)
    if own is not None and own.is_file() and own.stat().st_size == entry.bytes:
        return LocalModel(entry.name, own, entry.bytes, OWN)
    for source in entry.sources:
        path = hub.find_source(source) if isinstance(source, HubSource) else None
        # The cache names large files by their digest.
        if path is not None and entry.sha256 in (None, path.resolve().name):
            return LocalModel(entry.name, path, folder_size(path), HUB)
    return None


def find_ollama(name: str) -> Path | None:
    """The file of a model of ollama, by its name there: "llama3.2" or "llama3.2:1b".

    Raises:
        CheckpointError: The model has an adapter, too.
    """
    name = name if ":" in name else f"{name}:latest"
    blobs = next((blobs for other, blobs in _ollama_blobs() if other == OLLAMA_PREFIX + name), {})
    if _ADAPTER_LAYER in blobs:
        hint = "its base model, or llama-export-lora of llama.cpp, which merges both into one file"
        raise CheckpointError(f"{OLLAMA_PREFIX}{name} is a model with an adapter, which mlxlm doesn't apply", hint)
    return blobs.get(_MODEL_LAYER)


def local_models() -> list[LocalModel]:
    """List the models in Hugging Face's cache and in the folders of ollama and LM Studio."""
    return [*_hub_models(), *_ollama_models(), *_lm_studio_models()]


def all_models(folders: Sequence[Path] = ()) -> list[LocalModel]:
    """List all models on this machine whose files are complete. One can have several names.

    Args:
        folders: Additional folders. Their models come first, see `folder_models`.
    """
    models = [model for folder in folders for model in folder_models(folder)]
    models += filter(None, map(find_entry, catalog().values()))
    models += local_models()
    models += [LocalModel(name, path, folder_size(path), OWN) for name, path in bundled_models().items()]
    return [model for model in models if not model.location.endswith(INCOMPLETE)]


def folder_models(root: Path) -> Iterator[LocalModel]:
    """The model folders, runs and GGUF files in a folder, and in the folders in it (`NAME` or `OWNER/NAME`)."""
    found: set[Path] = set()
    for folder in (root, *sorted(root.glob("*/")), *sorted(root.glob("*/*/"))):
        if folder.parent not in found:
            id = root.name if folder == root else folder.relative_to(root).as_posix()
            models = list(_models_in(folder, str(folder), GIVEN, id, one_name=folder != root))
            if any(model.path == folder for model in models):
                found.add(folder)  # what is in the folder of a model, such as its checkpoints, belongs to it
            yield from models


def hub_ids() -> list[str]:
    """The hub ids of models in Hugging Face's cache."""
    return sorted("/".join(folder.name.split("--")[1:]) for folder in platform.model_cache().glob("models--*--*"))


def _hub_models() -> Iterator[LocalModel]:
    for id in hub_ids():
        repository = platform.cached_repository(id)
        with suppress(OSError):
            commit = (repository / "refs" / "main").read_text(encoding="ascii", errors="replace")[:64].strip()
            snapshot = repository / "snapshots" / commit
            if commit and "/" not in commit and snapshot.is_dir():
                yield from _models_in(snapshot, id, HUB, id)


def _ollama_folders() -> list[Path]:
    if os.environ.get("OLLAMA_MODELS"):
        return [Path(os.environ["OLLAMA_MODELS"])]
    return [Path.home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]  # the second of a Linux service


def _ollama_models() -> Iterator[LocalModel]:
    for name, blobs in _ollama_blobs():
        blob = blobs.get(_MODEL_LAYER)
        if blob is not None and _ADAPTER_LAYER not in blobs:
            yield LocalModel(name, blob, folder_size(blob), OLLAMA, name.removeprefix(OLLAMA_PREFIX))


def _ollama_blobs() -> Iterator[tuple[str, dict[str, Path | None]]]:
    """Yield the models of ollama: `ollama:NAME`, and by media type their files; None for a missing one."""
    for folder in _ollama_folders():
        for manifest in sorted(folder.glob("manifests/*/*/*/*")):
            host, namespace, model, tag = manifest.parts[-4:]
            layers = None
            with suppress(CheckpointError, OSError):  # files of another program, in whatever state
                layers = read_json_object(manifest, _MAX_MANIFEST, CheckpointError).get("layers")
            blobs: dict[str, Path | None] = {}
            for layer in layers if isinstance(layers, list) else ():
                if isinstance(layer, dict):
                    digest = _DIGEST.fullmatch(str(layer.get("digest")))
                    blob = folder / "blobs" / f"sha256-{digest[1]}" if digest else None
                    blobs[str(layer.get("mediaType"))] = blob if blob and blob.is_file() else None
            owner = "" if namespace == "library" else f"{namespace}/"
            server = "" if host == "registry.ollama.ai" else f"{host}/{namespace}/"
            yield f"{OLLAMA_PREFIX}{server or owner}{model}:{tag}", blobs


def _lm_studio_folders() -> list[Path]:
    return [Path.home() / ".lmstudio/models", Path.home() / ".cache/lm-studio/models"]


def _lm_studio_models() -> Iterator[LocalModel]:
    for root in _lm_studio_folders():
        for folder in sorted(root.glob("*/*")):
            if folder.is_dir():
                yield from _models_in(folder, str(folder), LM_STUDIO, folder.relative_to(root).as_posix())


def _models_in(folder: Path, name: str, location: str, id: str, one_name: bool = True) -> Iterator[LocalModel]:
    """The model of a folder with safetensors, or each of its GGUF files.

    Args:
        folder: The folder.
        name: The name of a model folder.
        location: Whose folder it is.
        id: What requests call the model of the folder. Of several files, it is followed by the name of each.
        one_name: False if `id` stands for a model folder only, and files have their own names.
    """
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        location += "" if has_all_safetensors(folder) else INCOMPLETE
        yield LocalModel(name, folder, folder_size(folder), location, id)
        return
    models = gguf_models(folder)
    for files in models:
        part = GGUF_PART.fullmatch(files[0].name)
        stem = part[1] if part else files[0].stem
        file_id = stem if not one_name else id if len(models) == 1 else f"{id}/{stem}"
        quantization = gguf_quantization(files[0]) if location == HUB else None
        yield LocalModel(
            f"{id}:{quantization}" if quantization else str(files[0]),
            files[0],
            sum(map(folder_size, files)),
            location,
            file_id,
        )


def folder_size(path: Path) -> int:
    """Bytes of a file, or of the weights in a folder."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in _WEIGHTS]
    return sum(file.stat().st_size for file in files if file.is_file())


def remove(model: LocalModel) -> None:
    """Remove what `find_removable` found."""
    with os_errors_as(CheckpointError, "remove", model.path):
        shutil.rmtree(model.path) if model.path.is_dir() else model.path.unlink()


def find_removable(name: str) -> LocalModel:
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
    return local


def _hub_removal(id: str) -> LocalModel:
    """A whole repository in Hugging Face's cache, or what an interrupted download left of it."""
    if hub.is_id(id) and ":" in id:
        hint = f"mlxlm models rm {id.partition(':')[0]}, which removes all files"
        raise CheckpointError(f"{id} is a file of a repository", hint)
    folder = platform.cached_repository(id)
    if not hub.is_id(id) or not folder.is_dir():
        raise CheckpointError(f"{id} isn't in Hugging Face's cache", "mlxlm models, which shows where models are")
    return LocalModel(id, folder, hub.cached_bytes(id), HUB)
