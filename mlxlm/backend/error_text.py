"""A one-line description of any exception, and the errors of a device among them."""

from __future__ import annotations

import shlex

from mlxlm.backend.compiled_kernels import failed_kernel_path
from mlxlm.utils.errors import DeviceError, MlxlmError, one_line

_LESS_MEMORY = "a smaller model, batch or context"
# Part of the text of a failed command buffer on Metal: what happened, and what helps. macOS limits how long a command
# buffer may run while the display is on; reports of mlx#3267 name these two remedies.
_COMMAND_BUFFER_ERRORS = {
    "Insufficient Memory": ("out of memory", _LESS_MEMORY),
    "ErrorImpactingInteractivity": (
        "macOS ended a computation on the GPU that kept the display waiting",
        "let the display turn off, or set AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1",
    ),
    "ErrorTimeout": ("macOS ended a computation on the GPU that took too long", "a smaller batch or context"),
    "ErrorSubmissionsIgnored": ("macOS accepts no more work for the GPU from this process", "start it again"),
}


def describe_error(error: Exception) -> str:
    """Describe any exception in one line of printable characters, with a hint where there is one."""
    if isinstance(error, MlxlmError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"out of memory (try: {_LESS_MEMORY})"
    if isinstance(error, OSError):
        return one_line(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    if failure := device_error(error):
        return str(failure)
    text = one_line(str(error))
    if isinstance(error, RuntimeError) and (kernel := failed_kernel_path(text)):
        return f"a kernel that MLX compiled can't be loaded: {text} (try: rm {shlex.quote(kernel)})"
    return f"internal error: {type(error).__name__}: {text} (try: the same command with --debug, and report it)"


def device_error(error: BaseException) -> DeviceError | None:
    """The DeviceError that an exception of MLX stands for; None for others.

    MLX raises the error of a command buffer once, to whoever evaluates next (mlx/backend/metal/device.cpp). Other
    arrays of that command buffer, and of those that wait for it, then pass for evaluated and hold anything.
    """
    if isinstance(error, DeviceError):
        return error
    if not isinstance(error, RuntimeError):
        return None
    text = one_line(str(error)).rstrip(".")
    if text.startswith("[METAL] Command buffer execution failed"):
        other = "the GPU failed", "again; mlxlm doctor --full checks it"
        known = _COMMAND_BUFFER_ERRORS.items()
        what, hint = next((description for part, description in known if part in text), other)
        return DeviceError(f"{what}: {text}", hint, out_of_memory=hint == _LESS_MEMORY, results_lost=True)
    if "malloc" in text:
        return DeviceError(f"out of memory: {text}", _LESS_MEMORY, out_of_memory=True, results_lost=False)
    return None


def raise_if_results_lost(error: Exception) -> None:
    """Raise an exception of MLX as DeviceError if other results are lost with it."""
    if (failure := device_error(error)) and failure.results_lost:
        raise failure from error
