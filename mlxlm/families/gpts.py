"""Families with names of their own, and with LayerNorm: GPT-2, GPT-NeoX, OPT, Falcon, BLOOM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import COMMON, QKV, Family, first_unsupported, flag, same_names

_PLAIN = {"norm": "layer", "mlp_gated": False}
_BIASED = {"attention_bias": True, "mlp_bias": True}
_MEGATRON_MLP = {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}
_MASKS = (".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq")


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _four_times(size: Any) -> Any:
    """The customary width of a feed-forward; what isn't a number is left for the checks that follow."""
    return 4 * size if isinstance(size, int) else size


def _read_gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": _first(values, "n_inner") or _four_times(values.get("n_embd"))}


def _lacks_gpt2(values: Mapping[str, Any]) -> str | None:
    return first_unsupported(
        values, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    COMMON
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
    fixed_values={**_PLAIN, **_BIASED, "positions": "learned"},
    read=_read_gpt2,
    write=lambda config: {"n_ctx": config.max_position_embeddings},  # mlx_lm asks for it
    unsupported_reason=_lacks_gpt2,
    prefix="",  # as in the hub's own files: transformers opens both, mlx_lm only this
    other_prefixes=("transformer.",),
    layers="h",
    top_modules={"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"},
    layer={
        "ln_1": "input_layernorm",
        "attn.c_attn": QKV,
        "attn.c_proj": "self_attn.o_proj",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    mlx_names=tuple((name, f"model.{name}") for name in ("wte", "wpe", "h.", "ln_f")),
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
)


GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    COMMON
    | same_names("hidden_act", "attention_bias")
    | {
        "rms_norm_eps": "layer_norm_eps",
        "parallel_residual": "use_parallel_residual",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
    },
    defaults={
        "hidden_act": "gelu",
        "attention_bias": True,
        "parallel_residual": True,
        "partial_rotary_factor": 0.25,
    },
    fixed_values={**_PLAIN, "mlp_bias": True},
    prefix="gpt_neox.",
    head="embed_out",
    top_modules={"embed_in": "embed_tokens", "final_layer_norm": "norm"},
    layer={
        **same_names("input_layernorm", "post_attention_layernorm"),
        "attention.query_key_value": QKV,
        "attention.dense": "self_attn.o_proj",
        **_MEGATRON_MLP,
    },
    qkv_interleaved=True,
    mlx_names=(("gpt_neox.layers.", "model.h."), ("embed_out", "model.embed_out"), ("gpt_neox.", "model.")),
    ignored_suffixes=_MASKS,
)


def _read_opt(values: Mapping[str, Any]) -> dict[str, Any]:
    biased = flag(values, "enable_bias", True)
    placement = "pre" if flag(values, "do_layer_norm_before", True) else "post"
    return {"attention_bias": biased, "mlp_bias": biased, "norm_placement": placement}


def _lacks_opt(values: Mapping[str, Any]) -> str | None:
    width = values.get("hidden_size")
    return first_unsupported(
        values,
        _remove_final_layer_norm=False,
        layer_norm_elementwise_affine=True,
        word_embed_proj_dim=width,
    )


OPT = Family(
    "opt",
    "OPTForCausalLM",
    COMMON | {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    defaults={"hidden_act": "relu", "tie_word_embeddings": True},
    fixed_values={**_PLAIN, "positions": "learned", "position_offset": 2, "rms_norm_eps": 1e-5},
    read=_read_opt,
    write=lambda config: {
        "enable_bias": config.attention_bias,
        "do_layer_norm_before": config.norm_placement == "pre",
        "word_embed_proj_dim": config.hidden_size,
    },
    unsupported_reason=_lacks_opt,
    prefix="model.decoder.",
    other_prefixes=("decoder.", ""),
    top_modules={"embed_tokens": "embed_tokens", "embed_positions": "embed_positions", "final_layer_norm": "norm"},
    layer={
        "self_attn_layer_norm": "input_layernorm",
        **same_names("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.out_proj": "self_attn.o_proj",
        "final_layer_norm": "post_attention_layernorm",
        "fc1": "mlp.up_proj",
        "fc2": "mlp.down_proj",
    },
    extra_layer_modules=lambda config: (
        {"self_attn_layer_norm": "post_attention_layernorm", "final_layer_norm": "post_feedforward_layernorm"}
        if config.norm_placement == "post"
        else {}
    ),
)


def _read_falcon(values: Mapping[str, Any]) -> dict[str, Any]:
    """40B's decoder has grouped heads, and one norm each for attention and feed-forward unless told otherwise.

    transformers rounds the slopes of ALiBi, and their products with positions, to bfloat16; ours are exact.
    """
    new = flag(values, "new_decoder_architecture", False)
    heads = _first(values, "num_attention_heads", "n_head")
    kv_heads = _first(values, "num_kv_heads") or heads if new else 1 if flag(values, "multi_query", True) else heads
    parallel = new or flag(values, "parallel_attn", True)
    biased = flag(values, "bias", False)
    inner = _first(values, "ffn_hidden_size") or _four_times(_first(values, "hidden_size", "n_embed"))
    return {
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "parallel_residual": parallel,
        "shared_norm": parallel and not (new and (_first(values, "num_ln_in_parallel_attn") or 2) == 2),
        "attention_bias": biased,
        "mlp_bias": biased,
        **({"positions": "alibi", "alibi_scaled": True} if flag(values, "alibi", False) else {}),
    }


def _write_falcon(config: ModelConfig) -> dict[str, Any]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    own_norms = config.parallel_residual and not config.shared_norm
    new = own_norms or kv_heads not in (1, heads)
    return {
        "new_decoder_architecture": new,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "parallel_attn": config.parallel_residual,
        "num_ln_in_parallel_attn": (2 if own_norms else 1) if new else None,
        "bias": config.mlp_bias,
        "alibi": config.positions == "alibi",
    }


FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    COMMON
    | {
        "hidden_size": ("hidden_size", "n_embed"),
        "num_hidden_layers": ("num_hidden_layers", "n_layer"),
        "num_attention_heads": ("num_attention_heads", "n_head"),
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation",
        "rope_theta": "rope_theta",
    },
    defaults={"hidden_act": "gelu", "tie_word_embeddings": True},
    fixed_values=_PLAIN,
    read=_read_falcon,
    write=_write_falcon,
    prefix="transformer.",
    layers="h",
    top_modules={"word_embeddings": "embed_tokens", "ln_f": "norm"},
    layer={
        "self_attention.query_key_value": QKV,
        "self_attention.dense": "self_attn.o_proj",
        **_MEGATRON_MLP,
    },
    extra_layer_modules=lambda config: (
        {"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm"}
        if config.parallel_residual and not config.shared_norm
        else same_names("input_layernorm", "post_attention_layernorm")
    ),
    qkv_interleaved=True,
)


def _read_bloom(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": _four_times(_first(values, "hidden_size", "n_embed"))}


BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    {name: theirs for name, theirs in COMMON.items() if name != "intermediate_size"}
    | {
        "hidden_size": ("hidden_size", "n_embed"),
        "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"),
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    defaults={"tie_word_embeddings": True},
    fixed_values={**_PLAIN, **_BIASED, "positions": "alibi", "embedding_norm": True, "hidden_act": "gelu_pytorch_tanh"},
    read=_read_bloom,
    unsupported_reason=lambda values: first_unsupported(values, apply_residual_connection_post_layernorm=False),
    prefix="transformer.",
    layers="h",
    top_modules={"word_embeddings": "embed_tokens", "word_embeddings_layernorm": "embed_layernorm", "ln_f": "norm"},
    layer={
        **same_names("input_layernorm", "post_attention_layernorm"),
        "self_attention.query_key_value": QKV,
        "self_attention.dense": "self_attn.o_proj",
        **_MEGATRON_MLP,
    },
    qkv_interleaved=True,
)

GPTS = (GPT2, GPT_NEOX, OPT, FALCON, BLOOM)
