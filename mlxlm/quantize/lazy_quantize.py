"""Tensors that are quantized when they are read, so that a model streams from disk to disk in constant memory."""

from __future__ import annotations

from collections.abc import Callable

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.quantize.packed_matrix import PackedMatrix, quantize_rtn
from mlxlm.quantize.quantization_plan import Format, QuantizationPlan

OnMatrix = Callable[[str, mx.array, PackedMatrix, Format], None]


def lazy_quantize(
    tensors: LazyTensors, plan: QuantizationPlan, on_matrix: OnMatrix | None = None
) -> dict[str, LazyTensor]:
    """Round the matrices of `plan` to nearest when they are read.

    The parts of a matrix (weight, scales, biases) are computed together and kept until each was read once, as writers
    read them one after the other.

    Args:
        tensors: The decoder's tensors in 16 bits.
        plan: The format of each matrix.
        on_matrix: Called as `on_matrix(module, weight, packed, format)` when a matrix was quantized.
    """
    pending: dict[str, dict[str, mx.array]] = {}  # module -> parts that weren't read yet

    def read_part(module: str, name: str, tensor: LazyTensor, fmt: Format) -> mx.array:
        if name not in pending.get(module, {}):
            weight = tensor.read()
            packed = quantize_rtn(weight, fmt)
            if on_matrix is not None:
                on_matrix(module, weight, packed, fmt)
            pending[module] = packed.parts(module)
        value = pending[module].pop(name)
        if not pending[module]:
            del pending[module]
        return value

    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        fmt = plan.formats.get(module) if parameter == "weight" else None
        if fmt is None:
            result[name] = tensor
            continue
        for key, header in _part_headers(module, tensor, fmt).items():
            read = lambda m=module, k=key, t=tensor, f=fmt: read_part(m, k, t, f)  # noqa: E731
            result[key] = LazyTensor(*header, read)
    return result


def _part_headers(module: str, tensor: LazyTensor, fmt: Format) -> dict[str, tuple]:
    """Tensor name -> shape, dtype, stored dtype and bytes of each part of a quantized matrix."""
    rows, width = tensor.shape
    parts = {"weight": ((rows, width * fmt.bits // 32), mx.uint32, "U32")}
    groups = (rows, width // fmt.group_size)
    if fmt.affine:
        parts |= dict.fromkeys(("scales", "biases"), (groups, tensor.dtype, tensor.stored_dtype))
    else:
        parts["scales"] = (groups, mx.uint8, "U8")
    return {f"{module}.{p}": (s, d, stored, s[0] * s[1] * d.size) for p, (s, d, stored) in parts.items()}
