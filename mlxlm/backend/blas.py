"""The BLAS library that computes MLX's matrix products on Linux. Importing this module does not import MLX.

MLX's Linux CPU wheel is linked to the reference BLAS: 7.5 GFLOP/s in a float32 product of 1024 x 1024 matrices on two
cores, where MKL or OpenBLAS reach about 230. MLX uses the `cblas_sgemm` of a library that is loaded before it.

MLX calls `cblas_sgemm` also to multiply a matrix by one row, as in decoding. MKL's then reads the matrix at half of the
bandwidth that one core has, and its `cblas_sgemv` at all of it. So the `cblas_sgemm` that MLX finds is that of
blas_route.c, which calls `cblas_sgemv` on two threads: a model of 38M parameters decodes 1.4 times as fast as on one.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.utils.errors import PlatformError

# Libraries with cblas_sgemm on Debian, Fedora and conda. A plain `libblas` may be the slow reference implementation.
_SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblas.so", "libblis.so.4", "libblis.so.3", "libblis.so")
_NAMES = {"mkl": "MKL", "openblas": "OpenBLAS", "blis": "BLIS"}

# Functions that set and get the number of threads, in MKL, OpenBLAS and numpy's OpenBLAS.
_OPENBLAS_THREAD_FUNCTIONS = (
    ("openblas_set_num_threads", "openblas_get_num_threads"),
    ("scipy_openblas_set_num_threads64_", "scipy_openblas_get_num_threads64_"),
)
_THREAD_FUNCTIONS = (("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"), *_OPENBLAS_THREAD_FUNCTIONS)

# MKL doesn't use AVX-512 on AMD processors, where OpenBLAS does. On the one machine that was
# measured, a virtual EPYC of 2024, products on one core ran at 250 instead of 120 GFLOP/s, but with fewer than 8 rows
# MKL was up to 7 times as fast. OpenBLAS's threads wait in a spin loop, which on a busy machine took longer than the
# product: it only computes products that run on one thread.
_MIN_OPENBLAS_SIZE = 8  # rows and columns
_ALWAYS_OPENBLAS, _NEVER_OPENBLAS = 0, 2**31 - 1

_INSTALL_BLAS = "numpy from PyPI, pip install mkl (x86-64), or apt-get install libopenblas0-pthread"
_ENABLE_ROUTER = "apt-get install gcc, a writable cache folder, numpy from PyPI"


@dataclass(frozen=True)
class Blas:
    """The library behind MLX's `cblas_sgemm`.

    Attributes:
        name: Its name, or "reference" for the slow one in MLX's wheel.
        path: Path of the library; None if MLX uses its own.
        unavailable_reason: Why a faster choice of libraries or functions can't be used.
    """

    name: str
    path: str | None
    _libraries: tuple[ctypes.CDLL, ...] = field(default=(), repr=False)
    _router: ctypes.CDLL | None = field(default=None, repr=False)
    unavailable_reason: str | None = None
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)
    _single_threaded: list[None] = field(default_factory=list, repr=False)  # one entry per open `single_threaded`
    _saved_threads: list[int] = field(default_factory=list, repr=False)  # each library's number of threads before

    @cached_property
    def _thread_functions(self) -> list[tuple[Callable[[int], None], Callable[[], int]]]:
        return [
            (getattr(library, setter), getattr(library, getter))
            for library in self._libraries
            for setter, getter in _THREAD_FUNCTIONS
            if hasattr(library, setter)
        ]

    @property
    def sets_threads(self) -> bool:
        """Whether `single_threaded` works."""
        return bool(self._libraries) and len(self._thread_functions) == len(self._libraries)

    @property
    def shares_loops(self) -> bool:
        """Whether the process has the function `mlxlm_parallel_for` of blas_route.c."""
        return self._router is not None

    @contextmanager
    def single_threaded(self) -> Iterator[None]:
        """Inside, each product runs on its calling thread, so that several threads can compute products at once.

        The number of threads belongs to the process: it is restored when the last thread leaves the context.
        """
        with self._lock:
            if not self._single_threaded:
                self._saved_threads[:] = [get_threads() for _, get_threads in self._thread_functions]
                for set_threads, _ in self._thread_functions:
                    set_threads(1)
                self._set_router_threads(1)
            self._single_threaded.append(None)
        try:
            yield
        finally:
            with self._lock:
                self._single_threaded.pop()
                if not self._single_threaded:
                    self._set_router_threads(platform.cpu_cores())
                    for (set_threads, _), number in zip(self._thread_functions, self._saved_threads, strict=True):
                        set_threads(number)

    def _set_router_threads(self, number: int) -> None:
        if self._router is None:
            return
        self._router.mlxlm_set_num_threads(number)
        if len(self._libraries) == 2:
            self._router.mlxlm_set_min_size(_MIN_OPENBLAS_SIZE if number == 1 else _NEVER_OPENBLAS)


_loaded: Blas | None = None

# Whether MLX was imported before this package, which is too late for another BLAS.
mlx_imported_first = "mlx.core" in sys.modules


def load_blas() -> Blas:
    """Load an optimized CBLAS before MLX is imported, so that MLX's `cblas_sgemm` resolves to it.

    Order: `$MLXLM_BLAS` (a path; "numpy" for the OpenBLAS inside numpy; "none"), MKL from PyPI, the system's OpenBLAS
    or BLIS, numpy's OpenBLAS. On AMD processors with AVX-512, MKL and numpy's OpenBLAS are both used, the latter for
    products on one thread. The router in front of the libraries needs a C compiler; `blas_warning` tells if it failed.

    On macOS MLX uses Accelerate and Metal: nothing is loaded, and `$MLXLM_BLAS` has no effect.

    Raises:
        PlatformError: `$MLXLM_BLAS` can't be loaded.
    """
    global _loaded
    if _loaded is None:
        _loaded = _find_blas()
    return _loaded


def blas_warning() -> str | None:
    """One line if a faster BLAS can't be used, with what to install; else None."""
    blas = load_blas()
    if blas.name == "reference":
        reason = f" ({blas.unavailable_reason})" if blas.unavailable_reason else ""
        return f"no fast BLAS found{reason}: matrix products are about 25 times slower (try: {_INSTALL_BLAS})"
    if blas.unavailable_reason:
        return (
            f"{blas.name} works alone, so that generation, and training on some processors, is slower and rounds "
            f"differently: {blas.unavailable_reason} (try: {_ENABLE_ROUTER})"
        )
    return None


def _find_blas() -> Blas:
    if sys.platform == "darwin":
        return Blas("Accelerate", None)
    # Sums that don't depend on memory alignment, so that equal runs are bit-equal.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    choice = os.environ.get("MLXLM_BLAS")
    if choice == "none":
        return Blas("MLX's own", None)
    if choice:
        try:
            return _load_router(None, with_openblas=True) if choice == "numpy" else _load_library(choice)
        except OSError as error:
            hint = 'the full path of a CBLAS library, or "numpy"'
            raise PlatformError(f"MLXLM_BLAS={choice} can't be loaded: {error}", hint) from None
    for path in sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*")):
        with suppress(OSError):
            return _load_library(str(path), with_openblas=_is_amd_with_avx512())
    for name in _SYSTEM_LIBRARIES:
        with suppress(OSError):
            return _load_library(name)
    try:
        return _load_router(None, with_openblas=True)
    except OSError as error:
        return Blas("reference", None, unavailable_reason=str(error))


def _load_library(path: str, with_openblas: bool = False) -> Blas:
    """Load a CBLAS library behind the router, or without it if it can't be used.

    Raises:
        OSError: The library can't be loaded.
    """
    library = ctypes.CDLL(path)
    _get_function(library, "cblas_sgemm")
    reason = None
    for openblas in (True, False) if with_openblas else (False,):
        try:
            return replace(_load_router(library, openblas), unavailable_reason=reason)
        except OSError as error:
            reason = reason or str(error)
    return Blas(_name(path), path, (ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL),), unavailable_reason=reason)


def _name(path: str) -> str:
    file_name = Path(path).name
    return next((label for key, label in _NAMES.items() if key in file_name.lower()), file_name)


def _load_router(library: ctypes.CDLL | None, with_openblas: bool) -> Blas:
    """Put the cblas_sgemm of blas_route.c in front of a library, of numpy's OpenBLAS, or of both.

    Raises:
        OSError: OpenBLAS can't be loaded, a function is missing, or the router can't be compiled.
    """
    functions: list[tuple[str, Any, Any]] = []
    libraries, names, path = [], [], None
    if library is not None:
        functions.append(("", _get_function(library, "cblas_sgemm"), _get_function(library, "cblas_sgemv")))
        libraries, names, path = [library], [_name(library._name)], library._name
    if with_openblas:
        openblas = ctypes.CDLL(_numpy_openblas_path())
        names64 = "scipy_cblas_sgemm64_", "scipy_cblas_sgemv64_"
        functions.append(("64", *(_get_function(openblas, name) for name in names64)))
        libraries, names, path = [*libraries, openblas], [*names, "OpenBLAS"], path or openblas._name
    router = _open_router()
    for suffix, *pair in functions:
        addresses = (ctypes.cast(function, ctypes.c_void_p) for function in pair)
        getattr(router, f"mlxlm_set_library{suffix}")(*addresses)
    router.mlxlm_set_min_size(_ALWAYS_OPENBLAS if library is None else _NEVER_OPENBLAS)
    for setter, getter in _OPENBLAS_THREAD_FUNCTIONS:
        if len(libraries) == 1 and hasattr(libraries[0], setter):
            set_threads = ctypes.cast(getattr(libraries[0], setter), ctypes.c_void_p)
            # Its threads wait for each other in a loop. If another program takes a core, products are 100 times slower.
            router.mlxlm_set_openblas_threads(set_threads, max(1, getattr(libraries[0], getter)() - 1))
    blas = Blas(" and ".join(names), path, tuple(libraries), router)
    blas._set_router_threads(platform.cpu_cores())
    ctypes.CDLL(router._name, mode=ctypes.RTLD_GLOBAL)  # from here on, all of MLX's products go through the router
    return blas


def _get_function(library: ctypes.CDLL, name: str) -> Any:
    try:
        return getattr(library, name)
    except AttributeError:
        raise OSError(f"{library._name} has no {name}") from None


def _open_router() -> ctypes.CDLL:
    """The library of blas_route.c, without functions yet, and not visible to MLX."""
    try:
        router = ctypes.CDLL(str(_compile_router()))
    except OSError:  # truncated by a power cut
        router = ctypes.CDLL(str(_compile_router(force=True)))
    _get_function(router, "mlxlm_set_library")
    return router


def _numpy_openblas_path() -> str:
    """Path of the OpenBLAS in numpy's wheel, without importing numpy."""
    numpy = find_spec("numpy")
    folder = Path(numpy.origin).parents[1] if numpy and numpy.origin else Path("none")
    paths = sorted(folder.glob("numpy.libs/libscipy_openblas64_*.so*"))
    if not paths:
        raise OSError("numpy is not a wheel with OpenBLAS")
    return str(paths[0])


def _compile_router(force: bool = False) -> Path:
    """Path of the library of blas_route.c, compiled if it isn't in the cache or with `force`."""
    source = Path(__file__).with_name("blas_route.c").read_bytes()
    try:
        library = platform.cache_folder() / f"blas-{os.uname().machine}-{zlib.crc32(source):08x}.so"
        if force or not library.exists():
            from tempfile import TemporaryDirectory  # here to keep the start of the program fast

            from mlxlm.utils import files

            with TemporaryDirectory() as folder:
                output = Path(folder, library.name)
                command = ["cc", "-x", "c", "-O2", "-pthread", "-shared", "-fPIC", "-o", str(output), "-"]
                subprocess.run(command, input=source, capture_output=True, check=True)
                library.parent.mkdir(parents=True, exist_ok=True)
                files.write_bytes(library, output.read_bytes(), PlatformError)
    except FileNotFoundError:
        raise OSError("there is no C compiler, cc") from None
    except (PlatformError, subprocess.SubprocessError) as error:
        raise OSError(str(error)) from None
    return library


def _is_amd_with_avx512() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            cpuinfo = file.read(8192)
    except OSError:
        return False
    return "AuthenticAMD" in cpuinfo and " avx512f " in cpuinfo
