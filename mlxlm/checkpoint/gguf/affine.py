"""Quantized matrices of GGUF in MLX's formats: w = scale · q + bias, with a scale and a bias for 32 weights, or MXFP4.

A block of Q4_0 to Q8_0 is such a group, one of Q4_K and Q5_K has eight of them, with scales and minima of 6 bits:
their integers are packed in MLX's order, and every weight is the same number, bit for bit (a zero may have another
sign). MXFP4 has the same values in another order. The other types have groups of 16, or values that are not evenly
spaced: they are dequantized and rounded to 8 bits.

Scales and biases are float32. Those of K-quants have 17 bits, and -128 · scale of Q8_0 may be too large for float16.
Norms of GGUF files are float32, and so are activations: MLX would convert 16-bit scales again for each product.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.header import TensorInfo, mmap_tensor
from mlxlm.checkpoint.gguf.tensors import dequantized_rows, map_in_threads, row_slices
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.config.quantization import Format, quantization_settings

EXACT_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
GROUP_SIZE = 32
ROUNDED_BITS = 8
_WITHOUT_MINIMUM = ("Q4_0", "Q5_0", "Q8_0")


def packed_tensors(
    infos: Mapping[str, TensorInfo], tensors: LazyTensors, modules: Collection[str]
) -> dict[str, LazyTensor]:
    """Return the tensors of a file with its quantized matrices in MLX's format: `.weight`, `.scales` and `.biases`.

    A matrix is read once for its three parts: the others stay in memory until they are read, or until a part of another
    matrix is.

    Args:
        infos: Where the tensors are.
        tensors: The same tensors, dequantized.
        modules: The file's names of the modules whose matrices are packed.
    """
    unread: dict[str, mx.array] = {}
    result: dict[str, LazyTensor] = {}
    for name, info in infos.items():
        module, _, parameter = name.rpartition(".")
        if module in modules and parameter == "weight" and len(info.shape) > 1 and info.type.block_size > 1:
            result |= _parts(module, info, unread)
        else:
            result[name] = tensors[name]
    return result


def quantization_config(tensors: LazyTensors) -> dict[str, Any] | None:
    """The `quantization` of ModelConfig for packed tensors, None if there are none."""
    formats = {module: _format(kind) for module, kind in packed_types(tensors).items()}
    return quantization_settings(formats) if formats else None


def packed_types(tensors: LazyTensors) -> dict[str, str]:
    """The modules of packed tensors, and the type that each has in the file ("Q4_K")."""
    matrices = ((name, tensor) for name, tensor in tensors.items() if tensor.dtype == mx.uint32)
    return {name.removesuffix(".weight"): tensor.stored_dtype for name, tensor in matrices}


def _format(kind: str) -> Format:
    return Format.of("mxfp4") if kind == "MXFP4" else Format(EXACT_BITS.get(kind, ROUNDED_BITS), GROUP_SIZE)


def _parts(module: str, info: TensorInfo, unread: dict[str, mx.array]) -> dict[str, LazyTensor]:
    *rows, width = info.shape
    format = _format(info.type.name)

    def read(name: str) -> mx.array:
        if name not in unread:
            unread.clear()
            unread.update(zip(names, pack(info), strict=True))
        return unread.pop(name)

    def part(name: str, columns: int, dtype: mx.Dtype) -> LazyTensor:
        nbytes = math.prod(rows) * columns * dtype.size
        return LazyTensor((*rows, columns), dtype, info.type.name, nbytes, partial(read, name))

    weight, *factors = names = [f"{module}.{part}" for part in ("weight", "scales", "biases")[: 2 + format.affine]]
    groups, dtype = width // GROUP_SIZE, mx.float32 if format.affine else mx.uint8
    return {weight: part(weight, width * format.bits // 32, mx.uint32)} | {n: part(n, groups, dtype) for n in factors}


def pack(info: TensorInfo) -> tuple[mx.array, ...]:
    """Read a quantized matrix, or a stack of matrices.

    Returns:
        Packed uint32 `[..., rows, width · bits / 32]`, scales, and in affine mode biases, `[..., rows, width / 32]`.
    """
    *stack, width = info.shape
    rows, format = math.prod(stack), _format(info.type.name)
    bits = format.bits
    weight = np.empty((rows, width * bits // 32), np.uint32)
    scales, biases = np.empty((2, rows, width // GROUP_SIZE), np.float32 if format.affine else np.uint8)
    with mmap_tensor(info) as data:
        if info.type.name in EXACT_BITS or not format.affine:

            def fill(part: slice) -> None:
                blocks = data[part].reshape(-1, info.type.type_size)
                shape = (part.stop - part.start, -1)
                with np.errstate(all="ignore"):  # scales of random bytes can overflow
                    values, scale, bias = _unpack(blocks, info.type.name)
                weight[part] = _to_bits(values, bits).reshape(shape).view(np.uint32)
                scales[part], biases[part] = scale.reshape(shape), bias.reshape(shape)

            for _ in map_in_threads(fill, row_slices(rows, width)):
                pass
        else:
            for part, values in dequantized_rows(info, data):
                parts = mx.quantize(mx.array(values), GROUP_SIZE, bits)
                weight[part], scales[part], biases[part] = map(np.array, parts)
    parts = (weight, scales, biases) if format.affine else (weight, scales)
    return tuple(mx.array(part.reshape(*stack, -1)) for part in parts)


def _unpack(blocks: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The integers of blocks `[N, bytes]` as uint8 `[groups, 32]`, their scales and their biases, one for each group.

    Layouts are those of ggml-common.h: float16 scale, float16 minimum, scales of groups, fifth bits, lower four bits.
    """
    if kind == "MXFP4":
        scales, lower = np.hsplit(blocks, [1])
        return np.concatenate([lower & 0x0F, lower >> 4], axis=1), scales, scales
    bits, count = EXACT_BITS[kind], len(blocks)
    head, rest = np.hsplit(blocks, [2 if kind in _WITHOUT_MINIMUM else 4])
    scales, *minima = np.hsplit(np.ascontiguousarray(head).view(np.float16).astype(np.float32), head.shape[1] // 2)
    biases = minima[0] if minima else scales * np.float32(-(1 << bits - 1))
    if kind == "Q8_0":
        return rest ^ 0x80, scales, biases  # q + 128 of signed bytes
    is_k_quant = kind.endswith("_K")
    if is_k_quant:
        from gguf.quants import Q4_K

        packed_scales, rest = np.hsplit(rest, [Q4_K.K_SCALE_SIZE])
        group_scales, group_minima = Q4_K.get_scale_min(np.ascontiguousarray(packed_scales))
        scales, biases = scales * group_scales, -(biases * group_minima)
    groups = 8 if is_k_quant else 1
    fifth, lower = np.hsplit(rest, [rest.shape[1] - groups * GROUP_SIZE // 2])
    # The lower and upper halves of bytes are two groups of a K-quant, or the halves of a group.
    halves = lower.reshape(count, -1, 1, GROUP_SIZE if is_k_quant else GROUP_SIZE // 2)
    values = np.concatenate([halves & 0x0F, halves >> 4], axis=2).reshape(count, groups, GROUP_SIZE)
    if bits == 5:  # bit i of a K-quant's byte is that of group i, otherwise of the byte's value i
        flags = np.unpackbits(fifth, axis=1, bitorder="little").reshape(count, GROUP_SIZE, groups)
        values |= flags.swapaxes(1, 2) << 4
    return values.reshape(-1, GROUP_SIZE), scales, biases


def _to_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack the lowest `bits` of uint8 values `[N, 32]`, the first one lowest, in uint8 `[N, 4 · bits]`."""
    if bits == 8:
        return values
    words = values
    for size in (2, 4, 8):  # join the halves of words, up to 8 values in `bits` bytes
        words, half, used = words.view(f"<u{size}"), 4 * size, bits * size // 2
        words = words & (1 << used) - 1 | words >> half << used
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(len(values), -1)
