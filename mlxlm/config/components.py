"""The norms, norm placements, position encodings and feed-forwards that a configuration can name.

Each entry declares what validation, parameter counts and overrides need to know; `mlxlm.model` implements it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Norm:
    """A normalization layer.

    Attributes:
        description: Its name in the literature.
        vectors: Parameter vectors: 1 for a weight, 2 for a weight and a bias.
        unit_offset: Whether its weight can be stored minus 1 (`norm_unit_offset`).
    """

    description: str
    vectors: int
    unit_offset: bool = False


NORMS = {
    "rms": Norm("RMSNorm", 1, unit_offset=True),
    "layer": Norm("LayerNorm", 2),
    "layer_no_bias": Norm("LayerNorm without bias", 1),
    "layer_no_weight": Norm("LayerNorm without weight and bias", 0),
}


@dataclass(frozen=True)
class NormPlacement:
    """The norms of a layer: their names in Hugging Face's models, None for a norm that the layer doesn't have.

    Attributes:
        description: Where the norms are, in words.
        attention_input: Norm of the input of attention.
        mlp_input: Norm of the input of the feed-forward.
        attention_output: Norm of the output of attention.
        mlp_output: Norm of the output of the feed-forward.
        after_addition: Whether output norms normalize the residual after the addition, instead of the sublayer's
            output before it. Such models have no final norm.
    """

    description: str
    attention_input: str | None = None
    mlp_input: str | None = None
    attention_output: str | None = None
    mlp_output: str | None = None
    after_addition: bool = False

    def names(self, has_mlp: bool = True) -> list[str]:
        """The names of the norms that a layer has, with or without a feed-forward."""
        mlp = (self.mlp_input, self.mlp_output) if has_mlp else (None, None)
        names = (self.attention_input, mlp[0], self.attention_output, mlp[1])
        return [name for name in names if name is not None]


# "post_attention_layernorm" is the norm before the feed-forward in Llama, and of attention's output in OLMo 2, Gemma 2.
_INPUT, _OUTPUTS = "input_layernorm", ("post_attention_layernorm", "post_feedforward_layernorm")
NORM_PLACEMENTS = {
    "pre": NormPlacement("before each sublayer", _INPUT, "post_attention_layernorm"),
    "post": NormPlacement("on the stream after each sublayer", None, None, *_OUTPUTS, after_addition=True),
    "output": NormPlacement("on each sublayer's output", None, None, *_OUTPUTS),
    "both": NormPlacement("before and after each sublayer", _INPUT, "pre_feedforward_layernorm", *_OUTPUTS),
}
SHARED_NORM = NormPlacement("before each sublayer", _INPUT)  # of `shared_norm`: one norm for both sublayers


@dataclass(frozen=True)
class Positions:
    """A position encoding.

    Attributes:
        fields: ModelConfig fields that only this encoding reads.
        table: Whether it has a table with a row for each position.
        trainable: Whether the table is a parameter.
    """

    fields: tuple[str, ...] = ()
    table: bool = False
    trainable: bool = False


POSITIONS = {
    "rope": Positions(("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "rope_layers")),
    "learned": Positions(("position_offset",), table=True, trainable=True),
    "sinusoidal": Positions(("position_offset",), table=True),
    "alibi": Positions(("alibi_scaled",)),
    "none": Positions(),
}

# Gated: Shazeer 2020, "GLU Variants Improve Transformer", equations 5 and 6.
FEED_FORWARDS = {
    "relu": {"mlp_gated": False, "hidden_act": "relu"},
    "relu2": {"mlp_gated": False, "hidden_act": "relu2"},
    "gelu": {"mlp_gated": False, "hidden_act": "gelu"},
    "silu": {"mlp_gated": False, "hidden_act": "silu"},
    "glu": {"mlp_gated": True, "hidden_act": "sigmoid"},
    "reglu": {"mlp_gated": True, "hidden_act": "relu"},
    "geglu": {"mlp_gated": True, "hidden_act": "gelu"},
    "swiglu": {"mlp_gated": True, "hidden_act": "silu"},
}

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid")
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # values of `layer_types`
# The other values, and the mixers that such layers have instead of attention.
RECURRENT = {"conv": "short_conv", "linear_attention": "gated_delta", "mamba": "mamba2"}
DENSE, SPARSE, NO_MLP = "dense", "sparse", "none"  # values of `mlp_layer_types`
ROUTERS = ("softmax", "sigmoid", "input_sigmoid")

# Of queries and keys: what is normalized, and how.
QK_NORMS = {
    "head": "RMSNorm of each head",
    "projection": "RMSNorm of all heads together",
    "layer": "LayerNorm of each head",
    "layer_per_head": "LayerNorm of each head with its own weights",
    "l2": "RMSNorm of each head without weights, in layers with rotary positions",
}

CHOICES: dict[str, tuple[str | None, ...]] = {
    "norm": tuple(NORMS),
    "norm_placement": tuple(NORM_PLACEMENTS),
    "positions": tuple(POSITIONS),
    "qk_norm": (None, *QK_NORMS),
    "hidden_act": ACTIVATIONS,
    "router": ROUTERS,
}
