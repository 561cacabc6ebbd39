"""MLX's quantized formats: what a matrix's entry in `config.json` may say, and which entry is whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Group sizes and bits that `mx.quantize` takes (MLX 0.32), the first of each being its default.
MODES = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}


def module_quantization(quantization: Mapping[str, Any], module: str) -> dict[str, Any] | None:
    """`group_size`, `bits` and `mode` of one module: its own entry, or the default; None if it stays as it is.

    An own entry without a mode is affine, and sizes it lacks are those of its mode, as in MLX.
    """
    own = quantization.get(module, True)
    if own is False:
        return None
    entry = own if isinstance(own, Mapping) else quantization
    mode = entry.get("mode") or "affine"
    group_sizes, bits = MODES[mode]
    return {"group_size": entry.get("group_size", group_sizes[0]), "bits": entry.get("bits", bits[0]), "mode": mode}


def packed_bytes(numbers: int, plan: Mapping[str, Any], float_bytes: int = 2) -> int:
    """Of so many numbers, whole groups, in the format that `module_quantization` gives: packed, with a scale and a bias of
    `float_bytes` for each group, or one byte for both in a format of floats."""
    scales = 2 * float_bytes if plan["mode"] == "affine" else 1
    return numbers * plan["bits"] // 8 + numbers // plan["group_size"] * scales


def config_errors(quantization: Any) -> Iterator[str]:
    """What is wrong with a `quantization` object, each with values that would work."""
    if not isinstance(quantization, Mapping):
        yield f"quantization is {quantization!r}, it must be an object with bits and group_size"
        return
    yield from _entry_problems("quantization", quantization, {"group_size": None, "bits": None})
    for name, own in quantization.items():
        if isinstance(own, Mapping):
            yield from _entry_problems(name, own, {})
        elif ("." in name or name == "lm_head") and not isinstance(own, bool):  # "quant_method" is no module
            yield f"quantization of {name} is {own!r}, it must be an object, true or false"


def _entry_problems(name: str, entry: Mapping[str, Any], required: Mapping[str, Any]) -> Iterator[str]:
    mode = "affine" if entry.get("mode") is None else entry["mode"]
    if not isinstance(mode, str) or mode not in MODES:
        yield f"{name}: mode is {mode!r}, it must be one of {', '.join(MODES)}"
        return
    for field, allowed in zip(("group_size", "bits"), MODES[mode], strict=True):
        value = {**required, **entry}.get(field, allowed[0])
        if type(value) is not int or value not in allowed:
            yield f"{name}: {field} is {value!r}, {mode} has {' or '.join(map(str, sorted(allowed)))}"
