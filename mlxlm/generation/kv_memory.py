"""How much memory keys and values take, and how much they may take."""

from __future__ import annotations

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.config import ModelConfig, counts
from mlxlm.generation.loaded_model import LoadedModel

_SHARE = 0.75  # of the memory, for weights, keys and values; the rest is for activations and other programs
_MIN_BYTES = 256 << 20
_HEADROOM = 256  # tokens for which a text needs room to begin with
_UNKNOWN_BYTES_PER_TOKEN = 1 << 17  # of models that mlx_lm runs: as for 8B parameters with grouped-query attention


def default_max_kv_bytes(lm: LoadedModel) -> int:
    """What three quarters of the memory leave beside the weights."""
    total = platform.total_memory()
    if mx.metal.is_available():
        total = min(total, int(mx.device_info()["max_recommended_working_set_size"] / _SHARE))
    return max(_MIN_BYTES, int(_SHARE * total) - lm.weight_bytes)


class KVMemory:
    """Bytes of keys and values.

    All rows of a batch take as many positions as the longest.

    Attributes:
        max_bytes: How many there may be.
        weight_bytes: Bytes of the model's weights.
    """

    def __init__(self, lm: LoadedModel, kv: KVOptions, max_bytes: int):
        """For a model, and its caches of the options `kv`."""
        self._config, self._kv, self.max_bytes = lm.config, kv, max_bytes
        self.weight_bytes = lm.weight_bytes
        self._itemsize = max((array.itemsize for array in lm.weights if array.ndim == 1), default=4)  # of norms

    def bytes_for(self, num_tokens: int, num_rows: int = 1) -> int:
        """Bytes of `num_rows` texts, the longest of which has `num_tokens` tokens."""
        tokens = min(num_tokens, self._kv.size or num_tokens)
        if not isinstance(self._config, ModelConfig):
            return num_rows * tokens * _UNKNOWN_BYTES_PER_TOKEN
        values = counts.kv_cache_values(self._config, tokens) // 2  # of keys, or of values
        sides = (values * (self._itemsize if bits is None else bits / 8 + self._itemsize / 16)
                 for bits in (self._kv.key_bits, self._kv.value_bits))  # fmt: skip
        return num_rows * int(sum(sides))

    def reserved_bytes(self, num_tokens: int, num_rows: int = 1) -> int:
        """`bytes_for` with room for the next tokens, as caches grow in steps."""
        return self.bytes_for(num_tokens + _HEADROOM, num_rows)

    def max_tokens(self) -> int:
        """How many tokens a text may have."""
        low, high = 0, 1 << 32
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.reserved_bytes(middle) <= self.max_bytes else (low, middle - 1)
        return low
