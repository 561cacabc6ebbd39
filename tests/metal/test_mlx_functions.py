"""MLX's own kernels, from the sources in its wheel, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mlxlm.backend.mlx import mx
from tests.metal.harness.mlx_functions import FOLDER, ROOT, run

pytestmark = [
    pytest.mark.usefixtures("needs_harness"),
    pytest.mark.skipif(
        not mx.__version__.startswith("0.32.") or not (ROOT / FOLDER).exists(),
        reason="needs the headers of the kernels of MLX 0.32",
    ),
]
REDUCTION = ["defines.h", "utils.h", "atomic.h", "reduction/ops.h"]
QUANTIZED = ["utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"]


def normal(*shape, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed))


def test_row_reduction():
    x = normal(36, 203)
    outputs, launch = run(
        [*REDUCTION, "reduction/reduce_row.h"],
        "row_reduce_simple",
        {"in": x, "reduction_size": 203, "out_size": 36},
        {"out": ((36,), mx.float32)},
        grid=(32, 9, 1),
        threadgroup=(32, 1, 1),
        template={"T": mx.float32, "U": mx.float32, "Op": "Max<float>"},
    )
    assert_allclose(outputs["out"], np.array(x).max(1))
    assert launch.unique_read == 36 * 203 * 4


def test_quantized_matrix_product():
    M, N, K = 33, 40, 96
    x, (w, scales, biases) = normal(M, K), mx.quantize(normal(N, K, seed=1), 32, 4)
    batch = {f"{name}_{what}": [0] for name in "xw" for what in ("shape", "strides")} | {
        "s_strides": [0],
        "b_strides": [0],
    }
    outputs, _ = run(
        QUANTIZED,
        "affine_qmm_t",
        {"w": w, "scales": scales, "biases": biases, "x": x, "K": K, "N": N, "M": M}
        | {"x_batch_ndims": 0, "w_batch_ndims": 0}
        | batch,
        {"y": ((M, N), mx.float32)},
        grid=(32 * 2, 2 * 2, 2),
        threadgroup=(32, 2, 2),
        template={"T": mx.float32, "group_size": 32, "bits": 4, "aligned_N": False, "batched": False},
    )
    expected = np.array(x) @ np.array(mx.dequantize(w, scales, biases, 32, 4)).T
    assert_allclose(outputs["y"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    """Function constants, a struct, and parameters that a function constant leaves out."""
    L, D = 37, 64
    q, k, v = normal(1, 2, L, D), normal(1, 1, L, D, seed=1), normal(1, 1, L, D, seed=2)
    strides = [[2 * L * D, L * D, D], [L * D, L * D, D], [L * D, L * D, D], [2 * L * D, L * D, D]]
    sizes = np.array([1, 2, D, L, L, 2, np.float32(0.125).view(np.int32), 2, 2, 1, 1, L - 32, L - 32, 0], np.int32)
    params = np.concatenate([sizes.view(np.int64), np.ravel(strides)])
    outputs, _ = run(
        ["utils.h", "steel/attn/kernels/steel_attention.h"],
        "attention",
        {"Q": q, "K": k, "V": v, "params": mx.array(params)},
        {"O": ((1, 2, L, D), mx.float32)},
        grid=(32 * 2, 4 * 2, 1),
        threadgroup=(32, 4, 1),
        template={"T": mx.float32, "BQ": 32, "BK": 32, "BD": D, "BV": D, "WM": 4, "WN": 1},
        constants={"do_causal": causal},
    )
    expected = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=0.125, mask="causal" if causal else None, stream=mx.cpu
    )
    assert_allclose(outputs["O"], expected, rtol=1e-4, atol=1e-5)
