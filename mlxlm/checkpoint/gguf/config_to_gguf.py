"""llama.cpp's metadata from a model's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxlm.checkpoint.gguf.architecture import Architecture
from mlxlm.checkpoint.gguf.architectures import ARCHITECTURES
from mlxlm.checkpoint.gguf.rope import rope_metadata, rope_problems, rope_type
from mlxlm.config import ModelConfig
from mlxlm.utils.errors import CheckpointError


def architecture_for(config: ModelConfig) -> Architecture:
    """llama.cpp's architecture for a model.

    Raises:
        CheckpointError: llama.cpp has no such model, or doesn't implement a field, which is named.
    """
    for architecture in ARCHITECTURES.values():
        if config.model_type in architecture.families:
            problem = next(_problems(config, architecture), None)
            if problem:
                message = f"this {config.model_type} model can't be written as GGUF for llama.cpp: {problem}"
                raise CheckpointError(message, "a folder as output")
            return architecture
    families = ", ".join(family for architecture in ARCHITECTURES.values() for family in architecture.families)
    raise CheckpointError(f"llama.cpp has no {config.model_type} models", f"a model of one of {families}")


def _problems(config: ModelConfig, architecture: Architecture) -> Iterator[str]:
    if config.hidden_act not in architecture.activations:
        yield f"hidden_act is {config.hidden_act!r}, its {architecture.name} has {architecture.activations[0]}"
    if not architecture.free_head_dim and config.num_attention_heads * config.head_dim != config.hidden_size:
        yield f"num_attention_heads · head_dim is not hidden_size ({config.hidden_size})"
    out_bias = config.attention_bias if config.attention_out_bias is None else config.attention_out_bias
    biases = {"attention_bias": config.attention_bias, "attention_out_bias": out_bias, "mlp_bias": config.mlp_bias}
    for name, value in biases.items():
        optional = architecture.biases == "any" or (architecture.biases == "qkv" and name == "attention_bias")
        if not optional and value != (architecture.biases == "all"):
            yield f"{name} is {value}"
    if config.layer_types is not None and not architecture.sliding_window:
        yield "layer_types differ"
    yield from architecture.problems(config)
    yield from rope_problems(config, architecture.rope_types)
    if config.partial_rotary_factor != 1 and not architecture.partial_rotary:
        yield f"partial_rotary_factor is {config.partial_rotary_factor}"


def compatibility_notes(config: ModelConfig, architecture: Architecture) -> list[str]:
    """Describe where llama.cpp runs the file but computes something else than the source."""
    notes, window = [], config.sliding_window
    if window and not architecture.sliding_window and window < config.max_position_embeddings:
        notes.append(
            f"llama.cpp has no sliding window in {architecture.name}: beyond {window} tokens it attends to all of them"
        )
    if rope_type(config) == "longrope":
        notes.append("llama.cpp selects longrope's long factors by its context size, not by the length of the text")
    if config.hidden_act == "gelu":
        notes.append("llama.cpp only has the tanh approximation of GELU")
    return notes


def config_metadata(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """The model's metadata: keys with the architecture's prefix, values as `write_header` expects them."""
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        architecture.norm_eps_key: float(config.rms_norm_eps),
    }
    if architecture.free_head_dim:
        values |= {f"attention.{part}_length": config.head_dim for part in ("key", "value")}
    if config.positions == "rope":
        values |= rope_metadata(config)
    if config.sliding_window:
        values["attention.sliding_window"] = config.sliding_window
    values |= architecture.metadata(config)
    return {f"{architecture.name}.{short}": value for short, value in values.items()}
