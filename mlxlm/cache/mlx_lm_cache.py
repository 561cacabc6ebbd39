"""mlxlm's caches for models that are loaded through mlx_lm."""

from __future__ import annotations

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_cache import KVCache
from mlxlm.kernels import QuantizedKV
from mlxlm.kernels.mask import causal_mask


class MlxLmKVCache(KVCache):
    """A cache that returns dequantized arrays: not all of mlx_lm's architectures accept quantized ones."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `[B, H_kv, T, D]`; return the visible ones, dequantized."""
        keys, values = super().update_and_fetch(keys, values)
        return _dequantized(keys), _dequantized(values)

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        """Make the attention mask for `n` new positions of one text (called by mlx_lm's models).

        Returns:
            None, "causal", or a bool array `[n, S]`.
        """
        if n == 1 and window_size is None:
            return None
        if window_size is None and not return_array:
            return "causal"
        before = self.size()
        if self.rotation is not None and before + n > self.rotation.size:
            before -= self.rotation.step  # the update will drop this many
        distance = mx.arange(before + n)[None] - mx.arange(before, before + n)[:, None]
        return causal_mask(distance, window_size)


def _dequantized(x: mx.array | QuantizedKV) -> mx.array:
    return x.dequantized() if isinstance(x, QuantizedKV) else x
