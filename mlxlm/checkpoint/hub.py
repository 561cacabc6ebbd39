"""Download models from the Hugging Face hub, or find them in its cache.

huggingface_hub itself continues after a lost connection, but starts again in a new process, and its downloads of whole
repositories don't stop at Ctrl-C: `download_source` downloads large files itself and continues where an earlier process
stopped.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mlxlm.backend import platform
from mlxlm.backend.hub import hub_errors, is_reachable
from mlxlm.checkpoint.catalog import HubSource
from mlxlm.checkpoint.locations import gguf_quantization, group_gguf, has_all_safetensors, has_pytorch
from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.files import commit_file

_ID = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<quantization>[A-Za-z0-9][\w-]*))?"
    r"(@(?P<revision>(?!.*\.\.)[\w./-]+))?",
    re.ASCII,
)
_ADDRESS = re.compile(  # of a page of a model, a branch or a file
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?:/(?P<file>[^?#]+))?)?/?(?:[?#].*)?"
)
_OTHER_FILES = ["*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt"]
_SAFETENSORS = [*_OTHER_FILES, "model*.safetensors"]  # not consolidated.safetensors, the same weights again
_PYTORCH = [*_OTHER_FILES, "pytorch_model*.bin"]
_ADAPTER = ["adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"]
_DEFAULT_QUANTIZATION = "Q4_K_M"  # of GGUF files, as in llama.cpp and ollama
_SHA256 = re.compile(r"[0-9a-f]{64}")  # the ETag of large files, and their name in the cache


def is_id(text: str) -> bool:
    """Whether `text` has the form `owner/name`, with `:QUANTIZATION` of a GGUF file and `@revision` or without."""
    return _ID.fullmatch(text) is not None


def _split_id(id: str) -> tuple[str, str | None, str | None]:
    """The repository, the quantization and the revision of an id."""
    match = _ID.fullmatch(id)
    assert match is not None
    return match["repository"], match["quantization"], match["revision"]


def without_address(text: str) -> str:
    """The hub id in the address of a model's page or GGUF file at huggingface.co; any other text as it is.

    Raises:
        CheckpointError: It is the address of another file.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return text
    id, revision, file = match["id"], unquote(match["revision"] or "main"), match["file"]
    if file and file.endswith(".gguf") and (quantization := gguf_quantization(Path(file))):
        id, file = f"{id}:{quantization}", None
    if file:
        hint = f"hf download {id} {file}, and the path that it prints"
        raise CheckpointError(f"{text} is one file of a model", f"{id}; for a .gguf file, {hint}")
    return id if revision == "main" else f"{id}@{revision}"


def download(id: str) -> Path:
    """Download a model into the hub's cache, unless it is there, and return its folder.

    PyTorch files are only downloaded if there are no safetensors, and a GGUF file if there are neither, or if the id
    names its quantization: see `choose_gguf`. HF_HUB_OFFLINE, HF_HOME and HF_TOKEN are respected.

    Raises:
        CheckpointError: The model can't be downloaded, with a hint.
    """
    repository, quantization, branch = _split_id(id)
    is_local = not is_reachable()
    for patterns, is_complete in ((_SAFETENSORS, has_all_safetensors), (_PYTORCH, has_pytorch)):
        if quantization is None:
            folder = _snapshot(repository, branch, patterns, is_local)
            if is_complete(folder):
                return folder
    return _download_gguf(id, is_local)


def _download_gguf(id: str, is_local: bool) -> Path:
    """Download a GGUF file, or find it in the cache. Returns its path, the first one of a split model."""
    import huggingface_hub

    repository, _, branch = _split_id(id)
    if is_local:
        folder = _snapshot(repository, branch, [], is_local)
        return folder / choose_gguf(id, [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")])[0]
    with hub_errors(CheckpointError, repository, branch):
        siblings = huggingface_hub.HfApi().model_info(repository, revision=branch).siblings or ()
        paths = []
        for file in choose_gguf(id, [sibling.rfilename for sibling in siblings]):
            download_blob(repository, file, branch, platform.cached_repository(repository) / "blobs")
            paths.append(Path(huggingface_hub.hf_hub_download(repository, file, revision=branch)))
        return paths[0]


def choose_gguf(id: str, names: list[str]) -> list[str]:
    """Choose a GGUF model among the files of a repository: its file, or the parts of a split model.

    It has the quantization in its name that the id says; if the id says none, it is the only one, or Q4_K_M.

    Raises:
        CheckpointError: No model fits, or several do.
    """
    repository, quantization, revision = _split_id(id)
    models = group_gguf([Path(name) for name in names if name.endswith(".gguf")])
    if not models:
        problem = f"{id} has no safetensors, no PyTorch weights and no GGUF file"
        raise CheckpointError(problem, "a network connection if the download is incomplete")
    wanted = quantization or (_DEFAULT_QUANTIZATION if len(models) > 1 else None)
    chosen = [files for files in models if wanted is None or (gguf_quantization(files[0]) or "") == wanted.upper()]
    if len(chosen) == 1:
        return list(map(str, chosen[0]))
    suffix = f"@{revision}" if revision else ""
    found = sorted({kind for files in models if (kind := gguf_quantization(files[0])) is not None})
    hint = ", ".join(f"{repository}:{kind}{suffix}" for kind in found) or "hf download, and the path of one file"
    problem = f"{len(chosen)} GGUF models" if chosen else "no GGUF model"
    raise CheckpointError(f"{repository} has {problem} with {wanted} in the name", hint)


def download_adapter(id: str) -> Path:
    """Download an adapter into the hub's cache, unless it is there, and return its folder.

    Raises:
        CheckpointError: As `download` does.
    """
    repository, _, branch = _split_id(id)
    is_local = not is_reachable()
    folder = _snapshot(repository, branch, _ADAPTER, is_local)
    if any(folder.glob("adapter*.safetensors")):
        return folder
    return _snapshot(repository, branch, [*_ADAPTER, "adapter_model.bin"], is_local)


def download_bytes(id: str) -> int | None:
    """Bytes of the files that `download` downloads; None if the hub can't be reached.

    Raises:
        CheckpointError: There is no such model, or it is gated.
    """
    repository, quantization, branch = _split_id(id)
    if not is_reachable():
        return None
    import huggingface_hub

    with hub_errors(CheckpointError, repository, branch):
        info = huggingface_hub.HfApi().model_info(repository, revision=branch, files_metadata=True)
    files = info.siblings or ()
    names = [file.rfilename for file in files]
    patterns = next((p for p in (_SAFETENSORS, _PYTORCH) if fnmatch.filter(names, p[-1])), None)
    if quantization or patterns is None:
        patterns = choose_gguf(id, names)
    return sum(file.size or 0 for file in files if any(fnmatch.fnmatch(file.rfilename, part) for part in patterns))


def download_config(id: str) -> Path:
    """Download a model's config.json only and return its path. Raises CheckpointError as `download` does."""
    repository, _, branch = _split_id(id)
    folder = _snapshot(repository, branch, ["config.json"], not is_reachable())
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{id} has no config.json", f"mlxlm models pull {id}, if it has GGUF files")
    return folder / "config.json"


def upload(files: Mapping[str, Path], defaults: Mapping[str, bytes], id: str, *, private: bool, replaced: str) -> str:
    """Upload files in one commit, to a new repository or to an existing one.

    Args:
        files: Name in the repository -> file.
        defaults: Name -> content of files that the repository gets if it has none of that name.
        id: `owner/name`.
        private: Whether a new repository is private.
        replaced: Pattern of files that the commit deletes if they aren't among `files`.

    Returns:
        The address of the repository.

    Raises:
        CheckpointError: The files can't be uploaded, with a hint.
    """
    if platform.is_offline():
        raise CheckpointError(f"{id} can't be uploaded: downloads and uploads are off", platform.ALLOW_DOWNLOADS)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors

    api = HfApi()
    try:
        url = api.create_repo(id, private=private, exist_ok=True)
        present = api.list_repo_files(id)
        operations: list[Any] = [CommitOperationAdd(name, path) for name, path in files.items()]
        operations += [CommitOperationAdd(*default) for default in defaults.items() if default[0] not in present]
        operations += [CommitOperationDelete(n) for n in fnmatch.filter(present, replaced) if n not in files]
        api.create_commit(id, operations, commit_message="Upload with mlxlm")
        return str(url)
    except errors.LocalTokenNotFoundError:
        raise CheckpointError("uploading needs a token of the hub", "hf auth login") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "hf auth login, with a token that can write" if status in (401, 403) else None
        problem = error.server_message or f"the hub answered with status {status}"
        raise CheckpointError(f"{id} can't be uploaded: {' '.join(problem.split())}", hint) from None
    except Exception as error:  # whatever its HTTP client raises
        raise CheckpointError(f"{id} can't be uploaded: {' '.join(str(error).split())}") from None


def find_source(source: HubSource) -> Path | None:
    """Find what `download_source` downloads in the hub's cache, if it is complete, without the network."""
    if not platform.cached_repository(source.repository).is_dir():
        return None
    if source.file is not None:
        import huggingface_hub

        path = huggingface_hub.try_to_load_from_cache(source.repository, source.file, revision=source.revision)
        return Path(path) if isinstance(path, str) else None
    with suppress(CheckpointError):
        folder = _snapshot(source.repository, source.revision, _SAFETENSORS, is_local=True)
        return folder if has_all_safetensors(folder) else None
    return None


def download_source(source: HubSource) -> Path:
    """Download a repository, or one file of it, into the hub's cache and return its folder or the file.

    An interrupted download continues when it is called again.

    Raises:
        CheckpointError: As `download` does.
    """
    import huggingface_hub

    blobs = platform.cached_repository(source.repository) / "blobs"
    with hub_errors(CheckpointError, source.repository, source.revision), _no_progress_bars():
        if source.file is not None:
            download_blob(source.repository, source.file, source.revision, blobs)
            return Path(huggingface_hub.hf_hub_download(source.repository, source.file, revision=source.revision))
        info = huggingface_hub.HfApi().model_info(source.repository, revision=source.revision)
        for sibling in info.siblings or ():
            if fnmatch.fnmatch(sibling.rfilename, "model*.safetensors"):
                download_blob(source.repository, sibling.rfilename, info.sha, blobs)
        return _snapshot(source.repository, source.revision, _SAFETENSORS, is_local=False)


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


def cached_bytes(id: str) -> int:
    """Bytes of a repository in the hub's cache, those of an interrupted download among them."""
    size = 0
    for file in platform.cached_repository(_split_id(id)[0]).glob("blobs/*"):
        with suppress(OSError):  # renamed meanwhile
            size += file.stat().st_size
    return size


def _snapshot(repository: str, revision: str | None, patterns: list[str], is_local: bool) -> Path:
    """Return the folder of a repository with the files of `patterns`; `is_local`: without the network."""
    import huggingface_hub

    with hub_errors(CheckpointError, repository, revision):
        options: dict[str, Any] = {"allow_patterns": patterns, "local_files_only": is_local}
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, **options))


def download_blob(repository: str, file: str, revision: str | None, blobs: Path) -> None:
    """Download a file to the folder where huggingface_hub looks for it, unless it is there or small.

    Raises:
        CheckpointError: Another process downloads it, it can't be written, or its digest is wrong.
    """
    from huggingface_hub import file_download
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, but not in __all__

    url = file_download.hf_hub_url(repository, file, revision=revision)
    metadata = file_download.get_hf_file_metadata(url)
    blob = blobs / (metadata.etag or "")
    if not _SHA256.fullmatch(blob.name) or blob.exists():
        return
    partial = blob.with_name(f"{blob.name}.incomplete")
    with os_errors_as(CheckpointError, "write", blob):
        blobs.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as out:
            try:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"another process is downloading {repository}", "again when it is done") from None
            size = out.tell()
            if size != metadata.size:
                headers = build_hf_headers()
                file_download.http_get(url, out, resume_size=size, headers=headers, expected_size=metadata.size)
            out.flush()
            os.fsync(out.fileno())
            if (digest := file_sha256(partial, CheckpointError)) != blob.name:
                partial.unlink()
                raise CheckpointError(f"{file} of {repository} arrived damaged: its SHA-256 is {digest}", "again")
            commit_file(partial, blob)
