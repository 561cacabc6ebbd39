"""The messages by which rank 0 leads the other ranks of a run, and the ranks that follow.

Rank 0 sends the run and its weights (`start_workers`), then each step before computing it (`start_step`). The other
ranks (`run_worker`) compute their share of the gradients, and write nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from itertools import count
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.mlx import eval_arrays, mx
from mlxlm.data import prefetch
from mlxlm.model import Decoder
from mlxlm.train.data_check import DataCheck
from mlxlm.train.distributed.process_group import ProcessGroup
from mlxlm.train.run import Run
from mlxlm.train.step import TrainStep
from mlxlm.train.step_batches import StepBatches
from mlxlm.utils.errors import DataError

_POWER_CHECK_SECONDS = 10.0  # a charger or a fan takes longer to make a difference


def start_workers(run: Run, step: TrainStep, finished_steps: int, process_group: ProcessGroup) -> None:
    """On rank 0: send the run, which continues after `finished_steps`, and the weights to the other ranks."""
    process_group.broadcast_object({**run.worker_config(), "step": finished_steps, "environment": step.environment})
    _broadcast_weights(step, process_group)


def start_step(learning_rate: float, process_group: ProcessGroup) -> None:
    """On rank 0: start the next step on all ranks."""
    process_group.broadcast_object(learning_rate)


def run_worker(process_group: ProcessGroup, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Take part in the run that rank 0 trains with `train(..., process_group=...)`, until that ends.

    Waits for rank 0, however long it prepares. The data must be at the same path as there. Rank 0 learns whether
    `should_stop` returns True and whether this machine is hot or on battery; it acts for all ranks.

    Raises:
        DataError: The data is not here, or differs.
        RankLostError: A rank is lost.
    """
    process_group.status = status = _Status(should_stop)
    message = process_group.broadcast_object()
    if message is None:  # rank 0 ended before the run began
        return
    run = Run.from_worker_config(message)
    try:
        run.check_data()
    except DataError as error:
        hint = f"the same prepared folder at {run.data} on every machine: a copy, or a shared disk"
        raise DataError(f"rank {process_group.rank}: {error.message}", hint) from None
    with closing(DataCheck(run.data, process_group)) as status.data_check:
        step = TrainStep(Decoder(run.config, dropout=run.settings.dropout), run.settings, process_group)
        step.match_environment(message["environment"], message["environment"]["micro_batches"])
        step_batches = StepBatches(run, process_group)
        _broadcast_weights(step, process_group)
        with closing(prefetch(step_batches.read, count(message["step"] + 1))) as batches:
            while (learning_rate := process_group.broadcast_object()) is not None:
                eval_arrays(step(next(batches), learning_rate), step.state)


def _broadcast_weights(step: TrainStep, process_group: ProcessGroup) -> None:
    """Give all ranks the weights and the optimizer state of rank 0."""
    if process_group.size == 1:
        return
    weights, state = step.weights(), step.save_state()
    received = process_group.broadcast([*weights.values(), *state.values()])
    first, rest = received[: len(weights)], received[len(weights) :]
    step.load(dict(zip(weights, first, strict=True)), dict(zip(state, rest, strict=True)))
    mx.eval(step.state)


class _Status:
    """What rank 0 should know of this machine and its data."""

    def __init__(self, should_stop: Callable[[], bool]):
        self._should_stop, self._checked_at = should_stop, -float("inf")
        self._power: dict[str, Any] = {}
        self.data_check: DataCheck | None = None

    def __call__(self) -> dict[str, Any]:
        if time.monotonic() - self._checked_at >= _POWER_CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self._power = {"on_battery": platform.on_battery(), "thermal_state": platform.thermal_state()}
        data = self.data_check.status() if self.data_check else {}
        return {"stop": self._should_stop(), **self._power, **data}
