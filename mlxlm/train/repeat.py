"""Repeats a run with a time limit from its log, without the clock."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from mlxlm.report.log_entries import number, read_log_entries
from mlxlm.tokenizer import load
from mlxlm.train.run import Run
from mlxlm.train.settings import REPEAT_PLAN_FILE
from mlxlm.utils.errors import CheckpointError, ConfigError, os_errors_as


def repeat_run(out: Path | str, original: Run) -> Run:
    """Make the run `out`, which repeats `original` step by step.

    The learning rates of a run with a time limit follow the clock, and so does its end, so starting the same command
    again gives other weights. Its log has the learning rate of each step and each validation. The new run has a copy of
    the log, the same rates and validations, and ends with the same weights, to the bit on the same machine. It uses the
    data of `original` at its location.

    Raises:
        CheckpointError: `out` exists, or `original` is a fine-tuning run or hasn't finished.
        DataError: The data of `original` has changed or is gone.
    """
    if original.is_finetuning:
        problem = f"{original.path} is a fine-tuning run, and only runs of mlxlm pretrain can be repeated"
        raise CheckpointError(problem, "mlxlm finetune with --steps, which repeats itself")
    original.check_data()
    if not any(entry["event"] == "finished" for entry in read_log_entries(original.log_file)):
        raise CheckpointError(f"{original.path} hasn't finished", original.resume_command)
    steps = sum(entry["event"] == "step" for entry in read_log_entries(original.log_file))
    settings = replace(original.settings, steps=steps, time_limit=None, repeat_plan=REPEAT_PLAN_FILE)
    run = Run.create(out, original.config, settings, load(original.path), original.data)
    with os_errors_as(CheckpointError, "write", run.path):
        shutil.copyfile(original.log_file, run.path / REPEAT_PLAN_FILE)
    return run


def read_repeat_plan(run: Run) -> tuple[list[float], frozenset[int]]:
    """Return the learning rates of the steps of a run that `repeat_run` made, and the steps with a validation.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    path = run.path / REPEAT_PLAN_FILE
    entries = list(read_log_entries(path))
    rates = [number(entry.get("learning_rate")) for entry in entries if entry["event"] == "step"]
    validations = frozenset(entry.get("step", 0) for entry in entries if entry["event"] == "validation")
    if len(rates) != run.settings.steps or not all(rate >= 0 for rate in rates):
        raise ConfigError(f"{path} is damaged", "the file that mlxlm pretrain --repeat wrote, or a new run")
    return rates, validations
