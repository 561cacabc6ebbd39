"""Quantized tensors that are made when they are read: a model goes from disk to disk in constant memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.bits import max_abs
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.quantize.packed_matrix import PackedMatrix, quantize_rtn
from mlxlm.quantize.quantization_plan import Format, QuantizationPlan
from mlxlm.utils.errors import CheckpointError

DTYPES_16BIT = (mx.float16, mx.bfloat16)

OnMatrix = Callable[[str, mx.array, PackedMatrix, Format], None]


def output_dtype(tensors: LazyTensors) -> mx.Dtype:
    """The 16-bit dtype of the output: that of most of the source's values; for float32, float16 where all values
    fit, which has three more bits of precision, else bfloat16.

    float32 sources are read once for that, a tensor at a time. Raises CheckpointError for a NaN or infinity there.
    """
    sizes = dict.fromkeys(DTYPES_16BIT, 0)
    wide = []
    for name, tensor in tensors.items():
        if tensor.dtype in sizes:
            sizes[tensor.dtype] += tensor.nbytes
        elif mx.issubdtype(tensor.dtype, mx.floating):
            wide.append((name, tensor))
    if any(sizes.values()):
        return max(sizes, key=sizes.get)
    fits = True
    for name, tensor in wide:
        fits = _largest(name, tensor.read()) < mx.finfo(mx.float16).max and fits
    return mx.float16 if fits else mx.bfloat16


def cast_to_16bit(tensors: LazyTensors, dtype: mx.Dtype) -> dict[str, LazyTensor]:
    """The same with every floating-point tensor in `dtype`, checked as it is read: reading one whose values are
    not finite, or don't fit, raises CheckpointError."""

    def checked(name: str, tensor: LazyTensor) -> LazyTensor:
        if not mx.issubdtype(tensor.dtype, mx.floating):
            return tensor

        def convert(value: mx.array) -> mx.array:
            highest = _largest(name, value)
            if not highest <= mx.finfo(dtype).max:
                raise CheckpointError(f"{name} has values that 16 bits can't hold (up to {highest:g})")
            return value.astype(dtype)

        kind = {mx.float16: "F16", mx.bfloat16: "BF16"}[dtype]
        return LazyTensor(tensor.shape, dtype, kind, 2 * math.prod(tensor.shape), lambda: convert(tensor.read()))

    return {name: checked(name, tensor) for name, tensor in tensors.items()}


def quantized(tensors: LazyTensors, plan: QuantizationPlan, on_matrix: OnMatrix | None = None) -> dict[str, LazyTensor]:
    """16-bit `tensors` with the matrices of `plan` rounded by MLX, each when it is read.

    The parts of a matrix (weight, scales, biases) are made together and kept until each was read once, as writers do
    one after the other.
    `on_matrix(module, weight, packed, format)` is told of each when it is made.
    """
    kept: dict[str, dict[str, mx.array]] = {}

    def make(module: str, tensor: LazyTensor, chosen: Format) -> dict[str, mx.array]:
        weight = tensor.read()
        packed = quantize_rtn(weight, chosen)
        if on_matrix is not None:
            on_matrix(module, weight, packed, chosen)
        return packed.parts(module)

    def part(module: str, name: str, tensor: LazyTensor, chosen: Format) -> mx.array:
        if name not in kept.get(module, {}):
            kept[module] = make(module, tensor, chosen)
        value = kept[module].pop(name)
        if not kept[module]:
            del kept[module]
        return value

    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        chosen = plan.formats.get(module) if parameter == "weight" else None
        if chosen is None:
            result[name] = tensor
            continue
        for key, described in describe(module, tensor, chosen).items():
            read = lambda m=module, k=key, t=tensor, c=chosen: part(m, k, t, c)  # noqa: E731
            result[key] = LazyTensor(*described, read)
    return result


def describe(module: str, tensor: LazyTensor, chosen: Format) -> dict[str, tuple]:
    """Shape, dtype, the file's word for it and bytes of each part of a quantized matrix."""
    rows, width = tensor.shape
    shapes = {"weight": ((rows, width * chosen.bits // 32), mx.uint32, "U32")}
    groups = (rows, width // chosen.group_size)
    if chosen.affine:
        shapes |= dict.fromkeys(("scales", "biases"), (groups, tensor.dtype, tensor.stored_dtype))
    else:
        shapes["scales"] = (groups, mx.uint8, "U8")
    return {f"{module}.{p}": (s, d, kind, s[0] * s[1] * d.size) for p, (s, d, kind) in shapes.items()}


def _largest(name: str, value: mx.array) -> float:
    """The largest magnitude. Raises CheckpointError for a NaN or infinity."""
    found = max_abs(value)
    if not found < math.inf:
        raise CheckpointError(f"{name} has values that are not finite", "the checkpoint before they appeared")
    return found
