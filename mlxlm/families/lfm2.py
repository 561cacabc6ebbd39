"""LFM2, dense and with experts: most layers have a gated short convolution instead of attention."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL
from mlxlm.config.model_config import MAX_LAYERS
from mlxlm.families.family import COMMON_FIELDS, Family, HFConfig, read_bool, same_names

_FIELDS = COMMON_FIELDS | same_names("num_key_value_heads", "head_dim", "rope_theta", "conv_L_cache", "conv_bias")
_FIELDS |= {"rms_norm_eps": "norm_eps", "layer_types": "layer_types"}


def _read_layer_types(values: HFConfig) -> dict[str, Any]:
    """Older files have the numbers of the layers with attention."""
    types, layers, count = values.get("layer_types"), values.get("full_attn_idxs"), values.get("num_hidden_layers")
    if types is None and isinstance(layers, list) and isinstance(count, int) and count <= MAX_LAYERS:
        types = [FULL if layer in layers else "conv" for layer in range(count)]
    return {"layer_types": None if isinstance(types, list) and set(map(str, types)) == {FULL} else types}


def _write_layer_types(config: ModelConfig) -> dict[str, Any]:
    types = config.layer_types or (FULL,) * config.num_hidden_layers
    return {"layer_types": list(types), "tie_embedding": config.tie_word_embeddings}


def _read(values: HFConfig) -> dict[str, Any]:
    """`intermediate_size` is rounded up from two thirds of what the file says, unless the file says otherwise."""
    width = values.get("block_ff_dim", values.get("intermediate_size", 12288))
    multiplier, multiple = values.get("block_ffn_dim_multiplier", 1.0), values.get("block_multiple_of", 256)
    numbers = all(isinstance(x, int | float) and 0 < x < 1e9 for x in (width, multiplier or 1, multiple))
    if numbers and read_bool(values, "block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if multiplier is not None:
            width = -(-int(multiplier * width) // multiple) * multiple
    return {**_read_layer_types(values), **({} if width is None else {"intermediate_size": width})}


def _write(config: ModelConfig) -> dict[str, Any]:
    """mlx_lm requires all of these."""
    return {
        **_write_layer_types(config),
        "block_dim": config.hidden_size,
        "block_ff_dim": config.intermediate_size,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    }


_MODULES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}

LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    _FIELDS,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128_000,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    fixed_values={"qk_norm": "head"},
    read_extra=_read,
    write_extra=_write,
    top_modules={"embed_tokens": "embed_tokens", "embedding_norm": "norm"},
    layer_modules=_MODULES,
)
