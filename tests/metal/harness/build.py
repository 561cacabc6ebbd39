"""Compiles the runtime and the kernels, and caches the shared objects.

The cache is a folder of this user in the system's temporary directory. File names are hashes of the source, the
compiler and its options.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from .fault import Fault
from .kernel import Kernel
from .metal_rules import violations
from .signature import Parameter, Signature
from .translate import translate

HERE = Path(__file__).parent

# The OpenCL extensions that match Metal, on every processor: half but no double, no global variables outside of the
# constant address space.
EXTENSIONS = "+cl_khr_fp16,+__opencl_c_generic_address_space," + ",".join(
    f"-{name}"
    for name in (
        "cl_khr_fp64",
        "__opencl_c_fp64",
        "__opencl_c_program_scope_global_variables",
        "__opencl_c_device_enqueue",
        "__opencl_c_pipes",
    )
)
DIALECT = shlex.split(f"""
    -x cl -cl-std=CLC++2021 -cl-no-stdinc -Xclang -cl-ext={EXTENSIONS}
    -Wno-unknown-attributes -fno-color-diagnostics -fno-caret-diagnostics
""")
# - half and bfloat are rounded after each operation, as on a GPU.
# - -O1 doesn't vectorize loops, so the counted loads and stores are close to those in the source.
# - Barriers are identified by the address of the call. So all functions are inlined, and calls are never merged.
# - ThreadSanitizer's instrumentation calls our runtime for each load and store, except of local variables.
# - For local arrays and vectors, clang's array-bounds check compares indices with the declared length, also of an array
#   at the end of a struct.
# - A stack overflow reaches the guard page below the stack.
# - Uninitialized local variables are filled with a pattern: NaN for floats, 0xAAAAAAAA for integers.
KERNEL_FLAGS = shlex.split("""
    -O1 -gline-tables-only -fPIC -shared -ffp-contract=off
    -mllvm -enable-tail-merge=0 -fno-optimize-sibling-calls -mllvm -inline-threshold=1000000
    -Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none
    -fsanitize=thread -mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-read-before-write=1
    -fsanitize=array-bounds,integer-divide-by-zero -fno-sanitize-recover=array-bounds,integer-divide-by-zero
    -fstrict-flex-arrays=3
    -fstack-clash-protection -ftrivial-auto-var-init=pattern
""")
RUNTIME_FLAGS = shlex.split("""
    -x c++ -std=c++17 -O2 -g -fPIC -shared -fno-exceptions -fno-rtti -fno-threadsafe-statics -fvisibility=hidden
    -ffp-contract=off
""")
# Metal's own headers: metal_stdlib.h replaces all of them.
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>.*$", re.MULTILINE)


@cache
def clang() -> str:
    """Path of clang 19 or later: METAL_HARNESS_CLANG, or the first one on PATH. Raises Fault if there is none."""
    named = os.environ.get("METAL_HARNESS_CLANG")
    for name in [named] if named else ["clang-19", *(f"clang-{n}" for n in range(30, 19, -1)), "clang"]:
        if (path := shutil.which(name)) and _version(path) >= 19:
            return path
    if named:
        raise Fault(f"METAL_HARNESS_CLANG={named} is not clang 19 or later")
    raise Fault("the Metal harness needs clang 19 or later (try: apt install clang-19 lld-19)")


@cache
def _version(path: str) -> int:
    text = subprocess.run([path, "--version"], capture_output=True, encoding="utf-8").stdout
    found = re.search(r"clang version (\d+)", text)
    return int(found[1]) if found and "Apple" not in text else 0


def available() -> str | None:
    """Return None if kernels can run on this machine, else the reason why not."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"the Metal harness needs Linux on x86-64 or aarch64 (this is {sys.platform} on {platform.machine()})"
    try:
        output = Parameter("device float*", "y", "y", "data")
        compiled(Kernel("trivial", (), ("y",), "y[0] = 1;"), Signature("hx_trivial", (), (output,), ()))
    except (Fault, OSError) as error:  # OSError: clang can't link, or the C library's headers are missing
        return str(error)[:500]
    return None


@cache
def _target() -> tuple[str, ...]:
    """Enable hardware conversion between half and float, which x86-64 processors have since 2013."""
    if platform.machine() != "x86_64":
        return ()
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    return ("-march=x86-64-v3",) if {"avx2", "f16c", "fma", "bmi2"} <= set(flags) else ()


@cache
def _linker() -> tuple[str, ...]:
    version = _version(clang())
    return ("-fuse-ld=lld",) if shutil.which(f"ld.lld-{version}") or shutil.which("ld.lld") else ()


@cache
def symbolizer() -> str | None:
    """Path of a program that finds the source line of an address, or None."""
    names = (f"llvm-symbolizer-{_version(clang())}", "llvm-symbolizer", "addr2line")
    return next(filter(None, map(shutil.which, names)), None)


@cache
def _folder() -> Path:
    """The cache folder of this user."""
    folder = Path(tempfile.gettempdir()) / f"metal-harness-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise Fault(f"{folder} is another user's")
    return folder


@cache
def _key_of_harness() -> bytes:
    files = sorted([*HERE.glob("*.h"), *HERE.glob("runtime/*"), HERE / "metal_rules.py"])
    version = subprocess.run([clang(), "--version"], capture_output=True).stdout
    return b"\0".join([version, *(f.read_bytes() for f in files)])


def _object(text: str, flags: list[str]) -> Path:
    """Path of the cached shared object."""
    command = [clang(), *flags, *_target(), *_linker()]
    key = hashlib.sha256("\0".join([text, *command]).encode() + _key_of_harness()).hexdigest()[:32]
    return _folder() / f"{key}.so"


def _compile(text: str, flags: list[str], target: Path, what: str) -> None:
    with tempfile.TemporaryDirectory(dir=_folder()) as work:
        made = Path(work, "object.so")
        _run([*flags, *_target(), *_linker(), "-", "-o", str(made)], text, what)
        os.replace(made, target)  # atomic: other processes may read it


def _run(arguments: list[str], text: str, what: str) -> str:
    """Run clang and return its output. `what` is named in the error message."""
    done = subprocess.run([clang(), *arguments], input=text, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise Fault(f"{what} does not compile:\n{done.stderr}")
    return done.stdout


@cache
def runtime() -> ctypes.CDLL:
    text = (HERE / "runtime" / "runtime.cpp").read_text(encoding="utf-8")
    flags = [*RUNTIME_FLAGS, f"-I{HERE / 'runtime'}", "-lm"]
    path = _object(text, flags)
    if not path.exists():
        _compile(text, flags, path, "the runtime")
    # RTLD_GLOBAL: kernels link to its symbols.
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


class Compiled:
    """A compiled kernel: `path` of its shared object, and the address of its `entry`."""

    def __init__(self, path: Path):
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self.entry = ctypes.cast(self._library.hx_entry, ctypes.c_void_p)


_compiled: dict[tuple, Compiled] = {}


def compiled(kernel: Kernel, signature: Signature) -> Compiled:
    key = (kernel.header, kernel.source, signature)
    if key not in _compiled:
        runtime()
        text = translated(kernel, signature)
        flags = [*DIALECT, f"-I{HERE}"]
        path = _object(text, [*flags, *KERNEL_FLAGS])
        if not path.exists():
            what = f"{kernel.name} ({signature.name})"
            tree = _run([*flags, "-w", "-fsyntax-only", "-Xclang", "-ast-dump", "-"], text, what)
            if errors := violations(tree):
                raise Fault(f"{kernel.name}: Metal's compiler would reject this:\n" + "\n".join(errors))
            _compile(text, [*flags, *KERNEL_FLAGS], path, what)
        _compiled[key] = Compiled(path)
    return _compiled[key]


def translated(kernel: Kernel, signature: Signature) -> str:
    """The source for clang: our standard library, the translated kernel, and the entry point."""
    text = (
        f'#line 1 "header"\n{kernel.header}\n'
        f'#line 1 "signature"\n{signature.text}'
        f'#line 1 "{kernel.name}.metal"\n{kernel.source}\n}}\n'
    )
    flags = shlex.split("-E -x c++ -std=c++17 -undef -nostdinc -D__METAL__=1 -D__METAL_VERSION__=320 -")
    expanded = _run(flags, _INCLUDE.sub("", text), kernel.name)
    translation = translate(expanded, signature.name)
    return f'#include "metal_stdlib.h"\n{translation}\n#line 1 "entry"\n{signature.entry}'
