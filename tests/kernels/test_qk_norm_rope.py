"""Norms of queries and keys with RoPE: MLX's operations against float64 numpy, and when the kernel is used."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.config import ModelConfig
from mlxlm.kernels import qk_norm_rope, use_kernels
from mlxlm.kernels.dispatch import Case
from mlxlm.kernels.qk_norm_rope import QK_NORM_ROPE, mlx_launches
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
        queries, keys, values = qk_norm_rope(x, 4, tuple(weights) if norm else None, 1e-6, embedding.fixed, angles)
    assert mx.array_equal(values, x[:, 6:])
    for found, part, weight in zip((queries, keys), (x[:, :4], x[:, 4:6]), weights, strict=True):
        wanted = oracle.as64(part)
        wanted = oracle.rms_norm(wanted, oracle.as64(weight), 1e-6) if norm else wanted
        np.testing.assert_allclose(np.array(found), oracle.rope(wanted, theta), atol=2e-4)


def test_without_norms_and_rotation_it_only_splits():
    x = mx.random.normal((2, 8, 1, 16))
    with use_kernels("metal"):  # which would fail on a CPU
        queries, keys, values = qk_norm_rope(x, 4, None, 0.0, None, None)
    assert all(map(mx.array_equal, (queries, keys, values), (x[:, :4], x[:, 4:6], x[:, 6:])))


@pytest.mark.parametrize("dtypes", [(mx.int32, mx.float32), (mx.float32, mx.int32)])
def test_other_dtypes_are_refused(dtypes):
    x, weight = mx.zeros((1, 8, 1, 16), dtypes[0]), mx.ones(16, dtypes[1])
    with pytest.raises(ValueError, match="not mlx.core.int32"):
        qk_norm_rope(x, 4, (weight, weight), 1e-6, None, None)


def test_fewer_launches_decide():
    """Of MLX's operations, only the rotation of all dimensions of one row is a single launch."""
    order, _ = QK_NORM_ROPE.preferred_paths(case())
    assert order == ("mlx", "metal")
    for other in (case(rows=8), case(dims=32), case(features=("norm",)), case(dims=0, features=("norm",))):
        order, why = QK_NORM_ROPE.preferred_paths(other)
        assert order == ("metal", "mlx") and f"{mlx_launches(other)} launches" in why


@pytest.mark.skipif(not install.current, reason="launches are counted on a simulated GPU")
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("dims", [0, 32, 64])
@pytest.mark.parametrize("features", [(), ("norm",), ("norm", "wavelengths")])
def test_launches_of_mlx(simulated_gpu, rows, dims, features):
    """From the projection to attention, which may copy the queries."""
    from tests.launches import count_launches, recording

    if simulated_gpu.device.backend != "metal" or (not dims and features[1:]):
        pytest.skip("counts are those of Metal")
    one = case(dims=dims, rows=rows, features=features)
    arguments, _ = QK_NORM_ROPE.sample_inputs(one)
    others = [mx.zeros((rows, 2, 8, 64), mx.bfloat16), mx.zeros((rows, 4, 1, 64), mx.bfloat16)]
    mx.eval(arguments, others)

    def attend(path):
        with recording():
            queries, keys, _ = QK_NORM_ROPE.paths[path](*arguments)
            out = mx.fast.scaled_dot_product_attention(queries, others[0], others[0], scale=1.0)
            return count_launches(out, keys).total() - 1

    assert attend("mlx") == mlx_launches(one)
    assert attend("metal") == 1
