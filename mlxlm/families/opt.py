"""OPT: learned positions with an offset of 2, ReLU, and post-norm in one size (350M)."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import COMMON_FIELDS, GPT_VALUES, Family, HFConfig, first_unexpected, read_bool, same_names


def _read_extra(values: HFConfig) -> dict[str, Any]:
    biased = read_bool(values, "enable_bias", True)
    placement = "pre" if read_bool(values, "do_layer_norm_before", True) else "post"
    return {"attention_bias": biased, "mlp_bias": biased, "norm_placement": placement}


def _write_extra(config: ModelConfig) -> dict[str, Any]:
    return {
        "enable_bias": config.attention_bias,
        "do_layer_norm_before": config.norm_placement == "pre",
        "word_embed_proj_dim": config.hidden_size,
    }


def _find_unsupported(values: HFConfig) -> str | None:
    return first_unexpected(
        values,
        _remove_final_layer_norm=False,
        layer_norm_elementwise_affine=True,
        word_embed_proj_dim=values.get("hidden_size"),
    )


def _layer_norms(config: ModelConfig, for_mlx: bool = False) -> dict[str, str]:
    if config.norm_placement == "post":
        return {"self_attn_layer_norm": "post_attention_layernorm", "final_layer_norm": "post_feedforward_layernorm"}
    return {"self_attn_layer_norm": "input_layernorm", "final_layer_norm": "post_attention_layernorm"}


OPT = Family(
    "opt",
    "OPTForCausalLM",
    COMMON_FIELDS | {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    defaults={"hidden_act": "relu", "tie_word_embeddings": True},
    fixed_values={**GPT_VALUES, "positions": "learned", "position_offset": 2, "rms_norm_eps": 1e-5},
    read_extra=_read_extra,
    write_extra=_write_extra,
    find_unsupported=_find_unsupported,
    prefix="model.decoder.",
    other_prefixes=("decoder.", ""),
    top_modules={"embed_tokens": "embed_tokens", "embed_positions": "embed_positions", "final_layer_norm": "norm"},
    layer_modules={
        **same_names("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.out_proj": "self_attn.o_proj",
        "fc1": "mlp.up_proj",
        "fc2": "mlp.down_proj",
    },
    extra_layer_modules=_layer_norms,
)
