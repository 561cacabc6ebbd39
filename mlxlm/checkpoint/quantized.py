"""Quantized matrices as MLX keeps them: which layers have them, whether they are whole, and their float32 form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm._mlx import mx, nn
from mlxlm.checkpoint.tensors import Tensor, Tensors
from mlxlm.errors import CheckpointError

FIXED = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # mode: its only group size and bits
_PARTS = (".scales", ".biases")


def layer_plan(quantization: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """`group_size`, `bits` and `mode` of one quantized layer, as MLX's functions take them: its own, or the default."""
    own = quantization.get(layer)
    plan = own if isinstance(own, Mapping) else quantization
    mode = plan.get("mode", "affine")
    group_size, bits = FIXED.get(mode, (plan.get("group_size"), plan.get("bits")))
    return {"group_size": group_size, "bits": bits, "mode": mode}


def full_shapes(
    tensors: Tensors, quantization: Mapping[str, Any] | None, source: str
) -> dict[str, tuple[int, ...]]:
    """Shapes by name, those of quantized matrices unpacked, their scales and biases left out.

    Raises CheckpointError, naming `source` and the layer, for parts that don't belong together.
    """
    if not quantization:
        return {name: tensor.shape for name, tensor in tensors.items()}
    shapes = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if f".{part}" in _PARTS and f"{layer}.weight" in tensors and f"{layer}.scales" in tensors:
            continue
        shapes[name] = tensor.shape
        if part == "weight" and f"{layer}.scales" in tensors:
            shapes[name] = _unpacked(layer, tensors, layer_plan(quantization, layer), source)
    return shapes


def dequantized(tensors: Tensors, quantization: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same tensors with every quantized matrix in float32, nothing rounded on the way."""
    result = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if f"{layer}.scales" in tensors and f".{part}" in _PARTS:
            continue
        if part == "weight" and f"{layer}.scales" in tensors:
            tensor = _in_float32(tensor, layer, tensors, layer_plan(quantization, layer))
        result[name] = tensor
    return result


def quantize_modules(module: nn.Module, tensors: Tensors, prefix: str, quantization: Mapping[str, Any]) -> None:
    """Replace the layers of `module` that have scales in `tensors`, below `prefix`, by MLX's quantized ones."""

    def plan(name: str, _module: nn.Module):
        return layer_plan(quantization, prefix + name) if f"{prefix}{name}.scales" in tensors else False

    nn.quantize(module, class_predicate=plan)


def _unpacked(layer: str, tensors: Tensors, plan: dict[str, Any], source: str) -> tuple[int, int]:
    """Shape of a quantized matrix before it was packed, after checking its parts against `plan`."""
    names = ["weight", "scales", "biases"] if plan["mode"] == "affine" else ["weight", "scales"]
    parts = [tensors.get(f"{layer}.{part}") for part in names]
    extra = plan["mode"] != "affine" and f"{layer}.biases" in tensors
    if extra or any(part is None or len(part.shape) != 2 for part in parts):
        wanted = " and ".join((", ".join(names[:-1]), names[-1]))
        raise CheckpointError(
            f"{source}: {layer} is of mode {plan['mode']} and needs {wanted}, each with two dimensions"
        )
    packed, *rest = parts
    rows, width = packed.shape[0], packed.shape[1] * 32 // plan["bits"]
    one_kind = all(part.dtype == rest[0].dtype for part in rest)
    right = mx.issubdtype(rest[0].dtype, mx.floating) if plan["mode"] == "affine" else rest[0].dtype == mx.uint8
    whole = packed.shape[1] * 32 % plan["bits"] == 0 and width % plan["group_size"] == 0
    shape = (rows, width // plan["group_size"])
    if packed.dtype != mx.uint32 or not whole or not one_kind or not right or any(p.shape != shape for p in rest):
        raise CheckpointError(
            f"{source}: {layer} is not of {plan['bits']} bits in groups of {plan['group_size']} ({plan['mode']}), "
            "as config.json says"
        )
    return rows, width


def _in_float32(packed: Tensor, layer: str, tensors: Tensors, plan: dict[str, Any]) -> Tensor:
    scales, biases = tensors[f"{layer}.scales"], tensors.get(f"{layer}.biases")

    def read() -> mx.array:
        if biases is None:
            return mx.dequantize(packed.read(), scales.read(), None, **plan, dtype=mx.float32)
        return mx.dequantize(
            packed.read(), scales.read().astype(mx.float32), biases.read().astype(mx.float32), **plan
        )

    shape = (packed.shape[0], packed.shape[1] * 32 // plan["bits"])
    nbytes = sum(part.nbytes for part in (packed, scales, biases) if part is not None)
    return Tensor(shape, mx.float32, packed.stored, nbytes, read)
