"""One decoding step of a model: the next token of each row in, logits out; compiled where that is possible.

Building the graph of a token in Python takes longer than a GPU needs to read the weights of a small model. A compiled
function builds it without Python, but has fixed shapes: keys and values are written at an index that is an array, and
attention reads a fixed part of the buffers, with a mask for the positions in use. A new function is only traced when
the buffers grow or that part moves, every 256 tokens or more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from operator import getitem, is_
from typing import Any

from mlxlm.backend.error_text import raise_if_results_lost
from mlxlm.backend.mlx import mx, nn
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.cache.kv_buffer import KVBuffer
from mlxlm.cache.kv_cache import STEP, KVCache, round_length
from mlxlm.kernels import QuantizedKV, prepare_masked_attention
from mlxlm.kernels.dispatch import mode
from mlxlm.model import Decoder
from mlxlm.model.positions import RotaryEmbedding
from mlxlm.utils.errors import MlxlmError

_MAX_LAYOUTS = 32  # a trace takes about 40 kB per layer
# Tracing takes as long as several steps without, so that a batch that changes with every step should not be traced.
_STEPS_BEFORE_TRACE = 3

Step = Callable[..., list[mx.array]]


class DecodeStep:
    """Computes the logits of the next token, like `model(tokens, cache=caches)[:, -1]`.

    A `Decoder` with its own caches always runs the same operations, whether they are compiled or not. The logits are
    those of the model up to rounding: a BLAS can sum products with further zeros in another order.

    Other models, RoPE whose base depends on the length, and caches that hold nothing yet or wait for padding run the
    model itself.

    The projections of a layer that have the same input are fused (`Decoder.fuse`). Weights may be replaced at any time;
    those of the last step stay in memory until the next step, or as long as this object.

    Attributes:
        model: `model(tokens, cache=None) -> logits`, evaluated, as `generation.load` returns it.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        # Every (container, key, value) in the tree of the model's modules, as three lists.
        self._tree: tuple[Sequence[Any], Sequence[Any], Sequence[Any]] = ((), (), ())
        self._windows: list[int | None] = []
        # For each layout, the compiled step, or how many steps ran without. Least recently used first.
        self._steps: OrderedDict[_Layout, Step | int] = OrderedDict()
        self._supported: dict[tuple[Any, ...], bool] = {}

    def __call__(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Read one token per row, and append it to the caches.

        Args:
            tokens: int32 `[B, 1]`.
            caches: One per layer, with the same B.

        Returns:
            Logits `[B, V]`, not evaluated.
        """
        if not self._can_compile(caches):
            return self.model(tokens, cache=caches)[:, -1]
        if not self._windows or not all(map(is_, map(getitem, *self._tree[:2]), self._tree[2])):
            self._fuse()
        layout, state = _describe(caches, self._windows)
        arrays = [array for cache in caches for buffer in cache.buffers for array in buffer.arrays]
        logits, *arrays = self._step(layout, caches)(tokens, mx.array(state, mx.int32), *arrays)
        rest = iter(arrays)
        for cache in caches:
            cache.end_step([KVBuffer([next(rest) for _ in b.arrays], b.quantization) for b in cache.buffers])
        return logits

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that share the model."""
        return getattr(self.model, "process_group", None) or ProcessGroup()

    def raise_if_fatal(self, error: Exception) -> None:
        """Raise an error of a forward pass that doesn't end the texts of this pass alone.

        With results that are lost, or on one of several processes, which can't take the next step with the others.
        """
        raise_if_results_lost(error)
        if self.process_group.size > 1 and not isinstance(error, MlxlmError):
            raise error

    def _can_compile(self, caches: Sequence[Any]) -> bool:
        model = self.model
        if not isinstance(model, Decoder) or model.training:
            return False
        if not all(type(cache) is KVCache and cache.can_step for cache in caches):
            return False
        key = mode(), tuple((cache.key_bits, cache.value_bits) for cache in caches), caches[0].buffers[0].dtype
        if key not in self._supported:
            self._supported[key] = _is_supported(model, caches)
        # A position beyond a table of embeddings is an error of the model.
        positions = model.config.positions
        return self._supported[key] and (
            positions in ("rope", "alibi", "none")
            or max(caches[0].offsets) < model.config.max_position_embeddings
        )  # fmt: skip

    def _fuse(self) -> None:
        """Fuse the weights, and forget what was compiled with others."""
        self.model.fuse()
        mx.eval(self.model.parameters())  # what is not evaluated would be computed again in each step
        containers, keys, values = zip(*_tree_items(self.model), strict=True)
        self._tree = containers, keys, values
        self._windows = [layer.mixer.window for layer in self.model.layers]
        self._steps.clear()

    def _step(self, layout: _Layout, caches: Sequence[KVCache]) -> Step:
        """Return the function for a layout: compiled for one row, and for several when it has been used a few times."""
        entry = self._steps.pop(layout, 0)
        if isinstance(entry, int):
            forms = [[buffer.quantization for buffer in cache.buffers] for cache in caches]
            step = _make_step(self.model, layout, forms)
            compiled = caches[0].rows == 1 or entry >= _STEPS_BEFORE_TRACE
            if compiled:
                step = mx.compile(step)
            self._steps[layout] = step if compiled else entry + 1
            if len(self._steps) > _MAX_LAYOUTS:
                self._steps.popitem(last=False)
            return step
        self._steps[layout] = entry
        return entry


# What is fixed in a trace about the cache of a layer: index of the group of layers with the same positions; the first
# position that attention reads, and the one after the last; capacity of the buffers; bits of keys and of values.
_LayerLayout = tuple[int, int, int, int, int | None, int | None]
_Layout = tuple[str, int, tuple[_LayerLayout, ...]]  # kernel mode, rows, layers


def _describe(caches: Sequence[KVCache], windows: Sequence[int | None]) -> tuple[_Layout, list[int]]:
    """Make room for a token. Return the layout, and what changes with each token as numbers.

    The numbers are the position in the text of each row's token, followed by those of each group of layers: the
    position in the buffers, and that of the first token of each row.
    """
    groups: dict[tuple[int, ...], int] = {}
    spans: dict[tuple[int, int, int | None], tuple[int, int]] = {}
    layers = []
    for cache, window in zip(caches, windows, strict=True):
        end, starts, capacity = cache.begin_step()
        group = groups.setdefault((end, *starts), len(groups))
        span = spans.get((group, capacity, window))
        if span is None:
            first = min(starts) if window is None else max(min(starts), end + 1 - window)
            span = spans[group, capacity, window] = first // STEP * STEP, min(capacity, round_length(end + 1))
        layers.append((group, *span, capacity, cache.key_bits, cache.value_bits))
    return (mode(), caches[0].rows, tuple(layers)), [*caches[0].offsets, *(n for group in groups for n in group)]


class LayerStep:
    """The cache of one layer inside of a step.

    Attributes:
        offset: Position of each row's token, int32 `[B]`.
        buffers: Those of keys and of values.
    """

    def __init__(self, shared: _Positions, layout: _LayerLayout, buffers: list[KVBuffer]):
        self._shared, self.buffers = shared, buffers
        self._group, self._first, self._last, *_ = layout
        self.offset = shared.offset

    def angles(self, rope: RotaryEmbedding, dtype: mx.Dtype) -> mx.array | tuple[mx.array, mx.array]:
        """Return `rope.angles` at the rows' positions, computed once for all layers with the same base."""
        return self._shared.once(("angles", rope.is_local, dtype), lambda: rope.angles(self.offset, dtype))

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array | QuantizedKV, mx.array | QuantizedKV]:
        """Write keys and values `[B, H_kv, 1, D]`; return the part of the buffers that attention reads."""
        index = self._shared.ends[self._group]
        pairs = zip(self.buffers, (keys, values), strict=True)
        self.buffers = [buffer.with_position(index, x) for buffer, x in pairs]
        key_buffer, value_buffer = self.buffers
        return key_buffer.read(self._first, self._last), value_buffer.read(self._first, self._last)

    @property
    def ranges(self) -> mx.array:
        """The first key of each row, and the one after its last, int32 `[B, 2]`."""

        def compute() -> mx.array:
            starts, end = self._shared.starts[self._group], self._shared.ends[self._group]
            ranges = mx.stack([starts, mx.broadcast_to(end + 1, starts.shape)], axis=1)
            return mx.maximum(ranges - self._first, 0)

        return self._once("ranges", compute)

    @property
    def distances(self) -> mx.array:
        """Return key position minus query position, int32 `[S]`."""
        return self._once("distances", lambda: self._indices() - self._shared.ends[self._group])

    def mask(self, window: int | None, heads: int = 1) -> mx.array:
        """Return which keys each row sees, bool `[B, heads, 1, S]`."""

        def compute() -> mx.array:
            indices, end = self._indices(), self._shared.ends[self._group]
            visible = (indices <= end) & (indices >= self._shared.starts[self._group][:, None])
            if window is not None:
                visible = visible & (indices > end - window)
            visible = visible[:, None, None]
            return visible if heads == 1 else mx.contiguous(mx.repeat(visible, heads, axis=1))

        return self._once("mask", compute, window, heads)

    def _indices(self) -> mx.array:
        return mx.arange(self._first, self._last, dtype=mx.int32)

    def _once(self, name: str, compute: Callable[[], mx.array], *arguments: int | None) -> mx.array:
        return self._shared.once((name, self._group, self._first, self._last, *arguments), compute)


class _Positions:
    """The positions of a step as arrays, and what layers compute from them alike."""

    def __init__(self, rows: int, state: mx.array):
        self.offset = state[:rows]
        numbers = range(rows, state.shape[0], 1 + rows)
        self.ends = [state[i : i + 1] for i in numbers]
        self.starts = [state[i + 1 : i + 1 + rows] for i in numbers]
        self._results: dict[tuple[Any, ...], Any] = {}

    def once(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Return the result of the first call with this key."""
        if key not in self._results:
            self._results[key] = compute()
        return self._results[key]


def _make_step(model: Decoder, layout: _Layout, forms: Sequence[Sequence[tuple[int, int] | None]]) -> Step:
    """Return the function of tokens, positions and the arrays of all caches: logits, and the new arrays."""
    _, rows, layers = layout

    def step(tokens: mx.array, state: mx.array, *arrays: mx.array) -> list[mx.array]:
        positions, rest = _Positions(rows, state), iter(arrays)
        caches = []
        for layer, sides in zip(layers, forms, strict=True):
            buffers = [KVBuffer([next(rest) for _ in range(1 if form is None else 3)], form) for form in sides]
            caches.append(LayerStep(positions, layer, buffers))
        logits = model.decode(tokens[:, 0], caches)
        return [logits, *(array for cache in caches for buffer in cache.buffers for array in buffer.arrays)]

    return step


def _is_supported(model: Decoder, caches: Sequence[KVCache]) -> bool:
    """Whether a step of these caches can be compiled."""
    for layer, cache in zip(model.layers, caches, strict=True):
        attention = layer.mixer
        if attention.rope is not None and attention.rope.varies:  # its base depends on the length
            return False
        forms = [buffer.quantization or (0, 0) for buffer in cache.buffers]
        quantization = {}
        if any(bits for bits, _ in forms):
            (key_bits, key_group), (value_bits, value_group) = forms
            quantization = {"group_size": key_group or value_group, "key_bits": key_bits, "value_bits": value_bits}
        options = {"window": attention.window, "softcap": attention.softcap, "slopes": attention._slopes}
        features = tuple(name for name, value in options.items() if value is not None)
        queries = attention.head_dim, attention.heads, cache.buffers[0].dtype
        if not prepare_masked_attention(queries, attention.kv_heads, features, **quantization):
            return False
    return True


def _tree_items(container: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield all (container, key, value) of modules, lists and arrays."""
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        yield container, key, value
        if isinstance(value, dict | list | tuple):
            yield from _tree_items(value)
