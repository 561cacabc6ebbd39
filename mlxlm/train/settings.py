"""The settings of a run, validated as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlxlm.config.mup import PARAMETRIZATIONS
from mlxlm.config.numbers import is_int
from mlxlm.config.optimizers import OPTIMIZERS, STATE_DTYPES, OptimizerSpec
from mlxlm.config.option import option, range_problems
from mlxlm.config.quantization import validate_quantization
from mlxlm.data.options import PACKINGS
from mlxlm.utils.errors import ConfigError

DTYPES = ("float32", "bfloat16")
LENGTH_SETTINGS = (  # which `extend_run` changes
    "steps", "time_limit", "warmup_steps", "rewarm_step", "rewarm_learning_rate", "eval_every", "repeat_plan",
)  # fmt: skip
LOSSES = ("cross_entropy", "dpo", "orpo", "kto")
REPEAT_PLAN_FILE = "repeat_plan.jsonl"  # the log of the run that is repeated

# The remaining fraction of the way from the final to the peak rate, by the fraction of the time after the warmup.
_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}
LR_SCHEDULES = (*_DECAYS, "wsd")

_batches = partial(option, section="Batches and memory")
_optimizer = partial(option, section="Optimizer")
_beta = partial(_optimizer, low=0, below=1, default_text="by optimizer")
_validation = partial(option, section="Validation and samples")
_checkpoints = partial(option, section="Checkpoints")
_data = partial(option, section="Data")
_distillation = partial(option, section="Distillation")
_grpo = partial(option, section="Answers and rewards")
_MAX_SEQ_LENGTH = "the model's context up to 512; or by time limit"


@dataclass(frozen=True)
class GRPOOptions:
    """How GRPO samples answers and learns from their rewards. See `mlxlm.train.grpo`.

    Attributes:
        reward: Where the reward function was, for the reader of a report; nothing is executed from here.

    Raises:
        ConfigError: Naming every option that can't work.
    """

    num_generations: int = _grpo(8, "Answers to each prompt: the size of a group.", common=True, low=2)
    max_tokens: int = _grpo(256, "Tokens of an answer, at most.", common=True, low=1, names="-n --max-tokens")
    temperature: float = _grpo(1.0, "Sampling temperature of the answers.", low=0.001, high=100)
    loss_type: str = _grpo(
        "dapo",
        "How the length of an answer counts: dapo gives each token of a step the same weight, grpo each answer; "
        "dr_grpo divides by the maximum length, and doesn't divide rewards by their standard deviation.",
        choices=("dapo", "grpo", "dr_grpo"),
    )
    reward: str = ""

    def __post_init__(self) -> None:
        if problems := list(range_problems(self)):
            raise ConfigError("invalid GRPO options: " + "; ".join(problems))


@dataclass(frozen=True)
class TrainSettings:
    """How to train. One step sees `grad_accumulation_steps` x `batch_size` sequences of `max_seq_length` tokens.

    Attributes without a section in their declaration aren't on the command line.

    Attributes:
        grpo: Of a run with a reward function. Its sequences are prompts with their answers.

    Raises:
        ConfigError: Naming every setting that can't work.
    """

    steps: int = option(help="Number of optimizer steps.", section="Training length", common=True, low=1)
    learning_rate: float = _optimizer(
        help="Peak learning rate.", common=True, above=0, default_text="by model size and optimizer"
    )
    batch_size: int = _batches(
        16, "Sequences per forward pass.", common=True, low=1, default_text="16, or fitted to the time limit"
    )
    max_seq_length: int = _batches(256, "Tokens per sequence.", common=True, low=1, default_text=_MAX_SEQ_LENGTH)
    grad_accumulation_steps: int = _batches(1, "Forward passes per optimizer step, of all processes together.", low=1)
    packing: str = _batches(
        "concatenate", "Cut the joined documents into sequences, or fit whole documents in and pad.", choices=PACKINGS
    )
    document_mask: bool = _batches(False, "Let tokens attend only to their own document; 2 to 5% more work on a CPU.")
    mask_prompt: bool = option(False, "Of conversations, learn the assistant's messages only.")
    loss: str = option("cross_entropy", "Loss; dpo, orpo and kto learn from preferences.", choices=LOSSES)
    beta: float = option(
        0.1,
        "Of DPO and KTO: a larger one stays closer to MODEL; of ORPO the weight of the odds ratio.",
        above=0,
    )
    optimizer: str = _optimizer(
        "adamw",
        "Optimizer.",
        common=True,
        choices=tuple(OPTIMIZERS),
        default_text="adamw; muon if --minutes picks the model",
    )
    parametrization: str = _optimizer(
        "standard",
        "Parametrization; with mup, the best learning rate of a small model is that of a large one.",
        choices=PARAMETRIZATIONS,
    )
    lr_schedule: str = _optimizer(
        "cosine",
        "Learning rate schedule after the warmup; wsd stays constant, then decays linearly.",
        choices=LR_SCHEDULES,
    )
    warmup_steps: int | None = _optimizer(
        None, "Steps of linear warmup.", low=0, default_text="5% of the steps, at most 500"
    )
    min_lr_ratio: float = _optimizer(0.1, "Final learning rate, as a fraction of the peak.", low=0, high=1)
    time_limit: float | None = option(
        None, "Seconds of wall-clock time, which end the run; `steps` is then a forecast.", above=0
    )
    decay_fraction: float = _optimizer(  # Hu et al. 2024, MiniCPM
        0.2, "With --lr-schedule wsd: fraction of the steps that decay.", low=0, high=1
    )
    weight_decay: float | None = _optimizer(
        None, "Decoupled weight decay of matrices.", low=0, default_text="by optimizer and epochs"
    )
    beta1: float | None = _beta(None, "Decay rate of the average gradient; with muon, AdamW's.")
    beta2: float | None = _beta(None, "Decay rate of the average squared gradient, or lion's momentum.")
    router_aux_loss: float = _optimizer(
        0.01, "With experts: coefficient of the load-balancing loss of a router.", low=0
    )
    router_z_loss: float = _optimizer(0.001, "With experts: coefficient of the z-loss of a router.", low=0)
    grad_clip: float = _optimizer(1.0, "Clip the gradient to this global norm; 0 disables it.", low=0)
    dropout: float = _optimizer(
        0.0,
        "Dropout rate of embeddings and sublayer outputs.",
        low=0,
        below=1,
        default_text="0; 0.1 if --minutes picks a large model for a short text",
    )
    ema_decay: float = _optimizer(
        0.0, "Evaluate and save a moving average of the weights with this decay; 0: no average.", low=0, below=1
    )
    dtype: str = _batches(
        "float32",
        "Compute dtype (mixed precision).",
        choices=DTYPES,
        default_text="bfloat16; float32 on a CPU",
    )
    param_dtype: str = _batches("float32", "Dtype of the weights; bfloat16 is rounded stochastically.", choices=DTYPES)
    optimizer_state: str = _batches(
        "float32",
        "Dtype of the optimizer's averages; bfloat16 and int8 take a half and a quarter of the memory.",
        choices=tuple(STATE_DTYPES),
    )
    grad_checkpoint: bool = _batches(
        False, "Recompute activations in the backward pass: less memory, a third more time."
    )
    seed: int = _optimizer(0, "Random seed of weights, data order and dropout.", low=0)
    eval_every: int | None = _validation(  # None, with a time limit: up to 20 times, in at most 5% of the time
        250, "Steps between validations; 0: only at the end.", low=0, default_text="250, or by the time limit"
    )
    eval_tokens: int = _validation(131_072, "Maximum number of tokens per validation.", low=1)
    save_every: int = _checkpoints(
        500, "Steps between checkpoints; 0: only by time.", low=0, default_text="500, or 0 with a time limit"
    )
    save_minutes: float = _checkpoints(10.0, "Maximum minutes between checkpoints; 0: only by steps.", low=0)
    save_total_limit: int = _checkpoints(2, "Number of recent checkpoints to keep, besides the best one.", low=1)
    sample_every: int = _validation(0, "Steps between text samples; 0 disables them.", low=0)
    sample_prompt: str = _validation("", "Prompt of the samples.", default_text="none")
    sample_tokens: int = _validation(64, "Tokens per sample.", low=1)
    teacher: str | None = _distillation(None, "Also learn from the logits of this model.", metavar="MODEL")
    kd_ratio: float = _distillation(
        0.5, "Weight of the KL divergence from the teacher; the loss on the text has the rest.", low=0, high=1
    )
    kd_temperature: float = _distillation(1.0, "Temperature of the distributions that are compared.", above=0)
    teacher_top_k: int | None = _distillation(
        None,
        "Compare the teacher's K most likely tokens, and all others as one.",
        low=1,
        metavar="K",
        default_text="all",
    )
    quantization: Mapping[str, Any] | None = option(
        None,
        "Train with quantized weights, whose gradient is straight-through. As in config.json: bits and group_size.",
    )
    spike_threshold: float = _checkpoints(  # see `SpikeDetector`
        1.0, "Stop if the loss rises this far, in nats, beyond noise; 0: never.", low=0
    )
    rewarm_step: int | None = option(None, "The step after which `extend_run` changed the length of the run.", low=0)
    rewarm_learning_rate: float | None = option(None, "The learning rate of that step.", low=0)
    repeat_plan: str | None = option(
        None,
        "The plan of a run that `repeat_run` made.",
        choices=(REPEAT_PLAN_FILE,),
        valid=f"{REPEAT_PLAN_FILE} or null",
    )
    grpo: GRPOOptions | None = None

    def __post_init__(self) -> None:
        if isinstance(self.grpo, Mapping):  # of `to_dict`
            object.__setattr__(self, "grpo", GRPOOptions(**self.grpo))
        for name in ("weight_decay", "beta1", "beta2"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self._optimizer_spec, name, None))
        if problems := list(self._problems()):
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
    def has_pairs(self) -> bool:
        """Whether the data are pairs of documents, see `mlxlm.data.pairs`."""
        return self.loss in LOSSES[1:]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, of all processes."""
        return self.rows_per_step * self.max_seq_length * (2 if self.has_pairs else 1)

    @property
    def warmup(self) -> int:
        """Steps of linear warmup."""
        return min(500, self.steps // 20) if self.warmup_steps is None else self.warmup_steps

    def learning_rate_at(self, progress: float, step: int = 0) -> float:
        """Return the learning rate of the step after step `step`.

        Args:
            progress: The share of the run that is over after the step, at most 1.
            step: Only used if the run was extended, see `extend_run`.
        """
        share = (self.warmup + 1) / self.steps
        if self.time_limit is not None:  # there may be fewer steps than a given warmup has
            share = min(share, 0.5)
        schedule = self.lr_schedule, share, self.min_lr_ratio, self.decay_fraction
        rate = learning_rate(progress, self.learning_rate, *schedule)
        if self.rewarm_step is None or self.rewarm_learning_rate is None:
            return rate
        share = min(1.0, max(0.0, step + 1 - self.rewarm_step) / (self.warmup + 1))
        return self.rewarm_learning_rate + share * (rate - self.rewarm_learning_rate)

    def _problems(self) -> Iterator[str]:
        """Every problem of the settings, each with a value that would work."""
        yield from range_problems(self)
        by_clock = self.time_limit is not None or self.repeat_plan is not None
        if self.eval_every is None and not by_clock:
            yield "eval_every is None, it must be a whole number without a time limit"
        spec = self._optimizer_spec
        if spec and spec.beta2 is None:
            for name in ("beta1", "beta2"):
                if getattr(self, name) != getattr(spec, name):
                    yield f"{name} is {getattr(self, name)!r}, but {self.optimizer} has no {name}: omit it"
        if self.teacher is not None and self.has_pairs:
            yield f"teacher is {self.teacher!r}, but the loss {self.loss} has no teacher: omit it"
        if self.quantization is not None:
            yield from validate_quantization(self.quantization)
        warmup, steps = self.warmup_steps, self.steps
        if not by_clock and is_int(warmup) and is_int(steps) and warmup >= steps > 0:
            yield f"warmup_steps is {warmup}, it must be less than steps, which is {steps}"
        if self.grpo is not None and is_int(self.batch_size) and is_int(self.grad_accumulation_steps):
            size = self.grpo.num_generations
            if self.rows_per_step % size:
                yield f"a step has {self.rows_per_step} answers, it must be a multiple of num_generations, {size}"


@dataclass(frozen=True)
class TokenizerOptions:
    """The tokenizer of a run.

    Attributes:
        path: Folder or file of a tokenizer. None: that of the prepared data, or train one on the text.
        tokenizer_type: Type of the tokenizer to train.
        vocab_size: Vocabulary size of the tokenizer to train. None: the configuration's, or as much as the text
            supports.
    """

    path: str | Path | None = _data(
        None,
        "Path or model name of a tokenizer.",
        names="--tokenizer",
        metavar="PATH",
        default_text="train one on DATA",
    )
    tokenizer_type: str = _data("byte-level", "Tokenizer type.", choices=("byte-level", "sentencepiece"))
    vocab_size: int | None = _data(
        None,
        "Vocabulary size of the tokenizer to train.",
        default_text="the preset's, or less if the text supports less",
    )


def learning_rate(
    progress: float, peak: float, lr_schedule: str, warmup: float, min_lr_ratio: float, decay_fraction: float
) -> float:
    """Return the learning rate of a step.

    It rises linearly to `peak`, then falls to `min_lr_ratio` · peak at the end.

    Args:
        progress: Share of the run that is over after the step, above 0 and at most 1: of its steps or of its time.
        peak: Peak learning rate.
        lr_schedule: "cosine" (Loshchilov & Hutter 2017); "linear"; "wsd" (warmup, stable, decay: constant, then linear
            over the last `decay_fraction` of the run; Hu et al. 2024, "MiniCPM", 4); or "constant", which stays at the
            peak.
        warmup: Share of the run at which the rate reaches the peak.
        min_lr_ratio: Final learning rate, as a fraction of the peak.
        decay_fraction: See "wsd".
    """
    if progress < warmup:
        return peak * progress / warmup
    if lr_schedule == "wsd":
        remaining = min(1.0, (1 - progress) / max(1e-9, min(decay_fraction, 1 - warmup)))
    else:
        remaining = _DECAYS[lr_schedule]((progress - warmup) / (1 - warmup or 1.0))
    return peak * (min_lr_ratio + (1 - min_lr_ratio) * remaining)
