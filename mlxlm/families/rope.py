"""Rotary positions in `config.json`.

transformers 5 has `rope_parameters`; earlier versions have `rope_theta`, `rope_scaling` and `partial_rotary_factor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.rope_scaling import SCALINGS
from mlxlm.families.family import Family, HFConfig

_ORIGINAL_LENGTH = "original_max_position_embeddings"


def unsupported_rope(values: HFConfig, family: Family) -> str | None:
    """Describe what a configuration asks of rotary positions that the decoder doesn't implement, or return None."""
    rope = _rope_parameters(values)
    if not isinstance(rope, Mapping):
        return None  # malformed: `read_rope` reports it
    if any(isinstance(value, Mapping) for value in rope.values()):
        return "rope_parameters for each layer type"
    rope_type = _rope_type(values, rope)
    if rope_type != "default" and rope_type not in SCALINGS:
        return f"rope_type {rope_type!r}"
    factor = rope.get("partial_rotary_factor")
    if not family.hf_names("partial_rotary_factor") and factor not in (None, 1):
        return f"partial_rotary_factor {factor!r} in a {family.model_type} model"
    return "rope_traditional" if values.get("rope_traditional") else None


def read_rope(values: HFConfig) -> dict[str, Any]:
    """ModelConfig's `rope_theta`, `rope_scaling` and `partial_rotary_factor`, if the configuration has them.

    Raises:
        TypeError: `rope_parameters` or `rope_scaling` is not an object.
    """
    rope = _rope_parameters(values)
    if not isinstance(rope, Mapping):
        raise TypeError(f"rope_parameters is {rope!r}, it must be an object")
    result = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
    rope_type = _rope_type(values, rope)
    if rope_type == "default":
        return result
    scaling = {field: rope[field] for field in SCALINGS[rope_type] if rope.get(field) is not None}
    if _ORIGINAL_LENGTH in SCALINGS[rope_type]:
        # Phi-3 has it outside rope_scaling, and that value has precedence.
        original = values.get(_ORIGINAL_LENGTH) or scaling.get(_ORIGINAL_LENGTH)
        original = original or values.get("max_position_embeddings")
        scaling |= {} if original is None else {_ORIGINAL_LENGTH: original}
    return result | {"rope_scaling": {"rope_type": rope_type, **scaling}}


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_rope`, in both the old and the new form."""
    scaling = dict(config.rope_scaling or {"rope_type": "default"})
    parameters = {**scaling, "rope_theta": config.rope_theta}
    if config.partial_rotary_factor != 1:
        parameters["partial_rotary_factor"] = config.partial_rotary_factor
    if config.rope_scaling is None:
        return {"rope_parameters": parameters}
    # Older readers look for "type".
    return {"rope_parameters": parameters, "rope_scaling": {**scaling, "type": scaling["rope_type"]}}


def _rope_parameters(values: HFConfig) -> Any:
    """Both forms merged; the older field has precedence, as in transformers."""
    new, old = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    if not isinstance(new, Mapping) or not isinstance(old, Mapping):
        return old if isinstance(new, Mapping) else new
    return {**new, **old}


def _rope_type(values: HFConfig, rope: Mapping[str, Any]) -> str:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "su" or (rope_type == "yarn" and values.get("model_type") == "phi3"):
        return "longrope"  # its names in Phi-3's first files
    return rope_type if isinstance(rope_type, str) else repr(rope_type)
