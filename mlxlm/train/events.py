"""Events of a run: what `train` yields, and its `log.jsonl`, which has one JSON object per line for each of them."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxlm.report.log_entries import read_log_lines
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.files import atomic_write
from mlxlm.utils.json_files import json_line, without_nonfinite

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_RETRY_SECONDS = 1.0  # on a full disk


@dataclass(frozen=True)
class Event:
    """Base class of all events."""


@dataclass(frozen=True)
class ModelSizeChosen(Event):
    """The model size was chosen for the available time.

    Attributes:
        parameters: Number of parameters.
        tokens: Tokens that the model will see, about.
        epochs: Passes over the text.
        law_name: The scaling law that chose it.
    """

    parameters: int
    tokens: float
    epochs: float
    law_name: str


@dataclass(frozen=True)
class TextLimited(Event):
    """Only a part of the text is used: preparing all of it would take too much of the available time.

    Attributes:
        bytes: About as many bytes of the sources are used.
        total_bytes: Bytes that they have.
    """

    bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Forecast(Event):
    """What a benchmark on this machine predicts for a run.

    Attributes:
        steps: Number of steps.
        step_seconds: Seconds of all steps.
        seconds: Seconds of all steps and validations.
        memory: MLX's peak memory in bytes.
        validations: Number of validations.
    """

    steps: int
    step_seconds: float
    seconds: float
    memory: int
    validations: int


@dataclass(frozen=True)
class Conversations(Event):
    """The data of a fine-tuning run.

    Attributes:
        conversations: Number of conversations.
        pieces: Number of documents made of them; a conversation that is longer than a row becomes several.
        split: Conversations that were split between turns only.
        cut: Conversations that have a question with an answer which is longer than a row, and continues in the next.
        tokens: Tokens of the documents.
        learned_tokens: Those that the loss is computed on; the loss mask has 0 for the others.
        max_seq_length: Tokens of a row.
        suggested_seq_length: A length with which fewer are cut, if the model's context allows one.
    """

    conversations: int
    pieces: int
    split: int
    cut: int
    tokens: int
    learned_tokens: int
    max_seq_length: int
    suggested_seq_length: int | None


@dataclass(frozen=True)
class Initialized(Event):
    """The run starts from the weights of `model`, not from random ones."""

    model: str


@dataclass(frozen=True)
class Prompts(Event):
    """The data of a run with a reward function.

    Attributes:
        prompts: Number of prompts to train on.
        held_out: Number of prompts for validation.
        longest: Tokens of the longest prompt.
    """

    prompts: int
    held_out: int
    longest: int


@dataclass(frozen=True)
class Preferences(Event):
    """The data of a run that learns preferences.

    Attributes:
        loss: Its loss: "dpo", "orpo" or "kto".
        chosen: Chosen or desirable answers.
        rejected: Rejected or undesirable answers.
        too_long: Pairs that were left out because an answer with its prompt is longer than a row.
        same: Rows that were left out because both answers are the same.
        max_seq_length: Tokens of a row.
        suggested_seq_length: A length with which fewer are left out, if the model's context allows one.
    """

    loss: str
    chosen: int
    rejected: int
    too_long: int
    same: int
    max_seq_length: int
    suggested_seq_length: int | None


@dataclass(frozen=True)
class Started(Event):
    """The loop is ready.

    Attributes:
        step: The last finished step: above 0 after a resume.
        steps: Number of steps of the run. With a time limit, an estimate.
        parameters: Number of parameters.
        tokens_per_step: Tokens of a step, of all processes.
        epochs: Passes over the data after the last step.
        flops_per_token: Floating-point operations of training on a token, forward and backward.
        epochs_by_source: The same as `epochs`, for each source that has a weight.
        dropped_fraction: Fraction of the text that an epoch leaves out because it doesn't fit into rows.
        padding: Fraction of the rows that is padding.
        micro_batches: Parts that the gradients of a batch are computed in.
    """

    step: int
    steps: int
    parameters: int
    tokens_per_step: int
    epochs: float
    flops_per_token: int
    epochs_by_source: dict[str, float]
    dropped_fraction: float
    padding: float
    micro_batches: int


@dataclass(frozen=True)
class Step(Event):
    """A step is finished.

    Attributes:
        step: Its number, from 1.
        steps: Number of steps of the run. With a time limit, an estimate until the last one.
        tokens: Tokens seen so far; of GRPO as many as if all rows had the longest prompt and answer.
        loss: Training loss in nats per token.
        learning_rate: Learning rate.
        grad_norm: Global norm of the gradient before clipping.
        tokens_per_second: Over the last 50 steps; 0 for the first step, and of GRPO.
        seconds: Spent in steps so far, before a resume too, without pauses and rests.
        seconds_left: Until the run ends; from the second step on with all that happens between steps.
        memory: Bytes: on a CPU the memory of the process, on a GPU MLX's peak.
        metrics: Metrics of the loss by name, which the log has next to the other fields; NaN for one that this step has
            no data for.
    """

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
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation(Event):
    """The result of a validation.

    Attributes:
        best: No earlier validation of the run had a lower loss.
        expert_load: Tokens of the busiest expert, relative to the mean of its layer; None without experts.
        metrics: Metrics of the loss by name, as of Step. With preferences `perplexity` and `bits_per_byte` are those of
            the chosen answers. With a reward function, "reward" is the mean reward of greedy answers to the prompts
            that are held out; `loss` is its negative, and perplexity and bits per byte are NaN.
    """

    step: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float
    best: bool
    expert_load: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample(Event):
    """Text that the model generated after `prompt`."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was saved in the folder `path`."""

    step: int
    path: Path


@dataclass(frozen=True)
class CheckpointNotSaved(Event):
    """The disk is full. Training continues; the checkpoint is saved when there is room. `hint`: what would help."""

    step: int
    reason: str
    hint: str


@dataclass(frozen=True)
class Paused(Event):
    """Nothing is computed until Resumed, or until a stop is requested."""

    step: int
    reason: str


@dataclass(frozen=True)
class Throttled(Event):
    """The run computes `duty_cycle` percent of the time until Resumed."""

    step: int
    reason: str
    duty_cycle: float


@dataclass(frozen=True)
class Resumed(Event):
    """The pause or throttling for `reason` is over, after `seconds`."""

    step: int
    reason: str
    seconds: float


@dataclass(frozen=True)
class TrainingWarning(Event):
    """Something other than the training failed, or the machine has slept; the training continues."""

    step: int
    message: str


@dataclass(frozen=True)
class Stopped(Event):
    """A stop was requested; everything up to `step` is saved in `path`."""

    step: int
    path: Path


@dataclass(frozen=True)
class Failed(Event):
    """An error ended the run in step `step`. Only logged: `train` raises the error."""

    step: int
    message: str


@dataclass(frozen=True)
class Finished(Event):
    """The last step is finished and saved.

    Attributes:
        step: Its number.
        seconds: Spent in steps.
        tokens_per_second: Over the last 50 steps except the first; 0 if there are none, None if nothing was left to do.
        best_loss: Lowest validation loss, in nats per token.
        bits_per_byte: The same in bits per byte.
        memory: MLX's peak in bytes since the run began or was resumed.
        path: The run.
    """

    step: int
    seconds: float
    tokens_per_second: float | None
    best_loss: float | None
    bits_per_byte: float | None
    memory: int
    path: Path


class RunLog:
    """The log at `path`. Lines that don't fit on a full disk stay in memory; writing is tried again once a second."""

    def __init__(self, path: Path):
        self.path = path
        self._pending: list[bytes] = []
        self._retry_at = 0.0

    def record(self, *events: Event | None) -> None:
        """Append events: the name in snake case, the fields except paths, and, except for steps, the time.

        Raises:
            CheckpointError: The file can't be written, for another reason than a full disk.
        """
        for event in filter(None, events):
            # The perplexity of an untrained model overflows.
            values = asdict(event)
            values |= values.pop("metrics", {})
            fields = without_nonfinite({k: value for k, value in values.items() if not isinstance(value, Path)})
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
            is_step = isinstance(event, Step)
            now = {} if is_step else {"time": datetime.now(UTC).isoformat(timespec="seconds")}
            self._pending.append(json_line({"event": name, **fields, **now}))
            if not is_step or time.monotonic() >= self._retry_at:  # else each step would try all lines again
                self._write()

    def _write(self) -> None:
        lines = b"".join(self._pending)
        with os_errors_as(CheckpointError, "write", self.path), self.path.open("ab", buffering=0) as file:
            end, written = file.tell(), 0
            try:
                written = file.write(lines)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRNOS:
                    raise
            if written < len(lines):
                file.truncate(end)  # no half line
                self._retry_at = time.monotonic() + _RETRY_SECONDS
            else:
                self._pending.clear()
                self._retry_at = 0.0

    def flush(self) -> None:
        """Flush the log to the disk, so that a checkpoint is never newer than the log."""
        if self._pending:
            self._write()
        if self.path.exists():
            with os_errors_as(CheckpointError, "write", self.path), self.path.open("ab") as file:
                os.fsync(file.fileno())

    def rewind(self, step: int, validated: bool) -> set[str]:
        """Remove what was logged after `step`, so that a resumed run doesn't log it twice.

        Args:
            step: The step that the run continues after.
            validated: False also removes the validation of `step`.

        Returns:
            The names of the remaining events of `step`.
        """
        remaining, size = set[str](), 0
        for line, entry in self._until(step, validated):
            size += len(line)
            if entry.get("step") == step:
                remaining.add(entry["event"])
        if not self.path.exists() or size == self.path.stat().st_size:
            return remaining  # there is nothing to remove, and no room is needed
        with atomic_write(self.path) as file:
            file.writelines(line for line, _ in self._until(step, validated))
        return remaining

    def _until(self, step: int, validated: bool) -> Iterator[tuple[bytes, dict[str, Any]]]:
        for line, entry in read_log_lines(self.path):
            at = entry.get("step", 0)
            if at < step or at == step and (validated or entry.get("event") != "validation"):
                yield line, entry
