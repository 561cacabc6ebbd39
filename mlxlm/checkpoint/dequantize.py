"""Quantized matrices as MLX keeps them: which layers have them, whether they are whole, and their float32 form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.config.quantization import module_quantization
from mlxlm.utils.errors import CheckpointError


def unpacked_shapes(
    tensors: LazyTensors, quantization: Mapping[str, Any] | None, source: str
) -> dict[str, tuple[int, ...]]:
    """Shapes by name, those of quantized matrices unpacked, their scales and biases left out.

    Raises CheckpointError, naming `source` and the layer, for parts that don't belong together, and for values
    that are no floating-point numbers where a decoder has them.
    """
    shapes = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        packed = bool(quantization) and f"{layer}.scales" in tensors
        if packed and part in ("scales", "biases") and f"{layer}.weight" in tensors:
            continue
        if packed and part == "weight":
            shapes[name] = _unpacked(layer, tensors, quantization or {}, source)
        elif mx.issubdtype(tensor.dtype, mx.floating):
            shapes[name] = tensor.shape
        else:
            hint = None if quantization else "an unquantized checkpoint, or one that MLX quantized"
            raise CheckpointError(f"{source}: {name} is of type {tensor.stored_dtype}, not floating-point", hint)
    return shapes


def dequantize_tensors(tensors: LazyTensors, quantization: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """The same tensors with every quantized matrix in float32, nothing rounded on the way."""
    result = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if f"{layer}.scales" in tensors:
            if part in ("scales", "biases"):
                continue
            if part == "weight":
                tensor = _in_float32(layer, tensors, module_quantization(quantization, layer))
        result[name] = tensor
    return result


def quantize_modules(module: nn.Module, tensors: LazyTensors, prefix: str, quantization: Mapping[str, Any]) -> None:
    """Replace the layers of `module` that have scales in `tensors`, below `prefix`, by MLX's quantized ones."""

    def plan(name: str, _module: nn.Module):
        return module_quantization(quantization, prefix + name) if f"{prefix}{name}.scales" in tensors else False

    nn.quantize(module, class_predicate=plan)


def _unpacked(layer: str, tensors: LazyTensors, quantization: Mapping[str, Any], source: str) -> tuple[int, int]:
    """Shape of a quantized matrix before it was packed, after checking its parts against the plan."""
    plan = module_quantization(quantization, layer)
    if plan is None:
        raise CheckpointError(f"{source}: {layer} has scales, and config.json says that it is not quantized")
    bits, group_size, mode = plan["bits"], plan["group_size"], plan["mode"]
    names = ("weight", "scales", "biases") if mode == "affine" else ("weight", "scales")
    parts = [tensors.get(f"{layer}.{part}") for part in names]
    if any(part is None or len(part.shape) != 2 for part in parts) or (
        mode != "affine" and f"{layer}.biases" in tensors
    ):
        wanted = ", ".join(names[:-1]) + f" and {names[-1]}"
        raise CheckpointError(f"{source}: {layer} ({mode}) needs {wanted} alone, each with two dimensions")
    packed, *rest = parts
    rows, words = packed.shape
    width = words * 32 // bits
    kind = rest[0].dtype
    fits = (
        packed.dtype == mx.uint32
        and words * 32 % bits == 0
        and width % group_size == 0
        and all(part.dtype == kind and part.shape == (rows, width // group_size) for part in rest)
        and (mx.issubdtype(kind, mx.floating) if mode == "affine" else kind == mx.uint8)
    )
    if not fits:
        raise CheckpointError(
            f"{source}: {layer} is not of {bits} bits in groups of {group_size} ({mode}), as config.json says"
        )
    return rows, width


def _in_float32(layer: str, tensors: LazyTensors, plan: dict[str, Any]) -> LazyTensor:
    packed, scales, biases = (tensors.get(f"{layer}.{part}") for part in ("weight", "scales", "biases"))

    def read() -> mx.array:
        if biases is None:
            return mx.dequantize(packed.read(), scales.read(), None, **plan, dtype=mx.float32)
        # In the scales' own 16 bits MLX would round each weight.
        parts = (part.read().astype(mx.float32) for part in (scales, biases))
        return mx.dequantize(packed.read(), *parts, **plan)

    shape = (packed.shape[0], packed.shape[1] * 32 // plan["bits"])
    nbytes = sum(part.nbytes for part in (packed, scales, biases) if part is not None)
    return LazyTensor(shape, mx.float32, packed.stored_dtype, nbytes, read)
