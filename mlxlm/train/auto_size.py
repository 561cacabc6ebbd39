"""Which model to train in a certain time: the best size by a scaling law, for the text and the speed of this machine.

By default the law is that of Hoffmann et al. 2022. Repeated text counts less (Muennighoff et al. 2023): up to four
epochs are nearly as good as new text, later ones teach less and less, and so do parameters that memorize the text. So
the size depends on the text, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.data import BadInput, total_bytes
from mlxlm.plan.corpus import count_corpus
from mlxlm.plan.machines import measure_matmul
from mlxlm.plan.model_sizes import model_family, nearest_model, vocab_size_for
from mlxlm.plan.scaling_law import CHINCHILLA_LAW, FLOPS_PER_PARAM_TOKEN, ScalingLaw
from mlxlm.train.budget import TRAINING_FRACTION, batch_settings
from mlxlm.train.events import ModelSizeChosen
from mlxlm.train.memory_limits import fits_memory
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step_benchmark import probe
from mlxlm.utils.errors import ConfigError

_MFU = 0.3  # of the speed of large products, for small models: a first guess, which benchmarks correct
_BYTES_PER_TOKEN = 3  # a guess for small vocabularies
_EQUAL_LOSS = 0.005  # relative: of nearly equal losses, the smallest model wins, which memorizes less of a short text
# Seconds for each of two sizes, and their fraction of the time: beside other programs three short steps say little.
_BENCHMARK_FRACTION, _MAX_BENCHMARK_SECONDS = 0.01, 3.0


def guess_vocab_size(
    seconds: float, sources: Sequence[str | Path], text_column: str | None, on_bad_input: str = "stop"
) -> int:
    """Guess the vocabulary size for the model that will be chosen, by the speed of matrix products here."""
    param_tokens, unique_tokens = _flops_in(seconds) / FLOPS_PER_PARAM_TOKEN, math.inf
    if total_bytes(sources):  # a pipe has no size
        unique_tokens = count_corpus(sources, 1024, text_column, BadInput(on_bad_input)).bytes / _BYTES_PER_TOKEN
    sizes = [config.parameter_count() for config in model_family(1024)]
    return vocab_size_for(
        min(sizes, key=lambda size: CHINCHILLA_LAW.loss_with_repetition(size, param_tokens / size, unique_tokens))
    )


def auto_size(
    seconds: float,
    unique_tokens: int,
    vocab_size: int,
    values: Mapping[str, Any],
    scaling_law: ScalingLaw | None = None,
    num_processes: int = 1,
) -> tuple[ModelConfig, dict[str, Any], ModelSizeChosen]:
    """Return the model of `mlxlm.plan.model_sizes` that is best after `seconds` of training, and its settings.

    Args:
        seconds: Training time.
        unique_tokens: Tokens of the text.
        vocab_size: Vocabulary size.
        values: Settings. Batch size and sequence length are chosen, too, unless they are given here.
        scaling_law: A law fitted to the user's runs; None: `CHINCHILLA_LAW`.
        num_processes: Processes that train together; `grad_accumulation_steps` are those of all of them.

    Raises:
        ConfigError: Not even the smallest model fits the memory.
    """
    available_flops = _flops_in(seconds)
    law = scaling_law or CHINCHILLA_LAW

    def settings_for(config: ModelConfig) -> TrainSettings:
        """The settings of one process, by a first guess of the speed."""
        draft = TrainSettings.provisional(values)
        tokens = available_flops / config.flops_per_token(draft.max_seq_length // 2, training=True)
        return TrainSettings.provisional(batch_settings(config, tokens, values)).per_process(num_processes)

    candidates = [config for config in model_family(vocab_size) if fits_memory(config, settings_for(config))]
    if not candidates:
        raise ConfigError("no model fits the memory with these settings", "--batch-size 1, or a smaller --vocab-size")
    token_seconds = fit_token_seconds(candidates, seconds, settings_for)

    def tokens_in_time(config: ModelConfig) -> float:
        return TRAINING_FRACTION * seconds * num_processes / token_seconds(config)

    def loss(config: ModelConfig) -> float:
        return law.loss_with_repetition(config.parameter_count(), tokens_in_time(config), unique_tokens)

    lowest = min(map(loss, candidates))
    best = next(config for config in candidates if loss(config) <= (1 + _EQUAL_LOSS) * lowest)
    tokens = tokens_in_time(best)
    law_name = "the scaling law of " + ("Hoffmann et al. 2022" if scaling_law is None else "the user's runs")
    choice = ModelSizeChosen(best.parameter_count(), tokens, tokens / unique_tokens, law_name)
    return best, batch_settings(best, tokens, values), choice


def fit_token_seconds(
    models: Sequence[ModelConfig], seconds: float, settings: Callable[[ModelConfig], TrainSettings]
) -> Callable[[ModelConfig], float]:
    """Return a function that predicts the training seconds per token of a model.

    Two of `models` are benchmarked, in a small part of `seconds`; others follow from their operations.
    """
    guess = CHINCHILLA_LAW.compute_optimal(_flops_in(seconds))[0]
    by_size = sorted(models, key=lambda c: c.parameter_count())
    large = next((c for c in reversed(by_size) if c.parameter_count() <= guess), by_size[0])
    small = next((c for c in reversed(by_size) if c.parameter_count() <= large.parameter_count() / 4), by_size[0])
    points = []  # logarithms of the operations and the seconds per token
    for config in {c.hidden_size: c for c in (small, large)}.values():
        model_settings = settings(config)
        end = time.monotonic() + min(_MAX_BENCHMARK_SECONDS, _BENCHMARK_FRACTION * seconds)
        steps = [probe(config, model_settings).step]
        while time.monotonic() < end:
            steps.append(probe(config, model_settings).step)
        seconds_per_token = median(steps) / model_settings.tokens_per_step
        points.append((math.log(_flops(config, model_settings)), math.log(seconds_per_token)))
    slope = 1.0
    if len(points) == 2 and points[1][0] > points[0][0]:
        slope = min(1.2, max(0.3, (points[1][1] - points[0][1]) / (points[1][0] - points[0][0])))

    def token_seconds(config: ModelConfig) -> float:
        log_flops = math.log(_flops(config, settings(config)))
        return math.exp(points[-1][1] + slope * (log_flops - points[-1][0]))

    return token_seconds


def nearest_models(sizes: list[float], vocab_size: int) -> list[ModelConfig]:
    """Return the nearest model of the family for each number of parameters, without duplicates, smallest first."""
    models = {c.hidden_size: c for c in (nearest_model(size, vocab_size) for size in sizes)}
    return [models[hidden_size] for hidden_size in sorted(models)]


def _flops_in(seconds: float) -> float:
    """Guess the operations of training in `seconds` on this machine."""
    return measure_matmul(seconds=0.1) * 1e9 * _MFU * seconds


def _flops(config: ModelConfig, settings: TrainSettings) -> float:
    return config.flops_per_token(settings.max_seq_length // 2, training=True)
