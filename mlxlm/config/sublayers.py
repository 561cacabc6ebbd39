"""The sublayers that a layer can be made of: one that mixes tokens, and a feed-forward.

Each declares its matrices, activations and cache; `mlxlm.model` implements it under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Config = Any  # a ModelConfig, whose module imports this one


@dataclass(frozen=True)
class Matrix:
    """A matrix of a sublayer.

    Attributes:
        module: Its module in the layer, such as "self_attn.q_proj".
        group: The group of parameters that it counts to, such as "query".
        inputs: Input features.
        outputs: Output features.
        bias: Whether it has a bias.
    """

    module: str
    group: str
    inputs: int
    outputs: int
    bias: bool

    @property
    def parameters(self) -> int:
        """Parameters without the bias."""
        return self.inputs * self.outputs


@dataclass(frozen=True, eq=False)
class Sublayer:
    """What a sublayer of one layer takes.

    Attributes:
        matrices: Its matrices.
        activations: Values per token that its operations produce.
        norms: Parameters of its own norms.
        score_flops: Operations of a token and one key: of the score, and of the weighted sum of values.
        kv_values: Values in the cache per token.
    """

    matrices: tuple[Matrix, ...]
    activations: int
    norms: int = 0
    score_flops: tuple[int, int] = (0, 0)
    kv_values: int = 0


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
