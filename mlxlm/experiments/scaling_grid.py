"""A grid of small runs that differ in size and length, on one prepared dataset: what a scaling law is fitted to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxlm.checkpoint.locations import is_run_folder
from mlxlm.config import ModelConfig
from mlxlm.data import Manifest
from mlxlm.experiments.scaling_fit import ScalingPoint
from mlxlm.experiments.sweep import (
    check_saved_args,
    is_finished,
    open_or_start_run,
    prepare_shared_data,
    relative_data_path,
    saved_args,
)
from mlxlm.plan.model_sizes import model_family, model_of_width, vocab_size_for
from mlxlm.plan.scaling_law import FLOPS_PER_PARAM_TOKEN, FULL_VALUE_EPOCHS
from mlxlm.plan.textbook import TOKENS_PER_PARAMETER
from mlxlm.report import read_run
from mlxlm.tokenizer import Tokenizer, load
from mlxlm.train.auto_size import fit_token_seconds, guess_vocab_size, nearest_models
from mlxlm.train.budget import num_rows
from mlxlm.train.memory_limits import check_memory
from mlxlm.train.run import Run
from mlxlm.train.run_data import Phase, no_phase, prepared_source
from mlxlm.train.settings import TrainSettings
from mlxlm.train.start import set_default_dtype
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.json_files import read_json, write_json

FILE = "grid.json"
MINUTES = 30.0  # that a grid takes, unless said
RATIOS = (5.0, 10.0, 20.0, 40.0)  # tokens per parameter, where sizes are given and no tokens
_HALVINGS = (8, 4, 2, 1)  # of sizes and of tokens, where neither is given
_LENGTH = 256  # tokens of a sequence
_LEAST_STEPS = 400  # of the shortest run: fewer are over before the learning rate has risen and fallen
_TRAINING = 0.85  # of the minutes: the rest validates, saves and draws


@dataclass(frozen=True)
class GridRun:
    """A run of the grid. `seconds`: that its steps take, as was reckoned from probes before it began."""

    hidden_size: int
    parameters: int
    tokens: int
    steps: int
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.parameters}-{self.tokens}"


@dataclass(frozen=True)
class Grid:
    """A folder of runs: `grid.json`, `data/` unless it was prepared before, and a run for each cell.

    `by_ratio`: token counts are multiples of parameters. `unique_tokens`: tokens of the text.
    """

    path: Path
    cells: tuple[GridRun, ...]
    vocab_size: int
    settings: dict[str, Any]
    data: Path
    by_ratio: bool
    unique_tokens: int
    saved_args: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> Grid:
        """An existing grid. Raises ConfigError naming the file."""
        path = Path(path)
        if not (path / FILE).is_file():
            raise ConfigError(f"{path} is no grid of runs: it has no {FILE}", "the --out of mlxlm scaling")
        values = read_json(path / FILE)
        try:
            cells = tuple(GridRun(**cell) for cell in values["cells"])
            whole = [n for cell in cells for n in (cell.hidden_size, cell.parameters, cell.tokens, cell.steps)]
            if not cells or not all(
                type(n) is int and n > 0 for n in (values["unique_tokens"], values["vocab_size"], *whole)
            ):
                raise ValueError
            if not all(0 <= float(cell.seconds) < math.inf for cell in cells):
                raise ValueError
            settings = dict(values["settings"])
            TrainSettings.provisional(settings)
            return cls(
                path, cells, values["vocab_size"], settings, path / values["data"], bool(values["by_ratio"]),
                values["unique_tokens"], dict(values["saved_args"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            problem = f"{path / FILE} lacks or spoils cells, vocab_size, settings, data, by_ratio, unique or asked"
            raise ConfigError(problem) from None
        except ConfigError as error:
            raise ConfigError(f"{path / FILE}: {error.message}", error.hint) from None

    @property
    def tokenizer(self) -> Tokenizer:
        return load(self.data / "tokenizer")

    def run(self, cell: GridRun, phase: Phase = no_phase) -> Run:
        """The cell's run, made if it isn't there yet."""
        settings = {**self.settings, "steps": cell.steps}
        return open_or_start_run(
            self.path / cell.name, self.data, model_of_width(cell.hidden_size, self.vocab_size), settings, phase
        )

    def started_runs(self) -> list[tuple[GridRun, Run]]:
        paths = [(cell, self.path / cell.name) for cell in self.cells]
        return [(cell, Run.open(path)) for cell, path in paths if is_run_folder(path)]

    def points(self) -> list[ScalingPoint]:
        """Of the runs that are finished: the loss of the whole validation at their ends."""
        found = []
        for cell, run in self.started_runs():
            ends = read_run(run.path).validations
            if ends and is_finished(run):
                found.append(ScalingPoint(cell.parameters, cell.tokens, ends[-1][1]))
        return found

    def seconds_left(self, number: int) -> float:
        """That the cells from `number` on take, at the speed of those that are finished."""
        found = self._timed()
        planned = sum(cell.seconds for cell in found)
        scale = sum(found.values()) / planned if planned else 1.0
        return scale * sum(cell.seconds for cell in self.cells[number:] if cell not in found)

    def flops_per_second(self) -> float:
        """6 N D of the largest finished run, by the seconds of its steps: what a budget in hours is worth here.

        Raises ConfigError where no run is finished.
        """
        found = self._timed()
        if not found:
            raise ConfigError(f"no run of {self.path} is finished", "the same command without --fit-only")
        cell = max(found, key=lambda cell: cell.parameters * cell.tokens)
        return FLOPS_PER_PARAM_TOKEN * cell.parameters * cell.tokens / found[cell]

    def _timed(self) -> dict[GridRun, float]:
        """The runs that are finished, and the seconds of their steps."""
        timed = {cell: read_run(run.path).last("seconds") for cell, run in self.started_runs() if is_finished(run)}
        return {cell: seconds for cell, seconds in timed.items() if seconds > 0}


def start_grid(
    out: Path | str,
    sources: Sequence[str | Path],
    *,
    sizes: Sequence[float] = (),
    ratios: Sequence[float] = (),
    tokens: Sequence[float] = (),
    minutes: float = MINUTES,
    vocab_size: int | None = None,
    tokenizer: str | Path | None = None,
    tokenizer_type: str = "byte-level",
    text_column: str | None = None,
    validation: Sequence[str | Path] = (),
    validation_fraction: float = 0.05,
    on_bad_input: str = "stop",
    settings: dict[str, Any] | None = None,
    phase: Phase = no_phase,
) -> Grid:
    """Make the folder `out` for a grid of runs; if it is there already, made of the same arguments, it is opened.

    Each run has a learning rate schedule of its own, which ends with it: the loss in the middle of a longer run is
    higher (Hoffmann et al. 2022, A).

    sizes: numbers of parameters, embedding included; the nearest members of `mlxlm.plan.model_sizes` are taken.
    ratios, tokens: how long each size is trained, in tokens per parameter or in tokens.
    minutes: what the steps of all of it may take, by a probe, where no sizes are given; these are then chosen, with as
        many token counts, so that no run sees the text more than four times.
    Other arguments: see `start_run`.

    Raises ConfigError for a grid that can't work, and for an `out` of something else.
    """
    out = Path(out)
    if ratios and tokens:
        raise ConfigError("tokens and tokens per parameter each say how long to train", "only one of them")
    question = saved_args(
        sources, sizes=list(sizes), ratios=list(ratios), tokens=list(tokens), minutes=minutes, vocab_size=vocab_size,
        tokenizer=tokenizer, tokenizer_type=tokenizer_type, text_column=text_column, validation=validation,
        validation_fraction=validation_fraction, settings=settings or {},
    )  # fmt: skip
    if (out / FILE).is_file():
        there = Grid.open(out)
        check_saved_args(out, there.saved_args, question, "grid of runs", "mlxlm scaling")
        return there
    if not 0 < minutes < float("inf") or not all(0 < x < 1e18 for x in (*sizes, *ratios, *tokens)):
        raise ConfigError("sizes, tokens and minutes must be positive numbers")
    values = {"eval_every": 0, "max_seq_length": _LENGTH, **(settings or {})}
    set_default_dtype(values)
    provisional = TrainSettings.provisional({"batch_size": 4, **values})
    exact = vocab_size is not None
    if vocab_size is None and tokenizer is None and not prepared_source(sources):
        if sizes:
            vocab_size = vocab_size_for(max(sizes))
        else:
            vocab_size = guess_vocab_size(15 * minutes, sources, text_column, on_bad_input)
    with atomic_new_folder(out) as folder:
        loaded_tokenizer, data = prepare_shared_data(
            folder,
            sources,
            vocab_size,
            exact=exact,
            tokenizer=tokenizer,
            tokenizer_type=tokenizer_type,
            text_column=text_column,
            weights=None,
            validation=validation,
            validation_fraction=validation_fraction,
            on_bad_input=on_bad_input,
            seed=values.get("seed", 0),
            phase=phase,
        )
        unique_tokens = Manifest.read(data).train.tokens
        members = (
            nearest_models(list(sizes), loaded_tokenizer.vocab_size)
            if sizes
            else model_family(loaded_tokenizer.vocab_size)
        )
        with phase("trying training steps of two sizes", None):
            token_seconds = fit_token_seconds(members, 60 * minutes / 4, lambda config: provisional)
        if sizes:
            chosen = [
                (config, int(n))
                for config in members
                for n in (tokens or [ratio * config.parameter_count() for ratio in ratios or RATIOS])
            ]
        else:
            chosen = _fitting(
                members, token_seconds, 60 * minutes * _TRAINING, FULL_VALUE_EPOCHS * unique_tokens, ratios, tokens
            )
        row = provisional.max_seq_length * provisional.grad_accumulation_steps
        values.setdefault("batch_size", num_rows(min(n for _, n in chosen) / _LEAST_STEPS, row))
        each = TrainSettings.provisional(values).tokens_per_step
        cells = {}
        for config, n in chosen:
            steps = max(1, round(n / each))
            check_memory(config, TrainSettings.provisional({**values, "steps": steps}), preset="")
            seconds = token_seconds(config) * steps * each
            cell = GridRun(config.hidden_size, config.parameter_count(), steps * each, steps, seconds)
            cells[cell.name] = cell  # lengths that differ by less than a step are one
        in_order = sorted(cells.values(), key=lambda cell: cell.parameters * cell.tokens)
        content = {
            "cells": [asdict(cell) for cell in in_order], "vocab_size": loaded_tokenizer.vocab_size, "settings": values,
            "data": relative_data_path(data, folder), "by_ratio": not tokens and bool(sizes or ratios),
            "unique_tokens": unique_tokens, "saved_args": question,
        }  # fmt: skip
        write_json(folder / FILE, content)
    return Grid.open(out)


def _fitting(
    members: list[ModelConfig],
    token_seconds,
    seconds: float,
    most: float,
    ratios: Sequence[float],
    tokens: Sequence[float],
) -> list[tuple[ModelConfig, int]]:
    """The grid of the largest models that `seconds` are enough for, with no more than `most` tokens in a run; where
    they aren't enough for any, the smallest, trained on less. Raises ConfigError where the lengths are given, and the
    smallest take longer, too."""
    found = None
    for top in range(len(_HALVINGS) - 1, len(members)):
        largest = members[top].parameter_count()
        wanted = nearest_models([largest / n for n in _HALVINGS], members[0].vocab_size)
        sizes = wanted if len(wanted) == len(_HALVINGS) else members[top + 1 - len(_HALVINGS) : top + 1]
        longest = min(most, TOKENS_PER_PARAMETER * largest)
        lengths = [min(most, n) for n in tokens] or [longest / n for n in _HALVINGS]
        grid = [
            (config, int(n))
            for config in sizes
            for n in sorted({min(most, ratio * config.parameter_count()) for ratio in ratios} or set(lengths))
        ]
        if (total := sum(token_seconds(config) * n for config, n in grid)) <= seconds:
            found = grid
        elif found is not None:
            return found
        elif ratios or tokens:
            needed = f"{math.ceil(total / _TRAINING / 60):,} minutes"
            raise ConfigError("training on so many tokens takes longer, even of the smallest models", needed)
        else:
            return [(config, max(1, int(n * seconds / total))) for config, n in grid]
    return found
