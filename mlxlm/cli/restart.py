"""Continues a command that trains in a new process, after the device has failed.

In the old process other results may be lost, macOS may refuse its work, and MLX reads the limits of its command buffers
only once (mlx/backend/metal/device.cpp).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from mlxlm.utils.child_python import replace_process
from mlxlm.utils.errors import DeviceError

# Operations and megabytes of inputs after which MLX commits a command buffer, by default 40 or 50 of each on a Mac.
_LIMITS = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")
_DEFAULT_LIMIT, _MIN_LIMIT = 40, 5  # a command buffer of less work is hardly shorter than its longest operation


class Restart(Exception):
    """Raised to end this process and to start another one in its place.

    Args:
        arguments: The command line.
        changes: Environment variables to set.
    """

    def __init__(self, arguments: Sequence[str], changes: Mapping[str, str]):
        self.arguments, self.changes = arguments, dict(changes)

    def run(self) -> NoReturn:
        """Replace this process. It keeps its id, its terminal and its exit code for the shell."""
        sys.stdout.flush()
        replace_process("-m", "mlxlm.cli.main", *self.arguments, changes=self.changes)


def restart_after(
    error: DeviceError, arguments: Sequence[str], *, step: int, micro_batches: int, batch_size: int, progress: bool
) -> Restart | None:
    """Make the next process do less at a time: half as long command buffers, or batches in twice as many parts.

    Parts help against too little memory, and where a single operation takes too long.

    Args:
        error: The error.
        arguments: The command line that continues, without `--micro-batches`.
        step: The step that it continues after.
        micro_batches: Those of this process, see `TrainStep`.
        batch_size: Rows of a batch.
        progress: Whether this process has saved a checkpoint. Then it may help to do the same again.

    Returns:
        The restart, after a message about it; None if nothing is left to try. A run without progress ends after
        log2(batch size) + 3 restarts.
    """
    from mlxlm.cli.render import say  # rich; the main module of the command line imports this one

    limits, parts = {name: int(os.environ.get(name, _DEFAULT_LIMIT)) for name in _LIMITS}, micro_batches
    if not error.out_of_memory and max(limits.values()) > _MIN_LIMIT:
        limits = {name: max(limit // 2, min(limit, _MIN_LIMIT)) for name, limit in limits.items()}
        how = " with " + " ".join(f"{name}={limit}" for name, limit in limits.items())
    elif micro_batches < batch_size:
        parts = min(2 * micro_batches, batch_size)
        how = f" with --micro-batches {parts}"
    elif progress:
        how = ""
    else:
        return None
    say(f"{error.message}; continuing after step {step} in a new process{how}", style="yellow")
    changes = {name: str(limit) for name, limit in limits.items()}
    return Restart([*arguments, "--micro-batches", str(parts)], changes)
