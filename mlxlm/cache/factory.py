"""Makes the caches of a model."""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import ON_CPU, nn
from mlxlm.cache.kv_buffer import group_size
from mlxlm.cache.kv_cache import KVCache
from mlxlm.cache.mlx_lm_caches import make_caches
from mlxlm.cache.options import KVOptions
from mlxlm.cache.policies import cache_policies
from mlxlm.cache.recurrent_cache import RecurrentCache
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError

# Tokens of a prompt in one forward pass. On a CPU, 512 bound the memory of attention's scores, [H, 512, S] per layer. A
# GPU has none in memory, and larger products use it better: mlx_lm has 2,048, too.
CPU_PREFILL_STEP_SIZE = 512
PREFILL_STEP_SIZE = CPU_PREFILL_STEP_SIZE if ON_CPU else 2048
DEFAULT = KVOptions()  # unbounded and unquantized


def make_cache(model: nn.Module, options: KVOptions = DEFAULT) -> list[Any]:
    """Make one cache per layer, but none for the last layers if they share the keys and values of others.

    A layer with sliding-window attention gets a window cache, unless `options.size` is not larger than its window, and
    a recurrent layer a state, which has no options.
    Of models of mlx_lm, see `mlxlm.cache.mlx_lm_caches`.

    Args:
        model: A `Decoder`, or a model loaded through mlx_lm.
        options: Size and quantization of the caches.

    Raises:
        GenerationError: The model doesn't support these options.
    """
    if not isinstance(model, Decoder):
        return make_caches(model, options)
    return [_make_layer_cache(model, layer, options) for layer in sorted(set(model.config.kv_layers))]


def _make_layer_cache(model: Decoder, layer: int, options: KVOptions) -> KVCache | RecurrentCache:
    mixer = model.layers[layer].mixer
    if hasattr(mixer, "state_shapes"):
        return RecurrentCache(mixer.state_shapes)
    bits, dims = (options.key_bits, options.value_bits), model.config.layer_sublayers[layer][0].kv_dims
    if any(bits):
        group_size(*(dim for dim, b in zip(dims, bits, strict=True) if b))  # raises for dims that can't be quantized
    rope = mixer.rope
    rotation, window = cache_policies(options, model.config.window(layer), None if rope is None else rope.shift_keys)
    if rotation is not None and options.keep and rope is not None and not rope.can_shift_keys:
        raise GenerationError(
            f'rope type "{rope.rope_type}" can\'t keep the first tokens: its positions depend on the text length',
            "`keep=0`",
            is_operator_hint=True,
        )
    return KVCache(rotation=rotation, window=window, key_bits=options.key_bits, value_bits=options.value_bits)
