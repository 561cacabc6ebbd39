"""The kernels that MLX compiles with g++ while it evaluates a graph on a CPU.

MLX keeps the files in a folder for later processes and loads them unchecked. By default that is below /tmp, where any
user can create it. g++ writes the files in place without a flush: after a power cut, on a full disk or if the compiler
is killed, a truncated file remains. What can't be loaded is removed, and compiled again.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from mlxlm.utils.errors import PlatformError


def kernel_folder(version: str) -> Path:
    """Where this version of MLX has its kernels (mlx/backend/cpu/compiled.cpp)."""
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # as std::filesystem::temp_directory_path
    temporary = next((os.environ[name] for name in names if os.environ.get(name)), "/tmp")
    return Path(temporary, "mlx", version, "cpu")


def make_private(folder: Path) -> None:
    """Create the folder that MLX loads compiled code from, or make sure that no other user can write to it.

    Raises:
        PlatformError: It belongs to another user.
    """
    with suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
    try:
        found = folder.lstat()
    except OSError:  # it can't be created; MLX says so if it needs it
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        problem = f"{folder}, from which MLX loads the code that it compiles, belongs to another user or is no folder"
        raise PlatformError(problem, "TMPDIR=~/tmp, or another folder of your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # other users may have written to it
        folder.chmod(0o700)
        shutil.rmtree(folder)
        folder.mkdir(0o700)


def remove_old_kernels(folder: Path) -> None:
    """Remove kernels from before this machine booted: a power cut may have damaged them. MLX compiles them again."""
    import psutil

    booted = psutil.boot_time()
    with suppress(OSError):  # another user's folder, or a process that does the same
        for file in folder.glob("*.so"):
            if file.stat().st_mtime < booted:
                file.unlink()


def failed_kernel_path(message: str) -> str | None:
    """The kernel that MLX could not load, from its error message; None for other errors."""
    match = re.match(r"Could not load C\+\+ shared library (/.*?\.so):", message)
    return match and match[1]


def remove_failed_kernel(message: str) -> None:
    """Remove the kernel in MLX's error message, which may be truncated. MLX compiles it again."""
    if path := failed_kernel_path(message):
        with suppress(OSError):
            os.unlink(path)
