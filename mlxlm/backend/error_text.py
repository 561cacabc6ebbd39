"""A one-line description of any exception."""

from __future__ import annotations

import shlex

from mlxlm.backend.compiled_kernels import failed_kernel_path
from mlxlm.utils.errors import MlxlmError, one_line


def describe_error(error: Exception) -> str:
    """Describe any exception in one line of printable characters, with a hint where there is one."""
    if isinstance(error, MlxlmError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory (try: a smaller model, batch or context)"
    if isinstance(error, OSError):
        return one_line(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    text = one_line(str(error))
    if isinstance(error, RuntimeError) and ("malloc" in text or "Insufficient Memory" in text):
        return f"out of memory: {text} (try: a smaller model, batch or context)"
    if isinstance(error, RuntimeError) and (kernel := failed_kernel_path(text)):
        return f"a kernel that MLX compiled can't be loaded: {text} (try: rm {shlex.quote(kernel)})"
    return f"internal error: {type(error).__name__}: {text} (try: the same command with --debug, and report it)"
