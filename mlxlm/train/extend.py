"""Train a run for longer than it was planned, and decay branches of a run with a constant learning rate."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from mlxlm.checkpoint.locations import checkpoint_step, is_run_folder
from mlxlm.report.log_entries import LOG_FILE, read_log_entries
from mlxlm.tokenizer import load
from mlxlm.train.budget import Budget
from mlxlm.train.run import STATE_FILE, Run, TrainState
from mlxlm.train.settings import TrainSettings
from mlxlm.train.start import count_rows, steps_for
from mlxlm.utils.errors import CheckpointError, ConfigError
from mlxlm.utils.files import atomic_new_folder, check_not_exists, commit_file, stage_copy
from mlxlm.utils.json_files import read_json, write_json


def extend_run(run: Run, budget: Budget) -> Run:
    """Change the length of `run`, finished or not, and return the run, which `train(..., resume=True)` continues.

    The learning rate becomes that of the new length. From the rate of the last checkpoint it gets there in as many
    steps as the run had warmup: it stays constant with the schedule "constant" and in the stable part of "wsd", and
    rises again if it has decayed already (for "wsd" see Wen et al. 2024, arXiv:2410.05192, WSD-S; for "cosine" and
    "linear" Ibrahim et al. 2024, arXiv:2403.08763).

    Args:
        run: The run.
        budget: `steps`, `tokens` and `epochs` are those of the whole run, `minutes` begin now.

    Raises:
        ConfigError: The run has as many steps already.
        CheckpointError: The run can't be written, or is being trained.
    """
    with run.locked():
        settings, checkpoints = run.settings, run.checkpoints()
        state = TrainState.from_dict(read_json(checkpoints[-1] / STATE_FILE)) if checkpoints else TrainState()
        if budget.minutes is None:
            steps, time_limit = _total_steps(run, budget), None
            if steps == settings.steps and settings.time_limit is None:
                return run
            if steps <= state.step:
                raise ConfigError(f"{run.path} has {state.step} steps already", f"`steps={2 * state.step}`")
        else:
            seconds = budget.seconds_left()
            time_limit, steps = state.elapsed + seconds, settings.steps
            if state.step and state.elapsed:
                steps = state.step + max(1, round(seconds * state.step / state.elapsed))
        longer = replace(
            settings, steps=steps, time_limit=time_limit, warmup_steps=min(settings.warmup, steps - 1),
            rewarm_step=state.step, rewarm_learning_rate=_learning_rate_of(run, state.step),
            eval_every=_eval_every(settings, time_limit), repeat_plan=None,
        )  # fmt: skip
        run.write_settings(longer)
    return Run.open(run.path)


def start_decay_branch(out: Path | str, source: Path | str, decay_steps: int) -> Run:
    """Make the run `out`, which continues `source` and ends after decaying the learning rate to its minimum.

    From one long run with a constant rate, this makes finished models of several lengths (Hu et al. 2024, "MiniCPM",
    4.3); `source` stays as it is, and can go on. The branch has the optimizer state, the log up to its beginning, and
    the next batches of `source`, whose data it uses at its location.

    Args:
        out: The new folder, for `train(..., resume=True)`.
        source: A run, of which the last checkpoint is continued, or its folder `checkpoints/step-N`.
        decay_steps: Steps of the linear decay.

    Raises:
        CheckpointError: `out` exists, or `source` is not a run, or has no checkpoint.
        ConfigError: The learning rate of `source` isn't constant at this step.
    """
    check_not_exists(out, CheckpointError, "another `out`")
    source = Path(source).absolute()
    is_checkpoint = checkpoint_step(source) >= 0 and is_run_folder(source.parents[1])
    run = Run.open(source.parents[1] if is_checkpoint else source)
    if not (checkpoints := run.checkpoints()):
        raise CheckpointError(f"{run.path} has no checkpoint yet", run.resume_command)
    checkpoint = source if is_checkpoint else checkpoints[-1]
    content = read_json(checkpoint / STATE_FILE)
    state = TrainState.from_dict(content)
    rate = _learning_rate_of(run, state.step) or 0.0
    if not math.isclose(rate, run.settings.learning_rate, rel_tol=1e-6):
        problem = f"the learning rate of {run.path} at step {state.step} is {rate:g}, not its peak"
        raise ConfigError(problem, "a run with `lr_schedule=constant`, or a checkpoint before its decay")
    steps = state.step + decay_steps
    settings = replace(
        run.settings, steps=steps, lr_schedule="wsd", decay_fraction=decay_steps / steps, time_limit=None,
        eval_every=_eval_every(run.settings, None), warmup_steps=min(run.settings.warmup, state.step), repeat_plan=None,
        rewarm_step=None, rewarm_learning_rate=None,
    )  # fmt: skip
    with atomic_new_folder(out) as folder:
        branch = Run.create(folder, run.config, settings, load(run.path), run.data)
        copy = folder / "checkpoints" / checkpoint.name
        copy.mkdir(parents=True)
        for file in checkpoint.glob("*.safetensors"):
            commit_file(stage_copy(file, copy / file.name), copy / file.name)
        state = replace(state, steps=None)
        write_json(copy / STATE_FILE, {**content, **asdict(state), "settings": settings.to_dict()})
        for name in (LOG_FILE, "generation_config.json"):
            shutil.copyfile(run.path / name, folder / name)
        branch.update_model()
    return Run.open(out)


def _total_steps(run: Run, budget: Budget) -> int:
    """Return the steps of the whole run."""
    if budget.epochs is not None:
        return math.ceil(budget.epochs * count_rows(run.data, run.settings) / run.settings.rows_per_step)
    return budget.steps or steps_for(budget.tokens, run.config, run.settings)


def _eval_every(settings: TrainSettings, time_limit: float | None) -> int | None:
    """Return the steps between validations, which only a time limit can choose."""
    unknown = settings.eval_every is None and time_limit is None
    return TrainSettings.eval_every if unknown else settings.eval_every


def _learning_rate_of(run: Run, step: int) -> float | None:
    """Return the learning rate of a step by the log; None before the first step."""
    entries = (entry for entry in read_log_entries(run.log_file) if entry["event"] == "step")
    return next((entry["learning_rate"] for entry in entries if entry.get("step") == step), None)
