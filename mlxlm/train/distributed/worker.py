"""The other ranks of a run: they compute gradients when rank 0 says so, and write nothing while it lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from itertools import count
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.mlx import compute, mx
from mlxlm.checkpoint.locations import step_of
from mlxlm.data import read_ahead
from mlxlm.model import Decoder
from mlxlm.train.data_check import DataCheck
from mlxlm.train.distributed.heartbeat import RankLost
from mlxlm.train.distributed.process_group import Ranks
from mlxlm.train.run import Run
from mlxlm.train.spike_detector import SpikeGuard
from mlxlm.train.step import TrainStep
from mlxlm.train.step_batches import Feed
from mlxlm.utils.errors import DataError, MlxlmError

_LOOK_EVERY = 10.0  # seconds: a charger or a fan takes longer to make a difference


def follow(ranks: Ranks, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Take part in the run that rank 0 trains with `train(..., ranks=ranks)`, until that ends.

    Waits, however long rank 0 prepares. The weights come from rank 0; the data must be at the same path. What
    `should_stop` says, and whether this machine is on battery or hot, is told to rank 0, which acts for all.

    Raises DataError if the data is not here or differs, RankLost if a rank is lost. Where that is rank 0, rank 1 saves
    the run, if its folder can be reached.
    """
    ranks.facts = facts = _Facts(should_stop)
    announcement = ranks.share()
    if announcement is None:  # it ended before it began
        return
    run = Run.announced(announcement)
    _check_data(run, ranks.rank)
    with closing(DataCheck(run.data, ranks)) as check:
        facts.check = check
        _follow(run, ranks, announcement, check)


def _follow(run: Run, ranks: Ranks, announcement: dict[str, Any], check: DataCheck) -> None:
    settings = run.settings
    model = Decoder(run.config, dropout=settings.dropout)
    step = TrainStep(model, settings, ranks)
    step.go_on_as(announcement["machine"])
    feed = Feed(run, ranks)
    share_state(step, ranks)
    state, checked = None, False

    def rescued(lost: RankLost) -> RankLost:
        return _inherited(run, step, state, ranks, lost) if check.all_passed(checked) else lost

    ranks.rescue = rescued
    try:
        with closing(read_ahead(feed.read, count(announcement["step"] + 1))) as read:
            while (order := ranks.share()) is not None:
                state, checked = order["state"], order["checked"]
                loss, norm = step(next(read), order["rate"])
                compute(loss, norm, step.state)
                state = _after_step(state, settings.spike, loss.item(), norm.item())
    except RankLost as lost:
        raise ranks.rescue(lost) from None


def share_state(step: TrainStep, ranks: Ranks) -> None:
    """Give all ranks the weights and the optimizer of rank 0, to the bit."""
    if ranks.size == 1:
        return
    weights, state = step.weights(), step.save_state()
    received = ranks.broadcast([*weights.values(), *state.values()])
    first, rest = received[: len(weights)], received[len(weights) :]
    step.load(dict(zip(weights, first, strict=True)), dict(zip(state, rest, strict=True)))
    mx.eval(step.state)


def _after_step(state: dict[str, Any], spike: float, loss: float, norm: float) -> dict[str, Any] | None:
    """What a checkpoint says one step later; None after a step that went wrong."""
    guard = SpikeGuard(spike, state["guard"])
    if guard.problem(loss, norm):
        return None
    changes = {"validation_loss": None, "healthy": guard.healthy, "guard": guard.state}
    return {**state, "step": state["step"] + 1, **changes}


def _inherited(run: Run, step: TrainStep, state: dict[str, Any] | None, ranks: Ranks, lost: RankLost) -> RankLost:
    """What rank 1 has to say when a rank is lost. If that is rank 0, whose lock on the run is free then, and the run's
    folder is on this machine or a disk that both share, rank 1 saves in its place: all ranks have the same weights."""
    if ranks.rank != 1 or not state or not run.path.is_dir():
        return lost
    try:
        with run.locked():
            if state["step"] > max(map(step_of, run.checkpoints()), default=0):
                run.save(step, state)
    except MlxlmError:
        return lost
    return RankLost(f"{lost.message}; step {state['step']} is saved", run.resume_command)


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
            self._power = {"on_battery": platform.on_battery(), "heat": platform.heat()}
        checked = self.check.facts() if self.check else {}
        return {"stop": self._should_stop(), **self._power, **checked}
