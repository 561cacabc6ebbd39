"""How an architecture of llama.cpp stores a model: `Architecture`, of which `architectures.py` has the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.header import MetadataReader
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.config import ModelConfig
from mlxlm.families import FAMILIES, WeightMapping, kv_b_mappings

TOP_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_TYPES = ("linear", "yarn")
# Tables of `Architecture.layer` that several have.
NORMS = {"attn_norm": ("input_layernorm",), "ffn_norm": ("post_attention_layernorm",)}
SEPARATE_QKV = {
    "attn_q": ("self_attn.q_proj",),
    "attn_k": ("self_attn.k_proj",),
    "attn_v": ("self_attn.v_proj",),
    "attn_output": ("self_attn.o_proj",),
}
NORMS_AROUND = {  # before and after both sublayers
    "attn_norm": ("input_layernorm",),
    "post_attention_norm": ("post_attention_layernorm",),
    "ffn_norm": ("pre_feedforward_layernorm",),
    "post_ffw_norm": ("post_feedforward_layernorm",),
}
QK_NORMS = {"attn_q_norm": ("self_attn.q_norm",), "attn_k_norm": ("self_attn.k_norm",)}
PLAIN_MLP = {"ffn_up": ("mlp.up_proj",), "ffn_down": ("mlp.down_proj",)}
GATED_MLP = {"ffn_gate": ("mlp.gate_proj",), **PLAIN_MLP}
LLAMA_LAYER = {**NORMS, **SEPARATE_QKV, **GATED_MLP}
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
_SHARED_EXPERT = {
    **{f"ffn_{name}_shexp": (f"mlp.shared_expert.{name}_proj",) for name in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": ("mlp.shared_expert_gate",),
}
_MAMBA = {
    "ssm_in": ("mamba.in_proj",),
    "ssm_conv1d": ("mamba.conv1d",),
    "ssm_dt.bias": ("mamba.dt_bias",),
    "ssm_a": ("mamba.A_log",),
    "ssm_d": ("mamba.D",),
    "ssm_norm": ("mamba.norm",),
    "ssm_out": ("mamba.out_proj",),
}
_ROUTER_BIAS = "exp_probs_b.bias", "ffn_gate_inp.e_score_correction_bias"
_SHARED_EXPERT_GATE = "ffn_gate_inp_shexp.weight"  # a vector, in files of llama.cpp's converter a row
_SSM_VECTORS = (".ssm_a", ".ssm_d", ".ssm_norm.weight")  # A is -exp(A_log); files have matrices for Mamba


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
        mlp_layer: If set, feed-forwards are layers of their own in the file, after that of the mixer, and these are the
            entries of `layer` for them.
        norm_offset: Norm weights are stored plus one.
        interleaved: Rows of queries and keys are rotary pairs.
        groups: Names of tensors in which the rows of several modules alternate -> the field with the number of groups.
        reorder: Reorders the heads of the decoder's tensors for a file (True), or back.
        biases: Which linear modules have one: "none", "qkv" (optional), "any" (optional) or "all".
        activations: Values of `hidden_act` that it computes.
        experts: Its models can be mixtures of experts.
        free_head_dim: heads · head_dim need not be the hidden size.
        ties_head: A missing `output.weight` is the embedding; otherwise it is required.
        layer_sizes: Its layers may have different numbers of key-value heads, and widths of their feed-forwards, which
            `read_fields` reads.
        recurrent: Value of `layer_types` of its recurrent layers. A file has no key-value heads for them, unless
            `read_fields` and `metadata` say otherwise.
        sliding_window: It has layers with sliding windows, or with chunked attention.
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
    mlp_layer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm_offset: bool = False
    interleaved: bool = False
    groups: Mapping[str, str] = field(default_factory=dict)
    reorder: Callable[[ModelConfig, LazyTensors, bool], LazyTensors] = lambda config, tensors, to_file: tensors
    biases: str = "qkv"
    activations: tuple[str, ...] = ("silu",)
    experts: bool = False
    free_head_dim: bool = False
    ties_head: bool = True
    layer_sizes: bool = False
    recurrent: str | None = None
    sliding_window: bool = False
    rope_types: tuple[str, ...] = ROPE_TYPES
    yarn_multiplier: bool = False
    yarn_truncate: bool = True
    read_fields: Callable[[MetadataReader], dict[str, Any]] = lambda keys: {}
    metadata: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    problems: Callable[[ModelConfig], Iterable[str]] = lambda config: ()

    def from_file(self, tensors: LazyTensors) -> dict[str, LazyTensor]:
        """The tensors of a file with the decoder's values and shapes, and its name of a router's bias."""
        result = {}
        for name, tensor in tensors.items():
            if self._adds_one(name):
                tensor = tensor.astype(mx.float32).transform(lambda value: value - 1)
            elif name.endswith(_SHARED_EXPERT_GATE):
                shape = (1, tensor.shape[-1])
                tensor = tensor.transform(partial(mx.reshape, shape=shape), shape=shape)
            elif name.endswith(_SSM_VECTORS):
                tensor = tensor.transform(mx.flatten, shape=(math.prod(tensor.shape),))
                if name.endswith(".ssm_a"):
                    tensor = tensor.transform(lambda value: mx.log(-value))
            result[name.replace(*_ROUTER_BIAS)] = tensor
        return result

    def to_file(self, tensors: LazyTensors, config: ModelConfig) -> dict[str, LazyTensor]:
        """The inverse of `from_file`."""
        result = {}
        for name, tensor in tensors.items():
            if self._adds_one(name):
                tensor = tensor.astype(mx.float32).transform(lambda value: value + 1)
            elif name.endswith(_SHARED_EXPERT_GATE):
                tensor = tensor.transform(mx.flatten, shape=tensor.shape[-1:])
            elif name.endswith(".ssm_a"):
                tensor = tensor.astype(mx.float32).transform(lambda value: -mx.exp(value))
            if name.endswith(_SSM_VECTORS) and self.recurrent == "mamba":
                size = tensor.shape[0]
                shape = (config.mamba_n_groups, size // config.mamba_n_groups) if "norm" in name else (size, 1)
                tensor = tensor.transform(partial(mx.reshape, shape=shape), shape=shape)
            result[name.replace(*_ROUTER_BIAS[::-1])] = tensor
        return result

    def _adds_one(self, name: str) -> bool:
        return self.norm_offset and name.endswith("norm.weight") and not name.endswith(_SSM_VECTORS)

    @property
    def norm_eps_key(self) -> str:
        """Key of the epsilon of its norms."""
        norm = "layer_norm" if self.fixed_values.get("norm", "").startswith("layer") else "layer_norm_rms"
        return f"attention.{norm}_epsilon"

    @property
    def fixed_values(self) -> Mapping[str, Any]:
        """ModelConfig values that all of its models have."""
        return FAMILIES[self.families[0]].fixed_values

    def weight_mappings(self, config: ModelConfig) -> list[WeightMapping]:
        """How a file of this architecture stores the modules of `config`."""
        rows = {
            f"model.layers.{i}.{matrix.module}": matrix.outputs
            for i, kind in enumerate(config.layer_sublayers)
            for sublayer in kind
            for matrix in sublayer.matrices
        }
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        norm_heads = {f"{name}_norm": n for name, n in heads.items()} if config.qk_norm == "layer_per_head" else {}
        heads |= norm_heads
        experts = {**(_EXPERTS if config.num_experts else {}), **self.extra_layer(config)}
        experts |= _SHARED_EXPERT if config.shared_expert_intermediate_size else {}
        layer = {**self.layer, **(_MAMBA if self.recurrent == "mamba" else {}), **({} if self.mlp_layer else experts)}
        layers = []  # of the file: the decoder's, and its names
        for i in range(config.num_hidden_layers):
            layers.append((i, layer))
            if self.mlp_layer and config.has_mlp(i):
                layers.append((i, {**self.mlp_layer, **experts}))
        mappings = [WeightMapping(name, (module,)) for name, module in self.top_modules.items()]
        # For files of deepseek2 that have it instead of the later ones, attn_k_b and attn_v_b.
        mappings += [replace(m, name=f"blk.{i}.attn_kv_b") for i, m in enumerate(kv_b_mappings(config))]
        for file_layer, (i, table) in enumerate(layers):
            for name, modules in table.items():
                full_names = tuple(f"model.layers.{i}.{module}" for module in modules)
                if len(modules) > 1 and full_names[0] not in rows:  # of another kind of layer
                    continue
                interleaved = heads.get(name, 0) if self.interleaved else 0
                fused_rows = tuple(rows[module] for module in full_names) if len(modules) > 1 else ()
                stacked = len(modules) > 1 and ".switch_mlp." in full_names[0]
                groups = getattr(config, self.groups[name]) if name in self.groups else 1
                mappings.append(
                    WeightMapping(
                        f"blk.{file_layer}.{name}", full_names, fused_rows, groups, interleaved=interleaved,
                        rotary_dims=config.rotary_dims(), head_vectors=norm_heads.get(name, 0), stacked=stacked,
                    )
                )  # fmt: skip
        return mappings


def read_biases(keys: MetadataReader) -> dict[str, Any]:
    """Whether queries, keys and values have biases."""
    return {"attention_bias": keys.has_tensor("blk.0.attn_q.bias")}


def full_attention_problems(is_full: Sequence[bool], interval: int) -> Iterator[str]:
    """Why layers can't run of which only the multiples of `interval` may have full attention."""
    if any(full != ((layer + 1) % interval == 0) for layer, full in enumerate(is_full)):
        yield f"layer_types must have full attention in each layer that is a multiple of {interval}, and in no other"


def read_experts(keys: MetadataReader) -> dict[str, Any]:
    """The number of experts, and how many of them a token goes to; empty without experts."""
    count = keys.count("expert_count", 0)
    return {"num_local_experts": count, "num_experts_per_tok": keys.count("expert_used_count")} if count else {}
