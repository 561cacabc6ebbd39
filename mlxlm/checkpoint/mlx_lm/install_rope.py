"""RoPE for mlx_lm's models, as config.json defines it.

Several of mlx_lm's models ignore RoPE scaling or `partial_rotary_factor`, and would run with wrong logits. So they are
built without a scaling, and `install_rope` then gives every layer the rotary embedding of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import rope_scaling
from mlxlm.config.components import FULL, SLIDING
from mlxlm.config.numbers import is_positive
from mlxlm.families import rope_parameters
from mlxlm.utils.errors import CheckpointError

_PARTIAL = "partial_rotary_factor"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,9})\.")
_ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", _PARTIAL, "rope_local_base_freq")
# Models of mlx_lm that read other fields for the rotary embedding of each layer.
MODEL_SPECIFIC_ROPE = ("deepseek_v41", "gear", "mimo_v2_flash", "muse_glimmer", "plamo3", "step3p5", "talkie")


def with_rope_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with all RoPE settings in `rope_parameters`, see `mlxlm.families.rope_parameters`.

    Raises:
        ConfigError: The settings can't be read.
    """
    if isinstance(values.get("text_config"), Mapping):
        return {**values, "text_config": with_rope_parameters(values["text_config"])}
    if values.get("model_type") in MODEL_SPECIFIC_ROPE:
        return dict(values)
    rope = rope_parameters(values, values.get("model_type"))
    values = {name: value for name, value in values.items() if name not in _ROPE_FIELDS}
    return values if rope == {"rope_type": "default"} else {**values, "rope_parameters": rope}


def layer_rope(values: Mapping[str, Any], layer_type: str = FULL) -> dict[str, Any]:
    """Return the settings of one layer type in a configuration of `with_rope_parameters`."""
    rope = values.get("rope_parameters") or {}
    return rope if "rope_type" in rope else rope.get(layer_type) or {"rope_type": "default"}


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
        values: The configuration of `with_rope_parameters`.
        reads_partial_factor: Whether the architecture reads `partial_rotary_factor`.

    Raises:
        CheckpointError: Names a field that can't be applied.
    """
    if isinstance(values.get("text_config"), Mapping):
        values = values["text_config"]
    modules = dict(model.named_modules())
    paths = [path for path, module in modules.items() if isinstance(module, nn.RoPE) or hasattr(module, "_freqs")]
    layers = {path: int(match[1]) for path in paths if (match := _LAYER.search(path))}
    if not layers and (rope_type := layer_rope(values)["rope_type"]) != "default":
        raise unsupported_rope_type(rope_type)
    for path, layer in layers.items():
        rope = layer_rope(values, _layer_type(values, layer))
        if not reads_partial_factor and rope.get(_PARTIAL) not in (None, 1):
            raise CheckpointError(f"{_PARTIAL} is {rope[_PARTIAL]!r}, mlx_lm's model rotates whole heads")
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, _layer_rope(modules[path], rope, values))


def _layer_type(values: Mapping[str, Any], layer: int) -> str:
    """Attention type of a layer: `FULL` unless the configuration or its architecture says otherwise."""
    types = values.get("layer_types")
    if isinstance(types, list):
        return types[layer] if layer < len(types) else FULL
    pattern = values.get("sliding_window_pattern") or 6
    return SLIDING if values.get("model_type") == "gemma3_text" and (layer + 1) % pattern else FULL


def is_known(rope_type: Any) -> bool:
    """Whether `install_rope` computes this rope_type instead of leaving it to mlx_lm."""
    return rope_type == "default" or rope_type in rope_scaling.SCALINGS.keys() - {"proportional"}


def unsupported_rope_type(rope_type: Any) -> CheckpointError:
    """The error for a rope_type that neither we nor mlx_lm's model computes."""
    return CheckpointError(f"rope_type is {rope_type!r}, which mlx_lm's model doesn't implement")


def _layer_rope(module: nn.Module, rope: Mapping[str, Any], values: Mapping[str, Any]) -> nn.Module:
    """The rotary embedding that a layer needs in place of `module`; `module` itself if it is right."""
    rope_type, context = rope["rope_type"], values.get("max_position_embeddings") or 0
    if not is_known(rope_type):
        if isinstance(module, nn.RoPE):
            raise unsupported_rope_type(rope_type)
        return module  # mlx_lm's own class, such as TeleChat 3's
    dims = module.dims if isinstance(module, nn.RoPE) else 2 * module._freqs.size
    if _PARTIAL in rope:
        dims = int(_head_dim(values) * rope[_PARTIAL])
    traditional, base = getattr(module, "traditional", False), rope.get("rope_theta", getattr(module, "base", None))
    if base is None:
        raise CheckpointError("config.json lacks rope_theta")
    problems = [] if rope_type == "default" else [*rope_scaling.validate_scaling(rope, dims, base)]
    wrong = [name for name in ("alpha", "short_mscale") if not is_positive(rope.get(name, 1))]
    if problems := [*problems, *(f"{name} is {rope[name]!r}, it must be a positive number" for name in wrong)]:
        raise CheckpointError("; ".join(problems))
    if rope_type == "dynamic":
        if "alpha" in rope:  # HunYuan: only alpha counts, not the length of the text
            base *= rope["alpha"] ** (dims / (dims - 2))
        elif isinstance(module, nn.RoPE):
            from mlx_lm.models.rope_utils import initialize_rope

            return initialize_rope(dims, base, traditional, {**rope, "type": rope_type}, context)
        else:
            raise unsupported_rope_type(rope_type)
    wavelengths = rope_scaling.scaled_wavelengths(base, dims, rope) or rope_scaling.unscaled_wavelengths(base, dims)
    scale = rope.get("short_mscale", rope_scaling.attention_factor(rope, context))
    if not hasattr(module, "_freqs"):
        same = rope_type == "default" and module.dims == dims and module.base == base
        return module if same else FixedRope(dims, traditional, wavelengths, scale)
    module._freqs = mx.array(wavelengths)  # keep the class, which this model needs
    for name in ("mscale", "_scale"):
        if hasattr(module, name):
            setattr(module, name, scale)
    return module


def _head_dim(values: Mapping[str, Any]) -> int:
    return (
        values.get("qk_rope_head_dim")
        or values.get("head_dim")
        or values["hidden_size"] // values["num_attention_heads"]
    )
