"""The attention sublayer."""

from __future__ import annotations

from functools import cache
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.config import ModelConfig
from mlxlm.kernels import attention, masked_attention, prepare_masked_attention, qk_norm_rope
from mlxlm.model.linear import FusedProjections, Linear
from mlxlm.model.norms import make_qk_norm, split_rms_norm
from mlxlm.model.positions import (
    QueryTemperature,
    RotaryEmbedding,
    alibi_slopes,
    packed_position_ids,
    position_ids,
)


class Attention(FusedProjections):
    """Grouped-query self-attention (Ainslie et al. 2023).

    Args:
        config: The model's configuration.
        layer: Index of the layer, which decides whether it has a sliding window, and keys and values of its own.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        h, d, bias = config.hidden_size, config.layer_head_dim(layer), config.attention_bias
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.layer_kv_heads(layer), d
        self.shares_kv, has_v_proj = config.shares_kv(layer), config.has_v_proj(layer)
        self.scale = (config.query_pre_attn_scalar or d) ** -0.5
        self.window, self.chunk = config.window(layer), config.chunk(layer)
        self.softcap = None if config.attn_logit_softcapping is None else float(config.attn_logit_softcapping)
        out_bias = bias if config.attention_out_bias is None else config.attention_out_bias
        self.q_proj = Linear(h, self.heads * d, bias=bias)
        if not self.shares_kv:
            self.k_proj = Linear(h, self.kv_heads * d, bias=bias)
        if has_v_proj:
            self.v_proj = Linear(h, self.kv_heads * d, bias=bias)
        self.o_proj = Linear(self.heads * d, h, bias=out_bias)
        if config.attn_output_gate:
            self.gate_proj = Linear(h, self.heads * d, bias=bias)
        if config.attention_sinks:
            self.sinks = mx.zeros(self.heads)
        self.qk_norm, self.value_norm, self.clip = config.qk_norm, config.value_norm, config.clip_qkv
        self.eps = float(config.rms_norm_eps)
        if self.qk_norm == "l2" and not config.has_rope(layer):
            self.qk_norm = None
        elif self.qk_norm not in (None, "l2"):
            self.q_norm = make_qk_norm(config, self.heads, d)
            if not self.shares_kv:
                self.k_norm = make_qk_norm(config, self.kv_heads, d)
        self.rope = RotaryEmbedding(config, layer) if config.has_rope(layer) else None
        self.temperature = QueryTemperature.of(config, layer)
        self._slopes = None  # not a parameter: MLX skips names that begin with an underscore
        self._slope_scale = self.scale if config.alibi_scaled else 1.0
        if config.positions == "alibi":
            self._slopes = alibi_slopes(self.heads, self._slope_scale)
        self._process_group: ProcessGroup | None = None  # see `split`

    def split(self, process_group: ProcessGroup, whole: ModelConfig) -> None:
        """Have the part of the heads that this process has: each head keeps its ALiBi slope."""
        self._process_group, rank = process_group, process_group.rank
        if self._slopes is not None:
            slopes = alibi_slopes(process_group.size * self.heads, self._slope_scale)
            self._slopes = slopes[rank * self.heads : (rank + 1) * self.heads]

    def _projections(self) -> dict[str, list[nn.Module]]:
        inputs = [self[name] for name in ("q_proj", "k_proj", "v_proj", "gate_proj") if name in self]
        return {"inputs": inputs, "output": [self.o_proj]}

    @property
    def projected_heads(self) -> tuple[int, int, int]:
        """Number of heads of queries, of keys and of values that the layer projects."""
        return self.heads, self.kv_heads * ("k_proj" in self), self.kv_heads * ("v_proj" in self)

    def can_decode(self, dtype: mx.Dtype, forms: list[tuple[int, int] | None]) -> bool:
        """Whether `decode` supports a cache, after checks of the kernels that it uses for the first time.

        Args:
            dtype: Of the cache, before quantization.
            forms: Bits and group size of its keys and of its values, None if they aren't quantized.
        """
        if self.rope is not None and self.rope.varies:  # its base depends on the length
            return False
        quantization = {}
        if any(forms):
            (key_bits, key_group), (value_bits, value_group) = (form or (0, 0) for form in forms)
            quantization = {"group_size": key_group or value_group, "key_bits": key_bits, "value_bits": value_bits}
        options = {"window": self.window, "softcap": self.softcap, "slopes": self._slopes, "sinks": self.get("sinks")}
        features = tuple(name for name, value in options.items() if value is not None)
        queries = self.head_dim, self.heads, dtype
        return prepare_masked_attention(queries, self.kv_heads, features, **quantization)

    def decode(self, x: mx.array, cache: Any) -> mx.array:
        """Apply attention to one position per row, after `fuse`.

        Args:
            x: `[B, hidden]`.
            cache: The layer's cache in a decoding step: see `mlxlm.generation.decode_step.LayerStep`.

        Returns:
            `[B, hidden]`.
        """
        angles = None if self.rope is None else cache.angles(self.rope, x.dtype)
        projected, gate = self._fused.inputs(x), None
        if "gate_proj" in self:
            projected, gate = mx.split(projected, [sum(self.projected_heads) * self.head_dim], axis=-1)
        queries, keys, values = self.split_and_rotate(projected, angles)
        if self.temperature is not None:
            queries = queries * cache.temperatures(self.temperature).astype(queries.dtype)
        keys, values = cache.fetch() if self.shares_kv else cache.update_and_fetch(keys, values)
        visible = cache if self.chunk is None else cache.in_chunk(self.chunk)
        out = masked_attention(
            queries, keys, values, self.scale, visible,
            window=self.window, softcap=self.softcap, slopes=self._slopes, sinks=self.get("sinks"),
        )  # fmt: skip
        return self._fused.output(_gated(out.reshape(x.shape[0], self.heads * self.head_dim), gate))

    def split_and_rotate(self, projected: mx.array, angles: Any) -> tuple[mx.array, mx.array, mx.array]:
        """Return the queries, keys and values of one position per row, normalized and rotated.

        Args:
            projected: `[B, N · D]`, where N is the sum of `projected_heads`.
            angles: The result of `RotaryEmbedding.angles`, if there are rotary embeddings.

        Returns:
            Queries `[B, H, 1, D]`, and keys and values `[B, H_kv, 1, D]`, which have no heads if they are shared.
        """
        (H, K, V), D = self.projected_heads, self.head_dim
        if self.qk_norm == "projection":
            queries, keys, values = mx.split(projected, [H * D, (H + K) * D], axis=-1)
            projected = mx.concatenate([*self._norm_projections(queries, keys), values], axis=-1)
        heads = self._clipped(projected).reshape(-1, H + K + V, 1, D)
        norms = None
        if self.qk_norm == "head":
            norms = self.q_norm.scale, (self.k_norm if K else self.q_norm).scale
        elif self.qk_norm == "l2":
            norms = (_ones(D, heads.dtype),) * 2
        elif self.qk_norm in ("layer", "layer_per_head"):
            queries, keys, values = mx.split(heads, [H, H + K], axis=1)
            heads = mx.concatenate([self.q_norm(queries), self.k_norm(keys), values], axis=1)
        rope, scale = (None, None) if self.rope is None else (self.rope.fixed, self.rope.query_scale)
        queries, keys = qk_norm_rope(heads, H, K, norms, self.eps, rope, angles)
        values = heads[:, H + K if V else H :]
        if self.value_norm and K:
            values = mx.fast.rms_norm(values, None, self.eps)
        return queries if scale is None else queries * scale.astype(queries.dtype), keys, values

    def __call__(self, x: mx.array, cache: Any = None, segment_ids: mx.array | None = None) -> mx.array:
        """Apply attention.

        Args:
            x: `[B, T, hidden]`.
            cache: A key-value cache, which is advanced by T positions. If the layer has no keys and values, that of the
                layer which has them, after that layer.
            segment_ids: int `[B, T]`, the document of each position in packed rows. A position attends only to its own
                document. Not with a cache.

        Returns:
            `[B, T, hidden]`.
        """
        if x.ndim == 2:
            return self.decode(x, cache)
        B, T, _ = x.shape
        queries, keys, values = self._project(x)
        offset = 0 if cache is None else cache.fetched_offset if self.shares_kv else cache.offset
        if self.rope is not None:
            queries, keys = self.rope(queries, keys, offset, cache)
        if self.temperature is not None:
            positions = position_ids(offset, T) if segment_ids is None else packed_position_ids(segment_ids)
            queries = queries * self.temperature(positions).astype(queries.dtype)
        first = None
        if cache is not None:
            keys, values = cache.fetch() if self.shares_kv else cache.update_and_fetch(keys, values)
            first = getattr(cache, "first", None)  # mlx_lm's caches don't have it
        if self.chunk is not None:
            segment_ids = _chunk_ids(self.chunk, offset + T - keys.shape[2], (B, keys.shape[2]), segment_ids)
        out = attention(
            queries, keys, values, self.scale,
            window=self.window, softcap=self.softcap, slopes=self._slopes, sinks=self.get("sinks"), first=first,
            segment_ids=segment_ids, training=self.training,
        )  # fmt: skip
        gate = self.gate_proj(x) if "gate_proj" in self else None
        return self.o_proj(_gated(out.swapaxes(1, 2).reshape(B, T, -1), gate))

    def _project(self, x: mx.array) -> tuple[mx.array, Any, Any]:
        """Return the normalized queries `[B, H, T, D]`, and keys and values `[B, H_kv, T, D]`; None if shared."""
        B, T, _ = x.shape
        projected = [self[name](x) for name in ("q_proj", "k_proj", "v_proj") if name in self]
        if self.qk_norm == "projection":
            projected[:2] = self._norm_projections(*projected[:2])
        queries, *others = (self._clipped(y).reshape(B, T, -1, self.head_dim).swapaxes(1, 2) for y in projected)
        if self.shares_kv:
            return self.q_norm(queries) if self.qk_norm else queries, None, None
        keys, values = others[0], others[-1]
        if self.qk_norm == "l2":
            queries, keys = (mx.fast.rms_norm(x, None, self.eps) for x in (queries, keys))
        elif self.qk_norm not in (None, "projection"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return queries, keys, mx.fast.rms_norm(values, None, self.eps) if self.value_norm else values

    def _norm_projections(self, queries: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Normalize over all heads, also those of other processes, which have the same number of queries and keys."""
        if self._process_group is None:
            return self.q_norm(queries), self.k_norm(keys)
        normalized = split_rms_norm([queries, keys], self.q_norm.eps, self._process_group)
        dtype, scales = queries.dtype, (self.q_norm.scale, self.k_norm.scale)
        queries, keys = ((x * scale).astype(dtype) for x, scale in zip(normalized, scales, strict=True))
        return queries, keys

    def _clipped(self, x: mx.array) -> mx.array:
        return x if self.clip is None else mx.clip(x, -self.clip, self.clip)


class KeysAndValues:
    """The cache of a forward pass without caches, in which other layers read the keys and values of a layer.

    Args:
        keys: `[B, H_kv, T, D]`.
        values: The same.
    """

    offset = fetched_offset = 0

    def __init__(self, keys: mx.array | None = None, values: mx.array | None = None):
        self._keys, self._values = keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Set keys and values."""
        self._keys, self._values = keys, values
        return keys, values

    def fetch(self) -> tuple[Any, Any]:
        """Return keys and values."""
        return self._keys, self._values


def _chunk_ids(size: int, first: int | mx.array, shape: tuple[int, int], segment_ids: mx.array | None) -> mx.array:
    """The chunk of each key, ascending int32 `[B, S]`; those of different documents differ.

    Args:
        size: Tokens of a chunk.
        first: Position of the first key, or int32 `[B]`.
        shape: B and S.
        segment_ids: See `Attention`.
    """
    if segment_ids is not None:
        return segment_ids * shape[1] + packed_position_ids(segment_ids) // size
    return mx.broadcast_to(mx.maximum(position_ids(first, shape[1]), 0) // size, shape)


@cache
def _ones(size: int, dtype: mx.Dtype) -> mx.array:
    ones = mx.ones(size, dtype)
    mx.eval(ones)
    return ones


def _gated(out: mx.array, gate: mx.array | None) -> mx.array:
    return out if gate is None else out * mx.sigmoid(gate)
