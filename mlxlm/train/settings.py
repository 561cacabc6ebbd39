"""The settings of a run, validated as a whole, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mlxlm.data import PACKINGS
from mlxlm.errors import ConfigError

SCHEDULES = ("cosine", "wsd", "constant")


@dataclass(frozen=True)
class TrainSettings:
    """How to train. One step sees `accumulate` x `batch_size` sequences of `sequence_length` tokens."""

    steps: int
    learning_rate: float
    batch_size: int = 16
    sequence_length: int = 256
    accumulate: int = 1
    packing: str = "concatenate"  # leaves nothing out; "best-fit" crops documents, and begins every row with one
    document_mask: bool = False  # attention stays within a document
    answers_only: bool = False  # of conversations the assistant's words alone are learned: for tuning
    schedule: str = "cosine"
    warmup_steps: int | None = None  # None: 5% of the steps, at most 500
    final_learning_rate: float = 0.1  # as a fraction of learning_rate
    decay_fraction: float = 0.2  # the share of the steps that wsd spends decaying (Hu et al. 2024, MiniCPM)
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95  # 0.999 averages over longer than a short run lasts (Brown et al. 2020, appendix B)
    clip: float = 1.0  # global norm of the gradient; 0 leaves it as it is
    dropout: float = 0.0
    seed: int = 0
    eval_every: int = 250
    eval_tokens: int = 131_072
    save_every: int = 500
    keep: int = 2
    sample_every: int = 0  # 0: none
    sample_prompt: str = ""
    sample_tokens: int = 64
    spike: float = 1.0  # nats by which the mean of 10 losses may exceed its lowest value; 0: don't look

    def __post_init__(self) -> None:
        if self.warmup_steps is None and isinstance(self.steps, int):
            object.__setattr__(self, "warmup_steps", min(500, self.steps // 20))
        problems = list(_problems(self))
        if problems:
            raise ConfigError("these training settings can't work: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> TrainSettings:
        """Read back what `to_dict` gave. Raises ConfigError naming `source`."""
        try:
            return cls(**values)
        except TypeError:
            known = {f.name for f in fields(cls)}
            unknown = sorted(set(values) - known) if isinstance(values, Mapping) else []
            what = f"unknown settings {', '.join(unknown)}" if unknown else "incomplete settings"
            raise ConfigError(f"{source}: {what}", "the version of mlxlm that wrote it") from None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length * self.accumulate

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step `step` (0-based): linear warmup, then the schedule.

        cosine: down to `final_learning_rate` at the last step (Loshchilov & Hutter 2017). wsd: constant,
        then linear down to it over the last `decay_fraction` of the steps.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / max(1, self.steps - 1 - self.warmup_steps)
        if self.schedule == "constant":
            remaining = 1.0
        elif self.schedule == "cosine":
            remaining = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        else:
            start = max(self.warmup_steps, round(self.steps * (1 - self.decay_fraction)))
            remaining = min(1.0, (self.steps - 1 - step) / max(1, self.steps - 1 - start))
        return self.learning_rate * (self.final_learning_rate + (1 - self.final_learning_rate) * remaining)


def default_learning_rate(parameters: int) -> float:
    """A peak learning rate for AdamW by model size: 6e-4 · (N / 125M)^-0.39, at most 0.01.

    The power law runs near GPT-3's rates from 125M to 1.3B parameters (Brown et al. 2020, table 2.1), and
    through 6e-3 at 0.4M parameters, where 1e-2 did no better on a megabyte of plays.
    """
    return min(0.01, 6e-4 * (parameters / 125e6) ** -0.39)


def _problems(s: TrainSettings) -> Iterator[str]:
    """Every problem of the settings, each with a value that would work."""

    def whole(value: Any, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**53

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    for name in ("steps", "batch_size", "sequence_length", "accumulate", "eval_tokens", "keep", "sample_tokens"):
        if not whole(getattr(s, name), 1):
            yield f"{name} is {getattr(s, name)!r}, it must be a whole number from 1 up"
    for name in ("warmup_steps", "eval_every", "save_every", "sample_every", "seed"):
        if not whole(getattr(s, name), 0):
            yield f"{name} is {getattr(s, name)!r}, it must be a whole number from 0 up"
    for name in ("learning_rate", "weight_decay", "clip", "spike"):
        value = getattr(s, name)
        if not number(value) or value < 0 or (name == "learning_rate" and value == 0):
            yield f"{name} is {value!r}, it must be a positive number"
    for name in ("final_learning_rate", "decay_fraction"):
        if not number(getattr(s, name)) or not 0 <= getattr(s, name) <= 1:
            yield f"{name} is {getattr(s, name)!r}, it must be between 0 and 1"
    for name in ("beta1", "beta2", "dropout"):
        if not number(getattr(s, name)) or not 0 <= getattr(s, name) < 1:
            yield f"{name} is {getattr(s, name)!r}, it must be at least 0 and below 1"
    if s.packing not in tuple(PACKINGS):
        yield f"packing is {s.packing!r}, it must be one of {', '.join(PACKINGS)}"
    for name in ("document_mask", "answers_only"):
        if not isinstance(getattr(s, name), bool):
            yield f"{name} is {getattr(s, name)!r}, it must be true or false"
    if s.schedule not in SCHEDULES:
        yield f"schedule is {s.schedule!r}, it must be one of {', '.join(SCHEDULES)}"
    if whole(s.steps, 1) and whole(s.warmup_steps, 0) and s.warmup_steps >= s.steps > 1:
        yield f"warmup_steps {s.warmup_steps} leaves nothing of {s.steps} steps (at most {s.steps - 1})"
