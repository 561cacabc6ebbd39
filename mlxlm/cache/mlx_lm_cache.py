"""Our caches under a model of mlx_lm."""

from __future__ import annotations

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_cache import KVCache
from mlxlm.kernels import QuantizedKV
from mlxlm.kernels.mask import causal_mask


class MlxLmKVCache(KVCache):
    """What is held quantized is given as plain arrays: of mlx_lm's architectures, not all take anything else."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = super().update_and_fetch(keys, values)
        return _plain(keys), _plain(values)

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False):
        """The mask for `n` new positions of one text, as models of mlx_lm ask for it: None, "causal" or bool
        `[n, S]`."""
        if n == 1 and window_size is None:
            return None
        if window_size is None and not return_array:
            return "causal"
        before = self.size()
        if self.rotation is not None and before + n > self.rotation.size:
            before -= self.rotation.step  # the update will drop so many
        apart = mx.arange(before + n)[None] - mx.arange(before, before + n)[:, None]
        return causal_mask(apart, window_size)


def _plain(held: mx.array | QuantizedKV) -> mx.array:
    return held.dequantized() if isinstance(held, QuantizedKV) else held
