"""Fields of config.json that change the result and that a model of mlx_lm doesn't read. Source: mlx_lm/models (0.32)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm.checkpoint.mlx_lm_rope import SLIDING, original_context
from mlxlm.config.validation import is_count
from mlxlm.utils.errors import CheckpointError

# The only value with which a model of mlx_lm that doesn't read the field computes the right thing.
_NEUTRAL: dict[str, Any] = {
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "final_logit_softcapping": None,
    "rope_interleave": True,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_bidirectional_attention": False,
    "use_mrope": False,
}
# The same for one of mlx_lm's models, also for fields that it reads and implements in one form.
_OF_MODEL: dict[str, dict[str, Any]] = {
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
_BY_LAYER_TYPES = ("llama", "ministral3", "mistral3")  # without which they ignore sliding_window
_GELU = (
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neox",
    "gptj", "phi", "phixtral", "recurrent_gemma", "starcoder2",
)  # fmt: skip
# What mlx_lm's models compute, whatever the file says; "silu" in all others.
_ACTIVATIONS = {
    **dict.fromkeys(_GELU, "gelu"),
    **dict.fromkeys(("bitnet", "nanochat", "nemotron", "nemotron_h", "rwkv7"), "relu2"),
    "apertus": "xielu",
}
_READ_IT = ("gear", "kimi_k3", "muse_glimmer", "muse_spark", "nemotron-nas", "phi3small", "spark2_5")
_SYNONYMS = {"swish": "silu", "sqrelu": "relu2", "relu_squared": "relu2"}


def check_unread_fields(name: str, read: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming the field, for a value without which mlx_lm's model `name` would run.

    read: the fields that the model reads.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    neutral = {field: value for field, value in _NEUTRAL.items() if field not in read} | _OF_MODEL.get(name, {})
    if config.get("use_bidirectional_attention") == "vision":  # of pictures alone; a text is read as ever
        del neutral["use_bidirectional_attention"]
    for field, value in neutral.items():
        if config.get(field) not in (None, value):
            raise CheckpointError(f"{field} is {config[field]!r}, which mlx_lm's {name} doesn't implement")
    own = _ACTIVATIONS.get(name, "silu")
    for field in ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"):
        activation = config.get(field)
        if isinstance(activation, str) and name not in _READ_IT and not _same(activation, own, field, config):
            raise CheckpointError(f"{field} is {activation!r}, mlx_lm's {name} computes {own}")


def supported_length(name: str, read: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, str] | None:
    """The number of tokens up to which mlx_lm's model `name` computes what the configuration says, and the field that
    it ignores beyond; None without such a limit."""
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    types = config.get("layer_types")
    limits = {"rope_parameters": original_context(config)}
    if "index_topk" in config:  # mlx_lm's indexer chooses other tokens than transformers'
        limits["index_topk"] = config["index_topk"]
    windowed = SLIDING in types if isinstance(types, list) else config.get("use_sliding_window") is not False
    if windowed and ("sliding_window" not in read or (name in _BY_LAYER_TYPES and not types)):
        limits["sliding_window"] = config.get("sliding_window")
    if name == "llama4_text" and isinstance(types, list) and "chunked_attention" in types:
        limits["attention_chunk_size"] = config.get("attention_chunk_size")
        limits["floor_scale"] = config.get("floor_scale") if config.get("attn_temperature_tuning") else None
    return min(((limit, field) for field, limit in limits.items() if is_count(limit)), default=None)


def _same(activation: str, own: str, field: str, config: Mapping[str, Any]) -> bool:
    """All forms of gelu count as one: they differ by less than 0.001."""
    if field == "hidden_act" and (config.get("hidden_activation") or config.get("mlp_hidden_act")):
        return True  # of which the other one counts
    return activation.startswith(own) if own == "gelu" else _SYNONYMS.get(activation, activation) == own
