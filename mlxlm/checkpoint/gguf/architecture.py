"""What differs between the architectures of llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxlm.checkpoint.gguf.metadata import MetadataReader
from mlxlm.config import ModelConfig
from mlxlm.families import WeightMapping

TOP_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_TYPES = ("linear", "yarn")


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        name: The value of `general.architecture`.
        families: Hugging Face's `model_type`s that it runs; the first is the default when reading.
        layer: Names below `blk.N.` -> modules below `model.layers.N.`, several where one tensor holds their rows.
        top_modules: Names -> modules outside of the layers.
        extra_layer: Further entries of `layer` that depend on the configuration.
        norm: "rms" or "layer".
        norm_offset: Norm weights are stored plus one.
        interleaved: Rows of queries and keys are rotary pairs.
        biases: Which linear modules have one: "none", "qkv" (optional), "any" (optional) or "all".
        activations: Values of `hidden_act` that it computes.
        free_head_dim: heads · head_dim need not be the hidden size.
        ties_head: A missing `output.weight` is the embedding; otherwise it is required.
        sliding_window: Reads `attention.sliding_window`.
        uses_rope: Has rotary positions.
        rope_types: Values of `rope_type` that it computes.
        partial_rotary: Reads `rope.dimension_count`.
        read_fields: Further fields of Hugging Face's configuration, from the metadata of a file.
        metadata: Further metadata, from a configuration; keys without the architecture's prefix.
        problems: Further reasons why it can't run a configuration.
    """

    name: str
    families: tuple[str, ...]
    layer: Mapping[str, tuple[str, ...]]
    top_modules: Mapping[str, str] = field(default_factory=lambda: TOP_MODULES)
    extra_layer: Callable[[ModelConfig], Mapping[str, tuple[str, ...]]] = lambda config: {}
    norm: str = "rms"
    norm_offset: bool = False
    interleaved: bool = False
    biases: str = "qkv"
    activations: tuple[str, ...] = ("silu",)
    free_head_dim: bool = False
    ties_head: bool = True
    sliding_window: bool = False
    uses_rope: bool = True
    rope_types: tuple[str, ...] = ROPE_TYPES
    partial_rotary: bool = False
    read_fields: Callable[[MetadataReader], dict[str, Any]] = lambda keys: {}
    metadata: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    problems: Callable[[ModelConfig], Iterable[str]] = lambda config: ()

    @property
    def norm_eps_key(self) -> str:
        """Key of the epsilon of its norms."""
        return f"attention.layer_norm{'_rms' if self.norm == 'rms' else ''}_epsilon"

    def weight_mappings(self, config: ModelConfig) -> list[WeightMapping]:
        """How a file of this architecture stores the modules of `config`."""
        q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        rows = {"attn_qkv": (q, kv, kv), "ffn_up": (config.intermediate_size,) * 2}
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        mappings = [WeightMapping(name, (module,)) for name, module in self.top_modules.items()]
        for i in range(config.num_hidden_layers):
            for name, modules in {**self.layer, **self.extra_layer(config)}.items():
                full_names = tuple(f"model.layers.{i}.{module}" for module in modules)
                interleaved = heads.get(name, 0) if self.interleaved else 0
                fused_rows = rows[name] if len(modules) > 1 else ()
                mappings.append(WeightMapping(f"blk.{i}.{name}", full_names, fused_rows, interleaved=interleaved))
        return mappings
