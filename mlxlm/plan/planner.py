"""Plan a model: its parameters, memory, training time and disk space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.counts import count_parameters
from mlxlm.families import config_to_hf
from mlxlm.plan.advice import Change, Fits, find_limits, suggest_change
from mlxlm.plan.corpus import Corpus, count_corpus
from mlxlm.plan.flops import TOKENS_PER_PARAMETER, Flops, count_training_flops
from mlxlm.plan.inference import InferenceMemory, Serving, default_serving, inference_memory, with_loaded_bits
from mlxlm.plan.machines import Machine, find_machine
from mlxlm.plan.memory import TrainingMemory, training_memory
from mlxlm.plan.model_lookup import find_config
from mlxlm.plan.training import Training
from mlxlm.utils.errors import ConfigError

# Model FLOPs utilization, if it is neither given nor measured. Well-made runs report 0.43 to 0.52 of a GPU's peak
# (Narayanan et al. 2021, table 1) and 0.38 to 0.43 (Llama Team 2024, table 4).
ASSUMED_MFU = 0.4


@dataclass(frozen=True)
class Duration:
    """The time of a training run.

    Attributes:
        machine: Of one device.
        num_devices: Devices that train together.
        mfu: Model FLOPs utilization, the share of the machine's speed that training reaches.
        mfu_source: "assumed", "given" or "measured" (by a probe).
        seconds_per_step: Of an optimizer step.
        steps: Optimizer steps.
        tokens: Tokens to train on.
    """

    machine: Machine
    num_devices: int
    mfu: float
    mfu_source: str
    seconds_per_step: float
    steps: float
    tokens: float

    @property
    def seconds(self) -> float:
        """Seconds of the run."""
        return self.seconds_per_step * self.steps

    @property
    def tokens_per_second(self) -> float:
        """Training throughput."""
        return self.tokens / self.seconds


def seconds_for(flops: float, flops_per_second: float, mfu: float, num_devices: int = 1) -> float:
    """Return the seconds that `flops` operations take.

    Raises:
        ConfigError: The speed, the utilization or the number of devices is out of range.
    """
    if not (0 < mfu <= 1 and num_devices >= 1 and 1 <= flops_per_second < math.inf):
        raise ConfigError(
            f"can't plan with {num_devices} devices of {flops_per_second:g} FLOP/s at a utilization (mfu) of {mfu:g}",
            "at least 1 device, at least 1 FLOP/s, a utilization above 0 and at most 1",
        )
    return flops / (flops_per_second * mfu * num_devices)


# The last two (the default of `--save-total-limit`) and the best. A loss spike may keep one more.
CHECKPOINTS_KEPT = 3


@dataclass(frozen=True)
class DiskUsage:
    """Disk space, in bytes.

    Attributes:
        checkpoint: One checkpoint: weights, optimizer state and averaged weights.
        checkpoints: All checkpoints that are kept.
        shards: The tokenized text.
        model: The finished model in 16 bits.
    """

    checkpoint: int
    checkpoints: int
    shards: int
    model: int

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.checkpoints + self.shards + self.model


@dataclass(frozen=True)
class Plan:
    """The cost of a model, of its training and of its use.

    Attributes:
        config: The model.
        training: How it is trained.
        serving: How it is used. Weights have the bits that they have once loaded.
        parameters: Parameter counts by component.
        flops: Floating-point operations of training.
        memory: Memory of mlxlm's training step, on each device.
        inference: Memory for inference.
        tokens: Tokens to train on.
        optimal_tokens: The compute-optimal number of tokens, 20 per active parameter.
        corpus: The training text, if one was given.
        duration: Planned training time.
        disk: Disk space of the run and its data.
        fits: What fits in the machine's memory. None if its size isn't known.
        change: The cheapest change that makes training fit. None if it fits, or if nothing helps.
        measured_memory: Peak bytes that a probe measured.
        measured_duration: Training time by the steps that a probe measured.
    """

    config: ModelConfig
    training: Training
    serving: Serving
    parameters: dict[str, int]
    flops: Flops
    memory: TrainingMemory
    inference: InferenceMemory
    tokens: float
    optimal_tokens: float
    corpus: Corpus | None
    duration: Duration
    disk: DiskUsage
    fits: Fits | None
    change: Change | None
    measured_memory: int | None = None
    measured_duration: Duration | None = None

    @property
    def parameter_count(self) -> int:
        """The number of parameters."""
        return sum(self.parameters.values())

    @property
    def epochs(self) -> float | None:
        """Passes over the training text. None without a text."""
        return None if self.corpus is None else self.tokens / self.corpus.tokens

    def with_measurement(self, seconds_per_step: float, peak_memory: int) -> Plan:
        """Return the plan with the measured time and peak memory of a training step on its machine.

        The utilization counts only the attention scores that are computed on this machine. A utilization above 1 means
        that the machine was busy when its speed was measured.
        """
        machine, steps = self.duration.machine, self.tokens / self.flops.tokens_per_step
        mfu = self.flops.computed_per_step / seconds_per_step / machine.flops
        measured = Duration(machine, 1, mfu, "measured", seconds_per_step, steps, self.tokens)
        return replace(self, measured_memory=peak_memory, measured_duration=measured)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a JSON object, in bytes, seconds and counts."""
        flops, times = self.flops, ("seconds", "tokens_per_second")
        return {
            "config": config_to_hf(self.config),
            "parameters": {
                **self.parameters,
                "total": self.parameter_count,
                "active": self.config.active_parameter_count(),
            },
            "training": asdict(self.training),
            "flops": {
                **_as_dict(flops, "forward_total", "attention", "backward", "per_token", "per_step"),
                "total": flops.per_token * self.tokens,
            },
            "memory": _as_dict(self.memory, "backward", "update", "total"),
            "measured_memory": self.measured_memory,
            "serving": asdict(self.serving),
            "inference": _as_dict(self.inference, "total"),
            "tokens": self.tokens,
            "optimal_tokens": self.optimal_tokens,
            "corpus": None if self.corpus is None else {**asdict(self.corpus), "epochs": self.epochs},
            "duration": _as_dict(self.duration, *times),
            "measured_duration": self.measured_duration and _as_dict(self.measured_duration, *times),
            "disk": _as_dict(self.disk, "total"),
            "fits": self.fits and asdict(self.fits),
            "change": self.change
            and {"text": self.change.text, "cost": self.change.cost, "peak_memory": self.change.peak_memory},
        }


def _as_dict(values: Any, *properties: str) -> dict[str, Any]:
    """The fields of a dataclass, and some of its properties."""
    return {**asdict(values), **{name: getattr(values, name) for name in properties}}


def plan(
    model: ModelConfig | Path | str,
    *,
    training: Training | None = None,
    serving: Serving | None = None,
    tokens: float | None = None,
    data: Sequence[str | Path] = (),
    text_column: str | None = None,
    machine: Machine | str = "here",
    memory: int | None = None,
    num_devices: int = 1,
    mfu: float | None = None,
    **changes: Any,
) -> Plan:
    """Plan a model, its training and its use, without computing anything.

    Args:
        model: A configuration, a preset, a published model, a path or a hub id. See `find_config`.
        training: How the model is trained. The dtype defaults to float32 on a CPU and bfloat16 elsewhere.
        serving: How the model is used.
        tokens: Tokens to train on. Defaults to 20 per parameter.
        data: Texts or prepared shards, to count epochs.
        text_column: Column of tables and JSON lines, see `mlxlm.data.read_documents`.
        machine: A Machine, a name in `mlxlm.plan.MACHINES`, or "here", whose speed is then measured.
        memory: Bytes of memory of the machine. Defaults to the machine's, if that is known.
        num_devices: Machines that train together. Each has its own batch of `batch_size` sequences,
            `grad_accumulation_steps`, and a copy of the weights and the optimizer's state.
        mfu: Model FLOPs utilization, the share of the machine's speed that training reaches. Defaults to 0.4.
        **changes: Fields of `Training` and `Serving` to set, such as `batch_size=8` or `bits=4`.

    Raises:
        ConfigError: A name or a value can't be planned with.
        CheckpointError: The model can't be read.
        DataError: The text can't be read.
    """
    config = find_config(model)
    serving_fields, training_fields = {f.name for f in fields(Serving)}, {f.name for f in fields(Training)}
    if unknown := [name for name in changes if name not in serving_fields | training_fields]:
        names = ", ".join(sorted(serving_fields | training_fields))
        raise ConfigError(f"unknown option {', '.join(unknown)}", f"one of {names}")
    machine = find_machine(machine) if isinstance(machine, str) else machine
    machine = machine if memory is None else replace(machine, memory=memory)
    changes.setdefault("device", machine.device_type)
    serving = serving or default_serving(machine, config)
    serving = replace(serving, **{name: value for name, value in changes.items() if name in serving_fields})
    serving = with_loaded_bits(serving, config, machine.memory)
    training = training or Training(dtype="float32" if machine.device_type == "cpu" else "bfloat16")
    training = replace(training, **{name: value for name, value in changes.items() if name in training_fields})
    count = config.parameter_count()
    corpus = count_corpus(data, config.vocab_size, text_column) if data else None
    optimal = TOKENS_PER_PARAMETER * config.active_parameter_count()
    tokens = optimal if tokens is None else tokens
    if not (isinstance(tokens, int | float) and 0 < tokens < float("inf")):
        raise ConfigError(f"tokens is {tokens!r}, it must be a positive number")
    flops = count_training_flops(config, training, num_devices)
    source, mfu = ("assumed", ASSUMED_MFU) if mfu is None else ("given", mfu)
    step_seconds = seconds_for(flops.per_step, machine.flops, mfu, num_devices)
    needed = training_memory(config, training)
    checkpoint = needed.states
    token_bytes = 2 if config.vocab_size <= 1 << 16 else 4
    shards = token_bytes * round(corpus.tokens if corpus else tokens)
    return Plan(
        config=config,
        training=training,
        serving=serving,
        parameters=count_parameters(config),
        flops=flops,
        memory=needed,
        inference=inference_memory(config, serving),
        tokens=tokens,
        optimal_tokens=optimal,
        corpus=corpus,
        duration=Duration(machine, num_devices, mfu, source, step_seconds, tokens / flops.tokens_per_step, tokens),
        disk=DiskUsage(checkpoint, CHECKPOINTS_KEPT * checkpoint, shards, 2 * count),
        fits=None if machine.memory is None else find_limits(config, training, serving, machine.memory),
        change=None if machine.memory is None else suggest_change(config, training, machine.memory),
    )
