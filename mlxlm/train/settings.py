"""The settings of a run, validated as a whole, and the learning rate of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mlxlm.data import PACKINGS
from mlxlm.train import lr_schedules
from mlxlm.train.lr_schedules import LR_SCHEDULES
from mlxlm.train.optimizers import OPTIMIZER_DEFAULTS, OPTIMIZERS
from mlxlm.utils.errors import ConfigError

DTYPES = ("float32", "bfloat16")
_LARGEST = 1e9  # of a number here: far from the end of float32, whose squares an optimizer takes


@dataclass(frozen=True)
class TrainSettings:
    """How to train. One step sees `grad_accumulation_steps` x `batch_size` sequences of `max_seq_length` tokens."""

    steps: int
    learning_rate: float
    batch_size: int = 16
    max_seq_length: int = 256
    grad_accumulation_steps: int = 1
    packing: str = "concatenate"  # without padding; "best-fit" keeps documents whole, and pads rows
    document_mask: bool = False  # attention stays within a document: 2 to 5% more work for a CPU
    mask_prompt: bool = False  # of conversations the assistant's words alone are learned: for tuning
    optimizer: str = "adamw"
    lr_schedule: str = "cosine"
    warmup_steps: int | None = None  # None: 5% of the steps that the run has at the time, at most 500
    min_lr_ratio: float = 0.1  # as a fraction of learning_rate
    time_limit: float | None = None  # seconds by the clock, to which the number of steps is fitted as the run goes
    decay_fraction: float = 0.2  # the share of the steps that wsd spends decaying (Hu et al. 2024, MiniCPM)
    weight_decay: float | None = None  # this and the betas: None takes the optimizer's, see `optimizers.DEFAULTS`
    beta1: float | None = None
    beta2: float | None = None
    grad_clip: float = 1.0  # global norm of the gradient; 0 leaves it as it is
    dropout: float = 0.0
    ema_decay: float = 0.0  # decay of the averaged weights, which are evaluated and saved as the model; 0: none
    dtype: str = "float32"  # of products and activations; the weights are float32 in any case
    grad_checkpoint: bool = (
        False  # layers are computed again for the gradient instead of kept: 8 operations a weight, not 6
    )
    seed: int = 0
    eval_every: int | None = 250  # None, with a time limit: up to 20 times, in at most 5% of the time
    eval_tokens: int = 131_072
    save_every: int = 500
    save_minutes: float = 10.0  # also this long after the last checkpoint, by the clock; 0: by steps alone
    save_total_limit: int = 2
    sample_every: int = 0  # 0: none
    sample_prompt: str = ""
    sample_tokens: int = 64
    spike_threshold: float = 1.0  # nats by which the mean of 10 losses may exceed its lowest value; 0: don't look
    repeat_plan: dict[str, list] | None = (
        None  # of a run with a time limit that this one repeats, see `mlxlm.train.repeat`
    )

    def __post_init__(self) -> None:
        for name in ("weight_decay", "beta1", "beta2"):
            if getattr(self, name) is None and self.optimizer in OPTIMIZERS:
                object.__setattr__(self, name, getattr(OPTIMIZER_DEFAULTS[self.optimizer], name))
        problems = list(_problems(self))
        if problems:
            raise ConfigError("these training settings can't work: " + "; ".join(problems))

    @classmethod
    def provisional(cls, values: Mapping[str, Any]) -> TrainSettings:
        """Of a run whose steps or learning rate are not known yet: with the fewest steps that its warmup leaves room
        for. Raises ConfigError for what can't work at any length."""
        warmup = values.get("warmup_steps")
        least = 1 + max(0, warmup) if isinstance(warmup, int) else 1
        return cls(**{"learning_rate": 1.0, **values, "steps": values.get("steps") or least})

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
        except ConfigError as error:
            raise ConfigError(f"{source}: {error.message}", error.hint) from None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def defaults(cls, steps: int) -> dict[str, Any]:
        """What the settings of a run of so many steps are where nothing is said; the learning rate, which goes by the
        model, is left out."""
        values = cls(steps=steps, learning_rate=1.0).to_dict()
        return {name: value for name, value in values.items() if name not in ("steps", "learning_rate")}

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.max_seq_length * self.grad_accumulation_steps

    def learning_rate_at(self, step: int, steps: int | None = None) -> float:
        """The learning rate of step `step` (0-based) of `steps` (None: as set), see `schedules.learning_rate`."""
        steps = self.steps if steps is None else steps
        warmup = min(500, steps // 20) if self.warmup_steps is None else self.warmup_steps
        if self.time_limit is not None or self.repeat_plan:  # there may be fewer steps than were planned at first
            warmup = min(warmup, steps // 2)
        return lr_schedules.learning_rate(
            step, steps, self.learning_rate, lr_schedule=self.lr_schedule, warmup=warmup,
            min_lr_ratio=self.min_lr_ratio, decay_fraction=self.decay_fraction,
        )  # fmt: skip


def _problems(s: TrainSettings) -> Iterator[str]:
    """Every problem of the settings, each with a value that would work."""

    def whole(value: Any, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**53

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST

    for name in (
        "steps",
        "batch_size",
        "max_seq_length",
        "grad_accumulation_steps",
        "eval_tokens",
        "save_total_limit",
        "sample_tokens",
    ):
        if not whole(getattr(s, name), 1):
            yield f"{name} is {getattr(s, name)!r}, it must be a whole number from 1 up"
    optional = {"warmup_steps"} | ({"eval_every"} if s.time_limit is not None or s.repeat_plan else set())
    for name in ("warmup_steps", "eval_every", "save_every", "sample_every", "seed"):
        if not (whole(getattr(s, name), 0) or name in optional and getattr(s, name) is None):
            yield f"{name} is {getattr(s, name)!r}, it must be a whole number from 0 up"
    for name, choices in (
        ("packing", tuple(PACKINGS)), ("lr_schedule", LR_SCHEDULES), ("optimizer", OPTIMIZERS), ("dtype", DTYPES)
    ):  # fmt: skip
        if getattr(s, name) not in choices:
            yield f"{name} is {getattr(s, name)!r}, it must be one of {', '.join(choices)}"
    of_optimizer = ("weight_decay", "beta1", "beta2") if s.optimizer in OPTIMIZERS else ()
    for name in ("learning_rate", *of_optimizer[:1], "grad_clip", "spike_threshold"):
        value = getattr(s, name)
        if not number(value) or value < 0 or (name == "learning_rate" and value == 0):
            yield f"{name} is {value!r}, it must be a positive number"
    if not number(s.save_minutes) or s.save_minutes < 0:
        yield f"save_minutes is {s.save_minutes!r}, it must be a number from 0 up"
    if s.time_limit is not None and (not number(s.time_limit) or s.time_limit <= 0):
        yield f"time_limit is {s.time_limit!r}, it must be a positive number of seconds"
    for name in ("min_lr_ratio", "decay_fraction"):
        if not number(getattr(s, name)) or not 0 <= getattr(s, name) <= 1:
            yield f"{name} is {getattr(s, name)!r}, it must be between 0 and 1"
    if of_optimizer and OPTIMIZER_DEFAULTS[s.optimizer].beta2 is None:
        of_optimizer = of_optimizer[:1]
        for name in ("beta1", "beta2"):
            if getattr(s, name) != getattr(OPTIMIZER_DEFAULTS[s.optimizer], name):
                yield f"{name} is {getattr(s, name)!r}, but {s.optimizer} has no {name}: leave it out"
    for name in (*of_optimizer[1:], "dropout", "ema_decay"):
        if not number(getattr(s, name)) or not 0 <= getattr(s, name) < 1:
            yield f"{name} is {getattr(s, name)!r}, it must be at least 0 and below 1"
    if s.repeat_plan is not None and not _is_plan(s.repeat_plan, whole):
        yield "plan isn't one: it needs replanned, pairs of steps, and validations, steps"
    for name in ("document_mask", "mask_prompt", "grad_checkpoint"):
        if not isinstance(getattr(s, name), bool):
            yield f"{name} is {getattr(s, name)!r}, it must be true or false"
    if not isinstance(s.sample_prompt, str):
        yield f"sample_prompt is {s.sample_prompt!r}, it must be text"
    if s.time_limit is None and whole(s.steps, 1) and whole(s.warmup_steps, 0) and s.warmup_steps >= s.steps:
        yield f"warmup_steps {s.warmup_steps} leaves nothing of {s.steps} steps (at most {s.steps - 1})"


def _is_plan(repeat_plan: Any, whole: Callable[[Any, int], bool]) -> bool:
    """Whether this is what `mlxlm.train.repeat` makes, as JSON has it."""
    if not isinstance(repeat_plan, dict) or set(repeat_plan) != {"steps_changed", "validations"}:
        return False
    steps_changed, validations = repeat_plan["steps_changed"], repeat_plan["validations"]
    return (
        all(isinstance(values, list) for values in (steps_changed, validations, *steps_changed))
        and all(len(pair) == 2 and all(whole(n, 1) for n in pair) for pair in steps_changed)
        and all(whole(n, 1) for n in validations)
    )
