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
from mlxlm.backend.mlx import ON_CPU, compute, mx
from mlxlm.data import Batch, TokenDataset, read_ahead
from mlxlm.evaluate import evaluate
from mlxlm.model import Decoder
from mlxlm.report.log_entries import announced
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.checkpoint_saver import Saver, save_at_last
from mlxlm.train.data_check import DataCheck
from mlxlm.train.deadline import Deadline
from mlxlm.train.distributed.process_group import RankLost, Ranks
from mlxlm.train.distributed.worker import share_state
from mlxlm.train.events import (
    Event,
    Failed,
    Finished,
    Paused,
    Replanned,
    Sample,
    Started,
    Step,
    Stopped,
    Validation,
    Warned,
)  # fmt: skip
from mlxlm.train.log import RunLog
from mlxlm.train.memory_limits import fit_cache, steady_memory
from mlxlm.train.plot import draw_run
from mlxlm.train.run import Run
from mlxlm.train.sample import sample_text
from mlxlm.train.spike_detector import SpikeGuard
from mlxlm.train.step import TrainStep
from mlxlm.train.step_batches import Feed
from mlxlm.train.step_timer import Clock
from mlxlm.train.throttle import Pace, Power
from mlxlm.train.trackers import Trackers, check_trackers
from mlxlm.utils.errors import CheckpointError, MlxlmError, TrainingError

_ALWAYS = Power()  # works all the time


def train(
    run: Run,
    tokenizer: Tokenizer,
    *,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    power: Power = _ALWAYS,
    tensorboard: bool = False,
    wandb: str | None = None,
    ranks: Ranks | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Event]:
    """Train `run` to its last step, yielding an Event for everything that happens, which the log has by then.

    Runs with the same settings and data have the same weights to the bit on the same machine, however often
    they were interrupted and resumed. `resume` continues from the last checkpoint, or from the start if
    there is none yet. `should_stop` is asked after each step and all the time in pauses; if it says yes, the state
    is saved and the generator ends with Stopped. `power` says when to rest. `tensorboard` and `wandb`, a project, say
    where else the events go: see `trackers`. `ranks`: where other processes take part by `follow`, this one's; it is
    rank 0, and alone writes files.

    With `settings.time_limit` the run ends when that is over by the clock `now`, see `Deadline`: each change of its
    length is a Replanned. Its weights follow from settings, data and these, which the clock alone decides: another such
    run has others, unless it repeats this one (`repeat_run`). A resumed one has the time that was left.

    A checkpoint that the disk has no room for is put off (NotSaved). The one that a run ends with is waited for: the
    run pauses until there is room, or until `should_stop` says yes; without a `should_stop` it may wait for ever.

    Raises TrainingError, naming the last good checkpoint, when a loss is not finite or has risen by
    `settings.spike`; the step that went wrong is never saved. Raises DataError or CheckpointError for data
    or a run that can't be used, PlatformError for a tracker's library that is missing. When another rank is lost, what
    was trained is saved, then a TrainingError says so.
    """
    check_trackers(tensorboard, wandb)
    ranks = ranks or Ranks.alone()
    with run.locked():
        run.check_data()
        if run.checkpoints() and not resume:
            raise CheckpointError(f"{run.path} has been trained already", "resume, or a new run")
        log = RunLog(run.log_file)
        with ExitStack() as stack:
            check = stack.enter_context(closing(DataCheck(run.data, ranks)))
            loop = _Loop(run, tokenizer, log, _pace(power, ranks), ranks, check, now)
            trackers = stack.enter_context(closing(Trackers(run, loop.first, tensorboard, wandb)))
            stack.enter_context(steady_memory())
            try:
                for event in loop.events(lambda: should_stop() or any(ranks.told("stop"))):
                    for told in (event, *trackers.record(event)):
                        log.record(told)
                        yield told
            except Exception as error:
                message = error.message if isinstance(error, MlxlmError) else describe_error(error)
                with suppress(MlxlmError):  # the first error counts
                    log.record(Failed(loop.at, message))
                    draw_run(run)
                raise
        try:
            draw_run(run)
        except MlxlmError as error:
            warned = Warned(loop.at, error.message)
            log.record(warned)
            yield warned


class _Loop:
    """The state of a run between its steps."""

    def __init__(
        self,
        run: Run,
        tokenizer: Tokenizer,
        log: RunLog,
        pace: Pace,
        ranks: Ranks,
        check: DataCheck,
        now: Callable[[], float],
    ):
        self.run, self.tokenizer, self.settings, self.pace, self.ranks = run, tokenizer, run.settings, pace, ranks
        self.data_check = check
        begun = now()
        mx.reset_peak_memory()
        self.peak = 0
        self.model = Decoder(run.config, dropout=self.settings.dropout)
        self.model.initialize(self.settings.seed)
        self.step = TrainStep(self.model, self.settings, ranks)
        state = run.restore(self.step)
        self.unlike = self.step.go_on_as(state.get("machine"))
        self.restored, self.first = bool(state), state.get("step", 0)
        self.at = self.first  # the step that is done, or in work
        self.guard = SpikeGuard(self.settings.spike, state.get("guard"))
        self.best: dict | None = state.get("best")
        self.spent: float = state.get("seconds", 0.0)
        forecast = announced(run.log_file, "forecast", ("steps", "step_seconds", "seconds", "validations"))
        self.deadline = Deadline(self.settings, state, forecast, now, begun)
        self.feed = Feed(run, ranks)
        self.held_out = TokenDataset.open(run.data, "validation")
        self.clock = Clock()
        self.saver = Saver(run, self.step, log)
        self.saver.saved = self.first
        self.planned = self.deadline.steps  # steps, as the last checkpoint has them
        self.saved_at = self.deadline.measured  # when a checkpoint was last written, or could not be
        validated = state.get("validation_loss", 0) is not None
        self.had = log.rewind(self.first, validated)  # of the step that is saved: a stop may have come between
        ranks.rescue = self.rescued
        ranks.share({**run.announcement(), "step": self.first, "machine": self.step.machine})
        share_state(self.step, ranks)

    def events(self, should_stop: Callable[[], bool]) -> Iterator[Event]:
        settings = self.settings
        yield self.started()
        self.deadline.took(None)  # the model was built and loaded
        repacked = None
        if self.restored and settings.packing == "best-fit" and self.run.version < 2:
            repacked = "an earlier version of mlxlm packed this run's rows in another way: they differ from here on"
        for warning in (*self.pace.missing(), *filter(None, [self.unlike, repacked])):
            yield Warned(self.first, warning)
        if self.restored and (self.validates(self.first) or self.samples(self.first)):
            yield from self.look_after(self.first, should_stop)
        if self.first < self.deadline.steps:
            yield from self.rest(self.first, should_stop)
        with closing(read_ahead(self.feed.read, count(self.first + 1))) as read:
            while self.at < self.deadline.steps:
                if should_stop():
                    yield from self.save(self.at, None, until=lambda: False)
                    yield Stopped(self.at, self.run.path)
                    return
                done = self.at + 1
                try:
                    yield self.advance(done, next(read))
                except RankLost as lost:  # in the middle of the step, which has changed nothing yet
                    with suppress(RankLost):  # while the ranks' data was still being checked
                        yield from self.save(done - 1, None)
                    raise self.deserted(lost) from None
                if done == self.first + 1:
                    fit_cache()
                if done < self.deadline.steps:
                    yield from self.rest(done, should_stop)
                self.deadline.took("step")
                if self.deadline.replanned(done):
                    yield Replanned(done, self.deadline.steps)
                if done == self.deadline.steps or not should_stop():
                    yield from self.look_after(done, should_stop)
        seconds = self.spent + self.clock.seconds
        rate = self.clock.rate(settings.tokens_per_step) if self.at > self.first else None
        best = self.best or {}
        bits, peak = best.get("bits_per_byte"), max(self.peak, mx.get_peak_memory())
        yield Finished(self.deadline.steps, seconds, rate, best.get("loss"), bits, peak, self.run.path)

    def started(self) -> Started:
        settings, steps = self.settings, self.deadline.steps
        epochs, by_source = self.feed.epoch_of(steps), self.feed.epochs(steps)
        # Under a causal mask a token sees half of the sequence, on average.
        flops = self.run.config.flops_per_token(settings.sequence_length // 2, training=True)
        return Started(
            self.first, steps, self.model.num_parameters(), settings.tokens_per_step, epochs, flops,
            by_source, self.feed.cropped, self.feed.padding,
        )  # fmt: skip

    def rest(self, done: int, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """What the power asks for between two steps."""
        before = self.pace.paused
        for event in self.pace.between_steps(done, should_stop):
            if isinstance(event, Paused):  # it may end with an empty battery
                yield from self.save(done, None)
                mx.clear_cache()
            yield event
        self.clock.skip(self.pace.paused - before)
        self.deadline.skip(self.pace.paused - before)

    def look_after(self, done: int, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """What is due after step `done`: validation, sample, checkpoint."""
        settings, found = self.settings, None
        if self.validates(done):
            found = self.validate(done)
            yield found
        if sampled := self.samples(done):
            yield self.sample(done)
        if sampled or found:  # their buffers are of other sizes than a step's, and would be kept beside those
            mx.clear_cache()
        self.deadline.took("check" if found else "sample" if sampled else None)
        best = found is not None and found.best
        due = self.due(done, settings.save_every) or self.time_to_save or self.saver.overdue
        if best or due or self.saver.saved == done:
            self.data_check.wait()
            self.deadline.took(None)  # that is no part of what a checkpoint takes
            before = self.saver.saved
            yield from self.save(done, found, until=should_stop if done == self.deadline.steps else None)
            self.deadline.took("save" if self.saver.saved != before else None)
        if found and not self.deadline.knows_pictures:  # they are the last thing in the time of a run
            with suppress(MlxlmError):
                draw_run(self.run)
            self.deadline.took("pictures")

    @property
    def time_to_save(self) -> bool:
        """Whether `save_minutes` are over since the last checkpoint. Pauses don't count: they begin with one."""
        limit = 60 * self.settings.save_minutes
        return limit > 0 and self.deadline.measured - self.saved_at >= limit

    def validates(self, done: int) -> bool:
        return self.deadline.validates(done) and (done > self.first or "validation" not in self.had)

    def samples(self, done: int) -> bool:
        every = self.settings.sample_every
        return every > 0 and done > 0 and self.due(done, every) and (done > self.first or "sample" not in self.had)

    def due(self, done: int, every: int) -> bool:
        return done == self.deadline.steps or (every > 0 and done % every == 0)

    def advance(self, done: int, batches: list[Batch]) -> Step:
        """Step number `done`, from 1."""
        settings, self.at = self.settings, done
        self.data_check.look()
        rate = settings.learning_rate_at(done - 1, self.deadline.steps)
        # The others take part in this step.
        checked = self.data_check.passed
        self.ranks.share({"step": done, "rate": rate, "state": self.state_after(done - 1), "checked": checked})
        with self.clock:
            loss, norm = self.step(batches, rate)
            compute(loss, norm, self.step.state)
        loss, norm = loss.item(), norm.item()
        if problem := self.guard.problem(loss, norm):
            raise self.failure(done, problem)
        left = self.deadline.seconds_left
        return Step(
            done, self.deadline.steps, done * settings.tokens_per_step, loss, rate, norm,
            self.clock.rate(settings.tokens_per_step), self.spent + self.clock.seconds,
            self.clock.left(self.deadline.steps - done) if left is None else left, memory_in_use(),
        )  # fmt: skip

    def validate(self, done: int) -> Validation:
        settings = self.settings
        with self.step.averaged():
            found = evaluate(
                self.model, self.held_out, settings.sequence_length, settings.batch_size, settings.eval_tokens,
                document_mask=settings.document_mask, answers_only=settings.answers_only,
            )  # fmt: skip
        if not math.isfinite(found.loss):
            raise self.failure(done, f"the validation loss is {found.loss}")
        better = self.best is None or found.loss < self.best["loss"]
        if better:
            self.best = {"step": done, "loss": found.loss, "bits_per_byte": found.bits_per_byte}
        tokens = done * settings.tokens_per_step
        return Validation(done, tokens, found.loss, found.perplexity, found.bits_per_byte, better)

    def sample(self, done: int) -> Sample:
        with self.step.averaged():
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
                self.run.amend(done, {name: state[name] for name in (*validated, *self.deadline.state)})
                self.planned = self.deadline.steps
            return
        self.planned = self.deadline.steps
        if until is None:
            yield self.saver.save(state)
        else:
            yield from save_at_last(self.saver, self.pace, state, until)
        self.saved_at = self.deadline.measured

    def state_after(self, done: int, found: Validation | None = None) -> dict[str, Any]:
        """What a checkpoint says beside its arrays."""
        return {
            "step": done,
            "seconds": self.spent + self.clock.seconds,
            **self.deadline.state,
            "validation_loss": found and found.loss,
            "best": self.best,
            "healthy": self.guard.healthy,
            "guard": self.guard.state,
        }

    def rescued(self, lost: RankLost) -> TrainingError:
        """As `events` does, from another thread, while the one of `events` waits for ever."""
        with suppress(MlxlmError):
            list(self.save(self.at - 1, None))
        return self.deserted(lost)

    def deserted(self, lost: RankLost) -> TrainingError:
        saved = f"step {self.saver.saved} is saved" if self.saver.saved else "nothing is saved yet"
        problem = f"stopped in step {self.at}: {lost.message}; {saved}"
        return TrainingError(problem, self.run.resume_command)

    def failure(self, done: int, problem: str) -> TrainingError:
        good = self.run.last_good()
        where = f"the last good checkpoint is {good}" if good else "there is no good checkpoint yet"
        hint = f"a new run with a lower --learning-rate than {self.settings.learning_rate:g} or more --warmup-steps"
        return TrainingError(f"stopped at step {done}: {problem}; {where}", hint)


def _pace(power: Power, ranks: Ranks) -> Pace:
    """One for all ranks: what one machine asks for, all do."""

    def on_battery() -> bool | None:
        known = [x for x in (platform.on_battery(), *ranks.told("on_battery")) if x is not None]
        return any(known) if known else None

    def heat() -> str | None:
        known = [platform.heat(), *ranks.told("heat")]
        return next((level for level in ("hot", "warm", "cool") if level in known), None)

    return Pace(power, on_battery=on_battery, heat=heat)


def memory_in_use() -> int:
    """Bytes: MLX's peak on a GPU, this process's on a CPU."""
    return platform.process_memory() if ON_CPU else mx.get_peak_memory()
