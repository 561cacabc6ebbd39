"""The training loop: a generator of events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress

from mlxlm import platform
from mlxlm._mlx import ON_CPU, mx
from mlxlm.data import TokenDataset, TrainBatches
from mlxlm.errors import CheckpointError, MlxlmError, TrainingError
from mlxlm.evaluate import evaluate
from mlxlm.generation import LoadedModel, generate
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.clock import Clock
from mlxlm.train.events import (
    Event,
    Finished,
    Paused,
    Resumed,
    Sample,
    Saved,
    Started,
    Step,
    Stopped,
    Validation,
    Warned,
)  # fmt: skip
from mlxlm.train.guard import SpikeGuard
from mlxlm.train.log import RunLog
from mlxlm.train.plot import draw_losses
from mlxlm.train.power import Pace, Power
from mlxlm.train.run import Run
from mlxlm.train.saving import Saver
from mlxlm.train.step import TrainStep

_ALWAYS = Power()  # works all the time


def train(
    run: Run,
    tokenizer: Tokenizer,
    *,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    power: Power = _ALWAYS,
) -> Iterator[Event]:
    """Train `run` to its last step, yielding an Event for everything that happens, which the log has by then.

    Runs with the same settings and data have the same weights to the bit on the same machine, however often
    they were interrupted and resumed. `resume` continues from the last checkpoint, or from the start if
    there is none yet. `should_stop` is asked after each step and all the time in pauses; if it says yes, the state
    is saved and the generator ends with Stopped. `power` says when to rest.

    A checkpoint that the disk has no room for is put off (NotSaved). The one that a run ends with is waited for: the
    run pauses until there is room, or until `should_stop` says yes.

    Raises TrainingError, naming the last good checkpoint, when a loss is not finite or has risen by
    `settings.spike`; the step that went wrong is never saved. Raises DataError or CheckpointError for data
    or a run that can't be used.
    """
    with run.locked():
        run.check_data()
        if run.checkpoints() and not resume:
            raise CheckpointError(f"{run.path} has been trained already", "resume, or a new run")
        log = RunLog(run.log_file)
        try:
            for event in _Loop(run, tokenizer, log, resume, Pace(power)).events(should_stop):
                log.record(event)
                yield event
        except MlxlmError:
            with suppress(MlxlmError):  # the first error counts
                _draw(run)
            raise
        _draw(run)


class _Loop:
    """The state of a run between its steps."""

    def __init__(self, run: Run, tokenizer: Tokenizer, log: RunLog, resume: bool, pace: Pace):
        self.run, self.tokenizer, self.settings, self.pace = run, tokenizer, run.settings, pace
        self.model = Decoder(run.config, dropout=self.settings.dropout)
        self.model.initialize(self.settings.seed)
        self.step = TrainStep(self.model, self.settings)
        state = run.restore(self.step) if resume else {}
        self.first: int = state.get("step", 0)
        self.guard = SpikeGuard(self.settings.spike, state.get("guard"))
        self.best: dict | None = state.get("best")
        self.spent: float = state.get("seconds", 0.0)
        self.owed = self.due(self.first, self.settings.eval_every) and state.get("validation_loss", 0) is None
        self.data = TokenDataset.open(run.data, "train")
        self.held_out = TokenDataset.open(run.data, "validation")
        self.batches = TrainBatches(
            self.data, self.settings.batch_size, self.settings.sequence_length, self.settings.seed
        )
        self.clock = Clock()
        self.saver = Saver(run, self.step, log)
        self.saver.saved = self.first
        if resume:
            log.rewind(self.first, validated=not self.owed)

    def events(self, should_stop: Callable[[], bool]) -> Iterator[Event]:
        settings = self.settings
        yield self.started()
        for missing in self.pace.missing():
            yield Warned(self.first, missing)
        if self.owed:  # the run was stopped between a step and its validation
            yield from self.look_after(self.first, should_stop)
        if self.first < settings.steps:
            yield from self.rest(self.first, should_stop)
        for done in range(self.first + 1, settings.steps + 1):
            if should_stop():
                yield from self.save(done - 1, None, until=lambda: False)
                yield Stopped(done - 1, self.run.path)
                return
            yield self.advance(done)
            if done < settings.steps:
                yield from self.rest(done, should_stop)
            if done == settings.steps or not should_stop():
                yield from self.look_after(done, should_stop)
        seconds, rate = self.spent + self.clock.seconds, self.clock.rate(settings.tokens_per_step)
        best = self.best or {}
        yield Finished(settings.steps, seconds, rate, best.get("loss"), best.get("bits_per_byte"), self.run.path)

    def started(self) -> Started:
        settings = self.settings
        epochs = self.batches.epoch_of(settings.steps * settings.accumulate)
        # Under a causal mask a token sees half of the sequence, on average.
        flops = self.run.config.flops_per_token(settings.sequence_length // 2, training=True)
        parameters = self.model.num_parameters()
        return Started(self.first, settings.steps, parameters, settings.tokens_per_step, epochs, flops)

    def rest(self, done: int, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """What the power asks for between two steps."""
        before = self.pace.paused
        for event in self.pace.between_steps(done, should_stop):
            if isinstance(event, Paused):  # it may end with an empty battery
                yield from self.save(done, None)
                mx.clear_cache()
            yield event
        self.clock.skip(self.pace.paused - before)

    def look_after(self, done: int, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """What is due after step `done`: validation, sample, checkpoint."""
        settings, found = self.settings, None
        if self.due(done, settings.eval_every):
            found = self.validate(done)
            yield found
        if done > self.first and settings.sample_every and self.due(done, settings.sample_every):
            yield self.sample(done)
        best = found is not None and found.best
        if best or self.due(done, settings.save_every) or self.saver.overdue or self.saver.saved == done:
            yield from self.save(done, found, until=should_stop if done == settings.steps else None)

    def due(self, done: int, every: int) -> bool:
        return done == self.settings.steps or (every > 0 and done % every == 0)

    def advance(self, done: int) -> Step:
        """Step number `done`, from 1."""
        settings = self.settings
        first = (done - 1) * settings.accumulate
        batches = [self.batches.batch(first + i) for i in range(settings.accumulate)]
        rate = settings.learning_rate_at(done - 1)
        with self.clock, platform.interrupts_held():
            loss, norm = self.step(batches, rate)
            mx.eval(loss, norm, self.step.state)
        loss, norm = loss.item(), norm.item()
        if problem := self.guard.problem(loss, norm):
            raise self.failure(done, problem)
        return Step(
            done, settings.steps, done * settings.tokens_per_step, loss, rate, norm,
            self.clock.rate(settings.tokens_per_step), self.spent + self.clock.seconds,
            self.clock.left(settings.steps - done), memory_in_use(),
        )  # fmt: skip

    def validate(self, done: int) -> Validation:
        settings = self.settings
        found = evaluate(
            self.model, self.held_out, settings.sequence_length, settings.batch_size, settings.eval_tokens
        )
        if not math.isfinite(found.loss):
            raise self.failure(done, f"the validation loss is {found.loss}")
        better = self.best is None or found.loss < self.best["loss"]
        if better:
            self.best = {"step": done, "loss": found.loss, "bits_per_byte": found.bits_per_byte}
        tokens = done * settings.tokens_per_step
        return Validation(done, tokens, found.loss, found.perplexity, found.bits_per_byte, better)

    def sample(self, done: int) -> Sample:
        """A text from the sample prompt, or from nothing but the token that begins texts."""
        settings = self.settings
        loaded = LoadedModel(self.model, self.tokenizer, self.run.config, self.run.path)
        prompt = sample_prompt(self.tokenizer, settings.sample_prompt)
        self.model.eval()
        try:
            options = {"max_tokens": settings.sample_tokens, "temperature": 0.8, "seed": settings.seed}
            text = generate(loaded, prompt, **options).text
        finally:
            self.model.train()
        return Sample(done, settings.sample_prompt, text)

    def save(
        self, done: int, found: Validation | None, until: Callable[[], bool] | None = None
    ) -> Iterator[Event]:
        """Save the state after step `done`, if it is not saved yet. With `until`, it must be saved: where the disk
        does not take it, pause until it does, or until that says yes."""
        known = {"validation_loss": found and found.loss, "best": self.best}
        if self.saver.saved == done:
            if found:
                self.run.amend(done, known)
            return
        state = {
            "step": done,
            "seconds": self.spent + self.clock.seconds,
            **known,
            "healthy": self.guard.healthy,
            "guard": self.guard.state,
        }
        event = self.saver.save(state)
        yield event
        if until is None or isinstance(event, Saved):
            return
        reason = f"there is no room for the last checkpoint: {event.hint}"
        yield Paused(done, reason)
        seconds = self.pace.wait(lambda: isinstance(self.saver.save(state), Saved), until)
        if self.saver.saved != done:
            raise CheckpointError(f"what was trained up to step {done} is not saved: {event.reason}", event.hint)
        yield Resumed(done, reason, seconds)

    def failure(self, done: int, problem: str) -> TrainingError:
        good = self.run.last_good()
        where = f"the last good checkpoint is {good}" if good else "there is no good checkpoint yet"
        hint = f"a new run with a lower --learning-rate than {self.settings.learning_rate:g} or more --warmup-steps"
        return TrainingError(f"stopped at step {done}: {problem}; {where}", hint)


def sample_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids that a sample begins with: those of `text`, or BOS or EOS where it has none."""
    ids = tokenizer.encode(text) if text else [tokenizer.bos_id, tokenizer.eos_id]
    return ids if text else [i for i in ids if i is not None][:1]


def memory_in_use() -> int:
    """Bytes: MLX's peak on a GPU, this process's on a CPU."""
    return platform.process_memory() if ON_CPU else mx.get_peak_memory()


def _draw(run: Run) -> None:
    entries = run.read_log()
    if any(e["event"] == "step" for e in entries):
        draw_losses(entries, run.path / "loss.png")
