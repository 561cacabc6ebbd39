"""Atomic writes: a temporary name, a flush to disk, a rename. A crash leaves no partial files."""

from __future__ import annotations

import fcntl
import filecmp
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

import psutil

from mlxlm.utils.errors import CheckpointError, MlxlmError, os_errors_as

_HINT = "another name for the output"


@contextmanager
def atomic_new_folder(path: Path | str, error_type: type[MlxlmError] = CheckpointError) -> Iterator[Path]:
    """Write a new folder atomically.

    Yields a hidden folder next to `path` to write to. On success it is flushed to disk and renamed to `path`; on an
    error it is removed.

    Args:
        path: The folder. It may exist if it is empty.
        error_type: The error to raise.

    Raises:
        error_type: `path` exists, or writing fails.
    """
    check_not_exists(path, error_type, _HINT)
    with _partial(Path(path), error_type, make_parent=True) as partial:
        partial.mkdir()
        yield partial
        for file in partial.rglob("*"):
            _flush(file)
        check_not_exists(path, error_type, _HINT)  # again, since writing can take minutes
        _flush_and_rename(partial, Path(path))


@contextmanager
def atomic_new_files(path: Path) -> Iterator[Path]:
    """Write several new files atomically.

    Yields a hidden folder next to `path` to write files to. On success they are moved to the folder of `path`, `path`
    itself last; on an error none of them remains. A file with the same content may exist, except `path`.

    Raises:
        CheckpointError: `path` or another version of a file exists, or writing fails.
    """
    moved: list[Path] = []
    with _partial(path, CheckpointError, make_parent=True) as partial:
        _check_no_file(path, CheckpointError, _HINT)
        partial.mkdir()
        with _rename_in_errors(partial / path.name, path), _rename_in_errors(partial, path.parent):
            yield partial
        try:
            for file in sorted(partial.iterdir(), key=lambda file: file.name == path.name):
                target = path.with_name(file.name)
                if file.name != path.name and target.is_file() and filecmp.cmp(file, target, shallow=False):
                    continue
                _publish(file, target, CheckpointError, _HINT)
                moved.append(target)
        except BaseException:
            for target in moved:
                target.unlink(missing_ok=True)
            raise


@contextmanager
def atomic_new_file(
    path: Path | str,
    error_type: type[MlxlmError] = CheckpointError,
    hint: str = _HINT,
    *,
    mode: int = 0o666,
) -> Iterator[BinaryIO]:
    """Write a new file atomically: yields a hidden file that is flushed and renamed to `path` on success.

    `mode`: its permissions, without those that the umask removes.

    Raises:
        error_type: `path` exists (with `hint`), or writing fails.
    """
    path = Path(path)
    with _partial(path, error_type, make_parent=True) as partial:
        _check_no_file(path, error_type, hint)
        with _create(partial, mode) as file:
            yield file
        _publish(partial, path, error_type, hint)


@contextmanager
def atomic_write(
    path: Path, error_type: type[MlxlmError] = CheckpointError, *, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Write or replace a file atomically: yields a hidden file that is flushed and renamed to `path` on success.

    `mode`: its permissions, without those that the umask removes.

    Raises:
        error_type: Writing fails.
    """
    with _partial(path, error_type) as partial:
        with _create(partial, mode) as file:
            yield file
        _flush_and_rename(partial, path)


def write_bytes(path: Path, content: bytes, error_type: type[MlxlmError] = CheckpointError) -> None:
    """Write or replace a file atomically. Raises `error_type` if that fails."""
    with atomic_write(path, error_type) as file:
        file.write(content)


@contextmanager
def working_folder(path: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to `path` for temporary files, and remove it at the end.

    Folders that killed processes left are removed, too.

    Raises:
        CheckpointError: Writing fails.
    """
    with os_errors_as(CheckpointError, "write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = _hidden_name(path.with_name(f"{path.name}-parts"))  # not that of `atomic_new_folder(path)`
        folder.mkdir()
    try:
        yield folder
    finally:
        _remove(folder)


@contextmanager
def _partial(path: Path, error_type: type[MlxlmError], make_parent: bool = False) -> Iterator[Path]:
    """Yield the hidden name of a file or folder that will be renamed to `path`; in the end remove what still has it."""
    with os_errors_as(error_type, "write", path), _parent(path) if make_parent else nullcontext():
        partial = _hidden_name(path)
        try:
            with _rename_in_errors(partial, path):
                yield partial
        finally:
            _remove(partial)


def _hidden_name(path: Path) -> Path:
    """This process's hidden name for `path`. Removes files and folders with those of processes that were killed."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        owner = partial.name.split(".")[-2]
        # Our own pid is an earlier process's: in containers, pids repeat.
        if owner.isdigit() and (int(owner) == os.getpid() or not psutil.pid_exists(int(owner))):
            _remove(partial)
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _create(path: Path, mode: int) -> BinaryIO:
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _parent(path: Path) -> Iterator[None]:
    """Create missing parent folders; on an error, remove them again if they are empty."""
    created = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
        for folder in created:
            _flush(folder.parent)
    except BaseException:
        for folder in created:
            with suppress(OSError):  # not empty
                folder.rmdir()
        raise


@contextmanager
def _rename_in_errors(partial: Path, final: Path) -> Iterator[None]:
    """In error messages, replace the hidden folder, which will be removed, with the final name."""
    try:
        yield
    except MlxlmError as error:
        if str(partial) not in error.message:
            raise
        raise type(error)(error.message.replace(str(partial), str(final)), error.hint) from error


def _check_no_file(path: Path, error_type: type[MlxlmError], hint: str) -> None:
    if path.exists() or path.is_symlink():
        raise error_type(f"{path} already exists", hint)


def check_not_exists(path: Path | str, error_type: type[MlxlmError], hint: str) -> None:
    """Raise `error_type` if `path` exists and isn't an empty folder."""
    path = Path(path)
    if path.is_symlink() or path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise error_type(f"{path} already exists", hint)


def unused_path(path: Path) -> Path:
    """Return `path`, or the first of the names with -2, -3, ... before their suffix that doesn't exist."""
    return next(p for n in count(1) if not (p := path if n == 1 else path.with_stem(f"{path.stem}-{n}")).exists())


def stage_copy(source: Path, target: Path) -> Path:
    """Copy `source` to a hidden file next to `target`, to be renamed with `commit_file`.

    It is a hard link, or a flushed copy on a disk without links.

    Raises:
        CheckpointError: Writing fails.
    """
    with os_errors_as(CheckpointError, "write", target):
        partial = _hidden_name(target)
        try:
            partial.hardlink_to(source)
        except OSError:
            try:
                shutil.copy2(source, partial)  # keeps the modification time, for `same_file`
                _flush(partial)
            except BaseException:
                _remove(partial)
                raise
    return partial


def commit_file(partial: Path, target: Path) -> None:
    """Rename a complete hidden file to `target`, and flush the folder."""
    with os_errors_as(CheckpointError, "write", target):
        partial.replace(target)
        _flush(target.parent)


def same_file(first: Path, second: Path) -> bool:
    """Whether both files exist and one is a hard link to the other or its copy by `stage_copy`."""
    if not first.is_file() or not second.is_file():
        return False
    one, other = first.stat(), second.stat()
    return os.path.samestat(one, other) or (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def _publish(partial: Path, path: Path, error_type: type[MlxlmError], hint: str) -> None:
    """Flush a complete file and give it its name, unless another process has created a file with it meanwhile."""
    _flush(partial)
    try:
        path.hardlink_to(partial)  # a rename would replace the file
        partial.unlink()
    except FileExistsError:
        raise error_type(f"{path} already exists", hint) from None
    except OSError:  # a disk without links
        _check_no_file(path, error_type, hint)
        partial.replace(path)
    _flush(path.parent)


def _flush_and_rename(partial: Path, path: Path) -> None:
    _flush(partial)
    partial.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS, where fsync stops at the drive's own cache
            with suppress(OSError):  # network drives and folders may not have it
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    finally:
        os.close(descriptor)
