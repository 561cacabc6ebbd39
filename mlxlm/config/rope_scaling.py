"""RoPE scaling: the fields of each `rope_type`, and the validation of rotary positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlxlm.config.numbers import is_positive
from mlxlm.utils.errors import short_repr

if TYPE_CHECKING:
    from mlxlm.config.model_config import ModelConfig

# What a `rope_type` reads besides rope_theta. Source: transformers, modeling_rope_utils.py
SCALINGS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor",
        "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "factor", "attention_factor"),
}  # fmt: skip
_OPTIONAL_SCALING = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")

_LEAST, _MOST = 1e-6, 1e12  # beyond these, products of scalings leave float32
_BOUNDS = f" from {_LEAST} to {_MOST}"


def rope_problems(c: ModelConfig) -> Iterator[str]:
    """Everything wrong with the rotary position fields of a configuration, one phrase each."""
    dims = c.rotary_dims
    if dims % 2 and c.partial_rotary_factor == 1:
        yield f"head_dim {dims} is odd, rotary positions need an even one ({dims + 1})"
    elif dims % 2 or dims == 0:
        share = f"partial_rotary_factor {c.partial_rotary_factor} of head_dim {c.head_dim}"
        yield f"{share} is {dims} dimensions, rotary positions need an even number of them (1.0)"
    if c.rope_scaling is not None:
        yield from _scaling_problems(c, c.rope_scaling, dims)


def _scaling_problems(c: ModelConfig, scaling: Any, dims: int) -> Iterator[str]:
    kind = scaling.get("rope_type") if isinstance(scaling, Mapping) else None
    if not isinstance(kind, str) or kind not in SCALINGS:
        yield f"rope_scaling is {short_repr(scaling)}, it must be null or an object with rope_type {', '.join(SCALINGS)}"
        return
    required = [name for name in SCALINGS[kind] if name not in (*_OPTIONAL_SCALING, "truncate")]
    if kind == "longrope":
        required.remove("factor")  # the ratio of the two lengths, if it isn't given
        yield from _factor_problems(scaling, dims)
    for name in [name for name in SCALINGS[kind] if name in required or scaling.get(name) is not None]:
        value = scaling.get(name)
        if name not in ("truncate", "short_factor", "long_factor") and not _is_ratio(value):
            bounds = _BOUNDS * is_positive(value)
            yield f"rope_scaling: {name} is {short_repr(value)}, {kind} needs a positive number{bounds}"
    low, high = scaling.get("low_freq_factor"), scaling.get("high_freq_factor")
    if kind == "llama3" and is_positive(low) and is_positive(high) and low >= high:
        yield f"rope_scaling: low_freq_factor {low} must be less than high_freq_factor {high}"
    if kind == "dynamic" and dims == 2:
        yield "rope_scaling: dynamic needs more than 2 rotary dimensions"
    if kind == "yarn" and c.rope_theta <= 1:
        yield f"rope_theta is {c.rope_theta}, yarn needs more than 1 (10000)"
    original = scaling.get("original_max_position_embeddings")
    if kind == "longrope" and is_positive(original) and original <= 1:
        yield f"rope_scaling: original_max_position_embeddings is {original}, longrope needs more than 1"


def _factor_problems(scaling: Mapping[str, Any], dims: int) -> Iterator[str]:
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if not isinstance(factors, list) or len(factors) != dims // 2 or not all(map(_is_ratio, factors)):
            yield f"rope_scaling: {name} must be a list of {dims // 2} positive numbers{_BOUNDS}"


def _is_ratio(value: Any) -> bool:
    return is_positive(value) and _LEAST <= value <= _MOST
