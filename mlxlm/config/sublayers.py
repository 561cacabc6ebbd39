"""The sublayers that a layer can be made of: one that mixes tokens, and a feed-forward.

Each declares its matrices, activations and cache; `mlxlm.model` implements it under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlxlm.config.components import CHUNKED, FULL, NORMS, RECURRENT, SLIDING
from mlxlm.config.numbers import is_count
from mlxlm.utils.errors import short_repr

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
        blocks: The blocks that its outputs consist of, each of which tensor parallelism divides; (): one.
    """

    module: str
    group: str
    inputs: int
    outputs: int
    bias: bool
    experts: int = 1
    experts_per_token: int = 1
    blocks: tuple[int, ...] = ()

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
        kv_heads: Number of heads in the cache.
        kv_dims: Size of a head of the two arrays in the cache, of keys and of values.
        state_values: Values in the cache per text, of a recurrent layer.
        float32_state_values: Further such values, in float32 whatever the dtype of the others.
        state_flops: Operations of a token and the state.
    """

    matrices: tuple[Matrix, ...]
    activations: int
    norms: int = 0
    biases: int = 0
    score_flops: tuple[int, int] = (0, 0)
    kv_heads: int = 0
    kv_dims: tuple[int, int] = (0, 0)
    state_values: int = 0
    float32_state_values: int = 0
    state_flops: int = 0


def attention(c: Config, layer: int) -> Sublayer:
    """Grouped-query attention."""
    hidden, d, shares_kv = c.hidden_size, c.layer_head_dim(layer), c.shares_kv(layer)
    kv_heads = 0 if shares_kv else c.layer_kv_heads(layer)
    queries, keys, bias = c.num_attention_heads * d, kv_heads * d, c.attention_bias
    out_bias = bias if c.attention_out_bias is None else c.attention_out_bias
    all_heads = queries + keys
    key = () if shares_kv else (Matrix("self_attn.k_proj", "key", hidden, keys, bias),)
    value = (Matrix("self_attn.v_proj", "value", hidden, keys, bias),) if c.has_v_proj(layer) else ()
    gate = (Matrix("self_attn.gate_proj", "gate", hidden, queries, bias),) if c.attn_output_gate else ()
    qk_norms = {"head": (2 - shares_kv) * d, "layer": 4 * d, "projection": all_heads, "layer_per_head": all_heads}
    return Sublayer(
        matrices=(
            Matrix("self_attn.q_proj", "query", hidden, queries, bias),
            *key,
            *value,
            *gate,
            Matrix("self_attn.o_proj", "output", queries, hidden, out_bias),
        ),
        activations=2 * queries + 2 * keys + len(gate) * 2 * queries,  # queries, keys, values and output; gate, product
        biases=c.num_attention_heads if c.attention_sinks else 0,
        norms=qk_norms.get(c.qk_norm, 0),
        score_flops=(2 * queries, 2 * queries),
        kv_heads=kv_heads,
        kv_dims=(0, 0) if shares_kv else (d, d),
    )


def latent_attention(c: Config, layer: int) -> Sublayer:
    """Multi-head latent attention.

    The cache has the rotated part of the keys, which all heads share, and the latent vector from which the rest of the
    keys and the values are computed.
    """
    hidden, heads, bias, rank = c.hidden_size, c.num_attention_heads, c.attention_bias, c.kv_lora_rank
    queries, nope, values = heads * c.head_dim, heads * c.qk_nope_head_dim, heads * c.v_head_dim
    compressed = rank + c.qk_rope_head_dim
    query: tuple[Matrix, ...] = (Matrix("self_attn.q_proj", "query", hidden, queries, False),)
    if c.q_lora_rank is not None:
        query = (
            Matrix("self_attn.q_a_proj", "query", hidden, c.q_lora_rank, bias),
            Matrix("self_attn.q_b_proj", "query", c.q_lora_rank, queries, False),
        )
    return Sublayer(
        matrices=(
            *query,
            Matrix("self_attn.kv_a_proj_with_mqa", "key", hidden, compressed, bias),
            Matrix("self_attn.embed_q", "key", c.qk_nope_head_dim, heads * rank, False),
            Matrix("self_attn.unembed_out", "value", rank, values, False),
            Matrix("self_attn.o_proj", "output", values, hidden, bias),
        ),
        # Latent vectors and their norms, queries, keys and values, and attention's output.
        activations=2 * compressed + 2 * (c.q_lora_rank or 0) + 2 * queries + nope + 2 * values,
        norms=rank + (c.q_lora_rank or 0),
        score_flops=(2 * queries, 2 * values),
        kv_heads=1,
        kv_dims=(c.qk_rope_head_dim, rank),
    )


LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def validate_latent_attention(c: Config) -> Iterator[str]:
    """Yield a message for each problem of the fields of multi-head latent attention, whose `kv_lora_rank` is set."""
    bad = [name for name in LATENT_FIELDS[1:] if not is_count(getattr(c, name))]
    if c.q_lora_rank is not None and not is_count(c.q_lora_rank):
        bad.append("q_lora_rank")
    for name in bad:
        yield f"{name} is {short_repr(getattr(c, name))}, it must be a positive whole number"
    if c.num_key_value_heads != c.num_attention_heads:
        yield f"num_key_value_heads is {c.num_key_value_heads}, latent attention has one for each of the heads"
    if not bad and c.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim {c.qk_rope_head_dim} is odd, rotary positions need an even one"
    required = {
        "positions": "rope", "partial_rotary_factor": 1.0, "qk_norm": None, "sliding_window": None, "rope_layers": None,
        "layer_types": None, "global_head_dim": None, "num_global_key_value_heads": None, "attention_k_eq_v": False,
        "value_norm": False, "num_kv_shared_layers": 0, "attn_logit_softcapping": None, "query_pre_attn_scalar": None,
        "attention_out_bias": None,
        "attention_sinks": False, "clip_qkv": None, "attn_scale": None,
    }  # fmt: skip
    for name, value in required.items():
        if getattr(c, name) != value:
            needed = "null" if value is None else value
            yield f"{name} is {short_repr(getattr(c, name))}, latent attention needs {needed}"


def short_conv(c: Config, layer: int) -> Sublayer:
    """A gated short convolution (LFM2)."""
    hidden, channels, taps, bias = c.hidden_size, c.conv_dim or c.hidden_size, c.conv_L_cache, c.conv_bias
    return Sublayer(
        matrices=(
            Matrix("conv.in_proj", "projections", hidden, 3 * channels, bias, blocks=(channels,) * 3),
            Matrix("conv.conv", "convolution", taps, channels, bias),  # of each channel by itself
            Matrix("conv.out_proj", "output", channels, hidden, bias),
        ),
        activations=6 * channels,  # three projections, two products and the convolution
        state_values=(taps - 1) * channels,
    )


def gated_delta(c: Config, layer: int) -> Sublayer:
    """The gated delta rule (Qwen3-Next)."""
    hidden, heads, key_dim, value_dim = (
        c.hidden_size, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim,
    )  # fmt: skip
    keys, values, taps = c.linear_num_key_heads * key_dim, heads * value_dim, c.linear_conv_kernel_dim
    sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    mixed, state = 2 * keys + values, heads * key_dim * value_dim
    return Sublayer(
        matrices=(
            *(Matrix(f"linear_attn.in_proj_{name}", "projections", hidden, n, False) for name, n in sizes.items()),
            # Of each channel by itself.
            Matrix("linear_attn.conv1d", "convolution", taps, mixed, False, blocks=(keys, keys, values)),
            Matrix("linear_attn.out_proj", "output", values, hidden, False),
        ),
        activations=3 * mixed + 4 * heads * key_dim + 6 * values,
        norms=value_dim,
        biases=2 * heads,
        state_values=(taps - 1) * mixed,
        float32_state_values=state,
        state_flops=6 * state,  # read by the key, corrected, and read by the query
    )


def mamba2(c: Config, layer: int) -> Sublayer:
    """Mamba 2."""
    hidden, heads, taps, bias = c.hidden_size, c.mamba_n_heads, c.mamba_d_conv, c.mamba_proj_bias
    inner, state = heads * c.mamba_d_head, heads * c.mamba_d_head * c.mamba_d_state
    keys = c.mamba_n_groups * c.mamba_d_state
    convolved = inner, keys, keys
    projected, mixed = (inner, *convolved, heads), sum(convolved)
    return Sublayer(
        matrices=(
            Matrix("mamba.in_proj", "projections", hidden, sum(projected), bias, blocks=projected),
            # Of each channel by itself.
            Matrix("mamba.conv1d", "convolution", taps, mixed, c.mamba_conv_bias, blocks=convolved),
            Matrix("mamba.out_proj", "output", inner, hidden, bias),
        ),
        activations=4 * mixed + 7 * inner,
        norms=inner,
        biases=3 * heads,  # of the time steps, the decay, and the factor of the input in the output
        state_values=(taps - 1) * mixed,
        float32_state_values=state,
        state_flops=4 * state,  # written and read
    )


def mlp(c: Config, layer: int) -> Sublayer:
    """The feed-forward."""
    return Sublayer(
        matrices=_feed_forward(c, "mlp", c.mlp_width(layer)),
        activations=(3 if c.mlp_gated else 2) * c.mlp_width(layer),  # gate, up and their product
    )


def experts(c: Config, layer: int) -> Sublayer:
    """A mixture of experts, with or without a shared expert for all tokens, or beside a dense feed-forward."""
    name, beside = ("experts", 1) if c.enable_moe_block else ("mlp", 0)
    hidden, inner, used = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    shared = c.shared_expert_intermediate_size or 0
    gate = (Matrix(f"{name}.shared_expert_gate", "router", hidden, 1, False),) if c.shared_expert_gate else ()
    values = 3 if c.mlp_gated else 2
    return Sublayer(
        matrices=(
            Matrix(f"{name}.gate", "router", hidden, c.num_experts, c.router_bias),
            *_feed_forward(c, f"{name}.switch_mlp", inner, c.num_experts, used),
            *(_feed_forward(c, f"{name}.shared_expert", shared) if shared else ()),
            *gate,
        ),
        # Beside a dense feed-forward: the norms of the router, of the experts and of both outputs, and their sum.
        activations=2 * c.num_experts + used * (2 * hidden + values * inner) + values * shared + beside * 5 * hidden,
        norms=beside * (3 * NORMS[c.norm].vectors + 1) * hidden,
        biases=c.num_experts * ((c.router == "sigmoid") + beside),
    )


def per_layer_input(c: Config, layer: int) -> Sublayer:
    """The part of a layer that reads the layer's own input of each token (Gemma 4)."""
    hidden, size = c.hidden_size, c.hidden_size_per_layer_input
    return Sublayer(
        matrices=(
            Matrix("per_layer_input_gate", "per_layer_input", hidden, size, False),
            Matrix("per_layer_projection", "per_layer_input", size, hidden, False),
        ),
        # The layer's share of the inputs of all layers: looked up, projected, normalized, and their sum. Then the
        # residual, the gate, its product with the input, the projection and its norm.
        activations=4 * size + 2 * size + 3 * hidden,
        norms=NORMS[c.norm].vectors * hidden,
    )


def _feed_forward(c: Config, name: str, inner: int, experts: int = 1, experts_per_token: int = 1) -> tuple[Matrix, ...]:
    hidden = c.hidden_size
    gate = ((f"{name}.gate_proj", hidden, inner),) if c.mlp_gated else ()
    return tuple(
        Matrix(module, "feed_forward", inputs, outputs, c.mlp_bias, experts, experts_per_token)
        for module, inputs, outputs in (*gate, (f"{name}.up_proj", hidden, inner), (f"{name}.down_proj", inner, hidden))
    )


MIXERS: dict[str, Callable[[Config, int], Sublayer]] = {
    "attention": attention,
    "latent_attention": latent_attention,
    "short_conv": short_conv,
    "gated_delta": gated_delta,
    "mamba2": mamba2,
}
MLPS: dict[str, Callable[[Config, int], Sublayer]] = {
    "mlp": mlp,
    "experts": experts,
    "none": lambda c, layer: Sublayer(matrices=(), activations=0),
}


# The sizes of recurrent layers; the second divides the first.
_RECURRENT_SIZES = {
    "linear_attention": (
        "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim",
    ),
    "mamba": ("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_d_state"),
}  # fmt: skip


def validate_layer_types(c: Config) -> Iterator[str]:
    """Yield a message for each problem of `layer_types`, which is set, and of the sizes that some of them need."""
    kinds = (FULL, SLIDING, CHUNKED, *RECURRENT)
    if not isinstance(c.layer_types, tuple) or any(kind not in kinds for kind in c.layer_types):
        yield f"layer_types must be a list of {', '.join(kinds)}"
    elif len(c.layer_types) != c.num_hidden_layers:
        yield f"layer_types has {len(c.layer_types)} entries, one for each of {c.num_hidden_layers} layers is needed"
    elif SLIDING in c.layer_types and c.sliding_window is None:
        yield f"layer_types has {SLIDING}, but sliding_window is null (4096)"
    elif CHUNKED in c.layer_types and not is_count(c.attention_chunk_size):
        yield f"attention_chunk_size is {short_repr(c.attention_chunk_size)}, {CHUNKED} needs a positive whole number"
    elif RECURRENT.keys() >= set(c.layer_types):
        yield f"layer_types has no layer with attention ({FULL})"
    else:
        for kind, names in _RECURRENT_SIZES.items():
            bad = [f"{name} is {short_repr(value)}" for name in names if not is_count(value := getattr(c, name))]
            if kind in c.layer_types and bad:
                yield f"{', '.join(bad)}, layers with {kind} need a positive whole number"
            elif kind in c.layer_types and getattr(c, names[0]) % getattr(c, names[1]):
                yield f"{names[1]} {getattr(c, names[1])} does not divide {names[0]} {getattr(c, names[0])}"


def validate_shared_kv(c: Config) -> Iterator[str]:
    """Yield a message for each problem of layers that share keys and values; there are some."""
    first = c.num_hidden_layers - c.num_kv_shared_layers
    types = c.layer_types or (FULL,) * c.num_hidden_layers
    shared = set(types[max(first, 0) :])
    if first <= 0 or not shared <= set(types[:first]):
        yield f"num_kv_shared_layers is {c.num_kv_shared_layers}, but each needs an earlier layer of its type (0)"
    if recurrent := sorted(shared & RECURRENT.keys()):
        yield f"num_kv_shared_layers is {c.num_kv_shared_layers}, but layers with {recurrent[0]} have no keys (0)"
    if (kind := (c.rope_scaling or {}).get("rope_type")) in ("dynamic", "longrope"):
        yield f"rope_scaling has rope_type {kind}, layers that share keys and values need another one"
