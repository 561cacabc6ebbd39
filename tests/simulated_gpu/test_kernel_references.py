"""The MLX operations that take the place of the kernels compute what the kernels compute, in the harness."""

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.kernels import dispatch
from mlxlm.kernels.decode_attention import decode_attention
from mlxlm.kernels.flash_attention import attention_with_lse
from mlxlm.kernels.qk_norm_rope import QK_NORM_ROPE
from mlxlm.kernels.quantile import kth_smallest, weighted_quantile
from mlxlm.kernels.rms_norm import add_rms_norm_metal, rms_norm_metal
from tests.oracle import as64
from tests.simulated_gpu.kernel_references import REFERENCES

pytestmark = pytest.mark.usefixtures("needs_harness")


def normal(*shape, seed=0, dtype=mx.bfloat16):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def norms(N, rows):
    x, residual, dy = (normal(rows, N, seed=seed) for seed in range(3))
    weight = normal(N, seed=3, dtype=mx.float32)
    outputs, gradients = mx.vjp(lambda x, w: [rms_norm_metal(x, w, 1e-5)], [x, weight], [dy.astype(mx.float32)])
    cotangents = [dy, dy.astype(mx.float32)]
    more = mx.vjp(lambda *a: list(add_rms_norm_metal(*a, 1e-5)), [x, residual, weight], cotangents)
    return [*outputs, *gradients, *more[0], *more[1]]


def heads(dims, *features):
    sizes = 64, dims, 4, 2, 3
    arguments, _ = QK_NORM_ROPE.sample_inputs(
        dispatch.Case("qk_norm_rope", "bfloat16", ("D", "dims", "H", "K", "rows"), sizes, features)
    )
    return QK_NORM_ROPE.paths["metal"](*arguments)


def decode(S, D=64, **options):
    queries, keys, values = normal(2, 4, 2, D), normal(2, 2, S, D, seed=1), normal(2, 2, S, D, seed=2)
    return [decode_attention(queries, keys, values, D**-0.5, **options)]


def quantized(S, bits):
    queries, form = normal(2, 4, 1, 64), {"group_size": 32, "key_bits": bits, "value_bits": bits}
    keys, values = (mx.quantize(normal(2, 2, S, 64, seed=seed), group_size=32, bits=bits) for seed in (1, 2))
    return [decode_attention(queries, keys, values, 0.125, **form)]


def train(window, *segments):
    shapes = ((2, 4, 45, 32), (2, 2, 45, 32), (2, 2, 45, 32))
    arrays = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    cotangents = [normal(2, 4, 45, 32, seed=3), normal(2, 4, 45, seed=4, dtype=mx.float32)]
    outputs, gradients = mx.vjp(lambda *a: list(attention_with_lse(0.2, window)(*a, *segments)), arrays, cotangents)
    return [*outputs, *gradients]


def quantiles(N):
    values = mx.abs(normal(3, N, dtype=mx.float32))
    return [weighted_quantile(values, (mx.softmax(-values, axis=-1) * 2.0**31).astype(mx.uint32), 0.8),
            kth_smallest(values, 5)]  # fmt: skip


CASES = {
    "short rows": (lambda: norms(96, 70), {"rms_norm", "add_rms_norm", "rms_norm_grad"}),
    "long rows": (lambda: norms(1100, 3), {"rms_norm", "add_rms_norm", "rms_norm_grad"}),
    "longest rows": (lambda: norms(8200, 2), {"rms_norm", "add_rms_norm", "rms_norm_grad"}),
    "rotated heads": (lambda: heads(64), {"qk_norm_rope"}),
    "normalized heads": (lambda: heads(0, "norm"), {"qk_norm_rope"}),
    "partly rotated heads": (lambda: heads(24, "norm", "wavelengths"), {"qk_norm_rope"}),
    "few keys": (lambda: decode(50), {"attention_decode"}),
    "many keys": (lambda: decode(3000, window=2500), {"attention_decode", "attention_decode_combine"}),
    "soft cap, ALiBi": (lambda: decode(90, softcap=5.0, slopes=mx.array([-0.5, -0.2, 0, -1])), {"attention_decode"}),
    "sinks": (lambda: decode(3000, sinks=mx.array([2.0, -3, 0, 9])), {"attention_decode", "attention_decode_combine"}),
    "ranges": (lambda: decode(80, window=30, ranges=mx.array([[3, 60], [40, 80]])), {"attention_decode"}),
    "8 bits": (lambda: quantized(100, 8), {"attention_decode_quantized"}),
    "4 bits": (lambda: quantized(4000, 4), {"attention_decode_quantized", "attention_decode_combine"}),
    "training": (lambda: train(None), {"attention_forward", "attention_grad_query", "attention_grad_key_value"}),
    "documents": (
        lambda: train(None, mx.arange(90).reshape(2, 45) // 20),
        {"attention_forward", "attention_grad_query", "attention_grad_key_value"},
    ),
    "quantiles": (lambda: quantiles(3000), {"weighted_quantile"}),
    "window": (lambda: train(7), {"attention_forward", "attention_grad_query", "attention_grad_key_value"}),
}


@pytest.mark.parametrize("name", CASES)
def test_references_equal_the_kernels(metal, monkeypatch, name):
    compute, kernels = CASES[name]
    results = []
    for way in ("mlx", "harness"):
        monkeypatch.setattr(metal, "kernels", way)
        metal.launches.clear()
        results.append(compute())
        assert set(metal.launches) == kernels
    for by_reference, by_kernel in zip(*results, strict=True):
        assert (by_reference.shape, by_reference.dtype) == (by_kernel.shape, by_kernel.dtype)
        tolerance = (1e-4 if by_kernel.dtype == mx.float32 else 0.01) * abs(as64(by_kernel)).max()
        assert abs(as64(by_reference) - as64(by_kernel)).max() <= tolerance


def test_every_kernel_has_a_reference_and_a_case():
    from mlxlm.utils.resources import resource

    kernels = {file.name.removesuffix(".metal") for file in resource("metal_kernels").glob("*.metal")}
    assert kernels == set(REFERENCES) == set.union(*(names for _, names in CASES.values()))
