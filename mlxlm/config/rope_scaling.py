"""RoPE scaling: the fields, validation and formula of each `rope_type`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mlxlm.config.numbers import is_positive
from mlxlm.utils.errors import short_repr

_OPTIONAL = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "llama_4_scaling_beta",
)
# The fields of each `rope_type`. Source: transformers, modeling_rope_utils.py
SCALINGS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", *_OPTIONAL),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "factor", "attention_factor"),
    "proportional": ("partial_rotary_factor", "factor"),
}
_LISTS = ("short_factor", "long_factor")

NOT_ROTATED = 1e30  # the wavelength of pairs that "proportional" leaves as they are: no angle of it is above rounding
_MIN, _MAX = 1e-6, 1e12  # beyond these, products of factors overflow float32
_BOUNDS = f" from {_MIN} to {_MAX}"


def validate_scaling(scaling: Any, dims: int, base: float) -> Iterator[str]:
    """Yield a message for each problem of a scaling. See `scaled_wavelengths` for the arguments."""
    rope_type = scaling.get("rope_type") if isinstance(scaling, Mapping) else None
    if not isinstance(rope_type, str) or rope_type not in SCALINGS:
        types = ", ".join(SCALINGS)
        yield f"rope_scaling is {short_repr(scaling)}, it must be null or an object with rope_type {types}"
        return
    for name in SCALINGS[rope_type]:
        value = scaling.get(name)
        if name in _LISTS:
            if not isinstance(value, list) or len(value) != dims // 2 or not all(map(_is_factor, value)):
                yield f"rope_scaling: {name} must be a list of {dims // 2} positive numbers{_BOUNDS}"
            continue
        # longrope's default factor is the ratio of the two lengths, that of proportional is 1.
        optional = name in _OPTIONAL or (name == "factor" and rope_type in ("longrope", "proportional"))
        if name == "llama_4_scaling_beta" and value == 0:  # off
            continue
        if name != "truncate" and not _is_factor(value) and not (value is None and optional):
            bounds = _BOUNDS if is_positive(value) else ""
            yield f"rope_scaling: {name} is {short_repr(value)}, {rope_type} needs a positive number{bounds}"
    low, high = scaling.get("low_freq_factor"), scaling.get("high_freq_factor")
    if rope_type == "llama3" and is_positive(low) and is_positive(high) and low > high:
        yield f"rope_scaling: low_freq_factor {low} must be at most high_freq_factor {high}"
    if rope_type == "dynamic" and dims == 2:
        yield "rope_scaling: dynamic needs more than 2 rotary dimensions"
    if rope_type == "yarn" and base <= 1:
        yield f"rope_theta is {base}, yarn needs more than 1 (10000)"
    if rope_type == "proportional" and is_positive(part := scaling.get("partial_rotary_factor")) and part > 1:
        yield f"rope_scaling: partial_rotary_factor is {part}, it must be at most 1"
    original = scaling.get("original_max_position_embeddings")
    if rope_type == "longrope" and is_positive(original) and original <= 1:
        yield f"rope_scaling: original_max_position_embeddings is {original}, longrope needs more than 1"


def _is_factor(value: Any) -> bool:
    return is_positive(value) and _MIN <= value <= _MAX


def unscaled_wavelengths(base: float, dims: int) -> list[float]:
    """Wavelength of each pair of dimensions, divided by 2π, without a scaling: base^(2i/dims)."""
    return [base ** (i / dims) for i in range(0, dims, 2)]


def scaled_wavelengths(base: float, dims: int, scaling: Mapping[str, Any], long: bool = False) -> list[float] | None:
    """Wavelength of each pair of dimensions, divided by 2π, with a scaling.

    Formulas: transformers, modeling_rope_utils.py.

    Args:
        base: `rope_theta`.
        dims: Number of dimensions that are rotated.
        scaling: `rope_type` and its fields (see `SCALINGS`).
        long: Use "longrope"'s factors for texts beyond its original length.

    Returns:
        `dims / 2` wavelengths, or None for the types that only change the base ("default", "dynamic").
    """
    unscaled, rope_type = unscaled_wavelengths(base, dims), scaling["rope_type"]
    if rope_type == "linear":
        return [wavelength * scaling["factor"] for wavelength in unscaled]
    if rope_type == "llama3":
        return [_llama3_wavelength(wavelength, scaling) for wavelength in unscaled]
    if rope_type == "yarn":
        return _yarn_wavelengths(unscaled, base, scaling)
    if rope_type == "proportional":
        rotated = int(scaling["partial_rotary_factor"] * dims / 2)
        factor = scaling.get("factor") or 1.0
        return [w * factor if i < rotated else NOT_ROTATED for i, w in enumerate(unscaled)]
    if rope_type == "longrope":
        factors = scaling["long_factor" if long else "short_factor"]
        return [wavelength * factor for wavelength, factor in zip(unscaled, factors, strict=True)]
    return None


def _llama3_wavelength(wavelength: float, scaling: Mapping[str, Any]) -> float:
    """Multiply long wavelengths by `factor`, keep short ones, interpolate between (Llama Team 2024, 3.4.2)."""
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * wavelength)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    width = high - low or 1e-9  # no interpolation in Llama 4 Scout
    weight = min(1.0, max(0.0, (turns - low) / width))
    return wavelength / ((1 - weight) / scaling["factor"] + weight)


def _yarn_wavelengths(unscaled: list[float], base: float, scaling: Mapping[str, Any]) -> list[float]:
    """As for Llama 3, with a ramp over dimensions instead of frequencies (Peng et al. 2023, 3.2)."""
    dims = 2 * len(unscaled)

    def dimension(turns: float) -> float:
        original = scaling["original_max_position_embeddings"]
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.get("beta_fast", 32)), dimension(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001
    ramp = [min(1.0, max(0.0, (i - low) / width)) for i in range(len(unscaled))]
    return [w / (weight / scaling["factor"] + (1 - weight)) for w, weight in zip(unscaled, ramp, strict=True)]


def attention_factor(scaling: Mapping[str, Any], max_position_embeddings: int) -> float:
    """Factor on rotated queries and keys (Peng et al. 2023, 3.4; Ding et al. 2024, "LongRoPE"); 1.0 for other types."""
    rope_type = scaling["rope_type"]
    if rope_type not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    if rope_type == "longrope":
        original = scaling["original_max_position_embeddings"]
        factor = scaling.get("factor", max_position_embeddings / original)
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return _temperature(scaling, scaling["mscale"]) / _temperature(scaling, scaling["mscale_all_dim"])
    return _temperature(scaling, 1.0)


def latent_attention_factor(scaling: Mapping[str, Any]) -> float:
    """Further factor on the scores of multi-head latent attention with "yarn" (DeepSeek V2's code)."""
    if scaling["rope_type"] != "yarn" or "mscale_all_dim" not in scaling:
        return 1.0
    return _temperature(scaling, scaling["mscale_all_dim"]) ** 2


def _temperature(scaling: Mapping[str, Any], weight: float) -> float:
    return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0
