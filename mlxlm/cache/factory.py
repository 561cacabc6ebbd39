"""Creates the caches of a model: our own, and those that models of mlx_lm get from us."""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.cache.kv_buffer import group_size
from mlxlm.cache.kv_cache import KVCache, RotationPolicy, SlidingWindow
from mlxlm.cache.options import KVOptions
from mlxlm.kernels import QuantizedKV
from mlxlm.kernels.mask import causal_mask
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError

# Tokens of a prompt in one forward pass. On a CPU, 512 bound the memory of attention's scores, [H, 512, S] per layer. A
# GPU has none in memory, and larger products use it better: mlx_lm has 2,048, too.
CPU_PREFILL_STEP_SIZE = 512
PREFILL_STEP_SIZE = CPU_PREFILL_STEP_SIZE if ON_CPU else 2048
DEFAULT = KVOptions()  # unbounded and unquantized


def make_cache(model: nn.Module, options: KVOptions = DEFAULT) -> list[Any]:
    """Make one cache per layer.

    A layer with sliding-window attention gets a window cache, unless `options.size` is not larger than its window.
    An mlx_lm model that needs other cache types creates them itself (`model.make_cache`).

    Args:
        model: A `Decoder`, or a model loaded through mlx_lm.
        options: Size and quantization of the caches.

    Raises:
        GenerationError: The model doesn't support these options.
    """
    if hasattr(model, "make_cache"):
        if options != DEFAULT:
            raise GenerationError(
                "this architecture has its own cache type, which supports no size and no quantization",
                "no `size` and no `key_bits`",
                is_operator_hint=True,
            )
        return model.make_cache()
    if not isinstance(model, Decoder):
        rotation = None if options.size is None else RotationPolicy(options.size, options.keep)
        key_bits, value_bits = options.key_bits, options.value_bits
        return [MlxLmKVCache(rotation=rotation, key_bits=key_bits, value_bits=value_bits) for _ in model.layers]
    return [_make_layer_cache(model, layer, options) for layer in range(len(model.layers))]


def _make_layer_cache(model: Decoder, layer: int, options: KVOptions) -> KVCache:
    window, size = model.config.window(layer), options.size
    if options.key_bits or options.value_bits:
        group_size(model.config.head_dim)  # raises for head dims that can't be quantized
    rotation = None
    if size is not None and (window is None or size <= window):
        rope = model.layers[layer].self_attn.rope
        if options.keep and rope is not None and not rope.can_shift_keys:
            raise GenerationError(
                f'rope type "{rope.rope_type}" can\'t keep the first tokens: its positions depend on the text length',
                "`keep=0`",
                is_operator_hint=True,
            )
        rotation = RotationPolicy(size, options.keep, None if rope is None else rope.shift_keys)
        window = None
    return KVCache(
        rotation=rotation,
        window=None if window is None else SlidingWindow.of(window),
        key_bits=options.key_bits,
        value_bits=options.value_bits,
    )


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
