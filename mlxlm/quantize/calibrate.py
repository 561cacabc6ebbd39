"""What flows into each linear layer of a decoder, measured block by block with one block in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from mlxlm._mlx import mx, nn, tree_flatten, tree_unflatten
from mlxlm.stages import LAYERS, Stages, State

_BATCH = 2048  # tokens that go through a block at once


@dataclass(frozen=True)
class Inputs:
    """What a linear layer reads over the calibration text, as sums over tokens, float32 `[width, width]`.

    moments: XᵀX of its inputs in the model as it is quantized so far. drift: (X₀ - X)ᵀX, X₀ being the source's
    inputs at the same tokens; None where there are none to compare with.
    """

    moments: np.ndarray
    drift: np.ndarray | None = None


# What is done with one block: its name, the block, and its layers' inputs by their names in the block. It sets the
# weights that the block goes on with.
OnBlock = Callable[[str, nn.Module, Mapping[str, Inputs]], None]


class _Recorder(nn.Module):
    """A linear layer that shows its inputs on the way."""

    def __init__(self, name: str, layer: nn.Module, sums: _Sums):
        super().__init__()
        self._name, self._layer, self._sums = name, layer, sums  # underscores: no parameters

    def __call__(self, x: mx.array) -> mx.array:
        self._sums.saw(self._name, x)
        return self._layer(x)


class _Sums:
    """Sums over batches: in each, inputs to calibrate with are shown, after the source's where these count."""

    def __init__(self) -> None:
        self._seen: dict[str, mx.array] = {}
        self._source: dict[str, mx.array] = {}
        self._sums: dict[str, list[mx.array]] = {}  # by the first layer that reads an input
        self._shared: dict[str, str] = {}  # layer: that first one

    def saw(self, name: str, x: mx.array) -> None:
        self._seen[name] = x

    def source_done(self) -> None:
        """What was seen were the source's."""
        self._source, self._seen = self._seen, {}

    def batch_done(self) -> None:
        """Add up. The same array for several layers (query, key and value) is multiplied once."""
        first: dict[int, str] = {}
        for name, x in self._seen.items():
            leader = self._shared[name] = first.setdefault(id(x), name)
            if leader != name:
                continue
            flat = _rows(x)
            own = [flat.T @ flat]
            if self._source:
                own.append((_rows(self._source[name]) - flat).T @ flat)
            before = self._sums.get(name)
            self._sums[name] = own if before is None else [x + y for x, y in zip(before, own, strict=True)]
        mx.eval(self._sums)
        self._seen, self._source = {}, {}

    def inputs(self) -> dict[str, Inputs]:
        arrays = {name: Inputs(*map(np.array, sums)) for name, sums in self._sums.items()}
        return {name: arrays[first] for name, first in self._shared.items()}


def _rows(x: mx.array) -> mx.array:
    """[tokens, width] float32"""
    return x.reshape(-1, x.shape[-1]).astype(mx.float32)


@contextmanager
def _recorded(module: nn.Module) -> Iterator[_Sums]:
    """All linear layers of `module` record, until the end."""
    sums = _Sums()
    leaves = tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module)
    linear = [(name, leaf) for name, leaf in leaves if isinstance(leaf, nn.Linear)]
    module.update_modules(tree_unflatten([(name, _Recorder(name, leaf, sums)) for name, leaf in linear]))
    try:
        yield sums
    finally:
        module.update_modules(tree_unflatten(linear))


def walk(
    source: Stages | None, stages: Stages, tokens: np.ndarray, on_block: OnBlock, progress: Callable[[str], None]
) -> None:
    """Send `tokens` int `[N, T]` through the decoder; call `on_block` for each block, and at last with the module
    that has `lm_head` where there is one of its own.

    A block gets what the blocks before it make as `on_block` left them, so that each makes up for the errors of
    those before. `stages` begin with the embedding to calibrate with; `source` is the model as it was, run beside it
    for `Inputs.drift`, or None. Memory: one block, its sums, and one or two hidden states per token.
    `progress` is told each block that is done.
    """
    states = _embedded(stages, tokens)
    originals = [None] * len(states) if source is None else _embedded(source, tokens)

    def record(sums: _Sums, run: Callable[[State], object]) -> None:
        for i, state in enumerate(states):
            if originals[i] is not None:
                originals[i] = run(originals[i])
                mx.eval(originals[i])
                sums.source_done()
            run(state)
            sums.batch_done()

    for index in range(stages.layers):
        block = stages.block(index)
        with _recorded(block) as sums:
            record(sums, lambda state, block=block: block(*state))
        name = f"{LAYERS}.{index}"
        on_block(name, block, sums.inputs())
        _through(block, states)
        progress(name)
    decoder = stages.ends()
    if "lm_head" in decoder:
        with _recorded(decoder) as sums:
            record(sums, lambda state: decoder.head(decoder.model.leave(*state)))
        on_block("", decoder, {"lm_head": sums.inputs()["lm_head"]})
        progress("lm_head")


def head_moments(stages: Stages, tokens: np.ndarray, progress: Callable[[str], None]) -> np.ndarray:
    """XᵀX of what the head reads, `[hidden, hidden]` float32; a run through the decoder as it is."""
    states = _embedded(stages, tokens)
    for index in range(stages.layers):
        _through(stages.block(index), states)
        progress(f"{LAYERS}.{index}")
    model, total = stages.ends().model, mx.array(0.0)
    for state in states:
        flat = _rows(model.leave(*state))
        total = total + flat.T @ flat
        mx.eval(total)
    return np.array(total)


def _embedded(stages: Stages, tokens: np.ndarray) -> list[State]:
    rows = max(1, _BATCH // tokens.shape[1])
    states = [stages.embed(mx.array(tokens[start : start + rows])) for start in range(0, len(tokens), rows)]
    mx.eval(states)
    return states


def _through(block: nn.Module, states: list[State]) -> None:
    """Each state becomes the one after `block`."""
    for i, state in enumerate(states):
        states[i] = block(*state)
        mx.eval(states[i])
