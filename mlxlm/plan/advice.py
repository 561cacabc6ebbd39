"""What fits in a machine's memory, and the cheapest change that makes a plan fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mlxlm.backend import platform
from mlxlm.cache.factory import CPU_PREFILL_STEP_SIZE
from mlxlm.checkpoint.catalog import CatalogEntry, catalog
from mlxlm.config import ModelConfig
from mlxlm.families import config_from_hf, load_preset, preset_names
from mlxlm.plan.inference import BITS, Serving, default_serving, inference_memory, with_loaded_bits
from mlxlm.plan.machines import Machine, this_machine
from mlxlm.plan.memory import training_memory
from mlxlm.plan.training import Training

USABLE = 0.9  # share of the memory; the system, Python and the allocator need the rest
_MAX_SEARCH = 1 << 24  # largest batch size or length that is tried
_MAX_SHRINK = 100  # a preset with fewer parameters than this fraction isn't suggested
_KERNELS = "MLXLM_KERNELS=blockwise"


@dataclass(frozen=True)
class Fits:
    """What fits in memory.

    Attributes:
        memory: Bytes of the machine.
        training: Whether training fits as planned.
        inference: Whether inference fits as planned.
        batch_size: Largest batch that fits, everything else as planned. 0 if none does.
        max_seq_length: Longest training sequence that fits, or 0.
        context_length: Longest context for inference that fits, up to `max_position_embeddings`, or 0.
        preset: The largest preset that can be trained, with its own vocabulary, or None.
    """

    memory: int
    training: bool
    inference: bool
    batch_size: int
    max_seq_length: int
    context_length: int
    preset: str | None


@dataclass(frozen=True)
class Change:
    """A change that makes training fit.

    Attributes:
        text: Options to add to the command.
        cost: What the change costs, in words.
        training: The changed settings.
        config: The model, a smaller preset if nothing else helps.
        peak_memory: Bytes at the peak of the changed training.
    """

    text: str
    cost: str
    training: Training
    config: ModelConfig
    peak_memory: int


def usable_memory(memory: int | None) -> float:
    """Return the bytes of `memory` that a model may take. Infinite if the size isn't known."""
    return math.inf if memory is None else int(USABLE * memory)


def find_limits(config: ModelConfig, training: Training, serving: Serving, memory: int) -> Fits:
    """Find the largest batch, sequence, context and preset that fit in `memory` bytes."""
    available = usable_memory(memory)

    def trains(**changes: Any) -> bool:
        return training_memory(config, replace(training, **changes)).total <= available

    def serves(context_length: int) -> bool:
        return inference_memory(config, replace(serving, context_length=context_length)).total <= available

    presets = [n for n in preset_names() if training_memory(load_preset(n), training).total <= available]
    return Fits(
        memory=memory,
        training=trains(),
        inference=serves(serving.context_length),
        batch_size=_largest_batch(lambda n: trains(batch_size=n)),
        max_seq_length=_largest(lambda n: trains(max_seq_length=n)),
        context_length=_largest(serves, config.max_position_embeddings),
        preset=presets[-1] if presets else None,
    )


def bits_that_fit(config: ModelConfig, serving: Serving, memory: int) -> int | None:
    """Return the most bits per weight below the planned ones with which inference fits, or None."""
    available = usable_memory(memory)
    fewer = (with_loaded_bits(replace(serving, bits=bits), config, memory) for bits in BITS if bits < serving.bits)
    return next((s.bits for s in fewer if inference_memory(config, s).total <= available), None)


def _largest(works: Callable[[int], bool], maximum: int = _MAX_SEARCH, minimum: int = 0) -> int:
    """Return the largest number above `minimum` that works, by bisection, or `minimum`."""
    return minimum + bisect_right(range(minimum + 1, maximum + 1), False, key=lambda n: not works(n))


def _largest_batch(works: Callable[[int], bool]) -> int:
    """Return the largest batch that works.

    Cores share every batch of more than three rows per core, but only some of the smaller ones, and a shared batch
    takes more memory than a slightly larger one that isn't. So each of the small batches is tried.
    """
    small = 3 * platform.cpu_cores()
    largest = _largest(works, minimum=small)
    return largest if largest > small else next((n for n in range(small, 0, -1) if works(n)), 0)


def suggest_change(config: ModelConfig, training: Training, memory: int, preset: str = "preset") -> Change | None:
    """Suggest the cheapest change that makes training fit.

    If no single change is enough, several are combined: only those that are needed, with the largest batch that then
    fits.

    Args:
        config: The model.
        training: The settings.
        memory: Bytes of the machine.
        preset: How to ask for a preset, such as "--preset". Empty if the model can't be replaced.

    Returns:
        The change, or None if training fits as it is, or if only a model 100 times smaller would help.
    """
    available = usable_memory(memory)

    def peak(changes: list[_Option]) -> int:
        return training_memory(config, _with(training, changes)).total

    if peak([]) <= available:
        return None
    options = _options(config, training)
    single = next(([option] for option in options if peak([option]) <= available), None)
    chosen = single or _combine(options, lambda changes: peak(changes) <= available)
    if chosen is not None:
        costs = "; ".join(option.cost for option in chosen)
        return Change(_command(chosen), costs, _with(training, chosen), config, peak(chosen))
    for name in reversed(preset_names() if preset else []):
        smaller = load_preset(name, vocab_size=config.vocab_size)
        share = smaller.parameter_count() / config.parameter_count()
        size = training_memory(smaller, training).total
        if 1 / _MAX_SHRINK < share < 1 and size <= available:
            return Change(f"{preset} {name}", "a smaller model", training, smaller, size)
    return None


@dataclass(frozen=True)
class _Option:
    """A command-line option or environment variable that saves memory. Of two of one `kind`, the last one counts."""

    kind: str
    text: str
    cost: str
    changes: dict[str, Any]


def _with(training: Training, options: list[_Option]) -> Training:
    return replace(training, **{name: value for option in options for name, value in option.changes.items()})


def _command(options: list[_Option]) -> str:
    """Return what to add to a command and to its environment."""
    flags = " ".join(option.text for option in options if option.text != _KERNELS)
    if all(option.text != _KERNELS for option in options):
        return flags
    return f"{_KERNELS} in the environment" + (f", and {flags}" if flags else "")


def _combine(options: list[_Option], fits: Callable[[list[_Option]], bool]) -> list[_Option] | None:
    """Combine options, the cheapest first, until training fits; then drop the expensive ones that aren't needed."""
    combinations = (list({option.kind: option for option in options[:i]}.values()) for i in range(1, len(options) + 1))
    chosen = next(filter(fits, combinations), None)
    if chosen is None:
        return None
    for option in reversed(chosen):
        if fits(fewer := [other for other in chosen if other is not option]):
            chosen = fewer
    batches = (option for option in options if option.kind == "batch")
    larger = ([batch if option.kind == "batch" else option for option in chosen] for batch in batches)
    return next(filter(fits, larger), chosen)


def _options(config: ModelConfig, training: Training) -> list[_Option]:
    """List the options that save memory, the cheapest first."""
    batches = []
    for batch in _halves(training.batch_size):
        steps = training.grad_accumulation_steps * -(-training.batch_size // batch)
        text = f"--batch-size {batch} --grad-accumulation-steps {steps}"
        changes = {"batch_size": batch, "grad_accumulation_steps": steps}
        batches.append(_Option("batch", text, "the same step in parts", changes))
    is_plain = training.attention_path(config) == "plain" and training.max_seq_length >= 512
    saves_state = training.optimizer_state != "int8" and training.optimizer != "adafactor"
    optimizer, ema_cost = training.optimizer, "the last weights instead of their average"
    others = (
        (is_plain, "attention", _KERNELS, "scores are computed twice", "blockwise"),
        (not training.grad_checkpoint, "grad_checkpoint", "--grad-checkpoint", "a third more operations", True),
        (saves_state, "optimizer_state", "--optimizer-state int8", "a slower update", "int8"),
        (training.ema_decay > 0, "ema_decay", "--ema-decay 0", ema_cost, 0.0),
        (optimizer in ("adamw", "muon"), "optimizer", "--optimizer lion", "other learning rates", "lion"),
        (optimizer != "adafactor", "optimizer", "--optimizer adafactor", "slower progress", "adafactor"),
    )
    return [*batches, *(_Option(name, text, cost, {name: value}) for helps, name, text, cost, value in others if helps)]


def _halves(batch: int) -> list[int]:
    """Halve `batch` as often as possible, and end with 1."""
    sizes = []
    while batch % 2 == 0:
        batch //= 2
        sizes.append(batch)
    return sizes if batch == 1 else [*sizes, 1]


# Measured on a CPU with Linux: Python, MLX and a tokenizer; and the float32 arrays [heads, chunk, context] that exist
# at once while a prompt is read, 4.5 to 7.
_PROCESS_BYTES = 125 << 20
_SCORE_ARRAYS = 7
_COMFORTABLE = 0.5  # share of the memory, so that other programs can go on


@dataclass(frozen=True)
class Fit:
    """The peak memory of a chat of up to 4,096 tokens.

    It is that of the weights as they are loaded, the key-value cache and its copy in the prefix cache, on a CPU
    attention's scores, and the process.

    Attributes:
        memory: Bytes.
        fits: Whether the machine has them.
        is_comfortable: Whether they are at most half of its memory.
    """

    memory: int
    fits: bool
    is_comfortable: bool


def chat_fit(config: ModelConfig, machine: Machine) -> Fit:
    """Estimate the memory of a chat with a model on a machine."""
    serving = with_loaded_bits(default_serving(machine, config), config, machine.memory)
    needed = inference_memory(config, serving)
    memory = needed.weights + 2 * needed.cache + _PROCESS_BYTES
    if serving.device == "cpu":
        memory += _SCORE_ARRAYS * 4 * config.num_attention_heads * CPU_PREFILL_STEP_SIZE * serving.context_length
    comfortable = machine.memory is None or memory <= _COMFORTABLE * machine.memory
    return Fit(memory, memory <= usable_memory(machine.memory), comfortable)


def entry_fit(entry: CatalogEntry, machine: Machine) -> Fit:
    """Estimate the memory of a chat with a model of the catalog."""
    return chat_fit(config_from_hf(entry.config, source=f"the catalog's {entry.name}"), machine)


def best_entry() -> CatalogEntry | None:
    """The model of the catalog with the most parameters of those that take at most half of this machine's memory."""
    machine = this_machine(measure=False)
    fitting = (entry for entry in catalog().values() if entry_fit(entry, machine).is_comfortable)
    return max(fitting, key=lambda entry: entry.parameters, default=None)
