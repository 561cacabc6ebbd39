"""Activations by the names that configurations have for them."""

from __future__ import annotations

from mlxlm.config import ModelConfig

# Other names of the same functions. Source: transformers, activations.py
_SYNONYMS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}


# What mlx_lm computes in a family, whatever the file says. Source: mlx_lm/models/*.py (0.32)
_IN_MLX_LM = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2"), "silu"),
    **dict.fromkeys(("gemma", "gemma2", "gpt2", "gpt_neox"), "gelu"),
}


def mlx_lm_activation_mismatch(config: ModelConfig) -> str | None:
    """That mlx_lm opens a ModelConfig's files and computes another activation; None where it has the same, or another
    form of gelu."""
    theirs = _IN_MLX_LM.get(config.model_type)
    if theirs is None or config.hidden_act.startswith(theirs):
        return None
    return f"its {config.model_type} has {theirs} for the activation, this model has {config.hidden_act}"


def normalize_activation(name: str) -> str:
    """The name in ACTIVATIONS, or `name` itself where the decoder lacks it."""
    return _SYNONYMS.get(name, name)
