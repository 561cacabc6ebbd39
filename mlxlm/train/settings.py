"""The settings of a run, validated as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mlxlm.config.numbers import is_int, is_number
from mlxlm.config.optimizers import OPTIMIZERS, OptimizerSpec
from mlxlm.data import PACKINGS
from mlxlm.train import lr_schedules
from mlxlm.train.lr_schedules import LR_SCHEDULES
from mlxlm.utils.errors import ConfigError

DTYPES = ("float32", "bfloat16")
REPEAT_PLAN_FILE = "repeat_plan.jsonl"  # the log of the run that is repeated
_MAX_NUMBER = 1e9  # far below the largest float32, because optimizers square
_SIZES = ("steps", "batch_size", "max_seq_length", "grad_accumulation_steps", "eval_tokens", "sample_tokens")
_COUNTS = ("warmup_steps", "eval_every", "save_every", "sample_every", "seed")
_FLAGS = ("document_mask", "mask_prompt", "grad_checkpoint")


@dataclass(frozen=True)
class TrainSettings:
    """How to train. One step sees `grad_accumulation_steps` x `batch_size` sequences of `max_seq_length` tokens.

    Raises:
        ConfigError: Naming every setting that can't work.
    """

    steps: int
    learning_rate: float  # peak
    batch_size: int = 16
    max_seq_length: int = 256
    grad_accumulation_steps: int = 1  # of all processes together
    packing: str = "concatenate"  # no padding; "best-fit" keeps documents whole and pads rows
    document_mask: bool = False  # attention stays within a document: 2 to 5% more work for a CPU
    mask_prompt: bool = False  # of conversations, learn the assistant's messages only
    optimizer: str = "adamw"
    lr_schedule: str = "cosine"
    warmup_steps: int | None = None  # None: 5% of the steps, at most 500
    min_lr_ratio: float = 0.1  # final learning rate, as a fraction of learning_rate
    time_limit: float | None = None  # seconds of wall-clock time, which end the run; `steps` is then a forecast
    decay_fraction: float = 0.2  # fraction of the steps that wsd spends decaying (Hu et al. 2024, MiniCPM)
    weight_decay: float | None = None  # None, here and for the betas: the optimizer's default
    beta1: float | None = None
    beta2: float | None = None
    grad_clip: float = 1.0  # largest global norm of the gradient; 0: no clipping
    dropout: float = 0.0
    ema_decay: float = 0.0  # of the averaged weights, which are evaluated and saved as the model; 0: no average
    dtype: str = "float32"  # of products and activations; the weights are always float32
    grad_checkpoint: bool = False  # recompute layers for the gradient: 8 operations per weight and token, not 6
    seed: int = 0
    eval_every: int | None = 250  # None, with a time limit: up to 20 times, in at most 5% of the time
    eval_tokens: int = 131_072
    save_every: int = 500
    save_minutes: float = 10.0  # also save this long after the last checkpoint; 0: by steps only
    save_total_limit: int = 2
    sample_every: int = 0  # 0: none
    sample_prompt: str = ""
    sample_tokens: int = 64
    spike_threshold: float = 1.0  # nats by which the loss may rise, see `SpikeDetector`; 0: no limit
    repeat_plan: str | None = None  # REPEAT_PLAN_FILE in a run that `repeat_run` made

    def __post_init__(self) -> None:
        for name in ("weight_decay", "beta1", "beta2"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self._optimizer_spec, name, None))
        if problems := list(_problems(self)):
            raise ConfigError("invalid training settings: " + "; ".join(problems))

    @property
    def _optimizer_spec(self) -> OptimizerSpec | None:
        return OPTIMIZERS.get(self.optimizer) if isinstance(self.optimizer, str) else None

    @classmethod
    def provisional(cls, values: Mapping[str, Any]) -> TrainSettings:
        """Return settings for a run whose steps or learning rate are not known yet.

        Missing steps are the fewest that the warmup allows.

        Raises:
            ConfigError: For settings that can't work with any number of steps.
        """
        warmup = values.get("warmup_steps")
        steps = 1 + max(0, warmup) if isinstance(warmup, int) else 1
        return cls(**{"learning_rate": 1.0, **values, "steps": values.get("steps") or steps})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> TrainSettings:
        """Read the result of `to_dict`. Raises ConfigError naming `source`."""
        try:
            return cls(**values)
        except TypeError:
            known = {f.name for f in fields(cls)}
            unknown = sorted(set(values) - known) if isinstance(values, Mapping) else []
            problem = f"unknown settings {', '.join(unknown)}" if unknown else "incomplete settings"
            raise ConfigError(f"{source}: {problem}", "the version of mlxlm that wrote it") from None
        except ConfigError as error:
            raise error.prefixed(source, ConfigError) from None

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, as JSON values."""
        return asdict(self)

    @classmethod
    def defaults(cls, steps: int) -> dict[str, Any]:
        """Return the default settings of a run of `steps`, except the learning rate, which depends on the model."""
        values = cls(steps=steps, learning_rate=1.0).to_dict()
        return {name: value for name, value in values.items() if name not in ("steps", "learning_rate")}

    def per_process(self, num_processes: int) -> TrainSettings:
        """Return the share of one of `num_processes` processes: it computes as many times fewer batches of a step."""
        return replace(self, grad_accumulation_steps=self.grad_accumulation_steps // num_processes)

    @property
    def rows_per_step(self) -> int:
        """Sequences of a step, of all processes."""
        return self.batch_size * self.grad_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, of all processes."""
        return self.rows_per_step * self.max_seq_length

    def learning_rate_at(self, progress: float) -> float:
        """Return the learning rate of a step after which the share `progress` of the run is over, at most 1."""
        warmup = min(500, self.steps // 20) if self.warmup_steps is None else self.warmup_steps
        share = (warmup + 1) / self.steps
        if self.time_limit is not None:  # there may be fewer steps than a given warmup has
            share = min(share, 0.5)
        schedule = self.lr_schedule, share, self.min_lr_ratio, self.decay_fraction
        return lr_schedules.learning_rate(progress, self.learning_rate, *schedule)


def _is_count(value: Any, minimum: int) -> bool:
    return is_int(value) and minimum <= value < 2**53


def _is_number(value: Any) -> bool:
    return is_number(value) and abs(value) <= _MAX_NUMBER


def _problems(s: TrainSettings) -> Iterator[str]:
    """Yield every problem of the settings, each with a value that would work."""
    optional = {"warmup_steps", "time_limit", "weight_decay", "beta1", "beta2"}
    if s.time_limit is not None or s.repeat_plan:
        optional.add("eval_every")

    def check(names: tuple[str, ...], is_valid: Callable[[Any], bool], requirement: str) -> Iterator[str]:
        for name in names:
            value = getattr(s, name)
            if not is_valid(value) and not (value is None and name in optional):
                yield f"{name} is {value!r}, it must be {requirement}"

    yield from check((*_SIZES, "save_total_limit"), lambda x: _is_count(x, 1), "a whole number from 1 up")
    yield from check(_COUNTS, lambda x: _is_count(x, 0), "a whole number from 0 up")
    choices = {"packing": PACKINGS, "lr_schedule": LR_SCHEDULES, "optimizer": OPTIMIZERS, "dtype": DTYPES}
    for name, allowed in choices.items():
        yield from check((name,), tuple(allowed).__contains__, f"one of {', '.join(allowed)}")
    yield from check(("learning_rate", "time_limit"), lambda x: _is_number(x) and x > 0, "a positive number")
    non_negative = ("weight_decay", "grad_clip", "spike_threshold", "save_minutes")
    yield from check(non_negative, lambda x: _is_number(x) and x >= 0, "a number from 0 up")
    yield from check(("min_lr_ratio", "decay_fraction"), lambda x: _is_number(x) and 0 <= x <= 1, "between 0 and 1")
    fractions = ("beta1", "beta2", "dropout", "ema_decay")
    yield from check(fractions, lambda x: _is_number(x) and 0 <= x < 1, "at least 0 and below 1")
    spec = s._optimizer_spec
    if spec and spec.beta2 is None:
        for name in ("beta1", "beta2"):
            if getattr(s, name) != getattr(spec, name):
                yield f"{name} is {getattr(s, name)!r}, but {s.optimizer} has no {name}: omit it"
    yield from check(("repeat_plan",), lambda x: x in (None, REPEAT_PLAN_FILE), f"{REPEAT_PLAN_FILE} or null")
    yield from check(_FLAGS, lambda x: isinstance(x, bool), "true or false")
    yield from check(("sample_prompt",), lambda x: isinstance(x, str), "text")
    by_clock = s.time_limit is not None or s.repeat_plan is not None
    fixed_warmup = None if by_clock or not _is_count(s.warmup_steps, 0) else s.warmup_steps
    if fixed_warmup is not None and _is_count(s.steps, 1) and fixed_warmup >= s.steps:
        yield f"warmup_steps is {s.warmup_steps}, it must be less than steps, which is {s.steps}"
