"""What happens in a run, as values: whoever drives the loop decides what to show.

Each is an entry of the run's log, too: its fields under the names they have here, see `mlxlm.train.log`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelSizeChosen:
    """A model whose size was chosen by the time there is: `parameters`, trained on about `tokens`, which are `epochs`
    passes over the text. `law_name`: what says which size is best."""

    parameters: int
    tokens: float
    epochs: float
    law_name: str


@dataclass(frozen=True)
class Forecast:
    """What a probe on this machine says of a run before it begins: seconds in its `steps`, seconds with its
    `validations`, and MLX's peak of memory in bytes."""

    steps: int
    step_seconds: float
    seconds: float
    memory: int
    validations: int


@dataclass(frozen=True)
class Conversations:
    """What a tuning run is made of: conversations, in so many `pieces` where they are longer than a row of
    `max_seq_length` tokens. `split`: how many of them were split between turns only; `cut`: how many have a question
    with an answer that is longer than a row, which goes on in further rows. `suggested_seq_length`: a sequence length that fewer are
    cut at, if the model's context allows one."""

    conversations: int
    pieces: int
    split: int
    cut: int
    max_seq_length: int
    suggested_seq_length: int | None


@dataclass(frozen=True)
class Started:
    """The loop is ready; `step` > 0 after a resume. `epochs`: passes over the data by the last step, `epochs_by_source` each
    part that has a weight. `flops_per_token`: floating-point operations that training on one token takes, forward and
    backward. `dropped_fraction`: the share of the text that an epoch leaves out, since it doesn't fit into rows. `padding`: the
    share of the rows that is padding, which nothing is learned from."""

    step: int
    steps: int
    parameters: int
    tokens_per_step: int
    epochs: float
    flops_per_token: int
    epochs_by_source: dict[str, float]
    dropped_fraction: float
    padding: float


@dataclass(frozen=True)
class Step:
    """A finished step. `loss` in nats per token; `memory` in bytes, on a CPU that of the process, on a GPU MLX's peak;
    `seconds` spent in the run's steps so far, before
    a resume too, without pauses and rests; `seconds_left` until the run's end by the clock on the wall, from
    the second step on with rests and all else that went between steps."""

    step: int
    steps: int
    tokens: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    seconds_left: float
    memory: int


@dataclass(frozen=True)
class StepsChanged:
    """After step `step` a run with a time limit is to have this many `steps`: steps take longer than they did, or less.
    The learning rates from here on are those of a run of so many."""

    step: int
    steps: int


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
class CheckpointSaved:
    step: int
    path: Path


@dataclass(frozen=True)
class CheckpointNotSaved:
    """A checkpoint that the disk has no room for. Training goes on; it is tried again when there is room. `hint` says
    what would help."""

    step: int
    reason: str
    hint: str


@dataclass(frozen=True)
class Paused:
    """Nothing is computed until Resumed, or until a stop is asked for."""

    step: int
    reason: str


@dataclass(frozen=True)
class Throttled:
    """From now on `duty_cycle` percent of the time is worked, until Resumed."""

    step: int
    reason: str
    duty_cycle: float


@dataclass(frozen=True)
class Resumed:
    """What Paused or Slowed the run, for `reason`, is over after `seconds`."""

    step: int
    reason: str
    seconds: float


@dataclass(frozen=True)
class TrainingWarning:
    """Something beside the training does not work; the training goes on."""

    step: int
    message: str


@dataclass(frozen=True)
class Stopped:
    """`should_stop` asked for it: everything up to `step` is saved."""

    step: int
    path: Path


@dataclass(frozen=True)
class Failed:
    """An error ended the run in step `step`. It is logged only: what drives the loop gets the error itself."""

    step: int
    message: str


@dataclass(frozen=True)
class Finished:
    """The last step is done and saved. `tokens_per_second` is over the last 50 steps, the first left out, 0 where
    there are no others, and None where nothing was left to do. `memory`: MLX's peak in bytes since the run began or was
    resumed."""

    step: int
    seconds: float
    tokens_per_second: float | None
    best_loss: float | None
    bits_per_byte: float | None
    memory: int
    path: Path


Event = (
    ModelSizeChosen
    | Forecast
    | Conversations
    | Started
    | Step
    | StepsChanged
    | Validation
    | Sample
    | CheckpointSaved
    | CheckpointNotSaved
    | Paused
    | Throttled
    | Resumed
    | TrainingWarning
    | Stopped
    | Failed
    | Finished
)
