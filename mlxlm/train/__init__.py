"""Pretraining: settings, the compiled step, the run directory and the loop."""

from mlxlm.train.clock import measure_step
from mlxlm.train.events import (
    Event,
    Finished,
    NotSaved,
    Paused,
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
from mlxlm.train.loop import train
from mlxlm.train.plot import draw_losses
from mlxlm.train.power import Power
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings
from mlxlm.train.start import start_run

__all__ = [
    "Event", "Finished", "NotSaved", "Paused", "Power", "Resumed", "Run", "Sample", "Saved", "Slowed", "Started",
    "Step", "Stopped", "TrainSettings", "Validation", "Warned", "draw_losses", "measure_step", "start_run", "train",
]  # fmt: skip
