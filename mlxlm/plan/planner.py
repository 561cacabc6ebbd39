"""The plan: what a model, its training and its use come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlxlm.config import ModelConfig, counts
from mlxlm.families import config_to_hf
from mlxlm.plan import textbook
from mlxlm.plan.advice import Change, Fits, fits, suggest_change
from mlxlm.plan.corpus import Corpus, count_corpus
from mlxlm.plan.disk import DiskUsage, estimate_disk
from mlxlm.plan.duration import Duration, estimate_duration, measured_duration
from mlxlm.plan.flops import Flops, FlopsByLength, count_training_flops, flops_by_length
from mlxlm.plan.inference import InferenceMemory, Serving, default_serving, inference_memory, with_loaded_bits
from mlxlm.plan.machines import Machine, find_machine
from mlxlm.plan.memory import TrainingMemory, training_memory
from mlxlm.plan.model_lookup import find_config
from mlxlm.plan.training import Training
from mlxlm.utils.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """parameters: by part. tokens: what it is trained on, `optimal_tokens` unless said; corpus: the text that was
    named, `epochs` passes over which that is. memory: of mlxlm's own training step, on each device. serving: with the
    bits that weights have when they are loaded there. fits, change: what the machine has room for, and the cheapest
    change that makes training fit, None where its memory isn't known or nothing has to change. measured,
    measured_duration: bytes of a probe's peak, and the time by its steps, beside what was planned."""

    config: ModelConfig
    training: Training
    serving: Serving
    parameters: dict[str, int]
    flops: Flops
    flops_by_length: FlopsByLength
    memory: TrainingMemory
    inference: InferenceMemory
    tokens: float
    optimal_tokens: float
    corpus: Corpus | None
    duration: Duration
    disk: DiskUsage
    fits: Fits | None
    change: Change | None
    measured: int | None = None
    measured_duration: Duration | None = None

    @property
    def parameter_count(self) -> int:
        return sum(self.parameters.values())

    @property
    def epochs(self) -> float | None:
        """Passes over the text."""
        return None if self.corpus is None else self.tokens / self.corpus.tokens

    def probed(self, seconds_per_step: float, peak_memory: int) -> Plan:
        """The same with the time and the memory that a step was measured to take on this plan's machine."""
        measured = measured_duration(self.flops, self.tokens, self.duration.machine, seconds_per_step)
        return replace(self, measured=peak_memory, measured_duration=measured)

    def textbook(self) -> dict[str, float]:
        """What the short formulas of `mlxlm.plan.textbook` say of it: counts and bytes, by the formula's name. The
        operations forward are those of the batch, those of training of all tokens."""
        c, t, count = self.config, self.training, self.parameter_count
        h, layers, b, s = c.hidden_size, c.num_hidden_layers, t.batch_size, t.max_seq_length
        return {
            "dense_parameters": textbook.dense_parameters(h, layers),
            "inference_bytes": textbook.inference_bytes(count),
            "training_bytes": sum(textbook.training_bytes(count).values()),
            "activation_bytes": textbook.activation_bytes(b, s, h, c.num_attention_heads, layers),
            "cache_bytes": textbook.cache_bytes(b, h, layers, s, 0),
            "forward_flops": textbook.forward_flops(b, s, h, layers, c.vocab_size),
            "training_flops": textbook.training_flops(count, self.tokens, t.grad_checkpoint),
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it: bytes, seconds, counts."""
        memory, inference, flops = self.memory, self.inference, self.flops
        return {
            "config": config_to_hf(self.config),
            "parameters": {**self.parameters, "total": self.parameter_count},
            "training": self.training.to_dict(),
            "flops": {
                **asdict(flops),
                "forward_total": flops.forward_total,
                "attention": flops.attention,
                "backward": flops.backward,
                "per_token": flops.per_token,
                "per_step": flops.per_step,
                "total": flops.per_token * self.tokens,
            },
            "flops_by_length": [
                {"length": length, "flops": total, "shares": shares}
                for length, total, shares in zip(
                    self.flops_by_length.lengths, self.flops_by_length.total, self.flops_by_length.shares, strict=True
                )
            ],
            "memory": {**asdict(memory), "backward": memory.backward, "update": memory.update, "total": memory.total},
            "measured_memory": self.measured,
            "serving": asdict(self.serving),
            "inference": {**asdict(inference), "total": inference.total},
            "tokens": self.tokens,
            "optimal_tokens": self.optimal_tokens,
            "corpus": None if self.corpus is None else {**asdict(self.corpus), "epochs": self.epochs},
            "duration": _duration(self.duration),
            "measured_duration": None if self.measured_duration is None else _duration(self.measured_duration),
            "disk": {**asdict(self.disk), "total": self.disk.total},
            "fits": None if self.fits is None else asdict(self.fits),
            "change": self.change
            and {
                "text": self.change.text,
                "cost": self.change.cost,
                "needed": self.change.needed,
            },
        }


def _duration(duration: Duration) -> dict[str, Any]:
    return {**asdict(duration), "seconds": duration.seconds, "tokens_per_second": duration.tokens_per_second}


def plan(
    model: ModelConfig | Path | str,
    *,
    training: Training | None = None,
    serving: Serving | None = None,
    tokens: float | None = None,
    data: Sequence[str | Path] = (),
    text_column: str | None = None,
    machine: Machine | str = "here",
    num_devices: int = 1,
    mfu: float | None = None,
    **changes: Any,
) -> Plan:
    """What a model, its training and its use come to, before anything is computed.

    model: a configuration, a preset, a published model, a path or a hub id: see `find_config`.
    training, serving: how it is trained and used. `changes`: fields of either, instead or beside (`batch_size=8`,
        `bits=4`). Unless said, training's dtype is float32 on a CPU and bfloat16 elsewhere.
    tokens: to train on (None: 20 for each parameter). data: text or prepared shards to say epochs of; text_column: of
        tables and JSON lines, see `mlxlm.data.read_documents`.
    machine: a name of `mlxlm.plan.MACHINES`, a Machine, or "here", whose speed is measured.
    num_devices: such machines that train together: `batch_size` and `accumulate` are those of each, as in training, and
        each has all weights and states in memory.
    mfu: the share of the machine's speed that training reaches (None: 0.4 is assumed).

    Raises ConfigError, CheckpointError or DataError for what can't be planned.
    """
    config = find_config(model)
    known = {*Serving.__dataclass_fields__, *Training.__dataclass_fields__}
    if unknown := [name for name in changes if name not in known]:
        raise ConfigError(f"a plan has no {', '.join(unknown)}", "one of " + ", ".join(sorted(known)))
    used = {name: value for name, value in changes.items() if name in Serving.__dataclass_fields__}
    trained = {name: value for name, value in changes.items() if name in Training.__dataclass_fields__}
    machine = find_machine(machine) if isinstance(machine, str) else machine
    serving = replace(serving or default_serving(machine, config), **{"device": machine.kind, **used})
    serving = with_loaded_bits(serving, config, machine.memory)
    training = training or Training(dtype="float32" if machine.kind == "cpu" else "bfloat16")
    training = replace(training, **{"device": machine.kind, **trained})
    count = config.parameter_count()
    corpus = count_corpus(data, config.vocab_size, text_column) if data else None
    optimal = textbook.compute_optimal_tokens(count)
    tokens = optimal if tokens is None else tokens
    if not (isinstance(tokens, int | float) and 0 < tokens < float("inf")):
        raise ConfigError(f"tokens is {tokens!r}, it must be a positive number")
    flops = count_training_flops(config, training, num_devices)
    memory = machine.memory
    return Plan(
        config=config,
        training=training,
        serving=serving,
        parameters=counts.count_parameters(config),
        flops=flops,
        flops_by_length=flops_by_length(config),
        memory=training_memory(config, training),
        inference=inference_memory(config, serving),
        tokens=tokens,
        optimal_tokens=optimal,
        corpus=corpus,
        duration=estimate_duration(flops, tokens, machine, num_devices, mfu),
        disk=estimate_disk(config, training, corpus.tokens if corpus else tokens),
        fits=None if memory is None else fits(config, training, serving, memory),
        change=None if memory is None else suggest_change(config, training, memory),
    )
