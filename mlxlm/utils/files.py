"""Writes that a crash can't leave half done: a temporary name, a flush to disk, a rename."""

from __future__ import annotations

import errno
import fcntl
import filecmp
import glob
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import psutil

from mlxlm.utils.errors import CheckpointError, MlxlmError, os_errors_as


@contextmanager
def atomic_new_folder(
    path: Path | str, kind: type[MlxlmError] = CheckpointError, hint: str = "another name for the output"
) -> Iterator[Path]:
    """Fill a hidden folder beside `path`; at the end it is flushed to disk and becomes `path`, else it goes.

    Raises `kind` if `path` exists (an empty folder may), with `hint`, or if the disk refuses.
    """
    check_not_exists(path, kind, hint)
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with os_errors_as(kind, "write", path), _parent(path):
        _remove_abandoned(path)
        partial.mkdir()
        try:
            with _named(partial, path):
                yield partial
            for file in partial.rglob("*"):
                _flush(file)
            _flush(partial)
            partial.replace(path)
            _flush(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def atomic_new_files(
    path: Path | str, kind: type[MlxlmError] = CheckpointError, hint: str = "another name for the output"
) -> Iterator[Path]:
    """Fill a hidden folder beside `path` with files; at the end they move to `path`'s folder, `path` itself last.

    One that is there already stays if it is the same, and is an error if it is another; `path` must not exist.
    On any error nothing new is left.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with os_errors_as(kind, "write", path), _parent(path):
        _check_no_file(path, kind, hint)
        _remove_abandoned(path)
        partial.mkdir()
        moved: list[Path] = []
        try:
            with _named(partial / path.name, path), _named(partial, path.parent):
                yield partial
            for file in sorted(partial.iterdir(), key=lambda file: file.name == path.name):
                target = path.with_name(file.name)
                if file.name != path.name and target.is_file() and filecmp.cmp(file, target, shallow=False):
                    continue
                _check_no_file(target, kind, hint)
                _flush(file)
                file.replace(target)
                moved.append(target)
            _flush(path.parent)
        except BaseException:
            for target in moved:
                target.unlink(missing_ok=True)
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def atomic_new_file(
    path: Path | str, kind: type[MlxlmError] = CheckpointError, hint: str = "another name for the output"
) -> Iterator[BinaryIO]:
    """Fill a hidden file beside `path`; at the end it is flushed to disk and becomes `path`, else it goes.

    Raises `kind` if `path` exists, with `hint`, or if the disk refuses.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with os_errors_as(kind, "write", path), _parent(path):
        _check_no_file(path, kind, hint)
        _remove_abandoned(path)
        try:
            with partial.open("xb") as file:
                yield file
            _flush(partial)
            _check_no_file(path, kind, hint)  # again, since writing can take minutes
            partial.replace(path)
            _flush(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def working_folder(path: Path) -> Path:
    """Make a hidden folder beside `path` for what it is made of, which the caller removes. What processes that were
    killed have left of theirs goes. Raises CheckpointError if the disk refuses."""
    parts = path.with_name(f"{path.name}-parts")  # another name than `new_folder(path)`'s own
    folder = parts.with_name(f".{parts.name}.{os.getpid()}.partial")
    with os_errors_as(CheckpointError, "write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parts)
        folder.mkdir()
    return folder


@contextmanager
def _parent(path: Path) -> Iterator[None]:
    """The folders above `path`, made where they are missing; those made go again on any error, if still empty."""
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
        for folder in made:
            _flush(folder.parent)
    except BaseException:
        for folder in made:
            with suppress(OSError):  # something else is in it by now
                folder.rmdir()
        raise


@contextmanager
def _named(partial: Path, final: Path) -> Iterator[None]:
    """Errors name what a person asked for, not the hidden folder, which will be gone."""
    try:
        yield
    except MlxlmError as error:
        if str(partial) not in error.message:
            raise
        raise type(error)(error.message.replace(str(partial), str(final)), error.hint) from error


def _check_no_file(path: Path, kind: type[MlxlmError], hint: str) -> None:
    if path.exists() or path.is_symlink():
        raise kind(f"{path} already exists", hint)


def check_not_exists(path: Path | str, kind: type[MlxlmError], hint: str) -> None:
    """Raise `kind` if something is at `path`, an empty folder excepted."""
    path = Path(path)
    if path.is_symlink() or path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise kind(f"{path} already exists", hint)


@contextmanager
def atomic_write(path: Path, kind: type[MlxlmError] = CheckpointError) -> Iterator[BinaryIO]:
    """Fill a hidden file beside `path`; at the end it is flushed to disk and takes `path`'s place, else it goes.

    Raises `kind` if the disk refuses.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with os_errors_as(kind, "write", path):
        _remove_abandoned(path)
        try:
            with partial.open("wb") as file:
                yield file
            _flush(partial)
            partial.replace(path)
            _flush(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def stage_copy(source: Path, target: Path) -> Path:
    """A hidden file beside `target` with the content of `source`, complete on the disk, to `commit_file`. It is a
    hard link, or a copy where the disk has none.

    Raises CheckpointError if the disk refuses.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with os_errors_as(CheckpointError, "write", target):
        _remove_abandoned(target)
        try:
            partial.hardlink_to(source)
        except OSError:
            try:
                shutil.copy2(source, partial)  # with its time, by which `same_file` knows a copy
                _flush(partial)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    return partial


def commit_file(partial: Path, target: Path) -> None:
    """Give a complete file its name, for good. Raises CheckpointError if the disk refuses."""
    with os_errors_as(CheckpointError, "write", target):
        partial.replace(target)
        _flush(target.parent)


def same_file(first: Path, second: Path) -> bool:
    """Whether both are there and one is a link to the other, or a copy that `stage_copy` made."""
    if not first.is_file() or not second.is_file():
        return False
    one, other = first.stat(), second.stat()
    return os.path.samestat(one, other) or (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def has_hard_links(folder: Path) -> bool:
    """Whether the disk of `folder` has hard links: FAT and some network drives don't."""
    with suppress(OSError), TemporaryDirectory(prefix=".links.", dir=folder) as probe:
        first = Path(probe, "first")
        first.touch()
        try:
            Path(probe, "second").hardlink_to(first)
        except OSError as error:
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return True  # also where the disk is too full to try


def write_bytes(path: Path, content: bytes, kind: type[MlxlmError] = CheckpointError) -> None:
    """Write or replace a file as a whole. Raises `kind` if the disk refuses."""
    with atomic_write(path, kind) as file:
        file.write(content)


def write_figure(path: Path, figure: Any, *, dpi: int = 120) -> None:
    """Write a matplotlib figure as the kind of picture that its name says. Raises CheckpointError as `write_bytes`."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=path.suffix[1:].lower())
    write_bytes(path, picture.getvalue())


def _remove_abandoned(path: Path) -> None:
    """Remove what processes that were killed have left of `path`."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        owner = partial.name.split(".")[-2]
        # An own pid is that of an earlier process, as in containers, where each begins with the same.
        if owner.isdigit() and (int(owner) == os.getpid() or not psutil.pid_exists(int(owner))):
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS, where fsync stops at the drive's own cache
            with suppress(OSError):  # network drives and folders may not have it
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    finally:
        os.close(descriptor)
