"""What happens in a run, as values: whoever drives the loop decides what to show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Started:
    """The loop is ready; `step` > 0 after a resume. `epochs`: passes over the data by the last step."""

    step: int
    steps: int
    parameters: int
    tokens_per_step: int
    epochs: float


@dataclass(frozen=True)
class Step:
    """A finished step. `loss` in nats per token; `memory` in bytes."""

    step: int
    steps: int
    tokens: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    seconds_left: float
    memory: int


@dataclass(frozen=True)
class Validation:
    """`best`: no earlier validation of the run had a lower loss."""

    step: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float
    best: bool


@dataclass(frozen=True)
class Sample:
    """Text that the model makes of `prompt`."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Saved:
    step: int
    path: Path


@dataclass(frozen=True)
class Stopped:
    """`should_stop` asked for it: everything up to `step` is saved."""

    step: int
    path: Path


@dataclass(frozen=True)
class Finished:
    """The last step is done and saved. `tokens_per_second` is 0 where nothing was left to do."""

    step: int
    seconds: float
    tokens_per_second: float
    best_loss: float | None
    bits_per_byte: float | None
    path: Path


Event = Started | Step | Validation | Sample | Saved | Stopped | Finished
