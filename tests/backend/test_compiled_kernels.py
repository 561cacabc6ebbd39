"""Kernels that MLX compiled on a CPU: truncated files are removed, and killed compilers retried."""

import os
import shutil
import sys
import time
from pathlib import Path

import psutil
import pytest

from mlxlm.backend.compiled_kernels import kernel_folder, make_private, remove_failed_kernel, remove_old_kernels
from mlxlm.backend.error_text import describe_error
from mlxlm.backend.mlx import ON_CPU, async_eval_arrays, eval_arrays, mx
from mlxlm.backend.platform import has_compiler
from mlxlm.utils.errors import PlatformError

COMPILES = pytest.mark.skipif(
    not (ON_CPU and has_compiler() and sys.platform == "linux"), reason="MLX compiles nothing here"
)


def test_kernels_from_before_the_machine_booted_are_removed(tmp_path):
    for name, modified in {"early.so": psutil.boot_time() - 5, "late.so": time.time(), "source.cpp": 0}.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (modified, modified))
    remove_old_kernels(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late.so", "source.cpp"]
    remove_old_kernels(tmp_path / "none")


def test_kernel_folder(monkeypatch):
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert str(kernel_folder("1.2")) == "/tmp/mlx/1.2/cpu"
    monkeypatch.setenv("TEMP", "/x")
    assert str(kernel_folder("1.2")) == "/x/mlx/1.2/cpu"


@pytest.mark.parametrize(("mode", "kept"), [(None, False), (0o755, True), (0o775, False), (0o707, False)])
def test_other_users_can_not_write_to_the_folder(tmp_path, mode, kept):
    folder = tmp_path / "new" / "mlx"
    if mode is not None:
        (folder / "1.2").mkdir(parents=True)
        folder.chmod(mode)
    make_private(folder)
    assert folder.stat().st_mode & 0o022 == 0
    assert (folder / "1.2").exists() == kept


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch, make):
    make(tmp_path / "mlx")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PlatformError, match="/mlx, from which MLX .* belongs to another user .*try: TMPDIR=~/tmp"):
        make_private(tmp_path / "mlx")


def test_a_kernel_that_cant_be_loaded_is_removed(tmp_path):
    (tmp_path / "cut.so").write_bytes(b"\x7f")
    for message in (
        f"Could not load C++ shared library {tmp_path}/{name}.so: it is spoiled" for name in ("cut", "none")
    ):
        remove_failed_kernel(message)
    remove_failed_kernel("[Compile::eval_cpu] Failed to compile function")
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_cant_be_loaded_is_named():
    message = describe_error(RuntimeError("Could not load C++ shared library /tmp/a b/libX.so: file too short"))
    assert message.endswith("file too short (try: rm '/tmp/a b/libX.so')")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """`compiler(script)`: a g++ that runs this shell script before or instead of compiling a kernel."""

    def write(text):
        script = f'#!/bin/sh\ncase "$*" in *.so*) {text} ;; esac\nexec {shutil.which("g++")} "$@"\n'
        (tmp_path / "g++").write_text(script)
        (tmp_path / "g++").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("TMPDIR", str(tmp_path))

    return write


@COMPILES
@pytest.mark.parametrize(
    ("evaluate", "failure", "sines"),  # each graph is new to MLX, which compiles it
    [
        (async_eval_arrays, "kill -INT $$", 1),
        (eval_arrays, 'for last; do :; done; echo cut > "$last"; exit 0', 2),  # a killed linker
    ],
)
def test_an_evaluation_is_retried_if_its_compiler_is_killed(tmp_path, compiler, evaluate, failure, sines):
    compiler(f"[ -e {tmp_path}/failed ] || {{ touch {tmp_path}/failed; {failure}; }}")

    def function(x):
        for _ in range(sines):
            x = mx.sin(x) + 1
        return x

    result = mx.compile(function)(mx.array([1.0, 2.0]))
    evaluate(result)
    assert (tmp_path / "failed").exists()
    assert result.tolist() == pytest.approx(function(mx.array([1.0, 2.0])).tolist())


@COMPILES
def test_a_compiler_that_always_fails_is_an_error(compiler):
    compiler("exit 1")
    with pytest.raises(RuntimeError, match="Failed to compile"):
        eval_arrays(mx.compile(lambda x: mx.cos(x) * mx.tanh(x) - 3)(mx.array([1.0])))
