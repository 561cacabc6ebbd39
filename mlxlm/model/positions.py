"""Rotary position embeddings (RoPE) with their scalings, the temperature of queries, and ALiBi slopes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.config import ModelConfig
from mlxlm.config.rope_scaling import attention_factor, scaled_wavelengths
from mlxlm.kernels import RoPE
from mlxlm.utils.errors import GenerationError


class RotaryEmbedding:
    """Rotary position embeddings (Su et al. 2021) on the first `config.rotary_dims(layer)` dimensions of a head.

    Latent attention rotates neighboring dimensions, and vectors that have no others.

    RoPE scaling changes the wavelength of each pair of dimensions. "yarn" and "longrope" also multiply the rotated
    dimensions of queries and keys by a factor; here its square multiplies the queries, which gives the same scores. The
    formulas are in `mlxlm.config.rope_scaling`, in float64.

    "longrope" has other wavelengths, for all positions, in sequences longer than `config.longrope_original_length`.
    Cached keys can't change theirs, see `KVCache.long_factors`.

    Args:
        config: The model's configuration.
        layer: Index of the layer. One with a window has the base `config.rope_local_base_freq`, if that is set, and no
            scaling then.
    """

    def __init__(self, config: ModelConfig, layer: int = 0):
        local_base = None if config.window(layer) is None else config.rope_local_base_freq
        is_local, self.dims = local_base is not None, config.rotary_dims(layer)
        self.kind = is_local, self.dims  # the same in layers with the same angles
        self.base = float(local_base or config.rope_theta)
        self.longest = config.max_position_embeddings
        scaling = (None if is_local else config.rope_scaling) or {"rope_type": "default"}
        self.rope_type: str = scaling["rope_type"]
        self.scaling_factor: float = scaling.get("factor") or 1.0
        self.longrope_threshold = config.longrope_original_length or 0
        self.wavelengths = _array(scaled_wavelengths(self.base, self.dims, scaling))  # None: those of the base
        self.long_wavelengths = None
        if self.rope_type == "longrope":
            self.long_wavelengths = _array(scaled_wavelengths(self.base, self.dims, scaling, long=True))
        self.varies = self.rope_type in ("dynamic", "longrope")
        self.interleaved = config.kv_lora_rank is not None
        self.fixed = self._rotation(self.base if self.wavelengths is None else None, self.wavelengths)
        self._frequencies: mx.array | None = None  # 1 / wavelengths, of all tokens
        factor = attention_factor(scaling, self.longest)
        self.query_scale = None
        if factor != 1:
            others = 0 if config.kv_lora_rank is not None else config.layer_head_dim(layer) - self.dims
            self.query_scale = mx.array([factor**2] * self.dims + [1.0] * others)

    @property
    def can_shift_keys(self) -> bool:
        """Whether `shift_keys` works: not with "dynamic" scaling, which rotated earlier keys by another base."""
        return self.rope_type != "dynamic"

    def __call__(self, queries: mx.array, keys: Any, offset: int | mx.array, cache: Any) -> tuple[mx.array, Any]:
        """Rotate queries and keys `[B, H, T, D]`, or queries alone if `keys` is None.

        Args:
            queries: Those of T tokens.
            keys: Those of the same tokens.
            offset: Position of the first token, or int32 `[B]`.
            cache: The cache that the keys are for, or None.
        """
        rope = self._rope(offset, queries.shape[2], cache) if self.varies else self.fixed
        if self.query_scale is not None:
            queries = queries * self.query_scale.astype(queries.dtype)
        return rope.rotate(queries, offset), None if keys is None else rope.rotate(keys, offset)

    def angles(self, positions: mx.array, dtype: mx.Dtype) -> mx.array | tuple[mx.array, mx.array]:
        """Return what `qk_norm_rope` needs for one token per row, at `positions` int32 `[B]`.

        On a CPU, where MLX's RoPE computes cosines and sines anew in every call, these are cosines and sines.
        """
        if not ON_CPU:
            return positions
        if self._frequencies is None:
            half = self.dims // 2
            if self.wavelengths is None:  # in float32, as in MLX
                exponents = mx.arange(0, -half, -1, dtype=mx.float32) * float(np.log(np.float32(self.base)) / half)
                self._frequencies = mx.exp(exponents)
            else:
                self._frequencies = mx.reciprocal(self.wavelengths)
            mx.eval(self._frequencies)
        theta = positions.astype(mx.float32)[:, None] * self._frequencies
        cosines, sines = mx.cos(theta).astype(dtype), mx.sin(theta).astype(dtype)
        shape = (-1, 1, 2, self.dims // 2)
        return mx.concatenate([cosines, cosines], 1).reshape(shape), mx.concatenate([-sines, sines], 1).reshape(shape)

    def shift_keys(self, keys: mx.array, by: int, cache: Any = None) -> mx.array:
        """Rotate cached keys `[B, H, n, D]` for positions that are `by` later."""
        rope = self._rope(0, by, cache) if self.varies else self.fixed
        B, H, n, D = keys.shape
        return rope.rotate(keys.reshape(B, H * n, 1, D), by).reshape(keys.shape)

    def _rotation(self, base: float | None, wavelengths: mx.array | None) -> RoPE:
        return RoPE(self.dims, base, wavelengths, self.interleaved)

    def _rope(self, offset: int | mx.array, count: int, cache: Any) -> RoPE:
        """Return the rotation for `count` tokens at `offset`.

        Raises:
            GenerationError: The sequences of the batch have different lengths and would need different ones.
        """
        if isinstance(offset, mx.array):
            offset, *others = set(cache.offsets)
            if others:
                problem = f'sequences of different lengths can\'t be batched with "{self.rope_type}" RoPE scaling'
                raise GenerationError(problem, "one sequence at a time")
        length = offset + count
        if cache is not None and cache.max_size is not None:  # the largest distance between a query and a key
            length = min(length, cache.max_size)
        if self.rope_type == "dynamic":
            return self._rotation(self._grown_base(length), None)
        long = None if cache is None else cache.long_factors
        is_long = length > self.longrope_threshold if long is None else long
        return self._rotation(None, self.long_wavelengths) if is_long else self.fixed

    def _grown_base(self, length: int) -> float:
        """Return the base for sequences longer than the model was trained on ("dynamic NTK")."""
        ratio = max(length, self.longest) / self.longest
        return self.base * (self.scaling_factor * ratio - (self.scaling_factor - 1)) ** (self.dims / (self.dims - 2))


class QueryTemperature(NamedTuple):
    """A factor on queries that grows with their position p: 1 + beta · log(1 + floor((p + shift) / length)).

    It keeps attention of long texts from spreading over too many keys (Llama 4).
    """

    beta: float
    length: float
    shift: int

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> QueryTemperature | None:
        """Return that of a layer, if it has one."""
        scaling = config.rope_scaling or {}
        if config.has_rope(layer):
            beta = scaling.get("llama_4_scaling_beta")
            return cls(beta, scaling["original_max_position_embeddings"], 0) if beta else None
        if config.attn_scale is None or config.floor_scale is None:
            return None
        return cls(config.attn_scale, config.floor_scale, 1)

    def __call__(self, positions: mx.array) -> mx.array:
        """Return the factors `[..., 1, T, 1]` of queries at `positions` `[..., T]`, which are negative in padding."""
        steps = mx.floor((mx.maximum(positions, 0) + self.shift) / self.length)
        return (1 + self.beta * mx.log1p(steps))[..., None, :, None]


def position_ids(first: int | mx.array, count: int) -> mx.array:
    """Return the positions from `first` on, `[count]`, or `[B, count]` for a `first` of `[B]`."""
    return (first[:, None] if isinstance(first, mx.array) else first) + mx.arange(count)


def packed_position_ids(segment_ids: mx.array) -> mx.array:
    """Return the position of each token in its document, int `[B, T]`, from `segment_ids` `[B, T]`."""
    index = mx.arange(segment_ids.shape[1])
    begins = mx.concatenate([mx.ones_like(segment_ids[:, :1]), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return index - mx.cummax(mx.where(begins, index, 0), axis=1)


def _array(values: list[float] | None) -> mx.array | None:
    return None if values is None else mx.array(values)


def alibi_slopes(heads: int, scale: float = 1.0) -> mx.array:
    """Return the ALiBi slope of each head, `[heads]` (Press et al. 2021).

    2^(-8i/heads) if the number of heads is a power of two. Otherwise the slopes of the next lower power of two,
    followed by every other slope of the next higher one.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8 * i / (2 * power)) for i in range(1, 2 * (heads - power), 2)]
    return mx.array([scale * slope for slope in slopes])
