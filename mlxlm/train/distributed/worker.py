"""The other ranks of a run: they compute gradients when rank 0 says so, and write nothing while it lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
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
from mlxlm.utils.errors import DataError, MlxlmError

_LOOK_EVERY = 10.0  # seconds: a charger or a fan takes longer to make a difference


def run_worker(process_group: ProcessGroup, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Take part in the run that rank 0 trains with `train(..., ranks=ranks)`, until that ends.

    Waits, however long rank 0 prepares. The weights come from rank 0; the data must be at the same path. What
    `should_stop` says, and whether this machine is on battery or hot, is told to rank 0, which acts for all.

    Raises DataError if the data is not here or differs, RankLost if a rank is lost. Where that is rank 0, rank 1 saves
    the run, if its folder can be reached.
    """
    process_group.status = status = _Facts(should_stop)
    worker_config = process_group.broadcast_object()
    if worker_config is None:  # it ended before it began
        return
    run = Run.from_worker_config(worker_config)
    _check_data(run, process_group.rank)
    with closing(DataCheck(run.data, process_group)) as check:
        status.check = check
        _follow(run, process_group, worker_config, check)


def _follow(run: Run, process_group: ProcessGroup, worker_config: dict[str, Any], check: DataCheck) -> None:
    settings = run.settings
    model = Decoder(run.config, dropout=settings.dropout)
    step = TrainStep(model, settings, process_group)
    step.match_environment(worker_config["environment"])
    step_batches = StepBatches(run, process_group)
    broadcast_state(step, process_group)
    state, checked = None, False

    def rescued(lost: RankLostError) -> RankLostError:
        return _inherited(run, step, state, process_group, lost) if check.all_passed(checked) else lost

    process_group.on_rank_lost = rescued
    try:
        with closing(prefetch(step_batches.read, count(worker_config["step"] + 1))) as read:
            while (order := process_group.broadcast_object()) is not None:
                state, checked = order["state"], order["checked"]
                loss, norm = step(next(read), order["rate"])
                eval_arrays(loss, norm, step.state)
                state = _after_step(state, settings.spike_threshold, loss.item(), norm.item())
    except RankLostError as lost:
        raise process_group.on_rank_lost(lost) from None


def broadcast_state(step: TrainStep, process_group: ProcessGroup) -> None:
    """Give all ranks the weights and the optimizer of rank 0, to the bit."""
    if process_group.size == 1:
        return
    weights, state = step.weights(), step.save_state()
    received = process_group.broadcast([*weights.values(), *state.values()])
    first, rest = received[: len(weights)], received[len(weights) :]
    step.load(dict(zip(weights, first, strict=True)), dict(zip(state, rest, strict=True)))
    mx.eval(step.state)


def _after_step(state: dict[str, Any], spike_threshold: float, loss: float, norm: float) -> dict[str, Any] | None:
    """What a checkpoint says one step later; None after a step that went wrong."""
    spike_detector = SpikeDetector(spike_threshold, state["spike_detector"])
    if spike_detector.problem(loss, norm):
        return None
    changes = {"validation_loss": None, "healthy": spike_detector.healthy, "spike_detector": spike_detector.state}
    return {**state, "step": state["step"] + 1, **changes}


def _inherited(
    run: Run, step: TrainStep, state: dict[str, Any] | None, process_group: ProcessGroup, lost: RankLostError
) -> RankLostError:
    """What rank 1 has to say when a rank is lost. If that is rank 0, whose lock on the run is free then, and the run's
    folder is on this machine or a disk that both share, rank 1 saves in its place: all ranks have the same weights."""
    if process_group.rank != 1 or not state or not run.path.is_dir():
        return lost
    try:
        with run.locked():
            if state["step"] > max(map(checkpoint_step, run.checkpoints()), default=0):
                run.save(step, state)
    except MlxlmError:
        return lost
    return RankLostError(f"{lost.message}; step {state['step']} is saved", run.resume_command)


def _check_data(run: Run, rank: int) -> None:
    try:
        run.check_data()
    except DataError as error:
        hint = f"the same prepared folder at {run.data} on every machine: a copy, or a shared disk"
        raise DataError(f"rank {rank}: {error.message}", hint) from None


class _Facts:
    """What rank 0 should know of this machine and its data; power and heat are looked at every 10 seconds."""

    def __init__(self, should_stop: Callable[[], bool]):
        self._should_stop, self._looked, self._power = should_stop, -float("inf"), {}
        self.check: DataCheck | None = None

    def __call__(self) -> dict[str, Any]:
        if time.monotonic() - self._looked >= _LOOK_EVERY:
            self._looked = time.monotonic()
            self._power = {"on_battery": platform.on_battery(), "thermal_state": platform.thermal_state()}
        checked = self.check.status() if self.check else {}
        return {"stop": self._should_stop(), **self._power, **checked}
