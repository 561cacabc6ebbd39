"""Calibration: second moments of the inputs of each linear layer, layer by layer with one of them in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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

MIN_EXPERT_TOKENS = 64  # fewer say little about the inputs of an expert


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
        formats: Mapping[str, Format | None],
        dtype: mx.Dtype,
    ) -> set[str]:
        """Change a block's weights before they are quantized, without changing what it computes.

        Args:
            block: A layer of the model, changed in place.
            run: Runs it on the text; returns its output.
            formats: The format of each layer; None for one that isn't quantized.
            dtype: Changed weights are rounded to this dtype of the output files.

        Returns:
            The names of the modules that were changed.
        """
        return set()

    def quantize(self, name: str, weight: mx.array, fmt: Format, inputs: InputStats) -> PackedMatrix:
        """Quantize a matrix.

        Args:
            name: Its module.
            weight: `[rows, width]`. Scales and biases get its dtype.
            fmt: The format.
            inputs: Statistics of its inputs.
        """
        raise NotImplementedError


class ExpertInputs:
    """The inputs of a layer with a matrix for each expert.

    They are kept instead of their second moments, which have a matrix for each expert.

    Args:
        x: `[..., 1, width]`, whose leading dimensions broadcast to those of the `experts` that read them; or blocks
            `[N, size, width]` of mlxlm's decoder.
        experts: The expert of each use.
    """

    def __init__(self, x: mx.array, experts: mx.array | Blocks) -> None:
        if isinstance(experts, Blocks):
            rows_in_use = mx.array(np.flatnonzero(np.array(experts.used)))
            x, experts = x.reshape(-1, 1, x.shape[-1])[rows_in_use], experts.experts[rows_in_use // experts.size]
        rows = np.arange(math.prod(x.shape[:-2])).reshape(x.shape[:-2])
        self._uses = np.broadcast_to(rows, experts.shape).reshape(-1)  # the row of each use
        self._rows, self._experts = x.reshape(-1, x.shape[-1]), np.array(experts).reshape(-1)

    def of(self, expert: int) -> tuple[int, InputStats]:
        """The number of tokens that an expert reads, and their statistics."""
        uses = self._uses[self._experts == expert]
        rows = self._rows[mx.array(uses)].astype(mx.float32)
        return len(uses), InputStats(_second_moments(rows) if len(uses) else np.zeros((), np.float32))

    def mean_squares(self, experts: int) -> np.ndarray:
        """The mean square of each channel for each expert, `[experts, width]`; 1 for experts that read nothing."""
        sums = np.zeros((experts, self._rows.shape[-1]), np.float32)
        np.add.at(sums, self._experts, np.square(np.array(self._rows.astype(mx.float32)))[self._uses])
        counts = np.bincount(self._experts, minlength=experts)[:, None]
        return np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32)

    def squares(self) -> np.ndarray:
        """The sum of squares of each channel, `[width]`, of each row once."""
        return np.square(np.array(self._rows.astype(mx.float32))).sum(axis=0)


class InputStatistics:
    """Statistics of the inputs of linear layers. Layers that read an array one after the other share one object.

    With `diagonal`, moments are their diagonal, `[width]`.
    """

    def __init__(self, diagonal: bool = False) -> None:
        self._diagonal = diagonal
        self._last: tuple[tuple[Any, ...], InputStats | ExpertInputs] | None = None

    def of(
        self, layer: nn.Module, inputs: Sequence[Any], transposed: bool, source: mx.array | None = None
    ) -> InputStats | ExpertInputs | None:
        """Statistics of the inputs of a call.

        Args:
            layer: What is called. Of one with a matrix for each head, all heads must have the same input.
            inputs: The arguments.
            transposed: Whether it was called with `transpose=False`.
            source: What the unquantized model calls it with.

        Returns:
            None if the layer can't be calibrated.
        """
        x, *experts = inputs[: 2 if is_stack(layer) else 1]
        if is_per_head(layer) and (self._diagonal or x.shape[1] != 1):
            return None
        key = (transposed, x, *experts)
        if self._last is None or [id(part) for part in key] != [id(part) for part in self._last[0]]:
            if experts:
                mx.eval(x)
                stats: InputStats | ExpertInputs = ExpertInputs(x, *experts)
            elif self._diagonal:
                stats = InputStats(np.array(mx.square(_flatten(x)).sum(axis=0)))
            else:
                stats = input_stats(x, source, transposed)
            self._last = key, stats
        return self._last[1]


def input_stats(x: mx.array, source: mx.array | None = None, transposed: bool = False) -> InputStats:
    """Statistics of inputs `[..., width]`, and of those that the unquantized model has at the same tokens."""
    flat = _flatten(x)
    dxxt = None if source is None else np.array((_flatten(source) - flat).T @ flat, copy=False)
    return InputStats(_second_moments(flat), dxxt, transposed)


def _flatten(x: mx.array) -> mx.array:
    """[tokens, width] float32."""
    return x.reshape(-1, x.shape[-1]).astype(mx.float32)


def _second_moments(x: mx.array) -> np.ndarray:
    """XᵀX of `x` float32 `[tokens, width]`. On a CPU, numpy computes one half of it, in half of MLX's time."""
    if not ON_CPU:
        return np.array(x.T @ x, copy=False)
    values = np.array(x, copy=False)
    return values.T @ values


@contextmanager
def intercepting(module: nn.Module, call: Callable[..., mx.array]) -> Iterator[None]:
    """Let all linear layers of `module`, also those with a matrix for each expert or head, be called by `call`.

    As `call(name, layer, original, *inputs, **options)`.
    """
    leaves = dict(tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module))
    layers = {
        n: leaf for n, leaf in leaves.items() if isinstance(leaf, nn.Linear) or is_stack(leaf) or is_per_head(leaf)
    }
    classes = {name: type(layer) for name, layer in layers.items()}
    for name, layer in layers.items():
        intercept(layer, "__call__", partial(call, name, layer))
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.__class__ = classes[name]


@contextmanager
def recording(module: nn.Module, diagonal: bool = False) -> Iterator[dict[str, InputStats | ExpertInputs]]:
    """Record the inputs of all linear layers of `module` that can be calibrated, by name; see `InputStatistics`."""
    statistics, found = InputStatistics(diagonal), {}

    def call(name: str, layer: nn.Module, original: Callable[..., mx.array], *inputs: Any, **options: Any) -> mx.array:
        stats = statistics.of(layer, inputs, not options.get("transpose", True))
        if stats is not None:
            found[name] = stats
        return original(*inputs, **options)

    with intercepting(module, call):
        yield found


def is_stack(module: nn.Module) -> bool:
    """Whether this is a `SwitchLinear` of mlx_lm or mlxlm, which has a matrix `[out, in]` for each expert."""
    return hasattr(module, "num_experts") and "weight" in module and module.weight.ndim == 3


def is_per_head(module: nn.Module) -> bool:
    """Whether this is a `HeadLinear` or mlx_lm's `MultiLinear`, which has a matrix `[out, in]` for each head."""
    is_linear = hasattr(module, "to_quantized") and not hasattr(module, "num_experts")
    return is_linear and "weight" in module and module.weight.ndim == 3


# on_layer(name, layer, run, source_inputs): runs the layer on all windows, and returns its output. `source_inputs` are
# those of its linear layers in the unquantized model, by name, or empty.
OnLayer = Callable[[str, nn.Module, Callable[[], mx.array], Mapping[str, mx.array]], mx.array]


def calibrate_layers(
    model: Layers,
    windows: np.ndarray,
    on_layer: OnLayer = lambda name, layer, run, source_inputs: run(),
    progress: Callable[[], None] = lambda: None,
    *,
    source: Layers | None = None,
) -> dict[str, InputStats]:
    """Run the calibration text through a model, and quantize each layer on the way.

    A layer's inputs are the outputs of the layers before it as `on_layer` left them, so that each layer compensates
    for the errors of those before. Memory: one layer and its activations for all windows (0.9 GB for 14,336 channels
    of 16,384 tokens, on a CPU).

    Args:
        model: The model to calibrate on, with the embedding as it was quantized.
        windows: Tokens, int `[N, T]`.
        on_layer: Called for each layer.
        progress: Called after each layer.
        source: The unquantized model, to run in parallel with `model`.

    Returns:
        Statistics of the inputs of the matrices after the last layer, by name.
    """
    source_inputs: dict[str, mx.array] = {}

    def note(name: str, layer: nn.Module, original: Callable[..., mx.array], x: mx.array, *args: Any, **kw: Any) -> Any:
        source_inputs[name] = x
        return original(x, *args, **kw)

    state, source_state = _embed(model, windows), None if source is None else _embed(source, windows)
    for index, name in enumerate(model.names):
        layer = model.load(index)
        if source is not None and source_state is not None:
            with intercepting(layer, note):
                source_state = source.run(layer, index, 0, source_state)
                mx.eval(source_state)
        state = on_layer(name, layer, partial(model.run, layer, index, 0, state), source_inputs)
        mx.eval(state)
        source_inputs.clear()
        del layer  # before the next one is read
        mx.clear_cache()
        progress()
    heads = {} if source is None or source_state is None else dict(source.head_inputs(0, source_state))
    return {name: input_stats(x, heads.get(name)) for name, x in model.head_inputs(0, state).items()}


def _embed(model: Layers, windows: np.ndarray) -> mx.array:
    """The hidden state `[B, T, hidden]` after the embedding."""
    [state] = model.embed([mx.array(windows)])
    mx.eval(state)  # otherwise its graph keeps the embedding in memory
    return state


def get_submodule(block: nn.Module, name: str) -> nn.Module:
    """The submodule of a block or decoder with a dotted name."""
    for part in name.split("."):
        block = block[int(part) if part.isdigit() else part]
    return block
