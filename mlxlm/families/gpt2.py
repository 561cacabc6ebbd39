"""GPT-2: learned positions, fused and transposed projections (Conv1D)."""

from __future__ import annotations

from typing import Any

from mlxlm.families.family import (
    COMMON_FIELDS,
    GPT_VALUES,
    QKV,
    Family,
    HFConfig,
    first_present,
    first_unexpected,
    four_times,
)


def _read_extra(values: HFConfig) -> dict[str, Any]:
    return {"intermediate_size": first_present(values, "n_inner") or four_times(values.get("n_embd"))}


def _find_unsupported(values: HFConfig) -> str | None:
    return first_unexpected(
        values, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    COMMON_FIELDS
    | {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    defaults={"max_position_embeddings": 1024, "hidden_act": "gelu_new", "tie_word_embeddings": True},
    fixed_values={**GPT_VALUES, "attention_bias": True, "mlp_bias": True, "positions": "learned"},
    read_extra=_read_extra,
    write_extra=lambda config: {"n_ctx": config.max_position_embeddings},  # required by mlx_lm
    find_unsupported=_find_unsupported,
    prefix="",  # as on the Hugging Face Hub: transformers opens both prefixes, mlx_lm only this one
    other_prefixes=("transformer.",),
    layers="h",
    top_modules={"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"},
    layer_modules={
        "ln_1": "input_layernorm",
        "attn.c_attn": QKV,
        "attn.c_proj": "self_attn.o_proj",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    mlx_lm_prefixes=tuple((name, f"model.{name}") for name in ("wte", "wpe", "h.", "ln_f")),
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
)
