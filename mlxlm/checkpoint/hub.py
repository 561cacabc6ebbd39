"""Download models from the Hugging Face hub, or find them in its cache."""

from __future__ import annotations

import fnmatch
import http.client
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.checkpoint import pytorch, safetensors
from mlxlm.checkpoint.catalog import HubSource
from mlxlm.checkpoint.first_download import recorded_revision
from mlxlm.checkpoint.hub_resume import download_blob
from mlxlm.utils.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_OTHER_FILES = ["*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt"]
_SAFETENSORS = [*_OTHER_FILES, "model*.safetensors"]  # not consolidated.safetensors, the same weights again
_PYTORCH = [*_OTHER_FILES, "pytorch_model*.bin"]
_TIMEOUT = 5.0  # seconds


def is_id(text: str) -> bool:
    """Whether `text` has the form `owner/name` or `owner/name@revision`."""
    return _ID.fullmatch(text) is not None


def download(id: str) -> Path:
    """Download a model into the hub's cache, unless it is there, and return its folder.

    PyTorch files are only downloaded if there are no safetensors. HF_HUB_OFFLINE, HF_HOME and HF_TOKEN are respected.

    Raises:
        CheckpointError: The model can't be downloaded, with a hint.
    """
    is_local = not is_reachable()
    folder = _snapshot(id, _SAFETENSORS, is_local)
    if safetensors.is_complete(folder):
        return folder
    folder = _snapshot(id, _PYTORCH, is_local)
    if pytorch.has_weights(folder):
        return folder
    raise CheckpointError(
        f"{id} has no safetensors and no PyTorch weights",
        "a network connection if the download is incomplete; hf download and the path of one file if it has GGUF files",
    )


def download_config(id: str) -> Path:
    """Download a model's config.json only and return its path. Raises CheckpointError as `download` does."""
    folder = _snapshot(id, ["config.json"], not is_reachable())
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{id} has no config.json", "hf download and the path of one file if it has GGUF files")
    return folder / "config.json"


def is_reachable() -> bool:
    """Whether downloads are allowed and the hub answers within seconds; huggingface_hub retries for half a minute."""
    from huggingface_hub import constants

    if platform.is_offline():
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # a server with a certificate that only the hub's client accepts
    except (OSError, http.client.HTTPException):
        return False
    return True


def find_source(source: HubSource) -> Path | None:
    """Find what `download_source` downloads in the hub's cache, if it is complete, without the network."""
    if not platform.cached_repository(source.repository).is_dir():
        return None
    import huggingface_hub
    from huggingface_hub import errors

    if source.file is not None:
        path = huggingface_hub.try_to_load_from_cache(source.repository, source.file, revision=source.revision)
        return Path(path) if isinstance(path, str) else None
    with suppress(errors.LocalEntryNotFoundError):
        folder = huggingface_hub.snapshot_download(
            source.repository, revision=revision(source), allow_patterns=_SAFETENSORS, local_files_only=True
        )
        return Path(folder) if safetensors.is_complete(Path(folder)) else None
    return None


def revision(source: HubSource) -> str | None:
    """The commit of a source: that of the catalog, or that of the first download; None before that."""
    return source.revision or recorded_revision(platform.cached_repository(source.repository))


def download_source(source: HubSource) -> Path:
    """Download a repository, or one file of it, into the hub's cache and return its folder or the file.

    An interrupted download continues when it is called again.

    Raises:
        CheckpointError: As `download` does.
    """
    import huggingface_hub

    blobs = platform.cached_repository(source.repository) / "blobs"
    with _hub_errors(source.repository, source.revision), _no_progress_bars():
        if source.file is not None:
            download_blob(source.repository, source.file, source.revision, blobs)
            return Path(huggingface_hub.hf_hub_download(source.repository, source.file, revision=source.revision))
        commit = revision(source)
        info = huggingface_hub.HfApi().model_info(source.repository, revision=commit)
        for sibling in info.siblings or ():
            if fnmatch.fnmatch(sibling.rfilename, "model*.safetensors"):
                download_blob(source.repository, sibling.rfilename, info.sha, blobs)
        return _snapshot(f"{source.repository}@{commit}" if commit else source.repository, _SAFETENSORS, is_local=False)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils  # which doesn't export these functions, for type checkers
    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def cached_bytes(repository: str) -> int:
    """Bytes of a repository in the hub's cache, those of an interrupted download among them."""
    size = 0
    for file in platform.cached_repository(repository).glob("blobs/*"):
        with suppress(OSError):  # renamed meanwhile
            size += file.stat().st_size
    return size


def _snapshot(id: str, patterns: list[str], is_local: bool) -> Path:
    """Return the folder of a repository with the files of `patterns`; `is_local`: without the network."""
    import huggingface_hub

    repository, _, branch = id.partition("@")
    revision = branch or None
    with _hub_errors(id, revision):
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=patterns, local_files_only=is_local
        )
    return Path(folder)


@contextmanager
def _hub_errors(id: str, revision: str | None) -> Iterator[None]:
    """Turn the errors of huggingface_hub into CheckpointError."""
    from huggingface_hub import errors

    repository, hint = id.partition("@")[0], None
    try:
        yield
        return
    except CheckpointError:
        raise
    except errors.GatedRepoError:
        problem = f"{id} is gated"
        hint = f"request access at https://huggingface.co/{repository}, then hf auth login"
    except errors.RepositoryNotFoundError:
        problem, hint = (
            f"there is no path {id}, nor a model of this name on the hub",
            "check the spelling, or hf auth login",
        )
    except errors.RevisionNotFoundError:
        problem, hint = f"{repository} has no revision {revision}", "one of its branches, tags or commits"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        partly = platform.cached_repository(repository).is_dir()
        place = "not completely in the cache" if partly else "neither a path nor in the cache"
        problem = f"{id} is {place}, and the hub can't be reached"
        hint = platform.ALLOW_DOWNLOADS if platform.is_offline() else "a network connection, or the path of a model"
    except Exception as error:  # whatever its HTTP client and file locks raise
        problem = f"{id} can't be downloaded: {' '.join(str(error).split()) or type(error).__name__}"
    raise CheckpointError(problem, hint)
