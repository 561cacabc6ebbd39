"""Repeats a run with a time limit from its log, without the clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlxlm.config.numbers import is_number
from mlxlm.report.log_entries import read_log_entries
from mlxlm.tokenizer import load
from mlxlm.train.run import Run
from mlxlm.train.settings import REPEAT_PLAN_FILE
from mlxlm.utils.errors import CheckpointError, ConfigError
from mlxlm.utils.json_files import read_json, write_json

_MAX_BYTES = 1 << 28  # of the plan: ten million steps


def repeat_run(out: Path | str, original: Run) -> Run:
    """Make the run `out`, which repeats `original` step by step.

    The learning rates of a run with a time limit follow the clock, and so does its end, so starting the same command
    again gives other weights. The log has the learning rate of each step and each validation. The new run has the same
    ones and ends with the same weights, to the bit on the same machine. It uses the data of `original` at its location.

    Raises:
        CheckpointError: `out` exists, or `original` is a fine-tuning run or hasn't finished.
        DataError: The data of `original` has changed or is gone.
    """
    if original.is_finetuning:
        problem = f"{original.path} is a fine-tuning run, and only runs of mlxlm pretrain can be repeated"
        raise CheckpointError(problem, "mlxlm finetune with --steps, which repeats itself")
    original.check_data()
    rates, validations, finished = [], [], False
    for entry in read_log_entries(original.log_file):
        if entry["event"] == "step":
            rates.append(entry.get("learning_rate"))
        elif entry["event"] == "validation":
            validations.append(entry["step"])
        finished = finished or entry["event"] == "finished"
    if not finished:
        raise CheckpointError(f"{original.path} hasn't finished", original.resume_command)
    settings = replace(original.settings, steps=len(rates), time_limit=None, repeat_plan=REPEAT_PLAN_FILE)
    run = Run.create(out, original.config, settings, load(original.path), original.data)
    write_json(run.path / REPEAT_PLAN_FILE, {"learning_rates": rates, "validations": validations})
    return run


def read_repeat_plan(run: Run) -> tuple[list[float], frozenset[int]]:
    """Return the learning rates of the steps of a run that `repeat_run` made, and the steps with a validation.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    path = run.path / REPEAT_PLAN_FILE
    plan = read_json(path, max_bytes=_MAX_BYTES)
    try:
        rates, validations = plan["learning_rates"], frozenset(plan["validations"])
        if len(rates) != run.settings.steps or not all(is_number(rate) and rate >= 0 for rate in rates):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path} is damaged", "the file that mlxlm pretrain --repeat wrote, or a new run") from None
    return rates, validations
