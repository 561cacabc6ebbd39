"""`ModelConfig`: the configuration of a decoder, in Hugging Face's names, validated as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxlm.config import counts
from mlxlm.config.components import NORM_PLACEMENTS, SHARED_NORM, SLIDING, NormPlacement
from mlxlm.config.numbers import is_count
from mlxlm.config.validation import validate_config
from mlxlm.utils.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. The defaults are Llama's.

    Names and meanings are those of Hugging Face's `LlamaConfig`, or of the architecture that introduced a field.
    The values of `norm`, `norm_placement` and `positions` are listed in `mlxlm.config.components`.

    Attributes:
        num_key_value_heads: Equal to `num_attention_heads` (the default) for multi-head attention, 1 for multi-query
            attention, between them for grouped-query attention.
        head_dim: Default: `hidden_size / num_attention_heads`.
        rms_norm_eps: Epsilon of any norm.
        attention_bias: Biases of the query, key and value projections.
        attention_out_bias: Bias of the output projection. None: as `attention_bias`.
        hidden_act: Activation, of the gate if `mlp_gated`.
        norm: "rms", or "layer" with a bias.
        norm_unit_offset: The norm weight is stored minus 1 (Gemma).
        norm_placement: "pre", "post", "output" or "both".
        parallel_residual: Attention and feed-forward read the same stream.
        shared_norm: They also share one norm (Falcon 7B).
        positions: "rope", "learned", "sinusoidal" (a table of fixed values, with which embeddings need a multiplier:
            Vaswani et al. 2017), "alibi" or "none".
        position_offset: Rows at the start of a position table that stand for no position (OPT has 2).
        rope_scaling: Hugging Face's object with `rope_type`; see `mlxlm.config.rope_scaling`.
        partial_rotary_factor: Fraction of a head that is rotated.
        sliding_window: Number of tokens that a token attends to, including itself.
        layer_types: "sliding_attention" for layers with the window, "full_attention" for others. None: all have it.
        qk_norm: Norms of queries and keys: "head" (Qwen 3) or "projection" (OLMo 2).
        alibi_scaled: ALiBi's biases are divided by sqrt(head_dim), like the scores (Falcon).
        attn_logit_softcapping: Soft cap of attention scores (Gemma 2).
        final_logit_softcapping: Soft cap of the output logits (Gemma 2).
        query_pre_attn_scalar: Scores are divided by its square root. None: by that of head_dim.
        mlp_gated: Feed-forward with a gate, else one up projection and the activation.
        embedding_multiplier: Factor on the embeddings.
        embedding_norm: Normalize the embeddings (BLOOM).
        quantization: MLX's object, such as `{"bits": 4, "group_size": 64, "mode": "affine"}`, with an object or False
            (not quantized) under the name of a module that differs.

    Raises:
        ConfigError: Some values can't work; the message lists all problems.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int = None  # type: ignore[assignment]  # both are set in __post_init__
    head_dim: int = None  # type: ignore[assignment]
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    hidden_act: str = "silu"
    model_type: str = "llama"
    norm: str = "rms"
    norm_unit_offset: bool = False
    norm_placement: str = "pre"
    parallel_residual: bool = False
    shared_norm: bool = False
    positions: str = "rope"
    position_offset: int = 0
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    qk_norm: str | None = None
    alibi_scaled: bool = False
    attention_out_bias: bool | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    query_pre_attn_scalar: float | None = None
    mlp_gated: bool = True
    embedding_multiplier: float = 1.0
    embedding_norm: bool = False
    quantization: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        explicit_head_dim = self.head_dim is not None
        if not explicit_head_dim and is_count(self.hidden_size) and is_count(self.num_attention_heads):
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if isinstance(self.layer_types, list):
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if problems := list(validate_config(self, explicit_head_dim)):
            raise ConfigError("this configuration can't work: " + "; ".join(problems))

    def with_changes(self, **changes: Any) -> ModelConfig:
        """A copy with other values, validated again."""
        return replace(self, **changes)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The token ids that end a text."""
        eos = self.eos_token_id
        return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)

    @property
    def layer_norms(self) -> NormPlacement:
        """The norms of a layer."""
        return SHARED_NORM if self.shared_norm else NORM_PLACEMENTS[self.norm_placement]

    @property
    def rotary_dims(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor) if self.positions == "rope" else 0

    @property
    def longrope_original_length(self) -> int | None:
        """With longrope, the text length beyond which the wavelengths of all positions change; else None."""
        scaling = self.rope_scaling or {}
        return scaling["original_max_position_embeddings"] if scaling.get("rope_type") == "longrope" else None

    def window(self, layer: int) -> int | None:
        """Number of tokens that a token attends to in this layer, including itself; None without a window."""
        if self.layer_types is not None and self.layer_types[layer] != SLIDING:
            return None
        return self.sliding_window

    def parameter_count(self) -> int:
        """Number of parameters; tied embedding and head count once."""
        return sum(counts.count_parameters(self).values())

    def flops_per_token(self, context_length: int, training: bool = False) -> int:
        """Floating-point operations for one token that attends to `context_length` keys, 2 per multiply-add.

        Forward: 2 per matrix parameter, and 4·H·D·context per layer for the scores and the weighted sum of values,
        where a sliding window limits the context. Training: 3 times that, since the backward pass is twice the
        forward pass (Kaplan et al. 2020, section 2.1). With a causal mask, the mean context is half the sequence.
        """
        forward = int(sum(counts.forward_flops(self, counts.attended_keys(self, context_length)).values()))
        return 3 * forward if training else forward

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes that a token adds to the key-value cache over all layers, until windows are full."""
        return counts.kv_cache_values(self, 1) * bytes_per_value
