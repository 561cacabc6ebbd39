"""The training loop, and what it keeps between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, eval_arrays, mx
from mlxlm.backend.sleep import seconds_asleep
from mlxlm.data import Batch, TokenDataset, prefetch
from mlxlm.evaluate import evaluate_dataset
from mlxlm.generation import LoadedModel, generate
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
    Finished,
    Paused,
    Sample,
    Started,
    Step,
    Stopped,
    TrainingWarning,
    Validation,
)
from mlxlm.train.log import RunLog
from mlxlm.train.memory_limits import limit_buffer_cache
from mlxlm.train.repeat import read_repeat_plan
from mlxlm.train.run import Run
from mlxlm.train.spike_detector import SpikeDetector
from mlxlm.train.step import TrainStep
from mlxlm.train.step_batches import StepBatches
from mlxlm.train.step_timer import StepTimer
from mlxlm.train.throttle import PowerPolicy, Throttle
from mlxlm.train.train_state import TrainState
from mlxlm.utils.errors import MlxlmError, TrainingError
from mlxlm.utils.formatting import human_seconds

_MIN_SLEEP_SECONDS = 10.0  # to report it


class Trainer:
    """The training loop of `train`.

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
        micro_batches: int | None,
    ):
        start_time = now()
        mx.reset_peak_memory()
        self.peak_memory = 0  # before MLX's counter was last reset
        self.run, self.settings, self.tokenizer = run, run.settings, tokenizer
        self.group, self.data_check = group, data_check

        # Model, optimizer and data
        self.model = Decoder(run.config, dropout=self.settings.dropout)
        self.model.init_weights(self.settings.seed)
        self.step = TrainStep(self.model, self.settings, group)
        checkpoint = run.load_checkpoint(self.step)
        state = TrainState.from_dict(checkpoint)
        self.resumed, self.first = bool(checkpoint), state.step
        self.finished = self.current = self.first
        self.environment_warning = self.step.match_environment(checkpoint.get("environment"), micro_batches)
        self.step_batches = StepBatches(run, group)
        self.validation_data = TokenDataset.open(run.data, "validation")

        # Schedule
        self.best = state.best
        self.uniform_loss = math.log(run.config.vocab_size)
        self.spike_detector = SpikeDetector(self.settings.spike_threshold, self.uniform_loss, state.spike_detector)
        self.throttle = Throttle(power, group.peer_status)
        self.timer = StepTimer(state.seconds)
        forecast = entry_before_start(run.log_file, "forecast", ("steps", "step_seconds", "seconds", "validations"))
        plan = read_repeat_plan(run) if self.settings.repeat_plan else None
        self.asleep = seconds_asleep()
        self.deadline = Deadline(self.settings, state if self.resumed else None, forecast, now, start_time, plan)
        saved = TrainState(state.step, steps=self.deadline.steps, elapsed=self.deadline.recorded_elapsed)
        self.saver = CheckpointSaver(run, self.step, log, state=saved)
        # Names of the events of step `first` that are logged already
        self.logged = log.rewind(self.first, validated=not self.resumed or state.validation_loss is not None)

        group.on_rank_lost = self.save_after_hang
        start_workers(run, self.step, self.first, group)

    def train(
        self, should_stop: Callable[[], bool], on_step: Callable[[Step, LoadedModel], None] | None
    ) -> Iterator[Event]:
        """Run the remaining steps."""
        yield from self.start(should_stop)
        with closing(prefetch(self.step_batches.read, count(self.first + 1))) as batches:
            while self.finished < self.deadline.steps:
                if should_stop():
                    yield from self.save_final(None, should_stop=lambda: False)
                    yield Stopped(self.finished, self.run.path)
                    return
                try:
                    step = self.train_step(next(batches))
                    yield step
                except RankLostError as lost:  # within the step, before it changed anything
                    with suppress(RankLostError):  # while the data of the ranks was still being checked
                        yield from self.save()
                    raise self.rank_lost_error(lost) from None
                yield from self.report_sleep()
                if self.finished == self.first + 1:
                    limit_buffer_cache()
                if self.finished < self.deadline.steps:
                    yield from self.rest(should_stop)
                self.deadline.record_step(self.finished)
                if on_step is not None:
                    with self.evaluation_model() as lm:
                        on_step(step, lm)
                    self.deadline.record_time(None)
                if self.finished == self.deadline.steps or not should_stop():
                    yield from self.validate_and_save(should_stop)
        yield self.finish()

    def start(self, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Before the first step. A resumed run first does the validation that was due when it was stopped."""
        steps, tokens, batches = self.deadline.steps, self.settings.tokens_per_step, self.step_batches
        # Under a causal mask a token attends to half of the sequence, on average.
        flops = self.run.config.flops_per_token(self.settings.max_seq_length // 2, training=True)
        size, epoch, epochs = self.run.config.parameter_count(), batches.epoch_at(steps), batches.epochs(steps)
        waste = batches.dropped_fraction, batches.padding
        yield Started(self.first, steps, size, tokens, epoch, flops, epochs, *waste, self.step.micro_batches)
        self.deadline.record_time(None)  # building and loading the model
        slow = "this Mac is in Low Power Mode, which slows training down" if platform.low_power_mode() else None
        for warning in filter(None, [*self.throttle.unsupported(), self.environment_warning, slow]):
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
        learning_rate = self.deadline.learning_rate(self.finished)
        start_step(learning_rate, self.group)
        with self.timer:
            loss, grad_norm = self.step(batches, learning_rate)
            eval_arrays(loss, grad_norm, self.step.state)
        loss, grad_norm = loss.item(), grad_norm.item()
        if problem := self.spike_detector.problem(loss, grad_norm):
            raise self.divergence_error(problem)
        self.finished, step_tokens = self.current, settings.tokens_per_step
        tokens, rate, seconds = self.finished * step_tokens, self.timer.rate(step_tokens), self.timer.seconds
        left, memory = self.deadline.seconds_left, platform.process_memory() if ON_CPU else mx.get_peak_memory()
        left = self.timer.seconds_left(steps - self.finished) if left is None else left
        return Step(self.finished, steps, tokens, loss, learning_rate, grad_norm, rate, seconds, left, memory)

    def report_sleep(self) -> Iterator[TrainingWarning]:
        """Tell if the machine has slept since the last call. All clocks of the run stood still."""
        before, self.asleep = self.asleep, seconds_asleep()
        if (seconds := self.asleep - before) > _MIN_SLEEP_SECONDS:
            slept = f"this machine slept for {human_seconds(seconds)}, which is no training time"
            yield TrainingWarning(self.finished, slept)

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
        """Do what is due after the last finished step: validation, sample, checkpoint."""
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
            rows = -(-settings.batch_size // self.step.micro_batches)
            sizes = settings.max_seq_length, rows, settings.eval_tokens
            masks = {"document_mask": settings.document_mask, "mask_prompt": settings.mask_prompt}
            result = evaluate_dataset(self.model, self.validation_data, *sizes, **masks)
        if not math.isfinite(result.loss):
            raise self.divergence_error(f"the validation loss is {result.loss}")
        best = self.best or {"loss": math.inf}
        is_best = result.loss < best["loss"]
        if is_best:
            best = self.best = {"step": self.finished, "loss": result.loss, "bits_per_byte": result.bits_per_byte}
        # A run too short for the spike detector
        uniform, threshold = self.uniform_loss, settings.spike_threshold
        if self.finished == self.deadline.steps and threshold and best["loss"] > uniform + threshold:
            problem = f"the best validation loss is {best['loss']:.2f}, that of a uniform distribution {uniform:.2f}"
            raise self.divergence_error(problem)
        tokens = self.finished * settings.tokens_per_step
        return Validation(self.finished, tokens, result.loss, result.perplexity, result.bits_per_byte, is_best)

    def sample(self) -> Sample:
        """Generate a sample text with a fixed seed, with the EMA weights if there are any."""
        settings, tokenizer = self.settings, self.tokenizer
        prompt = tokenizer.encode(settings.sample_prompt) if settings.sample_prompt else []
        if not prompt:  # the token that begins texts: BOS or EOS
            prompt = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None][:1]
        with self.evaluation_model() as lm:
            text = generate(lm, prompt, max_tokens=settings.sample_tokens, temperature=0.8, seed=settings.seed).text
        return Sample(self.finished, settings.sample_prompt, text)

    @contextmanager
    def evaluation_model(self) -> Iterator[LoadedModel]:
        """The model to generate with: without dropout, and with the EMA weights if there are any."""
        self.peak_memory = max(self.peak_memory, mx.get_peak_memory())  # generating resets the counter
        self.model.eval()
        try:
            with self.step.ema_weights():
                yield LoadedModel(self.model, self.tokenizer, self.run.config, self.run.path)
        finally:
            self.model.train()

    def state(self, validation: Validation | None = None) -> TrainState:
        """Return the state after the last finished step, for its checkpoint."""
        validation_loss, spikes = validation.loss if validation else None, self.spike_detector
        values: dict[str, Any] = {**self.deadline.state, "validation_loss": validation_loss, "best": self.best}
        return TrainState(
            self.finished, self.timer.seconds, **values, healthy=spikes.healthy, spike_detector=spikes.state
        )

    def save(self, validation: Validation | None = None) -> Iterator[Event]:
        """Save a checkpoint of the last finished step, if it is not saved yet. Raises DataError for changed data."""
        self.data_check.wait()
        if event := self.saver.save(self.state(validation), validation is not None):
            yield event

    def save_final(self, validation: Validation | None, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Save the last checkpoint. Pauses while the disk is full."""
        self.data_check.wait()
        yield from self.saver.save_final(self.state(validation), validation is not None, self.throttle, should_stop)

    def finish(self) -> Finished:
        """Return the event that ends the run."""
        rate = self.timer.rate(self.settings.tokens_per_step) if self.finished > self.first else None
        best, memory, path = self.best or {}, max(self.peak_memory, mx.get_peak_memory()), self.run.path
        loss, bits = best.get("loss"), best.get("bits_per_byte")
        return Finished(self.deadline.steps, self.timer.seconds, rate, loss, bits, memory, path)

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
