"""Positions: rotary embeddings with their scalings, and the slopes of ALiBi."""

from __future__ import annotations

from mlxlm.backend.mlx import mx
from mlxlm.config import ModelConfig
from mlxlm.config.rope_scaling import attention_factor, scaled_wavelengths
from mlxlm.utils.errors import GenerationError


class RotaryEmbedding:
    """Rotary positions (Su et al. 2021) on the first `config.rotary_dims` of a head, the rest as it is.

    A scaling changes the wavelength of each pair of dimensions, and for "yarn" and "longrope" also multiplies the
    rotated dimensions of queries and keys by a factor; its square on the queries alone gives the same scores.
    Formulas: `mlxlm.config.rope_scaling`, computed in float64.

    "longrope" has other wavelengths, for all positions, where a text is longer than `config.longrope_original_length`. Keys
    in a cache can't change theirs, so that the length that the text will reach decides: see `KVCache.expected_length`.
    """

    def __init__(self, config: ModelConfig):
        self.dims, self.base = config.rotary_dims, float(config.rope_theta)
        self.longest = config.max_position_embeddings
        scaling = config.rope_scaling or {"rope_type": "default"}
        self.rope_type, self.scaling_factor = scaling["rope_type"], scaling.get("factor")
        self.longrope_threshold = config.longrope_original_length
        self.wavelengths = _array(scaled_wavelengths(self.base, self.dims, scaling))  # None: those of the base
        self.long_wavelengths = None
        if self.rope_type == "longrope":
            self.long_wavelengths = _array(scaled_wavelengths(self.base, self.dims, scaling, long=True))
        self.varies = self.rope_type in ("dynamic", "longrope")
        self._fixed = (self.base, None) if self.wavelengths is None else (None, self.wavelengths)
        factor = attention_factor(scaling, self.longest)
        self.query_scale = None
        if factor != 1:
            self.query_scale = mx.array([factor**2] * self.dims + [1.0] * (config.head_dim - self.dims))

    @property
    def can_shift_keys(self) -> bool:
        """Whether keys can be `shift_keys`: not where earlier ones were turned by another base ("dynamic")."""
        return self.rope_type != "dynamic"

    def __call__(self, queries: mx.array, keys: mx.array, cache=None) -> tuple[mx.array, mx.array]:
        """Queries and keys `[B, H, T, D]`, turned: the first at the end of what the cache holds."""
        offset = 0 if cache is None else cache.offset
        base, wavelengths = self._waves(offset, queries.shape[2], cache) if self.varies else self._fixed
        if self.query_scale is not None:
            queries = queries * self.query_scale.astype(queries.dtype)
        return self._turned(queries, offset, base, wavelengths), self._turned(keys, offset, base, wavelengths)

    def shift_keys(self, keys: mx.array, by: int, cache=None) -> mx.array:
        """Keys `[B, H, n, D]` that were turned for their positions, now for those `by` later."""
        base, wavelengths = self._waves(0, by, cache) if self.varies else self._fixed
        B, H, n, D = keys.shape
        return self._turned(keys.reshape(B, H * n, 1, D), by, base, wavelengths).reshape(keys.shape)

    def _turned(self, x: mx.array, offset: int | mx.array, base: float | None, wavelengths: mx.array | None):
        return mx.fast.rope(x, self.dims, traditional=False, base=base, scale=1.0, offset=offset, freqs=wavelengths)

    def _waves(self, offset: int | mx.array, count: int, cache) -> tuple[float | None, mx.array | None]:
        """Base and wavelengths, one of which is None, for a text that goes on at `offset` with `count` tokens.

        Raises GenerationError for texts of different lengths, which would need one each.
        """
        if isinstance(offset, mx.array):
            offset, *others = set(cache.offsets)
            if others:
                problem = f'texts of different length can\'t be side by side with "{self.rope_type}" positions'
                raise GenerationError(problem, "one text at a time")
        length = offset + count
        if cache is not None and cache.max_size is not None:  # so far apart are a token and what it sees
            length = min(length, cache.max_size)
        if self.rope_type == "dynamic":
            return self._grown_base(length), None
        if self._reached(length, cache) > self.longrope_threshold:
            return None, self.long_wavelengths
        return self._fixed

    def _reached(self, length: int, cache) -> int:
        """How long the text will be: by its cache, where there is one, and as long as can be if that doesn't say."""
        if cache is None:
            return length
        expected_length = self.longest if cache.expected_length is None else cache.expected_length
        return expected_length if cache.max_size is None else min(expected_length, cache.max_size)

    def _grown_base(self, length: int) -> float:
        """The base for texts longer than the model was trained on ("dynamic NTK"); keys in a cache keep theirs."""
        ratio = max(length, self.longest) / self.longest
        return self.base * (self.scaling_factor * ratio - (self.scaling_factor - 1)) ** (self.dims / (self.dims - 2))


def _array(values: list[float] | None) -> mx.array | None:
    return None if values is None else mx.array(values)


def alibi_slopes(heads: int) -> mx.array:
    """The slope of each head, `[heads]` (Press et al. 2021): 2^(-8i/heads) where that is a power of two.

    Other numbers of heads take the slopes of the power below, then every other one of the power above.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8 * i / (2 * power)) for i in range(1, 2 * (heads - power), 2)]
    return mx.array(slopes)
