"""quantized_matmul.cpp, compiled on this machine at first use, and checked before it is used.

It is compiled against the headers in MLX's wheel, by the g++ that MLX's compiled graphs need, and kept in the cache
folder. Without a compiler, or if the check fails, quantized weights are dequantized when a model is loaded.
"""

from __future__ import annotations

import importlib.util
import platform as system
import subprocess
import sys
import sysconfig
import zlib
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from mlxlm.backend import platform
from mlxlm.backend.blas import load_blas
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.utils import files
from mlxlm.utils.child_python import python_command, python_environment
from mlxlm.utils.errors import PlatformError

_SOURCE = Path(__file__).with_name("quantized_matmul.cpp")
_FLAGS = ("-std=c++20", "-march=native", "-fPIC", "-fvisibility=hidden", "-DNB_DOMAIN=mlx")  # nanobind's, as in MLX
_CHECK = "import sys; from mlxlm.backend import cpu_extension; cpu_extension.check(sys.argv[1])"
_MAX_ERROR = 1e-5  # relative to the largest value of a product


class Extension(NamedTuple):
    """The compiled module, or why there is none."""

    module: Any | None
    unavailable_reason: str | None = None


@cache
def load_extension() -> Extension:
    """Load the extension; compile and check it, which takes about ten seconds, if it isn't in the cache folder."""
    if not ON_CPU or sys.platform != "linux":
        return Extension(None, "it is for CPUs on Linux")
    if not load_blas().shares_loops:
        return Extension(None, load_blas().unavailable_reason or "blas_route.c, whose threads it needs, isn't in use")
    try:
        path = platform.cache_folder() / f"cpu-{_key():08x}.so"
        failure = path.with_suffix(".txt")
        if failure.exists():
            return Extension(None, f"{failure.read_text().strip()} (remove {failure} to try again)")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            if problem := _compile(path):
                files.write_bytes(failure, problem.encode(), PlatformError)
                return Extension(None, problem)
        return Extension(_load(path))
    except PackageNotFoundError as error:
        return Extension(None, f"the package {error.name} is missing")
    except (PlatformError, ImportError, OSError) as error:
        return Extension(None, str(error))


def _key() -> int:
    """A checksum of all that the compiled file depends on."""
    versions = version("mlx"), version("nanobind"), sys.version, system.machine()
    content = _SOURCE.read_bytes() + "\n".join(versions).encode() + _cpu_features()
    return zlib.crc32(content)


def _cpu_features() -> bytes:
    """The instructions that -march=native may use: the cache folder may be shared by several machines."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features"))}))


def _compile(path: Path) -> str | None:
    """Compile and check the extension; returns what failed, if that will fail again."""
    import nanobind

    package, mlx = Path(nanobind.__file__).parent, Path(mx.__file__).parent
    folders = mlx / "include", package / "include", package / "ext/robin_map/include", sysconfig.get_path("include")
    includes = [f"-I{folder}" for folder in folders]
    with TemporaryDirectory() as folder:
        sources = {_SOURCE: "-O3", package / "src/nb_combined.cpp": "-O1"}
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        output = Path(folder, path.name)
        commands = [
            ["g++", *_FLAGS, level, *includes, "-c", str(source), "-o", built]
            for (source, level), built in zip(sources.items(), objects, strict=True)
        ]
        link = ["g++", "-shared", *objects, f"-L{mlx / 'lib'}", "-lmlx", f"-Wl,-rpath,{mlx / 'lib'}", "-o", str(output)]
        try:
            problem = _run(*commands) or _run(link) or _run(python_command("-c", _CHECK, str(output)))
        except FileNotFoundError:
            raise PlatformError("there is no C++ compiler, g++") from None
        if problem is None:
            files.write_bytes(path, output.read_bytes(), PlatformError)
        return problem


def _run(*commands: list[str]) -> str | None:
    """Run commands at once; returns the first error line of one that fails, or None."""
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=python_environment(), **options) for command in commands]
    problem = None
    for command, process in zip(commands, processes, strict=True):
        errors = process.communicate()[1].strip().splitlines()
        if process.returncode:
            lines = [line for line in errors if "error" in line.lower()] or errors
            problem = f"{Path(command[0]).name} ended with status {process.returncode}: {' '.join(lines[:1])}"
    return problem


def _load(path: Path | str) -> Any:
    loader = ExtensionFileLoader("mlxlm_cpu", str(path))
    spec = importlib.util.spec_from_file_location("mlxlm_cpu", path, loader=loader)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def check(path: Path | str) -> None:
    """Compare the products of the extension at `path` with those of dequantized matrices.

    Raises:
        PlatformError: They differ.
    """
    module, generator = _load(path), mx.random.key(0)
    for bits in (2, 3, 4, 5, 6, 8):
        for group_size, rows, dtype in ((32, 1, mx.float32), (64, 7, mx.float16), (128, 70, mx.bfloat16)):
            weight, x = mx.random.normal((2, 70, 256), key=generator), mx.random.normal((3, rows, 256), key=generator)
            packed, scales, biases = mx.quantize(weight, group_size, bits)
            scales, biases, matrices = scales.astype(dtype), biases.astype(dtype), mx.array([1, 0, 1], mx.uint32)
            result = module.quantized_matmul(x, packed, scales, biases, matrices, group_size, bits)
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            exact = x @ mx.dequantize(packed, scales, biases, group_size, bits)[matrices].swapaxes(1, 2)
            error = (mx.abs(result - exact).max() / mx.abs(exact).max()).item()
            if not error < _MAX_ERROR:
                raise PlatformError(f"a product of {rows} rows with {bits} bits has an error of {error:.2g}")
