"""Matrices packed as the programs that quantize them do, one value at a time, with the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx

Parts = dict[str, np.ndarray]  # by name after the module's; uint8 of FP8 are named in FP8_PARTS
Packed = tuple[Parts, np.ndarray]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.091050036, 0.0,
       0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]  # fmt: skip


def rng(shape: tuple[int, int]) -> np.random.Generator:
    return np.random.default_rng(shape[0] * 1000 + shape[1])


def pack_column(values: Any, bits: int, order: tuple[int, ...] | None = None) -> list[int]:
    """Pack integers into words of 32 bits: the one at `order[i]` of each word is at bit `i * bits`."""
    per_word = 32 // bits
    words = []
    for start in range(0, len(values), per_word):
        part = [int(v) for v in values[start : start + per_word]]
        part += [0] * (per_word - len(part))
        words.append(sum(part[j] << i * bits for i, j in enumerate(order or range(per_word))))
    return words


def pack_stream(values: Any, bits: int) -> list[int]:
    """Pack integers into words of 32 bits as one stream, the lowest bits first."""
    stream = sum(int(value) << i * bits for i, value in enumerate(values))
    return [stream >> 32 * i & 0xFFFFFFFF for i in range(len(values) * bits // 32)]


def pack(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    pack_one = pack_stream if bits == 3 else partial(pack_column, order=order)
    words = [pack_one(column, bits) for column in np.moveaxis(codes, axis, -1)]
    return np.ascontiguousarray(np.moveaxis(np.array(words, np.uint32).view(np.int32), -1, axis))


def gptq(shape: tuple[int, int], bits: int = 4, group: int = 32, act_order: bool = False, v2: bool = False) -> Packed:
    (out, width), random = shape, rng(shape)
    groups = width // group
    codes, zeros = random.integers(0, 1 << bits, (width, out)), random.integers(1, 1 << bits, (groups, out))
    scales = random.uniform(0.01, 0.02, (groups, out)).astype(np.float16)
    index = np.arange(width) // group
    if act_order:
        index = random.permutation(index)
    stored = pack(zeros if v2 else zeros - 1, bits, 1)
    parts = {"qweight": pack(codes, bits, 0), "qzeros": stored, "scales": scales, "g_idx": index.astype(np.int32)}
    return parts, ((codes - zeros[index]) * scales.astype(np.float32)[index]).T


def awq(shape: tuple[int, int], group: int = 32) -> Packed:
    (out, width), random = shape, rng(shape)
    groups = width // group
    codes, zeros = random.integers(0, 16, (width, out)), random.integers(0, 16, (groups, out))
    scales = random.uniform(0.01, 0.02, (groups, out)).astype(np.float16)
    parts = {"qweight": pack(codes, 4, 1, _AWQ_ORDER), "qzeros": pack(zeros, 4, 1, _AWQ_ORDER), "scales": scales}
    index = np.arange(width) // group
    return parts, ((codes - zeros[index]) * scales.astype(np.float32)[index]).T


def compressed(
    shape: tuple[int, int], bits: int = 4, group: int | None = 32, symmetric: bool = True, act_order: bool = False
) -> Packed:
    (out, width), random, half = shape, rng(shape), 1 << bits - 1
    groups = width // group if group else 1
    codes = random.integers(-half, half, shape)
    zeros = np.zeros((out, groups), np.int64) if symmetric else random.integers(-half, half, (out, groups))
    scales = random.uniform(0.01, 0.02, (out, groups)).astype(np.float32)
    index = np.arange(width) // (width // groups)
    parts = {"weight_shape": np.array(shape, np.int64), "weight_scale": scales}
    if act_order:
        index = random.permutation(index)
        parts["weight_g_idx"] = index.astype(np.int32)
    parts["weight_packed"] = pack(codes + half, bits, 1)
    if not symmetric:
        parts["weight_zero_point"] = pack(zeros + half, bits, 0)
    return parts, (codes - zeros[:, index]) * scales[:, index]


def int8(shape: tuple[int, int], symmetric: bool = True) -> Packed:
    random = rng(shape)
    codes, scales = random.integers(-128, 128, shape), random.uniform(0.01, 0.02, (shape[0], 1)).astype(np.float32)
    zeros = np.zeros((shape[0], 1)) if symmetric else random.integers(-9, 9, (shape[0], 1))
    parts = {"weight": codes.astype(np.int8), "weight_scale": scales, "input_scale": np.ones(1, np.float32)}
    return parts | ({} if symmetric else {"weight_zero_point": zeros.astype(np.int8)}), (codes - zeros) * scales


def e4m3(byte: int) -> float:
    """The value of an 8-bit float with 4 bits of exponent and 3 of mantissa, not NaN."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def fp8(shape: tuple[int, int], kind: str = "block", name: str = "weight_scale_inv", block: int = 48) -> Packed:
    """FP8 with one scale ("tensor"), one for each row ("channel") or square block, in float32 or E8M0 ("e8m0")."""
    (out, width), random = shape, rng(shape)
    codes = random.integers(0, 127, shape) | random.integers(0, 2, shape) << 7
    sizes = {"tensor": (out, width), "channel": (1, width)}.get(kind, (block, block))
    grid = (-(-out // sizes[0]), -(-width // sizes[1]))
    scales = random.uniform(0.001, 0.002, grid).astype(np.float32)
    stored = scales
    if kind == "e8m0":
        stored = random.integers(110, 120, grid).astype(np.uint8)
        scales = 2.0 ** (stored.astype(np.float32) - 127)
    rows, columns = np.arange(out) // sizes[0], np.arange(width) // sizes[1]
    values = np.vectorize(e4m3)(codes) * scales[rows][:, columns]
    return {"weight": codes.astype(np.uint8), name: stored[0, 0] if kind == "tensor" else stored}, values


def nf4(shape: tuple[int, int], nested: bool = False, block: int = 64) -> Packed:
    random, size = rng(shape), shape[0] * shape[1]
    codes, code = random.integers(0, 16, size + size % 2), np.array(NF4, np.float32)
    blocks = -(-size // block)
    absmax = random.uniform(0.1, 0.2, blocks).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    parts = {"weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None], "weight.quant_map": code}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.125}
        stored, table = random.integers(0, 256, blocks), np.linspace(-1, 1, 256).astype(np.float32)
        largest = random.uniform(0.01, 0.02, -(-blocks // 256)).astype(np.float32)
        absmax = table[stored] * largest[np.arange(blocks) // 256] + np.float32(0.125)
        parts |= {"weight.absmax": stored.astype(np.uint8), "weight.nested_quant_map": table}
        parts["weight.nested_absmax"] = largest
    else:
        parts["weight.absmax"] = absmax
    raw = np.frombuffer(json.dumps(state).encode(), np.uint8)
    values = code[codes[:size]] * absmax[np.arange(size) // block]
    return parts | {"weight.quant_state.bitsandbytes__nf4": raw}, values.reshape(shape)


def llm_int8(shape: tuple[int, int]) -> Packed:
    random = rng(shape)
    codes, largest = random.integers(-127, 128, shape), random.uniform(1, 2, shape[0]).astype(np.float32)
    parts = {"weight": codes.astype(np.int8), "SCB": largest, "weight_format": np.array(0, np.uint8)}
    return parts, codes * largest[:, None] / 127


def pack_model(
    weights: dict[str, mx.array], make: Callable[[tuple[int, int]], Packed], prefix: str = ""
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Replace the matrices of layers by packed ones.

    Returns:
        The file's tensors, with a prefix, and the model's.
    """
    stored, values = {}, {}
    for name, value in weights.items():
        module = name.removesuffix(".weight")
        if ".layers." in name and len(value.shape) == 2:
            parts, values[name] = make(tuple(value.shape))
            stored |= {f"{prefix}{module}.{part}": array for part, array in parts.items()}
        else:
            stored[prefix + name] = values[name] = np.array(value)
    return stored, values
