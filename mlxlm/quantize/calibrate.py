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
    drift: np.ndarray | None


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
    """Sums over batches: in each, the source's inputs are shown first, and then those to calibrate with."""

    def __init__(self) -> None:
        self._source: dict[str, mx.array] = {}
        self._own: dict[str, mx.array] = {}
        self._is_source = True
        self._sums: dict[str, tuple[mx.array, mx.array]] = {}  # by the first layer that reads an input
        self._shared: dict[str, str] = {}  # layer: that first one

    def saw(self, name: str, x: mx.array) -> None:
        (self._source if self._is_source else self._own)[name] = x

    def source_done(self) -> None:
        self._is_source = False

    def batch_done(self) -> None:
        """Add up. The same array for several layers (query, key and value) is multiplied once."""
        first: dict[int, str] = {}
        for name, x in self._own.items():
            leader = self._shared[name] = first.setdefault(id(x), name)
            if leader != name:
                continue
            flat, source = (part.reshape(-1, x.shape[-1]).astype(mx.float32) for part in (x, self._source[name]))
            both = flat.T @ flat, (source - flat).T @ flat
            before = self._sums.get(name)
            self._sums[name] = both if before is None else (before[0] + both[0], before[1] + both[1])
        mx.eval(self._sums)
        self._source, self._own, self._is_source = {}, {}, True

    def inputs(self) -> dict[str, Inputs]:
        arrays = {name: Inputs(*map(np.array, sums)) for name, sums in self._sums.items()}
        return {name: arrays[first] for name, first in self._shared.items()}


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
    source: Stages, stages: Stages, tokens: np.ndarray, on_block: OnBlock, progress: Callable[[str], None]
) -> None:
    """Send `tokens` int `[N, T]` through the decoder; call `on_block` for each block, and at last with the module
    that has `lm_head` where there is one of its own.

    A block gets what the blocks before it make as `on_block` left them, so that each makes up for the errors of
    those before. `stages` begin with the embedding to calibrate with; `source` is the model as it was.
    Memory: one block, its sums, and two hidden states per token. `progress` is told each block that is done.
    """
    originals, states = _embedded(source, tokens), _embedded(stages, tokens)
    for index in range(stages.layers):
        block = stages.block(index)
        with _recorded(block) as sums:
            for i, state in enumerate(states):
                originals[i] = block(*originals[i])
                sums.source_done()
                mx.eval(originals[i], block(*state))
                sums.batch_done()
        name = f"{LAYERS}.{index}"
        on_block(name, block, sums.inputs())
        _through(block, states)
        progress(name)
    decoder = stages.ends()
    if "lm_head" in decoder:
        with _recorded(decoder) as sums:
            for original, state in zip(originals, states, strict=True):
                decoder.head(decoder.model.leave(*original))  # the logits themselves are never computed
                sums.source_done()
                decoder.head(decoder.model.leave(*state))
                sums.batch_done()
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
        x = model.leave(*state)
        flat = x.reshape(-1, x.shape[-1]).astype(mx.float32)
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
