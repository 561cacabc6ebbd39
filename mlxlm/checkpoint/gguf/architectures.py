"""The decoders of llama.cpp that are also ours: how each names the modules, and what it can't do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxlm.config import ModelConfig
from mlxlm.families import WeightMapping

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_NORMS = {"attn_norm": ("input_layernorm",), "ffn_norm": ("post_attention_layernorm",)}
_SEPARATE = {
    "attn_q": ("self_attn.q_proj",),
    "attn_k": ("self_attn.k_proj",),
    "attn_v": ("self_attn.v_proj",),
    "attn_output": ("self_attn.o_proj",),
}
_QK_NORMS = {"attn_q_norm": ("self_attn.q_norm",), "attn_k_norm": ("self_attn.k_norm",)}
_FUSED = {"attn_qkv": _QKV, "attn_output": ("self_attn.o_proj",)}
_PLAIN_MLP = {"ffn_up": ("mlp.up_proj",), "ffn_down": ("mlp.down_proj",)}
_GATED_MLP = {"ffn_gate": ("mlp.gate_proj",), **_PLAIN_MLP}
_AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's (src/models/NAME.cpp) with the families that it runs.

    `families`: `model_type`s of Hugging Face. `layer`: names in `blk.N.` -> modules in `model.layers.N.`, several
    where one tensor holds the rows of several; `top_modules`: names of the modules outside of the layers.
    `interleaved`: the rows of queries and keys are rotary pairs. `norm_offset`: norms are stored plus one.
    `biases`: which linear modules have one: "none", "qkv" (they may), "any" (each may) or "all". `activations`: what
    llama.cpp computes, by all the names that it has. `free_head_dim`: heads · head_dim need not be the hidden size.
    `ties_head`: a missing `output.weight` is the embedding, else there must be one. `windows`: it reads
    `attention.sliding_window`.
    """

    name: str
    families: tuple[str, ...]
    layer: Mapping[str, tuple[str, ...]]
    top_modules: Mapping[str, str] = field(default_factory=lambda: _AROUND)
    norm: str = "rms"
    interleaved: bool = False
    norm_offset: bool = False
    biases: str = "qkv"
    activations: tuple[str, ...] = ("silu", "swish")
    free_head_dim: bool = False
    ties_head: bool = True
    windows: bool = False

    def weight_mappings(self, config: ModelConfig) -> list[WeightMapping]:
        """How a file of this architecture keeps the modules of `config`."""
        q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        rows = {"attn_qkv": (q, kv, kv), "ffn_up": (config.intermediate_size,) * 2}
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        weight_mappings = [WeightMapping(name, (module,)) for name, module in self.top_modules.items()]
        for i in range(config.num_hidden_layers):
            for name, modules in self._layer(config).items():
                full = tuple(f"model.layers.{i}.{module}" for module in modules)
                interleaved = heads.get(name, 0) if self.interleaved else 0
                joined = rows[name] if len(modules) > 1 else ()
                weight_mappings.append(WeightMapping(f"blk.{i}.{name}", full, joined, interleaved=interleaved))
        return weight_mappings

    def _layer(self, config: ModelConfig) -> Mapping[str, tuple[str, ...]]:
        if self.name != "falcon" or config.shared_norm:
            return self.layer
        # Falcon 40B has a norm for each of its parallel sublayers; the one that the 7B model hasn't is attention's.
        return {**self.layer, "attn_norm": ("post_attention_layernorm",), "attn_norm_2": ("input_layernorm",)}


_GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # llama.cpp has the tanh form for all of them

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "llama", ("llama", "mistral"), {**_NORMS, **_SEPARATE, **_GATED_MLP},
            interleaved=True, biases="any", free_head_dim=True,
        ),
        Architecture("qwen2", ("qwen2",), {**_NORMS, **_SEPARATE, **_GATED_MLP}),
        Architecture("qwen3", ("qwen3",), {**_NORMS, **_SEPARATE, **_QK_NORMS, **_GATED_MLP}, free_head_dim=True),
        Architecture(
            "gemma2", ("gemma2",),
            {
                **_SEPARATE, **_GATED_MLP,
                "attn_norm": ("input_layernorm",),
                "post_attention_norm": ("post_attention_layernorm",),
                "ffn_norm": ("pre_feedforward_layernorm",),
                "post_ffw_norm": ("post_feedforward_layernorm",),
            },
            norm_offset=True, free_head_dim=True, windows=True, activations=_GELU[1:3],
        ),
        Architecture(
            "gemma", ("gemma",), {**_NORMS, **_SEPARATE, **_GATED_MLP},
            norm_offset=True, free_head_dim=True, activations=_GELU[1:3],
        ),
        Architecture(
            "olmo2", ("olmo2",),
            {
                **_SEPARATE, **_QK_NORMS, **_GATED_MLP,
                "post_attention_norm": ("post_attention_layernorm",),
                "post_ffw_norm": ("post_feedforward_layernorm",),
            },
            ties_head=False,
        ),
        Architecture(
            "phi3", ("phi3",),
            {**_NORMS, **_FUSED, "ffn_up": ("mlp.gate_proj", "mlp.up_proj"), "ffn_down": ("mlp.down_proj",)},
            biases="none",
        ),
        Architecture(
            "gpt2", ("gpt2",), {**_NORMS, **_FUSED, **_PLAIN_MLP},
            {**_AROUND, "position_embd": "model.embed_positions"},
            norm="layer", biases="all", activations=_GELU,
        ),
        Architecture(
            "bloom", ("bloom",), {**_NORMS, **_FUSED, **_PLAIN_MLP},
            {**_AROUND, "token_embd_norm": "model.embed_layernorm"},
            norm="layer", biases="all", activations=_GELU,
        ),
        Architecture(
            "gptneox", ("gpt_neox",), {**_NORMS, **_FUSED, **_PLAIN_MLP},
            norm="layer", biases="all", activations=_GELU, ties_head=False,
        ),
        Architecture(
            "falcon", ("falcon",), {"attn_norm": ("input_layernorm",), **_FUSED, **_PLAIN_MLP},
            norm="layer", biases="none", activations=_GELU,
        ),
    )
}  # fmt: skip
