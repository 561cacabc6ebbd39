"""K-quants are what the `gguf` package decodes to the same weights."""

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from mlxlm.checkpoint.gguf.k_quants import K_QUANTS, quantize_k
from tests.checkpoint.gguf.quantized_files import random_blocks

# Relative errors of normal weights, 1 % more than measured. Those of llama.cpp's quantizer of September 2023 were
# 0.5 %, 6 % and 0.5 % larger than ours on the same weights.
ERRORS = {"Q4_K": 0.0730, "Q5_K": 0.0368, "Q6_K": 0.0183}


def decoded(values: np.ndarray, kind: str) -> np.ndarray:
    return dequantize(quantize_k(values.astype(np.float32), kind), GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", K_QUANTS)
def test_errors_of_normal_weights(kind):
    values = np.random.default_rng(0).normal(size=(64, 1024)) * np.geomspace(1e-3, 10, 64)[:, None]
    error = (decoded(values, kind) - values) / values.std(axis=1, keepdims=True)
    assert np.sqrt(np.mean(np.square(error))) < ERRORS[kind] and np.abs(error).max() < 12 * ERRORS[kind]


@pytest.mark.parametrize("kind", K_QUANTS)
def test_weights_of_such_a_file_are_kept(kind):
    stored = random_blocks(kind, 8, 512)
    values = dequantize(stored, GGMLQuantizationType[kind])
    assert np.sqrt(np.mean(np.square(decoded(values, kind) - values))) < 0.015 * values.std()


@pytest.mark.parametrize("kind", K_QUANTS)
def test_weights_without_spread(kind):
    rng = np.random.default_rng(0)
    zero, one, tiny = np.zeros(256), np.full(256, -0.7), rng.normal(size=256) * 1e-20
    sparse, positive = np.where(np.arange(256) == 100, 3.0, 0), 5 + rng.random(256)
    values = np.stack([zero, one, tiny, sparse, positive])
    result = decoded(values, kind)
    assert (result[0] == 0).all() and np.abs(result[2]).max() < 1e-6
    np.testing.assert_allclose(result[[1, 3, 4]], values[[1, 3, 4]], rtol=0.05, atol=0)
