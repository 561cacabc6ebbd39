"""Which model to train in a given time: the best size by a scaling law, for the text there is, at this machine's speed.

By default the law is that of Hoffmann et al. 2022. Passes over the same text count by what they are worth (Muennighoff
et al. 2023): up to four are nearly as good as new text, later ones teach less and less, and so do parameters that learn
the text by heart: the size depends on the text, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mlxlm.backend import device
from mlxlm.config import ModelConfig
from mlxlm.data import BadInput, total_bytes
from mlxlm.plan import Training, training_memory
from mlxlm.plan.advice import usable_memory
from mlxlm.plan.corpus import count_corpus
from mlxlm.plan.machines import measure_matmul
from mlxlm.plan.model_sizes import model_family, nearest_model, vocab_size_for
from mlxlm.plan.scaling_law import CHINCHILLA_LAW, FLOPS_PER_PARAM_TOKEN, ScalingLaw
from mlxlm.train.budget import TRAINING_FRACTION, batch_settings
from mlxlm.train.events import ModelSizeChosen
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step_benchmark import probe
from mlxlm.utils.errors import ConfigError

_UTILISATION = 0.3  # of the speed of large products, which small models reach; a first guess, which probes correct
_BYTES_PER_TOKEN = 3  # the same, of small vocabularies
_ALIKE = 0.005  # losses differ by less: the smallest model is taken, which learns less of a short text by heart
# Of the time, and at most so many seconds, for each of two sizes: beside other programs three short steps say little.
_PROBING, _LONGEST = 0.01, 3.0


@dataclass(frozen=True)
class AutoSize:
    config: ModelConfig
    tokens: float
    epochs: float
    settings: dict[str, Any]
    law_name: str

    @property
    def event(self) -> ModelSizeChosen:
        return ModelSizeChosen(self.config.parameter_count(), self.tokens, self.epochs, self.law_name)


def guess_vocab_size(
    seconds: float, sources: Sequence[str | Path], text_column: str | None, on_bad_input: str = "stop"
) -> int:
    """Tokens of a tokenizer for the model that will be chosen, before there is one: by the speed of products here."""
    each, unique_tokens = _flops_in(seconds) / FLOPS_PER_PARAM_TOKEN, math.inf
    if total_bytes(sources):  # a pipe has no size
        unique_tokens = count_corpus(sources, 1024, text_column, BadInput(on_bad_input)).bytes / _BYTES_PER_TOKEN
    sizes = [config.parameter_count() for config in model_family(1024)]
    return vocab_size_for(
        min(sizes, key=lambda size: CHINCHILLA_LAW.loss_with_repetition(size, each / size, unique_tokens))
    )


def auto_size(
    seconds: float,
    unique_tokens: int,
    vocab_size: int,
    values: Mapping[str, Any],
    scaling_law: ScalingLaw | None = None,
    num_processes: int = 1,
) -> AutoSize:
    """The model of `mlxlm.plan.model_sizes` that is best after `seconds` of training on a text of `unique_tokens` tokens.

    values: settings that are given; batch size and sequence length are chosen, too, unless they are among them.
    scaling_law: of the user's own runs; None: `CHINCHILLA_LAW`.
    num_processes: how many processes like this one train together; "accumulate" is what all of them add.

    Raises ConfigError where not even the smallest model fits the memory.
    """
    there = usable_memory(device.device_memory())
    expected = _flops_in(seconds)

    def usual(config: ModelConfig) -> TrainSettings:
        """What one process does of a step, by a first guess of the speed."""
        provisional = TrainSettings.provisional(values)
        tokens = expected / config.flops_per_token(provisional.max_seq_length // 2, training=True)
        found = TrainSettings.provisional(batch_settings(config, tokens, values))
        return found.per_process(num_processes)

    fitting = [c for c in model_family(vocab_size) if training_memory(c, Training.from_settings(usual(c))).total <= there]
    if not fitting:
        raise ConfigError("no model fits the memory with these settings", "--batch-size 1, or a smaller --vocab-size")
    token_seconds = fit_token_seconds(fitting, seconds, usual)

    def tokens(config: ModelConfig) -> float:
        return TRAINING_FRACTION * seconds * num_processes / token_seconds(config)

    def loss(config: ModelConfig) -> float:
        return (scaling_law or CHINCHILLA_LAW).loss_with_repetition(
            config.parameter_count(), tokens(config), unique_tokens
        )

    lowest = min(map(loss, fitting))
    best = next(config for config in fitting if loss(config) <= (1 + _ALIKE) * lowest)
    many = tokens(best)
    form = batch_settings(best, many, values)
    law_name = (
        "the scaling law of Hoffmann et al. 2022" if scaling_law is None else "the scaling law of the user's runs"
    )
    return AutoSize(best, many, many / unique_tokens, form, law_name)


def fit_token_seconds(
    members: list[ModelConfig], seconds: float, settings: Callable[[ModelConfig], TrainSettings]
) -> Callable[[ModelConfig], float]:
    """Seconds for each token of training, as a function of the model: two of `members` are probed, others follow by
    their operations. The probes take a small part of `seconds`."""
    guess = CHINCHILLA_LAW.compute_optimal(_flops_in(seconds))[0]
    by_size = sorted(members, key=lambda c: c.parameter_count())
    large = next((c for c in reversed(by_size) if c.parameter_count() <= guess), by_size[0])
    small = next((c for c in reversed(by_size) if c.parameter_count() <= large.parameter_count() / 4), by_size[0])
    found = []
    for config in {c.hidden_size: c for c in (small, large)}.values():
        tried, until = settings(config), time.monotonic() + min(_LONGEST, _PROBING * seconds)
        steps = [probe(config, tried).step]
        while time.monotonic() < until:
            steps.append(probe(config, tried).step)
        found.append((math.log(_flops(config, tried)), math.log(median(steps) / tried.tokens_per_step)))
    slope = 1.0
    if len(found) == 2 and found[1][0] > found[0][0]:
        slope = min(1.2, max(0.3, (found[1][1] - found[0][1]) / (found[1][0] - found[0][0])))

    def token_seconds(config: ModelConfig) -> float:
        at = math.log(_flops(config, settings(config)))
        return math.exp(found[-1][1] + slope * (at - found[-1][0]))

    return token_seconds


def nearest_models(sizes: list[float], vocab_size: int) -> list[ModelConfig]:
    """One member of the family for each of these numbers of parameters, without repeats, from the smallest."""
    found = {c.hidden_size: c for c in (nearest_model(size, vocab_size) for size in sizes)}
    return [found[hidden] for hidden in sorted(found)]


def _flops_in(seconds: float) -> float:
    """Operations that training does here in so long: a first guess."""
    return measure_matmul(seconds=0.1) * 1e9 * _UTILISATION * seconds


def _flops(config: ModelConfig, settings: TrainSettings) -> float:
    return config.flops_per_token(settings.max_seq_length // 2, training=True)
