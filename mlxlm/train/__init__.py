"""Pretraining: settings, the compiled step, the run directory and the loop."""

from mlxlm.train.loop import (
    Event,
    Finished,
    Sample,
    Saved,
    Started,
    Step,
    Stopped,
    Validation,
    measure_step,
    train,
)
from mlxlm.train.plot import draw_losses
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings
from mlxlm.train.start import start_run

__all__ = [
    "Event", "Finished", "Run", "Sample", "Saved", "Started", "Step", "Stopped", "TrainSettings",
    "Validation", "draw_losses", "measure_step", "start_run", "train",
]  # fmt: skip
