"""Names of activation functions, and the activations that mlx_lm's models compute."""

from __future__ import annotations

from mlxlm.config import ModelConfig

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
# The activation that a model of mlx_lm computes whatever config.json says, "gelu" in any of its forms; "silu" in
# models that are not listed. Source: mlx_lm/models/*.py (0.32)
MLX_LM_ACTIVATIONS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2"), "silu"),
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


def mlx_lm_activation_mismatch(config: ModelConfig) -> str | None:
    """Describe the activation that mlx_lm computes instead of the configured one; None if it computes the same."""
    computed = MLX_LM_ACTIVATIONS.get(config.model_type)
    if computed is None or same_activation(config.hidden_act, computed):
        return None
    return f"its {config.model_type} computes {computed}, this model uses {config.hidden_act}"
