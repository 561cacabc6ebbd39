"""One decoding step of a model: the next token of each row, or a draft, in, logits out; compiled where possible.

Building the graph of a token in Python takes longer than a GPU needs to read the weights of a small model. A compiled
function builds it without Python, but has fixed shapes: keys and values are written at an index that is an array, and
attention reads a fixed part of the buffers, with a mask for the positions in use. A new function is only traced when
the buffers grow or that part moves, every 256 tokens or more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import islice
from operator import getitem, is_
from typing import Any, Self

from mlxlm.backend.error_text import raise_if_results_lost
from mlxlm.backend.mlx import mx, nn
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.cache.kv_buffer import KVBuffer
from mlxlm.cache.kv_cache import STEP, KVCache, round_length
from mlxlm.cache.mlx_lm_caches import (
    MlxLmKeysAndValues,
    MlxLmKVCache,
    MlxLmRecurrentCache,
    PackedKeysAndValues,
    QuantizedMlxLmKVCache,
)
from mlxlm.cache.recurrent_cache import RecurrentCache
from mlxlm.kernels import QuantizedKV
from mlxlm.kernels.dispatch import mode
from mlxlm.model import Decoder, MTPModule
from mlxlm.model.positions import QueryTemperature, RotaryEmbedding
from mlxlm.utils.errors import MlxlmError

_MAX_LAYOUTS = 32  # a trace takes about 40 kB per layer
# Tracing takes as long as several steps without, so that a batch that changes with every step should not be traced.
_STEPS_BEFORE_TRACE = 3
_DECODERS = (Decoder, MTPModule)
logger = logging.getLogger(__name__)

Step = Callable[..., list[mx.array]]


class DecodeStep:
    """Computes the logits after one token per row, or after each of several tokens of one row, as the model does.

    A `Decoder` or `MTPModule` with its own caches always runs the same operations, whether they are compiled or not.
    The logits are those of the model up to rounding: a BLAS can sum products with further zeros in another order.

    A model of mlx_lm's classes with the caches of `mlx_lm_caches` is compiled, too, as long as its logits are those of
    the model itself, which runs beside the first step of each layout, and the first one that is compiled.

    Several tokens of one row are computed like as many rows that have the same keys and values.

    Other models, RoPE whose base depends on the length, and caches that hold nothing yet or wait for padding run the
    model itself.

    The projections of a layer that have the same input are fused (`Decoder.fuse`). Weights may be replaced at any time;
    those of the last step stay in memory until the next step, or as long as this object.

    Attributes:
        model: `model(tokens, cache=None) -> logits`, evaluated, as `generation.load` returns it.
        process_group: The processes that share the model.
        hidden_states: Those of the last call after the final norm, `[B, hidden]`; None for a model of mlx_lm's classes.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.process_group: ProcessGroup = getattr(model, "process_group", None) or ProcessGroup()
        self.hidden_states: mx.array | None = None
        # Every (container, key, value) in the tree of the model's modules, as three lists.
        self._tree: tuple[Sequence[Any], Sequence[Any], Sequence[Any]] = ((), (), ())
        self._windows: list[int | None] = []
        # For each layout, the compiled step, or how many steps ran without. Least recently used first.
        self._steps: OrderedDict[_Layout, Step | int] = OrderedDict()
        self._supported: dict[tuple[Any, ...], bool] = {}
        self._differs = False  # whether a step of mlx_lm's model had other logits than the model

    def __call__(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Read one token per row, and append it to the caches.

        Args:
            tokens: int32 `[B, 1]`, or `[1, T]`. The inputs of an `MTPModule` have another axis.
            caches: Those of `mlxlm.cache.make_cache`, with the same B.

        Returns:
            Logits `[B, V]` or `[T, V]`, not evaluated.
        """
        count = tokens.shape[1]
        if not self._can_compile(caches, count):
            return self._run_model(tokens, caches)
        if not self._has_same_weights():
            self._fuse()
        is_decoder = isinstance(self.model, _DECODERS)
        layout, state = _describe(caches, self._windows if is_decoder else list(map(_window, caches)), count)
        before = [cache.step_arrays for cache in caches]
        arrays = [array for own in before for array in own]
        is_new = self._steps.get(layout, 0) in (0, _STEPS_BEFORE_TRACE)  # runs, or is compiled, for the first time
        step, inputs = self._step(layout, caches), (tokens, mx.array(state, mx.int32), *arrays)
        logits, *arrays = self._compare(step, inputs, caches) if is_new and not is_decoder else step(*inputs)
        rest = iter(arrays)
        self.hidden_states = next(rest) if is_decoder else None
        for cache, own in zip(caches, before, strict=True):
            cache.end_step(list(islice(rest, len(own))))
        return logits

    def _run_model(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        if not isinstance(self.model, _DECODERS):
            return self.model(tokens, cache=caches).flatten(0, 1)
        logits, self.hidden_states = (x.flatten(0, 1) for x in self.model.decode(tokens, caches))
        return logits

    def raise_if_fatal(self, error: Exception) -> None:
        """Raise an error of a forward pass that doesn't end the texts of this pass alone.

        With results that are lost, or on one of several processes, which can't take the next step with the others.
        """
        raise_if_results_lost(error)
        if self.process_group.size > 1 and not isinstance(error, MlxlmError):
            raise error

    def _can_compile(self, caches: Sequence[Any], count: int = 1) -> bool:
        model = self.model
        if not isinstance(model, _DECODERS):
            known = isinstance(model, nn.Module) and all(
                isinstance(cache, MlxLmKVCache | MlxLmRecurrentCache) and cache.can_step for cache in caches
            )
            return known and count == 1 and not self._differs and not model.training
        if model.training:
            return False
        if not all(type(cache) in (KVCache, RecurrentCache) and cache.can_step for cache in caches):
            return False
        own = [cache for cache in caches if isinstance(cache, KVCache)]
        if count > 1 and len(own) < len(caches):
            return False  # a recurrent layer reads its tokens one after another
        key = mode(), tuple((cache.key_bits, cache.value_bits) for cache in own), own[0].buffers[0].dtype
        if key not in self._supported:
            self._supported[key] = _is_supported(model, caches)
        # A position beyond a table of embeddings is an error of the model.
        positions = model.config.positions
        return self._supported[key] and (
            positions in ("rope", "alibi", "none")
            or max(own[0].offsets) + count <= model.config.max_position_embeddings
        )  # fmt: skip

    def _has_same_weights(self) -> bool:
        """Whether all modules and weights are those of the last call of `_fuse`."""
        return bool(self._tree[0]) and all(map(is_, map(getitem, *self._tree[:2]), self._tree[2]))

    def _fuse(self) -> None:
        """Fuse the weights of a decoder, and forget what was compiled with others."""
        if isinstance(self.model, _DECODERS):
            self.model.fuse()
            self._windows = [getattr(layer.mixer, "window", None) for layer in self.model.layers]
        mx.eval(self.model.parameters())  # what is not evaluated would be computed again in each step
        containers, keys, values = zip(*_tree_items(self.model), strict=True)
        self._tree = containers, keys, values
        self._steps.clear()

    def _compare(self, step: Step, inputs: Sequence[mx.array], caches: Sequence[Any]) -> list[mx.array]:
        """Run a step of mlx_lm's model and the model itself. Return the results of the model if they differ."""
        copies = [cache.copy() for cache in caches]
        expected = self.model(inputs[0], cache=copies)[:, -1]
        try:
            results = step(*inputs)
            difference = mx.abs(results[0] - expected).max() / mx.std(expected)
            is_close = difference.item() < (1e-3 if expected.dtype == mx.float32 else 0.05)
            if is_close and self._has_same_weights():
                return results
            problem = "it replaces its weights" if is_close else "its logits would differ"
        except Exception as error:  # whatever its code raises for positions that aren't Python numbers
            problem = str(error)
        logger.info("%s decodes without a compiled step: %s", getattr(self.model, "model_type", "this model"), problem)
        self._differs = True
        return [expected, *(array for cache in copies for array in cache.step_arrays)]

    def _step(self, layout: _Layout, caches: Sequence[KVCache | RecurrentCache]) -> Step:
        """Return the function for a layout: compiled at once for one token of a decoder, else after a few uses."""
        is_decoder = isinstance(self.model, _DECODERS)
        entry = self._steps.pop(layout, 0)
        if isinstance(entry, int):
            step = _make_step(self.model, layout, [(type(cache), _form(cache)) for cache in caches])
            compiled = (is_decoder and layout[:2] == (1, 1)) or entry >= _STEPS_BEFORE_TRACE
            if compiled:
                step = mx.compile(step)
            self._steps[layout] = step if compiled else entry + 1
            if len(self._steps) > _MAX_LAYOUTS:
                self._steps.popitem(last=False)
            return step
        self._steps[layout] = entry
        return entry


# What is fixed in a trace about the cache of a layer: index of the group of layers with the same positions; the first
# position that attention reads, and the one after the last; capacity of the buffers; bits of keys and of values; the
# sliding window.
_LayerLayout = tuple[int, int, int, int, int | None, int | None, int | None]
# Rows, tokens of each, kernel mode, layers (None: recurrent).
_Layout = tuple[int, int, str, tuple[_LayerLayout | None, ...]]
# The quantization of keys and of values; or the number of arrays of a recurrent layer.
_Form = list[tuple[int, int] | None] | int


def _describe(
    caches: Sequence[KVCache | RecurrentCache], windows: Sequence[int | None], count: int
) -> tuple[_Layout, list[int]]:
    """Make room for `count` tokens per row. Return the layout, and what changes with each step as numbers.

    The numbers are the position in the text of each row's next token, followed by those of each group of layers: the
    position in the buffers, and that of the first token of each row.
    """
    groups: dict[tuple[int, ...], int] = {}
    spans: dict[tuple[int, int, int | None], tuple[int, int]] = {}
    layers: list[_LayerLayout | None] = []
    for cache, window in zip(caches, windows, strict=False):  # the last layers may have no caches
        if isinstance(cache, RecurrentCache):
            cache.begin_step()
            layers.append(None)
            continue
        end, starts, capacity = cache.begin_step(count)
        group = groups.setdefault((end, *starts), len(groups))
        span = spans.get((group, capacity, window))
        if span is None:
            first = min(starts) if window is None else max(min(starts), end + 1 - window)
            span = spans[group, capacity, window] = first // STEP * STEP, min(capacity, round_length(end + count))
        layers.append((group, *span, capacity, cache.key_bits, cache.value_bits, window))
    rows = caches[0].rows
    offsets = next((cache.offsets for cache in caches if isinstance(cache, KVCache)), [0] * rows)
    return (rows, count, mode(), tuple(layers)), [*offsets, *(n for group in groups for n in group)]


class LayerStep:
    """The key-value cache of one layer inside of a step. That of a recurrent layer is the list of its arrays.

    B is the number of rows, or that of tokens of the only row.

    Attributes:
        offset: Position of each token, int32 `[B]`.
        buffers: Those of keys and of values.
    """

    def __init__(self, shared: _Positions, layout: _LayerLayout, buffers: list[KVBuffer]):
        self._shared, self.buffers = shared, buffers
        self._group, self._first, self._end, *_, self._window = layout
        self.offset = shared.offset
        self._chunk: int | None = None

    def in_chunk(self, size: int) -> Self:
        """The same cache, of which a row sees only the chunk of `size` positions that its token is in."""
        other = copy(self)
        other._chunk = size
        return other

    def angles(self, rope: RotaryEmbedding, dtype: mx.Dtype) -> mx.array | tuple[mx.array, mx.array]:
        """Return `rope.angles` at the rows' positions, computed once for all layers with the same base."""
        return self._shared.once(("angles", rope.kind, dtype), lambda: rope.angles(self.offset, dtype))

    def temperatures(self, temperature: QueryTemperature) -> mx.array:
        """Return the factors of `temperature` at the rows' positions, `[B, 1, 1, 1]`, computed once for all layers."""
        return self._shared.once(("temperatures", temperature), lambda: temperature(self.offset[:, None]))

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array | QuantizedKV, mx.array | QuantizedKV]:
        """Write keys and values `[B, H_kv, 1, D]`; return the part of the buffers that attention reads."""
        index, sides = self._shared.indices[self._group], (keys, values)
        if self._shared.count > 1:
            sides = keys.swapaxes(0, 2), values.swapaxes(0, 2)
        pairs = zip(self.buffers, sides, strict=True)
        self.buffers = [buffer.with_position(index, x) for buffer, x in pairs]
        return self.fetch()

    def fetch(self) -> tuple[mx.array | QuantizedKV, mx.array | QuantizedKV]:
        """Return the part of the buffers that attention reads, after the update of this step."""
        key_buffer, value_buffer = (buffer.repeated(self._shared.count) for buffer in self.buffers)
        return key_buffer.read(self._first, self._end), value_buffer.read(self._first, self._end)

    def __iter__(self) -> Iterator[mx.array]:
        """Iterate over the arrays of the buffers."""
        return (array for buffer in self.buffers for array in buffer.arrays)

    @property
    def ranges(self) -> mx.array:
        """The first key of each row, and the one after its last, int32 `[B, 2]`."""

        def compute() -> mx.array:
            ranges = mx.stack(mx.broadcast_arrays(self._starts, self._shared.ends[self._group] + 1), axis=1)
            return mx.maximum(ranges - self._first, 0)

        return self._once("ranges", compute)

    @property
    def distances(self) -> mx.array:
        """Return key position minus query position, int32 `[S]`; of several queries of a row, that of the first."""
        return self._once("distances", lambda: self._indices() - self._shared.indices[self._group])

    def mask(self, window: int | None, heads: int = 1) -> mx.array:
        """Return which keys each row sees, bool `[B, heads, 1, S]`."""

        def compute() -> mx.array:
            indices, end = self._indices(), self._shared.ends[self._group][:, None]
            visible = (indices <= end) & (indices >= self._starts[:, None])
            if window is not None:
                visible = visible & (indices > end - window)
            visible = visible[:, None, None]
            return visible if heads == 1 else mx.contiguous(mx.repeat(visible, heads, axis=1))

        return self._once("mask", compute, window, heads)

    @property
    def _starts(self) -> mx.array:
        starts = self._shared.starts[self._group]
        if self._chunk is None:
            return starts
        return mx.maximum(starts, self._shared.ends[self._group] - self.offset % self._chunk)

    def _indices(self) -> mx.array:
        return mx.arange(self._first, self._end, dtype=mx.int32)

    def _once(self, name: str, compute: Callable[[], mx.array], *arguments: int | None) -> mx.array:
        return self._shared.once((name, self._group, self._first, self._end, self._chunk, *arguments), compute)


class MlxLmLayerStep(MlxLmKeysAndValues, LayerStep):
    """The same for models of mlx_lm's classes."""

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        """Make the mask of the one new position of each row, bool `[B, 1, 1, S]`."""
        return self.mask(window_size or self._window)


class QuantizedMlxLmLayerStep(PackedKeysAndValues, MlxLmLayerStep):
    """The same for attention that multiplies quantized keys and values."""


_LAYER_STEPS: dict[type, type[LayerStep]] = {
    KVCache: LayerStep,
    MlxLmKVCache: MlxLmLayerStep,
    QuantizedMlxLmKVCache: QuantizedMlxLmLayerStep,
}


class _Positions:
    """The positions of a step as arrays, and what layers compute from them alike.

    Attributes:
        count: Tokens of each row.
        offset: Position of each token in its text, int32 `[B]`.
        indices: For each group of layers, the index of the first new token in the buffers, int32 `[1]`.
        ends: That of the last key that a token sees, its own, int32 `[1]`; `[B]` for several tokens of a row.
        starts: That of the first token of each row.
    """

    def __init__(self, rows: int, count: int, state: mx.array):
        self.count, numbers = count, range(rows, state.shape[0], 1 + rows)
        self.indices = [state[i : i + 1] for i in numbers]
        self.starts = [state[i + 1 : i + 1 + rows] for i in numbers]
        self.offset, self.ends = state[:rows], self.indices
        if count > 1:
            following = mx.arange(count, dtype=mx.int32)
            self.offset, self.ends = self.offset + following, [index + following for index in self.indices]
        self._results: dict[tuple[Any, ...], Any] = {}

    def once(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Return the result of the first call with this key."""
        if key not in self._results:
            self._results[key] = compute()
        return self._results[key]


def _form(cache: KVCache | RecurrentCache) -> _Form:
    if isinstance(cache, RecurrentCache):
        return len(cache.step_arrays)
    return [buffer.quantization for buffer in cache.buffers]


def _window(cache: KVCache | RecurrentCache) -> int | None:
    return cache.window.size if isinstance(cache, KVCache) and cache.window is not None else None


def _recurrent_state(kind: type, arrays: list[mx.array]) -> Any:
    """The cache of a recurrent layer of mlx_lm's model, with these arrays."""
    state = kind([None] * len(arrays))
    state.end_step(arrays)
    return state


def _make_step(model: nn.Module, layout: _Layout, forms: Sequence[tuple[type, _Form]]) -> Step:
    """Return the function of tokens, positions and the arrays of all caches: logits, and the new arrays.

    Between them, that of a `Decoder` returns the hidden states.
    """
    rows, count, _, layers = layout

    def step(tokens: mx.array, state: mx.array, *arrays: mx.array) -> list[mx.array]:
        positions, rest = _Positions(rows, count, state), iter(arrays)
        caches: list[Any] = []
        for layer, (kind, form) in zip(layers, forms, strict=True):
            if isinstance(form, int):
                own = list(islice(rest, form))
                caches.append(own if kind is RecurrentCache else _recurrent_state(kind, own))
            elif layer is not None:
                buffers = [KVBuffer(list(islice(rest, 1 if side is None else 3)), side) for side in form]
                caches.append(_LAYER_STEPS[kind](positions, layer, buffers))
        if isinstance(model, _DECODERS):
            results = list(model.decode(tokens.flatten(0, 1), caches))
        else:
            results = [model(tokens, cache=caches)[:, -1]]
        return [*results, *(array for cache in caches for array in cache)]

    return step


def _is_supported(model: Decoder | MTPModule, caches: Sequence[KVCache | RecurrentCache]) -> bool:
    """Whether a step of these caches can be compiled."""
    return all(
        isinstance(cache, RecurrentCache)
        or layer.mixer.can_decode(cache.buffers[0].dtype, [buffer.quantization for buffer in cache.buffers])
        for layer, cache in zip(model.layers, caches, strict=False)  # the last layers may have no caches
    )


def _tree_items(container: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield all (container, key, value) of modules, lists and arrays."""
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        yield container, key, value
        if isinstance(value, dict | list | tuple):
            yield from _tree_items(value)
