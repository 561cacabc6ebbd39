"""What a checkpoint remembers of a run besides arrays: its `state.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class TrainState:
    """The state of a run after step `step`.

    Attributes:
        step: The last finished step; 0 before the first.
        seconds: Time spent in steps, without pauses.
        steps: Number of steps of the run, or with a time limit an estimate; None: as in the settings. See `Deadline`.
        elapsed: Seconds of the time limit that have passed. See `Deadline`.
        next_validation: The value of `elapsed` at which the next validation is due. See `Deadline`.
        validation_loss: Nats per token; None if this step was not validated.
        best: `step`, `loss` and `bits_per_byte` of the best validation so far.
        healthy: Whether the loss was normal. See `SpikeDetector`.
        spike_detector: State of the `SpikeDetector`.
    """

    step: int = 0
    seconds: float = 0.0
    steps: int | None = None
    elapsed: float = 0.0
    next_validation: float = 0.0
    validation_loss: float | None = None
    best: dict[str, Any] | None = None
    healthy: bool = True
    spike_detector: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """Read the entries of a `state.json`; it also has the settings, the environment and digests."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})
