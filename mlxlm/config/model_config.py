"""The configuration of a decoder, in Hugging Face's names, validated as a whole; and the presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlxlm.config import counts
from mlxlm.config.numbers import is_count
from mlxlm.config.validation import config_errors
from mlxlm.utils.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, assembled from parts by these fields. The defaults are Llama's; names and meanings are those
    of Hugging Face's `LlamaConfig`, and of the family that first had a field for what Llama lacks.

    `num_key_value_heads` equal to `num_attention_heads` is multi-head attention, 1 is multi-query
    attention, anything between is grouped-query attention.

    `norm` "rms" or "layer" (with bias), `rms_norm_eps` being the epsilon of either; `norm_unit_offset`: the weight
    is stored less one (Gemma). `norm_placement`: "pre" (on a sublayer's input), "post" (on the stream, after the
    addition: Vaswani et al. 2017), "output" (on its output, before the addition: OLMo 2) or "both" (Gemma 2).
    `parallel_residual`: attention and feed-forward see the same stream, by one norm (`shared_norm`, Falcon 7B) or by
    one each.

    `positions`: "rope", "learned" (a table whose first `position_offset` rows stand for no position: OPT has 2),
    "sinusoidal" (the same with fixed values, beside which embeddings want a multiplier: Vaswani et al. 2017), "alibi"
    or "none". `rope_scaling` is Hugging Face's object with `rope_type`; `partial_rotary_factor` is the share of a head
    that turns. `alibi_scaled`: the biases are divided by sqrt(head_dim) as the scores are (Falcon). `sliding_window`:
    tokens that a row sees, its own included, in the layers that `layer_types` calls "sliding_attention" (None: in
    all). `qk_norm`: "head" (Qwen 3) or "projection" (OLMo 2).
    `attention_bias` has query, key and value, `attention_out_bias` the output (None: as `attention_bias`).
    `attn_logit_softcapping`, `final_logit_softcapping`, `query_pre_attn_scalar`: Gemma 2's. `mlp_gated`: gate · up,
    else one projection up and the activation `hidden_act`. `embedding_multiplier` scales the embeddings,
    `embedding_norm` normalises them (BLOOM).

    `quantization` is MLX's: `{"bits": 4, "group_size": 64, "mode": "affine"}` and, by layer name, either such an
    object or False for a layer left as it is.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
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
    quantization: Mapping[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        head_dim_given = self.head_dim is not None
        if not head_dim_given and is_count(self.hidden_size) and is_count(self.num_attention_heads):
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if isinstance(self.layer_types, list):
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if found := list(config_errors(self, head_dim_given)):
            raise ConfigError("this configuration can't work: " + "; ".join(found))

    def with_changes(self, **changes: Any) -> ModelConfig:
        """A copy with other values, validated again."""
        return replace(self, **changes)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The token ids that end a text."""
        eos = self.eos_token_id
        return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)

    @property
    def rotary_dims(self) -> int:
        """How many of a head's dimensions turn with its position."""
        return int(self.head_dim * self.partial_rotary_factor) if self.positions == "rope" else 0

    @property
    def longrope_original_length(self) -> int | None:
        """The length beyond which all positions of a text are others ("longrope"); None where none is."""
        scaling = self.rope_scaling or {}
        return scaling["original_max_position_embeddings"] if scaling.get("rope_type") == "longrope" else None

    def window(self, layer: int) -> int | None:
        """How many tokens a row of this layer sees, its own included; None for all before it."""
        if self.layer_types is not None and self.layer_types[layer] != "sliding_attention":
            return None
        return self.sliding_window

    def parameter_count(self) -> int:
        """All parameters, counted once where embedding and head are tied."""
        return sum(counts.count_parameters(self).values())

    def flops_per_token(self, context_length: int, training: bool = False) -> int:
        """Floating-point operations for one token that attends to `context_length` keys, 2 per multiply-add.

        Forward: 2 per matrix parameter, and 4·H·D·context per layer for the scores and the weighted sum
        of values, where a layer with a sliding window sees no more keys than that. Training: 3 times that, the
        backward pass being twice the forward one (Kaplan et al. 2020, section 2.1). In training under a causal
        mask the mean context is half the sequence.
        """
        forward = sum(counts.forward_flops(self, counts.attended_keys(self, context_length)).values())
        return 3 * forward if training else forward

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes that a token adds to the key-value cache, over all layers; in those with a window until it is full."""
        return counts.kv_cache_values(self, 1) * bytes_per_value
