"""Several processes that train or run one model together, started by `mlx.launch` or `mpirun`.

MLX moves the data: over TCP (ring), MPI, RDMA over Thunderbolt (JACCL) or NCCL. Rank 0 talks to the user and writes the
files; the other ranks, the workers, follow it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mlxlm.backend.mlx import eval_arrays, mx, nn
from mlxlm.utils.errors import MlxlmError, PlatformError

# The environment of a process that mlx.launch or mpirun has started, and its MLX backend
_BACKENDS = {
    "MLX_HOSTFILE": "ring",
    "MLX_IBV_DEVICES": "jaccl",
    "NCCL_HOST_IP": "nccl",
    "OMPI_COMM_WORLD_SIZE": "mpi",
    "PMI_SIZE": "mpi",
}


class RankLostError(MlxlmError):
    """Another process of the group has ended, or can't be reached any more."""


class ProcessGroup:
    """This process and the others that work with it; by itself, a single process.

    Use it as a context. If rank 0 leaves it, other ranks that wait for an object of it get None.

    Args:
        rank: Number of this process, from 0.
        size: Number of processes.
        group: MLX's group of them; None for a single process.

    Attributes:
        mlx_group: MLX's group.
        should_stop: Whether this process has been asked to stop.
        stop_requested: Whether any process had been asked to stop when gradients were last summed.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None):
        self.rank, self.size, self.mlx_group = rank, size, group
        self.should_stop: Callable[[], bool] = lambda: False
        self.stop_requested = False
        self._others_wait = True  # for an object of rank 0, not for a sum

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        if self.rank == 0 and self._others_wait:  # otherwise they fail when this process has ended
            with suppress(RankLostError):
                self.broadcast_object(None)

    def batches_per_process(self, count: int) -> int:
        """Return each rank's share of a step's `count` batches. Raises PlatformError if the shares aren't equal."""
        if count % self.size:
            fitting = [n for n in range(1, count + 1) if count % n == 0]
            raise PlatformError(
                f"a step of this run has {count} batches, which {self.size} processes can't share equally",
                f"{' or '.join(map(str, fitting))} of them",
            )
        return count // self.size

    def all_sum(self, array: mx.array) -> mx.array:
        """Return the sum over all ranks, not evaluated: an error of the connection ends or blocks the process."""
        return array if self.size == 1 else mx.distributed.all_sum(array, group=self.mlx_group)

    def from_rank_0(self, array: mx.array) -> mx.array:
        """Return rank 0's integers or booleans on every rank, not evaluated; see `all_sum`."""
        if self.size == 1:
            return array
        values = array.astype(mx.int32)
        if self.rank > 0:
            [values] = mx.depends([mx.zeros_like(values)], [values])  # the sums before it are those of rank 0
        return self.all_sum(values).astype(array.dtype)

    def average(self, tree: Any) -> Any:
        """Return the means over all ranks of a tree of float32 arrays, the same to the bit on each rank, evaluated.

        Raises:
            RankLostError: A rank is lost. Nothing else has changed.
        """
        if self.size == 1:
            return tree
        eval_arrays(tree)  # here, so that an error of the device isn't taken for a lost rank
        tree = {"tree": tree, "stop": mx.array(float(self.should_stop()))}
        result = self._communicate(lambda: nn.average_gradients(tree, self.mlx_group))
        self.stop_requested = result["stop"].item() > 0
        self._others_wait = True
        return result["tree"]

    def broadcast(self, arrays: list[mx.array]) -> list[mx.array]:
        """Return rank 0's arrays on every rank. All ranks pass arrays of the same shapes and dtypes."""
        if self.size == 1:
            return arrays
        if self.rank > 0:
            arrays = [mx.zeros_like(array) for array in arrays]
        eval_arrays(arrays)
        result = self._communicate(lambda: [self._sum(array) for array in arrays])
        self._others_wait = True
        return result

    def broadcast_object(self, value: Any = None) -> Any:
        """Return rank 0's JSON `value` on every rank. Raises RankLostError."""
        if self.size == 1:
            return value
        content = np.frombuffer(json.dumps(value).encode() if self.rank == 0 else b"", np.uint8)
        size = self._communicate(lambda: self._sum(mx.array([content.size])))
        content = content if self.rank == 0 else np.zeros(size.item(), np.uint8)
        message = self._communicate(lambda: self._sum(mx.array(content)))
        self._others_wait = value is None
        return json.loads(bytes(np.array(message)))

    def _sum(self, array: mx.array) -> mx.array:
        return mx.distributed.all_sum(array, group=self.mlx_group, stream=mx.cpu)  # no work of a GPU waits for minutes

    def _communicate(self, collective: Callable[[], Any]) -> Any:
        try:
            result = collective()
            eval_arrays(result)
        except RuntimeError as error:
            self._others_wait = False
            raise RankLostError(f"another process has ended or can't be reached ({error})") from None
        return result


def versions() -> str:
    """What must be equal on all ranks."""
    version = import_module("mlxlm").__version__
    return f"mlxlm {version} with MLX {mx.__version__} on a {mx.default_device().type.name.upper()}"


def join_process_group() -> ProcessGroup:
    """Join the other processes that `mlx.launch` or `mpirun` has started, if there are any.

    Raises:
        PlatformError: The processes can't meet.
    """
    backend = next((backend for variable, backend in _BACKENDS.items() if os.environ.get(variable)), None)
    if backend is None or (backend == "ring" and not Path(os.environ["MLX_HOSTFILE"]).read_text().strip()):
        return ProcessGroup()  # mlx.launch -n 1 makes an empty hostfile
    try:
        group = mx.distributed.init(strict=True, backend=backend)
    except RuntimeError as error:
        raise PlatformError(
            f"MLX's {backend} backend can't connect the processes of the run: {error}",
            "mlx.launch --backend ring, and addresses at which the machines reach each other",
        ) from None
    return ProcessGroup(group.rank(), group.size(), group)
