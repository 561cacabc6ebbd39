"""RoPE for mlx_lm's models, as config.json defines it.

Several of mlx_lm's models ignore RoPE scaling or `partial_rotary_factor`, and would run with wrong logits. So they are
built without a scaling, and `install_rope` then gives every layer the rotary embedding of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.config.components import FULL, SLIDING
from mlxlm.config.rope_scaling import (
    SCALINGS,
    attention_factor,
    required_fields,
    scaled_wavelengths,
    unscaled_wavelengths,
)
from mlxlm.utils.errors import CheckpointError

_PARTIAL = "partial_rotary_factor"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,9})\.")
_SYNONYMS = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}
# Models whose sliding layers have no scaling, and the field of their base.
_SLIDING_BASE = {
    "gemma3_text": "rope_local_base_freq", "gemma3n_text": "rope_local_base_freq", "olmo3": "rope_theta",
}  # fmt: skip

_TYPES = {
    **{name: (int, float) for names in SCALINGS.values() for name in names},
    **dict.fromkeys(("rope_theta", _PARTIAL, "alpha", "short_mscale", "long_mscale"), (int, float)),
    **dict.fromkeys(("short_factor", "long_factor"), (list,)),
    "truncate": (bool,),
    "rope_type": (str,),
}


def rope_parameters(values: Mapping[str, Any], attention_type: str = FULL) -> dict[str, Any]:
    """Return the rotary embedding of the layers of one attention type, with transformers 5's names.

    Read from `rope_parameters` or from the older fields: `rope_theta`, `rope_type`, `partial_rotary_factor` and the
    fields of the type.

    Raises:
        CheckpointError: The object can't be read.
    """
    field = _field(values)
    parameters = values.get(field) or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"{field} is {parameters!r}, it must be an object")
    rope = dict(parameters)
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        rope = dict(rope.get(attention_type) or {}) if attention_type in nested else {}
        rope.pop("truncate", None)  # transformers ignores it here
    elif attention_type == SLIDING and values.get("model_type") in _SLIDING_BASE:  # before transformers 5
        theta = values.get(_SLIDING_BASE[values["model_type"]])
        return {"rope_type": "default"} if theta is None else {"rope_type": "default", "rope_theta": theta}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_type"] = _SYNONYMS.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    for name, older in (("rope_theta", ("rope_theta", "rotary_emb_base")), (_PARTIAL, (_PARTIAL, "rotary_pct"))):
        if rope.get(name) is None:
            rope[name] = next((values[key] for key in older if values.get(key) is not None), None)
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"  # the outer field has priority
        rope[name] = values.get(name) or rope.get(name) or values.get("max_position_embeddings")
    for name in rope.keys() & _TYPES.keys():
        if rope[name] is not None and type(rope[name]) not in _TYPES[name]:
            raise CheckpointError(f"{field}: {name} is {rope[name]!r}, which can't be read")
    return {name: value for name, value in rope.items() if value is not None}


def _field(values: Mapping[str, Any]) -> str:
    """Name of the field in use; in transformers the older one has priority."""
    return "rope_scaling" if values.get("rope_scaling") or not values.get("rope_parameters") else "rope_parameters"


class FixedRope(nn.Module):
    """RoPE with fixed wavelengths on the first `dims` dimensions of a head; `mscale` multiplies those dimensions."""

    def __init__(self, dims: int, traditional: bool, wavelengths: list[float], mscale: float):
        super().__init__()
        self.dims, self.traditional, self.mscale = dims, traditional, mscale
        self._freqs = mx.array(wavelengths)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x `[B, H, T, D]`, whose first position is `offset`."""
        if self.mscale != 1:
            x = x.at[..., : self.dims].multiply(self.mscale)
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


def install_rope(model: nn.Module, values: Mapping[str, Any], reads_partial_factor: bool) -> None:
    """Replace the rotary embedding of every layer of a model of mlx_lm by that of the configuration.

    Args:
        model: The model, changed in place.
        values: config.json.
        reads_partial_factor: Whether the architecture reads `partial_rotary_factor`.

    Raises:
        CheckpointError: Names a field that can't be applied.
    """
    if isinstance(values.get("text_config"), Mapping):
        values = values["text_config"]
    if (
        not values.get("rope_parameters")
        and not reads_partial_factor
        and rope_parameters(values)["rope_type"] == "default"
    ):
        return  # mlx_lm's model reads the only field, rope_theta
    modules = dict(model.named_modules())
    paths = {path: _LAYER.search(path) for path, module in modules.items() if _is_rope(module)}
    layers = {path: int(match[1]) for path, match in paths.items() if match}
    if not layers and (rope_type := rope_parameters(values)["rope_type"]) != "default":
        raise unsupported_rope_type(values, rope_type)
    for path, layer in layers.items():
        rope = rope_parameters(values, layer_type(values, layer))
        if not reads_partial_factor and rope.get(_PARTIAL) not in (None, 1):
            raise CheckpointError(f"{_PARTIAL} is {rope[_PARTIAL]!r}, mlx_lm's model rotates whole heads")
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, _layer_rope(modules[path], rope, values))


def layer_type(values: Mapping[str, Any], layer: int) -> str:
    """Attention type of a layer: `FULL` unless the configuration or its architecture says otherwise."""
    types = values.get("layer_types")
    if isinstance(types, list):
        return types[layer] if layer < len(types) else FULL
    pattern = values.get("sliding_window_pattern") or 6
    return SLIDING if values.get("model_type") == "gemma3_text" and (layer + 1) % pattern else FULL


def original_context(values: Mapping[str, Any]) -> int | None:
    """Length up to which the rotary embedding of `install_rope` is right, or None for any length.

    "longrope" uses other wavelengths, for all positions, for texts longer than the original context.
    """
    rope = rope_parameters(values)
    if rope["rope_type"] != "longrope" or rope.get("short_factor") == rope.get("long_factor"):
        return None
    return rope.get("original_max_position_embeddings")


def is_known(rope_type: Any) -> bool:
    """Whether `install_rope` computes this rope_type instead of leaving it to mlx_lm."""
    return rope_type == "default" or rope_type in SCALINGS


def _is_rope(module: nn.Module) -> bool:
    return isinstance(module, nn.RoPE) or hasattr(module, "_freqs")


def unsupported_rope_type(values: Mapping[str, Any], rope_type: Any) -> CheckpointError:
    """The error for a rope_type that neither we nor mlx_lm's model computes."""
    return CheckpointError(f"{_field(values)} has rope_type {rope_type!r}, which mlx_lm's model doesn't implement")


def _layer_rope(module: nn.Module, rope: Mapping[str, Any], values: Mapping[str, Any]) -> nn.Module:
    """The rotary embedding that a layer needs in place of `module`; `module` itself if it is right."""
    rope_type, context = rope["rope_type"], values.get("max_position_embeddings") or 0
    dims = module.dims if isinstance(module, nn.RoPE) else 2 * module._freqs.size
    if (factor := rope.get(_PARTIAL)) is not None and is_known(rope_type):
        dims = int(_head_dim(values) * factor)
    traditional = getattr(module, "traditional", False)
    base = rope.get("rope_theta", getattr(module, "base", None))
    if not is_known(rope_type) and not isinstance(module, nn.RoPE):
        return module  # mlx_lm's own class, such as Gemma 4's "proportional"
    if rope_type == "dynamic" and isinstance(module, nn.RoPE) and not rope.get("alpha") and "factor" in rope:
        from mlx_lm.models.rope_utils import initialize_rope

        return initialize_rope(dims, base, traditional, {**rope, "type": rope_type}, context)
    wavelengths = None if base is None else _wavelengths(rope, base, dims)
    if wavelengths is None:
        raise unsupported_rope_type(values, rope_type)
    scale = rope.get("short_mscale", attention_factor(rope, context))
    if not hasattr(module, "_freqs"):
        same = rope_type == "default" and module.dims == dims and module.base == base
        return module if same else FixedRope(dims, traditional, wavelengths, scale)
    module._freqs = mx.array(wavelengths)  # keep the class, which this model needs
    for name in ("mscale", "_scale"):
        if hasattr(module, name):
            setattr(module, name, scale)
    return module


def _wavelengths(rope: Mapping[str, Any], base: float, dims: int) -> list[float] | None:
    """Wavelength of each pair of dimensions, divided by 2π; None for unknown types and missing fields."""
    rope_type = rope["rope_type"]
    if rope_type == "dynamic" and rope.get("alpha"):  # HunYuan: only alpha counts, not the length of the text
        base, rope_type = base * rope["alpha"] ** (dims / (dims - 2)), "default"
    if rope_type == "default":
        return unscaled_wavelengths(base, dims)
    if rope_type not in SCALINGS or rope_type == "dynamic":
        return None
    if any(name not in rope for name in required_fields(rope_type)):
        return None
    return scaled_wavelengths(base, dims, rope)


def _head_dim(values: Mapping[str, Any]) -> int:
    return (
        values.get("qk_rope_head_dim")
        or values.get("head_dim")
        or values["hidden_size"] // values["num_attention_heads"]
    )
