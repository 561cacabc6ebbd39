"""Pretraining: settings, the compiled step, the run directory and the loop."""

from typing import TYPE_CHECKING

from mlxlm.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mlxlm.backend.process_group import ProcessGroup, RankLostError, join_process_group
    from mlxlm.train.base_model import open_base_model
    from mlxlm.train.budget import Budget
    from mlxlm.train.events import (
        CheckpointNotSaved,
        CheckpointSaved,
        Event,
        Finished,
        Paused,
        Resumed,
        Sample,
        Started,
        Step,
        Stopped,
        Throttled,
        TrainingWarning,
        Validation,
    )
    from mlxlm.train.extend import extend_run, start_decay_branch
    from mlxlm.train.finetune import first_rows, start_finetune
    from mlxlm.train.grpo import RewardError, RewardFunction
    from mlxlm.train.grpo_start import start_grpo
    from mlxlm.train.loop import train
    from mlxlm.train.run import Run, repeat_run
    from mlxlm.train.settings import GRPOOptions, TokenizerOptions, TrainSettings
    from mlxlm.train.start import start_run
    from mlxlm.train.step_benchmark import Probe, probe
    from mlxlm.train.throttle import PowerPolicy
    from mlxlm.train.trackers import check_trackers
    from mlxlm.train.worker import run_worker

__all__ = [
    "Budget",
    "CheckpointNotSaved",
    "CheckpointSaved",
    "Event",
    "Finished",
    "GRPOOptions",
    "Paused",
    "PowerPolicy",
    "Probe",
    "ProcessGroup",
    "RankLostError",
    "Resumed",
    "RewardError",
    "RewardFunction",
    "Run",
    "Sample",
    "Started",
    "Step",
    "Stopped",
    "Throttled",
    "TokenizerOptions",
    "TrainSettings",
    "TrainingWarning",
    "Validation",
    "check_trackers",
    "extend_run",
    "first_rows",
    "join_process_group",
    "open_base_model",
    "probe",
    "repeat_run",
    "run_worker",
    "start_decay_branch",
    "start_finetune",
    "start_grpo",
    "start_run",
    "train",
]
__getattr__ = lazy_exports(__name__)
