"""Hugging Face's configuration from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from mlxlm.checkpoint.gguf.architecture import Architecture
from mlxlm.checkpoint.gguf.architectures import ARCHITECTURES
from mlxlm.checkpoint.gguf.metadata import MetadataReader
from mlxlm.checkpoint.gguf.rope import read_rope_parameters
from mlxlm.families import FAMILIES


def get_architecture(keys: MetadataReader) -> Architecture:
    """The architecture of a file. Raises CheckpointError for one that this decoder doesn't have."""
    architecture = ARCHITECTURES.get(keys.architecture)
    if architecture is None:
        hint = "one of " + ", ".join(ARCHITECTURES)
        raise keys.error(f"general.architecture is {keys.architecture!r}, which this decoder doesn't support", hint)
    if keys.count("expert_count", 0):
        raise keys.error("this model is a mixture of experts, which this decoder doesn't support")
    return architecture


def read_hf_config(keys: MetadataReader, architecture: Architecture) -> dict[str, Any]:
    """Build Hugging Face's configuration of a file.

    Raises:
        CheckpointError: Names the file and the key.
    """
    _check_sizes(keys)
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // heads)
    values = {
        "vocab_size": keys.header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "intermediate_size": keys.count("feed_forward_length"),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number(architecture.norm_eps_key),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
        **_read_token_ids(keys),
    }
    if architecture.free_head_dim:
        values["head_dim"] = head_dim
        if keys.count("attention.value_length", hidden // heads) != head_dim:
            raise keys.error(f"{keys.architecture}.attention.value_length differs from key_length")
    extra = architecture.read_fields(keys)
    model_type = extra.get("model_type", architecture.families[0])
    family = FAMILIES.get(model_type, FAMILIES["llama"])  # mlx_lm's models have Llama's names
    values = {family.hf_names(name)[0]: value for name, value in values.items() if family.hf_names(name)}
    if architecture.uses_rope:
        rope = values["rope_parameters"] = read_rope_parameters(keys, head_dim)
        values |= {name: rope[name] for name in ("original_max_position_embeddings",) if name in rope}  # for Phi-3
    return {"model_type": model_type, **values, **extra}


def _check_sizes(keys: MetadataReader) -> None:
    """Compare the sizes that others are derived from with the tensors."""
    embedding = keys.header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise keys.error("there is no matrix token_embd.weight")
    layers, tensors = keys.count("block_count"), len(keys.header.tensors)
    if not 0 < layers <= tensors:
        raise keys.error(f"{keys.architecture}.block_count is {layers}, there are {tensors} tensors")
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    if embedding.shape[1] != hidden or not heads:
        raise keys.error(
            f"token_embd.weight is {list(embedding.shape)}, {keys.architecture}.embedding_length is {hidden}"
            f" and attention.head_count {heads}"
        )


def _read_token_ids(keys: MetadataReader) -> dict[str, Any]:
    ids = {role: keys.id(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "padding", "eot", "eom")}
    ends = (ids[role] for role in ("eos", "eot", "eom"))
    eos = list(dict.fromkeys(id for id in ends if id is not None))
    values = {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"]}
    return {**values, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
