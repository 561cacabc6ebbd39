"""Encode llama.cpp's K-quants: blocks of 256 weights whose groups have quantized scales (ggml-quants.c).

Q4_K and Q5_K have 8 groups of 32 with a scale and a minimum of 6 bits each, Q6_K has 16 groups of 16 with a scale of 8
bits. The scales are searched for the smallest squared error, weighted by the size of the weights, as llama.cpp's
quantizer does without an importance matrix. The `gguf` package only decodes these types.
"""

from __future__ import annotations

from functools import partial

import numpy as np

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
_BLOCK_SIZE = 256
# Bits of Q4_K and Q5_K, and the steps that are tried around 2^bits - 1 for the range of a group.
_WITH_MINIMUM = {"Q4_K": (4, np.arange(-10, 11)), "Q5_K": (5, np.arange(-5, 11))}
_STEP = np.float32(0.1)
_AT_ONCE = 128  # blocks, whose arrays stay in the cache
_TINY = 1e-15  # groups of smaller weights are zero


def quantize_k(values: np.ndarray, kind: str) -> np.ndarray:
    """Encode rows of weights, float32 `[rows, width]` with a width divisible by 256, as uint8 `[rows, bytes]`."""
    blocks = values.reshape(-1, _BLOCK_SIZE)
    encode = _with_scales if kind == "Q6_K" else partial(_with_minima, *_WITH_MINIMUM[kind])
    with np.errstate(all="ignore"):  # divisions by zero, whose results aren't used
        pieces = [encode(blocks[start : start + _AT_ONCE]) for start in range(0, len(blocks), _AT_ONCE)]
    return np.concatenate(pieces).reshape(len(values), -1)


def _with_minima(bits: int, steps: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Encode as Q4_K or Q5_K: a weight is scale · integer - minimum."""
    groups, top = blocks.reshape(-1, 8, 32), (1 << bits) - 1
    group_scales, group_minima = _search_scales_and_minima(groups, top, steps)
    scale, scales = _quantize_6bit(group_scales)
    minimum, minima = _quantize_6bit(group_minima)
    step = (scale.astype(np.float32) * scales)[..., None]
    shift = (minimum.astype(np.float32) * minima)[..., None]
    integers = np.where(step > 0, np.clip(np.rint((groups + shift) / step), 0, top), 0).astype(np.uint8)
    pairs = integers.reshape(-1, 4, 2, 32)  # of groups: the lower and the upper halves of bytes
    lower = (pairs[:, :, 0] & 15 | pairs[:, :, 1] << 4).reshape(len(blocks), -1)
    fifth = [np.packbits(integers >> 4, axis=1, bitorder="little")[:, 0]] if bits == 5 else []
    return np.hstack([scale.view(np.uint8), minimum.view(np.uint8), _pack_6bit(scales, minima), *fifth, lower])


def _search_scales_and_minima(groups: np.ndarray, top: int, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima, at least 0, of groups `[N, 8, 32]`: the least squares for the best of several roundings."""
    size = np.sqrt(np.mean(np.square(groups), axis=2, keepdims=True))
    weights = size + np.abs(groups)
    weighted = weights * groups
    low = np.minimum(groups.min(axis=2, keepdims=True), 0)
    width = groups.max(axis=2, keepdims=True) - low
    unit = (groups - low) / width
    low = low[..., 0]
    sum_w, sum_x = (part.sum(axis=2, dtype=np.float64) for part in (weights, weighted))
    sum_xx = _dot(weighted, groups)
    best_scale, best_low, best = width[..., 0] / top, low, np.full(low.shape, np.inf)
    for step in (None, *steps):
        rounded = np.rint(unit * np.float32(top + _STEP * (step or 0)))
        np.minimum(rounded, top, out=rounded)
        sum_l, sum_xl = _dot(weights, rounded), _dot(weighted, rounded)
        sum_ll = _dot(weights, np.square(rounded, out=rounded))
        determinant = sum_w * sum_ll - sum_l * sum_l
        if step is None:  # the whole range
            new_scale, new_low = best_scale, best_low
        else:
            new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
            new_low = (sum_ll * sum_x - sum_l * sum_xl) / determinant
            new_scale, new_low = np.where(new_low > 0, sum_xl / sum_ll, new_scale), np.minimum(new_low, 0)
        error = new_scale * (new_scale * sum_ll + 2 * (new_low * sum_l - sum_xl))
        error += new_low * (new_low * sum_w - 2 * sum_x) + sum_xx
        better = (error < best) & (determinant > 1e-6 * sum_w * sum_ll)  # else rounding errors decide
        best = np.where(better, error, best)
        best_scale, best_low = np.where(better, new_scale, best_scale), np.where(better, new_low, best_low)
    return np.where(width[..., 0] > 0, best_scale, 0), 0 - best_low


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The dot product of each group, in float64, since errors are small differences of them."""
    return np.einsum("ijk,ijk->ij", a, b).astype(np.float64)


def _quantize_6bit(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divide values `[N, 8]`, at least 0, into a float16 for each row, `[N, 1]`, and integers of 6 bits."""
    largest = values.max(axis=1, keepdims=True)
    integers = np.where(largest > 0, np.rint(values * (63 / largest)), 0)
    return (largest / 63).astype(np.float16), np.clip(integers, 0, 63).astype(np.uint8)


def _pack_6bit(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Pack 8 scales and 8 minima of 6 bits `[N, 8]` in 12 bytes, in the order of `block_q4_K` in ggml-common.h."""
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    return np.hstack([*first, scales[:, 4:] & 15 | minima[:, 4:] << 4])


def _with_scales(blocks: np.ndarray) -> np.ndarray:
    """Encode as Q6_K: a weight is scale · (integer - 32)."""
    groups = blocks.reshape(-1, 16, 16)
    group_scales = _search_scales(groups)
    largest = np.take_along_axis(group_scales, np.abs(group_scales).argmax(axis=1)[:, None], axis=1)
    usable = np.abs(largest) >= _TINY
    scale = np.where(usable, largest / -128, 0).astype(np.float16)
    scales = np.where(usable, np.minimum(np.rint(group_scales * (-128 / largest)), 127), 0)
    step = (scale.astype(np.float32) * scales)[..., None]
    integers = (32 + np.where(step != 0, np.clip(np.rint(groups / step), -32, 31), 0)).astype(np.uint8)
    halves = integers.reshape(-1, 2, 4, 32)
    lower = halves[:, :, :2] & 15 | halves[:, :, 2:] << 4
    upper = halves >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]
    parts = (lower, np.bitwise_or.reduce(upper, axis=2), scales.astype(np.int8).view(np.uint8), scale.view(np.uint8))
    return np.hstack([part.reshape(len(blocks), -1) for part in parts])


def _search_scales(groups: np.ndarray) -> np.ndarray:
    """Scales of groups `[N, 16, 16]`: the least squares for the best of several roundings; -32 is for the largest."""
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)
    squares = np.square(groups)
    cubes, unit = squares * groups, groups / largest
    best, best_scale = np.full(largest.shape[:2], -np.inf), np.zeros(largest.shape[:2])
    for step in (0, *range(-9, 0), *range(1, 10)):
        rounded = np.rint(unit * -(32 + _STEP * np.float32(step)))
        np.clip(rounded, -32, 31, out=rounded)
        sum_xl, sum_ll = _dot(cubes, rounded), _dot(squares, np.square(rounded))  # weighted by squares
        explained = np.where(sum_ll > 0, sum_xl * sum_xl / sum_ll, 0)
        better = explained > best
        best, best_scale = np.where(better, explained, best), np.where(better, sum_xl / sum_ll, best_scale)
    return np.where(np.abs(largest[..., 0]) < _TINY, 0, best_scale)
