"""The parts of a model that several processes share, in threads of this process."""

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


class ThreadGroup(ProcessGroup):
    """A rank that exchanges arrays and objects with others in memory. Its sums can't be compiled."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, values: list[Any]):
        super().__init__(rank, size)
        self.barrier, self._values, self.num_sums = barrier, values, 0

    def all_sum(self, array: mx.array) -> mx.array:
        mx.eval(array)
        self.num_sums += 1
        arrays = self._exchange(array)
        total = sum(arrays[1:], start=arrays[0])
        mx.eval(total)
        return total

    def broadcast_object(self, value: Any = None) -> Any:
        return self._exchange(value)[0]

    def _exchange(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self.barrier.wait(30)
        values = list(self._values)
        self.barrier.wait(30)
        return values


class MlxGroup:
    """What mlx_lm asks of MLX's group of the same ranks."""

    def __init__(self, ranks: ThreadGroup):
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks.size

    def rank(self) -> int:
        return self.ranks.rank


def thread_groups(size: int) -> list[ThreadGroup]:
    barrier, values = threading.Barrier(size), [None] * size
    return [ThreadGroup(rank, size, barrier, values) for rank in range(size)]


def run_split(opened: Callable[[], Checkpoint], size: int, use: Callable[[Decoder], Any]) -> list[Any]:
    """Load each part of the checkpoint that `opened` returns in a thread, and return what `use` returns for it."""

    def run(group: ThreadGroup) -> Any:
        try:
            model, _ = load_checkpoint(split_checkpoint(opened(), group.rank, size))
            model.split(group, opened().config)
            return use(model)
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, group) for group in thread_groups(size)]]
