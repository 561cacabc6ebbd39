"""What training takes on this machine, by trying it: three steps on random tokens, and validation."""

from __future__ import annotations

import gc
import math
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mlxlm.backend.mlx import eval_arrays, mx
from mlxlm.config import ModelConfig
from mlxlm.data import Batch, TokenDataset
from mlxlm.evaluate import evaluate_dataset
from mlxlm.model import Decoder
from mlxlm.train.deadline import num_validations
from mlxlm.train.events import Forecast
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import TrainStep

BENCHMARK_STEPS = 3
BENCHMARK_LABEL = "trying three training steps"
# A run of fewer steps isn't probed, unless its length is given in minutes: the probe has four of its own.
MIN_STEPS_TO_BENCHMARK = 100


@dataclass(frozen=True)
class Probe:
    """compile_seconds: seconds of the first step. step: the median of three after it. validation: seconds of a batch of
    validation, 0 where there was nothing to validate on. memory: MLX's peak in bytes, over what was there before."""

    compile_seconds: float
    step: float
    validation: float
    memory: int

    def forecast(self, settings: TrainSettings, held_out: int, steps: int | None = None) -> Forecast:
        """What a run of so many `steps` (None: the settings') takes, `held_out` tokens being there to validate on: all
        steps and validations, without saving and samples."""
        steps = settings.steps if steps is None else steps
        windows = min(max(held_out - 1, 1), settings.eval_tokens) / settings.max_seq_length
        each = self.validation * math.ceil(math.ceil(windows) / settings.batch_size)
        if settings.eval_every is None:
            times = num_validations(settings.time_limit, each)
        else:
            times = -(-steps // settings.eval_every) if settings.eval_every else 1
        seconds = self.compile_seconds + self.step * (steps - 1)
        return Forecast(steps, seconds, seconds + times * each, self.memory, times)

    def steps_in(self, seconds: float, settings: TrainSettings, held_out: int) -> int:
        """The most steps, at least one, whose forecast is no longer than `seconds`."""

        def takes(steps: int) -> float:
            return self.forecast(settings, held_out, max(1, steps)).seconds

        return max(1, bisect_right(range(int(max(0.0, seconds) / self.step) + 2), seconds, key=takes) - 1)


def probe(config: ModelConfig, settings: TrainSettings, held_out: TokenDataset | None = None) -> Probe:
    """Time and memory of training `config` here, on throwaway weights.

    One step that compiles and three that count; with `held_out`, two batches of that are validated on, the first of
    which warms up. What was in memory before stays, and nothing else does.
    """
    _forget()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    compile_seconds, times, validation = _tried(config, settings, held_out)
    memory = mx.get_peak_memory() - before
    _forget()
    return Probe(compile_seconds, sorted(times)[BENCHMARK_STEPS // 2], validation, memory)


def _tried(
    config: ModelConfig, settings: TrainSettings, held_out: TokenDataset | None
) -> tuple[float, list[float], float]:
    """Seconds: of the first step, of each after it, and of a batch of validation."""
    model = Decoder(config, dropout=settings.dropout)
    model.init_weights(0)
    step, batches = TrainStep(model, settings), _batches(config, settings)
    first, *times = [_seconds(lambda: eval_arrays(step(batches, 0.0), step.state)) for _ in range(1 + BENCHMARK_STEPS)]
    if held_out is None:
        return first, times, 0.0
    _, validation = [_seconds(lambda: _validate(model, held_out, settings)) for _ in range(2)]
    return first, times, validation


def _validate(model: Decoder, held_out: TokenDataset, settings: TrainSettings) -> None:
    """On one batch, as a run does."""
    length, rows = settings.max_seq_length, settings.batch_size
    masks = {"document_mask": settings.document_mask, "mask_prompt": settings.mask_prompt}
    evaluate_dataset(model, held_out, length, rows, rows * length, **masks)


def _forget() -> None:
    """Models have cycles, so that they stay until Python looks for those."""
    gc.collect()
    mx.clear_cache()


def _batches(config: ModelConfig, settings: TrainSettings) -> list[Batch]:
    """One step's: with documents, and weights, where the run's have them."""
    rows, length = settings.batch_size, settings.max_seq_length
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, config.vocab_size, (settings.grad_accumulation_steps, rows, length + 1), dtype=np.int32)
    segment_ids = np.cumsum(draw.random((rows, length)) < 4 / length, axis=1, dtype=np.int32)
    weights = (draw.random((rows, length)) < 0.5).astype(np.float32)
    return [
        Batch(micro, segment_ids if settings.document_mask else None, weights if settings.mask_prompt else None)
        for micro in tokens
    ]


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
