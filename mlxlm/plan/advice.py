"""What fits a machine's memory, and the cheapest change that makes a plan fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mlxlm.config import ModelConfig, preset_names
from mlxlm.plan.inference import Serving, inference_memory
from mlxlm.plan.memory import training_memory
from mlxlm.plan.training import Training

# Of the memory; the rest is the system's, Python's and the allocator's.
USABLE = 0.9
_MOST = 1 << 24  # sequences, or tokens, that are looked for


@dataclass(frozen=True)
class Fits:
    """The largest that fits `memory` bytes, everything else as planned, 0 where none does: sequences of a batch, tokens
    of a sequence in training, and tokens of context in use; `preset`: the largest preset that can be trained, with its
    own vocabulary, None where none can."""

    memory: int
    training: bool
    inference: bool
    batch_size: int
    sequence_length: int
    context: int
    preset: str | None


@dataclass(frozen=True)
class Change:
    """A change to a plan: one line for a person, what it costs, and what training then is and takes at its peak."""

    text: str
    cost: str
    training: Training
    config: ModelConfig
    needed: int


def room(memory: int) -> int:
    """Bytes of `memory` that a model may take."""
    return int(USABLE * memory)


def fits(config: ModelConfig, training: Training, serving: Serving, memory: int) -> Fits:
    """What this much memory has room for."""
    there = room(memory)

    def trains(**changes: int) -> bool:
        return training_memory(config, replace(training, **changes)).total <= there

    def serves(context: int) -> bool:
        return inference_memory(config, replace(serving, context=context)).total <= there

    presets = [n for n in preset_names() if training_memory(ModelConfig.preset(n), training).total <= there]
    return Fits(
        memory=memory,
        training=trains(),
        inference=serves(serving.context),
        batch_size=_largest(lambda n: trains(batch_size=n)),
        sequence_length=_largest(lambda n: trains(sequence_length=n)),
        context=_largest(serves),
        preset=presets[-1] if presets else None,
    )


def _largest(works: Callable[[int], bool]) -> int:
    """The largest number that works, where none above one that doesn't does."""
    if not works(1):
        return 0
    low, high = 1, 2
    while high <= _MOST and works(high):
        low, high = high, 2 * high
    if high > _MOST:
        return _MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def cheapest(config: ModelConfig, training: Training, memory: int) -> Change | None:
    """The first change, from the cheapest on, that makes training fit; all cheaper ones are made with it where it alone
    isn't enough. None if it fits as it is, or if nothing helps."""
    there = room(memory)
    if training_memory(config, training).total <= there:
        return None
    together: dict[str, tuple[str, str]] = {}  # by what is changed: of two optimizers the last one counts
    now = training
    for text, cost, changed in _changes(training):
        alone = training_memory(config, changed(training)).total
        if alone <= there:
            return Change(text, cost, changed(training), config, alone)
        now = changed(now)
        together[text.split()[0]] = (text, cost)
        if (needed := training_memory(config, now).total) <= there:
            texts, costs = zip(*together.values(), strict=True)
            return Change(", ".join(texts), "; ".join(costs), now, config, needed)
    for name in reversed(preset_names()):
        smaller = ModelConfig.preset(name, vocab_size=config.vocab_size)
        needed = training_memory(smaller, training).total
        if smaller.parameter_count() < config.parameter_count() and needed <= there:
            return Change(f"preset {name}", "a smaller model", training, smaller, needed)
    return None


def _changes(training: Training) -> Iterator[tuple[str, str, Callable[[Training], Training]]]:
    """(what, its cost, the change), the cheapest first."""
    length = training.sequence_length
    if training.loss_chunk == 0:
        yield "the loss in chunks", "no time to speak of", lambda t: replace(t, loss_chunk=None)
    if training.batch_size > 1:
        for batch in _halves(training.batch_size):
            times = training.accumulate * -(-training.batch_size // batch)
            text = f"--batch-size {batch} --accumulate {times}"
            yield text, "the same step in parts", _smaller_batch(batch, times)
    if training.path == "plain" and length >= 512:
        yield "MLXLM_KERNELS=blockwise", "scores are computed twice", lambda t: replace(t, attention="blockwise")
    if not training.recompute:
        yield "--recompute", "a third more operations", lambda t: replace(t, recompute=True)
    if training.ema:
        yield "no --ema", "the last weights instead of their average", lambda t: replace(t, ema=0.0)
    if training.optimizer == "adamw":
        yield "--optimizer lion", "other learning rates", lambda t: replace(t, optimizer="lion")
    if training.optimizer != "adafactor":
        yield "--optimizer adafactor", "slower progress", lambda t: replace(t, optimizer="adafactor")


def _smaller_batch(batch: int, times: int) -> Callable[[Training], Training]:
    return lambda t: replace(t, batch_size=batch, accumulate=times)


def _halves(batch: int) -> Iterator[int]:
    """The batch halved as often as it can be, and one sequence."""
    while batch % 2 == 0:
        batch //= 2
        yield batch
    if batch > 1:
        yield 1
