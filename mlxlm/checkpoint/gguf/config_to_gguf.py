"""llama.cpp's metadata of a model, out of its configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mlxlm.checkpoint.gguf.architectures import ARCHITECTURES, Architecture
from mlxlm.config import ModelConfig
from mlxlm.config.rope_scaling import attention_factor
from mlxlm.config.validation import SLIDING
from mlxlm.utils.errors import CheckpointError

INT, FLOAT, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9  # the format's numbers for types of values
_YARN = ("rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")


def architecture_for(config: ModelConfig) -> Architecture:
    """llama.cpp's architecture for a model. Raises CheckpointError, naming the field, for what none of them does."""
    for architecture in ARCHITECTURES.values():
        if config.model_type in architecture.families:
            problem = next(_problems(config, architecture), None)
            if problem:
                message = f"llama.cpp can't run this {config.model_type} model: {problem}"
                raise CheckpointError(message, "a folder as output")
            return architecture
    runs = ", ".join(family for architecture in ARCHITECTURES.values() for family in architecture.families)
    raise CheckpointError(f"llama.cpp has no {config.model_type} models", f"a model of one of {runs}")


def _problems(config: ModelConfig, architecture: Architecture) -> Iterator[str]:
    if config.hidden_act not in architecture.activations:
        yield f"hidden_act is {config.hidden_act!r}, its {architecture.name} has {architecture.activations[0]}"
    if not architecture.free_head_dim and config.num_attention_heads * config.head_dim != config.hidden_size:
        yield f"num_attention_heads · head_dim is not hidden_size ({config.hidden_size})"
    out = config.attention_bias if config.attention_out_bias is None else config.attention_out_bias
    have = {"attention_bias": config.attention_bias, "attention_out_bias": out, "mlp_bias": config.mlp_bias}
    for name, value in have.items():
        optional = architecture.biases == "any" or (architecture.biases == "qkv" and name == "attention_bias")
        if not optional and value != (architecture.biases == "all"):
            yield f"{name} is {value}"
    if architecture.name in ("gemma", "gemma2") and not config.tie_word_embeddings:
        yield "tie_word_embeddings is False"
    if architecture.name == "falcon" and (config.positions != "rope" or not config.parallel_residual):
        yield "it needs rotary positions and parallel_attn"
    if architecture.name == "gemma2":
        yield from _gemma2_problems(config)
    elif config.layer_types is not None:
        yield "layer_types differ"
    kind = _scaling_type(config)
    if kind == "llama3" and architecture.name != "llama":
        yield f"rope_type is 'llama3', which its {architecture.name} lacks"
    if kind == "dynamic" or (kind == "longrope" and architecture.name != "phi3"):
        yield f"rope_type is {kind!r}"
    if kind == "longrope" and "factor" in config.rope_scaling:
        yield "rope_scaling has a factor, it takes the ratio of the two lengths"
    if kind == "yarn" and not _is_plain_yarn(config):
        yield "its YaRN has no scale of attention but 0.1 · ln(factor) + 1"
    if config.partial_rotary_factor != 1 and architecture.name not in ("phi3", "gptneox"):
        yield f"partial_rotary_factor is {config.partial_rotary_factor}"


def _gemma2_problems(config: ModelConfig) -> Iterator[str]:
    layers = config.num_hidden_layers
    wide = config.hidden_size // config.num_attention_heads
    scale = wide if layers == 46 else config.head_dim  # it tells the 27B model by its layers
    if config.query_pre_attn_scalar != scale:
        yield f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, its gemma2 has {scale}"
    if not (config.attn_logit_softcapping and config.final_logit_softcapping):
        yield "attn_logit_softcapping and final_logit_softcapping must be set"
    types = config.layer_types or ((SLIDING,) * layers if config.sliding_window else ())
    if [kind == SLIDING for kind in types] != [i % 2 == 0 for i in range(layers)]:
        yield "layer_types must be sliding and full in turn"


def _scaling_type(config: ModelConfig) -> str:
    return (config.rope_scaling or {}).get("rope_type", "default")


def _is_plain_yarn(config: ModelConfig) -> bool:
    scaling = config.rope_scaling
    usual = 0.1 * math.log(scaling["factor"]) + 1
    attention = scaling.get("attention_factor")
    others = {name for name, value in scaling.items() if name not in (*_YARN, "attention_factor") and value}
    return not others and scaling.get("truncate", True) and (attention is None or abs(attention - usual) < 1e-6)


def compatibility_notes(config: ModelConfig, architecture: Architecture) -> list[str]:
    """Where llama.cpp computes something else than the source, though it runs the file."""
    notes = []
    if config.sliding_window and not architecture.windows and config.sliding_window < config.max_position_embeddings:
        notes.append(
            f"llama.cpp has no sliding window in {architecture.name}: "
            f"beyond {config.sliding_window} tokens it sees the whole text"
        )
    if _scaling_type(config) == "longrope":
        notes.append("llama.cpp takes longrope's long factors by the size of its context, not by that of the text")
    if config.hidden_act == "gelu":
        notes.append("llama.cpp has GELU's tanh approximation only")
    return notes


def config_metadata(config: ModelConfig, architecture: Architecture) -> dict[str, tuple[int, Any]]:
    """Keys below the architecture's name -> the format's type and the value."""
    values: dict[str, tuple[int, Any]] = {
        "context_length": (INT, config.max_position_embeddings),
        "embedding_length": (INT, config.hidden_size),
        "block_count": (INT, config.num_hidden_layers),
        "feed_forward_length": (INT, config.intermediate_size),
        "attention.head_count": (INT, config.num_attention_heads),
        "attention.head_count_kv": (INT, config.num_key_value_heads),
        "vocab_size": (INT, config.vocab_size),
        f"attention.layer_norm{'_rms' * (architecture.norm == 'rms')}_epsilon": (FLOAT, config.rms_norm_eps),
    }
    if architecture.free_head_dim:
        values |= {f"attention.{part}_length": (INT, config.head_dim) for part in ("key", "value")}
    if config.positions == "rope":
        values |= _rope(config)
    if config.sliding_window or architecture.name == "phi3":  # llama.cpp tells Phi-4 by a window of 0
        values["attention.sliding_window"] = (INT, config.sliding_window or 0)
    if architecture.name == "gemma2":
        values["attn_logit_softcapping"] = (FLOAT, config.attn_logit_softcapping)
        values["final_logit_softcapping"] = (FLOAT, config.final_logit_softcapping)
    if architecture.name == "gptneox":
        values["use_parallel_residual"] = (BOOL, config.parallel_residual)
    if architecture.name == "falcon":
        values["tensor_data_layout"] = (STRING, "jploski")  # queries, keys, values one after another
    return {f"{architecture.name}.{short}": value for short, value in values.items()}


def _rope(config: ModelConfig) -> dict[str, tuple[int, Any]]:
    values: dict[str, tuple[int, Any]] = {
        "rope.dimension_count": (INT, config.rotary_dims),
        "rope.freq_base": (FLOAT, config.rope_theta),
    }
    scaling = config.rope_scaling or {}
    kind = _scaling_type(config)
    if kind in ("linear", "yarn", "longrope"):
        values["rope.scaling.type"] = (STRING, kind)
    if kind in ("linear", "yarn"):
        values["rope.scaling.factor"] = (FLOAT, scaling["factor"])
    if kind in ("yarn", "llama3", "longrope"):
        values["rope.scaling.original_context_length"] = (INT, int(scaling["original_max_position_embeddings"]))
    if kind == "longrope":
        values["rope.scaling.attn_factor"] = (FLOAT, attention_factor(scaling, config.max_position_embeddings))
    for name in ("beta_fast", "beta_slow"):
        if kind == "yarn" and name in scaling:
            values[f"rope.scaling.yarn_{name}"] = (FLOAT, scaling[name])
    return values
