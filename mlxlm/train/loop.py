"""The training loop: a generator of events, so that whoever drives it decides what to show."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mlxlm._mlx import ON_CPU, mx
from mlxlm.config import ModelConfig
from mlxlm.data import TokenDataset, TrainBatches
from mlxlm.errors import CheckpointError, TrainingError
from mlxlm.evaluate import evaluate
from mlxlm.model import Decoder
from mlxlm.platform import process_memory
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.plot import draw_losses
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import TrainStep


@dataclass(frozen=True)
class Started:
    """The loop is ready; `step` > 0 after a resume. `epochs`: passes over the data by the last step."""

    step: int
    steps: int
    parameters: int
    tokens_per_step: int
    epochs: float


@dataclass(frozen=True)
class Step:
    """A finished step. `loss` in nats per token; `memory` in bytes."""

    step: int
    steps: int
    tokens: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    seconds_left: float
    memory: int


@dataclass(frozen=True)
class Validation:
    step: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float
    best: bool


@dataclass(frozen=True)
class Sample:
    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Saved:
    step: int
    path: Path


@dataclass(frozen=True)
class Stopped:
    """`should_stop` asked for it: everything up to `step` is saved."""

    step: int
    path: Path


@dataclass(frozen=True)
class Finished:
    step: int
    seconds: float
    tokens_per_second: float
    best_loss: float | None
    bits_per_byte: float | None
    path: Path


Event = Started | Step | Validation | Sample | Saved | Stopped | Finished


class _SpikeGuard:
    """Tells a run that has gone wrong from one noisy batch: by the mean of the last 10 losses."""

    def __init__(self, spike: float, state: dict | None):
        self.spike = spike
        self.recent: deque[float] = deque((state or {}).get("recent", ()), maxlen=10)
        self.lowest: float = (state or {}).get("lowest") or math.inf

    def problem(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss) or not math.isfinite(norm):
            return f"the loss is {loss} and the gradient's norm {norm}"
        self.recent.append(loss)
        if len(self.recent) < 10 or not self.spike:
            return None
        mean = sum(self.recent) / 10
        if mean > self.lowest + self.spike:
            return f"the loss rose from {self.lowest:.2f} to {mean:.2f} (means of 10 steps)"
        self.lowest = min(self.lowest, mean)
        return None

    @property
    def state(self) -> dict:
        return {"recent": list(self.recent), "lowest": self.lowest if math.isfinite(self.lowest) else None}


def train(
    run: Run,
    tokenizer: Tokenizer,
    *,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Train `run` to its last step, yielding an Event for everything that happens.

    Two runs with the same settings and data have the same weights to the bit on the same machine, however
    often they were interrupted and resumed. `should_stop` is asked after each step; if it says yes, the
    state is saved and the generator ends with Stopped.

    Raises TrainingError, naming the last good checkpoint, when the loss is not finite or has risen by
    `settings.spike`; the step that went wrong is never saved. Raises DataError or CheckpointError for
    data or a run that can't be used.
    """
    settings = run.settings
    model = Decoder(run.config, dropout=settings.dropout)
    model.initialize(settings.seed)
    step = TrainStep(model, settings)
    state = run.restore(step) if resume else {}
    data = TokenDataset.open(run.data, "train")
    validation = TokenDataset.open(run.data, "validation")
    if data.fingerprint != tokenizer.fingerprint:
        raise CheckpointError(
            f"{run.data} was prepared with another tokenizer than {run.path}'s",
            "the tokenizer that the data was prepared with",
        )
    batches = TrainBatches(data, settings.batch_size, settings.sequence_length, settings.seed)
    first = state.get("step", 0)
    if resume:
        run.rewind_log(first)
    guard = _SpikeGuard(settings.spike, state.get("guard"))
    best: dict | None = state.get("best")
    spent: float = state.get("seconds", 0.0)
    clock = _Clock()
    epochs = batches.epoch_of(settings.steps * settings.accumulate)
    yield Started(first, settings.steps, model.num_parameters(), settings.tokens_per_step, epochs)

    def validate(done: int) -> Validation:
        nonlocal best
        found = evaluate(model, validation, settings.sequence_length, settings.batch_size, settings.eval_tokens)
        improved = best is None or found.loss < best["loss"]
        if improved:
            best = {"step": done, "loss": found.loss, "bits_per_byte": found.bits_per_byte}
        return Validation(
            done, done * settings.tokens_per_step, found.loss, found.perplexity, found.bits_per_byte, improved
        )

    def save(done: int, validation_loss: float | None) -> Saved:
        path = run.save(
            step,
            {
                "step": done,
                "next_batch": done * settings.accumulate,
                "seconds": spent + clock.seconds,
                "validation_loss": validation_loss,
                "best": best,
                "guard": guard.state,
            },
        )
        return Saved(done, path)

    def due(done: int, every: int) -> bool:
        return done == settings.steps or (every > 0 and done % every == 0)

    try:
        for done in range(first + 1, settings.steps + 1):
            start = (done - 1) * settings.accumulate
            batch = np.stack([batches.batch(start + i) for i in range(settings.accumulate)])
            rate = settings.learning_rate_at(done - 1)
            with clock:
                loss, norm = step(batch, rate)
                mx.eval(loss, norm, step.state)
            loss, norm = loss.item(), norm.item()
            problem = guard.problem(loss, norm)
            if problem:
                raise TrainingError(
                    f"stopped at step {done}: {problem}; {_last_good(run)}",
                    f"a lower --learning-rate than {settings.learning_rate:g} or more --warmup-steps, as a new run",
                )
            event = Step(
                done, settings.steps, done * settings.tokens_per_step, loss, rate, norm,
                clock.rate(settings.tokens_per_step), clock.left(settings.steps - done), memory_in_use(),
            )  # fmt: skip
            run.log({"event": "step", **asdict(event)})
            yield event
            found = None
            if due(done, settings.eval_every):
                found = validate(done)
                run.log({"event": "validation", **asdict(found)})
                yield found
            if settings.sample_every and due(done, settings.sample_every):
                sample = Sample(done, settings.sample_prompt, _sample(model, run.config, tokenizer, settings))
                run.log({"event": "sample", **asdict(sample)})
                yield sample
            stopping = should_stop() and done < settings.steps
            if stopping or due(done, settings.save_every) or (found and found.best):
                yield save(done, found and found.loss)
            if stopping:
                yield Stopped(done, run.path)
                return
    finally:
        entries = run.read_log()
        if any(e["event"] == "step" for e in entries):
            draw_losses(entries, run.path / "loss.png")
    yield Finished(
        settings.steps,
        spent + clock.seconds,
        clock.rate(settings.tokens_per_step),
        best and best["loss"],
        best and best["bits_per_byte"],
        run.path,
    )


class _Clock:
    """Seconds spent in steps; the first step, which compiles, is kept apart from the rates."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._steps = 0
        self._recent: deque[float] = deque(maxlen=50)

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self.seconds += now - self._start
        self._steps += 1
        if self._steps == 1:
            self._compiled = now
        else:
            self._recent.append(now - self._start)

    def rate(self, tokens: int) -> float:
        """Tokens per second over the last 50 steps; 0 before the second step."""
        return tokens * len(self._recent) / sum(self._recent) if self._recent else 0.0

    def left(self, steps: int) -> float:
        """Seconds that `steps` more will take, with the validation and saving that went between them."""
        if self._steps < 2:
            return self.seconds * steps
        return (time.perf_counter() - self._compiled) / (self._steps - 1) * steps


def memory_in_use() -> int:
    """Bytes: MLX's peak on a GPU, this process's on a CPU."""
    return process_memory() if ON_CPU else mx.get_peak_memory()


def measure_step(config: ModelConfig, settings: TrainSettings, steps: int = 3) -> float:
    """Seconds of one training step here, from `steps` steps on random tokens and throwaway weights.

    The first step, which compiles, is not counted.
    """
    model = Decoder(config, dropout=settings.dropout)
    model.initialize(0)
    step = TrainStep(model, settings)
    shape = (settings.accumulate, settings.batch_size, settings.sequence_length + 1)
    batch = np.random.default_rng(0).integers(0, config.vocab_size, shape, dtype=np.int32)
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        mx.eval(step(batch, 0.0), step.state)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[steps // 2]


def _last_good(run: Run) -> str:
    checkpoints = run.checkpoints()
    return f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"


def _sample(model: Decoder, config: ModelConfig, tokenizer: Tokenizer, settings: TrainSettings) -> str:
    from mlxlm.generation import LoadedModel, generate

    model.eval()
    try:
        loaded = LoadedModel(model, tokenizer, config, None)
        options = {"max_tokens": settings.sample_tokens, "temperature": 0.8, "seed": settings.seed}
        return generate(loaded, settings.sample_prompt, **options).text
    finally:
        model.train()
