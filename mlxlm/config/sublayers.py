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
        experts: Number of such matrices, one for each expert.
        experts_per_token: How many of them multiply a token.
        split: With tensor parallelism, each process has a part of its "outputs" or of its "inputs"; None: all of it.
    """

    module: str
    group: str
    inputs: int
    outputs: int
    bias: bool
    experts: int = 1
    experts_per_token: int = 1
    split: str | None = None

    @property
    def parameters(self) -> int:
        """Parameters without the bias, of all experts."""
        return self.experts * self.inputs * self.outputs

    @property
    def active_parameters(self) -> int:
        """Parameters that multiply a token."""
        return self.experts_per_token * self.inputs * self.outputs


@dataclass(frozen=True, eq=False)
class Sublayer:
    """What a sublayer of one layer takes.

    Attributes:
        matrices: Its matrices.
        activations: Values per token that its operations produce.
        norms: Parameters of its own norms.
        biases: Parameters that belong to no matrix and no norm.
        score_flops: Operations of a token and one key: of the score, and of the weighted sum of values.
        kv_values: Values in the cache per token.
    """

    matrices: tuple[Matrix, ...]
    activations: int
    norms: int = 0
    biases: int = 0
    score_flops: tuple[int, int] = (0, 0)
    kv_values: int = 0


def attention(c: Config) -> Sublayer:
    """Grouped-query attention."""
    hidden, d = c.hidden_size, c.head_dim
    queries, keys, bias = c.num_attention_heads * d, c.num_key_value_heads * d, c.attention_bias
    out_bias = bias if c.attention_out_bias is None else c.attention_out_bias
    return Sublayer(
        matrices=(
            Matrix("self_attn.q_proj", "query", hidden, queries, bias, split="outputs"),
            Matrix("self_attn.k_proj", "key", hidden, keys, bias, split="outputs"),
            Matrix("self_attn.v_proj", "value", hidden, keys, bias, split="outputs"),
            Matrix("self_attn.o_proj", "output", queries, hidden, out_bias, split="inputs"),
        ),
        activations=2 * queries + 2 * keys,  # queries, keys, values and attention's output
        norms={None: 0, "head": 2 * d, "projection": queries + keys}[c.qk_norm],
        score_flops=(2 * queries, 2 * queries),
        kv_values=2 * keys,
    )


def mlp(c: Config) -> Sublayer:
    """The feed-forward."""
    return Sublayer(
        matrices=_feed_forward(c, "mlp", c.intermediate_size),
        activations=(3 if c.mlp_gated else 2) * c.intermediate_size,  # gate, up and their product
    )


def experts(c: Config) -> Sublayer:
    """A mixture of experts, with or without a shared expert for all tokens."""
    hidden, inner, used = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    shared = c.shared_expert_intermediate_size or 0
    gate = (Matrix("mlp.shared_expert_gate", "router", hidden, 1, False),) if c.shared_expert_gate else ()
    values = 3 if c.mlp_gated else 2
    return Sublayer(
        matrices=(
            Matrix("mlp.gate", "router", hidden, c.num_experts, False),
            *_feed_forward(c, "mlp.switch_mlp", inner, c.num_experts, used),
            *(_feed_forward(c, "mlp.shared_expert", shared) if shared else ()),
            *gate,
        ),
        activations=2 * c.num_experts + used * (2 * hidden + values * inner) + values * shared,
        biases=c.num_experts if c.router == "sigmoid" else 0,
    )


def _feed_forward(c: Config, name: str, inner: int, experts: int = 1, experts_per_token: int = 1) -> tuple[Matrix, ...]:
    hidden = c.hidden_size
    gate = ((f"{name}.gate_proj", hidden, inner, "outputs"),) if c.mlp_gated else ()
    up_and_down = (f"{name}.up_proj", hidden, inner, "outputs"), (f"{name}.down_proj", inner, hidden, "inputs")
    return tuple(
        Matrix(module, "feed_forward", inputs, outputs, c.mlp_bias, experts, experts_per_token, split)
        for module, inputs, outputs, split in (*gate, *up_and_down)
    )


MIXERS: dict[str, Callable[[Config], Sublayer]] = {"attention": attention}
MLPS: dict[str, Callable[[Config], Sublayer]] = {"mlp": mlp, "experts": experts}
