"""The import of MLX, the memory of devices, and the BLAS warning."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlxlm.backend import device, platform
from mlxlm.backend.mlx import ON_CPU

LINUX = pytest.mark.skipif(sys.platform == "darwin", reason="MLX uses Accelerate on macOS")


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_without_mlx_the_error_tells_what_to_install():
    code = "import sys; sys.modules['mlx.core'] = None\nimport mlxlm.backend.mlx"
    done = python(code)
    assert "MLX has no backend here" in done.stderr and "mlxlm[cpu]" in done.stderr


def test_only_one_module_imports_mlx():
    """It sets the BLAS and the allocator, which no other import may bypass."""
    package = Path(platform.__file__).parents[1]
    importing = re.compile(r"^\s*(import|from) mlx\b", re.MULTILINE)
    assert [p.name for p in package.rglob("*.py") if importing.search(p.read_text())] == ["mlx.py"]


def test_device_memory(monkeypatch):
    def memory(**info):
        monkeypatch.setattr(device.mx, "device_info", lambda: {"device_name": "a GPU", **info})
        return device.device_memory()

    monkeypatch.setattr(device, "ON_CPU", True)
    assert memory() == platform.total_memory()
    monkeypatch.setattr(device, "ON_CPU", False)
    assert memory(memory_size=16 << 30, max_recommended_working_set_size=12 << 30) == 12 << 30  # Metal
    assert memory(total_memory=24 << 30, free_memory=20 << 30) == 24 << 30  # CUDA
    monkeypatch.setattr(device, "_num_processes", 2)
    assert memory(total_memory=24 << 30) == 24 << 30
    assert memory(max_recommended_working_set_size=12 << 30) == 6 << 30
    monkeypatch.setattr(device, "_num_processes", 1)
    assert memory() is None


@LINUX
@pytest.mark.skipif(not ON_CPU, reason="a GPU needs no BLAS")
def test_the_warning_about_a_slow_blas_is_printed():
    code = "from mlxlm.backend import blas\nblas._loaded = blas.Blas('reference', None)\nimport mlxlm.backend.mlx"
    done = python(code)
    assert "Warning: no fast BLAS found" in done.stderr and "pip install mkl" in done.stderr
    late = python("import mlx.core\nimport mlxlm.backend.mlx")
    assert "mlx was imported before mlxlm" in late.stderr


@LINUX
@pytest.mark.skipif(not ON_CPU, reason="a GPU's buffers have an allocator of their own")
def test_memory_of_large_buffers_goes_back_to_the_system():
    code = """
import ctypes
import mlxlm.backend.mlx
libc = ctypes.CDLL(None)
if not hasattr(libc, "mallinfo2"):
    raise SystemExit("77")
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *"abcdef")]
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc(16 << 20))  # by default, smaller buffers are placed on the heap after this
before = libc.mallinfo2().hblks
libc.malloc(2 << 20)
print(libc.mallinfo2().hblks - before)
"""
    done = python(code)
    if "77" in done.stderr:
        pytest.skip("needs glibc 2.33")
    assert done.stdout == "1\n", done.stderr
