"""Calibration: second moments of the inputs of each linear layer, block by block with one block in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint.load import LAYER_PREFIX, HiddenState, LayerwiseModel
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import Format
from mlxlm.quantize.rtn import PackedMatrix

_BATCH_TOKENS = 2048  # that go through a block at once


@dataclass(frozen=True)
class InputStats:
    """Statistics of a linear layer's inputs on the calibration text, sums over tokens, float32 `[width, width]`.

    Attributes:
        moments: XᵀX of the inputs X in the model as quantized so far.
        dxxt: (X₀ - X)ᵀX with the unquantized model's inputs X₀ at the same tokens; None if it wasn't run.
    """

    moments: np.ndarray
    dxxt: np.ndarray | None = None


class CalibratedMethod:
    """Quantizes matrices for the inputs that they get. A method is one file, and an entry of `METHODS` in methods.py.

    Attributes:
        runs_source: Whether the unquantized model runs together with the quantized one, for `InputStats.dxxt`.
    """

    runs_source = False

    def change_block(
        self,
        block: nn.Module,
        config: ModelConfig,
        inputs: Mapping[str, InputStats],
        formats: Mapping[str, Format | None],
        dtype: mx.Dtype,
    ) -> tuple[Mapping[str, InputStats], set[str]]:
        """Change a block's weights before they are quantized, without changing what it computes.

        Args:
            block: A decoder block, changed in place.
            config: The model's configuration.
            inputs: Statistics of each layer's inputs.
            formats: The format of each layer; None for one that isn't quantized.
            dtype: Changed weights are rounded to this dtype of the output files.

        Returns:
            Statistics of the inputs after the change, and the names of the modules that were changed.
        """
        return inputs, set()

    def quantize(self, module: str, weight: mx.array, inputs: InputStats, fmt: Format) -> PackedMatrix:
        """Quantize rows of a matrix, 16-bit `[rows, width]`; scales and biases have its dtype."""
        raise NotImplementedError

    def end_block(self) -> None:
        """Free what the matrices of one block share."""


# on_block(name, block, inputs by layer name within the block): quantizes the block and sets its weights.
OnBlock = Callable[[str, nn.Module, Mapping[str, InputStats]], None]


def intercept(module: nn.Module, method: str, call: Callable[..., Any]) -> None:
    """Replace a method of a module by `call(original, *arguments)`, without changing the tree of modules.

    Until `module.__class__` is set back: models look at attributes and classes of their modules.
    """
    original = getattr(type(module), method)

    def intercepted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(partial(original, self), *args, **kwargs)

    module.__class__ = type(type(module).__name__, (type(module),), {method: intercepted})


class _InputRecorder:
    """Sums the statistics of inputs over batches. In each batch the source may run first, then the quantized model."""

    def __init__(self) -> None:
        self._inputs: dict[str, mx.array] = {}
        self._source_inputs: dict[str, mx.array] = {}
        self._sums: dict[str, list[mx.array]] = {}  # by the first layer with these inputs
        self._first_layer: dict[str, str] = {}  # layer -> first layer with the same inputs

    def record(self, name: str, x: mx.array) -> None:
        self._inputs[name] = x

    def end_source(self) -> None:
        """The inputs recorded so far were the source's."""
        self._source_inputs, self._inputs = self._inputs, {}

    def end_batch(self) -> None:
        """Add the batch. An array that several layers read (query, key and value) is multiplied once."""
        first: dict[int, str] = {}
        for name, x in self._inputs.items():
            leader = self._first_layer[name] = first.setdefault(id(x), name)
            if leader != name:
                continue
            flat = _flatten(x)
            products = [flat.T @ flat]
            if self._source_inputs:
                products.append((_flatten(self._source_inputs[name]) - flat).T @ flat)
            before = self._sums.get(name)
            self._sums[name] = products if before is None else [x + y for x, y in zip(before, products, strict=True)]
        mx.eval(self._sums)
        self._inputs, self._source_inputs = {}, {}

    def stats(self) -> dict[str, InputStats]:
        """By layer, one object for layers with the same inputs. Hands the sums over without a copy."""
        stats = {name: InputStats(*(np.array(x, copy=False) for x in sums)) for name, sums in self._sums.items()}
        self._sums = {}
        return {name: stats[first] for name, first in self._first_layer.items()}


def _flatten(x: mx.array) -> mx.array:
    """[tokens, width] float32."""
    return x.reshape(-1, x.shape[-1]).astype(mx.float32)


@contextmanager
def _recording(module: nn.Module) -> Iterator[_InputRecorder]:
    """Record the inputs of all linear layers of `module`."""
    recorder = _InputRecorder()
    leaves = tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module)
    linear = {name: leaf for name, leaf in leaves if isinstance(leaf, nn.Linear)}
    classes = {name: type(leaf) for name, leaf in linear.items()}

    def call(name: str, layer: Callable[..., mx.array], x: mx.array) -> mx.array:
        recorder.record(name, x)
        return layer(x)

    for name, leaf in linear.items():
        intercept(leaf, "__call__", partial(call, name))
    try:
        yield recorder
    finally:
        for name, leaf in linear.items():
            leaf.__class__ = classes[name]


def _embed(model: LayerwiseModel, windows: np.ndarray) -> list[mx.array]:
    """The hidden state `[B, T, hidden]` of each batch of windows after the embedding."""
    rows = max(1, _BATCH_TOKENS // windows.shape[1])
    batches = [mx.array(windows[start : start + rows]) for start in range(0, len(windows), rows)]
    return [_merge(state) for state in model.embeddings(batches)]


def _merge(state: HiddenState) -> mx.array:
    residual, hidden_states = state
    value = residual if hidden_states is None else residual + hidden_states
    mx.eval(value)
    return value


def calibrate_blocks(
    source: LayerwiseModel | None,
    model: LayerwiseModel,
    windows: np.ndarray,
    on_block: OnBlock | None,
    progress: Callable[[str], None],
) -> InputStats:
    """Run the calibration text through a decoder, and quantize each block on the way.

    A block's inputs are the outputs of the blocks before it as `on_block` left them, so that each block compensates
    for the errors of those before. Memory: one block, the sums for its layers, and one or two hidden states per token
    (67 MB each for 16,384 tokens of width 1024).

    Args:
        source: The unquantized model, to run in parallel with `model` for `InputStats.dxxt`; or None.
        model: The model to calibrate on, with the embedding as it was quantized.
        windows: Tokens, int `[N, T]`.
        on_block: Called for each block; None leaves the blocks as they are.
        progress: Called with the name of each finished block.

    Returns:
        Statistics of the head's inputs.
    """
    states = _embed(model, windows)
    source_states = None if source is None else _embed(source, windows)
    for index in range(model.config.num_hidden_layers):
        name, block = f"{LAYER_PREFIX}.{index}", model.load_layer(index)
        if on_block is not None:
            with _recording(block) as recorder:
                for i, state in enumerate(states):
                    if source_states is not None:
                        source_states[i] = _merge(block(source_states[i], None))
                        recorder.end_source()
                    block(state, None)
                    recorder.end_batch()
            on_block(name, block, recorder.stats())
        for i, state in enumerate(states):
            states[i] = _merge(block(state, None))
        del block  # before the next one is read
        mx.clear_cache()
        progress(name)
    final_norm, recorder = model.final_norm(), _InputRecorder()
    for i, state in enumerate(states):
        if source_states is not None:
            recorder.record("head", final_norm(source_states[i], None))
            recorder.end_source()
        recorder.record("head", final_norm(state, None))
        recorder.end_batch()
    return recorder.stats()["head"]


def get_submodule(block: nn.Module, name: str) -> nn.Module:
    """The submodule of a block or decoder with a dotted name."""
    for part in name.split("."):
        block = block[int(part) if part.isdigit() else part]
    return block
