"""Trains a run: `train`, a generator of events, and the loop behind it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.error_text import describe_error, device_error
from mlxlm.backend.mlx import ON_CPU, eval_arrays, mx
from mlxlm.backend.platform import seconds_asleep
from mlxlm.backend.process_group import ProcessGroup, RankLostError
from mlxlm.chat.generate import generate
from mlxlm.data import TokenDataset, TrainBatches
from mlxlm.data.batches import prefetch
from mlxlm.data.prompts import verify_prompts
from mlxlm.data.shards import verify_shards
from mlxlm.generation import LoadedModel
from mlxlm.model import Decoder
from mlxlm.model.experts import expert_load
from mlxlm.report.log_entries import entry_before_start
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.checkpoint_saver import CheckpointSaver
from mlxlm.train.distillation import quantized_weights
from mlxlm.train.events import (
    Event,
    Failed,
    Finished,
    Paused,
    RunLog,
    Sample,
    Started,
    Step,
    Stopped,
    TrainingWarning,
    Validation,
)
from mlxlm.train.grpo import GRPOBatches, RewardError, RewardFunction
from mlxlm.train.memory_limits import limit_buffer_cache, memory_limits
from mlxlm.train.objectives import make_loss, open_batches, open_validation, validate
from mlxlm.train.run import Run, TrainState, read_repeat_plan
from mlxlm.train.run_clock import RunClock
from mlxlm.train.step import NamedArrays, TrainStep
from mlxlm.train.throttle import PowerPolicy, Throttle
from mlxlm.train.trackers import Trackers, check_trackers
from mlxlm.train.worker import start_workers
from mlxlm.utils.errors import CheckpointError, ConfigError, MlxlmError, TrainingError
from mlxlm.utils.formatting import human_seconds

_ALWAYS_ON = PowerPolicy()
_MIN_SLEEP_SECONDS = 10.0  # to report it
_WINDOW, _RECENT, _TOO_MANY = 100, 20, 15  # losses, see `SpikeDetector`


def train(
    run: Run,
    tokenizer: Tokenizer,
    *,
    resume: bool = False,
    reward: RewardFunction | None = None,
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
    clock, see `RunClock`. So another run with the same time limit has other weights, unless it repeats this one
    (`repeat_run`). A resumed run has the time that was left.

    A checkpoint that the disk has no room for is postponed (CheckpointNotSaved). Before the last one the run pauses
    until there is room, or until `should_stop` returns True; without `should_stop` it may wait forever.

    Args:
        run: The run.
        tokenizer: Its tokenizer, for samples.
        resume: Continue from the last checkpoint, or from the start if there is none yet.
        reward: The reward function of a run of `start_grpo`.
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
        ConfigError: The reward function is missing, or the run has none.
        RewardError: The reward function has failed; the step before is saved.
        TrainingError: A loss is not finite or has risen (see `SpikeDetector`), or the run ends worse than a uniform
            distribution: the message names the last good checkpoint, and the failed step is not saved. Or another rank
            is lost: the state is saved first.
        DataError: The data can't be used, or has changed.
        CheckpointError: The run can't be used, or the disk can't be written.
        PlatformError: The library of a tracker is not installed.
    """
    check_trackers(tensorboard, wandb)
    if (reward is None) != (run.settings.grpo is None):
        problem = "needs its reward function" if reward is None else "has no use for a reward function"
        raise ConfigError(f"{run.path} {problem}", run.resume_command)
    group = process_group or ProcessGroup()
    with run.locked():
        run.check_data()
        if run.checkpoints() and not resume:
            raise CheckpointError(f"{run.path} has been trained already", "resume, or a new run")
        run.clean_up_after_crash()
        log = RunLog(run.log_file)
        with _check_data(run) as data_check:
            trainer = _Trainer(run, tokenizer, group, data_check, Throttle(power), reward)
            trainer.load(log, now, micro_batches)
            with closing(Trackers(run, trainer.first, tensorboard, wandb)) as trackers, memory_limits():
                try:
                    for event in trainer.train(lambda: should_stop() or group.stop_requested, on_step):
                        for logged in (event, *trackers.record(event)):
                            log.record(logged)
                            yield logged
                except Exception as error:
                    if isinstance(error, RewardError):  # the run can be resumed with a corrected function
                        for event in trainer.save(None):
                            log.record(event)
                            yield event
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


@dataclass
class _Trainer:
    """What is trained, by what, and how far it is. `load` fills it in, then `train` is the loop.

    Attributes:
        first: The step that the run continues after; 0 for a new run.
        finished: The last finished step.
        current: The step in progress, or the last finished one.
        best: The step, loss and bits per byte of the best validation.
        peak_memory: In bytes, before MLX's counter was last reset.
    """

    run: Run
    tokenizer: Tokenizer
    group: ProcessGroup
    data_check: Future[None]
    throttle: Throttle
    reward: RewardFunction | None
    first: int = 0
    finished: int = 0
    current: int = 0
    best: dict[str, Any] | None = None
    peak_memory: int = 0
    model: Decoder = field(init=False)
    step: TrainStep = field(init=False)
    batches: TrainBatches | GRPOBatches = field(init=False)
    validation_data: TokenDataset = field(init=False)  # unless there is a reward function
    spike_detector: SpikeDetector = field(init=False)
    clock: RunClock = field(init=False)
    saver: CheckpointSaver = field(init=False)
    logged: set[str] = field(init=False)  # names of the events of step `first` that the log has already
    warnings: list[str] = field(init=False)

    def load(self, log: RunLog, now: Callable[[], float], micro_batches: int | None) -> None:
        """Make the model, or load the last checkpoint, on all ranks; and remove from the log what came after it."""
        start_time, run, settings = now(), self.run, self.run.settings
        mx.reset_peak_memory()
        self.model = Decoder(run.config, dropout=settings.dropout)
        self.model.init_weights(settings.seed, settings.parametrization)
        mx.random.seed(settings.seed)
        self.step = TrainStep(self.model, settings, self.group, make_loss(settings))
        checkpoint = run.load_checkpoint(self.step)
        state = TrainState.from_dict(checkpoint)
        self.first = self.finished = self.current = state.step
        self.best = state.best
        environment_warning = self.step.match_environment(checkpoint.get("environment"), micro_batches)
        if self.reward is not None:
            self.batches = GRPOBatches(run, self.model, self.tokenizer, self.reward)
        else:
            self.batches = open_batches(run.data, settings, self.group)
            self.validation_data = open_validation(run.data, settings)
        uniform_loss = math.log(run.config.vocab_size)
        self.spike_detector = SpikeDetector(settings.spike_threshold, uniform_loss, state.spike_detector)
        forecast = entry_before_start(run.log_file, "forecast", ("steps", "step_seconds", "seconds", "validations"))
        plan = read_repeat_plan(run) if settings.repeat_plan else None
        self.clock = RunClock(settings, state if checkpoint else None, forecast, plan, now, start_time)
        saved = TrainState(state.step, steps=self.clock.steps, elapsed=self.clock.elapsed)
        self.saver = CheckpointSaver(run, self.step, log, state=saved)
        self.logged = log.rewind(self.first, validated=not checkpoint or state.validation_loss is not None)
        if not checkpoint:  # nothing is due before the first step
            self.logged |= {"validation", "sample", "checkpoint"}
        slow = "this Mac is in Low Power Mode, which slows training down" if platform.low_power_mode() else None
        self.warnings = [w for w in (*self.throttle.unsupported(), environment_warning, slow) if w]
        start_workers(run, self.step, self.first, self.group)
        self.clock.lap(None, self.first)

    def train(
        self, should_stop: Callable[[], bool], on_step: Callable[[Step, LoadedModel], None] | None
    ) -> Iterator[Event]:
        """Run the remaining steps."""
        clock, saver, tokens_per_step = self.clock, self.saver, self.run.settings.tokens_per_step
        asleep = seconds_asleep()
        yield self.started()
        for message in self.warnings:
            yield TrainingWarning(self.first, message)
        with closing(self.read_batches()) as batches:
            while True:
                is_last = self.finished == clock.steps
                if should_stop() and not is_last:  # what is due now, a resumed run does first
                    yield from self.save(None, wait=lambda: False)
                    yield Stopped(self.finished, self.run.path)
                    return

                # Validation, sample and checkpoint, if they are due after the last finished step
                validation = self.validate() if self.is_due("validation") else None
                if validation:
                    yield validation
                if sampled := self.is_due("sample"):
                    yield self.sample()
                if validation or sampled:  # their buffers have other sizes than those of a step
                    mx.clear_cache()
                clock.lap("validation" if validation else "sample" if sampled else None, self.finished)
                if self.is_due("checkpoint") or (validation and (validation.best or self.finished == saver.saved_step)):
                    self.data_check.result()
                    clock.lap(None, self.finished)
                    saved_step = saver.saved_step
                    yield from self.save(validation, wait=should_stop if is_last else None)
                    clock.lap("save" if saver.saved_step != saved_step else None, self.finished)
                if is_last:
                    break

                # Rest or pause, as the power policy says. The time of pauses doesn't count.
                paused = self.throttle.paused
                for event in self.throttle.between_steps(self.finished, should_stop):
                    if isinstance(event, Paused):  # which may end with an empty battery
                        yield from self.save(None)
                        mx.clear_cache()
                    yield event
                clock.exclude_pause(self.throttle.paused - paused)
                if should_stop():
                    continue

                # Forward, backward, gradient clipping and update, on all ranks
                self.current += 1
                if self.data_check.done():
                    self.data_check.result()
                learning_rate, step_batches = clock.learning_rate(self.finished), next(batches)
                try:
                    self.group.broadcast_object(learning_rate)
                    with clock.measure_step():
                        loss, grad_norm, metrics = self.step(step_batches, learning_rate)
                        eval_arrays(loss, grad_norm, metrics, self.step.state)
                except RankLostError as lost:  # it has changed nothing
                    yield from self.save(None)
                    saved = f"step {saver.saved_step} is saved" if saver.saved_step else "nothing is saved yet"
                    message = f"stopped in step {self.current}: {lost.message}; {saved}"
                    raise TrainingError(message, self.run.resume_command) from None
                if problem := self.spike_detector.problem(loss.item(), grad_norm.item()):
                    raise self.divergence_error(problem)
                self.finished = self.current
                memory = platform.process_memory() if ON_CPU else mx.get_peak_memory()
                step = Step(
                    self.finished, clock.steps, self.finished * tokens_per_step, loss.item(), learning_rate,
                    grad_norm.item(), self.rate(), clock.step_seconds,
                    clock.seconds_left(self.finished), memory, {name: x.item() for name, x in metrics.items()},
                )  # fmt: skip
                yield step
                if self.finished == self.first + 1:
                    limit_buffer_cache()
                before, asleep = asleep, seconds_asleep()
                if asleep - before > _MIN_SLEEP_SECONDS:  # all clocks of the run stood still
                    slept = f"this machine slept for {human_seconds(asleep - before)}, which is no training time"
                    yield TrainingWarning(self.finished, slept)
                clock.lap("step", self.finished)
                if on_step is not None:
                    with self.evaluation_model() as lm:
                        on_step(step, lm)
                    clock.lap(None, self.finished)
        yield self.result()

    def read_batches(self) -> Generator[Sequence[NamedArrays], None, None]:
        """Yield the batches of each step that is left: read ahead, or sampled from the model when they are needed."""
        numbers = count(self.first + 1)
        if isinstance(self.batches, TrainBatches):
            yield from prefetch(self.batches.read_step, numbers)
            return
        for number in numbers:
            self.peak_memory = max(self.peak_memory, mx.get_peak_memory())  # generating resets the counter
            with self.clock.measure_step():  # a part of the step
                batches = self.batches.read_step(number)
            yield batches

    def started(self) -> Started:
        """Return the event that begins the run."""
        config, settings, steps, batches = self.run.config, self.run.settings, self.clock.steps, self.batches
        # Under a causal mask a token attends to half of the sequence, on average.
        flops = config.flops_per_token(settings.max_seq_length // 2, training=True)
        return Started(
            self.first, steps, config.parameter_count(), settings.tokens_per_step, batches.epoch_at(steps), flops,
            batches.epochs(steps), batches.dropped_fraction, batches.padding, self.step.micro_batches,
        )  # fmt: skip

    def is_due(self, event: str) -> bool:
        """Whether a "validation", "sample" or "checkpoint" is due after the last finished step."""
        step, steps = self.finished, self.clock.steps
        if step == self.first and event in self.logged:
            return False
        if event == "validation":
            return self.clock.should_validate(step)
        if event == "checkpoint":
            return step > self.first and self.saver.is_due(step, steps, self.clock.elapsed)
        every = self.run.settings.sample_every
        return every > 0 and step > 0 and (step == steps or step % every == 0)

    def validate(self) -> Validation:
        """Measure the loss on validation data, or the mean reward, with the EMA weights if there are any."""
        settings, tokens = self.run.settings, self.finished * self.run.settings.tokens_per_step
        if isinstance(self.batches, GRPOBatches):
            with self.evaluation_model():
                reward = self.batches.mean_reward()
            is_best = self.best is None or -reward <= self.best["loss"]  # the latest of equal ones has learned more
            if is_best:
                self.best = {"step": self.finished, "loss": -reward, "bits_per_byte": None}
            metrics = {"reward": reward}
            return Validation(self.finished, tokens, -reward, math.nan, math.nan, is_best, metrics=metrics)
        with self.step.evaluation_weights():
            rows = -(-settings.batch_size // self.step.micro_batches)
            with expert_load(self.model.layers) as load:
                result = validate(self.model, self.validation_data, settings, rows, settings.eval_tokens)
                busiest = load()
        if not math.isfinite(result.loss):
            raise self.divergence_error(f"the validation loss is {result.loss}")
        best = self.best or {"loss": math.inf}
        is_best = result.loss < best["loss"]
        if is_best:
            best = self.best = {"step": self.finished, "loss": result.loss, "bits_per_byte": result.bits_per_byte}
        # A run too short for the spike detector
        uniform, threshold = math.log(self.run.config.vocab_size), settings.spike_threshold
        if self.finished == self.clock.steps and threshold and best["loss"] > uniform + threshold:
            problem = f"the best validation loss is {best['loss']:.2f}, that of a uniform distribution {uniform:.2f}"
            raise self.divergence_error(problem)
        scores = result.loss, result.perplexity, result.bits_per_byte
        return Validation(self.finished, tokens, *scores, is_best, busiest, result.metrics)

    def sample(self) -> Sample:
        """Generate a sample text with a fixed seed, with the EMA weights if there are any."""
        settings, tokenizer = self.run.settings, self.tokenizer
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
            with self.step.evaluation_weights(), quantized_weights(self.model, self.run.settings.quantization):
                yield LoadedModel(self.model, self.tokenizer, self.run.config, self.run.path)
        finally:
            self.model.train()

    def save(self, validation: Validation | None, wait: Callable[[], bool] | None = None) -> Iterator[Event]:
        """Save a checkpoint of the last finished step, if it is not saved yet. Raises DataError for changed data.

        Args:
            validation: That of this step, if there was one.
            wait: While the disk is full, pause until this returns True; None: go on, the checkpoint is postponed.
        """
        self.data_check.result()
        loss, spikes = validation.loss if validation else None, self.spike_detector
        state = TrainState(
            self.finished, **self.clock.state, validation_loss=loss, best=self.best, healthy=spikes.healthy,
            spike_detector=spikes.state,
        )  # fmt: skip
        if wait is not None:
            yield from self.saver.save_final(state, validation is not None, self.throttle, wait)
        elif event := self.saver.save(state, validation is not None):
            yield event

    def rate(self) -> float:
        """Tokens per second of the last steps; 0 if there are none, or if their answers have different lengths."""
        return self.clock.rate(self.run.settings.tokens_per_step) if self.reward is None else 0.0

    def result(self) -> Finished:
        """Return the event that ends the run."""
        rate = self.rate() if self.finished > self.first else None
        best, memory = self.best or {}, max(self.peak_memory, mx.get_peak_memory())
        loss, bits = best.get("loss"), best.get("bits_per_byte")
        return Finished(self.finished, self.clock.step_seconds, rate, loss, bits, memory, self.run.path)

    def divergence_error(self, problem: str) -> TrainingError:
        """Return the error that ends a run whose loss spiked or is not finite."""
        good = self.run.last_good()
        where = f"the last good checkpoint is {good}" if good else "there is no good checkpoint yet"
        hint = f"a new run with a lower `learning_rate` than {self.run.settings.learning_rate:g} or more `warmup_steps`"
        return TrainingError(f"stopped at step {self.current}: {problem}; {where}", hint)


@contextmanager
def _check_data(run: Run) -> Iterator[Future[None]]:
    """Compare the token shards, or the prompts, with their digests, in a thread, while the first steps are trained.

    Protects from training on changed data: nothing is saved before the check has passed. Its result is a DataError, or
    None.
    """
    verify = verify_shards if run.settings.grpo is None else verify_prompts
    stop = threading.Event()
    with ThreadPoolExecutor(1, "check data") as pool:
        try:
            yield pool.submit(verify, run.data, stop.is_set)
        finally:
            stop.set()


class SpikeDetector:
    """Finds 15 of the last 20 losses above a limit: the lowest median of 100 losses so far, and a margin.

    The margin is `threshold`, or twice the distance from the median of these 100 losses to their 90th percentile if
    that is more: with a batch size of 1, losses differ by more than a nat. (The median absolute deviation is too small
    where most losses are near 0 and a third is not.) Before 100 losses the limit is `threshold` above the loss of a
    uniform distribution, or above the first loss if that is higher.

    Args:
        threshold: Nats; 0: only detect losses that are not finite.
        uniform_loss: Loss of a uniform distribution over the vocabulary, in nats.
        state: The `state` of an earlier detector.
    """

    def __init__(self, threshold: float, uniform_loss: float, state: dict[str, Any] | None = None):
        state = state or {}
        self._threshold, self._uniform_loss = threshold, uniform_loss
        self._losses: deque[float] = deque(state.get("losses", ()), maxlen=_WINDOW)
        self._limit: float | None = state.get("limit")

    def problem(self, loss: float, grad_norm: float) -> str | None:
        """Add the loss and the gradient's norm of a step. Returns what is wrong, if anything."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return f"the loss is {loss} and the gradient's norm {grad_norm}"
        if loss == grad_norm == 0:  # a step without a token to learn, see `TrainStep`
            return None
        self._losses.append(loss)
        if self._limit is None:
            self._limit = max(loss, self._uniform_loss) + self._threshold
        if self._threshold and (count := self._count_above(self._limit)) >= _TOO_MANY:
            return f"the loss rose to {loss:.2f}: {count} of the last {_RECENT} steps are above {self._limit:.2f}"
        if len(self._losses) == _WINDOW:
            middle, high = median(self._losses), sorted(self._losses)[int(0.9 * _WINDOW)]
            self._limit = min(self._limit, middle + max(self._threshold, 2 * (high - middle)))
        return None

    @property
    def healthy(self) -> bool:
        """Whether most losses are clearly below the limit: a checkpoint saved now is a good one."""
        if self._limit is None or not self._threshold:
            return True
        return self._count_above(self._limit - self._threshold / 2) < _RECENT / 2

    @property
    def state(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {"losses": list(self._losses), "limit": self._limit}

    def _count_above(self, limit: float) -> int:
        return sum(loss > limit for loss in list(self._losses)[-_RECENT:])
