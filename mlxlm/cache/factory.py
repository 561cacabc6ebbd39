"""The caches of a model."""

from __future__ import annotations

from mlxlm.cache.kv_buffer import group_size
from mlxlm.cache.kv_cache import KVCache
from mlxlm.cache.mlx_lm_cache import MlxLmKVCache
from mlxlm.cache.options import KVOptions
from mlxlm.cache.rotation import RotationPolicy, SlidingWindow
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError

ALL = KVOptions()  # everything, as it is


def make_cache(model, options: KVOptions = ALL) -> list:
    """One cache per layer. Layers with a sliding window of their own hold what that can see, unless `options.size`
    is no larger. A model of mlx_lm that needs other caches (`model.make_cache`) makes them itself.

    Raises GenerationError for options that the model can't have.
    """
    if hasattr(model, "make_cache"):
        if options != ALL:
            raise GenerationError("this architecture has a cache of its own kind", "no size and no bits for the cache")
        return model.make_cache()
    if not isinstance(model, Decoder):
        rotation = None if options.size is None else RotationPolicy(options.size, options.keep)
        bits = {"key_bits": options.key_bits, "value_bits": options.value_bits}
        return [MlxLmKVCache(rotation=rotation, **bits) for _ in model.layers]
    return [_of_layer(model, layer, options) for layer in range(len(model.layers))]


def _of_layer(model: Decoder, layer: int, options: KVOptions) -> KVCache:
    window, size = model.config.window(layer), options.size
    if options.key_bits or options.value_bits:
        group_size(model.config.head_dim)
    rotation = None
    if size is not None and (window is None or size <= window):
        rope = model.layers[layer].self_attn.rope
        if options.keep and rope is not None and not rope.can_shift_keys:
            raise GenerationError(
                f'first tokens can\'t be kept with "{rope.rope_type}" positions, which change with the length of a text',
                "0 tokens to keep",
            )
        rotation = RotationPolicy(size, options.keep, None if rope is None else rope.shift_keys)
        window = None
    window = None if window is None else SlidingWindow.of(window)
    return KVCache(rotation=rotation, window=window, key_bits=options.key_bits, value_bits=options.value_bits)
