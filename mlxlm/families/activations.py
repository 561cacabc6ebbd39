"""Names of activation functions, and the activations that mlx_lm's models compute."""

from __future__ import annotations

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
    "ministral3", "llama4_text", "ernie4_5", "helium", "exaone", "dots1", "minimax_m2",
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
