"""How an architecture of llama.cpp stores a model: `Architecture`, of which `architectures.py` has the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.header import MetadataReader
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.config import ModelConfig
from mlxlm.families import FAMILIES, WeightMapping, kv_b_mappings

TOP_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_TYPES = ("linear", "yarn")
# Metadata below the architecture's prefix -> ModelConfig's field.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_EXPERTS = {
    "ffn_gate_inp": ("mlp.gate",),
    **{f"ffn_{name}_exps": (f"mlp.switch_mlp.{name}_proj",) for name in ("gate", "up", "down")},
}
_ROUTER_BIAS = "exp_probs_b.bias", "ffn_gate_inp.e_score_correction_bias"


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        name: The value of `general.architecture`.
        families: Hugging Face's `model_type`s that it runs; the first is the default when reading.
        layer: Names below `blk.N.` -> modules below `model.layers.N.`, several where one tensor holds their rows. May
            be whole tensors on both sides.
        top_modules: Names -> modules outside of the layers.
        extra_layer: Further entries of `layer` that depend on the configuration.
        norm_offset: Norm weights are stored plus one.
        interleaved: Rows of queries and keys are rotary pairs.
        biases: Which linear modules have one: "none", "qkv" (optional), "any" (optional) or "all".
        activations: Values of `hidden_act` that it computes.
        experts: Its models can be mixtures of experts.
        free_head_dim: heads · head_dim need not be the hidden size.
        ties_head: A missing `output.weight` is the embedding; otherwise it is required.
        sliding_window: Reads `attention.sliding_window`.
        rope_types: Values of `rope_type` that it computes.
        yarn_multiplier: Its YaRN has an `mscale`, and the same `mscale_all_dim`.
        yarn_truncate: The value of YaRN's `truncate` in its models, which isn't in the files.
        read_fields: Further fields of Hugging Face's configuration, from the metadata of a file.
        metadata: Further metadata, from a configuration; keys without the architecture's prefix.
        problems: Further reasons why it can't run a configuration.
    """

    name: str
    families: tuple[str, ...]
    layer: Mapping[str, tuple[str, ...]]
    top_modules: Mapping[str, str] = field(default_factory=lambda: TOP_MODULES)
    extra_layer: Callable[[ModelConfig], Mapping[str, tuple[str, ...]]] = lambda config: {}
    norm_offset: bool = False
    interleaved: bool = False
    biases: str = "qkv"
    activations: tuple[str, ...] = ("silu",)
    experts: bool = False
    free_head_dim: bool = False
    ties_head: bool = True
    sliding_window: bool = False
    rope_types: tuple[str, ...] = ROPE_TYPES
    yarn_multiplier: bool = False
    yarn_truncate: bool = True
    read_fields: Callable[[MetadataReader], dict[str, Any]] = lambda keys: {}
    metadata: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    problems: Callable[[ModelConfig], Iterable[str]] = lambda config: ()

    def with_norm_offset(self, tensors: LazyTensors, sign: int) -> LazyTensors:
        """The tensors of a file with `sign` added to the weights of norms, if files have them plus one."""
        if not self.norm_offset:
            return tensors

        def add(tensor: LazyTensor) -> LazyTensor:
            return tensor.astype(mx.float32).transform(lambda value: value + sign)

        return {name: add(tensor) if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}

    @property
    def norm_eps_key(self) -> str:
        """Key of the epsilon of its norms."""
        norm = "layer_norm" if self.fixed_values.get("norm") == "layer" else "layer_norm_rms"
        return f"attention.{norm}_epsilon"

    @property
    def fixed_values(self) -> Mapping[str, Any]:
        """ModelConfig values that all of its models have."""
        return FAMILIES[self.families[0]].fixed_values

    def weight_mappings(self, config: ModelConfig) -> list[WeightMapping]:
        """How a file of this architecture stores the modules of `config`."""
        q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        rows = {"attn_qkv": (q, kv, kv), "ffn_up": (config.intermediate_size,) * 2}
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        layer = {**self.layer, **(_EXPERTS if config.num_experts else {}), **self.extra_layer(config)}
        mappings = [WeightMapping(name, (module,)) for name, module in self.top_modules.items()]
        # For files of deepseek2 that have it instead of the later ones, attn_k_b and attn_v_b.
        mappings += [replace(m, name=f"blk.{i}.attn_kv_b") for i, m in enumerate(kv_b_mappings(config))]
        for i in range(config.num_hidden_layers):
            for name, modules in layer.items():
                full_names = tuple(f"model.layers.{i}.{module}" for module in modules)
                interleaved = heads.get(name, 0) if self.interleaved else 0
                fused_rows = rows[name] if len(modules) > 1 else ()
                mappings.append(WeightMapping(f"blk.{i}.{name}", full_names, fused_rows, interleaved=interleaved))
        return mappings

    def renamed(self, tensors: LazyTensors, from_file: bool) -> dict[str, LazyTensor]:
        """The tensors with the name of the bias of a router for the decoder, or for a file."""
        before, after = _ROUTER_BIAS if from_file else _ROUTER_BIAS[::-1]
        return {name.replace(before, after): tensor for name, tensor in tensors.items()}
