"""Trains a small model: the loss falls, and interrupted and repeated runs have the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxlm.checkpoint.locations import read_checkpoint_state
from mlxlm.data import DataOptions
from mlxlm.data.small_world.corpus import write_small_world
from mlxlm.doctor.check import Check, CheckFailed
from mlxlm.doctor.sizes import Sizes
from mlxlm.families import load_preset
from mlxlm.tokenizer import load
from mlxlm.train import Finished, Run, Started, Step, start_run, train

TRAINING = "training"  # section
_CORPUS_BYTES = 600_000


@dataclass(frozen=True)
class _Trained:
    """What a run gave: the exact loss of each step, the digests of weights and optimizer, and how fast it was."""

    losses: list[float]
    digests: dict[str, str]
    values: dict[str, Any]


class TrainingChecks:
    """The checks of training, which share one uninterrupted run.

    Args:
        sizes: The model and the settings.
        folder: For the runs.
    """

    def __init__(self, sizes: Sizes, folder: Path):
        self._sizes, self._folder = sizes, folder

    def __iter__(self) -> Iterator[Check]:
        yield Check(TRAINING, "the loss falls", self._check_loss)
        yield Check(TRAINING, "repeated: the same bits", self._check_repeated)
        yield Check(TRAINING, "stopped and resumed: the same bits", self._check_resumed)

    def _check_loss(self) -> dict[str, Any]:
        losses, vocab_size = self._uninterrupted.losses, self._run.config.vocab_size
        values = {"first_loss": losses[0], "last_loss": losses[-1], **self._uninterrupted.values}
        if not abs(losses[0] - math.log(vocab_size)) < 1:
            expected = f"about {math.log(vocab_size):.2f}, since it knows nothing yet"
            raise CheckFailed(f"the first loss is {losses[0]:.2f}, expected is {expected}", values)
        if not losses[-1] < losses[0] - 0.3:
            raise CheckFailed(
                f"the loss was {losses[0]:.2f}, and is {losses[-1]:.2f} after {len(losses)} steps", values
            )
        return values

    def _check_repeated(self) -> dict[str, Any]:
        return _compare(self._train(self._copy("repeated")), self._uninterrupted)

    def _check_resumed(self) -> dict[str, Any]:
        run = self._copy("resumed")
        before = self._train(run, self._sizes.stop_after)
        after = self._train(run, resume=True)
        resumed = _Trained([*before.losses, *after.losses], after.digests, {})
        return {"stopped_after_step": len(before.losses), **_compare(resumed, self._uninterrupted)}

    @cached_property
    def _run(self) -> Run:
        corpus = self._folder / "text.jsonl"
        write_small_world(corpus, _CORPUS_BYTES)
        name, changes = self._sizes.training
        settings = {"learning_rate": 2e-3, "eval_tokens": 8192, **self._sizes.settings}
        config = load_preset(name, **changes)
        return start_run(self._folder / "uninterrupted", DataOptions([str(corpus)]), config, settings=settings)

    @cached_property
    def _uninterrupted(self) -> _Trained:
        return self._train(self._run)

    def _copy(self, name: str) -> Run:
        """A new run with the same model, settings and data."""
        run = self._run
        return Run.create(self._folder / name, run.config, run.settings, load(run.path), run.data)

    def _train(self, run: Run, stop_after: int | None = None, resume: bool = False) -> _Trained:
        losses: list[float] = []
        values: dict[str, Any] = {}
        stop = (lambda: len(losses) == stop_after) if stop_after else (lambda: False)
        for event in train(run, load(run.path), resume=resume, should_stop=stop):
            if isinstance(event, Started):
                values["parameters"], values["tokens_per_step"] = event.parameters, event.tokens_per_step
                flops = event.flops_per_token
            elif isinstance(event, Step):
                losses.append(event.loss)
            elif isinstance(event, Finished) and event.tokens_per_second:
                values["tokens_per_second"] = event.tokens_per_second
                values["gflops"] = flops * event.tokens_per_second / 1e9
                values["peak_memory_bytes"] = event.memory
        state = read_checkpoint_state(run.checkpoints()[-1])
        return _Trained(losses, state["sha256"], {**values, "dtype": run.settings.dtype, "steps": len(losses)})


def _compare(run: _Trained, other: _Trained) -> dict[str, Any]:
    pairs = list(zip(run.losses, other.losses, strict=False))
    first = next((i for i, (loss, expected) in enumerate(pairs, 1) if loss != expected), None)
    values: dict[str, Any] = {
        "steps": len(pairs),
        "equal_losses": first is None,
        "equal_weights": run.digests == other.digests,
    }
    if first is not None:
        difference = max(abs(loss - expected) for loss, expected in pairs)
        values = {**values, "first_different_step": first, "largest_difference": difference}
        raise CheckFailed(f"losses differ from step {first} on, by at most {difference:.2g} nats", values)
    if len(run.losses) != len(other.losses):
        raise CheckFailed(f"it has {len(run.losses)} steps instead of {len(other.losses)}", values)
    if run.digests != other.digests:
        raise CheckFailed("the losses are equal, the weights or the state of the optimizer are not", values)
    return values
