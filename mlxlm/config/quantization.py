"""MLX's quantization formats, and the `quantization` object of `config.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxlm.utils.errors import ConfigError

# Group sizes and bits that `mx.quantize` accepts (MLX 0.32), the default first.
MODES = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}
_MAX_PROBLEMS = 3  # modules in an error message; a model has hundreds


GROUP_SIZES, BITS = (tuple(sorted(allowed)) for allowed in MODES["affine"])

# Bits of most matrices, and of those that each recipe protects: those of mlx_lm.convert --quant-predicate.
RECIPES = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}


@dataclass(frozen=True)
class Format:
    """A format of MLX's quantized matrices.

    Attributes:
        bits: Bits of each weight.
        group_size: Neighboring weights of a row that share a scale (and a bias in affine mode).
        mode: One of MODES.

    Raises:
        ConfigError: MLX doesn't have this format.
    """

    bits: int
    group_size: int = 64
    mode: str = "affine"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"{self.mode!r} is not a quantization mode", f"one of {', '.join(MODES)}")
        for name, allowed in zip(("group_size", "bits"), MODES[self.mode], strict=True):
            value = getattr(self, name)
            if value not in allowed:
                choice = " or ".join(map(str, sorted(allowed)))
                raise ConfigError(f"{name} {value} is not available in mode {self.mode}", choice)

    @classmethod
    def of(cls, mode: str = "affine", bits: int | None = None, group_size: int | None = None) -> Format:
        """A format with the mode's default bits and group size: 4 and 64 in affine mode."""
        (default_group, *_), (default_bits, *_) = MODES.get(mode, MODES["affine"])  # an unknown one is refused below
        return cls(default_bits if bits is None else bits, default_group if group_size is None else group_size, mode)

    @property
    def affine(self) -> bool:
        """Whether groups have scales and biases."""
        return self.mode == "affine"

    def nbytes(self, rows: int, width: int) -> int:
        """Bytes of a matrix `[rows, width]` with its scales and biases."""
        return packed_bytes(rows * width, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The format as in config.json."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def compatible_format(requested: Format, width: int) -> Format | None:
    """The format with the largest group size up to the requested one that divides `width`; None if none does."""
    sizes = reversed(GROUP_SIZES) if requested.affine else [requested.group_size]
    size = next((g for g in sizes if g <= requested.group_size and width % g == 0), None)
    return None if size is None else replace(requested, group_size=size)


def gets_more_bits(layer: int, layers: int) -> bool:
    """Whether some matrices of a layer have more bits, as in llama.cpp's Q4_K_M (`use_more_bits`).

    Those are the first and the last eighth of the layers, and every third one between.
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def quantization_settings(formats: Mapping[str, Format | None], default: Format | None = None) -> dict[str, Any]:
    """The `quantization` of ModelConfig for the format of each module, of which None isn't quantized.

    Args:
        formats: By module, at least one.
        default: The format that isn't repeated for each module. Defaults to the most frequent one.
    """
    if default is None:
        [(default, _)] = Counter(chosen for chosen in formats.values() if chosen is not None).most_common(1)
    others = {module: chosen.to_dict() if chosen else False for module, chosen in formats.items() if chosen != default}
    return {**default.to_dict(), **others}


def module_quantization(quantization: Mapping[str, Any], module: str) -> dict[str, Any] | None:
    """`group_size`, `bits` and `mode` of one module: its own entry or the default; None if it isn't quantized.

    As in MLX, a module's entry without a mode is affine, and sizes that are missing or null are the mode's defaults.
    """
    entry = quantization.get(module, True)
    if entry is False:
        return None
    entry = entry if isinstance(entry, Mapping) else quantization
    mode = entry.get("mode") or "affine"
    group_sizes, bits = MODES[mode]
    return {"group_size": entry.get("group_size") or group_sizes[0], "bits": entry.get("bits") or bits[0], "mode": mode}


def packed_bytes(values: int, plan: Mapping[str, Any], float_bytes: int = 2) -> int:
    """Bytes of quantized values with their scales and biases.

    Args:
        values: Number of values, a multiple of the group size.
        plan: The format, as `module_quantization` returns it.
        float_bytes: Bytes of a scale or bias in affine mode; the floating-point modes have one byte per group.
    """
    scale_bytes = 2 * float_bytes if plan["mode"] == "affine" else 1
    return values * plan["bits"] // 8 + values // plan["group_size"] * scale_bytes


def validate_quantization(quantization: Any) -> Iterator[str]:
    """Yield a message for each problem of a `quantization` object, with values that would work."""
    if not isinstance(quantization, Mapping):
        yield f"quantization is {quantization!r}, it must be an object with bits and group_size"
        return
    if missing := [name for name in ("group_size", "bits") if name not in quantization]:
        yield f"quantization lacks {' and '.join(missing)}; null is MLX's default"
    yield from _validate_entry("quantization", quantization)
    problems = [problem for name, entry in quantization.items() for problem in _validate_module(name, entry)]
    yield from problems[:_MAX_PROBLEMS]
    if len(problems) > _MAX_PROBLEMS:
        yield f"{len(problems) - _MAX_PROBLEMS} more modules have such a problem"


def _validate_module(name: str, entry: Any) -> Iterator[str]:
    if isinstance(entry, Mapping):
        yield from _validate_entry(name, entry)
    elif ("." in name or name == "lm_head") and not isinstance(entry, bool):  # not metadata like "quant_method"
        yield f"quantization of {name} is {entry!r}, it must be an object, true or false"


def _validate_entry(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    mode = "affine" if entry.get("mode") is None else entry["mode"]
    if not isinstance(mode, str) or mode not in MODES:
        yield f"{name}: mode is {mode!r}, it must be one of {', '.join(MODES)}"
        return
    for field, allowed in zip(("group_size", "bits"), MODES[mode], strict=True):
        value = entry.get(field)
        if value is None:
            continue  # the mode's default
        if type(value) is not int or value not in allowed:
            yield f"{name}: {field} is {value!r}, {mode} has {' or '.join(map(str, sorted(allowed)))}"
