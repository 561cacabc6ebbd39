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
        layer: Index of the layer, which decides whether it has a sliding window.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        h, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, d
        self.scale = (config.query_pre_attn_scalar or d) ** -0.5
        self.window, self.chunk = config.window(layer), config.chunk(layer)
        self.softcap = None if config.attn_logit_softcapping is None else float(config.attn_logit_softcapping)
        out_bias = bias if config.attention_out_bias is None else config.attention_out_bias
        self.q_proj = Linear(h, self.heads * d, bias=bias)
        self.k_proj = Linear(h, self.kv_heads * d, bias=bias)
        self.v_proj = Linear(h, self.kv_heads * d, bias=bias)
        self.o_proj = Linear(self.heads * d, h, bias=out_bias)
        if config.attn_output_gate:
            self.gate_proj = Linear(h, self.heads * d, bias=bias)
        if config.attention_sinks:
            self.sinks = mx.zeros(self.heads)
        self.qk_norm, self.clip = config.qk_norm, config.clip_qkv
        self.eps = float(config.rms_norm_eps)
        if self.qk_norm == "l2" and not config.has_rope(layer):
            self.qk_norm = None
        elif self.qk_norm not in (None, "l2"):
            self.q_norm, self.k_norm = make_qk_norm(config, self.heads), make_qk_norm(config, self.kv_heads)
        is_local = self.window is not None and config.rope_local_base_freq is not None
        self.rope = RotaryEmbedding(config, is_local) if config.has_rope(layer) else None
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
        gate = [self.gate_proj] if "gate_proj" in self else []
        return {"inputs": [self.q_proj, self.k_proj, self.v_proj, *gate], "output": [self.o_proj]}

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
            projected, gate = mx.split(projected, [(self.heads + 2 * self.kv_heads) * self.head_dim], axis=-1)
        queries, keys, values = self.split_and_rotate(projected, angles)
        if self.temperature is not None:
            queries = queries * cache.temperatures(self.temperature).astype(queries.dtype)
        keys, values = cache.update_and_fetch(keys, values)
        visible = cache if self.chunk is None else cache.in_chunk(self.chunk)
        out = masked_attention(
            queries, keys, values, self.scale, visible,
            window=self.window, softcap=self.softcap, slopes=self._slopes, sinks=self.get("sinks"),
        )  # fmt: skip
        return self._fused.output(_gated(out.reshape(x.shape[0], self.heads * self.head_dim), gate))

    def split_and_rotate(self, projected: mx.array, angles: Any) -> tuple[mx.array, mx.array, mx.array]:
        """Return the queries, keys and values of one position per row, normalized and rotated.

        Args:
            projected: `[B, (H + 2·H_kv) · D]`.
            angles: The result of `RotaryEmbedding.angles`, if there are rotary embeddings.

        Returns:
            Queries `[B, H, 1, D]`, and keys and values `[B, H_kv, 1, D]`.
        """
        H, K, D = self.heads, self.kv_heads, self.head_dim
        if self.qk_norm == "projection":
            queries, keys, values = mx.split(projected, [H * D, (H + K) * D], axis=-1)
            projected = mx.concatenate([*self._norm_projections(queries, keys), values], axis=-1)
        heads = self._clipped(projected).reshape(-1, H + 2 * K, 1, D)
        norms = None
        if self.qk_norm == "head":
            norms = self.q_norm.scale, self.k_norm.scale
        elif self.qk_norm == "l2":
            norms = (_ones(D, heads.dtype),) * 2
        elif self.qk_norm in ("layer", "layer_per_head"):
            queries, keys, values = mx.split(heads, [H, H + K], axis=1)
            heads = mx.concatenate([self.q_norm(queries), self.k_norm(keys), values], axis=1)
        rope, scale = (None, None) if self.rope is None else (self.rope.fixed, self.rope.query_scale)
        queries, keys, values = qk_norm_rope(heads, H, norms, self.eps, rope, angles)
        return queries if scale is None else queries * scale.astype(queries.dtype), keys, values

    def __call__(self, x: mx.array, cache: Any = None, segment_ids: mx.array | None = None) -> mx.array:
        """Apply attention.

        Args:
            x: `[B, T, hidden]`.
            cache: A key-value cache, which is advanced by T positions.
            segment_ids: int `[B, T]`, the document of each position in packed rows. A position attends only to its own
                document. Not with a cache.

        Returns:
            `[B, T, hidden]`.
        """
        if x.ndim == 2:
            return self.decode(x, cache)
        B, T, _ = x.shape

        def split(y: mx.array, heads: int) -> mx.array:
            return y.reshape(B, T, heads, self.head_dim).swapaxes(1, 2)

        queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm == "projection":
            queries, keys = self._norm_projections(queries, keys)
        queries, keys, values = map(self._clipped, (queries, keys, values))
        queries, keys, values = split(queries, self.heads), split(keys, self.kv_heads), split(values, self.kv_heads)
        if self.qk_norm == "l2":
            queries, keys = (mx.fast.rms_norm(x, None, self.eps) for x in (queries, keys))
        elif self.qk_norm not in (None, "projection"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if self.rope is not None:
            queries, keys = self.rope(queries, keys, cache)
        needs_positions = self.temperature is not None or self.chunk is not None
        offset = cache.offset if needs_positions and cache is not None else 0
        if self.temperature is not None:
            positions = position_ids(offset, T) if segment_ids is None else packed_position_ids(segment_ids)
            queries = queries * self.temperature(positions).astype(queries.dtype)
        first = None
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
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
