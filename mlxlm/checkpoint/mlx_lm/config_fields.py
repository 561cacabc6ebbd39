"""The fields of config.json in mlx_lm's names, and those that change the logits and that it doesn't read.

transformers 5 saves the rotary embedding as one object, `rope_parameters`, and has renamed some fields. Most of
mlx_lm's models read the older names, and use a default where they are missing. Source: mlx_lm/models (0.32).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxlm.checkpoint.mlx_lm.install_rope import MODEL_SPECIFIC_ROPE, is_known, layer_rope, unsupported_rope_type
from mlxlm.config.components import FULL, SLIDING, SPARSE
from mlxlm.config.numbers import is_count
from mlxlm.families.activations import MLX_LM_ACTIVATIONS, same_activation
from mlxlm.utils.errors import CheckpointError

# mlx_lm's name of a field -> Hugging Face's other names for it.
_OTHER_NAMES = {
    "num_experts": ("num_local_experts",),
    "num_local_experts": ("num_experts",),
    "block_dim": ("hidden_size",),
    "n_ctx": ("n_positions",),
}
_ROPE_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
}
_MLX_LM_ROPE_TYPES = ("telechat3-yarn",)  # rope_types that only some of mlx_lm's models implement
# The value that a model computes if it doesn't read the field.
_IMPLICIT: dict[str, Any] = {
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "final_logit_softcapping": None,
    "rope_interleave": True,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_bidirectional_attention": False,
    "use_mrope": False,
}
# The same for one model, also for fields that it reads but implements for one value only.
_IMPLICIT_BY_MODEL: dict[str, dict[str, Any]] = {
    "dots1": {"n_group": 1},
    "ernie4_5_moe": {"moe_use_aux_free": False},
    "exaone_moe": {"n_group": 1},
    "falcon_h1": {"attention_in_multiplier": 1.0, "key_multiplier": 1.0},
    "glm4_moe": {"n_group": 1},
    "glm_moe_dsa": {"mlp_bias": False},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "jamba": {"num_experts": 1},
    "mamba": {"layer_norm_epsilon": 1e-5},
    "mamba2": {"layer_norm_epsilon": 1e-5, "n_groups": 1},
    "minicpm3": {"tie_word_embeddings": False},
    "nanochat": {"final_logit_softcapping": 15.0},
    "qwen2_moe": {"norm_topk_prob": False},
}
_NEED_LAYER_TYPES = ("llama",)  # ignore sliding_window without layer_types
_READ_ACTIVATION = ("gear", "kimi_k3", "muse_glimmer", "muse_spark", "nemotron-nas", "phi3small", "spark2_5")


def to_mlx_lm_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of `with_rope_parameters` with the names that mlx_lm's model of this `model_type` reads.

    Raises:
        CheckpointError: mlx_lm's names can't express a field.
    """
    values = {name: _number(value) for name, value in values.items()}
    if isinstance(values.get("text_config"), Mapping):
        values["text_config"] = to_mlx_lm_config(values["text_config"])
        if values.get("vocab_size") is None and "vocab_size" in values["text_config"]:
            values["vocab_size"] = values["text_config"]["vocab_size"]  # some models only look outside
    if values.get("model_type") not in MODEL_SPECIFIC_ROPE:
        values |= _rope_fields(values)
    for name, others in _OTHER_NAMES.items():
        value = next((values[other] for other in others if values.get(other) is not None), None)
        if values.get(name) is None and value is not None:
            values[name] = value
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if values.get("head_dim") is None and is_count(hidden) and is_count(heads):
        values["head_dim"] = 256 if str(values.get("model_type")).startswith("gemma") else hidden // heads
    derive = _DERIVED.get(values.get("model_type"))
    return values | derive(values) if derive else values


def needs_multimodal_model(values: Mapping[str, Any]) -> bool:
    """Whether this is a language model that mlx_lm only implements as a part of a multimodal model."""
    return bool(values.get("model_type") == "gemma3n_text")


def _number(value: Any) -> Any:
    """Convert the object that transformers 5 writes for infinity, which JSON lacks."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return value


def _rope_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `rope_parameters` as separate fields.

    `install_rope` does the scaling; only models that also use it in the scale of attention (multi-head latent
    attention) get `rope_scaling`.
    """
    rope, sliding = layer_rope(values), layer_rope(values, SLIDING)
    rope_type = rope["rope_type"]
    if not is_known(rope_type) and rope_type not in _MLX_LM_ROPE_TYPES:
        raise unsupported_rope_type(rope_type)
    fields = {name: rope[key] for key, names in _ROPE_NAMES.items() if key in rope for name in names}
    scales_attention = rope_type == "yarn" and "qk_rope_head_dim" in values
    needs_scaling = scales_attention or rope.get("alpha") or not is_known(rope_type)
    fields["rope_scaling"] = {**rope, "type": rope_type} if needs_scaling else None
    return fields | ({"rope_local_base_freq": sliding["rope_theta"]} if "rope_theta" in sliding else {})


def _pattern(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `sliding_window_pattern` N: every N-th layer has full attention."""
    types = values.get("layer_types")
    if not isinstance(types, list):
        return {}
    pattern = types.index(FULL) + 1 if FULL in types else 0
    if not pattern or types != [SLIDING if (i + 1) % pattern else FULL for i in range(len(types))]:
        raise CheckpointError("layer_types has an order of layers that mlx_lm's model doesn't support")
    return {"sliding_window_pattern": pattern}


def _gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
    context = values.get("max_position_embeddings") or 131_072  # transformers' default, which larger models rely on
    return {**_pattern(values), "max_position_embeddings": context}


def _exaone4(values: Mapping[str, Any]) -> dict[str, Any]:
    types = values.get("layer_types")
    if not isinstance(types, list):
        return {}
    if values.get("sliding_window") is None:
        return {"sliding_window_pattern": None}
    _check_both_layer_types(types)
    return {"sliding_window_pattern": "".join("L" if layer_type == SLIDING else "G" for layer_type in types)}


def _exaone_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    _check_both_layer_types(values["layer_types"])
    types = values.get("mlp_layer_types")
    return {} if types is None else {"is_moe_layer": [layer_type == "sparse" for layer_type in types]}


def _check_both_layer_types(types: list[str]) -> None:
    if not {FULL, SLIDING} <= set(types):
        raise CheckpointError(f"layer_types must have both {FULL} and {SLIDING} for mlx_lm's model")


def _identity_scaling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scaling that changes nothing, for models of mlx_lm that require one."""
    if values.get("rope_scaling") is not None:
        return {}
    context = values.get("max_position_embeddings")
    return {"rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": context}}


def _glm_moe_dsa(values: Mapping[str, Any]) -> dict[str, Any]:
    if "shared" in (values.get("indexer_types") or ()):
        raise CheckpointError("indexer_types has shared indexers, which mlx_lm's glm_moe_dsa doesn't implement")
    types, dense = values.get("mlp_layer_types"), values.get("first_k_dense_replace", 3)
    if types is not None and [kind == SPARSE for kind in types] != [i >= dense for i in range(len(types))]:
        raise CheckpointError(f"mlp_layer_types and first_k_dense_replace ({dense}) have experts in different layers")
    router = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    return {**router, "first_k_dense_replace": dense, **values}


def _nanochat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check the epsilon: mlx_lm has 1e-5, which can't be told from a smaller one, as norms are of values near 1."""
    if (epsilon := values.get("rms_norm_eps") or 0) > 1e-5:
        raise CheckpointError(f"rms_norm_eps is {epsilon}, which mlx_lm's nanochat doesn't implement")
    return {}


def _minicpm3(values: Mapping[str, Any]) -> dict[str, Any]:
    if (values.get("rope_scaling") or {}).get("mscale_all_dim"):
        raise CheckpointError("rope_parameters has mscale_all_dim, which mlx_lm's minicpm3 doesn't implement")
    return _identity_scaling(values)


def _minimax(values: Mapping[str, Any]) -> dict[str, Any]:
    if "linear_attn_alpha_factor" in values:  # files of MiniMax M2 can have the same model_type
        raise CheckpointError("mlx_lm's minimax is MiniMax M2, without the linear attention of this model")
    return {}


# Further fields that mlx_lm's model of a model_type reads, derived from Hugging Face's.
_DERIVED: dict[Any, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "apertus": lambda values: {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "cohere2": _pattern,
    "deepseek_v2": _identity_scaling,
    "exaone4": _exaone4,
    "exaone_moe": _exaone_moe,
    "gemma3_text": _gemma3,
    "glm_moe_dsa": _glm_moe_dsa,
    "gpt_bigcode": lambda values: {"n_inner": values.get("n_inner") or 4 * values["n_embd"]},
    "mamba2": lambda values: {"intermediate_size": values["expand"] * values["hidden_size"]},
    "minicpm3": _minicpm3,
    "minimax": _minimax,
    "nanochat": _nanochat,
    "solar_open": lambda values: {
        "intermediate_size": 0,
        "first_k_dense_replace": 0,
        "partial_rotary_factor": 1.0,
        **values,
    },
}


def check_unread_fields(name: str, fields: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Check that mlx_lm's model computes what every field of the configuration says.

    Args:
        name: Module in `mlx_lm.models`.
        fields: The fields that the model reads.
        config: The configuration, in mlx_lm's names.

    Raises:
        CheckpointError: Names a field with a value that the model ignores.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    implicit = {field: value for field, value in _IMPLICIT.items() if field not in fields}
    implicit |= _IMPLICIT_BY_MODEL.get(name, {})
    if config.get("use_bidirectional_attention") == "vision":  # for images only
        del implicit["use_bidirectional_attention"]
    for field, value in implicit.items():
        if config.get(field) not in (None, value):
            raise CheckpointError(f"{field} is {config[field]!r}, which mlx_lm's {name} doesn't implement")
    computed = MLX_LM_ACTIVATIONS.get(name, "silu")
    for field in ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"):
        activation = config.get(field)
        if not isinstance(activation, str) or name in _READ_ACTIVATION:
            continue
        if field == "hidden_act" and (config.get("hidden_activation") or config.get("mlp_hidden_act")):
            continue  # the other field has priority
        if not same_activation(activation, computed):
            raise CheckpointError(f"{field} is {activation!r}, mlx_lm's {name} computes {computed}")


def supported_length(name: str, fields: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, str] | None:
    """Length up to which mlx_lm's model computes what the configuration says.

    See `check_unread_fields` for the arguments.

    Returns:
        The number of tokens and the field that the model ignores beyond it, or None if there is no limit.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    types = config.get("layer_types")
    rope = layer_rope(config)
    longrope = rope["rope_type"] == "longrope" and rope.get("short_factor") != rope.get("long_factor")
    # "longrope" uses other wavelengths, for all positions, for texts longer than the original context.
    limits = {"rope_parameters": rope.get("original_max_position_embeddings") if longrope else None}
    if "index_topk" in config:  # mlx_lm's indexer selects other tokens than transformers'
        limits["index_topk"] = config["index_topk"]
    windowed = SLIDING in types if isinstance(types, list) else config.get("use_sliding_window") is not False
    if windowed and ("sliding_window" not in fields or (name in _NEED_LAYER_TYPES and not types)):
        limits["sliding_window"] = config.get("sliding_window")
    return min(((limit, field) for field, limit in limits.items() if is_count(limit)), default=None)
