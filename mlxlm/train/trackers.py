"""Events of a run sent on to TensorBoard and Weights & Biases, by their own libraries.

The run does not depend on them: one that fails is left out from there on, with one warning.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

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

_WANDB_FILE = "wandb.json"  # in the run's folder: which W&B run it is
_WANDB_SECONDS = 30.0  # that the first connection may take


class Tracker(Protocol):
    def record(self, event: Event) -> None: ...

    def close(self) -> None: ...


def check_trackers(tensorboard: bool, wandb: str | None) -> None:
    """Raise PlatformError, naming the extra, where a library that was asked for is not installed."""
    for wanted, library, extra in ((tensorboard, "tensorboardX", "tensorboard"), (wandb is not None, "wandb", "wandb")):
        if wanted and importlib.util.find_spec(library) is None:
            raise PlatformError(f"{library} is not installed", f"pip install 'mlxlm[{extra}]'")


class Trackers:
    """Those that were asked for. `first` is the last step that is done already: what was sent of later ones, before
    a power cut, is replaced or left as it is, never doubled."""

    def __init__(self, run: Run, first: int, tensorboard: bool, wandb: str | None):
        check_trackers(tensorboard, wandb)
        self._openers: dict[str, Callable[[], Tracker]] = {}
        self._open: dict[str, Tracker] = {}
        if tensorboard:
            self._openers["TensorBoard"] = lambda: _TensorBoard(run, first)
        if wandb is not None:
            _identity(run, wandb)
            self._openers["Weights & Biases"] = lambda: _WeightsAndBiases(run, wandb)

    def record(self, event: Event) -> Iterator[TrainingWarning]:
        """Send `event` on; Warned for each tracker that fails and is left out from here on."""
        for name in list(self._openers):
            try:
                if name not in self._open:
                    self._open[name] = self._openers[name]()
                self._open[name].record(event)
            except Exception as error:  # whatever a library of others meets, the training goes on
                del self._openers[name]
                reason = one_line(f"{type(error).__name__}: {error}".strip(": "))
                yield TrainingWarning(getattr(event, "step", 0), f"{name} gets nothing more of this run: {reason}")
                self._close(name)

    def close(self) -> None:
        for name in list(self._open):
            self._close(name)

    def _close(self, name: str) -> None:
        with suppress(Exception):  # there is nobody left to tell
            if name in self._open:
                self._open.pop(name).close()


def _numbers(event: Event) -> dict[str, float]:
    """The curves that an event adds a point to."""
    if isinstance(event, Step):
        return {
            "train/loss": event.loss,
            "train/learning_rate": event.learning_rate,
            "train/grad_norm": event.grad_norm,
            "train/tokens": event.tokens,
            "machine/tokens_per_second": event.tokens_per_second,
            "machine/memory_bytes": event.memory,
        }
    if isinstance(event, Validation):
        return {"validation/loss": event.loss, "validation/bits_per_byte": event.bits_per_byte}
    return {}


def _identity(run: Run, project: str) -> dict[str, Any]:
    """Which W&B run it is. Raises CheckpointError for one of another project."""
    file = run.path / _WANDB_FILE
    if not file.exists():
        write_json(file, {"id": secrets.token_hex(4), "project": project})
    known = read_json(file)
    if not isinstance(known.get("id"), str) or known.get("project") != project:
        there = known.get("project")
        raise CheckpointError(f"{run.path} is in the W&B project {there}, not in {project}", f"--wandb {there}")
    return known


class _TensorBoard:
    """Event files in the run's folder `tensorboard`, one for each time the run was started."""

    def __init__(self, run: Run, first: int):
        from tensorboardX import SummaryWriter

        # The name also has the second and the host: two that are started within one must not share a file, and
        # TensorBoard reads them in the order of their names. `purge_step` takes back what was sent of later steps.
        self._writer = SummaryWriter(
            str(run.path / "tensorboard"), purge_step=first + 1, filename_suffix=f".step-{first:09d}"
        )

    def record(self, event: Event) -> None:
        for name, value in _numbers(event).items():
            self._writer.add_scalar(name, value, event.step)
        if isinstance(event, Sample):
            self._writer.add_text("sample", event.prompt + event.text, event.step)
        if isinstance(
            event, CheckpointSaved | Stopped | Finished
        ):  # a resume begins from here: nothing before may be missing
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One W&B run for a run, however often it was interrupted: its id is kept in `wandb.json`."""

    def __init__(self, run: Run, project: str):
        import wandb

        known = _identity(run, project)
        quiet = wandb.Settings(silent=True, console="off", disable_code=True, init_timeout=_WANDB_SECONDS)
        config = {"settings": run.settings.to_dict(), "model": config_to_hf(run.config)}
        self._run: Any = wandb.init(
            project=project, id=known["id"], name=run.path.absolute().name, dir=str(run.path), resume="allow",
            config=config, settings=quiet,
        )  # fmt: skip
        self._sent = self._run.step  # the steps before it are there already, and equal to the bit

    def record(self, event: Event) -> None:
        if isinstance(event, Started):
            self._run.summary["parameters"] = event.parameters
        values: dict[str, Any] = _numbers(event)
        if isinstance(event, Sample):
            values = {"sample": event.prompt + event.text}
        if values and event.step >= self._sent:
            self._run.log(values, step=event.step)

    def close(self) -> None:
        self._run.finish()
