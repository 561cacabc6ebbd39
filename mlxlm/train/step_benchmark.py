"""Benchmarks training on this machine: three steps on random tokens, and validation."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from mlxlm.backend.mlx import eval_arrays, free_memory, mx
from mlxlm.config import ModelConfig
from mlxlm.data import Batch, TokenDataset
from mlxlm.data.pairs import CHOSEN, REJECTED, PairBatch
from mlxlm.model import Decoder
from mlxlm.train.events import Forecast
from mlxlm.train.objectives import make_loss, validate
from mlxlm.train.run_clock import num_validations
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import NamedArrays, TrainStep

_BENCHMARK_STEPS = 3
BENCHMARK_LABEL = "trying three training steps"
# Shorter runs are not benchmarked, except with a time limit: the benchmark takes four steps itself.
MIN_STEPS_TO_BENCHMARK = 100


@dataclass(frozen=True)
class Probe:
    """The result of a benchmark.

    Attributes:
        compile_seconds: Seconds of the first step.
        step: Seconds of a step: the median of three after the first.
        validation: Seconds of a batch of validation; 0 without validation data.
        memory: MLX's peak in bytes, beyond what was allocated before.
    """

    compile_seconds: float
    step: float
    validation: float
    memory: int

    def forecast(self, settings: TrainSettings, validation_tokens: int, steps: int | None = None) -> Forecast:
        """Predict a run of `steps` (default: the settings'): steps and validations, without saving and samples."""
        steps = settings.steps if steps is None else steps
        length = settings.max_seq_length * (2 if settings.has_pairs else 1)
        windows = min(max(validation_tokens - 1, 1), settings.eval_tokens) / length
        validation_seconds = self.validation * math.ceil(math.ceil(windows) / settings.batch_size)
        if settings.eval_every is None and settings.time_limit is not None:
            times = num_validations(settings.time_limit, validation_seconds)
        else:
            times = -(-steps // settings.eval_every) if settings.eval_every else 1
        seconds = self.compile_seconds + self.step * (steps - 1)
        return Forecast(steps, seconds, seconds + times * validation_seconds, self.memory, times)

    def steps_in(self, seconds: float, settings: TrainSettings, validation_tokens: int) -> int:
        """Return the largest number of steps, at least one, whose forecast is at most `seconds`."""

        def seconds_of(steps: int) -> float:
            return self.forecast(settings, validation_tokens, max(1, steps)).seconds

        return max(1, bisect_right(range(int(max(0.0, seconds) / self.step) + 2), seconds, key=seconds_of) - 1)


def probe(config: ModelConfig, settings: TrainSettings, validation_data: TokenDataset | None = None) -> Probe:
    """Measure time and memory of training `config` here, with throwaway weights.

    One step compiles and three count. Of two batches of `validation_data` the first is for warmup. No memory stays
    allocated.
    """
    free_memory()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    compile_seconds, times, validation = _measure(config, settings, validation_data)
    memory = mx.get_peak_memory() - before
    free_memory()
    return Probe(compile_seconds, median(times), validation, memory)


def _measure(
    config: ModelConfig, settings: TrainSettings, validation_data: TokenDataset | None
) -> tuple[float, list[float], float]:
    """Return the seconds of the first step, of each after it, and of a batch of validation."""
    model = Decoder(config, dropout=settings.dropout)
    model.init_weights(0)
    step, batches = TrainStep(model, settings, loss=make_loss(settings)), _batches(config, settings)
    first, *times = [_seconds(lambda: eval_arrays(step(batches, 0.0), step.state)) for _ in range(1 + _BENCHMARK_STEPS)]
    if validation_data is None:
        return first, times, 0.0
    rows, tokens = settings.batch_size, settings.tokens_per_step // settings.grad_accumulation_steps
    validation = partial(validate, model, validation_data, settings, rows, tokens)
    with step.evaluation_weights():
        return first, times, [_seconds(validation) for _ in range(2)][1]


def _batches(config: ModelConfig, settings: TrainSettings) -> Sequence[NamedArrays]:
    """Return random batches of one step, with documents and a loss mask if the run has them."""
    rows, length = settings.batch_size, settings.max_seq_length
    if settings.has_pairs:
        pairs, kinds = (rows, 2, length), np.tile([[CHOSEN], [REJECTED]], (rows, 1, 8))
        tokens = np.zeros((*pairs[:2], length + 1), np.int32)
        logps = {} if settings.loss == "orpo" else {"reference_logps": np.zeros(kinds.shape, np.float32)}
        ids, mask = np.broadcast_to(np.arange(length) * 8 // length, pairs), np.ones(pairs, np.float32)
        return [PairBatch(tokens, ids, mask, kinds, **logps)] * settings.grad_accumulation_steps
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (settings.grad_accumulation_steps, rows, length + 1), dtype=np.int32)
    ids = np.cumsum(rng.random((rows, length)) < 4 / length, axis=1, dtype=np.int32)
    weights = (rng.random((rows, length)) < 0.5).astype(np.float32)
    masks = ids if settings.document_mask else None, weights if settings.mask_prompt else None
    return [Batch(micro, *masks) for micro in tokens]


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
