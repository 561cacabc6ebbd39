"""How long a run trains, and what follows from a time limit: model size, batch size, sequence length, validation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.device import num_batch_shards
from mlxlm.config import ModelConfig
from mlxlm.data import total_bytes
from mlxlm.families import load_preset, preset_names
from mlxlm.plan.machines import measure_matmul
from mlxlm.plan.model_sizes import model_family, nearest_model, vocab_size_for
from mlxlm.plan.scaling_law import CHINCHILLA_LAW, FLOPS_PER_PARAM_TOKEN, ScalingLaw
from mlxlm.train.events import ModelSizeChosen
from mlxlm.train.memory_limits import fits_memory
from mlxlm.train.run_clock import VALIDATION_FRACTION
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step_benchmark import Probe, probe
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.formatting import human_count, human_seconds

MEASURING_LABEL = "measuring the speed of training steps"
TRAINING_FRACTION = 0.9  # of the time: the rest is for validating and saving
_TARGET_STEPS = 4000  # in two minutes, 512 tokens per step did better than 2,048
# Muon has matrix products of its own in each step. Tinyshakespeare, one run each, bits per byte and CPU seconds: 0.43M
# parameters, 1.5M tokens, 512 in a step 2.137 and 337, 1,024 2.142 and 244, AdamW with 512 2.190 and 225; 1.54M
# parameters, 1.5M tokens, 1,024 in a step 2.133 and 514, 2,048 2.158 and 487.
_MUON_STEP_TOKENS = 1024  # up to here, twice as many as AdamW has
_MAX_ROWS = 32
_SHORT, _LONG = 256, 512  # tokens of a sequence; long ones if a step still has two of them
# (parameters, longest sequence) of small models, which make little use of a longer context, and of somewhat larger ones
# if a step would have fewer than _ROWS long sequences. Tinyshakespeare, one run each, bits per byte and seconds of CPU
# time: 600,000 tokens, 512 in a step, 80k parameters with sequences of 256 tokens 2.682 and 62, of 128 2.633 and 62, of
# 64 2.614 and 49; 280k parameters with 256 2.516 and 121, with 128 2.458 and 117; 2.5 million tokens, 1,024 in a step,
# 0.93M parameters with 256 2.144 and 578, with 128 2.117 and 509. Longer ones in the last steps were no better.
_SMALL_MODELS, _FEW_ROWS = ((100_000, 64), (500_000, 128)), (4_000_000, 128)
_ROWS = 8
_MIN_TOKENS = 100 * _SHORT  # with fewer, a model learns little more than the frequencies of tokens
_RECOMMENDED_TOKENS = 1000 * _SHORT  # for the hint to someone who has too little time
_CORE_UTILIZATION = 0.75  # of all cores: with fewer rows there are more updates of the same tokens, which is worth more
_MIN_STEPS = 20  # with fewer, a run can't end within 5% of its time
_MFU = 0.3  # of the speed of large products, for small models: a first guess, which benchmarks correct
_BYTES_PER_TOKEN = 3  # a guess for small vocabularies
_OCCURRENCES, _MIN_VOCAB_SIZE = 128, 512  # see `guess_vocab_size`
# A model with many parameters for each token of the text memorizes it in a few epochs, see docs/recipes.md.
_DROPOUT, _DROPOUT_EPOCHS, _DROPOUT_PARAMETERS = 0.1, 5, 2
_EQUAL_LOSS = 0.002  # relative: of nearly equal losses, the smallest model wins, which memorizes less of a short text
# Seconds for each of two sizes, and their fraction of the time: while other programs run, three short steps say little.
_BENCHMARK_FRACTION, _MAX_BENCHMARK_SECONDS = 0.01, 3.0


@dataclass(frozen=True)
class Budget:
    """How long to train: at most one of `tokens`, `epochs`, `minutes` and `steps`.

    Attributes:
        tokens: Tokens to train on.
        epochs: Passes over the text (fine-tuning).
        minutes: Wall-clock minutes from `start_time` to the end of the run.
        steps: Steps.
        duty_cycle: Percentage of the time that the run computes. See `PowerPolicy`.
        start_time: When the minutes begin to count, as of `time.monotonic()`. Default: now.
        counts_preparation: Whether the minutes include the time for the tokenizer and the tokens. If not, they begin to
            count after it.
        num_processes: Processes that train together. See `ProcessGroup`.
        scaling_law: Chooses the model size for the minutes; None: that of Hoffmann et al. 2022.

    Raises:
        ConfigError: More than one duration, or a duration that is not positive.
    """

    tokens: float | None = None
    epochs: float | None = None
    minutes: float | None = None
    steps: int | None = None
    duty_cycle: float = 100.0
    start_time: float = field(default_factory=time.monotonic)
    counts_preparation: bool = True
    num_processes: int = 1
    scaling_law: ScalingLaw | None = None

    def __post_init__(self) -> None:
        check_duration(tokens=self.tokens, epochs=self.epochs, minutes=self.minutes, steps=self.steps)

    def seconds_left(self) -> float:
        """Return the wall-clock seconds left of `minutes` (infinity without them). Raises ConfigError at 0."""
        limit = math.inf if self.minutes is None else 60 * self.minutes
        used = time.monotonic() - self.start_time
        if used >= limit:
            problem = f"preparing the training took {human_seconds(used)} of {human_seconds(limit)}"
            raise ConfigError(problem, f"`minutes={math.ceil(2 * used / 60)}`")
        return limit - used

    def compute_seconds_left(self) -> float:
        """Return the part of `seconds_left` in which the run computes."""
        return self.seconds_left() * self.duty_cycle / 100


def check_duration(**durations: float | None) -> None:
    """Raise ConfigError unless at most one of these is set, and is a positive number."""
    limits = {name: value for name, value in durations.items() if value is not None}
    if len(limits) > 1:
        raise ConfigError(f"{' and '.join(limits)} each say how long to train", "only one of them")
    for name, value in limits.items():
        if not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise ConfigError(f"{name} is {value!r}, it must be a positive number")


def num_rows(tokens_per_step: float, length: int) -> int:
    """Return the power of two of rows that is nearest to `tokens_per_step` tokens."""
    max_rows = _MAX_ROWS * max(1, _SHORT // length)
    return 2 ** round(math.log2(min(max_rows, max(1.0, tokens_per_step / length))))


def batch_settings(config: ModelConfig, tokens: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with a sequence length and a batch size, if they have none, for training on `tokens`."""
    values, parameters = dict(values), config.active_parameter_count()
    step_tokens = tokens / _TARGET_STEPS
    length = _LONG if step_tokens >= 2 * _LONG else _SHORT
    limits = _SMALL_MODELS if step_tokens >= _ROWS * _LONG else (*_SMALL_MODELS, _FEW_ROWS)
    length = next((short for most, short in limits if parameters <= most), length)
    if values.get("optimizer") == "muon":
        step_tokens = max(step_tokens, min(_MUON_STEP_TOKENS, 2 * step_tokens))
    values.setdefault("max_seq_length", min(length, config.max_position_embeddings))
    row = values["max_seq_length"] * values.get("grad_accumulation_steps", 1)
    values.setdefault("batch_size", num_rows(step_tokens, row))
    return values


def min_rows(config: ModelConfig, values: Mapping[str, Any]) -> int:
    """Return the fewest rows that a step should have: one for each core, if that uses the cores much better.

    The cores of a CPU share the rows of a batch. A single row is computed on all of them together, which can take
    several times as long while other programs run: measured 670 tokens/s with one row and 4,600 with many.
    """
    cores = platform.cpu_cores()
    if num_batch_shards(cores) == 1:
        return 1
    settings = TrainSettings.provisional({**values, "grad_accumulation_steps": 1})
    config = config.with_changes(max_position_embeddings=settings.max_seq_length)
    one, all_cores = (probe(config, replace(settings, batch_size=rows)).step for rows in (1, cores))
    return cores if one > _CORE_UTILIZATION * all_cores else 1


def time_limit_settings(
    benchmark: Probe, budget: Budget, values: Mapping[str, Any], validation_tokens: int
) -> dict[str, Any]:
    """Return `values` with the time limit, the steps that fit into it, and settings for validation if they have none.

    A run validates as often as the time allows, see `RunClock`, on no more tokens than two validations have time for.
    """
    seconds = budget.seconds_left()
    values = {"eval_every": None, "save_every": 0, **values, "time_limit": seconds}
    settings = TrainSettings.provisional(values)
    if "eval_tokens" not in values and benchmark.validation:
        batch = settings.batch_size * settings.max_seq_length
        max_tokens = int(VALIDATION_FRACTION / 2 * seconds / benchmark.validation) * batch
        values["eval_tokens"] = max(batch, min(TrainSettings.eval_tokens, max_tokens))
        settings = TrainSettings.provisional(values)
    return {**values, "steps": benchmark.steps_in(seconds * budget.duty_cycle / 100, settings, validation_tokens)}


def seconds_per_token(
    config: ModelConfig, seconds: float, values: Mapping[str, Any], num_processes: int = 1, finetuning: bool = False
) -> float:
    """Measure the time that training `config` takes per token, by steps of two short rows.

    Args:
        config: The model.
        seconds: The time of the run.
        values: Settings.
        num_processes: Processes that train together.
        finetuning: Whether the run is a fine-tuning run, which may see few tokens.

    Raises:
        ConfigError: In `seconds` the model would see too few tokens to learn anything.
    """
    settings = TrainSettings.provisional({**values, "batch_size": 2, "grad_accumulation_steps": 1})
    length = min(_SHORT, config.max_position_embeddings, values.get("max_seq_length", _SHORT))

    given = TrainSettings.provisional(values)
    rows = given.batch_size if "batch_size" in values else 1
    fixed_length = finetuning or "max_seq_length" in values
    row = given.max_seq_length if fixed_length else min(_SHORT, config.max_position_embeddings)
    step_tokens = rows * row * given.grad_accumulation_steps
    limit = human_seconds(seconds) if seconds >= 10 else f"{seconds:.2g}s"
    subject = f"in {limit} a model of {human_count(config.parameter_count())} parameters would"

    def check(token_seconds: float) -> None:
        """Raise ConfigError if at this speed, `seconds` are too few for a useful run."""
        tokens = seconds / token_seconds
        if not finetuning and tokens < _MIN_TOKENS:
            minutes = math.ceil(_RECOMMENDED_TOKENS * token_seconds / TRAINING_FRACTION / 60)
            preset = _largest_preset(config, seconds, token_seconds)
            hint = (f"`preset={preset}`, or " if preset else "") + f"`minutes={minutes}`"
            raise ConfigError(f"{subject} see about {human_count(tokens)} tokens here, too few to learn from", hint)
        if tokens < _MIN_STEPS * step_tokens:
            too_large = {
                "batch_size": rows > 1,
                "max_seq_length": row > _SHORT,
                "grad_accumulation_steps": given.grad_accumulation_steps > num_processes,
            }
            remedies = [f"a smaller `{name}`" for name, helps in too_large.items() if helps]
            remedies.append(f"`minutes={math.ceil(2 * _MIN_STEPS * step_tokens * token_seconds / 60)}`")
            steps = f"{human_count(tokens / step_tokens)} steps of {step_tokens:,} tokens"
            raise ConfigError(f"{subject} make {steps} here, too few to learn from", ", or ".join(remedies))

    # No model is faster than large matrix products: if even they take too long, no step needs to be tried.
    flops = config.flops_per_token(length // 2, training=True)
    check(flops / (measure_matmul(seconds=0.1, dtype=settings.dtype) * 1e9) / num_processes)
    settings = replace(settings, max_seq_length=length)
    token_seconds = probe(config, settings).step / settings.tokens_per_step / num_processes
    check(token_seconds)
    return token_seconds


def _largest_preset(config: ModelConfig, seconds: float, token_seconds: float) -> str | None:
    """Return the largest preset, smaller than `config`, that can be trained in `seconds`."""
    flops = config.flops_per_token(_SHORT // 2, training=True)
    ratios = {n: load_preset(n).flops_per_token(_SHORT // 2, training=True) / flops for n in preset_names()}
    fast = [n for n, ratio in ratios.items() if ratio < 1 and _RECOMMENDED_TOKENS * token_seconds * ratio <= seconds]
    return fast[-1] if fast else None


def guess_vocab_size(seconds: float, sources: Sequence[str | Path]) -> int:
    """Guess the vocabulary size for the model that will be chosen, by the speed of matrix products here.

    A text has at least `_OCCURRENCES` tokens for each of the vocabulary: rarer ones are memorized in few epochs.
    """
    unique_tokens = (total_bytes(sources) or math.inf) / _BYTES_PER_TOKEN  # a pipe has no size
    vocab_size = vocab_size_for(_guess_model(model_family(1024), seconds, unique_tokens).parameter_count())
    while vocab_size > _MIN_VOCAB_SIZE and unique_tokens < _OCCURRENCES * vocab_size:
        vocab_size //= 2
    return vocab_size


def _guess_model(models: Sequence[ModelConfig], seconds: float, unique_tokens: float) -> ModelConfig:
    """Guess which model is best after `seconds`, by the speed of matrix products here."""
    param_tokens = _flops_in(seconds) / FLOPS_PER_PARAM_TOKEN

    def loss(config: ModelConfig) -> float:
        size = config.parameter_count()
        return CHINCHILLA_LAW.loss_with_repetition(size, param_tokens / size, unique_tokens)

    return min(models, key=loss)


def auto_size(
    seconds: float,
    unique_tokens: int,
    vocab_size: int,
    values: Mapping[str, Any],
    scaling_law: ScalingLaw | None = None,
    num_processes: int = 1,
) -> tuple[ModelConfig, dict[str, Any], ModelSizeChosen]:
    """Return the model of `mlxlm.plan.model_sizes` that is best after `seconds` of training, and its settings.

    By a scaling law, for the text and the speed of this machine. Repeated text counts less (Muennighoff et al. 2023):
    up to four epochs are nearly as good as new text, later ones teach less and less, and so do more parameters. So the
    size depends on the text, too. A large model of a short text gets dropout.

    Args:
        seconds: Training time.
        unique_tokens: Tokens of the text.
        vocab_size: Vocabulary size.
        values: Settings. Batch size, sequence length and dropout are chosen, too, unless they are given here.
        scaling_law: A law fitted to the user's runs; None: that of Hoffmann et al. 2022.
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
        raise ConfigError("no model fits the memory with these settings", "`batch_size=1`, or a smaller `vocab_size`")
    token_seconds = fit_token_seconds(candidates, seconds, settings_for, unique_tokens)

    def tokens_in_time(config: ModelConfig) -> float:
        return TRAINING_FRACTION * seconds * num_processes / token_seconds(config)

    def loss(config: ModelConfig) -> float:
        return law.loss_with_repetition(config.parameter_count(), tokens_in_time(config), unique_tokens)

    lowest = min(map(loss, candidates))
    best = next(config for config in candidates if loss(config) <= (1 + _EQUAL_LOSS) * lowest)
    tokens = tokens_in_time(best)
    if tokens > _DROPOUT_EPOCHS * unique_tokens and best.parameter_count() > _DROPOUT_PARAMETERS * unique_tokens:
        values = {"dropout": _DROPOUT, **values}
    law_name = "the scaling law of " + ("Hoffmann et al. 2022" if scaling_law is None else "the user's runs")
    choice = ModelSizeChosen(best.parameter_count(), tokens, tokens / unique_tokens, law_name)
    return best, batch_settings(best, tokens, values), choice


def fit_token_seconds(
    models: Sequence[ModelConfig],
    seconds: float,
    settings: Callable[[ModelConfig], TrainSettings],
    unique_tokens: float = math.inf,
) -> Callable[[ModelConfig], float]:
    """Return a function that predicts the training seconds per token of a model.

    Two of `models` are benchmarked, in a small part of `seconds`: one that is probably the best for a text of
    `unique_tokens`, and a smaller one. Others follow from their operations.
    """
    large = _guess_model(models, seconds, unique_tokens)
    by_size = sorted(models, key=lambda c: c.parameter_count())
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
