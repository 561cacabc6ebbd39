"""LFM2, dense and with experts: most layers have a gated short convolution instead of attention."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL
from mlxlm.config.model_config import MAX_LAYERS
from mlxlm.families.family import (
    COMMON_FIELDS,
    NUM_EXPERTS,
    Family,
    HFConfig,
    first_unexpected,
    read_bool,
    read_first_dense_layers,
    same_names,
    unsupported_layer_types,
    write_first_dense_layers,
)

_FIELDS: dict[str, str | tuple[str, ...]] = {
    **COMMON_FIELDS,
    **same_names("num_key_value_heads", "head_dim", "rope_theta", "conv_L_cache", "conv_bias"),
    "rms_norm_eps": "norm_eps",
    "layer_types": "layer_types",
    "tie_word_embeddings": ("tie_word_embeddings", "tie_embedding"),
}


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
}
_MLP = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_DEFAULTS = {"max_position_embeddings": 128_000, "num_key_value_heads": 8, "tie_word_embeddings": True}
_TOP_MODULES = {"embed_tokens": "embed_tokens", "embedding_norm": "norm"}

LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    _FIELDS,
    defaults=_DEFAULTS,
    fixed_values={"qk_norm": "head"},
    read_extra=_read,
    write_extra=_write,
    top_modules=_TOP_MODULES,
    layer_modules=_MODULES | {f"feed_forward.{name}": f"mlp.{module}" for name, module in _MLP.items()},
)


def _read_dense_layers(values: HFConfig) -> dict[str, Any]:
    return read_first_dense_layers(values, 2, "num_dense_layers")


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    dense = write_first_dense_layers(config, "num_dense_layers")
    return {**_write_layer_types(config), **dense, "use_expert_bias": True}


LFM2_MOE = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    _FIELDS
    | same_names("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor")
    | {"num_experts": NUM_EXPERTS},
    defaults={**_DEFAULTS, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792},
    fixed_values={"qk_norm": "head", "router": "sigmoid"},
    read_extra=lambda values: {**_read_layer_types(values), **_read_dense_layers(values)},
    write_extra=_write_moe,
    find_unsupported=lambda values: (
        first_unexpected(values, use_expert_bias=True) or unsupported_layer_types(_read_dense_layers(values))
    ),
    top_modules=_TOP_MODULES,
    layer_modules={
        **LFM2.layer_modules,
        **{f"feed_forward.experts.*.{name}": f"mlp.switch_mlp.{module}" for name, module in _MLP.items()},
        "feed_forward.gate": "mlp.gate",
        "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
    },
    mlx_lm_names={f"feed_forward.{name}": f"feed_forward.{module}" for name, module in _MLP.items()},
)
