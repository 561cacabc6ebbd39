"""Norms of queries and keys with RoPE: MLX's operations against float64 numpy, and when the kernel is used."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.config import ModelConfig
from mlxlm.kernels import qk_norm_rope, use_kernels
from mlxlm.kernels.dispatch import Case
from mlxlm.kernels.qk_norm_rope import QK_NORM_ROPE
from mlxlm.model.positions import RotaryEmbedding
from tests import oracle
from tests.simulated_gpu import install

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 9}
NAMES = ("D", "dims", "H", "K", "rows")


def case(D=64, dims=64, rows=1, features=()):
    return Case("qk_norm_rope", "bfloat16", NAMES, (D, dims, 4, 2, rows), features)


@pytest.mark.parametrize("given", ["positions", "cosines and sines"])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("norm", [False, True])
def test_equals_float64(given, partial, norm):
    embedding = RotaryEmbedding(ModelConfig(**SIZES, head_dim=32, partial_rotary_factor=partial))
    rng = np.random.default_rng(0)
    x = mx.array(rng.normal(0, 1, (3, 8, 1, 32)).astype(np.float32))
    weights = [mx.array(rng.normal(1, 0.3, 32).astype(np.float32)) for _ in range(2)]
    positions = mx.array([0, 7, 301], mx.int32)
    theta = np.array(positions)[:, None] * 10_000.0 ** (-np.arange(0, embedding.dims, 2) / embedding.dims)
    theta = theta[:, None, None]
    angles = positions
    if given != "positions":
        angles = tuple(
            mx.array(np.stack(pair, axis=-2).reshape(3, 1, 2, -1).astype(np.float32))
            for pair in ((np.cos(theta), np.cos(theta)), (-np.sin(theta), np.sin(theta)))
        )
    with use_kernels("mlx"):
        queries, keys = qk_norm_rope(x, 4, 2, tuple(weights) if norm else None, 1e-6, embedding.fixed, angles)
    for found, part, weight in zip((queries, keys), (x[:, :4], x[:, 4:6]), weights, strict=True):
        wanted = oracle.as64(part)
        wanted = oracle.rms_norm(wanted, oracle.as64(weight), 1e-6) if norm else wanted
        np.testing.assert_allclose(np.array(found), oracle.rope(wanted, theta), atol=2e-4)


def test_without_norms_and_rotation_it_only_splits():
    x = mx.random.normal((2, 8, 1, 16))
    with use_kernels("metal"):  # which would fail on a CPU
        queries, keys = qk_norm_rope(x, 4, 2, None, 0.0, None, None)
    assert all(map(mx.array_equal, (queries, keys), (x[:, :4], x[:, 4:6])))


# By rows, rotated dimensions of 64, and whether there are norms: see metal_kernels/README.md.
MLX_LAUNCHES = {
    (1, 64, False): 1, (1, 32, False): 2, (1, 64, True): 5, (1, 32, True): 5, (1, 0, True): 4,
    (8, 64, False): 3, (8, 32, False): 3, (8, 64, True): 8, (8, 32, True): 8, (8, 0, True): 7,
}  # fmt: skip


@pytest.mark.parametrize("rows, dims, norm", MLX_LAUNCHES)
def test_fewer_launches_decide(rows, dims, norm):
    order, _ = QK_NORM_ROPE.preferred_paths(case(dims=dims, rows=rows, features=("norm",) * norm))
    assert order == (("mlx", "metal") if MLX_LAUNCHES[rows, dims, norm] == 1 else ("metal", "mlx"))


@pytest.mark.skipif(not install.current, reason="launches are counted on a simulated GPU")
@pytest.mark.parametrize("rows, dims, norm", MLX_LAUNCHES)
def test_launches(simulated_gpu, rows, dims, norm):
    """From the projection to attention, which may copy the queries."""
    from tests.launches import count_launches, recording

    if simulated_gpu.device.backend != "metal":
        pytest.skip("counts are those of Metal")
    arguments, _ = QK_NORM_ROPE.sample_inputs(case(dims=dims, rows=rows, features=("norm",) * norm))
    cached = mx.zeros((rows, 2, 8, 64), mx.bfloat16)
    mx.eval(arguments, cached)

    def count(path):
        with recording():
            queries, keys = QK_NORM_ROPE.paths[path](*arguments)
            out = mx.fast.scaled_dot_product_attention(queries, cached, cached, scale=1.0)
            return count_launches(out, keys).total() - 1

    assert count("mlx") == MLX_LAUNCHES[rows, dims, norm]
    assert count("metal") == 1
