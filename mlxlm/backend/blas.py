"""The library that computes MLX's matrix products on Linux. Importing this module does not import MLX.

MLX's Linux CPU wheel is linked to the reference BLAS (7.5 GFLOP/s in a float32 product of 1024 x 1024 matrices on two
cores; MKL or OpenBLAS give about 230). It takes `cblas_sgemm` from whatever library the process has when MLX comes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.utils.errors import PlatformError

# Debian, Fedora and conda names of a library that exports cblas_sgemm. A plain `libblas` may be the slow
# reference implementation, so it is not listed.
_SYSTEM = ("libopenblas.so.0", "libopenblas.so", "libblis.so.4", "libblis.so.3", "libblis.so")
_NAMES = {"mkl": "MKL", "openblas": "OpenBLAS", "blis": "BLIS"}

# What sets and what tells the number of threads; numpy's OpenBLAS has names of its own.
_THREADS = (
    ("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),
    ("openblas_set_num_threads", "openblas_get_num_threads"),
    ("scipy_openblas_set_num_threads64_", "scipy_openblas_get_num_threads64_"),
)

# MKL has no AVX-512 for processors of AMD, where OpenBLAS takes its kernels of these names. On the one machine that was
# tried, a virtual EPYC of 2024, single products on one core ran at 250 GFLOP/s instead of 120; below 8 rows MKL was up
# to 7 times as fast. OpenBLAS's threads wait for each other in a loop, which on a busy machine took longer than the
# product: it has those products only that run on one thread.
_AVX512 = (b"SkylakeX", b"Cooperlake", b"SapphireRapids", b"Zen5")
_FEW, _ALL, _NONE = 8, 0, 2**31 - 1

_SECOND = "apt-get install gcc, a cache folder that can be written, numpy from PyPI"
INSTALL = "pip install mkl (x86-64), or apt-get install libopenblas0-pthread"


@dataclass(frozen=True)
class Blas:
    """What answers MLX's `cblas_sgemm`. `path` is None for the library MLX ships with. `unavailable_reason`: why numpy's OpenBLAS,
    which would be faster, could not be taken as well or instead."""

    name: str
    path: str | None
    _libraries: tuple[ctypes.CDLL, ...] = field(default=(), repr=False)
    _router: ctypes.CDLL | None = field(default=None, repr=False)
    unavailable_reason: str | None = None
    _entering: Any = field(default_factory=threading.Lock, repr=False, compare=False)
    _inside: list[None] = field(default_factory=list, repr=False)  # one for each that is in `single_threaded`
    _before: list[int] = field(default_factory=list, repr=False)  # the threads that the libraries had

    @cached_property
    def _threads(self) -> list[tuple]:
        calls = [(lib, *names) for lib in self._libraries for names in _THREADS if hasattr(lib, names[0])]
        return [(getattr(lib, sets), getattr(lib, tells)) for lib, sets, tells in calls]

    @property
    def sets_threads(self) -> bool:
        """Whether `single_threaded` works."""
        return bool(self._libraries) and len(self._threads) == len(self._libraries)

    @contextmanager
    def single_threaded(self) -> Iterator[None]:
        """Inside, a product runs on the thread that asks for it alone; several may at the same time.

        The libraries' numbers of threads are the process's: several threads may be inside, the last one puts them back.
        """
        with self._entering:
            if not self._inside:
                self._before[:] = [tells() for _, tells in self._threads]
                for sets, _ in self._threads:
                    sets(1)
                if self._router is not None:
                    self._router.mlxlm_least(_FEW)
            self._inside.append(None)
        try:
            yield
        finally:
            with self._entering:
                self._inside.pop()
                if not self._inside:
                    if self._router is not None:
                        self._router.mlxlm_least(_NONE)
                    for (sets, _), number in zip(self._threads, self._before, strict=True):
                        sets(number)


_loaded: Blas | None = None

# Whether MLX was there before this package: then it is too late for another BLAS.
mlx_came_first = "mlx.core" in sys.modules


def load_blas() -> Blas:
    """Load an optimised CBLAS before MLX is imported, so that MLX's `cblas_sgemm` resolves to it.

    Order: `$MLXLM_BLAS` (a path; "numpy" for the OpenBLAS inside numpy; "none"), MKL from PyPI, the system's OpenBLAS
    or BLIS, numpy's. On a processor of AMD with AVX-512, numpy's comes beside MKL, for products on one thread. It takes
    a C compiler, since its functions have other names than MLX asks for. `blas_warning` says where that failed.

    On macOS MLX uses Accelerate and Metal: nothing is loaded, and `$MLXLM_BLAS` has no effect. Raises PlatformError if
    it can't be loaded on Linux, since a choice must not be dropped in silence.
    """
    global _loaded
    if _loaded is None:
        _loaded = _find()
    return _loaded


def blas_warning() -> str | None:
    """One line if a faster BLAS was wanted and could not be had: products run on MLX's reference one, or on MKL
    alone; else None."""
    blas = load_blas()
    if blas.name == "reference":
        why = f" ({blas.unavailable_reason})" if blas.unavailable_reason else ""
        return f"no fast BLAS found{why}: matrix products are about 25 times slower (try: {INSTALL})"
    if blas.unavailable_reason:
        lost = "training is slower on this processor and rounds in another way"
        return f"{blas.name} works without numpy's OpenBLAS, {lost}: {blas.unavailable_reason} (try: {_SECOND})"
    return None


def _find() -> Blas:
    if sys.platform == "darwin":
        return Blas("Accelerate", None)
    # Sums that don't depend on the alignment of memory, so that equal runs are equal to the bit.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    chosen = os.environ.get("MLXLM_BLAS")
    if chosen == "none":
        return Blas("MLX's own", None)
    if chosen:
        try:
            return _routed(None) if chosen == "numpy" else _opened(chosen)
        except OSError as error:
            hint = 'the full path of a CBLAS library, or "numpy"'
            raise PlatformError(f"MLXLM_BLAS={chosen} can't be loaded: {error}", hint) from None
    for path in sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*")):
        unavailable_reason = None
        if _amd_with_avx512():
            try:
                return _routed(str(path))
            except OSError as error:
                unavailable_reason = str(error)
            except _NotFaster:
                pass
        with suppress(OSError):
            return replace(_opened(str(path)), unavailable_reason=unavailable_reason)
    for path in _SYSTEM:
        with suppress(OSError):
            return _opened(path)
    try:
        return _routed(None)
    except OSError as error:
        return Blas("reference", None, unavailable_reason=str(error))


def _opened(path: str) -> Blas:
    handle = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    if not hasattr(handle, "cblas_sgemm"):
        raise OSError("it has no cblas_sgemm")
    lowered = Path(path).name.lower()
    name = next((label for key, label in _NAMES.items() if key in lowered), Path(path).name)
    return Blas(name, path, (handle,))


def _routed(mkl: str | None) -> Blas:
    """numpy's OpenBLAS, alone, or beside the MKL at a path. Raises OSError where that can't be had, _NotFaster where
    MKL alone is as good."""
    path = _in_numpy()
    openblas = ctypes.CDLL(path)
    wide = _function(openblas, "scipy_cblas_sgemm64_")
    if mkl is None:
        router = _router(None, wide)
        router.mlxlm_least(_ALL)
        _seen_by_mlx(router)
        return Blas("OpenBLAS", path, (openblas,))
    kernels = _function(openblas, "scipy_openblas_get_corename64_")
    kernels.restype = ctypes.c_char_p
    if kernels() not in _AVX512:
        raise _NotFaster
    few = ctypes.CDLL(mkl)
    router = _router(_function(few, "cblas_sgemm"), wide)
    router.mlxlm_least(_NONE)
    _seen_by_mlx(router)
    return Blas("MKL and OpenBLAS", mkl, (few, openblas), router)


class _NotFaster(Exception):
    """numpy's OpenBLAS has no kernels with AVX-512 here."""


def _function(library: ctypes.CDLL, name: str) -> Any:
    try:
        return getattr(library, name)
    except AttributeError:
        raise OSError(f"{library._name} has no {name}") from None


def _router(few: Any | None, many: Any) -> ctypes.CDLL:
    """The library of blas_route.c between these two functions, not yet where MLX finds it."""
    try:
        router = ctypes.CDLL(str(_compiled()))
    except OSError:  # a power cut may have left it cut short
        router = ctypes.CDLL(str(_compiled(again=True)))
    addresses = [None if function is None else ctypes.cast(function, ctypes.c_void_p) for function in (few, many)]
    _function(router, "mlxlm_route")(*addresses)
    return router


def _seen_by_mlx(router: ctypes.CDLL) -> None:
    """The last step: from here on all products of MLX go through the router."""
    ctypes.CDLL(router._name, mode=ctypes.RTLD_GLOBAL)


def _in_numpy() -> str:
    """The path of the OpenBLAS in numpy's wheel, which is found without importing numpy."""
    numpy = find_spec("numpy")
    found = sorted(Path(numpy.origin).parents[1].glob("numpy.libs/libscipy_openblas64_*.so*")) if numpy else []
    if not found:
        raise OSError("numpy is not a wheel with OpenBLAS in it")
    return str(found[0])


def _compiled(again: bool = False) -> Path:
    """The library of blas_route.c, compiled at the first time, or `again`."""
    source = Path(__file__).with_name("blas_route.c").read_bytes()
    try:
        library = platform.cache_folder() / f"blas-{os.uname().machine}-{zlib.crc32(source):08x}.so"
        if again or not library.exists():
            from tempfile import TemporaryDirectory  # not in every start of the program

            from mlxlm.utils import files

            with TemporaryDirectory() as folder:
                made = Path(folder, library.name)
                command = ["cc", "-x", "c", "-O2", "-shared", "-fPIC", "-o", str(made), "-"]
                subprocess.run(command, input=source, capture_output=True, check=True)
                library.parent.mkdir(parents=True, exist_ok=True)
                files.write_bytes(library, made.read_bytes(), PlatformError)
    except FileNotFoundError:
        raise OSError("there is no C compiler, cc") from None
    except (PlatformError, subprocess.SubprocessError) as error:
        raise OSError(str(error)) from None
    return library


def _amd_with_avx512() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(8192)
    except OSError:
        return False
    return "AuthenticAMD" in first and " avx512f " in first
