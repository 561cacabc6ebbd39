"""Fields of config.json that change the logits and that a model of mlx_lm doesn't read.

Source: mlx_lm/models (0.32).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm.checkpoint.mlx_lm.rope import original_context
from mlxlm.config.components import SLIDING
from mlxlm.config.numbers import is_count
from mlxlm.families.activations import MLX_LM_ACTIVATIONS, same_activation
from mlxlm.utils.errors import CheckpointError

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
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "granitemoehybrid": {"mamba_n_groups": 1},
    "jamba": {"num_experts": 1},
    "llama4": {"num_experts_per_tok": 1},
    "mamba2": {"n_groups": 1},
    "minicpm3": {"tie_word_embeddings": False},
    "nanochat": {"final_logit_softcapping": 15.0},
    "nemotron_h": {"mamba_hidden_act": "silu"},
    "qwen2_moe": {"norm_topk_prob": False},
}
_NEED_LAYER_TYPES = ("llama", "ministral3", "mistral3")  # ignore sliding_window without layer_types
_READ_ACTIVATION = ("gear", "kimi_k3", "muse_glimmer", "muse_spark", "nemotron-nas", "phi3small", "spark2_5")


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
    limits = {"rope_parameters": original_context(config)}
    if "index_topk" in config:  # mlx_lm's indexer selects other tokens than transformers'
        limits["index_topk"] = config["index_topk"]
    windowed = SLIDING in types if isinstance(types, list) else config.get("use_sliding_window") is not False
    if windowed and ("sliding_window" not in fields or (name in _NEED_LAYER_TYPES and not types)):
        limits["sliding_window"] = config.get("sliding_window")
    if name == "llama4_text" and isinstance(types, list) and "chunked_attention" in types:
        limits["attention_chunk_size"] = config.get("attention_chunk_size")
        limits["floor_scale"] = config.get("floor_scale") if config.get("attn_temperature_tuning") else None
    return min(((limit, field) for field, limit in limits.items() if is_count(limit)), default=None)
