"""The choice of a BLAS, its products and its threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxlm.backend import blas

LINUX = pytest.mark.skipif(sys.platform == "darwin", reason="MLX uses Accelerate on macOS")


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@LINUX
def test_a_chosen_blas_that_cant_be_loaded_is_an_error():
    done = python("from mlxlm.backend.blas import load_blas; load_blas()", MLXLM_BLAS="/nowhere/libblas.so")
    assert "MLXLM_BLAS=/nowhere/libblas.so can't be loaded" in done.stderr


@LINUX
def test_without_a_fast_blas_the_warning_tells_what_to_install(monkeypatch):
    monkeypatch.setattr(blas, "_loaded", blas.Blas("reference", None))
    assert "pip install mkl" in blas.blas_warning()
    monkeypatch.setattr(blas, "_loaded", blas.Blas("MKL", "x"))
    assert blas.blas_warning() is None


@LINUX
def test_none_loads_nothing():
    done = python("from mlxlm.backend.blas import load_blas; print(load_blas().name)", MLXLM_BLAS="none")
    assert done.stdout == "MLX's own\n"


_PRODUCTS = """
shapes = (1, 400, 300), (1, 4, 3), (40, 1, 30), (1, 1, 9), (7, 40, 30), (5, 700, 400), (8, 8, 5), (64, 3, 9), (99, 7, 5)
import numpy as np, mlxlm
from contextlib import nullcontext
from mlxlm.backend.mlx import mx
from mlxlm.backend.blas import load_blas
random = np.random.default_rng(0)
for context in (nullcontext, load_blas().single_threaded):
    for m, n, k in shapes:
        for transposed in (False, True):
            a, b = random.random((m, k), np.float32), random.random((n, k) if transposed else (k, n), np.float32)
            with context():
                product = mx.array(a) @ (mx.array(b).T if transposed else mx.array(b))
                mx.eval(product)
            expected = a.astype(np.float64) @ (b.T if transposed else b)
            assert np.allclose(np.array(product), expected, rtol=1e-5), (context, m, n, k, transposed)
print(load_blas().name, load_blas().sets_threads)
"""


@LINUX
def test_products_through_the_openblas_inside_numpy():
    done = python(_PRODUCTS, MLXLM_BLAS="numpy")
    assert done.stdout == "OpenBLAS True\n", done.stderr


MKL = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))


@LINUX
@pytest.mark.skipif(not MKL, reason="MKL is not installed")
def test_products_by_mkl_and_openblas():
    router = f"from mlxlm.backend import blas\nblas._loaded = blas._load_library({str(MKL[0])!r}, with_openblas=True)\n"
    done = python(router + _PRODUCTS, MLXLM_BLAS="none")  # nothing is loaded with the package
    assert done.stdout == "MKL and OpenBLAS True\n", done.stderr


# Halves of 1001 rows on two threads, from several threads at once, and in a process without the second thread.
_CONCURRENT = """
import ctypes, os, sys
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from mlxlm.backend import blas
router = blas.load_blas()._router
random = np.random.default_rng(0)
b, xs = random.random((1001, 301), np.float32), random.random((64, 301), np.float32)
pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)
def product(x):
    y, numbers = np.empty(1001, np.float32), (1, 1001, 301, ctypes.c_float(1))
    router.cblas_sgemm(101, 111, 112, *numbers, pointer(x), 301, pointer(b), 301, ctypes.c_float(0), pointer(y), 1001)
    return y
def all_products():
    with ThreadPoolExecutor(4) as pool:
        return np.array(list(pool.map(product, xs)))
router.mlxlm_set_num_threads(1)
alone = all_products()
assert np.allclose(alone, xs @ b.T, rtol=1e-5)
router.mlxlm_set_num_threads(2)
assert all((all_products() == alone).all() for _ in range(20))
if (child := os.fork()) == 0:
    os._exit(0 if (all_products() == alone).all() else 1)
assert os.waitpid(child, 0)[1] == 0
print("equal")
"""


@LINUX
def test_products_on_two_threads_are_those_on_one():
    done = python(_CONCURRENT, MLXLM_BLAS="numpy")
    assert done.stdout == "equal\n", done.stderr


# Takes the branch for AMD processors, with the libraries of another folder.
_FORCED = """
import sys
from pathlib import Path
from mlxlm.backend import blas
blas._is_amd_with_avx512 = lambda: True
blas._loaded, sys.prefix = None, {prefix!r}
"""


@LINUX
@pytest.mark.skipif(not MKL, reason="MKL is not installed")
def test_a_broken_mkl_leaves_no_router(tmp_path):
    """MLX's products must not go to a router without functions when another library is loaded instead."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmkl_rt.so.3").write_bytes(b"broken")
    code = _FORCED.format(prefix=str(tmp_path)) + (
        f"blas._SYSTEM_LIBRARIES = ({str(MKL[0])!r},)\nprint(blas.load_blas().name)\nfrom mlxlm.backend.mlx import mx\n"
        "print((mx.ones((9, 9)) @ mx.ones((9, 9))).sum().item())"
    )
    del_choice = {"MLXLM_BLAS": "none"}  # nothing is loaded with the package
    done = python(f"import os\nimport mlxlm\ndel os.environ['MLXLM_BLAS']\n{code}", **del_choice)
    assert (done.returncode, done.stdout) == (0, "MKL\n729.0\n"), done.stderr


@LINUX
@pytest.mark.skipif(not MKL, reason="MKL is not installed")
def test_mkl_alone_has_a_reason_and_a_truncated_router_is_compiled_again(tmp_path):
    code = f"import os\nimport mlxlm\ndel os.environ['MLXLM_BLAS']\n{_FORCED.format(prefix=sys.prefix)}"
    code += "print(blas.load_blas().name, '|', blas.blas_warning())"
    cache = {"MLXLM_BLAS": "none", "XDG_CACHE_HOME": str(tmp_path)}
    alone = python(code, **cache, PATH="/nowhere").stdout
    assert alone.startswith("MKL | MKL works alone") and "there is no C compiler" in alone
    assert python(code, **cache).stdout == "MKL and OpenBLAS | None\n"
    [library] = tmp_path.rglob("blas-*.so")
    library.write_bytes(b"")
    assert python(code, **cache).stdout == "MKL and OpenBLAS | None\n"


@LINUX
def test_a_library_without_the_function_is_an_error(tmp_path):
    """Another build of numpy, whose OpenBLAS has other names."""
    code = (
        "import ctypes.util\nfrom mlxlm.backend import blas\n"
        "blas._numpy_openblas_path = lambda: ctypes.util.find_library('m')\n"
        "blas._load_router(None, with_openblas=True)"
    )
    done = python(code, MLXLM_BLAS="none")
    assert "OSError: libm.so" in done.stderr and "has no scipy_cblas_sgemm64_" in done.stderr


# In a process of its own: the threads of the library are the process's.
_SET_UP = """
from mlxlm.backend.blas import load_blas
blas = load_blas()
get_threads = blas._thread_functions[0][1]
before = get_threads()
"""


@LINUX
def test_threads_are_limited_until_the_last_leaves():
    code = _SET_UP + (
        "first, second = blas.single_threaded(), blas.single_threaded()\nfirst.__enter__()\nsecond.__enter__()\n"
        "first.__exit__(None, None, None)\nassert get_threads() == 1\nsecond.__exit__(None, None, None)\n"
        "assert get_threads() == before == 2\nprint('restored')"
    )
    assert python(code, MLXLM_BLAS="numpy", OPENBLAS_NUM_THREADS="2").stdout == "restored\n"


@LINUX
def test_openblas_alone_multiplies_a_vector_on_one_thread():
    """Two threads call it at once, and its own would wait for each other."""
    code = _SET_UP + (
        "from mlxlm.backend.mlx import mx\n"
        "matrix = mx.ones((600, 600))\nmx.eval(matrix)\n"
        "mx.eval(matrix @ matrix[0])\nassert get_threads() == 1\n"
        "mx.eval(matrix @ matrix)\nassert get_threads() == max(1, before - 1)\n"
        "with blas.single_threaded():\n    mx.eval(matrix @ matrix)\n    assert get_threads() == 1\n"
        "assert get_threads() == max(1, before - 1)\n"
    )
    done = python(code, MLXLM_BLAS="numpy")
    assert done.returncode == 0, done.stderr
