"""Calibration: second moments of the inputs of each linear layer, layer by layer with one of them in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mlxlm.backend.mlx import ON_CPU, mx, nn, tree_flatten
from mlxlm.config.quantization import Format
from mlxlm.model.experts import Blocks
from mlxlm.quantize.intercept import intercept
from mlxlm.quantize.layers import Layers
from mlxlm.quantize.rtn import PackedMatrix

_BATCH_TOKENS = 2048  # that go through a block at once
MIN_EXPERT_TOKENS = 64  # fewer say little about the inputs of an expert


# Name, 16-bit weights and format of each.
Matrices = Sequence[tuple[str, mx.array, Format]]


@dataclass(frozen=True)
class InputStats:
    """Statistics of a linear layer's inputs on the calibration text, sums over tokens, float32 `[width, width]`.

    Attributes:
        moments: XᵀX of the inputs X in the model as quantized so far.
        dxxt: (X₀ - X)ᵀX with the unquantized model's inputs X₀ at the same tokens; None if it wasn't run.
        transposed: Whether the layer computes X W instead of X Wᵀ: `embed_q` of latent attention.
    """

    moments: np.ndarray
    dxxt: np.ndarray | None = None
    transposed: bool = False

    def by_output(self, weight: np.ndarray) -> np.ndarray:
        """Weights `[outputs, width]`, from `[rows, columns]` of one matrix, or if `transposed` of each head's."""
        if not self.transposed:
            return weight
        width, columns = len(self.moments), weight.shape[1]
        return weight.reshape(-1, width, columns).swapaxes(1, 2).reshape(-1, width)

    def divided_by(self, scale: np.ndarray) -> InputStats:
        """Statistics of the inputs divided by `scale` `[width]`, without `dxxt`."""
        return InputStats(self.moments / scale / scale[:, None])


class CalibratedMethod:
    """Quantizes matrices for the inputs that they get. A method is one file, and an entry of `METHODS` in methods.py.

    Attributes:
        runs_source: Whether the unquantized model runs together with the quantized one, for `InputStats.dxxt`.
    """

    runs_source = False

    def change_block(
        self,
        block: nn.Module,
        run: Callable[[], mx.array],
        inputs: Mapping[str, InputStats | ExpertInputs],
        formats: Mapping[str, Format | None],
        dtype: mx.Dtype,
    ) -> tuple[Mapping[str, InputStats | ExpertInputs], set[str]]:
        """Change a block's weights before they are quantized, without changing what it computes.

        Args:
            block: A layer of the model, changed in place.
            run: Runs it on a batch of the text; returns its output.
            inputs: Statistics of each layer's inputs.
            formats: The format of each layer; None for one that isn't quantized.
            dtype: Changed weights are rounded to this dtype of the output files.

        Returns:
            Statistics of the inputs after the change, and the names of the modules that were changed.
        """
        return inputs, set()

    def quantize(self, matrices: Matrices, inputs: InputStats) -> Iterable[PackedMatrix]:
        """Quantize matrices that read the same inputs.

        Args:
            matrices: `[rows, width]`. Scales and biases get the dtype of the weights.
            inputs: Statistics of their inputs.
        """
        raise NotImplementedError


class ExpertInputs:
    """The inputs of a layer with a matrix for each expert.

    They are kept instead of their second moments, which have a matrix for each expert: rows by row, and which rows each
    expert reads.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[mx.array, np.ndarray, np.ndarray]] = []  # rows [N, width], row and expert of each use
        self._scale: np.ndarray | None = None  # [experts or 1, width] that the rows are divided by

    def add(self, x: mx.array, experts: mx.array | Blocks) -> None:
        """Add inputs `[..., 1, width]`, whose leading dimensions broadcast to those of the `experts` that read them.

        Or blocks `[N, size, width]` of mlxlm's decoder.
        """
        if isinstance(experts, Blocks):
            rows_in_use = mx.array(np.flatnonzero(np.array(experts.used)))
            x, experts = x.reshape(-1, 1, x.shape[-1])[rows_in_use], experts.experts[rows_in_use // experts.size]
        rows = np.arange(math.prod(x.shape[:-2])).reshape(x.shape[:-2])
        uses = np.broadcast_to(rows, experts.shape).reshape(-1)
        self._batches.append((x.reshape(-1, x.shape[-1]), uses, np.array(experts).reshape(-1)))

    def of(self, expert: int) -> tuple[int, InputStats]:
        """The number of tokens that an expert reads, and their statistics."""
        count, moments = 0, mx.array(0.0)
        for x, uses, experts in self._batches:
            chosen = uses[experts == expert]
            if len(chosen):
                rows = x[mx.array(chosen)].astype(mx.float32)
                count, moments = count + len(chosen), moments + _second_moments(rows)
        stats = InputStats(np.array(moments))
        if self._scale is None or not count:
            return count, stats
        return count, stats.divided_by(self._scale[expert % len(self._scale)])

    def mean_squares(self, experts: int) -> np.ndarray:
        """The mean square of each channel for each expert, `[experts, width]`; 1 for experts that read nothing."""
        width, counts = self._batches[0][0].shape[-1], np.zeros(experts)
        sums = np.zeros((experts, width), np.float32)
        for x, rows, chosen in self._batches:
            np.add.at(sums, chosen, np.square(np.array(x.astype(mx.float32)))[rows])
            counts += np.bincount(chosen, minlength=experts)
        return np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], 1).astype(np.float32)

    def divided_by(self, scale: np.ndarray) -> ExpertInputs:
        """The inputs divided by `scale` `[width]`, or for each expert by its own, `[experts, width]`."""
        result = ExpertInputs()
        result._batches, result._scale = self._batches, scale.reshape(-1, scale.shape[-1])
        return result

    def squares(self) -> np.ndarray:
        """The sum of squares of each channel, `[width]`, of each row once."""
        return sum(np.square(np.array(x.astype(mx.float32))).sum(axis=0) for x, _, _ in self._batches)


class _InputRecorder:
    """Sums the statistics of inputs over batches. In each batch the source may run first, then the quantized model.

    With `diagonal`, moments are their diagonal, `[width]`.
    """

    def __init__(self, diagonal: bool = False) -> None:
        self._diagonal = diagonal
        self._inputs: dict[str, tuple[mx.array, ...]] = {}
        self._source_inputs: dict[str, tuple[mx.array, ...]] = {}
        self._sums: dict[str, list[mx.array]] = {}  # by the first layer with these inputs
        self._experts: dict[str, ExpertInputs] = {}  # the same
        self._first_layer: dict[str, str] = {}  # layer -> first layer with the same inputs
        self._transposed: set[str] = set()

    def record(self, name: str, *inputs: mx.array, transpose: bool = True) -> None:
        """Record the input of a layer, and for a layer of experts, which of them reads what."""
        self._inputs[name] = inputs
        if not transpose:
            self._transposed.add(name)

    def end_source(self) -> None:
        """The inputs recorded so far were the source's."""
        self._source_inputs, self._inputs = self._inputs, {}

    def end_batch(self) -> None:
        """Add the batch. An array that several layers read (query, key and value) is multiplied once."""
        first: dict[tuple[int, ...], str] = {}
        for name, inputs in self._inputs.items():
            x, *experts = inputs
            leader = self._first_layer[name] = first.setdefault((name in self._transposed, *map(id, inputs)), name)
            if leader != name:
                continue
            if experts:
                mx.eval(x)
                self._experts.setdefault(name, ExpertInputs()).add(x, *experts)
                continue
            flat = _flatten(x)
            products = [mx.square(flat).sum(axis=0) if self._diagonal else _second_moments(flat)]
            if name in self._source_inputs:
                products.append((_flatten(self._source_inputs[name][0]) - flat).T @ flat)
            before = self._sums.get(name)
            self._sums[name] = products if before is None else [x + y for x, y in zip(before, products, strict=True)]
        mx.eval(self._sums)
        self._inputs, self._source_inputs = {}, {}

    def stats(self) -> dict[str, InputStats | ExpertInputs]:
        """By layer, one object for layers with the same inputs. Hands the sums over without a copy."""
        stats: dict[str, InputStats | ExpertInputs] = dict(self._experts)
        for name, sums in self._sums.items():
            moments, *dxxt = (np.array(x, copy=False) for x in sums)
            stats[name] = InputStats(moments, dxxt[0] if dxxt else None, name in self._transposed)
        self._sums, self._experts = {}, {}
        return {name: stats[first] for name, first in self._first_layer.items()}


def _flatten(x: mx.array) -> mx.array:
    """[tokens, width] float32."""
    return x.reshape(-1, x.shape[-1]).astype(mx.float32)


def _second_moments(x: mx.array) -> mx.array:
    """XᵀX of `x` `[tokens, width]`. On a CPU, numpy computes one half of it, in half of the time that MLX takes."""
    if not ON_CPU:
        return x.T @ x
    values = np.array(x, copy=False)
    return mx.array(values.T @ values)


@contextmanager
def recording(module: nn.Module, diagonal: bool = False) -> Iterator[_InputRecorder]:
    """Record the inputs of all linear layers of `module`, and of those with a matrix for each expert.

    Also of those with a matrix for each head, if all heads have the same input, but not with `diagonal`.
    """
    recorder = _InputRecorder(diagonal)
    leaves = dict(tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module))
    recorded = {
        name: leaf
        for name, leaf in leaves.items()
        if isinstance(leaf, nn.Linear) or is_stack(leaf) or (is_per_head(leaf) and not diagonal)
    }
    classes = {name: type(leaf) for name, leaf in recorded.items()}

    def call(name: str, count: int, layer: Callable[..., mx.array], *inputs: Any, **options: Any) -> mx.array:
        if not is_per_head(recorded[name]) or inputs[0].shape[1] == 1:
            recorder.record(name, *inputs[:count], transpose=options.get("transpose", True))
        return layer(*inputs, **options)

    for name, leaf in recorded.items():
        intercept(leaf, "__call__", partial(call, name, 2 if is_stack(leaf) else 1))
    try:
        yield recorder
    finally:
        for name, leaf in recorded.items():
            leaf.__class__ = classes[name]


# on_layer(name, layer, run, inputs by module name within the layer): quantizes the layer and sets its weights; `run`
# runs it on a batch.
OnLayer = Callable[[str, nn.Module, Callable[[], mx.array], Mapping[str, InputStats | ExpertInputs]], None]


def is_stack(module: nn.Module) -> bool:
    """Whether this is a `SwitchLinear` of mlx_lm or mlxlm, which has a matrix `[out, in]` for each expert."""
    return hasattr(module, "num_experts") and "weight" in module and module.weight.ndim == 3


def is_per_head(module: nn.Module) -> bool:
    """Whether this is a `HeadLinear` or mlx_lm's `MultiLinear`, which has a matrix `[out, in]` for each head."""
    is_linear = hasattr(module, "to_quantized") and not hasattr(module, "num_experts")
    return is_linear and "weight" in module and module.weight.ndim == 3


def _embed(model: Layers, windows: np.ndarray) -> list[mx.array]:
    """The hidden state `[B, T, hidden]` of each batch of windows after the embedding."""
    rows = max(1, _BATCH_TOKENS // windows.shape[1])
    states = []
    for state in model.embed(mx.array(windows[start : start + rows]) for start in range(0, len(windows), rows)):
        mx.eval(state)  # otherwise its graph keeps the embedding in memory
        states.append(state)
    return states


def calibrate_layers(
    model: Layers,
    windows: np.ndarray,
    on_layer: OnLayer | None = None,
    progress: Callable[[], None] = lambda: None,
    *,
    source: Layers | None = None,
    diagonal: bool = False,
) -> Mapping[str, InputStats | ExpertInputs]:
    """Run the calibration text through a model, and quantize each layer on the way.

    A layer's inputs are the outputs of the layers before it as `on_layer` left them, so that each layer compensates
    for the errors of those before. Memory: one layer, the sums for its matrices, and one or two hidden states per token
    (67 MB each for 16,384 tokens of width 1024).

    Args:
        model: The model to calibrate on, with the embedding as it was quantized.
        windows: Tokens, int `[N, T]`.
        on_layer: Called for each layer; None leaves the layers as they are.
        progress: Called after each layer.
        source: The unquantized model, to run in parallel with `model` for `InputStats.dxxt`.
        diagonal: Sum only the squares of the inputs: moments are `[width]`. Layers must stay as they are.

    Returns:
        Statistics of the inputs of the matrices after the last layer, by name.
    """
    states = _embed(model, windows)
    source_states = None if source is None else _embed(source, windows)
    for index, name in enumerate(model.names):
        layer = model.load(index)
        if on_layer is not None:
            with recording(layer, diagonal) as recorder:
                for i, state in enumerate(states):
                    if source is not None and source_states is not None:
                        source_states[i] = source.run(layer, index, i, source_states[i])
                        mx.eval(source_states[i])
                        recorder.end_source()
                    output = model.run(layer, index, i, state)
                    mx.eval(output)
                    recorder.end_batch()
                    if diagonal:
                        states[i] = output
            on_layer(name, layer, partial(model.run, layer, index, 0, states[0]), recorder.stats())
        if on_layer is None or not diagonal:
            for i, state in enumerate(states):
                states[i] = model.run(layer, index, i, state)
                mx.eval(states[i])
        del layer  # before the next one is read
        mx.clear_cache()
        progress()
    recorder = _InputRecorder(diagonal)
    for i, state in enumerate(states):
        if source_states is not None:
            _record_all(recorder, model.head_inputs(i, source_states[i]))
            recorder.end_source()
        _record_all(recorder, model.head_inputs(i, state))
        recorder.end_batch()
    return recorder.stats()


def _record_all(recorder: _InputRecorder, inputs: Mapping[str, mx.array]) -> None:
    for name, x in inputs.items():
        recorder.record(name, x)


def get_submodule(block: nn.Module, name: str) -> nn.Module:
    """The submodule of a block or decoder with a dotted name."""
    for part in name.split("."):
        block = block[int(part) if part.isdigit() else part]
    return block
