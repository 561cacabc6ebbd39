"""Repeats a run with a time limit from its log, without the clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlxlm.report.log_entries import read_log_entries
from mlxlm.tokenizer import load
from mlxlm.train.run import Run
from mlxlm.utils.errors import CheckpointError


def repeat_run(out: Path | str, original: Run) -> Run:
    """Make the run `out`, which repeats `original` step by step.

    The number of steps of a run with a time limit follows the clock, and with it the learning rates, so starting the
    same command again gives other weights. The log has each change of that number and each validation. The new run
    makes the same ones and ends with the same weights, to the bit on the same machine. It uses the data of `original`
    at its location.

    Raises:
        CheckpointError: `out` exists, or `original` is a fine-tuning run or hasn't finished.
        DataError: The data of `original` has changed or is gone.
    """
    if original.is_finetuning:
        problem = f"{original.path} is a fine-tuning run, and only runs of mlxlm pretrain can be repeated"
        raise CheckpointError(problem, "mlxlm finetune with --steps, which repeats itself")
    original.check_data()
    steps_changed, validations, finished = [], [], False
    for entry in read_log_entries(original.log_file):
        if entry["event"] == "steps_changed":
            steps_changed.append([entry["step"], entry.get("steps")])
        elif entry["event"] == "validation":
            validations.append(entry["step"])
        finished = finished or entry["event"] == "finished"
    if not finished:
        raise CheckpointError(f"{original.path} hasn't finished", original.resume_command)
    repeat_plan = {"steps_changed": steps_changed, "validations": validations}
    settings = replace(original.settings, time_limit=None, repeat_plan=repeat_plan)
    return Run.create(out, original.config, settings, load(original.path), original.data)
