"""Pretraining: settings, the compiled step, the run directory and the loop."""

from mlxlm.train.distributed.heartbeat import RankLost
from mlxlm.train.distributed.process_group import Ranks
from mlxlm.train.distributed.worker import follow
from mlxlm.train.events import (
    Event,
    Finished,
    Forecast,
    NotSaved,
    Paused,
    Replanned,
    Resumed,
    Sample,
    Saved,
    Slowed,
    Started,
    Step,
    Stopped,
    Validation,
    Warned,
)
from mlxlm.train.finetune import open_base, start_finetune
from mlxlm.train.loop import train
from mlxlm.train.plot import draw_losses
from mlxlm.train.repeat import repeat_run
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings
from mlxlm.train.start import start_run
from mlxlm.train.step_benchmark import Probe, probe
from mlxlm.train.throttle import Power
from mlxlm.train.trackers import check_trackers

__all__ = [
    "Event", "Finished", "Forecast", "NotSaved", "Paused", "Power", "Probe", "RankLost", "Ranks", "Replanned",
    "Resumed", "Run", "Sample", "Saved", "Slowed", "Started", "Step", "Stopped", "TrainSettings", "Validation",
    "Warned", "check_trackers", "draw_losses", "follow", "open_base", "probe", "repeat_run", "start_finetune",
    "start_run", "train",
]  # fmt: skip
