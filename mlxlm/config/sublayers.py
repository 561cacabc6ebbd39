"""The sublayers that a layer can be made of: one that mixes tokens, and a feed-forward.

Each declares its matrices, activations and cache; `mlxlm.model` implements it under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxlm.config.components import Matrix, Sublayer

Config = Any  # a ModelConfig, whose module imports this one


def attention(c: Config) -> Sublayer:
    """Grouped-query attention."""
    hidden, d = c.hidden_size, c.head_dim
    queries, keys, bias = c.num_attention_heads * d, c.num_key_value_heads * d, c.attention_bias
    out_bias = bias if c.attention_out_bias is None else c.attention_out_bias
    return Sublayer(
        matrices=(
            Matrix("self_attn.q_proj", "query", hidden, queries, bias),
            Matrix("self_attn.k_proj", "key", hidden, keys, bias),
            Matrix("self_attn.v_proj", "value", hidden, keys, bias),
            Matrix("self_attn.o_proj", "output", queries, hidden, out_bias),
        ),
        activations=2 * queries + 2 * keys,  # queries, keys, values and attention's output
        norms={None: 0, "head": 2 * d, "projection": queries + keys}[c.qk_norm],
        score_flops=(2 * queries, 2 * queries),
        kv_values=2 * keys,
    )


def mlp(c: Config) -> Sublayer:
    """The feed-forward."""
    hidden, inner, bias = c.hidden_size, c.intermediate_size, c.mlp_bias
    gate = (Matrix("mlp.gate_proj", "feed_forward", hidden, inner, bias),) if c.mlp_gated else ()
    return Sublayer(
        matrices=(
            *gate,
            Matrix("mlp.up_proj", "feed_forward", hidden, inner, bias),
            Matrix("mlp.down_proj", "feed_forward", inner, hidden, bias),
        ),
        activations=(3 if c.mlp_gated else 2) * inner,  # gate, up and their product
    )


MIXERS: dict[str, Callable[[Config], Sublayer]] = {"attention": attention}
MLPS: dict[str, Callable[[Config], Sublayer]] = {"mlp": mlp}
