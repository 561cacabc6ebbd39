"""The files of MLX's compiler on a CPU: kernels that g++ makes while a graph is evaluated.

MLX keeps them in a folder for all processes to come, and loads one that is there without a look at it. g++ writes them
in place and nobody flushes them: a power cut, a full disk or a compiler that was killed can leave one that is cut
short, with which nothing computes any more.
"""

from __future__ import annotations

import os
import re
import struct
import time
from contextlib import suppress
from pathlib import Path

_LINKING = 10.0  # seconds: a younger file may be in the work of another process


def kernel_folder(version: str) -> Path:
    """Where MLX of this version has its files (mlx/backend/cpu/compiled.cpp)."""
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # of std::filesystem::temp_directory_path
    temporary = next((os.environ[name] for name in names if os.environ.get(name)), "/tmp")
    return Path(temporary, "mlx", version, "cpu")


def remove_corrupt_kernels(where: Path) -> None:
    """Remove the kernels in the folder `where` that may be broken; MLX makes them again.

    Those are all from before this machine started, since what a power cut spoils need not be seen, and those that are
    cut short.
    """
    import psutil

    began, now = psutil.boot_time(), time.time()
    with suppress(OSError):  # there is none yet, or it is another user's
        for file in os.scandir(where):
            if not file.name.endswith(".so"):
                continue
            with suppress(OSError):
                written = file.stat().st_mtime
                if written < began or written < now - _LINKING and not _whole(file.path):
                    os.unlink(file.path)


def failed_kernel_path(message: str) -> str | None:
    """The kernel that MLX says, in this error's message, that it could not load."""
    found = re.match(r"Could not load C\+\+ shared library (/.*?\.so):", message)
    return found and found[1]


def remove_failed_kernel(message: str) -> None:
    """Remove the kernel of this error's message if it is cut short, as by a linker that was killed."""
    path = failed_kernel_path(message)
    with suppress(OSError):
        if path and not _whole(path):
            os.unlink(path)


def _whole(path: str) -> bool:
    """Whether an ELF file of 64 bits has its section headers, which are its end."""
    with open(path, "rb") as file:
        header, size = file.read(64), os.fstat(file.fileno()).st_size
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    (start,), (each, count) = struct.unpack_from("<Q", header, 0x28), struct.unpack_from("<HH", header, 0x3A)
    return start > 0 and start + each * count <= size
