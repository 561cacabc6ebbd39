"""Encode weights as llama.cpp's quantizer does, byte for byte: K-quants, and Q4_0 to Q5_1 with importance weights.

K-quants have blocks of 256 weights, in groups of 16 or 32 whose scales and minima are integers. They are searched for
the smallest squared error, weighted by the size of the weights, and by the importance of their columns if it is known.
Sources are `quantize_row_*_ref` and, with importance, `quantize_row_*_impl` in ggml-quants.c. Sums are float32, one
value after another, as on x86-64; where the compiler fuses multiplications and additions (arm64), the last bit of a
scale can differ. The `gguf` package only decodes K-quants.

Arrays of the searches have groups as columns: `[size, groups]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
USE_IMPORTANCE = (*K_QUANTS, "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_AT_ONCE = 1 << 15  # weights, whose arrays stay in the cache
_TINY = 1e-15  # groups of smaller weights are zero
# By bits: numbers that are added to the largest integer in a search, as the first one, their distance and their count.
_RANGES = {2: (-0.5, 0.1, 16), 4: (-1.0, 0.1, 21), 5: (-0.5, 0.1, 16)}
_RANGE_WITH_IMPORTANCE = (-0.9, 0.05, 37)


def quantize_k(values: np.ndarray, kind: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Encode rows of weights.

    Args:
        values: float32 `[rows, width]`; the width is a multiple of the type's block size.
        kind: One of `K_QUANTS`; with importance weights also Q4_0, Q4_1, Q5_0 or Q5_1.
        importance: For each weight the mean square of its input, float32 `[rows, width]`.

    Returns:
        uint8 `[rows, bytes]`.
    """
    encode = _ENCODERS[kind]
    size = 256 if kind in K_QUANTS else 32
    blocks, weights = values.reshape(-1, size), importance
    if importance is not None and kind != "Q6_K":
        squares = np.square(values).reshape(-1, size if kind in K_QUANTS else values.shape[1])
        mean = _sum(squares.T) / np.float32(squares.shape[1])
        factor = 2 if kind in ("Q3_K", "Q4_K", "Q5_K") else 1
        weights = importance.reshape(squares.shape) * np.sqrt(factor * mean[:, None] + squares)
    if weights is not None:
        weights = weights.reshape(blocks.shape)
    step, pieces = _AT_ONCE // size, []
    with np.errstate(all="ignore"):  # divisions by zero, whose results aren't used
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            pieces.append(encode(blocks[part], None if weights is None else weights[part]))
    return np.concatenate(pieces).reshape(len(values), -1)


def _sum(terms: np.ndarray) -> np.ndarray:
    """The sums of the columns, in order: NumPy adds values in pairs where they are neighbors in memory."""
    return np.ascontiguousarray(terms).sum(axis=0) if terms.shape[1] > 1 else np.add.accumulate(terms)[-1]


def _columns(blocks: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(blocks.reshape(-1, size).T)


# Searches.


def _search_range(
    x: np.ndarray, weights: np.ndarray, top: int, numbers: tuple[float, float, int], absolute: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales of groups, lowest values up to 0, and integers up to `top`: x = scale · integer + lowest value.

    The least squares for the best of several roundings (`make_qkx2_quants` and `make_qkx3_quants`); with `absolute`,
    the best has the smallest absolute error.
    """
    low, high = np.minimum(x.min(axis=0), 0), x.max(axis=0)
    first, distance, count = np.float32(numbers[0]), np.float32(numbers[1]), numbers[2]
    sum_w, sum_x = _sum(weights), _sum(weights * x)
    # Of the best: its error, scale and lowest value, and the factor and lowest value that its integers were rounded by.
    zero = np.zeros_like(low)
    best = (zero + np.float32(np.inf), zero, low, zero, low)  # stays for equal values, whose factor is infinite
    for step in (None, *range(count)):
        if step is None:  # the whole range
            factor = top / (high - low)
            integers = _rounded(factor * (x - low), 0, top)
            scale, new_low, valid = 1 / factor, low, np.True_
        else:
            low = best[2]  # as in llama.cpp, rounding starts from the best one so far
            factor = (first + distance * np.float32(step) + np.float32(top)) / (high - low)
            integers = _rounded(factor * (x - low), 0, top)
            weighted = weights * integers
            sum_l, sum_ll, sum_xl = _sum(weighted), _sum(weighted * integers), _sum(weighted * x)
            determinant = sum_w * sum_ll - sum_l * sum_l
            new_low = (sum_ll * sum_x - sum_l * sum_xl) / determinant
            scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
            scale = np.where(new_low > 0, sum_xl / sum_ll, scale)
            new_low, valid = np.minimum(new_low, 0), determinant > 0
        change = scale * integers + new_low - x
        error = _sum(weights * (np.abs(change) if absolute else np.square(change)))
        better = valid & (error < best[0])
        found = (error, scale, new_low, factor, low)
        best = tuple(np.where(better, new, old) for new, old in zip(found, best, strict=True))
    _, scale, new_low, factor, low = best
    return scale, new_low, _rounded(factor * (x - low), 0, top)


def _search_scale(x: np.ndarray, weights: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales of groups, and integers below `2 · half`: x = scale · (integer - half) (`make_qx_quants`).

    The least squares for the best of several roundings.
    """
    largest = _largest(x)
    weighted = weights * x
    best = scale = factor = largest  # replaced in the first step
    for step in (0, *range(-9, 0), *range(1, 10)):
        new_factor = -(half + np.float32(0.1) * np.float32(step)) / largest
        integers = _rounded(new_factor * x, -half, half - 1)
        sum_xl, sum_ll = _sum(weighted * integers), _sum(weights * integers * integers)
        new_scale = np.where(sum_ll != 0, sum_xl / sum_ll, 0) if step == 0 else sum_xl / sum_ll
        better = (sum_ll > 0) & (sum_xl * sum_xl > best * sum_ll) if step else np.True_
        pairs = ((new_scale * sum_xl, best), (new_scale, scale), (new_factor, factor))
        best, scale, factor = (np.where(better, new, old) for new, old in pairs)
    zero = np.abs(largest) < _TINY
    return np.where(zero, 0, scale), np.where(zero, 0, half + _rounded(factor * x, -half, half - 1))


def _refined(
    x: np.ndarray, weights: np.ndarray, integers: np.ndarray, low: int, top: int
) -> tuple[np.ndarray, np.ndarray]:
    """Change one integer of a group after another where that makes the error smaller, up to five times each."""
    weighted = weights * x
    sum_xl, sum_ll = _sum(weighted * integers), _sum(weights * integers * integers)
    for _ in range(5):
        before = integers.copy()
        for value, weight, wx, own in zip(x, weights, weighted, integers, strict=True):
            rest_xl, rest_ll = sum_xl - wx * own, sum_ll - weight * own * own
            new = _rounded(value * rest_ll / rest_xl, low, top)
            new_xl, new_ll = rest_xl + wx * new, rest_ll + weight * new * new
            better = (rest_xl > 0) & (rest_ll > 0) & (new != own)
            better &= new_xl * new_xl * sum_ll > sum_xl * sum_xl * new_ll
            own[:] = np.where(better, new, own)
            sum_xl, sum_ll = np.where(better, new_xl, sum_xl), np.where(better, new_ll, sum_ll)
        if np.array_equal(before, integers):
            break
    return np.where(sum_ll > 0, sum_xl / sum_ll, 0), integers


def _largest(x: np.ndarray) -> np.ndarray:
    """The value of each column with the largest magnitude, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]


def _rounded(x: np.ndarray, low: int, top: int) -> np.ndarray:
    np.rint(x, out=x)
    np.maximum(x, low, out=x)
    return np.minimum(x, top, out=x)


# Scales of a block as integers.


def _quantized_scales(scales: np.ndarray, sums: np.ndarray | None, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide scales `[groups, blocks]`, at least 0, into a float16 for each block and integers up to `top`.

    `sums` of the weights of each group are for a search (`make_qp_quants`).
    """
    largest = np.maximum(scales.max(axis=0), 0)
    if sums is None:
        integers = np.where(largest > 0, _rounded(top / largest * scales, 0, top), 0)
        return (largest / np.float32(top)).astype(np.float16), integers.astype(np.uint8)
    best, factor = np.full_like(largest, np.inf), largest
    for step in (0, *range(-4, 0), *range(1, 5)):
        new_factor = (np.float32(0.1) * np.float32(step) + np.float32(top)) / largest
        change = scales - 1 / new_factor * _rounded(new_factor * scales, 0, top)
        error = _sum(sums * change * change)
        best, factor = np.where(error < best, error, best), np.where(error < best, new_factor, factor)
    scale, integers = _refined(scales, sums, _rounded(factor * scales, 0, top), 0, top)
    zero = largest < _TINY
    return np.where(zero, 0, scale).astype(np.float16), np.where(zero, 0, integers).astype(np.uint8)


def _requantized(
    blocks: np.ndarray, steps: np.ndarray, searched: np.ndarray, low: int, top: int, shifts: np.ndarray | float = 0.0
) -> np.ndarray:
    """The integers of blocks `[blocks, size]` for the rounded scales and minima of their groups `[groups, blocks]`.

    Those `searched` stay where the scale is 0.
    """
    columns = _columns(blocks, len(searched))
    steps, shifts = (np.asarray(part).T.reshape(-1) for part in (steps, shifts))
    integers = np.where(steps != 0, _rounded((columns + shifts) / steps, low, top) - low, searched)
    return integers.T.astype(np.uint8).reshape(blocks.shape)


# Types.


def _with_minima(bits: int, blocks: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Encode as Q2_K, Q4_K or Q5_K: a weight is scale · integer - minimum, of groups of 16 or 32."""
    size, top, scale_top = (16, 3, 15) if bits == 2 else (32, (1 << bits) - 1, 63)
    x, sums = _columns(blocks, size), None
    if weights is None:
        own = np.abs(x) if bits == 2 else np.sqrt(_sum(x * x) / np.float32(size)) + np.abs(x)
        found = _search_range(x, own, top, _RANGES[bits], absolute=bits == 2)
    else:
        own = _columns(weights, size)
        found = _search_range(x, own, top, _RANGE_WITH_IMPORTANCE)
        sums = _sum(own).reshape(len(blocks), -1).T
    group_scales, lows, searched = found
    parts = (part.reshape(len(blocks), -1).T for part in (group_scales, 0 - lows))
    scales, minima = (_quantized_scales(part, sums, scale_top) for part in parts)
    step, shift = (whole.astype(np.float32) * integers for whole, integers in (scales, minima))
    integers = _requantized(blocks, step, searched, 0, top, shift)
    halves = [whole[:, None].view(np.uint8) for whole, _ in (scales, minima)]
    packed = (scales[1].T, minima[1].T)
    if bits == 2:
        return np.hstack([packed[0] | packed[1] << 4, _pack_2bit(integers), *halves])
    pairs = integers.reshape(-1, 4, 2, 32)  # of groups: the lower and the upper halves of bytes
    lower = (pairs[:, :, 0] & 15 | pairs[:, :, 1] << 4).reshape(len(blocks), -1)
    return np.hstack([*halves, _pack_6bit(*packed), *([_pack_bit(integers >> 4)] if bits == 5 else []), lower])


def _q3_k(blocks: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Encode as Q3_K: a weight is scale · (integer - 4), of groups of 16 whose scales have 6 bits with an offset."""
    x = _columns(blocks, 16)
    if weights is None:
        largest = _largest(x)
        scales, searched = _refined(x, x * x, _rounded(-4 / largest * x, -4, 3), -4, 3)
        zero = np.abs(largest) < _TINY
        scales, searched = np.where(zero, 0, scales), np.where(zero, 0, searched + 4)
        scales = scales.reshape(len(blocks), -1).T
        largest = _largest(scales)
        factor = -32 / largest
        integers = np.where(largest != 0, _rounded(factor * scales, -32, 31) + 32, 0)
        scale = np.where(largest != 0, 1 / factor, 0)
    else:
        own = _columns(weights, 16)
        scales, searched = _search_scale(x, own, 4)
        sums = _sum(own).reshape(len(blocks), -1).T
        scale, integers = _search_scale(scales.reshape(len(blocks), -1).T, np.ascontiguousarray(sums), 32)
    scale = scale.astype(np.float16)
    values = _requantized(blocks, scale.astype(np.float32) * (integers - 32), searched, -4, 3)
    codes = np.ascontiguousarray(integers.T.astype(np.uint8))
    upper = np.bitwise_or.reduce(codes.reshape(-1, 4, 4) >> 4 << _SHIFTS, axis=1)
    lower = codes[:, :8] & 15 | codes[:, 8:] << 4
    return np.hstack([_pack_bit(values >> 2), _pack_2bit(values & 3), lower, upper, scale[:, None].view(np.uint8)])


def _q6_k(blocks: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Encode as Q6_K: a weight is scale · (integer - 32), of groups of 16 whose scales have 8 bits."""
    x = _columns(blocks, 16)
    scales, searched = _search_scale(x, x * x if weights is None else _columns(weights, 16), 32)
    scales = scales.reshape(len(blocks), -1).T
    largest = _largest(scales)
    usable = np.abs(largest) >= _TINY
    factor = -128 / largest
    scale = np.where(usable, 1 / factor, 0).astype(np.float16)
    codes = np.where(usable, _rounded(factor * scales, -128, 127), 0)
    values = _requantized(blocks, scale.astype(np.float32) * codes, searched, -32, 31)
    values = np.where(usable[:, None], values, 0)
    halves = values.reshape(-1, 2, 4, 32)
    lower = halves[:, :, :2] & 15 | halves[:, :, 2:] << 4
    parts = (lower, _pack_2bit(values >> 4), codes.T.astype(np.int8).view(np.uint8), scale[:, None].view(np.uint8))
    return np.hstack([part.reshape(len(blocks), -1) for part in parts])


def _in_32s(bits: int, minimum: bool, blocks: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Encode as Q4_0, Q4_1, Q5_0 or Q5_1, with importance weights: blocks of 32, scales and minima of 16 bits."""
    assert weights is not None
    x, own = _columns(blocks, 32), _columns(weights, 32)
    if minimum:
        scale, low, integers = _search_range(x, own, (1 << bits) - 1, _RANGE_WITH_IMPORTANCE)
        factors = [scale, low]
    else:
        scale, integers = _search_scale(x, own, 1 << bits - 1)
        factors = [scale]
    values = np.ascontiguousarray(integers.T.astype(np.uint8))
    fifth = [np.packbits(values >> 4, axis=1, bitorder="little")] if bits == 5 else []
    lower = values[:, :16] & 15 | values[:, 16:] << 4
    return np.hstack([*(part.astype(np.float16)[:, None].view(np.uint8) for part in factors), *fifth, lower])


# Bytes: see the structures `block_*` in ggml-common.h.

_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def _pack_bit(values: np.ndarray) -> np.ndarray:
    """The lowest bit of values `[blocks, 256]` in 32 bytes, one bit for each 32 values."""
    return np.packbits(values.reshape(-1, 8, 32) & 1, axis=1, bitorder="little")[:, 0]


def _pack_2bit(values: np.ndarray) -> np.ndarray:
    """Two bits of each value `[blocks, 256]` in 64 bytes."""
    return np.bitwise_or.reduce(values.reshape(-1, 2, 4, 32) << _SHIFTS, axis=2).reshape(len(values), -1)


def _pack_6bit(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """8 scales and 8 minima of 6 bits `[blocks, 8]` in 12 bytes."""
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    return np.hstack([*first, scales[:, 4:] & 15 | minima[:, 4:] << 4])


_ENCODERS: dict[str, Callable[[np.ndarray, np.ndarray | None], np.ndarray]] = {
    "Q2_K": partial(_with_minima, 2),
    "Q3_K": _q3_k,
    "Q4_K": partial(_with_minima, 4),
    "Q5_K": partial(_with_minima, 5),
    "Q6_K": _q6_k,
    "Q4_0": partial(_in_32s, 4, False),
    "Q4_1": partial(_in_32s, 4, True),
    "Q5_0": partial(_in_32s, 5, False),
    "Q5_1": partial(_in_32s, 5, True),
}
