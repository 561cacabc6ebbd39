"""Which model to train in a given time: the best size by a scaling law, for the text there is, at this machine's speed.

By default the law is that of Hoffmann et al. 2022. Passes over the same text count by what they are worth (Muennighoff
et al. 2023): up to four are nearly as good as new text, later ones teach less and less, and so do parameters that learn
the text by heart: the size depends on the text, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from mlxlm.backend import device
from mlxlm.config import ModelConfig
from mlxlm.data import BadInput, total_bytes
from mlxlm.plan import Training, training_memory
from mlxlm.plan.advice import room
from mlxlm.plan.corpus import corpus_of
from mlxlm.plan.machines import measure_matmul
from mlxlm.plan.model_sizes import family, nearest, vocabulary
from mlxlm.plan.scaling_law import HOFFMANN, OPERATIONS, Law
from mlxlm.train.events import Chosen
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step_benchmark import probe
from mlxlm.train.time_budget import TRAINING, batch_settings
from mlxlm.utils.errors import ConfigError

_UTILISATION = 0.3  # of the speed of large products, which small models reach; a first guess, which probes correct
_BYTES_PER_TOKEN = 3  # the same, of small vocabularies
_ALIKE = 0.005  # losses differ by less: the smallest model is taken, which learns less of a short text by heart
# Of the time, and at most so many seconds, for each of two sizes: beside other programs three short steps say little.
_PROBING, _LONGEST = 0.01, 3.0


@dataclass(frozen=True)
class Choice:
    config: ModelConfig
    tokens: float
    epochs: float
    settings: dict[str, Any]
    by: str

    @property
    def event(self) -> Chosen:
        return Chosen(self.config.parameter_count(), self.tokens, self.epochs, self.by)


def guessed_vocabulary(
    seconds: float, sources: Sequence[str | Path], text_column: str | None, on_bad_input: str = "stop"
) -> int:
    """Tokens of a tokenizer for the model that will be chosen, before there is one: by the speed of products here."""
    each, unique = _flops_in(seconds) / OPERATIONS, math.inf
    if total_bytes(sources):  # a pipe has no size
        unique = corpus_of(sources, 1024, text_column, BadInput(on_bad_input)).bytes / _BYTES_PER_TOKEN
    sizes = [config.parameter_count() for config in family(1024)]
    return vocabulary(min(sizes, key=lambda size: HOFFMANN.repeated(size, each / size, unique)))


def choose(
    seconds: float, unique: int, vocab_size: int, values: Mapping[str, Any], law: Law | None = None, ranks: int = 1
) -> Choice:
    """The model of `mlxlm.plan.model_sizes` that is best after `seconds` of training on a text of `unique` tokens.

    values: settings that are given; batch size and sequence length are chosen, too, unless they are among them.
    law: of the user's own runs; None: `HOFFMANN`.
    ranks: how many processes like this one train together; "accumulate" is what all of them add.

    Raises ConfigError where not even the smallest model fits the memory.
    """
    there = room(device.device_memory())
    expected = _flops_in(seconds)

    def usual(config: ModelConfig) -> TrainSettings:
        """What one process does of a step, by a first guess of the speed."""
        draft = TrainSettings.draft(values)
        tokens = expected / config.flops_per_token(draft.sequence_length // 2, training=True)
        found = TrainSettings.draft(batch_settings(config, tokens, values))
        return replace(found, accumulate=found.accumulate // ranks)

    fitting = [c for c in family(vocab_size) if training_memory(c, Training.of(usual(c))).total <= there]
    if not fitting:
        raise ConfigError("no model fits the memory with these settings", "--batch-size 1, or a smaller --vocab-size")
    pace = pace_of(fitting, seconds, usual)

    def tokens(config: ModelConfig) -> float:
        return TRAINING * seconds * ranks / pace(config)

    def loss(config: ModelConfig) -> float:
        return (law or HOFFMANN).repeated(config.parameter_count(), tokens(config), unique)

    lowest = min(map(loss, fitting))
    best = next(config for config in fitting if loss(config) <= (1 + _ALIKE) * lowest)
    many = tokens(best)
    form = batch_settings(best, many, values)
    by = "the scaling law of Hoffmann et al. 2022" if law is None else "the scaling law of the user's runs"
    return Choice(best, many, many / unique, form, by)


def pace_of(
    members: list[ModelConfig], seconds: float, settings: Callable[[ModelConfig], TrainSettings]
) -> Callable[[ModelConfig], float]:
    """Seconds for each token of training, as a function of the model: two of `members` are probed, others follow by
    their operations. The probes take a small part of `seconds`."""
    guess = HOFFMANN.optimum(_flops_in(seconds))[0]
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

    def pace(config: ModelConfig) -> float:
        at = math.log(_flops(config, settings(config)))
        return math.exp(found[-1][1] + slope * (at - found[-1][0]))

    return pace


def nearest_members(sizes: list[float], vocab_size: int) -> list[ModelConfig]:
    """One member of the family for each of these numbers of parameters, without repeats, from the smallest."""
    found = {c.hidden_size: c for c in (nearest(size, vocab_size) for size in sizes)}
    return [found[hidden] for hidden in sorted(found)]


def _flops_in(seconds: float) -> float:
    """Operations that training does here in so long: a first guess."""
    return measure_matmul(seconds=0.1) * 1e9 * _UTILISATION * seconds


def _flops(config: ModelConfig, settings: TrainSettings) -> float:
    return config.flops_per_token(settings.sequence_length // 2, training=True)
