"""The batch, the sequence length and the validation of a run that has a time limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.cpu_cores import parts_of
from mlxlm.config import ModelConfig
from mlxlm.families import load_preset, preset_names
from mlxlm.plan.machines import measure_matmul
from mlxlm.train.deadline import VALIDATING
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step_benchmark import Probe, probe
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.formatting import human_count, human_seconds

MEASURING = "measuring the speed of training steps"
TRAINING = 0.9  # of the time: the rest validates and saves
_STEPS = 4000  # about so many updates: in two minutes 512 tokens a step did better than 2,048
_MOST_ROWS = 32
_SHORT, _LONG = 256, 512  # tokens of a sequence; long ones where a step still has two of them
_LEAST_TOKENS = 100 * _SHORT  # a model that sees fewer has learned little more than the frequencies of tokens
_ENOUGH_TOKENS = 1000 * _SHORT  # what is recommended to someone who has too little time
_GOOD_USE = 0.75  # of the cores: fewer rows make more updates of the same tokens, which count more
_LEAST_STEPS = 20  # with fewer the run can't end within 5% of its time


def rows_for(tokens_per_step: float, length: int) -> int:
    """The power of two of rows that is nearest to so many tokens."""
    return 2 ** round(math.log2(min(_MOST_ROWS, max(1.0, tokens_per_step / length))))


def batch_settings(config: ModelConfig, tokens: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with a sequence length and a batch size, where they have none, for training on `tokens`."""
    form = dict(values)
    length = _LONG if tokens >= _STEPS * 2 * _LONG else _SHORT
    form.setdefault("sequence_length", min(length, config.max_position_embeddings))
    form.setdefault("batch_size", rows_for(tokens / _STEPS, form["sequence_length"] * form.get("accumulate", 1)))
    return form


def least_rows(config: ModelConfig, values: Mapping[str, Any]) -> int:
    """Return how many rows a step should have at least: one for each core where that makes good use of them.

    The cores of a CPU share out the rows of a batch. A single row is computed on all of them together, which can take
    several times as long beside other programs: measured 670 tokens/s with one row and 4,600 with many.
    """
    cores = platform.cpu_cores()
    if parts_of(cores) == 1:
        return 1
    draft = TrainSettings.draft({**values, "accumulate": 1})
    config = config.with_changes(max_position_embeddings=draft.sequence_length)
    one, all_cores = (probe(config, replace(draft, batch_size=rows)).step for rows in (1, cores))
    return cores if one > _GOOD_USE * all_cores else 1


def validation_settings(found: Probe, seconds: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with what of the validation they leave open: as often as the time allows, see `Deadline`, on no
    more tokens than two validations have time for."""
    form = {"eval_every": None, "save_every": 0, **values}
    draft = TrainSettings.draft(values)
    batch = draft.batch_size * draft.sequence_length
    most = int(VALIDATING / 2 * seconds / found.validation) * batch if found.validation else draft.eval_tokens
    form.setdefault("eval_tokens", max(batch, min(TrainSettings.eval_tokens, most)))
    return form


def seconds_per_token(
    config: ModelConfig, seconds: float, values: Mapping[str, Any], ranks: int = 1, finetuning: bool = False
) -> float:
    """Measure how long training `config` takes here, by steps of two short rows; all `ranks` together.

    Raises:
        ConfigError: In `seconds` the model would see too few tokens to learn anything.
    """
    draft = TrainSettings.draft({**values, "batch_size": 2, "accumulate": 1})
    length = min(_SHORT, config.max_position_embeddings, values.get("sequence_length", _SHORT))
    # No model is faster than large matrix products: where even they take too long, no step needs to be tried.
    flops = config.flops_per_token(length // 2, training=True)
    fastest = flops / (measure_matmul(seconds=0.1, dtype=draft.dtype) * 1e9) / ranks
    _check_time(config, seconds, fastest, values, ranks, finetuning)
    tried = replace(draft, sequence_length=length)
    pace = probe(config, tried).step / tried.tokens_per_step / ranks
    _check_time(config, seconds, pace, values, ranks, finetuning)
    return pace


def _check_time(
    config: ModelConfig, seconds: float, pace: float, values: Mapping[str, Any], ranks: int, finetuning: bool
) -> None:
    """Raise a ConfigError if at `pace` seconds per token, `seconds` are too few for a useful run."""
    tokens, draft = seconds / pace, TrainSettings.draft(values)
    rows = draft.batch_size if "batch_size" in values else 1
    fixed = finetuning or "sequence_length" in values
    length = draft.sequence_length if fixed else min(_SHORT, config.max_position_embeddings)
    step = rows * length * draft.accumulate
    time = human_seconds(seconds) if seconds >= 10 else f"{seconds:.2g}s"
    time = f"in {time} a model of {human_count(config.parameter_count())} parameters"
    if not finetuning and tokens < _LEAST_TOKENS:
        problem = f"{time} would see about {human_count(tokens)} tokens here, too few to learn from"
        flops = config.flops_per_token(_SHORT // 2, training=True)
        faster = []
        for name in preset_names():
            share = load_preset(name).flops_per_token(_SHORT // 2, training=True) / flops
            if share < 1 and _ENOUGH_TOKENS * pace * share <= seconds:
                faster.append(name)
        smaller = f"--preset {faster[-1]}, or " if faster else ""
        raise ConfigError(problem, f"{smaller}--minutes {math.ceil(_ENOUGH_TOKENS * pace / TRAINING / 60):,}")
    if tokens < _LEAST_STEPS * step:
        problem = f"{time} would make {human_count(tokens / step)} steps of {step:,} tokens here, too few to learn from"
        accumulates = draft.accumulate > ranks
        large = {"--batch-size": rows > 1, "--sequence-length": length > _SHORT, "--accumulate": accumulates}
        remedies = [f"a smaller {flag}" for flag, is_large in large.items() if is_large]
        remedies.append(f"--minutes {math.ceil(2 * _LEAST_STEPS * step * pace / 60):,}")
        raise ConfigError(problem, ", or ".join(remedies))
