"""How much memory keys and values take, and how much they may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import PREFILL_STEP_SIZE, KVCache, KVOptions, make_cache
from mlxlm.cache.kv_cache import round_length
from mlxlm.cache.policies import RotationPolicy
from mlxlm.cache.recurrent_cache import MAX_UNDO, RecurrentCache
from mlxlm.config import ModelConfig
from mlxlm.config.counts import kv_cache_values, layer_activations, recurrent_state_bytes
from mlxlm.generation.loaded_model import LoadedModel

_SHARE = 0.75  # of a machine without Metal, for weights, keys and values; the rest is for all others
_OTHER_BYTES = 512 << 20  # of the working set on Metal, for the screen and what other programs show
# Layers whose activations exist at once: MLX dispatches up to ten tasks ahead. Measured on a CPU: 2.5 of 2 to 32.
_LAYERS_AT_ONCE = 3
_ACTIVATION_SHARE, _MIN_STEP_SIZE = 0.25, 512  # of what the weights leave; tokens
_SCORE_SHARE = 0.15
_LOGIT_COPIES = 3  # of the logits of a batch: probabilities, and what filters sort
_MIN_BYTES = 256 << 20
_HEADROOM = 64  # tokens for which a text needs room to begin with; more than a step adds
_MLX_LM_STEP = 256  # positions by which mlx_lm's own caches grow
_UNKNOWN_ACTIVATION_BYTES = 1 << 18  # of models that mlx_lm runs, as for 8B parameters with grouped-query attention


def default_max_kv_bytes(lm: LoadedModel) -> int:
    """Return the memory that the weights leave free; on Metal, less the activations of a chunk of a prompt.

    On Metal it is the working set that macOS recommends, of which other programs need some; elsewhere three quarters of
    the memory.
    """
    activations = activation_bytes(lm, prefill_step_size(lm)) if mx.metal.is_available() else 0
    return max(_MIN_BYTES, _free_bytes(lm) - activations)


def prefill_step_size(lm: LoadedModel) -> int:
    """How many tokens of a prompt are read at once: on a Mac whose memory has little room, fewer than elsewhere."""
    return _step_size(lm, PREFILL_STEP_SIZE, _free_bytes(lm)) if mx.metal.is_available() else PREFILL_STEP_SIZE


def _step_size(lm: LoadedModel, size: int, max_bytes: int) -> int:
    """`size`, halved until the activations of as many tokens take a quarter of `max_bytes`, but not below 512."""
    while size > _MIN_STEP_SIZE and activation_bytes(lm, size) > _ACTIVATION_SHARE * max_bytes:
        size //= 2
    return size


def activation_bytes(lm: LoadedModel, num_tokens: int) -> int:
    """Bytes of activations while `num_tokens` tokens of a prompt are read.

    Attention's scores are not among them, which no kernel on a GPU has in memory.
    """
    per_token = _UNKNOWN_ACTIVATION_BYTES
    if isinstance(lm.config, ModelConfig):
        per_token = layer_activations(lm.config) * _itemsize(lm)
    return _LAYERS_AT_ONCE * num_tokens * per_token


@dataclass(frozen=True)
class StepMemory:
    """What a step takes besides the weights, and how that limits the prompts that it reads.

    Attributes:
        kv_bytes: For the keys and values of running and earlier texts.
        max_tokens: How many tokens of prompts are read at once.
        score_bytes: For the scores of attention, which no kernel on a CPU avoids; None on a GPU.
    """

    kv_bytes: int
    max_tokens: int
    score_bytes: int | None

    @classmethod
    def divide(cls, lm: LoadedModel, max_bytes: int, batch_size: int, max_tokens: int) -> StepMemory:
        """Divide `max_bytes` among keys and values, the activations of at most `max_tokens` tokens, scores and logits.

        Activations get a quarter, or what `_MIN_STEP_SIZE` tokens need if that is more.
        """
        max_tokens = _step_size(lm, max_tokens, max_bytes)
        scores = int(_SCORE_SHARE * max_bytes) if ON_CPU else None
        logits = _LOGIT_COPIES * batch_size * lm.config.vocab_size * 4
        used = activation_bytes(lm, max_tokens) + (scores or 0) + logits
        return cls(max(0, max_bytes - used), max_tokens, scores)


def _free_bytes(lm: LoadedModel) -> int:
    if mx.metal.is_available():
        return mx.device_info()["max_recommended_working_set_size"] - _OTHER_BYTES - lm.weight_bytes
    return int(_SHARE * platform.total_memory()) - lm.weight_bytes


class KVMemory:
    """Bytes of keys and values.

    All rows of a batch take as many positions as the longest.

    Attributes:
        max_bytes: How many there may be.
        max_bytes_alone: How many there could be if no other model were loaded.
        weight_bytes: Bytes of the model's weights.
    """

    def __init__(self, lm: LoadedModel, kv: KVOptions, max_bytes: int):
        """For a model, and its caches of the options `kv`."""
        self._config, self._kv, self.max_bytes, self.max_bytes_alone = lm.config, kv, max_bytes, max_bytes
        self.weight_bytes = lm.weight_bytes
        self._itemsize = _itemsize(lm)
        self._max_tokens: dict[int, int] = {}
        if not isinstance(lm.config, ModelConfig):
            self._layers, self._state_bytes = _measure_caches(lm.model, kv)

    def bytes_for(self, num_tokens: int, num_rows: int = 1) -> int:
        """Bytes of `num_rows` texts, the longest of which has `num_tokens` tokens."""
        tokens = num_tokens
        if not isinstance(self._config, ModelConfig):
            sizes = (per_token * min(tokens, limit or tokens) for per_token, limit in self._layers)
            return num_rows * (self._state_bytes + sum(sizes))
        if self._kv.size is not None:
            tokens = min(tokens, RotationPolicy(self._kv.size, self._kv.keep).max_positions)
        counts = zip(kv_cache_values(self._config, tokens), (self._kv.key_bits, self._kv.value_bits), strict=True)
        sides = (n * (self._itemsize if bits is None else bits / 8 + self._itemsize / 16) for n, bits in counts)
        states = (1 + MAX_UNDO) * recurrent_state_bytes(self._config, self._itemsize)
        return num_rows * (states + int(sum(sides)))

    def reserved_bytes(self, num_tokens: int, num_rows: int = 1, capacity: int = 0) -> int:
        """`bytes_for` with room for the next tokens, as caches grow in steps. They have this `capacity` already."""
        return self.bytes_for(max(capacity, round_length(num_tokens + _HEADROOM)), num_rows)

    def max_tokens(self, max_bytes: int) -> int:
        """How many tokens a text may have."""
        if max_bytes not in self._max_tokens:  # of the last limit: it is asked for each request
            low, high = 0, 1 << 32
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.reserved_bytes(middle) <= max_bytes else (low, middle - 1)
            self._max_tokens = {max_bytes: low}
        return self._max_tokens[max_bytes]


def _measure_caches(model: Any, kv: KVOptions) -> tuple[list[tuple[int, int | None]], int]:
    """Bytes per token and most tokens of each cache with keys and values, and bytes of recurrent states.

    They follow from the shapes of what the model gives for a token, which isn't computed.
    """
    caches = make_cache(model, kv)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    layers: list[tuple[int, int | None]] = []
    state_bytes = 0
    for cache in caches:
        if isinstance(cache, RecurrentCache):
            state_bytes += (1 + MAX_UNDO) * cache.nbytes
        elif isinstance(cache, KVCache):
            policy = cache.rotation or cache.window
            layers.append((cache.nbytes // cache.capacity, None if policy is None else policy.max_positions))
        else:
            layers.append((cache.nbytes // _MLX_LM_STEP, None))
    return layers, state_bytes


def _itemsize(lm: LoadedModel) -> int:
    """Bytes of an activation: those of a norm's weight, which isn't quantized."""
    return max((array.itemsize for array in lm.weights if array.ndim == 1), default=4)
