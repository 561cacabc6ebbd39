"""A grid of small runs of several sizes and lengths on the same data, to fit scaling laws to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlxlm.checkpoint.locations import is_run_folder
from mlxlm.config import ModelConfig
from mlxlm.data import DataOptions, Manifest
from mlxlm.data.manifest import prepared_source
from mlxlm.experiments.run_group import RunGroup, is_finished, prepare_shared_data
from mlxlm.experiments.scaling_fit import ScalingPoint
from mlxlm.plan.flops import TOKENS_PER_PARAMETER
from mlxlm.plan.model_sizes import model_family, model_of_width, vocab_size_for
from mlxlm.plan.scaling_law import FLOPS_PER_PARAM_TOKEN, FULL_VALUE_EPOCHS
from mlxlm.report import read_run
from mlxlm.train.budget import fit_token_seconds, guess_vocab_size, nearest_models, num_rows
from mlxlm.train.memory_limits import check_memory
from mlxlm.train.run import Run
from mlxlm.train.settings import TokenizerOptions, TrainSettings
from mlxlm.train.start import Phase, as_data_options, as_tokenizer_options, no_phase, set_default_dtype
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.files import atomic_new_folder

DEFAULT_MINUTES = 30.0  # of a whole grid
DEFAULT_RATIOS = (5.0, 10.0, 20.0, 40.0)  # tokens per parameter for given sizes
TRAINING_FRACTION = 0.85  # of the minutes; the rest is for validation, saving and plots
_DIVISORS = (8, 4, 2, 1)  # of the largest size and the largest token count, where neither is given

Lengths = list[tuple[ModelConfig, int]]  # models and their training tokens

_MAX_SEQ_LENGTH = 256
_MIN_STEPS = 400  # of the shortest run: with fewer, the learning rate schedule is too short


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
        ConfigError: Both lengths are given, or a number is not positive and finite.
    """

    sizes: Sequence[float] = ()
    tokens_per_parameter: Sequence[float] = ()
    tokens: Sequence[float] = ()
    minutes: float = DEFAULT_MINUTES

    def __post_init__(self) -> None:
        if self.tokens_per_parameter and self.tokens:
            raise ConfigError("tokens and tokens per parameter each say how long to train", "only one of them")
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


@dataclass(frozen=True)
class Grid(RunGroup):
    """A folder of runs of several sizes and lengths.

    Attributes:
        runs: The planned runs, by operations.
        vocab_size: Vocabulary size of all models.
        by_ratio: Whether the token counts are multiples of the parameters.
        unique_tokens: Tokens of the training text.
    """

    runs: tuple[GridRun, ...]
    vocab_size: int
    by_ratio: bool
    unique_tokens: int

    KIND: ClassVar[str] = "grid of runs"
    FILE: ClassVar[str] = "grid.json"
    COMMAND: ClassVar[str] = "mlxlm scaling"

    @classmethod
    def parse_fields(cls, values: Mapping[str, Any], file: Path) -> dict[str, Any]:
        """Return the fields that a grid adds. See `RunGroup.parse_fields`."""
        runs = tuple(GridRun(**run) for run in values["runs"])
        counts = (values["unique_tokens"], values["vocab_size"])
        if not runs or not all(run.is_valid() for run in runs) or not all(type(n) is int and n > 0 for n in counts):
            raise ValueError
        try:
            TrainSettings.provisional(dict(values["settings"]))
        except ConfigError as error:
            raise error.prefixed(file) from None
        return {
            "runs": runs,
            "vocab_size": values["vocab_size"],
            "by_ratio": bool(values["by_ratio"]),
            "unique_tokens": values["unique_tokens"],
        }

    def open_run(self, run: GridRun, phase: Phase = no_phase) -> Run:
        """Open a planned run, or make it."""
        config = model_of_width(run.hidden_size, self.vocab_size)
        return self.open_or_start_run(run.name, config, {"steps": run.steps}, phase)

    def started_runs(self) -> list[tuple[GridRun, Run]]:
        """Return the runs whose folders exist."""
        paths = [(planned, self.path / planned.name) for planned in self.runs]
        return [(planned, Run.open(path)) for planned, path in paths if is_run_folder(path)]

    def points(self) -> list[ScalingPoint]:
        """Return the finished runs with their final validation loss."""
        points = []
        for planned, run in self.started_runs():
            validations = read_run(run.path).validations
            if validations and is_finished(run):
                points.append(ScalingPoint(planned.parameters, planned.tokens, validations[-1].loss))
        return points

    def seconds_left(self, number: int) -> float:
        """Predict the time of the unfinished runs from index `number` on, by the speed of the finished ones."""
        seconds = self._finished_seconds()
        planned_seconds = sum(planned.seconds for planned in seconds)
        scale = sum(seconds.values()) / planned_seconds if planned_seconds else 1.0
        return scale * sum(planned.seconds for planned in self.runs[number:] if planned not in seconds)

    def flops_per_second(self) -> float:
        """Return the speed of the largest finished run, by 6 N D operations. Converts a budget in hours.

        Raises:
            ConfigError: No run is finished.
        """
        seconds = self._finished_seconds()
        if not seconds:
            raise ConfigError(f"no run of {self.path} is finished", "the same without `fit_only`")
        largest = max(seconds, key=lambda run: run.param_tokens)
        return FLOPS_PER_PARAM_TOKEN * largest.param_tokens / seconds[largest]

    def _finished_seconds(self) -> dict[GridRun, float]:
        """Return the measured time of the steps of each finished run."""
        finished = {planned: run for planned, run in self.started_runs() if is_finished(run)}
        seconds = {planned: read_run(run.path).last("seconds") for planned, run in finished.items()}
        return {planned: value for planned, value in seconds.items() if value > 0}


def start_grid(
    out: Path | str,
    data: DataOptions | Sequence[str | Path],
    options: GridOptions | None = None,
    *,
    tokenizer: TokenizerOptions | str | Path | None = None,
    settings: dict[str, Any] | None = None,
    phase: Phase = no_phase,
) -> Grid:
    """Make the folder `out` for a grid of runs.

    Each run has its own learning rate schedule, because the loss in the middle of a longer run is higher (Hoffmann et
    al. 2022, A). Chosen token counts are at most four epochs of the text.

    Args:
        out: The folder.
        data: Paths of text, or one folder made by `mlxlm.data.prepare`; or DataOptions.
        options: Sizes and lengths of the runs.
        tokenizer: Path of a tokenizer, or TokenizerOptions. None: that of the prepared data, or train one.
        settings: Fields of `TrainSettings` of all runs.
        phase: See `start_run`.

    Raises:
        ConfigError: The grid can't be trained.
        CheckpointError: `out` exists.
        DataError, TokenizerError: As `start_run`.
    """
    out, options = Path(out), options or GridOptions()
    data, tokenizer = as_data_options(data), as_tokenizer_options(tokenizer)
    values = {"eval_every": 0, "max_seq_length": _MAX_SEQ_LENGTH, **(settings or {})}
    set_default_dtype(values)
    provisional = TrainSettings.provisional({"batch_size": 4, **values})
    vocab_size = _vocab_size_to_train(options, data, tokenizer)
    with atomic_new_folder(out) as folder:
        seed = values.get("seed", 0)
        loaded, shards = prepare_shared_data(folder, data, tokenizer, vocab_size, seed=seed, phase=phase)
        unique_tokens = Manifest.read(shards).train.tokens
        with phase("benchmarking two model sizes", None):
            models = options.models(loaded.vocab_size)
            token_seconds = fit_token_seconds(models, 60 * options.minutes / 4, lambda _config: provisional)
        if options.sizes:
            lengths = [(c, int(n)) for c in models for n in options.lengths(c.parameter_count(), DEFAULT_RATIOS)]
        else:
            lengths = fit_to_time(models, token_seconds, FULL_VALUE_EPOCHS * unique_tokens, options)
        row = provisional.max_seq_length * provisional.grad_accumulation_steps
        values.setdefault("batch_size", num_rows(min(n for _, n in lengths) / _MIN_STEPS, row))
        runs = [asdict(run) for run in plan_runs(lengths, values, token_seconds)]
        by_ratio = not options.tokens and bool(options.sizes or options.tokens_per_parameter)
        sizes = {"vocab_size": loaded.vocab_size, "unique_tokens": unique_tokens}
        Grid.write(folder, shards, runs=runs, settings=values, by_ratio=by_ratio, **sizes)
    return Grid.open(out)


def _vocab_size_to_train(options: GridOptions, data: DataOptions, tokenizer: TokenizerOptions) -> int:
    """Return a vocabulary size for the largest model; 0 if none has to be chosen."""
    if tokenizer.vocab_size is not None or tokenizer.path is not None or prepared_source(data.sources):
        return 0
    if options.sizes:
        return vocab_size_for(max(options.sizes))
    return guess_vocab_size(15 * options.minutes, data.sources)


def plan_runs(
    lengths: Lengths, settings: dict[str, Any], token_seconds: Callable[[ModelConfig], float]
) -> list[GridRun]:
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
