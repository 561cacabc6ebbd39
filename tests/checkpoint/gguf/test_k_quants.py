"""K-quants, and other types with importance weights, are those of llama.cpp, byte for byte."""

import zlib

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from mlxlm.checkpoint.gguf.k_quants import K_QUANTS, USE_IMPORTANCE, quantize_k

WIDTH = 768
# CRC-32 of what llama.cpp 0.3.36 of llama-cpp-python writes on x86-64 for `rows()`: without importance weights, with.
CHECKSUMS = {
    "Q2_K": (0x70D79F36, 0x6DBC8691),
    "Q3_K": (0xC0CD5390, 0x2E192846),
    "Q4_K": (0x312094D4, 0x6BE01FDC),
    "Q5_K": (0x17B7F54B, 0xEBEEB939),
    "Q6_K": (0xED677734, 0x35B5D3B1),
    "Q4_0": (None, 0xF6074E57),
    "Q4_1": (None, 0xA85F618F),
    "Q5_0": (None, 0x4519CC55),
    "Q5_1": (None, 0xAF09B47A),
}
CASES = [(kind, False) for kind in K_QUANTS] + [(kind, True) for kind in USE_IMPORTANCE]


def uniform(count: int, factor: int) -> np.ndarray:
    """Pseudorandom numbers between -1 and 1, the same with every version of NumPy."""
    bits = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(factor)
    bits ^= bits >> np.uint64(29)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    return ((bits >> np.uint64(40)).astype(np.float32) - 2**23) / np.float32(2**23)


def rows() -> np.ndarray:
    """Rows of weights, float32 `[20, 768]`, some of them with groups or blocks of equal, tiny or positive values."""
    u = uniform(20 * WIDTH, 0x9E3779B97F4A7C15).reshape(20, WIDTH)
    values = u * u * u * np.float32(2.0) ** np.arange(-12, 8, dtype=np.float32)[:, None]
    values[0] = 0
    values[1, 100:500] = 0
    values[2] = -0.7
    values[3] *= np.float32(2.0**-60)
    values[4] = np.where(np.arange(WIDTH) % 256 == 100, 3, 0)
    values[5] = 5 + u[5]
    values[6] = -np.abs(u[6])
    values[7] = np.rint(3 * u[7]) + 0.0  # no zero with a sign
    return values


def importance() -> np.ndarray:
    """The importance of each column; those of some groups are all zero."""
    weights = np.square(uniform(WIDTH, 0xD1B54A32D192ED03)) ** 2 * 10
    weights[64:128] = 0
    return weights.astype(np.float32)


def encoded(kind: str, weighted: bool) -> np.ndarray:
    values = rows()
    return quantize_k(values, kind, np.broadcast_to(importance(), values.shape) if weighted else None)


@pytest.mark.parametrize("kind, weighted", CASES)
def test_bytes_are_those_of_llama_cpp(kind, weighted):
    assert zlib.crc32(encoded(kind, weighted).tobytes()) == CHECKSUMS[kind][weighted]


def test_one_block_is_that_among_others():
    """NumPy sums a single column in another order."""
    values = rows()[9:11, :256]
    for kind in K_QUANTS:
        for weights in (None, np.broadcast_to(importance()[:256], values.shape)):
            both = quantize_k(values, kind, weights)
            one = quantize_k(values[:1], kind, None if weights is None else weights[:1])
            np.testing.assert_array_equal(one, both[:1])


@pytest.mark.parametrize("kind", USE_IMPORTANCE)
def test_importance_moves_errors_to_other_columns(kind):
    values = uniform(64 * WIDTH, 0x9E3779B97F4A7C15).reshape(64, WIDTH)
    weights = np.where(np.arange(WIDTH) % 8 == 0, 100, 1).astype(np.float32)

    def error(weights: np.ndarray) -> np.ndarray:
        stored = quantize_k(values, kind, np.broadcast_to(weights, values.shape))
        return np.square(dequantize(stored, GGMLQuantizationType[kind]) - values).mean(axis=0)

    plain, weighted = error(np.ones_like(weights)), error(weights)
    assert weighted[::8].mean() < 0.8 * plain[::8].mean() and weighted.mean() < 2 * plain.mean()
