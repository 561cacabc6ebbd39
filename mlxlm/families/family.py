"""What a family of decoders is: a table between Hugging Face's names and the decoder's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxlm.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """What Hugging Face calls the fields and the modules of a `model_type`.

    Configuration. `fields`: ModelConfig's name -> Hugging Face's, or several, of which the first is written.
    `defaults`: ModelConfig's values where `config.json` is silent, as transformers has them. `fixed_values`: what each
    model of the family has. `read` and `write` translate what no table can, Hugging Face's values -> ModelConfig's
    and back. `unsupported_reason`: why a configuration asks for more than the decoder has, or None.

    Files. `prefix` precedes all names but the head's; some files have one of `other_prefixes` instead. `top_modules` and
    `layer` are tables of modules, the file's name -> the decoder's, after `prefix` and after the number of a layer;
    several, separated by spaces, lie in one matrix. `extra_layer_modules` adds what depends on the configuration. `qkv_interleaved`:
    parts of query, key and value lie together for each key head. `transposed`: modules of a layer whose weight is
    `[in, out]`. `mlx_names`: prefixes of the file's names -> those of mlx_lm's modules, where they differ.
    `ignored_suffixes`: ends of names that are no parameters.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str | tuple[str, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed_values: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    write: Callable[[ModelConfig], Mapping[str, Any]] = lambda config: {}
    unsupported_reason: Callable[[Mapping[str, Any]], str | None] = lambda values: None
    prefix: str = "model."
    other_prefixes: tuple[str, ...] = ("",)
    layers: str = "layers"
    head: str = "lm_head"
    top_modules: Mapping[str, str] = field(default_factory=lambda: {"embed_tokens": "embed_tokens", "norm": "norm"})
    layer: Mapping[str, str] = field(default_factory=dict)
    extra_layer_modules: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    qkv_interleaved: bool = False
    transposed: frozenset[str] = frozenset()
    mlx_names: tuple[tuple[str, str], ...] = ()
    ignored_suffixes: tuple[str, ...] = (".rotary_emb.inv_freq",)

    def hf_names(self, field: str) -> tuple[str, ...]:
        """Hugging Face's names of a field of ModelConfig, the one to write first; none if the family lacks it."""
        names = self.fields.get(field, ())
        return (names,) if isinstance(names, str) else names


def same_names(*names: str) -> dict[str, str]:
    """A table of names that are equal on both sides."""
    return {name: name for name in names}


# Fields that nearly every family has under these names, and the three projections that many keep in one matrix.
COMMON = same_names(
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"


def flag(values: Mapping[str, Any], name: str, default: bool) -> bool:
    """A switch of Hugging Face's configuration, null being its default."""
    value = values.get(name)
    return default if value is None else bool(value)


def first_unsupported(values: Mapping[str, Any], **expected: Any) -> str | None:
    """The first field that is set to something else than the decoder can do."""
    for name, value in expected.items():
        if values.get(name, value) not in (value, None):
            return f"{name} {values[name]!r}"
    return None
