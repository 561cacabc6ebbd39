"""Activations by the names that configurations have for them."""

from __future__ import annotations

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "sigmoid")

# Other names of the same functions. Source: transformers, activations.py
_SYNONYMS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}


def own_activation(name: str) -> str:
    """The name in ACTIVATIONS, or `name` itself where the decoder lacks it."""
    return _SYNONYMS.get(name, name)
