"""Atomic writes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import atomic_new_file, atomic_new_files, atomic_new_folder, atomic_write, write_bytes


def write_file(path):
    with atomic_new_file(path) as file:
        file.write(b"x")


def write_files(path):
    with atomic_new_files(path) as folder:
        (folder / path.name).write_bytes(b"x")


def write_folder(path):
    with atomic_new_folder(path) as folder:
        (folder / "x").write_text("x")


def replace_file(path):
    with atomic_write(path) as file:
        file.write(b"x")


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with atomic_new_folder(tmp_path / "deep/a") as folder:
        (folder / "x").write_text("x")
        assert not (tmp_path / "deep/a").exists()
    assert (tmp_path / "deep/a/x").read_text() == "x"
    with pytest.raises(CheckpointError, match="already exists"), atomic_new_folder(tmp_path / "deep/a"):
        pass


@pytest.mark.parametrize("write", [write_file, write_files, write_folder, replace_file])
def test_everything_is_on_the_disk_before_it_has_its_name_and_then_the_name_is(tmp_path, monkeypatch, write):
    events = []

    def record(name, identify):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args: (events.append((name, identify(args[0]))), original(*args))[1])

    record("fsync", lambda descriptor: os.fstat(descriptor).st_ino)
    record("replace", lambda source: os.stat(source).st_ino)
    record("link", lambda source: os.stat(source).st_ino)
    write(tmp_path / "out")
    files = {path.stat().st_ino for path in (tmp_path / "out", *tmp_path.glob("out/*"))}
    [published] = [i for i, (name, _) in enumerate(events) if name != "fsync"]
    assert files <= {inode for _, inode in events[:published]}
    assert events[published][1] == (tmp_path / "out").stat().st_ino
    assert events[-1] == ("fsync", tmp_path.stat().st_ino)


@pytest.mark.parametrize("write", [write_file, write_files])
def test_a_file_that_another_process_has_just_written_is_kept(tmp_path, monkeypatch, write):
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (Path(tmp_path, "out").write_text("theirs"), fsync(descriptor)))
    with pytest.raises(CheckpointError, match="out already exists"):
        write(tmp_path / "out")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "theirs")]


@pytest.mark.parametrize("write", [write_file, write_files])
def test_a_disk_without_links(tmp_path, monkeypatch, write):
    def link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    write(tmp_path / "out")
    with pytest.raises(CheckpointError, match="already exists"):
        write(tmp_path / "out")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "x")]


def test_partial_files_of_killed_processes_are_removed_and_those_of_living_ones_are_kept(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    names = [f".out.{pid}.partial" for pid in (os.getppid(), ended.pid, os.getpid())]
    for name in names:
        (tmp_path / name).touch()
    write_bytes(tmp_path / "out", b"x")
    assert {path.name for path in tmp_path.iterdir()} == {"out", names[0]}
