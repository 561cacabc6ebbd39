"""Names of activation functions, and the activations that mlx_lm's models compute."""

from __future__ import annotations

from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL

# Other names of the same functions. Source: transformers, activations.py
_SYNONYMS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "sqrelu": "relu2",
    "relu_squared": "relu2",
}

_GELU = (
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neox",
    "gptj", "phi", "phixtral", "recurrent_gemma", "starcoder2",
)  # fmt: skip
_SILU = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3", "granite", "cohere", "cohere2", "olmo3",
    "exaone4", "seed_oss", "glm", "glm4", "stablelm", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe",
)  # fmt: skip
# The activation that a model of mlx_lm computes whatever config.json says, "gelu" in any of its forms; "silu" in
# models that are not listed. Source: mlx_lm/models/*.py (0.32)
MLX_LM_ACTIVATIONS = {
    **dict.fromkeys(_SILU, "silu"),
    **dict.fromkeys(_GELU, "gelu"),
    **dict.fromkeys(("bitnet", "nanochat", "nemotron", "nemotron_h", "rwkv7"), "relu2"),
    "apertus": "xielu",
}


def normalize_activation(name: str) -> str:
    """Return the name in ACTIVATIONS, or `name` itself for an activation that the decoder doesn't have."""
    return _SYNONYMS.get(name, name)


def same_activation(name: str, other: str) -> bool:
    """Whether two names mean one function; all forms of "gelu" are the same, they differ by less than 0.001."""
    return name.startswith(other) if other == "gelu" else normalize_activation(name) == other


def mlx_lm_mismatch(config: ModelConfig) -> str | None:
    """Describe what mlx_lm computes instead of what is configured; None if it computes the same."""
    if config.clip_qkv is not None:
        return f"its {config.model_type} doesn't clip queries, keys and values (clip_qkv)"
    if config.model_type == "gpt_oss":
        return _gpt_oss_mismatch(config)
    if config.model_type == "glm" and config.partial_rotary_factor != 1:
        return f"its glm rotates whole heads, this model {config.partial_rotary_factor:g} of them"
    types = config.layer_types or ()
    if config.model_type == "qwen3_next" and FULL in types:
        interval = types.index(FULL) + 1
        if any((kind == FULL) != ((layer + 1) % interval == 0) for layer, kind in enumerate(types)):
            return f"its qwen3_next has attention in layers that are a multiple of {interval}, this model in others"
    computed = MLX_LM_ACTIVATIONS.get(config.model_type)
    if computed is None or same_activation(config.hidden_act, computed):
        return None
    return f"its {config.model_type} computes {computed}, this model uses {config.hidden_act}"


def _gpt_oss_mismatch(config: ModelConfig) -> str | None:
    if config.quantization is None:
        return "its gpt_oss only reads quantized experts"
    if (config.rope_scaling or {}).get("truncate", True) is False:
        return "its gpt_oss rounds the bounds of YaRN, this model doesn't (truncate is false)"
    if (config.swiglu_limit, config.swiglu_alpha) != (7.0, 1.702):
        return "its gpt_oss has swiglu_limit 7 and swiglu_alpha 1.702, this model others"
    return None
