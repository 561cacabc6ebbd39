"""Sizes and lengths of the runs of a grid: as given, or the most that fit into a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.plan.model_sizes import model_family
from mlxlm.plan.textbook import TOKENS_PER_PARAMETER
from mlxlm.train.budget import nearest_models
from mlxlm.train.memory_limits import check_memory
from mlxlm.train.settings import TrainSettings
from mlxlm.utils.errors import ConfigError

DEFAULT_MINUTES = 30.0  # of a whole grid
DEFAULT_RATIOS = (5.0, 10.0, 20.0, 40.0)  # tokens per parameter for given sizes
TRAINING_FRACTION = 0.85  # of the minutes; the rest is for validation, saving and plots
_DIVISORS = (8, 4, 2, 1)  # of the largest size and the largest token count, where neither is given

Lengths = list[tuple[ModelConfig, int]]  # models and their training tokens
TokenSeconds = Callable[[ModelConfig], float]  # training time per token of a model


@dataclass(frozen=True)
class GridOptions:
    """Sizes and lengths of the runs of a grid.

    Attributes:
        sizes: Numbers of parameters, embedding included; the nearest models of `mlxlm.plan.model_sizes` are used.
            Without sizes, they and as many token counts are chosen for the time.
        tokens_per_parameter: Training lengths of each size, in tokens per parameter.
        tokens: Training lengths of each size, in tokens.
        minutes: Time limit for the training steps of all runs, by a benchmark. It has no effect on given sizes.

    Raises:
        ConfigError: Both lengths are given.
    """

    sizes: Sequence[float] = ()
    tokens_per_parameter: Sequence[float] = ()
    tokens: Sequence[float] = ()
    minutes: float = DEFAULT_MINUTES

    def __post_init__(self) -> None:
        if self.tokens_per_parameter and self.tokens:
            raise ConfigError("tokens and tokens per parameter each say how long to train", "only one of them")

    def check_positive(self) -> None:
        """Raise ConfigError unless all numbers are positive and finite."""
        numbers = (*self.sizes, *self.tokens_per_parameter, *self.tokens)
        if not 0 < self.minutes < math.inf or not all(0 < x < 1e18 for x in numbers):
            raise ConfigError("sizes, tokens and minutes must be positive numbers")

    def models(self, vocab_size: int) -> Sequence[ModelConfig]:
        """Return the models to train, or all candidates if no sizes are given; smallest first."""
        return nearest_models(list(self.sizes), vocab_size) if self.sizes else model_family(vocab_size)

    def lengths(self, parameters: int, default_ratios: Sequence[float] = ()) -> list[float]:
        """Return the training lengths of a size, in tokens."""
        return list(self.tokens) or [ratio * parameters for ratio in self.tokens_per_parameter or default_ratios]


@dataclass(frozen=True)
class GridRun:
    """A planned run of a grid.

    Attributes:
        hidden_size: Width of the model, see `model_of_width`.
        parameters: Number of parameters, embedding included.
        tokens: Training tokens.
        steps: Training steps.
        seconds: Predicted time of its steps.
    """

    hidden_size: int
    parameters: int
    tokens: int
    steps: int
    seconds: float

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.parameters}-{self.tokens}"

    @property
    def param_tokens(self) -> int:
        """N D: proportional to its operations."""
        return self.parameters * self.tokens

    def is_valid(self) -> bool:
        """Return whether the types and values are possible, for a run that was read from a file."""
        counts = (self.hidden_size, self.parameters, self.tokens, self.steps)
        return all(type(n) is int and n > 0 for n in counts) and 0 <= float(self.seconds) < math.inf


def plan_runs(lengths: Lengths, settings: dict[str, Any], token_seconds: TokenSeconds) -> list[GridRun]:
    """Round the lengths to steps. Lengths that round to the same number of steps become one run."""
    tokens_per_step = TrainSettings.provisional(settings).tokens_per_step
    runs = {}
    for config, n in lengths:
        steps = max(1, round(n / tokens_per_step))
        check_memory(config, TrainSettings.provisional({**settings, "steps": steps}), preset="")
        tokens = steps * tokens_per_step
        seconds = token_seconds(config) * tokens
        run = GridRun(config.hidden_size, config.parameter_count(), tokens, steps, seconds)
        runs[run.name] = run
    return sorted(runs.values(), key=lambda run: run.param_tokens)


def fit_to_time(
    models: Sequence[ModelConfig],
    token_seconds: Callable[[ModelConfig], float],
    max_tokens: float,
    options: GridOptions,
) -> Lengths:
    """Return the grid of the largest models that can be trained in the minutes of `options`.

    Args:
        models: All candidates, smallest first.
        token_seconds: Training time per token of a model.
        max_tokens: Of one run.
        options: Minutes for all runs, and their lengths if given. If the time is too short for the smallest models,
            they get fewer tokens.

    Raises:
        ConfigError: The lengths are given, and take too long even for the smallest models.
    """
    best: Lengths = []
    seconds = 60 * options.minutes * TRAINING_FRACTION
    for last in range(len(_DIVISORS) - 1, len(models)):
        largest = models[last].parameter_count()
        sizes = nearest_models([largest / n for n in _DIVISORS], models[0].vocab_size)
        if len(sizes) < len(_DIVISORS):
            sizes = list(models[last + 1 - len(_DIVISORS) : last + 1])
        longest = min(max_tokens, TOKENS_PER_PARAMETER * largest)
        grid = []
        for config in sizes:
            lengths = options.lengths(config.parameter_count()) or [longest / n for n in _DIVISORS]
            grid += [(config, int(n)) for n in sorted({min(max_tokens, n) for n in lengths})]
        total = sum(token_seconds(config) * n for config, n in grid)
        if total <= seconds:
            best = grid
        elif best:
            return best
        elif options.tokens_per_parameter or options.tokens:
            hint = f"`minutes={math.ceil(total / TRAINING_FRACTION / 60)}`"
            raise ConfigError("even the smallest models take longer to train on these tokens", hint)
        else:
            return [(config, max(1, int(n * seconds / total))) for config, n in grid]
    return best
