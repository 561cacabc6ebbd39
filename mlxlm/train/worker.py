"""The ranks of a distributed run that follow rank 0, and every rank's share of the data.

Rank 0 sends the run and its weights (`start_workers`), then the learning rate of each step. The other ranks
(`run_worker`) compute their share of the gradients, and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import count

from mlxlm.backend.mlx import eval_arrays, mx
from mlxlm.backend.process_group import ProcessGroup, versions
from mlxlm.data.batches import prefetch
from mlxlm.data.shards import verify_shards
from mlxlm.model import Decoder
from mlxlm.train.objectives import make_loss, open_batches
from mlxlm.train.run import Run
from mlxlm.train.step import TrainStep
from mlxlm.utils.errors import DataError, PlatformError


def start_workers(run: Run, step: TrainStep, finished_steps: int, process_group: ProcessGroup) -> None:
    """On rank 0: send the run, which continues after `finished_steps`, and the weights to the other ranks."""
    if process_group.size > 1:
        message = {**run.worker_config(), "step": finished_steps, "environment": step.environment}
        process_group.broadcast_object({**message, "versions": versions()})
        _broadcast_weights(step, process_group)


def run_worker(process_group: ProcessGroup, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Take part in the run that rank 0 trains with `train(..., process_group=...)`, until that ends.

    Waits for rank 0, however long it prepares. The data must be at the same path as there. If `should_stop` returns
    True, rank 0 stops the run after the current step.

    Raises:
        DataError: The data is not here, or differs.
        PlatformError: Rank 0 has another version of mlxlm or MLX.
        RankLostError: A rank is lost.
    """
    process_group.should_stop = should_stop
    message = process_group.broadcast_object()
    if message is None:  # rank 0 ended before the run began
        return
    if message["versions"] != versions():
        problem = f"the machines differ: rank 0 has {message['versions']}, rank {process_group.rank} has {versions()}"
        raise PlatformError(problem, "the same versions on all of them")
    run = Run.from_worker_config(message)
    try:
        run.check_data()
        verify_shards(run.data)
    except DataError as error:
        hint = f"the same prepared folder at {run.data} on every machine: a copy, or a shared disk"
        raise DataError(f"rank {process_group.rank}: {error.message}", hint) from None
    model, settings = Decoder(run.config, dropout=run.settings.dropout), run.settings
    step = TrainStep(model, settings, process_group, make_loss(settings))
    step.match_environment(message["environment"], message["environment"]["micro_batches"])
    _broadcast_weights(step, process_group)
    with closing(
        prefetch(open_batches(run.data, settings, process_group).read_step, count(message["step"] + 1))
    ) as batches:
        while (learning_rate := process_group.broadcast_object()) is not None:
            eval_arrays(step(next(batches), learning_rate), step.state)


def _broadcast_weights(step: TrainStep, process_group: ProcessGroup) -> None:
    """Give all ranks the weights and the optimizer state of rank 0."""
    weights, state = step.weights(), step.save_state()
    received = process_group.broadcast([*weights.values(), *state.values()])
    first, rest = received[: len(weights)], received[len(weights) :]
    step.load(dict(zip(weights, first, strict=True)), dict(zip(state, rest, strict=True)))
    mx.eval(step.state)
