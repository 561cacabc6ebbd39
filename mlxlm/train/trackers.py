"""Sends the events of a run to TensorBoard and Weights & Biases.

A tracker that fails is no longer used, with one warning; the training continues.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from mlxlm.families import config_to_hf
from mlxlm.train.events import (
    CheckpointSaved,
    Event,
    Finished,
    Sample,
    Started,
    Step,
    Stopped,
    TrainingWarning,
    Validation,
)
from mlxlm.train.run import Run
from mlxlm.utils.errors import CheckpointError, PlatformError, one_line
from mlxlm.utils.json_files import read_json, write_json

_WANDB_FILE = "wandb.json"  # in the run's folder: the id of the W&B run
_WANDB_TIMEOUT = 30.0  # seconds, for the first connection


def check_trackers(tensorboard: bool, wandb: str | None) -> None:
    """Raise PlatformError, naming the extra to install, if the library of a chosen tracker is not installed."""
    for wanted, library, extra in ((tensorboard, "tensorboardX", "tensorboard"), (wandb is not None, "wandb", "wandb")):
        if wanted and importlib.util.find_spec(library) is None:
            raise PlatformError(f"{library} is not installed", f"pip install 'mlxlm[{extra}]'")


class Trackers:
    """The chosen trackers of a run.

    Args:
        run: The run.
        first: The last finished step. What was sent of later ones, before a power cut, is replaced or left as it is,
            never doubled.
        tensorboard: Whether to write TensorBoard event files.
        wandb: The Weights & Biases project; None for none.
    """

    def __init__(self, run: Run, first: int, tensorboard: bool, wandb: str | None):
        self._openers: dict[str, Callable[[], Any]] = {}
        self._open: dict[str, Any] = {}
        if tensorboard:
            self._openers["TensorBoard"] = lambda: _TensorBoard(run, first)
        if wandb is not None:
            _identity(run, wandb)
            self._openers["Weights & Biases"] = lambda: _WeightsAndBiases(run, wandb)

    def record(self, event: Event) -> Iterator[TrainingWarning]:
        """Send `event`. Yields a TrainingWarning for each tracker that fails, and is no longer used."""
        for name in list(self._openers):
            try:
                if name not in self._open:
                    self._open[name] = self._openers[name]()
                self._open[name].record(event)
            except Exception as error:  # whatever fails in their libraries, the training continues
                del self._openers[name]
                reason = one_line(f"{type(error).__name__}: {error}".strip(": "))
                yield TrainingWarning(getattr(event, "step", 0), f"{name} gets no more events of this run: {reason}")

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self._open.values():
            with suppress(Exception):  # nobody would see the error
                tracker.close()


_FIELDS = {
    Step: {
        "train/loss": "loss",
        "train/learning_rate": "learning_rate",
        "train/grad_norm": "grad_norm",
        "train/tokens": "tokens",
        "machine/tokens_per_second": "tokens_per_second",
        "machine/memory_bytes": "memory",
    },
    Validation: {"validation/loss": "loss", "validation/bits_per_byte": "bits_per_byte"},
}


def _values(event: Step | Validation | Sample) -> dict[str, Any]:
    """Return the values to log for an event, by name."""
    if isinstance(event, Sample):
        return {"sample": event.prompt + event.text}
    fields, prefix = _FIELDS[type(event)], "train" if isinstance(event, Step) else "validation"
    values = {name: getattr(event, field) for name, field in fields.items()}
    return values | {f"{prefix}/{name}": value for name, value in event.metrics.items()}


def _identity(run: Run, project: str) -> dict[str, Any]:
    """Return the id of the W&B run, made on the first call. Raises CheckpointError for another project."""
    file = run.path / _WANDB_FILE
    if not file.exists():
        write_json(file, {"id": secrets.token_hex(4), "project": project})
    known = read_json(file)
    if not isinstance(known.get("id"), str) or known.get("project") != project:
        there = known.get("project")
        raise CheckpointError(f"{run.path} is in the W&B project {there}, not in {project}", f"`wandb={there}`")
    return known


class _TensorBoard:
    """Writes event files into the run's folder `tensorboard`, one for each start of the run."""

    def __init__(self, run: Run, first: int):
        from tensorboardX import SummaryWriter

        # The suffix tells two starts within a second apart, and orders the files, which TensorBoard reads by name.
        # `purge_step` removes what was sent of later steps.
        self._writer = SummaryWriter(
            str(run.path / "tensorboard"), purge_step=first + 1, filename_suffix=f".step-{first:09d}"
        )

    def record(self, event: Event) -> None:
        if isinstance(event, Step | Validation | Sample):
            add = self._writer.add_text if isinstance(event, Sample) else self._writer.add_scalar
            for name, value in _values(event).items():
                add(name, value, event.step)
        elif isinstance(event, CheckpointSaved | Stopped | Finished):  # a resume continues from here
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One W&B run, however often the run is interrupted: its id is stored in `wandb.json`."""

    def __init__(self, run: Run, project: str):
        import wandb

        known = _identity(run, project)
        quiet = wandb.Settings(silent=True, console="off", disable_code=True, init_timeout=_WANDB_TIMEOUT)
        config = {"settings": run.settings.to_dict(), "model": config_to_hf(run.config)}
        names = {"project": project, "id": known["id"], "name": run.path.absolute().name, "dir": str(run.path)}
        self._run: Any = wandb.init(**names, resume="allow", config=config, settings=quiet)
        self._sent = self._run.step  # W&B has the steps before it

    def record(self, event: Event) -> None:
        if isinstance(event, Started):
            self._run.summary["parameters"] = event.parameters
        elif isinstance(event, Step | Validation | Sample) and event.step >= self._sent:
            self._run.log(_values(event), step=event.step)

    def close(self) -> None:
        self._run.finish()
