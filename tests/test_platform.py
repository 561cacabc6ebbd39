"""BLAS and backend: chosen in a stated order, never dropped in silence."""

import subprocess
import sys

import pytest

from mlxlm import platform

LINUX = pytest.mark.skipif(sys.platform == "darwin", reason="MLX uses Accelerate on macOS")


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@LINUX
def test_a_chosen_blas_that_can_not_be_loaded_is_an_error():
    done = python("from mlxlm.platform import load_blas; load_blas()", MLXLM_BLAS="/nowhere/libblas.so")
    assert "MLXLM_BLAS=/nowhere/libblas.so can't be loaded" in done.stderr


@LINUX
def test_without_a_fast_blas_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(platform, "_loaded", platform.Blas("reference", None))
    assert "pip install mkl" in platform.blas_warning()
    monkeypatch.setattr(platform, "_loaded", platform.Blas("MKL", "x"))
    assert platform.blas_warning() is None


@LINUX
def test_the_choice_of_none_is_kept():
    done = python("from mlxlm.platform import load_blas; print(load_blas().name)", MLXLM_BLAS="none")
    assert done.stdout == "MLX's own\n"


def test_without_an_mlx_backend_one_line_says_which_to_install():
    code = "import sys; sys.modules['mlx.core'] = None\nimport mlxlm._mlx"
    done = python(code)
    assert "MLX has no backend here" in done.stderr and "mlxlm[cpu]" in done.stderr


def test_no_module_but_one_imports_mlx_core():
    """Whoever imported mlx.core before the BLAS would get the slow one."""
    from pathlib import Path

    package = Path(platform.__file__).parent
    offenders = [
        str(path)
        for path in package.rglob("*.py")
        if path.name != "_mlx.py" and ("import mlx.core" in (text := path.read_text()) or "from mlx.core" in text)
    ]
    assert offenders == []
