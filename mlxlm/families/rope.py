"""Rotary positions in Hugging Face's configurations: `rope_parameters` of transformers 5, and before that
`rope_theta`, `rope_scaling` and `partial_rotary_factor`, each on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.rope_scaling import SCALINGS
from mlxlm.families.family import Family


def unsupported_rope(values: Mapping[str, Any], family: Family) -> str | None:
    """Why a configuration's rotary positions are more than the decoder has, or None."""
    rope = _parameters(values)
    if not isinstance(rope, Mapping):
        return None  # not delegated to anyone: reading it is the error
    if any(isinstance(value, Mapping) for value in rope.values()):
        return "rope_parameters of their own for each kind of layer"
    kind = _kind(values, rope)
    if kind != "default" and kind not in SCALINGS:
        return f"rope_type {kind!r}"
    share = rope.get("partial_rotary_factor")
    if not family.hf_names("partial_rotary_factor") and share not in (None, 1):
        return f"partial_rotary_factor {share!r} in a {family.model_type} model"
    return "rope_traditional" if values.get("rope_traditional") else None


def read_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `partial_rotary_factor` for ModelConfig, where these objects have them.

    Raises TypeError for rope_parameters that are no object.
    """
    rope = _parameters(values)
    if not isinstance(rope, Mapping):
        raise TypeError(f"rope_parameters is {rope!r}, it must be an object")
    result = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
    kind = _kind(values, rope)
    if kind == "default":
        return result
    scaling = {field: rope[field] for field in SCALINGS[kind] if rope.get(field) is not None}
    if "original_max_position_embeddings" in SCALINGS[kind]:
        field = "original_max_position_embeddings"  # Phi-3 has it outside, and that one counts
        original = values.get(field) or scaling.get(field) or values.get("max_position_embeddings")
        scaling |= {} if original is None else {field: original}
    return result | {"rope_scaling": {"rope_type": kind, **scaling}}


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The same for `config.json`, for readers of both kinds."""
    scaling = dict(config.rope_scaling or {"rope_type": "default"})
    parameters = {**scaling, "rope_theta": config.rope_theta}
    if config.partial_rotary_factor != 1:
        parameters["partial_rotary_factor"] = config.partial_rotary_factor
    if config.rope_scaling is None:
        return {"rope_parameters": parameters}
    # Older readers look for "type".
    return {"rope_parameters": parameters, "rope_scaling": {**scaling, "type": scaling["rope_type"]}}


def _parameters(values: Mapping[str, Any]) -> Any:
    """All that is said in either place; transformers lets the older field win."""
    new, old = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    if not isinstance(new, Mapping) or not isinstance(old, Mapping):
        return old if isinstance(new, Mapping) else new
    return {**new, **old}


def _kind(values: Mapping[str, Any], rope: Mapping[str, Any]) -> Any:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "su" or (kind == "yarn" and values.get("model_type") == "phi3"):
        return "longrope"  # the names of Phi-3's first files
    return kind if isinstance(kind, str) else repr(kind)
