"""The parts of a model that several processes share, run by threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.checkpoint import Checkpoint
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.checkpoint.tensor_parallel import split_checkpoint
from mlxlm.model import Decoder


class _ThreadGroup(ProcessGroup):
    """A rank whose sums are exchanged in memory."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, values: list[Any]):
        super().__init__(rank, size)
        self._barrier, self._values, self.num_sums = barrier, values, 0

    def all_sum(self, array: mx.array) -> mx.array:
        mx.eval(array)
        self._values[self.rank], self.num_sums = array, self.num_sums + 1
        self._barrier.wait(30)
        total = sum(self._values[1:], start=self._values[0])
        mx.eval(total)
        self._barrier.wait(30)
        return total


def run_split(checkpoint: Checkpoint, size: int, use: Callable[[Decoder], Any]) -> list[Any]:
    """Load each part of a checkpoint in a thread, and return what `use` returns for it."""
    barrier, values = threading.Barrier(size), [None] * size

    def run(rank: int) -> Any:
        try:
            model, _ = load_checkpoint(split_checkpoint(checkpoint, rank, size))
            model.split(_ThreadGroup(rank, size, barrier, values))
            return use(model)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
