"""The other ranks of a run: they compute gradients where rank 0 says so, and write nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from mlxlm import platform
from mlxlm._mlx import mx
from mlxlm.data import read_ahead
from mlxlm.errors import DataError
from mlxlm.model import Decoder
from mlxlm.train.feed import Feed
from mlxlm.train.ranks import Ranks
from mlxlm.train.run import Run
from mlxlm.train.step import TrainStep

_LOOK_EVERY = 10.0  # seconds: a charger or a fan takes longer to make a difference


def follow(ranks: Ranks, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Take part in the run that rank 0 trains with `train(..., ranks=ranks)`, until that ends.

    Waits, however long rank 0 prepares. The weights come from rank 0; the data must be at the same path. What
    `should_stop` says, and whether this machine is on battery or hot, is told to rank 0, which acts for all.

    Raises DataError if the data is not here or differs, RankLost if a rank is lost.
    """
    ranks.facts = _Facts(should_stop)
    announcement = ranks.share()
    if announcement is None:  # it ended before it began
        return
    run = Run.announced(announcement)
    _check_data(run, ranks.rank)
    settings = run.settings
    model = Decoder(run.config, dropout=settings.dropout)
    step = TrainStep(model, settings, ranks)
    feed = Feed(run, ranks)
    share_state(step, ranks)
    with closing(read_ahead(feed.read, range(announcement["step"] + 1, settings.steps + 1))) as read:
        while (done := ranks.share()) is not None:
            with platform.interrupts_held():
                loss, norm = step(next(read), settings.learning_rate_at(done - 1))
                mx.eval(loss, norm, step.state)


def share_state(step: TrainStep, ranks: Ranks) -> None:
    """Give all ranks the weights and the optimizer of rank 0, to the bit."""
    if ranks.size == 1:
        return
    weights, state = step.weights(), step.save_state()
    received = ranks.broadcast([*weights.values(), *state.values()])
    first, rest = received[: len(weights)], received[len(weights) :]
    step.load(dict(zip(weights, first, strict=True)), dict(zip(state, rest, strict=True)))
    mx.eval(step.state)


def _check_data(run: Run, rank: int) -> None:
    try:
        run.check_data()
    except DataError as error:
        hint = f"the same prepared folder at {run.data} on every machine: a copy, or a shared disk"
        raise DataError(f"rank {rank}: {error.message}", hint) from None


class _Facts:
    """What rank 0 should know of this machine; power and heat are looked at every 10 seconds."""

    def __init__(self, should_stop: Callable[[], bool]):
        self._should_stop, self._looked, self._power = should_stop, -float("inf"), {}

    def __call__(self) -> dict[str, Any]:
        if time.monotonic() - self._looked >= _LOOK_EVERY:
            self._looked = time.monotonic()
            self._power = {"on_battery": platform.on_battery(), "heat": platform.heat()}
        return {"stop": self._should_stop(), **self._power}
