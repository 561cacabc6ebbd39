"""MLX's quantized matrices: check their parts, dequantize them, and build the layers that use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors, dtype_sizes
from mlxlm.config.quantization import module_quantization
from mlxlm.utils.errors import CheckpointError


def unpacked_shapes(
    tensors: LazyTensors, quantization: Mapping[str, Any] | None, source: str
) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name, with the unpacked shapes of quantized matrices and without scales and biases.

    Raises:
        CheckpointError: Names `source` and a layer whose parts don't belong together, or a tensor that is not
            floating-point.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        packed = quantization and f"{layer}.scales" in tensors
        if packed and part in ("scales", "biases") and f"{layer}.weight" in tensors:
            continue
        if packed and part == "weight":
            shapes[name] = _unpacked_shape(layer, tensors, quantization or {}, source)
        elif mx.issubdtype(tensor.dtype, mx.floating):
            shapes[name] = tensor.shape
        else:
            hint = None if quantization else "an unquantized checkpoint, or one quantized by MLX"
            raise CheckpointError(f"{source}: {name} is of type {tensor.stored_dtype}, not floating-point", hint)
    return shapes


def check_shapes(model: nn.Module, tensors: LazyTensors, quantization: Mapping[str, Any] | None, source: str) -> None:
    """Check that the tensors are all parameters of a model and no others, with the shapes that they have in it.

    Raises:
        CheckpointError: Names `source` and the tensors that don't match.
    """
    shapes = unpacked_shapes(tensors, quantization, source)
    expected = {name: tuple(value.shape) for name, value in tree_flatten(model.parameters())}
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is not part of this model" for name in shapes if name not in expected]
    problems += [
        f"{name} is {list(shape)}, the configuration says {list(expected[name])}"
        for name, shape in shapes.items()
        if name in expected and tuple(shape) != expected[name]
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"{source}: the weights don't match the configuration: {'; '.join(problems[:3])}{more}")


def dequantize_tensors(tensors: LazyTensors, quantization: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Return the tensors with every quantized matrix dequantized to float32, without intermediate rounding."""
    result = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        scales = tensors.get(f"{layer}.scales")
        settings = module_quantization(quantization, layer)
        if scales is None or settings is None or part not in ("weight", "scales", "biases"):
            result[name] = tensor
        elif part == "weight":
            result[name] = _dequantized(tensor, scales, tensors.get(f"{layer}.biases"), settings)
    return result


def rounded_scales(tensors: LazyTensors) -> dict[str, LazyTensor]:
    """Return the float32 scales and biases of quantized matrices, in the dtype of most other floating-point tensors."""
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith((".scales", ".biases"))}
    others = (t for name, t in tensors.items() if name not in scales and mx.issubdtype(t.dtype, mx.floating))
    dtype = getattr(mx, dtype_sizes(others).most_common(1)[0][0])
    return {name: tensor.astype(dtype) for name, tensor in scales.items() if tensor.dtype == mx.float32}


def activation_dtype(scales: LazyTensor) -> mx.Dtype:
    """The dtype of activations beside quantized matrices: that of the scales, or bfloat16 if those are integers."""
    return scales.dtype if mx.issubdtype(scales.dtype, mx.floating) else mx.bfloat16


def dequantize_to_scales(tensors: LazyTensors, quantization: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """`dequantize_tensors`, rounded to `activation_dtype`."""
    result, changed = dequantize_tensors(tensors, quantization), {}
    for name in (name for name, tensor in result.items() if tensor is not tensors[name]):
        changed[name] = result[name].astype(activation_dtype(tensors[f"{name.rpartition('.')[0]}.scales"]))
    return result | changed


def quantize_modules(module: nn.Module, tensors: LazyTensors, prefix: str, quantization: Mapping[str, Any]) -> None:
    """Replace the layers of `module` that have scales in `tensors` below `prefix` by MLX's quantized layers."""

    def predicate(name: str, _module: nn.Module) -> dict[str, Any] | None:
        return module_quantization(quantization, prefix + name) if f"{prefix}{name}.scales" in tensors else None

    nn.quantize(module, class_predicate=predicate)


def _unpacked_shape(layer: str, tensors: LazyTensors, quantization: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """Unpacked shape of a quantized matrix or stack of matrices, after checking its parts against the configuration."""
    plan = module_quantization(quantization, layer)
    if plan is None:
        raise CheckpointError(f"{source}: {layer} has scales, but config.json says that it is not quantized")
    bits, group_size, mode = plan["bits"], plan["group_size"], plan["mode"]
    names = ["weight", "scales", "biases"] if mode == "affine" else ["weight", "scales"]
    parts = {
        part: tensors[f"{layer}.{part}"] for part in ("weight", "scales", "biases") if f"{layer}.{part}" in tensors
    }
    if list(parts) != names or any(len(part.shape) not in (2, 3) for part in parts.values()):
        expected = ", ".join(names[:-1]) + f" and {names[-1]}"
        raise CheckpointError(f"{source}: {layer} ({mode}) needs {expected}, each with two or three dimensions")
    packed, *rest = parts.values()
    *rows, words = packed.shape
    width = words * 32 // bits
    dtype = rest[0].dtype
    matches = (
        packed.dtype == mx.uint32
        and words * 32 % bits == 0
        and width % group_size == 0
        and all(part.dtype == dtype and part.shape == (*rows, width // group_size) for part in rest)
        and (mx.issubdtype(dtype, mx.floating) if mode == "affine" else dtype == mx.uint8)
    )
    if not matches:
        raise CheckpointError(
            f"{source}: {layer} does not have {bits} bits in groups of {group_size} ({mode}), as config.json says"
        )
    return *rows, width


def _dequantized(
    packed: LazyTensor, scales: LazyTensor, biases: LazyTensor | None, settings: dict[str, Any]
) -> LazyTensor:
    def read() -> mx.array:
        if biases is None:
            return mx.dequantize(packed.read(), scales.read(), None, **settings, dtype=mx.float32)
        # With 16-bit scales, MLX would round each weight to 16 bits.
        parts = (part.read().astype(mx.float32) for part in (scales, biases))
        return mx.dequantize(packed.read(), *parts, **settings)

    shape = (*packed.shape[:-1], packed.shape[-1] * 32 // settings["bits"])
    nbytes = packed.nbytes + scales.nbytes + (biases.nbytes if biases else 0)
    return LazyTensor(shape, mx.float32, packed.stored_dtype, nbytes, read)
