"""The batch, the sequence length and the validation of a run that has a time limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.cpu_cores import num_batch_shards
from mlxlm.config import ModelConfig
from mlxlm.families import load_preset, preset_names
from mlxlm.plan.machines import measure_matmul
from mlxlm.train.deadline import VALIDATION_FRACTION
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step_benchmark import Probe, probe
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.formatting import human_count, human_seconds

MEASURING_LABEL = "measuring the speed of training steps"
TRAINING_FRACTION = 0.9  # of the time: the rest validates and saves
_STEPS = 4000  # about so many updates: in two minutes 512 tokens a step did better than 2,048
_MOST_ROWS = 32
_SHORT, _LONG = 256, 512  # tokens of a sequence; long ones where a step still has two of them
_LEAST_TOKENS = 100 * _SHORT  # a model that sees fewer has learned little more than the frequencies of tokens
_ENOUGH_TOKENS = 1000 * _SHORT  # what is recommended to someone who has too little time
_GOOD_USE = 0.75  # of the cores: fewer rows make more updates of the same tokens, which count more
_LEAST_STEPS = 20  # with fewer the run can't end within 5% of its time


def num_rows(tokens_per_step: float, length: int) -> int:
    """The power of two of rows that is nearest to so many tokens."""
    return 2 ** round(math.log2(min(_MOST_ROWS, max(1.0, tokens_per_step / length))))


def batch_settings(config: ModelConfig, tokens: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with a sequence length and a batch size, where they have none, for training on `tokens`."""
    form = dict(values)
    length = _LONG if tokens >= _STEPS * 2 * _LONG else _SHORT
    form.setdefault("max_seq_length", min(length, config.max_position_embeddings))
    form.setdefault(
        "batch_size", num_rows(tokens / _STEPS, form["max_seq_length"] * form.get("grad_accumulation_steps", 1))
    )
    return form


def min_rows(config: ModelConfig, values: Mapping[str, Any]) -> int:
    """Return how many rows a step should have at least: one for each core where that makes good use of them.

    The cores of a CPU share out the rows of a batch. A single row is computed on all of them together, which can take
    several times as long beside other programs: measured 670 tokens/s with one row and 4,600 with many.
    """
    cores = platform.cpu_cores()
    if num_batch_shards(cores) == 1:
        return 1
    provisional = TrainSettings.provisional({**values, "grad_accumulation_steps": 1})
    config = config.with_changes(max_position_embeddings=provisional.max_seq_length)
    one, all_cores = (probe(config, replace(provisional, batch_size=rows)).step for rows in (1, cores))
    return cores if one > _GOOD_USE * all_cores else 1


def validation_settings(found: Probe, seconds: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with what of the validation they leave open: as often as the time allows, see `Deadline`, on no
    more tokens than two validations have time for."""
    form = {"eval_every": None, "save_every": 0, **values}
    provisional = TrainSettings.provisional(values)
    batch = provisional.batch_size * provisional.max_seq_length
    most = (
        int(VALIDATION_FRACTION / 2 * seconds / found.validation) * batch
        if found.validation
        else provisional.eval_tokens
    )
    form.setdefault("eval_tokens", max(batch, min(TrainSettings.eval_tokens, most)))
    return form


def seconds_per_token(
    config: ModelConfig, seconds: float, values: Mapping[str, Any], num_processes: int = 1, finetuning: bool = False
) -> float:
    """Measure how long training `config` takes here, by steps of two short rows; all `num_processes` together.

    Raises:
        ConfigError: In `seconds` the model would see too few tokens to learn anything.
    """
    provisional = TrainSettings.provisional({**values, "batch_size": 2, "grad_accumulation_steps": 1})
    length = min(_SHORT, config.max_position_embeddings, values.get("max_seq_length", _SHORT))
    # No model is faster than large matrix products: where even they take too long, no step needs to be tried.
    flops = config.flops_per_token(length // 2, training=True)
    fastest = flops / (measure_matmul(seconds=0.1, dtype=provisional.dtype) * 1e9) / num_processes
    _check_time(config, seconds, fastest, values, num_processes, finetuning)
    tried = replace(provisional, max_seq_length=length)
    token_seconds = probe(config, tried).step / tried.tokens_per_step / num_processes
    _check_time(config, seconds, token_seconds, values, num_processes, finetuning)
    return token_seconds


def _check_time(
    config: ModelConfig,
    seconds: float,
    token_seconds: float,
    values: Mapping[str, Any],
    num_processes: int,
    finetuning: bool,
) -> None:
    """Raise a ConfigError if at `token_seconds` seconds per token, `seconds` are too few for a useful run."""
    tokens, provisional = seconds / token_seconds, TrainSettings.provisional(values)
    rows = provisional.batch_size if "batch_size" in values else 1
    fixed = finetuning or "max_seq_length" in values
    length = provisional.max_seq_length if fixed else min(_SHORT, config.max_position_embeddings)
    step = rows * length * provisional.grad_accumulation_steps
    time = human_seconds(seconds) if seconds >= 10 else f"{seconds:.2g}s"
    time = f"in {time} a model of {human_count(config.parameter_count())} parameters"
    if not finetuning and tokens < _LEAST_TOKENS:
        problem = f"{time} would see about {human_count(tokens)} tokens here, too few to learn from"
        flops = config.flops_per_token(_SHORT // 2, training=True)
        faster = []
        for name in preset_names():
            share = load_preset(name).flops_per_token(_SHORT // 2, training=True) / flops
            if share < 1 and _ENOUGH_TOKENS * token_seconds * share <= seconds:
                faster.append(name)
        smaller = f"--preset {faster[-1]}, or " if faster else ""
        raise ConfigError(
            problem, f"{smaller}--minutes {math.ceil(_ENOUGH_TOKENS * token_seconds / TRAINING_FRACTION / 60):,}"
        )
    if tokens < _LEAST_STEPS * step:
        problem = f"{time} would make {human_count(tokens / step)} steps of {step:,} tokens here, too few to learn from"
        accumulates = provisional.grad_accumulation_steps > num_processes
        large = {
            "--batch-size": rows > 1,
            "--max-seq-length": length > _SHORT,
            "--grad-accumulation-steps": accumulates,
        }
        remedies = [f"a smaller {flag}" for flag, is_large in large.items() if is_large]
        remedies.append(f"--minutes {math.ceil(2 * _LEAST_STEPS * step * token_seconds / 60):,}")
        raise ConfigError(problem, ", or ".join(remedies))
