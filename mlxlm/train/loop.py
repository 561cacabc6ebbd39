"""The training loop: a generator of events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import count
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.error_text import describe_error
from mlxlm.backend.mlx import ON_CPU, eval_arrays, mx
from mlxlm.data import Batch, TokenDataset, prefetch
from mlxlm.evaluate import evaluate
from mlxlm.model import Decoder
from mlxlm.report.log_entries import entry_before_start
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.checkpoint_saver import CheckpointSaver, save_final_checkpoint
from mlxlm.train.data_check import DataCheck
from mlxlm.train.deadline import Deadline
from mlxlm.train.distributed.process_group import ProcessGroup, RankLostError
from mlxlm.train.distributed.worker import broadcast_state
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
)  # fmt: skip
from mlxlm.train.log import RunLog
from mlxlm.train.memory_limits import limit_buffer_cache, memory_limits
from mlxlm.train.plot import plot_run
from mlxlm.train.run import Run
from mlxlm.train.sample import sample_text
from mlxlm.train.spike_detector import SpikeDetector
from mlxlm.train.step import TrainStep
from mlxlm.train.step_batches import StepBatches
from mlxlm.train.step_timer import StepTimer
from mlxlm.train.throttle import PowerPolicy, Throttle
from mlxlm.train.trackers import Trackers, check_trackers
from mlxlm.utils.errors import CheckpointError, MlxlmError, TrainingError

_ALWAYS = PowerPolicy()  # works all the time


def train(
    run: Run,
    tokenizer: Tokenizer,
    *,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    power: PowerPolicy = _ALWAYS,
    tensorboard: bool = False,
    wandb: str | None = None,
    process_group: ProcessGroup | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Event]:
    """Train `run` to its last step, yielding an Event for everything that happens, which the log has by then.

    Runs with the same settings and data have the same weights to the bit on the same machine, however often
    they were interrupted and resumed. `resume` continues from the last checkpoint, or from the start if
    there is none yet. `should_stop` is asked after each step and all the time in pauses; if it says yes, the state
    is saved and the generator ends with Stopped. `power` says when to rest. `tensorboard` and `wandb`, a project, say
    where else the events go: see `trackers`. `process_group`: where other processes take part by `run_worker`, this one's; it is
    rank 0, and alone writes files.

    With `settings.time_limit` the run ends when that is over by the clock `now`, see `Deadline`: each change of its
    length is a Replanned. Its weights follow from settings, data and these, which the clock alone decides: another such
    run has others, unless it repeats this one (`repeat_run`). A resumed one has the time that was left.

    A checkpoint that the disk has no room for is put off (NotSaved). The one that a run ends with is waited for: the
    run pauses until there is room, or until `should_stop` says yes; without a `should_stop` it may wait for ever.

    Raises TrainingError, naming the last good checkpoint, when a loss is not finite or has risen by
    `settings.spike_threshold`; the step that went wrong is never saved. Raises DataError or CheckpointError for data
    or a run that can't be used, PlatformError for a tracker's library that is missing. When another rank is lost, what
    was trained is saved, then a TrainingError says so.
    """
    check_trackers(tensorboard, wandb)
    process_group = process_group or ProcessGroup.single_process()
    with run.locked():
        run.check_data()
        if run.checkpoints() and not resume:
            raise CheckpointError(f"{run.path} has been trained already", "resume, or a new run")
        log = RunLog(run.log_file)
        with ExitStack() as stack:
            check = stack.enter_context(closing(DataCheck(run.data, process_group)))
            loop = _Loop(run, tokenizer, log, _pace(power, process_group), process_group, check, now)
            trackers = stack.enter_context(closing(Trackers(run, loop.first, tensorboard, wandb)))
            stack.enter_context(memory_limits())
            try:
                for event in loop.events(lambda: should_stop() or any(process_group.peer_status("stop"))):
                    for told in (event, *trackers.record(event)):
                        log.record(told)
                        yield told
            except Exception as error:
                message = error.message if isinstance(error, MlxlmError) else describe_error(error)
                with suppress(MlxlmError):  # the first error counts
                    log.record(Failed(loop.at, message))
                    plot_run(run)
                raise
        try:
            plot_run(run)
        except MlxlmError as error:
            warned = TrainingWarning(loop.at, error.message)
            log.record(warned)
            yield warned


class _Loop:
    """The state of a run between its steps."""

    def __init__(
        self,
        run: Run,
        tokenizer: Tokenizer,
        log: RunLog,
        throttle: Throttle,
        process_group: ProcessGroup,
        check: DataCheck,
        now: Callable[[], float],
    ):
        self.run, self.tokenizer, self.settings, self.throttle, self.process_group = (
            run,
            tokenizer,
            run.settings,
            throttle,
            process_group,
        )
        self.data_check = check
        start_time = now()
        mx.reset_peak_memory()
        self.peak = 0
        self.model = Decoder(run.config, dropout=self.settings.dropout)
        self.model.init_weights(self.settings.seed)
        self.step = TrainStep(self.model, self.settings, process_group)
        state = run.load_checkpoint(self.step)
        self.unlike = self.step.match_environment(state.get("environment"))
        self.restored, self.first = bool(state), state.get("step", 0)
        self.at = self.first  # the step that is done, or in work
        self.spike_detector = SpikeDetector(self.settings.spike_threshold, state.get("spike_detector"))
        self.best: dict | None = state.get("best")
        self.spent: float = state.get("seconds", 0.0)
        forecast = entry_before_start(run.log_file, "forecast", ("steps", "step_seconds", "seconds", "validations"))
        self.deadline = Deadline(self.settings, state, forecast, now, start_time)
        self.step_batches = StepBatches(run, process_group)
        self.held_out = TokenDataset.open(run.data, "validation")
        self.step_timer = StepTimer()
        self.saver = CheckpointSaver(run, self.step, log)
        self.saver.saved = self.first
        self.planned = self.deadline.steps  # steps, as the last checkpoint has them
        self.saved_at = self.deadline.recorded_elapsed  # when a checkpoint was last written, or could not be
        validated = state.get("validation_loss", 0) is not None
        self.had = log.rewind(self.first, validated)  # of the step that is saved: a stop may have come between
        process_group.on_rank_lost = self.rescued
        process_group.broadcast_object(
            {**run.worker_config(), "step": self.first, "environment": self.step.environment}
        )
        broadcast_state(self.step, process_group)

    def events(self, should_stop: Callable[[], bool]) -> Iterator[Event]:
        settings = self.settings
        yield self.started()
        self.deadline.record_time(None)  # the model was built and loaded
        repacked = None
        if self.restored and settings.packing == "best-fit" and self.run.version < 2:
            repacked = "an earlier version of mlxlm packed this run's rows in another way: they differ from here on"
        for warning in (*self.throttle.unsupported(), *filter(None, [self.unlike, repacked])):
            yield TrainingWarning(self.first, warning)
        if self.restored and (self.should_validate(self.first) or self.samples(self.first)):
            yield from self.look_after(self.first, should_stop)
        if self.first < self.deadline.steps:
            yield from self.rest(self.first, should_stop)
        with closing(prefetch(self.step_batches.read, count(self.first + 1))) as read:
            while self.at < self.deadline.steps:
                if should_stop():
                    yield from self.save(self.at, None, until=lambda: False)
                    yield Stopped(self.at, self.run.path)
                    return
                done = self.at + 1
                try:
                    yield self.advance(done, next(read))
                except RankLostError as lost:  # in the middle of the step, which has changed nothing yet
                    with suppress(RankLostError):  # while the ranks' data was still being checked
                        yield from self.save(done - 1, None)
                    raise self.deserted(lost) from None
                if done == self.first + 1:
                    limit_buffer_cache()
                if done < self.deadline.steps:
                    yield from self.rest(done, should_stop)
                self.deadline.record_time("step")
                if self.deadline.steps_changed(done):
                    yield StepsChanged(done, self.deadline.steps)
                if done == self.deadline.steps or not should_stop():
                    yield from self.look_after(done, should_stop)
        seconds = self.spent + self.step_timer.seconds
        rate = self.step_timer.rate(settings.tokens_per_step) if self.at > self.first else None
        best = self.best or {}
        bits, peak = best.get("bits_per_byte"), max(self.peak, mx.get_peak_memory())
        yield Finished(self.deadline.steps, seconds, rate, best.get("loss"), bits, peak, self.run.path)

    def started(self) -> Started:
        settings, steps = self.settings, self.deadline.steps
        epochs, by_source = self.step_batches.epoch_at(steps), self.step_batches.epochs(steps)
        # Under a causal mask a token sees half of the sequence, on average.
        flops = self.run.config.flops_per_token(settings.max_seq_length // 2, training=True)
        return Started(
            self.first, steps, self.model.num_parameters(), settings.tokens_per_step, epochs, flops,
            by_source, self.step_batches.dropped_fraction, self.step_batches.padding,
        )  # fmt: skip

    def rest(self, done: int, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """What the power asks for between two steps."""
        before = self.throttle.paused
        for event in self.throttle.between_steps(done, should_stop):
            if isinstance(event, Paused):  # it may end with an empty battery
                yield from self.save(done, None)
                mx.clear_cache()
            yield event
        self.step_timer.exclude_pause(self.throttle.paused - before)
        self.deadline.exclude_pause(self.throttle.paused - before)

    def look_after(self, done: int, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """What is due after step `done`: validation, sample, checkpoint."""
        settings, found = self.settings, None
        if self.should_validate(done):
            found = self.validate(done)
            yield found
        if sampled := self.samples(done):
            yield self.sample(done)
        if sampled or found:  # their buffers are of other sizes than a step's, and would be kept beside those
            mx.clear_cache()
        self.deadline.record_time("check" if found else "sample" if sampled else None)
        best = found is not None and found.best
        due = self.due(done, settings.save_every) or self.time_to_save or self.saver.retry_due
        if best or due or self.saver.saved == done:
            self.data_check.wait()
            self.deadline.record_time(None)  # that is no part of what a checkpoint takes
            before = self.saver.saved
            yield from self.save(done, found, until=should_stop if done == self.deadline.steps else None)
            self.deadline.record_time("save" if self.saver.saved != before else None)
        if found and not self.deadline.plot_time_known:  # they are the last thing in the time of a run
            with suppress(MlxlmError):
                plot_run(self.run)
            self.deadline.record_time("pictures")

    @property
    def time_to_save(self) -> bool:
        """Whether `save_minutes` are over since the last checkpoint. Pauses don't count: they begin with one."""
        limit = 60 * self.settings.save_minutes
        return limit > 0 and self.deadline.recorded_elapsed - self.saved_at >= limit

    def should_validate(self, done: int) -> bool:
        return self.deadline.should_validate(done) and (done > self.first or "validation" not in self.had)

    def samples(self, done: int) -> bool:
        every = self.settings.sample_every
        return every > 0 and done > 0 and self.due(done, every) and (done > self.first or "sample" not in self.had)

    def due(self, done: int, every: int) -> bool:
        return done == self.deadline.steps or (every > 0 and done % every == 0)

    def advance(self, done: int, batches: list[Batch]) -> Step:
        """Step number `done`, from 1."""
        settings, self.at = self.settings, done
        self.data_check.raise_if_failed()
        rate = settings.learning_rate_at(done - 1, self.deadline.steps)
        # The others take part in this step.
        checked = self.data_check.passed
        self.process_group.broadcast_object(
            {"step": done, "rate": rate, "state": self.state_after(done - 1), "checked": checked}
        )
        with self.step_timer:
            loss, norm = self.step(batches, rate)
            eval_arrays(loss, norm, self.step.state)
        loss, norm = loss.item(), norm.item()
        if problem := self.spike_detector.problem(loss, norm):
            raise self.failure(done, problem)
        left = self.deadline.seconds_left
        return Step(
            done, self.deadline.steps, done * settings.tokens_per_step, loss, rate, norm,
            self.step_timer.rate(settings.tokens_per_step), self.spent + self.step_timer.seconds,
            self.step_timer.left(self.deadline.steps - done) if left is None else left, memory_in_use(),
        )  # fmt: skip

    def validate(self, done: int) -> Validation:
        settings = self.settings
        with self.step.ema_weights():
            found = evaluate(
                self.model, self.held_out, settings.max_seq_length, settings.batch_size, settings.eval_tokens,
                document_mask=settings.document_mask, mask_prompt=settings.mask_prompt,
            )  # fmt: skip
        if not math.isfinite(found.loss):
            raise self.failure(done, f"the validation loss is {found.loss}")
        better = self.best is None or found.loss < self.best["loss"]
        if better:
            self.best = {"step": done, "loss": found.loss, "bits_per_byte": found.bits_per_byte}
        tokens = done * settings.tokens_per_step
        return Validation(done, tokens, found.loss, found.perplexity, found.bits_per_byte, better)

    def sample(self, done: int) -> Sample:
        with self.step.ema_weights():
            self.peak = max(self.peak, mx.get_peak_memory())  # generating begins a peak of its own
            text = sample_text(self.model, self.tokenizer, self.run, self.settings)
        return Sample(done, self.settings.sample_prompt, text)

    def save(self, done: int, found: Validation | None, until: Callable[[], bool] | None = None) -> Iterator[Event]:
        """Save the state after step `done`, if it is not saved yet. With `until`, it must be saved: where the disk
        does not take it, pause until it does, or until that says yes.

        Raises DataError where it was learned from changed data: the check of the shards is waited for."""
        self.data_check.wait()
        state = self.state_after(done, found)
        if self.saver.saved == done:
            validated = ("validation_loss", "best") if found else ()
            if found or self.planned != self.deadline.steps:  # replanned after it was saved in a pause
                self.run.update_state(done, {name: state[name] for name in (*validated, *self.deadline.state)})
                self.planned = self.deadline.steps
            return
        self.planned = self.deadline.steps
        if until is None:
            yield self.saver.save(state)
        else:
            yield from save_final_checkpoint(self.saver, self.throttle, state, until)
        self.saved_at = self.deadline.recorded_elapsed

    def state_after(self, done: int, found: Validation | None = None) -> dict[str, Any]:
        """What a checkpoint says beside its arrays."""
        return {
            "step": done,
            "seconds": self.spent + self.step_timer.seconds,
            **self.deadline.state,
            "validation_loss": found and found.loss,
            "best": self.best,
            "healthy": self.spike_detector.healthy,
            "spike_detector": self.spike_detector.state,
        }

    def rescued(self, lost: RankLostError) -> TrainingError:
        """As `events` does, from another thread, while the one of `events` waits for ever."""
        with suppress(MlxlmError):
            list(self.save(self.at - 1, None))
        return self.deserted(lost)

    def deserted(self, lost: RankLostError) -> TrainingError:
        saved = f"step {self.saver.saved} is saved" if self.saver.saved else "nothing is saved yet"
        problem = f"stopped in step {self.at}: {lost.message}; {saved}"
        return TrainingError(problem, self.run.resume_command)

    def failure(self, done: int, problem: str) -> TrainingError:
        good = self.run.last_good()
        where = f"the last good checkpoint is {good}" if good else "there is no good checkpoint yet"
        hint = f"a new run with a lower --learning-rate than {self.settings.learning_rate:g} or more --warmup-steps"
        return TrainingError(f"stopped at step {done}: {problem}; {where}", hint)


def _pace(power: PowerPolicy, process_group: ProcessGroup) -> Throttle:
    """One for all ranks: what one machine asks for, all do."""

    def on_battery() -> bool | None:
        known = [x for x in (platform.on_battery(), *process_group.peer_status("on_battery")) if x is not None]
        return any(known) if known else None

    def thermal_state() -> str | None:
        known = [platform.thermal_state(), *process_group.peer_status("thermal_state")]
        return next((level for level in ("hot", "warm", "cool") if level in known), None)

    return Throttle(power, on_battery=on_battery, thermal_state=thermal_state)


def memory_in_use() -> int:
    """Bytes: MLX's peak on a GPU, this process's on a CPU."""
    return platform.process_memory() if ON_CPU else mx.get_peak_memory()
