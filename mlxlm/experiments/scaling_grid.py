"""A grid of small runs of several sizes and lengths on the same data, to fit scaling laws to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlxlm.checkpoint.locations import is_run_folder
from mlxlm.data import DataOptions, Manifest
from mlxlm.experiments.scaling_fit import ScalingPoint
from mlxlm.experiments.scaling_runs import DEFAULT_RATIOS, GridOptions, GridRun, fit_to_time, plan_runs
from mlxlm.experiments.sweep import Sweep, is_finished, prepare_shared_data, relative_data_path, saved_args
from mlxlm.plan.model_sizes import model_of_width, vocab_size_for
from mlxlm.plan.scaling_law import FLOPS_PER_PARAM_TOKEN, FULL_VALUE_EPOCHS
from mlxlm.report import read_run
from mlxlm.train.budget import fit_token_seconds, guess_vocab_size, num_rows
from mlxlm.train.run import Run
from mlxlm.train.settings import TokenizerOptions, TrainSettings
from mlxlm.train.start import Phase, as_data_options, as_tokenizer_options, no_phase, prepared_source, set_default_dtype
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.json_files import write_json

_MAX_SEQ_LENGTH = 256
_MIN_STEPS = 400  # of the shortest run: with fewer, the learning rate schedule is too short


@dataclass(frozen=True)
class Grid(Sweep):
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
        """Return the fields that a grid adds. See `Sweep.parse_fields`."""
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
                points.append(ScalingPoint(planned.parameters, planned.tokens, validations[-1][1]))
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
    """Make the folder `out` for a grid of runs, or open it if it was made with the same arguments.

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
        ConfigError: The grid can't be trained, or `out` has other contents.
        DataError, TokenizerError: As `start_run`.
    """
    out, options = Path(out), options or GridOptions()
    data, tokenizer = as_data_options(data), as_tokenizer_options(tokenizer)
    args = saved_args(data, tokenizer, **asdict(options), settings=settings or {})
    if grid := Grid.reopen(out, args):
        return grid
    options.check_positive()
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
        content = {
            "runs": [asdict(run) for run in plan_runs(lengths, values, token_seconds)],
            "vocab_size": loaded.vocab_size,
            "settings": values,
            "data": relative_data_path(shards, folder),
            "by_ratio": not options.tokens and bool(options.sizes or options.tokens_per_parameter),
            "unique_tokens": unique_tokens,
            "saved_args": args,
        }
        write_json(folder / Grid.FILE, content)
    return Grid.open(out)


def _vocab_size_to_train(options: GridOptions, data: DataOptions, tokenizer: TokenizerOptions) -> int:
    """Return a vocabulary size for the largest model; 0 if none has to be chosen."""
    if tokenizer.vocab_size is not None or tokenizer.path is not None or prepared_source(data.sources):
        return 0
    if options.sizes:
        return vocab_size_for(max(options.sizes))
    return guess_vocab_size(15 * options.minutes, data.sources)
