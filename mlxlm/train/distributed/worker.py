"""The messages by which rank 0 leads the other ranks of a run, and the ranks that follow.

Rank 0 sends the run and its weights (`start_workers`), then each step before computing it (`start_step`). The other
ranks (`run_worker`) compute their share of the gradients. They write nothing while rank 0 lives; if it is lost, rank 1
saves the last step in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.mlx import eval_arrays, mx
from mlxlm.checkpoint.locations import checkpoint_step
from mlxlm.data import prefetch
from mlxlm.model import Decoder
from mlxlm.train.data_check import DataCheck
from mlxlm.train.distributed.heartbeat import RankLostError
from mlxlm.train.distributed.process_group import ProcessGroup
from mlxlm.train.run import Run
from mlxlm.train.spike_detector import SpikeDetector
from mlxlm.train.step import TrainStep
from mlxlm.train.step_batches import StepBatches
from mlxlm.train.train_state import TrainState
from mlxlm.utils.errors import DataError, MlxlmError

_POWER_CHECK_SECONDS = 10.0  # a charger or a fan takes longer to make a difference


def start_workers(run: Run, step: TrainStep, finished_steps: int, process_group: ProcessGroup) -> None:
    """On rank 0: send the run, which continues after `finished_steps`, and the weights to the other ranks."""
    process_group.broadcast_object({**run.worker_config(), "step": finished_steps, "environment": step.environment})
    _broadcast_weights(step, process_group)


def start_step(state: TrainState, learning_rate: float, data_checked: bool, process_group: ProcessGroup) -> None:
    """On rank 0: start the next step on all ranks. `state`: after the step before; `data_checked`: of rank 0's data."""
    process_group.broadcast_object({"rate": learning_rate, "state": state.to_dict(), "data_checked": data_checked})


def run_worker(process_group: ProcessGroup, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Take part in the run that rank 0 trains with `train(..., process_group=...)`, until that ends.

    Waits for rank 0, however long it prepares. The data must be at the same path as there. Rank 0 is told whether
    `should_stop` returns True and whether this machine is hot or on battery; it acts for all ranks.

    Raises:
        DataError: The data is not here, or differs.
        RankLostError: A rank is lost. If it is rank 0, rank 1 has saved the run, if it can reach its folder.
    """
    process_group.status = status = _Status(should_stop)
    message = process_group.broadcast_object()
    if message is None:  # rank 0 ended before the run began
        return
    run = Run.from_worker_config(message)
    _check_data(run, process_group.rank)
    with closing(DataCheck(run.data, process_group)) as data_check:
        status.data_check = data_check
        _follow(run, process_group, message, data_check)


def _follow(run: Run, process_group: ProcessGroup, message: dict[str, Any], data_check: DataCheck) -> None:
    """Compute each step that rank 0 starts."""
    step = TrainStep(Decoder(run.config, dropout=run.settings.dropout), run.settings, process_group)
    step.match_environment(message["environment"])
    step_batches = StepBatches(run, process_group)
    _broadcast_weights(step, process_group)
    state, rank0_checked = None, False

    def on_rank_lost(lost: RankLostError) -> RankLostError:
        if state is None or not data_check.all_passed(rank0_checked):
            return lost
        return _save_for_rank0(run, step, state, process_group, lost)

    process_group.on_rank_lost = on_rank_lost
    try:
        with closing(prefetch(step_batches.read, count(message["step"] + 1))) as batches:
            while (message := process_group.broadcast_object()) is not None:
                state, rank0_checked = TrainState.from_dict(message["state"]), message["data_checked"]
                loss, grad_norm = step(next(batches), message["rate"])
                eval_arrays(loss, grad_norm, step.state)
                state = _state_after_step(state, run.settings.spike_threshold, loss.item(), grad_norm.item())
    except RankLostError as lost:
        raise process_group.on_rank_lost(lost) from None


def _broadcast_weights(step: TrainStep, process_group: ProcessGroup) -> None:
    """Give all ranks the weights and the optimizer state of rank 0, to the bit."""
    if process_group.size == 1:
        return
    weights, state = step.weights(), step.save_state()
    received = process_group.broadcast([*weights.values(), *state.values()])
    first, rest = received[: len(weights)], received[len(weights) :]
    step.load(dict(zip(weights, first, strict=True)), dict(zip(state, rest, strict=True)))
    mx.eval(step.state)


def _state_after_step(state: TrainState, spike_threshold: float, loss: float, grad_norm: float) -> TrainState | None:
    """Return the state one step later; None after a loss spike, which is never saved."""
    detector = SpikeDetector(spike_threshold, state.spike_detector)
    if detector.problem(loss, grad_norm):
        return None
    return replace(
        state, step=state.step + 1, validation_loss=None, healthy=detector.healthy, spike_detector=detector.state
    )


def _save_for_rank0(
    run: Run, step: TrainStep, state: TrainState, process_group: ProcessGroup, lost: RankLostError
) -> RankLostError:
    """On rank 1: save the run if rank 0 is lost, and return the error to raise.

    All ranks have the same weights. The lock on the run is free if rank 0 is lost, and only then. The run's folder must
    be on this machine or on a shared disk.
    """
    if process_group.rank != 1 or not run.path.is_dir():
        return lost
    try:
        with run.locked():
            if state.step > max(map(checkpoint_step, run.checkpoints()), default=0):
                run.save(step, state)
    except MlxlmError:
        return lost
    return RankLostError(f"{lost.message}; step {state.step} is saved", run.resume_command)


def _check_data(run: Run, rank: int) -> None:
    try:
        run.check_data()
    except DataError as error:
        hint = f"the same prepared folder at {run.data} on every machine: a copy, or a shared disk"
        raise DataError(f"rank {rank}: {error.message}", hint) from None


class _Status:
    """What rank 0 should know of this machine and its data."""

    def __init__(self, should_stop: Callable[[], bool]):
        self._should_stop, self._checked_at, self._power = should_stop, -float("inf"), {}
        self.data_check: DataCheck | None = None

    def __call__(self) -> dict[str, Any]:
        if time.monotonic() - self._checked_at >= _POWER_CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self._power = {"on_battery": platform.on_battery(), "thermal_state": platform.thermal_state()}
        data = self.data_check.status() if self.data_check else {}
        return {"stop": self._should_stop(), **self._power, **data}
