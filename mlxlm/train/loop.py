"""Trains a run: `train`, a generator of events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

from mlxlm.backend.error_text import describe_error, device_error
from mlxlm.generation import LoadedModel
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.data_check import DataCheck
from mlxlm.train.distributed.process_group import ProcessGroup
from mlxlm.train.events import Event, Failed, Step, TrainingWarning
from mlxlm.train.log import RunLog
from mlxlm.train.memory_limits import memory_limits
from mlxlm.train.run import Run
from mlxlm.train.throttle import PowerPolicy
from mlxlm.train.trackers import Trackers, check_trackers
from mlxlm.train.trainer import Trainer
from mlxlm.utils.errors import CheckpointError, MlxlmError

_ALWAYS_ON = PowerPolicy()


def train(
    run: Run,
    tokenizer: Tokenizer,
    *,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    power: PowerPolicy = _ALWAYS_ON,
    tensorboard: bool = False,
    wandb: str | None = None,
    process_group: ProcessGroup | None = None,
    on_step: Callable[[Step, LoadedModel], None] | None = None,
    micro_batches: int | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Event]:
    """Train `run` to its last step. Yields an Event for everything that happens, after it was logged.

    Runs with the same settings and data have the same weights to the bit on the same machine, however often they were
    interrupted and resumed.

    With `settings.time_limit` the run ends when that has passed by the clock `now`, and its learning rates follow that
    clock, see `Deadline`. So another run with the same time limit has other weights, unless it repeats this one
    (`repeat_run`). A resumed run has the time that was left.

    A checkpoint that the disk has no room for is postponed (CheckpointNotSaved). Before the last one the run pauses
    until there is room, or until `should_stop` returns True; without `should_stop` it may wait forever.

    Args:
        run: The run.
        tokenizer: Its tokenizer, for samples.
        resume: Continue from the last checkpoint, or from the start if there is none yet.
        should_stop: Called after each step, and repeatedly in pauses. If it returns True, the state is saved and the
            last event is Stopped.
        power: When to rest.
        tensorboard: Also write TensorBoard event files.
        wandb: Also send events to this Weights & Biases project.
        process_group: This process (rank 0, which alone writes files) and the others, which call `run_worker`.
        on_step: Called after each step with the model of that step, to generate with it or to measure it. It must not
            change the model, and has no effect on the weights. Its time counts in a time limit.
        micro_batches: Compute the gradients of a batch in as many parts, see `TrainStep`; None: as before a resume.
        now: Clock, in seconds.

    Raises:
        DeviceError: The device has failed or lacks memory. The run can be resumed, in a new process: in this one, other
            results may be lost.
        TrainingError: A loss is not finite or has risen (see `SpikeDetector`), or the run ends worse than a uniform
            distribution: the message names the last good checkpoint, and the failed step is not saved. Or another rank
            is lost: the state is saved first.
        DataError: The data can't be used, or has changed.
        CheckpointError: The run can't be used, or the disk can't be written.
        PlatformError: The library of a tracker is not installed.
    """
    check_trackers(tensorboard, wandb)
    group = process_group or ProcessGroup()
    with run.locked():
        run.check_data()
        if run.checkpoints() and not resume:
            raise CheckpointError(f"{run.path} has been trained already", "resume, or a new run")
        log = RunLog(run.log_file)
        with closing(DataCheck(run.data, group)) as data_check:
            trainer = Trainer(run, tokenizer, log, power, group, data_check, now, micro_batches)
            with closing(Trackers(run, trainer.first, tensorboard, wandb)) as trackers, memory_limits():
                try:
                    for event in trainer.train(lambda: should_stop() or any(group.peer_status("stop")), on_step):
                        for logged in (event, *trackers.record(event)):
                            log.record(logged)
                            yield logged
                except Exception as error:
                    failure = device_error(error) or error
                    message = failure.message if isinstance(failure, MlxlmError) else describe_error(failure)
                    with suppress(MlxlmError):  # report the first error
                        log.record(Failed(trainer.current, message))
                        run.write_plots()
                    if failure is not error:
                        raise failure from error
                    raise
        try:
            run.write_plots()
        except MlxlmError as error:
            warning = TrainingWarning(trainer.current, error.message)
            log.record(warning)
            yield warning
