"""Rotary embeddings of models that mlx_lm runs, as config.json asks for them.

Several of mlx_lm's models ignore RoPE scaling, or the share of a head that is rotated, and would run with wrong logits.
So they are built without a scaling, and every layer then gets the rotary embedding of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.config.rope_scaling import SCALINGS, attention_factor, scaled_wavelengths, unscaled_wavelengths
from mlxlm.utils.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"
_HEADS = "num_attention_heads"
_SHARE = "partial_rotary_factor"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,9})\.")
_SYNONYMS = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}
# Whose sliding layers have no scaling, and where their base is.
_SCALED_IF_FULL = {
    "gemma3_text": "rope_local_base_freq", "gemma3n_text": "rope_local_base_freq", "olmo3": "rope_theta",
}  # fmt: skip
_NEEDED = {"yarn": ("factor", "original_max_position_embeddings"), "longrope": ("short_factor", "long_factor")}

_TYPES = {
    **{name: (int, float) for names in SCALINGS.values() for name in names},
    **dict.fromkeys(("rope_theta", _SHARE, "alpha", "short_mscale", "long_mscale"), (int, float)),
    **dict.fromkeys(("short_factor", "long_factor"), (list,)),
    "truncate": (bool,),
    "rope_type": (str,),
}


def rope_parameters(values: Mapping[str, Any], kind_of_layer: str = FULL) -> dict[str, Any]:
    """The rotary embedding of layers of one type as transformers 5 saves it, from its `rope_parameters` or from the
    older fields: `rope_theta`, `rope_type`, `partial_rotary_factor` and what the type needs. {} where the file says
    nothing.

    Raises CheckpointError for an object that can't be read.
    """
    field = _field(values)
    given = values.get(field) or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{field} is {given!r}, it must be an object")
    rope = dict(given)
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        rope = dict(rope.get(kind_of_layer) or {}) if kind_of_layer in nested else {}
        rope.pop("truncate", None)  # which transformers doesn't look for here
    elif kind_of_layer == SLIDING and values.get("model_type") in _SCALED_IF_FULL:  # before transformers 5
        theta = values.get(_SCALED_IF_FULL[values["model_type"]])
        return {"rope_type": "default"} if theta is None else {"rope_type": "default", "rope_theta": theta}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_type"] = _SYNONYMS.get(kind, kind) if isinstance(kind, str) else kind
    for name, older in (("rope_theta", ("rope_theta", "rotary_emb_base")), (_SHARE, (_SHARE, "rotary_pct"))):
        if rope.get(name) is None:
            rope[name] = next((values[key] for key in older if values.get(key) is not None), None)
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"  # the one outside counts
        rope[name] = values.get(name) or rope.get(name) or values.get("max_position_embeddings")
    for name in rope.keys() & _TYPES.keys():
        if rope[name] is not None and type(rope[name]) not in _TYPES[name]:
            raise CheckpointError(f"{field}: {name} is {rope[name]!r}, which can't be read")
    return {name: value for name, value in rope.items() if value is not None}


def _field(values: Mapping[str, Any]) -> str:
    """Where the configuration has it; transformers lets the older field win."""
    return "rope_scaling" if values.get("rope_scaling") or not values.get("rope_parameters") else "rope_parameters"


class FixedRope(nn.Module):
    """Rotary embedding of the first `dims` of a head; `mscale` multiplies what is rotated."""

    def __init__(self, dims: int, traditional: bool, wavelengths: list[float], mscale: float):
        super().__init__()
        self.dims, self.traditional, self.mscale = dims, traditional, mscale
        self._freqs = mx.array(wavelengths)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if self.mscale != 1:
            x = x.at[..., : self.dims].multiply(self.mscale)
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


def install_rope(model: nn.Module, values: Mapping[str, Any], reads_share: bool) -> None:
    """Give every layer of a model of mlx_lm the rotary embedding of the configuration.

    reads_share: whether the architecture rotates a share of a head, `partial_rotary_factor`.
    Raises CheckpointError, naming the field, for what can't be given.
    """
    if isinstance(values.get("text_config"), Mapping):
        values = values["text_config"]
    if not values.get("rope_parameters") and not reads_share and rope_parameters(values)["rope_type"] == "default":
        return  # in the form that mlx_lm's models read
    modules = dict(model.named_modules())
    found = [path for path, module in modules.items() if _is_rope(module) and _LAYER.search(path)]
    if not found and (kind := rope_parameters(values)["rope_type"]) != "default":
        raise unsupported(values, kind)
    for path in found:
        rope = rope_parameters(values, layer_type(values, int(_LAYER.search(path)[1])))
        if not reads_share and rope.get(_SHARE) not in (None, 1):
            raise CheckpointError(f"mlx_lm's model rotates whole heads, not {_SHARE} {rope[_SHARE]!r} of each")
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, _of_layer(modules[path], rope, values))


def layer_type(values: Mapping[str, Any], layer: int) -> str:
    """The kind of attention of a layer, `FULL` unless the configuration or its architecture says otherwise."""
    types = values.get("layer_types")
    if isinstance(types, list):
        return types[layer] if layer < len(types) else FULL
    pattern = values.get("sliding_window_pattern") or 6
    return SLIDING if values.get("model_type") == "gemma3_text" and (layer + 1) % pattern else FULL


def original_context(values: Mapping[str, Any]) -> int | None:
    """The longest text that has the rotary embedding of `install_rope`: "longrope" has another one, for all positions,
    where a text is longer than the original context. None where every text has the same."""
    rope = rope_parameters(values)
    if rope["rope_type"] != "longrope" or rope.get("short_factor") == rope.get("long_factor"):
        return None
    return rope.get("original_max_position_embeddings")


def is_known(kind: Any) -> bool:
    """Whether `install_rope` computes this rope_type, instead of leaving it to mlx_lm."""
    return kind == "default" or kind in SCALINGS


def _is_rope(module: nn.Module) -> bool:
    return isinstance(module, nn.RoPE) or hasattr(module, "_freqs")


def unsupported(values: Mapping[str, Any], kind: Any) -> CheckpointError:
    return CheckpointError(f"{_field(values)} asks for rope_type {kind!r}, which mlx_lm's model doesn't implement")


def _of_layer(module: nn.Module, rope: Mapping[str, Any], values: Mapping[str, Any]) -> nn.Module:
    """The rotary embedding that a layer needs in the place of `module`, or `module` where that is the same."""
    kind, longest = rope["rope_type"], values.get("max_position_embeddings") or 0
    dims = module.dims if isinstance(module, nn.RoPE) else 2 * module._freqs.size
    if (share := rope.get(_SHARE)) is not None and is_known(kind):
        dims = int(_head_dim(values) * share)
    traditional = getattr(module, "traditional", False)
    base = rope.get("rope_theta", getattr(module, "base", None))
    if not is_known(kind) and not isinstance(module, nn.RoPE):
        return module  # mlx_lm's own, as Gemma 4's "proportional"
    if kind == "dynamic" and isinstance(module, nn.RoPE) and not rope.get("alpha") and "factor" in rope:
        from mlx_lm.models.rope_utils import initialize_rope

        return initialize_rope(dims, base, traditional, {**rope, "type": kind}, longest)
    wanted = None if base is None else _wavelengths(rope, base, dims)
    if wanted is None:
        raise unsupported(values, kind)
    scale = rope.get("short_mscale", attention_factor(rope, longest))
    if not hasattr(module, "_freqs"):
        same = kind == "default" and module.dims == dims and module.base == base
        return module if same else FixedRope(dims, traditional, wanted, scale)
    module._freqs = mx.array(wanted)  # of a model that needs a class of its own
    for name in ("mscale", "_scale"):
        if hasattr(module, name):
            setattr(module, name, scale)
    return module


def _wavelengths(rope: Mapping[str, Any], base: float, dims: int) -> list[float] | None:
    """The wavelength of each pair of dimensions, over 2π; None for what needs more, and for unknown types."""
    kind = rope["rope_type"]
    if kind == "dynamic" and rope.get("alpha"):  # HunYuan's: its alpha alone, whatever the length of the text
        base, kind = base * rope["alpha"] ** (dims / (dims - 2)), "default"
    if kind == "default":
        return unscaled_wavelengths(base, dims)
    if kind not in SCALINGS or kind == "dynamic" or any(name not in rope for name in _NEEDED.get(kind, SCALINGS[kind])):
        return None
    return scaled_wavelengths(base, dims, rope)


def _head_dim(values: Mapping[str, Any]) -> int:
    return values.get("qk_rope_head_dim") or values.get("head_dim") or values["hidden_size"] // values[_HEADS]
