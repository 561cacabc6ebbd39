"""What fits a machine's memory, and the cheapest change that makes a plan fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce

from mlxlm.backend import platform
from mlxlm.config import ModelConfig
from mlxlm.families import load_preset, preset_names
from mlxlm.plan.inference import BITS, Serving, inference_memory, with_loaded_bits
from mlxlm.plan.memory import training_memory
from mlxlm.plan.training import Training

# Of the memory; the rest is the system's, Python's and the allocator's.
USABLE = 0.9
_MOST = 1 << 24  # sequences, or tokens, that are looked for
_OTHER_MODEL = 100  # times fewer parameters: no smaller version of this model, but another one
_KERNELS = "MLXLM_KERNELS=blockwise"


@dataclass(frozen=True)
class Fits:
    """The largest that fits `memory` bytes, everything else as planned, 0 where none does: sequences of a batch, tokens
    of a sequence in training, and tokens of context in use, no more than the model's own positions; `preset`: the
    largest preset that can be trained, with its own vocabulary, None where none can."""

    memory: int
    training: bool
    inference: bool
    batch_size: int
    max_seq_length: int
    context_length: int
    preset: str | None


@dataclass(frozen=True)
class Change:
    """A change to a plan: one line for a person, what it costs, and what training then is and takes at its peak."""

    text: str
    cost: str
    training: Training
    config: ModelConfig
    needed: int


def usable_memory(memory: int | None) -> float:
    """Bytes of `memory` that a model may take; no limit where nobody knows how much there is."""
    return math.inf if memory is None else int(USABLE * memory)


def fits(config: ModelConfig, training: Training, serving: Serving, memory: int) -> Fits:
    """What this much memory has room for."""
    there = usable_memory(memory)

    def trains(**changes: int) -> bool:
        return training_memory(config, replace(training, **changes)).total <= there

    def serves(context_length: int) -> bool:
        return inference_memory(config, replace(serving, context_length=context_length)).total <= there

    presets = [n for n in preset_names() if training_memory(load_preset(n), training).total <= there]
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
    """The most bits of a weight, fewer than planned, with which the texts planned fit in use; None if none do."""
    there = usable_memory(memory)
    fewer = (with_loaded_bits(replace(serving, bits=bits), config, memory) for bits in BITS if bits < serving.bits)
    return next((s.bits for s in fewer if inference_memory(config, s).total <= there), None)


def _largest(works: Callable[[int], bool], most: int = _MOST, least: int = 0) -> int:
    """The largest number up to `most` that works, where none above one that doesn't does; `least` if none above it."""
    return least + bisect_right(range(least + 1, most + 1), False, key=lambda n: not works(n))


def _largest_batch(works: Callable[[int], bool]) -> int:
    """The same of batches. With more rows than three for each core a CPU shares all of them out, with fewer or as many
    only some, which take more memory than a larger batch that stays whole: of these each is tried."""
    few = 3 * platform.cpu_cores()
    found = _largest(works, least=few)
    return found if found > few else next((n for n in range(few, 0, -1) if works(n)), 0)


def suggest_change(config: ModelConfig, training: Training, memory: int, preset: str = "preset") -> Change | None:
    """The first change, from the cheapest on, that makes training fit, or where none alone does, those that do
    together: none of them that isn't needed, and the largest batch that they leave room for. None if it fits as it is,
    or if nothing helps but a model that is a hundred times smaller.

    preset: how one is asked for, empty where none can be."""
    there = usable_memory(memory)

    def needed(changes: list[_Step]) -> int:
        return training_memory(config, _with(training, changes)).total

    if needed([]) <= there:
        return None
    if training.loss_chunk_size is not None:  # only plans have it
        training = replace(training, loss_chunk_size=None)
        if needed([]) <= there:
            return Change("--loss-chunk-size left out, as in training,", "nothing", training, config, needed([]))
    steps = _steps(config, training)
    alone = next(([step] for step in steps if needed([step]) <= there), None)
    together = alone or _fewest(steps, lambda changes: needed(changes) <= there)
    if together is not None:
        found = _with(training, together)
        return Change(_command(together), "; ".join(step.cost for step in together), found, config, needed(together))
    for name in reversed(preset_names() if preset else []):
        smaller = load_preset(name, vocab_size=config.vocab_size)
        share = smaller.parameter_count() / config.parameter_count()
        size = training_memory(smaller, training).total
        if 1 / _OTHER_MODEL < share < 1 and size <= there:
            return Change(f"{preset} {name}", "a smaller model", training, smaller, size)
    return None


@dataclass(frozen=True)
class _Step:
    """text: an option, or a variable of the environment. Of two with one `kind`, the last counts."""

    kind: str
    text: str
    cost: str
    change: Callable[[Training], Training]


def _with(training: Training, steps: list[_Step]) -> Training:
    return reduce(lambda changed, step: step.change(changed), steps, training)


def _command(steps: list[_Step]) -> str:
    """What to add to a command, or to its environment."""
    options = " ".join(step.text for step in steps if step.text != _KERNELS)
    if all(step.text != _KERNELS for step in steps):
        return options
    return f"{_KERNELS} in the environment" + (f", and {options}" if options else "")


def _fewest(steps: list[_Step], fits: Callable[[list[_Step]], bool]) -> list[_Step] | None:
    """The changes up to the first with which it fits, without those that aren't needed: the dearest go first, and the
    batch is as large as it can be. None if all of them are too few."""
    enough: list[_Step] | None = None
    for i in range(1, len(steps) + 1):
        if fits(together := list({step.kind: step for step in steps[:i]}.values())):
            enough = together
            break
    if enough is None:
        return None
    for step in reversed(enough):
        if fits(fewer := [other for other in enough if other is not step]):
            enough = fewer
    batches = (step for step in steps if step.kind == "batch")
    larger = ([batch if step.kind == "batch" else step for step in enough] for batch in batches)
    return next((changes for changes in larger if fits(changes)), enough)


def _steps(config: ModelConfig, training: Training) -> list[_Step]:
    """The changes there are, the cheapest first."""
    steps: list[_Step] = []
    for batch in _halves(training.batch_size):
        times = training.grad_accumulation_steps * -(-training.batch_size // batch)
        text = f"--batch-size {batch} --grad-accumulation-steps {times}"
        steps.append(_Step("batch", text, "the same step in parts", _smaller_batch(batch, times)))
    if training.path(config) == "plain" and training.max_seq_length >= 512:
        change = partial(replace, attention="blockwise")
        steps.append(_Step("attention", _KERNELS, "scores are computed twice", change))
    if not training.grad_checkpoint:
        steps.append(
            _Step(
                "grad_checkpoint",
                "--grad-checkpoint",
                "a third more operations",
                partial(replace, grad_checkpoint=True),
            )
        )
    if training.ema_decay:
        cost = "the last weights instead of their average"
        steps.append(_Step("ema_decay", "--ema-decay 0", cost, partial(replace, ema_decay=0.0)))
    if training.optimizer in ("adamw", "muon"):
        steps.append(_optimizer("lion", "other learning rates"))
    if training.optimizer != "adafactor":
        steps.append(_optimizer("adafactor", "slower progress"))
    return steps


def _optimizer(name: str, cost: str) -> _Step:
    return _Step("optimizer", f"--optimizer {name}", cost, partial(replace, optimizer=name))


def _smaller_batch(batch: int, times: int) -> Callable[[Training], Training]:
    return partial(replace, batch_size=batch, grad_accumulation_steps=times)


def _halves(batch: int) -> list[int]:
    """The batch halved as often as it can be, and one sequence, the largest first."""
    found = []
    while batch % 2 == 0:
        batch //= 2
        found.append(batch)
    return found if batch == 1 else [*found, 1]
