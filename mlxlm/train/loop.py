"""The training loop: a generator of events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import count

from mlxlm.backend import platform
from mlxlm.backend.error_text import describe_error
from mlxlm.backend.mlx import ON_CPU, eval_arrays, mx
from mlxlm.data import Batch, TokenDataset, prefetch
from mlxlm.evaluate import evaluate_dataset
from mlxlm.model import Decoder
from mlxlm.report.log_entries import entry_before_start
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.checkpoint_saver import CheckpointSaver
from mlxlm.train.data_check import DataCheck
from mlxlm.train.deadline import Deadline
from mlxlm.train.distributed.heartbeat import RankLostError
from mlxlm.train.distributed.process_group import ProcessGroup
from mlxlm.train.distributed.worker import start_step, start_workers
from mlxlm.train.events import (
    Event,
    Failed,
    Finished,
    Paused,
    Sample,
    Started,
    Step,
    StepsChanged,
    Stopped,
    TrainingWarning,
    Validation,
)
from mlxlm.train.log import RunLog
from mlxlm.train.memory_limits import limit_buffer_cache, memory_limits
from mlxlm.train.plot import plot_run
from mlxlm.train.run import Run
from mlxlm.train.sample import sample_text
from mlxlm.train.spike_detector import SpikeDetector
from mlxlm.train.step import TrainStep
from mlxlm.train.step_batches import StepBatches
from mlxlm.train.step_timer import StepTimer
from mlxlm.train.throttle import PowerPolicy, make_throttle
from mlxlm.train.trackers import Trackers, check_trackers
from mlxlm.train.train_state import TrainState
from mlxlm.utils.errors import CheckpointError, MlxlmError, TrainingError

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
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Event]:
    """Train `run` to its last step. Yields an Event for everything that happens, after it was logged.

    Runs with the same settings and data have the same weights to the bit on the same machine, however often they were
    interrupted and resumed.

    With `settings.time_limit` the run ends when that has passed by the clock `now`, see `Deadline`; each change of its
    length is a StepsChanged event. The weights follow from settings, data and these changes, so another run with the
    same time limit has other weights, unless it repeats this one (`repeat_run`). A resumed run has the time that was
    left.

    A checkpoint that the disk has no room for is postponed (CheckpointNotSaved). Before the last one the run pauses
    until there is room, or until `should_stop` returns True; without `should_stop` it may wait forever.

    Args:
        run: The run.
        tokenizer: Its tokenizer, for samples.
        resume: Continue from the last checkpoint, or from the start if there is none yet.
        should_stop: Asked after each step, and all the time in pauses. If it returns True, the state is saved and the
            last event is Stopped.
        power: When to rest.
        tensorboard: Also write TensorBoard event files.
        wandb: Also send events to this Weights & Biases project.
        process_group: This process (rank 0, which alone writes files) and the others, which call `run_worker`.
        now: Clock, in seconds.

    Raises:
        TrainingError: A loss is not finite or has risen by `settings.spike_threshold`: the message names the last good
            checkpoint, and the failed step is not saved. Or another rank is lost: the state is saved first.
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
        with ExitStack() as stack:
            data_check = stack.enter_context(closing(DataCheck(run.data, group)))
            trainer = Trainer(run, tokenizer, log, power, group, data_check, now)
            trackers = stack.enter_context(closing(Trackers(run, trainer.first, tensorboard, wandb)))
            stack.enter_context(memory_limits())
            try:
                for event in trainer.train(lambda: should_stop() or any(group.peer_status("stop"))):
                    for logged in (event, *trackers.record(event)):
                        log.record(logged)
                        yield logged
            except Exception as error:
                message = error.message if isinstance(error, MlxlmError) else describe_error(error)
                with suppress(MlxlmError):  # report the first error
                    log.record(Failed(trainer.current, message))
                    plot_run(run)
                raise
        try:
            plot_run(run)
        except MlxlmError as error:
            warning = TrainingWarning(trainer.current, error.message)
            log.record(warning)
            yield warning


class Trainer:
    """The loop of `train`, and what it keeps between steps.

    Attributes:
        first: The step that the run continues after; 0 for a new run.
        finished: The last finished step.
        current: The step in progress, or the last finished one.
    """

    def __init__(
        self,
        run: Run,
        tokenizer: Tokenizer,
        log: RunLog,
        power: PowerPolicy,
        group: ProcessGroup,
        data_check: DataCheck,
        now: Callable[[], float],
    ):
        start_time = now()
        mx.reset_peak_memory()
        self.peak_memory = 0  # before MLX's counter was last reset
        self.run, self.settings, self.tokenizer, self.group, self.data_check = (
            run, run.settings, tokenizer, group, data_check,
        )  # fmt: skip

        # Model, optimizer and data
        self.model = Decoder(run.config, dropout=self.settings.dropout)
        self.model.init_weights(self.settings.seed)
        self.step = TrainStep(self.model, self.settings, group)
        checkpoint = run.load_checkpoint(self.step)
        state = TrainState.from_dict(checkpoint)
        self.resumed, self.first = bool(checkpoint), state.step
        self.finished = self.current = self.first
        self.environment_warning = self.step.match_environment(checkpoint.get("environment"))
        self.step_batches = StepBatches(run, group)
        self.validation_data = TokenDataset.open(run.data, "validation")

        # What decides about the next step
        self.best = state.best
        self.spike_detector = SpikeDetector(self.settings.spike_threshold, state.spike_detector)
        self.throttle = make_throttle(power, group.peer_status)
        self.timer = StepTimer(state.seconds)
        forecast = entry_before_start(run.log_file, "forecast", ("steps", "step_seconds", "seconds", "validations"))
        self.deadline = Deadline(self.settings, state if self.resumed else None, forecast, now, start_time)
        saved = TrainState(state.step, steps=self.deadline.steps, elapsed=self.deadline.recorded_elapsed)
        self.saver = CheckpointSaver(run, self.step, log, state=saved)
        # Events of the first step that a stop did not prevent
        self.logged = log.rewind(self.first, validated=not self.resumed or state.validation_loss is not None)

        group.on_rank_lost = self.save_after_hang
        start_workers(run, self.step, self.first, group)

    def train(self, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Run the remaining steps."""
        yield from self.start(should_stop)
        with closing(prefetch(self.step_batches.read, count(self.first + 1))) as batches:
            while self.finished < self.deadline.steps:
                if should_stop():
                    yield from self.save_final(None, should_stop=lambda: False)
                    yield Stopped(self.finished, self.run.path)
                    return
                try:
                    yield self.train_step(next(batches))
                except RankLostError as lost:  # within the step, before it changed anything
                    with suppress(RankLostError):  # while the data of the ranks was still being checked
                        yield from self.save()
                    raise self.rank_lost_error(lost) from None
                if self.finished == self.first + 1:
                    limit_buffer_cache()
                if self.finished < self.deadline.steps:
                    yield from self.rest(should_stop)
                self.deadline.record_time("step")
                if self.deadline.steps_changed(self.finished):
                    yield StepsChanged(self.finished, self.deadline.steps)
                if self.finished == self.deadline.steps or not should_stop():
                    yield from self.validate_and_save(should_stop)
        yield self.finish()

    def start(self, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Before the first step. A resumed run first makes up for a validation that a stop prevented."""
        settings, steps = self.settings, self.deadline.steps
        # Under a causal mask a token attends to half of the sequence, on average.
        flops_per_token = self.run.config.flops_per_token(settings.max_seq_length // 2, training=True)
        yield Started(
            self.first, steps, self.run.config.parameter_count(), settings.tokens_per_step,
            self.step_batches.epoch_at(steps), flops_per_token, self.step_batches.epochs(steps),
            self.step_batches.dropped_fraction, self.step_batches.padding,
        )  # fmt: skip
        self.deadline.record_time(None)  # building and loading the model
        warnings = [*self.throttle.unsupported(), self.environment_warning]
        for warning in filter(None, warnings):
            yield TrainingWarning(self.first, warning)
        if self.resumed and (self.should_validate() or self.should_sample()):
            yield from self.validate_and_save(should_stop)
        if self.first < self.deadline.steps:
            yield from self.rest(should_stop)

    def train_step(self, batches: list[Batch]) -> Step:
        """Compute the next step on all ranks: forward, backward, gradient clipping and update."""
        settings, steps = self.settings, self.deadline.steps
        self.current = self.finished + 1
        self.data_check.raise_if_failed()
        learning_rate = settings.learning_rate_at(self.finished, steps)
        start_step(learning_rate, self.group)
        with self.timer:
            loss, grad_norm = self.step(batches, learning_rate)
            eval_arrays(loss, grad_norm, self.step.state)
        loss, grad_norm = loss.item(), grad_norm.item()
        if problem := self.spike_detector.problem(loss, grad_norm):
            raise self.divergence_error(problem)
        self.finished = self.current
        seconds_left = self.deadline.seconds_left
        if seconds_left is None:
            seconds_left = self.timer.seconds_left(steps - self.finished)
        return Step(
            self.finished, steps, self.finished * settings.tokens_per_step, loss, learning_rate, grad_norm,
            self.timer.rate(settings.tokens_per_step), self.timer.seconds, seconds_left, memory_in_use(),
        )  # fmt: skip

    def rest(self, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Rest or pause, as the power policy says. The time of pauses doesn't count."""
        before = self.throttle.paused
        for event in self.throttle.between_steps(self.finished, should_stop):
            if isinstance(event, Paused):  # which may end with an empty battery
                yield from self.save()
                mx.clear_cache()
            yield event
        self.timer.exclude_pause(self.throttle.paused - before)
        self.deadline.exclude_pause(self.throttle.paused - before)

    def validate_and_save(self, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Do what is due after the last finished step: validation, sample, checkpoint, plots."""
        deadline, validation, sampled = self.deadline, None, self.should_sample()
        if self.should_validate():
            validation = self.validate()
            yield validation
        if sampled:
            yield self.sample()
        if validation or sampled:  # their buffers have other sizes than those of a step, and would be kept beside them
            mx.clear_cache()
        deadline.record_time("validation" if validation else "sample" if sampled else None)
        is_best, before = validation is not None and validation.best, self.saver.saved_step
        due = self.saver.is_due(self.finished, deadline.steps, deadline.recorded_elapsed)
        if is_best or due or before == self.finished:
            self.data_check.wait()
            deadline.record_time(None)  # waiting for the check is no part of the time that a checkpoint takes
            if self.finished == deadline.steps:
                yield from self.save_final(validation, should_stop)
            else:
                yield from self.save(validation)
            deadline.record_time("save" if self.saver.saved_step != before else None)
        if validation and not deadline.plot_time_known:  # plots are the last thing that a run has to do in its time
            with suppress(MlxlmError):
                plot_run(self.run)
            deadline.record_time("plot")

    def should_validate(self) -> bool:
        """Whether a validation is due after the last finished step."""
        return self.deadline.should_validate(self.finished) and not self._is_logged("validation")

    def should_sample(self) -> bool:
        """Whether a sample is due after the last finished step."""
        every, step = self.settings.sample_every, self.finished
        due = every > 0 and step > 0 and (step == self.deadline.steps or step % every == 0)
        return due and not self._is_logged("sample")

    def _is_logged(self, event: str) -> bool:
        return self.finished == self.first and event in self.logged

    def validate(self) -> Validation:
        """Measure the loss on validation data, with the EMA weights if there are any."""
        settings = self.settings
        with self.step.ema_weights():
            result = evaluate_dataset(
                self.model, self.validation_data, settings.max_seq_length, settings.batch_size, settings.eval_tokens,
                document_mask=settings.document_mask, mask_prompt=settings.mask_prompt,
            )  # fmt: skip
        if not math.isfinite(result.loss):
            raise self.divergence_error(f"the validation loss is {result.loss}")
        is_best = self.best is None or result.loss < self.best["loss"]
        if is_best:
            self.best = {"step": self.finished, "loss": result.loss, "bits_per_byte": result.bits_per_byte}
        tokens = self.finished * settings.tokens_per_step
        return Validation(self.finished, tokens, result.loss, result.perplexity, result.bits_per_byte, is_best)

    def sample(self) -> Sample:
        """Generate a sample text, with the EMA weights if there are any."""
        with self.step.ema_weights():
            self.peak_memory = max(self.peak_memory, mx.get_peak_memory())  # generating resets the counter
            text = sample_text(self.model, self.tokenizer, self.run, self.settings)
        return Sample(self.finished, self.settings.sample_prompt, text)

    def state(self, validation: Validation | None = None) -> TrainState:
        """Return the state after the last finished step, for its checkpoint."""
        return TrainState(
            step=self.finished, seconds=self.timer.seconds, **self.deadline.state,
            validation_loss=validation.loss if validation else None, best=self.best,
            healthy=self.spike_detector.healthy, spike_detector=self.spike_detector.state,
        )  # fmt: skip

    def save(self, validation: Validation | None = None) -> Iterator[Event]:
        """Save a checkpoint of the last finished step, if it is not saved yet.

        Raises:
            DataError: The data has changed: the check of the shards is waited for.
        """
        self.data_check.wait()
        if event := self.saver.save(self.state(validation), validation is not None):
            yield event

    def save_final(self, validation: Validation | None, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Save the last checkpoint. Pauses while the disk is full."""
        self.data_check.wait()
        yield from self.saver.save_final(self.state(validation), validation is not None, self.throttle, should_stop)

    def finish(self) -> Finished:
        """Return the event that ends the run."""
        tokens_per_second = self.timer.rate(self.settings.tokens_per_step) if self.finished > self.first else None
        best, peak_memory = self.best or {}, max(self.peak_memory, mx.get_peak_memory())
        return Finished(
            self.deadline.steps, self.timer.seconds, tokens_per_second, best.get("loss"), best.get("bits_per_byte"),
            peak_memory, self.run.path,
        )  # fmt: skip

    def save_after_hang(self, lost: RankLostError) -> TrainingError:
        """Save from another thread, while the thread of `train` hangs in a collective of the current step."""
        with suppress(MlxlmError):
            list(self.save())
        return self.rank_lost_error(lost)

    def rank_lost_error(self, lost: RankLostError) -> TrainingError:
        """Return the error that ends a run whose other rank is lost."""
        saved_step = self.saver.saved_step
        saved = f"step {saved_step} is saved" if saved_step else "nothing is saved yet"
        return TrainingError(f"stopped in step {self.current}: {lost.message}; {saved}", self.run.resume_command)

    def divergence_error(self, problem: str) -> TrainingError:
        """Return the error that ends a run whose loss spiked or is not finite."""
        good = self.run.last_good()
        where = f"the last good checkpoint is {good}" if good else "there is no good checkpoint yet"
        hint = f"a new run with a lower --learning-rate than {self.settings.learning_rate:g} or more --warmup-steps"
        return TrainingError(f"stopped at step {self.current}: {problem}; {where}", hint)


def memory_in_use() -> int:
    """Return bytes: MLX's peak on a GPU, the memory of this process on a CPU."""
    return platform.process_memory() if ON_CPU else mx.get_peak_memory()
