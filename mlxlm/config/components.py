"""The norms, norm placements, position encodings and feed-forwards that a configuration can name.

Each entry declares what validation, parameter counts and overrides need to know; `mlxlm.model` implements it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Norm:
    """A normalization layer.

    Attributes:
        vectors: Parameter vectors: 1 for a weight, 2 for a weight and a bias.
        unit_offset: Whether its weight can be stored minus 1 (`norm_unit_offset`).
    """

    vectors: int
    unit_offset: bool = False


NORMS = {"rms": Norm(1, unit_offset=True), "layer": Norm(2)}


@dataclass(frozen=True)
class NormPlacement:
    """Where the norms of a layer are.

    Attributes:
        per_layer: Norms per layer.
        final: Whether there is a norm after the last layer.
        parallel: Whether it works with `parallel_residual`.
    """

    per_layer: int = 2
    final: bool = True
    parallel: bool = False


NORM_PLACEMENTS = {
    "pre": NormPlacement(parallel=True),  # on the input of a sublayer
    "post": NormPlacement(final=False),  # on the residual stream after the addition: Vaswani et al. 2017
    "output": NormPlacement(),  # on the output of a sublayer before the addition: OLMo 2
    "both": NormPlacement(per_layer=4),  # on input and output: Gemma 2
}


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
    "rope": Positions(("rope_theta", "rope_scaling", "partial_rotary_factor")),
    "learned": Positions(("position_offset",), table=True, trainable=True),
    "sinusoidal": Positions(("position_offset",), table=True),
    "alibi": Positions(("alibi_scaled",)),
    "none": Positions(),
}

# Gated: Shazeer 2020, "GLU Variants Improve Transformer", equations 5 and 6.
FEED_FORWARDS = {
    "relu": {"mlp_gated": False, "hidden_act": "relu"},
    "gelu": {"mlp_gated": False, "hidden_act": "gelu"},
    "silu": {"mlp_gated": False, "hidden_act": "silu"},
    "glu": {"mlp_gated": True, "hidden_act": "sigmoid"},
    "reglu": {"mlp_gated": True, "hidden_act": "relu"},
    "geglu": {"mlp_gated": True, "hidden_act": "gelu"},
    "swiglu": {"mlp_gated": True, "hidden_act": "silu"},
}

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "sigmoid")
FULL, SLIDING = "full_attention", "sliding_attention"  # values of `layer_types`

CHOICES: dict[str, tuple[str | None, ...]] = {
    "norm": tuple(NORMS),
    "norm_placement": tuple(NORM_PLACEMENTS),
    "positions": tuple(POSITIONS),
    "qk_norm": (None, "head", "projection"),
    "hidden_act": ACTIVATIONS,
}
