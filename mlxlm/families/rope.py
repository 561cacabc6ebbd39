"""RoPE settings in `config.json`.

transformers 5 has `rope_parameters`; earlier versions have `rope_theta`, `rope_scaling` and `partial_rotary_factor`.
Files that were edited or written by other tools mix them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL, SLIDING
from mlxlm.config.numbers import is_positive
from mlxlm.config.rope_scaling import SCALINGS
from mlxlm.families.family import Family, HFConfig
from mlxlm.utils.errors import ConfigError, short_repr

_ORIGINAL_LENGTH = "original_max_position_embeddings"
_THETA, _PARTIAL = "rope_theta", "partial_rotary_factor"
_QUERY_SCALE = "llama_4_scaling_beta"
_SYNONYMS = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}
# transformers' defaults where mlx_lm's models have others. The usual ones are 10000 and 1.
_DEFAULTS: dict[Any, dict[str, float]] = {
    "phi3": {_ORIGINAL_LENGTH: 4096},
    **dict.fromkeys(("cohere2", "exaone_moe", "falcon_h1", "glm4_moe_lite", "minicpm3"), {_THETA: 1e4}),
    **dict.fromkeys(("qwen2_moe", "starcoder2"), {_THETA: 1e4}),
    **dict.fromkeys(("bitnet", "cohere", "ernie4_5", "exaone", "llama4_text"), {_THETA: 5e5}),
    **dict.fromkeys(("glm", "glm4_moe", "phi"), {_PARTIAL: 0.5}),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), {_PARTIAL: 0.25}),
    **dict.fromkeys(("lfm2", "lfm2_moe", "mixtral", "phimoe"), {_THETA: 1e6}),
    "smollm3": {_THETA: 2e6},
    "helium": {_THETA: 1e5},
    "minimax_m2": {_THETA: 5e6},
    "gpt_oss": {_THETA: 1.5e5},
}
_DEFAULT_SCALINGS: dict[Any, dict[str, Any]] = {
    "cwm": {
        "rope_type": "llama3", _THETA: 1e6, "factor": 16.0, _ORIGINAL_LENGTH: 8192, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "gemma4_text": {
        FULL: {"rope_type": "proportional", _PARTIAL: 0.25, _THETA: 1e6},
        SLIDING: {"rope_type": "default", _THETA: 1e4},
    },
    "gpt_oss": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        _ORIGINAL_LENGTH: 4096,
    },
    "ministral3": {
        "rope_type": "yarn", _THETA: 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, _ORIGINAL_LENGTH: 16384, _QUERY_SCALE: 0.1,
    },
}  # fmt: skip
_SCALED_BY_DEFAULT = ("apertus", "mistral4")
_SCALES_QUERIES = ("ministral3", "mlxlm")  # models that read _QUERY_SCALE
# Models whose layer types have their own settings: the field of each base in older files, and its default.
_LAYER_TYPE_BASES: dict[Any, dict[str, tuple[str, float]]] = {
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), {FULL: (_THETA, 1e6), SLIDING: ("rope_local_base_freq", 1e4)}),
    "gemma4_text": {FULL: ("", 1e6), SLIDING: ("", 1e4)},
    "olmo3": {FULL: (_THETA, 5e5), SLIDING: ("", 5e5)},
}


def rope_parameters(values: HFConfig, model_type: Any) -> dict[str, Any]:
    """Read the RoPE settings of a configuration as transformers 5 does.

    `rope_scaling` replaces `rope_parameters`. The base and the partial factor may be outside of either, and the
    original length has priority there.

    Args:
        values: The parsed `config.json`, or its `text_config`.
        model_type: Its `model_type`.

    Returns:
        `rope_parameters` with `rope_type`, the fields of this type, and what the configuration or the architecture has
        for `rope_theta` and `partial_rotary_factor`. If layer types have their own settings, such an object for each.

    Raises:
        ConfigError: A setting can't be read, or two settings contradict each other.
    """
    new, old = _read_object(values, "rope_parameters"), _read_object(values, "rope_scaling")
    if not new and not old:
        new = _DEFAULT_SCALINGS.get(model_type, {})
    nested = {name: _read_object(new, name) for name, value in new.items() if isinstance(value, Mapping)}
    if not new and not old and model_type in _SCALED_BY_DEFAULT:
        raise ConfigError(f"missing rope_parameters, which have a scaling by default in {model_type} models")
    if bases := _LAYER_TYPE_BASES.get(model_type):
        if (new and not nested) or ("type" in old and "rope_type" not in old):  # transformers ignores these
            raise ConfigError(f"{'rope_parameters' if new else 'rope_scaling'} has no rope_type for full_attention")
        nested = {SLIDING: {}, FULL: {}, **nested}
        nested[FULL] |= old
        for layer_type, (name, default) in bases.items():
            theta = values.get(name)
            nested[layer_type].setdefault(_THETA, default if theta is None else theta)
    elif nested:
        types = values.get("layer_types")
        if old or not isinstance(types, list) or nested.keys().isdisjoint(types):  # transformers uses old or defaults
            raise ConfigError("rope_parameters has settings for layer types that aren't in use")
    older_names = {_THETA: "rotary_emb_base", _PARTIAL: "rotary_pct"} if model_type == "gpt_neox" else {}
    outside = {name: values.get(older_names.get(name, name)) for name in (_THETA, _PARTIAL)}
    outside = {**_DEFAULTS.get(model_type, {}), **_without_null(outside)}
    if nested:
        truncate = new.get("truncate")  # transformers reads it here only
        return {key: _complete({**outside, **rope, "truncate": truncate}, values) for key, rope in nested.items()}
    inside = old or new
    original = values.get(_ORIGINAL_LENGTH) or outside.get(_ORIGINAL_LENGTH) or inside.get(_ORIGINAL_LENGTH)
    rope = {**outside, **inside, _ORIGINAL_LENGTH: original}
    for name in (_THETA, _PARTIAL):
        if name in new and new[name] != rope.get(name, 10_000 if name == _THETA else 1):
            message = f"rope_scaling replaces rope_parameters, whose {name} {new[name]!r} would be lost"
            raise ConfigError(message, "all settings in rope_parameters")
    rope = _complete(rope, values)
    return rope | {"rope_type": "longrope"} if model_type == "phi3" and rope["rope_type"] == "yarn" else rope


def _read_object(values: HFConfig, name: str) -> dict[str, Any]:
    """A field that is an object, without what is null in it; missing and null mean an empty one."""
    value = values.get(name)
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{name} is {short_repr(value)}, it must be an object", '{"rope_type": "default"}')
    return _without_null(value or {})


def _without_null(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if value is not None}


def _complete(rope: Mapping[str, Any], values: HFConfig) -> dict[str, Any]:
    """Add `rope_type` and the length that it extends, and check the fields of all types."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str):
        raise ConfigError(f"rope_type is {short_repr(rope_type)}, it must be a string", "default")
    for name in (_THETA, _PARTIAL):
        if name in rope and not is_positive(rope[name]):
            raise ConfigError(f"{name} is {short_repr(rope[name])}, it must be a positive number")
    rope = {**rope, "rope_type": _SYNONYMS.get(rope_type, rope_type)}
    if _ORIGINAL_LENGTH in SCALINGS.get(rope["rope_type"], ()):
        rope[_ORIGINAL_LENGTH] = rope.get(_ORIGINAL_LENGTH) or values.get("max_position_embeddings")
    if rope["rope_type"] == "proportional":
        rope.setdefault(_PARTIAL, 1.0)
    rope.pop("type", None)
    return _without_null(rope)


def unsupported_rope(values: HFConfig, family: Family) -> str | None:
    """Describe what a configuration asks of rotary positions that the decoder doesn't implement, or return None."""
    try:
        rope = rope_parameters(values, family.model_type)
    except ConfigError:
        return None  # `read_rope` reports it
    if "rope_type" not in rope:
        local = rope.get(SLIDING, {})
        is_usual = local.get("rope_type") == "default" and local.get(_PARTIAL, 1) == 1
        if not family.has_local_rope or rope.keys() != {FULL, SLIDING} or not is_usual:
            return "such rope_parameters for each layer type"
        rope = rope[FULL]
    if rope["rope_type"] != "default" and rope["rope_type"] not in SCALINGS:
        return f"rope_type {rope['rope_type']!r}"
    if family.model_type == "ministral3" and (rope["rope_type"] != "yarn" or _QUERY_SCALE not in rope):
        return f"ministral3 model without YaRN and {_QUERY_SCALE}"
    factor = None if _PARTIAL in SCALINGS.get(rope["rope_type"], ()) else rope.get(_PARTIAL)
    if not family.hf_names(_PARTIAL) and factor not in (None, 1):
        return f"{_PARTIAL} {factor!r} in a {family.model_type} model"
    return "rope_traditional" if values.get("rope_traditional") else None


def read_rope(values: HFConfig, family: Family) -> dict[str, Any]:
    """ModelConfig's `rope_theta`, `rope_scaling` and `partial_rotary_factor`, if the configuration has them.

    Raises:
        ConfigError: As `rope_parameters`.
    """
    rope = rope_parameters(values, family.model_type)
    local = rope.get(SLIDING)
    rope = rope.get(FULL, rope)
    result = {name: rope[name] for name in (_THETA, _PARTIAL) if name in rope}
    if local and (local[_THETA] != rope[_THETA] or rope["rope_type"] != "default"):
        result["rope_local_base_freq"] = local[_THETA]
    if rope["rope_type"] == "default":
        return result
    names = {"rope_type", *SCALINGS[rope["rope_type"]]}
    if _PARTIAL in names:
        result.pop(_PARTIAL, None)
    if family.model_type not in _SCALES_QUERIES:
        names.discard(_QUERY_SCALE)
    return {**result, "rope_scaling": {name: value for name, value in rope.items() if name in names}}


def write_rope(config: ModelConfig, has_local_rope: bool = False) -> dict[str, Any]:
    """The inverse of `read_rope`, in both the old and the new form."""
    scaling = dict(config.rope_scaling or {"rope_type": "default"})
    if config.partial_rotary_factor != 1 or _PARTIAL in _DEFAULTS.get(config.model_type, ()):
        scaling[_PARTIAL] = config.partial_rotary_factor
    parameters = {**scaling, _THETA: config.rope_theta}
    if has_local_rope:
        local_base = config.rope_local_base_freq or config.rope_theta
        local = {"rope_type": "default", _THETA: local_base}
        types = {"rope_parameters": {FULL: parameters, SLIDING: local}}
        if scaling["rope_type"] == "proportional":  # older files have none of these
            return types
        older = {"rope_scaling": {**scaling, "type": scaling["rope_type"]}} if config.rope_scaling else {}
        return {**types, "rope_local_base_freq": local_base, **older}
    if config.rope_scaling is None:
        return {"rope_parameters": parameters}
    # Older readers look for "type".
    older = {name: value for name, value in parameters.items() if name != _THETA}
    return {"rope_parameters": parameters, "rope_scaling": {**older, "type": scaling["rope_type"]}}
