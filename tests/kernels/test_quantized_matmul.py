"""Products with quantized matrices on a CPU, without dequantizing them: quantized_matmul.cpp beside MLX."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.backend import cpu_extension
from mlxlm.backend.cpu_extension import Extension, load_extension
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels import quantized_matmul as module
from mlxlm.kernels.quantized_matmul import multiplies_on_cpu, quantized_matmul
from mlxlm.utils.errors import PlatformError

pytestmark = pytest.mark.skipif(not ON_CPU or load_extension().module is None, reason="for a CPU with g++")

BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)


def quantized(shape, group_size, bits, dtype):
    """A random matrix: its parts, and the dequantized one."""
    packed, *scales = mx.quantize(mx.random.normal(shape), group_size, bits)
    scales = [scale.astype(dtype) for scale in scales]
    return (packed, *scales), mx.dequantize(packed, *(scale.astype(mx.float32) for scale in scales), group_size, bits)


def assert_near(result, expected):
    scale = max(1.0, float(mx.abs(expected).max()) if expected.size else 1.0)
    np.testing.assert_allclose(np.array(result) / scale, np.array(expected) / scale, atol=3e-6)


@given(
    st.sampled_from(BITS), st.sampled_from(GROUP_SIZES), st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    st.integers(0, 40), st.integers(1, 90), st.integers(1, 5), st.integers(0, 2**31),
)  # fmt: skip
def test_any_shape_equals_the_dequantized_product(bits, group_size, dtype, rows, outputs, groups, seed):
    mx.random.seed(seed)
    inputs = 128 * groups
    parts, matrix = quantized((outputs, inputs), group_size, bits, dtype)
    x = mx.random.normal((rows, inputs))
    assert_near(quantized_matmul(x, *parts, group_size=group_size, bits=bits, mode="affine"), x @ matrix.T)


@given(st.sampled_from(BITS), st.integers(1, 30), st.integers(0, 9), st.integers(0, 2**31))
def test_a_matrix_for_each_block(bits, rows, blocks, seed):
    mx.random.seed(seed)
    parts, matrices = quantized((4, 50, 64), 32, bits, mx.float16)
    x, chosen = mx.random.normal((blocks, rows, 64)), mx.random.randint(0, 4, (blocks,)).astype(mx.uint32)
    result = quantized_matmul(x, *parts, chosen, group_size=32, bits=bits, mode="affine")
    assert_near(result, x @ matrices[chosen].swapaxes(1, 2))


def test_views_and_compiled_graphs():
    parts, matrix = quantized((96, 128), 64, 4, mx.float32)
    views = [part[::2] for part in parts]
    x = mx.random.normal((128, 3)).T

    def step(x):
        return mx.tanh(quantized_matmul(x * 2, *views, group_size=64, bits=4, mode="affine")) + 1

    for function in (step, mx.compile(step)):
        assert_near(function(x), mx.tanh(2 * x @ matrix[::2].T) + 1)


def test_nan_and_infinity_reach_their_rows_only():
    parts, _ = quantized((40, 64), 64, 4, mx.float32)
    for rows in (2, 40):
        x = mx.ones((rows, 64))
        x[1, 3] = float("nan")
        result = np.array(quantized_matmul(x, *parts, group_size=64, bits=4, mode="affine"))
        assert np.isnan(result[1]).all() and np.isfinite(np.delete(result, 1, axis=0)).all()


def test_several_threads_at_once():
    parts, matrix = quantized((512, 1024), 64, 4, mx.float32)
    x = mx.random.normal((1, 1024))
    expected, streams = x @ matrix.T, [mx.new_stream(mx.cpu) for _ in range(3)]
    results = []
    for i in range(30):
        with mx.stream(streams[i % 3]):
            results.append(quantized_matmul(x, *parts, group_size=64, bits=4, mode="affine"))
    mx.eval(results)
    for result in results:
        assert_near(result, expected)


def test_formats():
    assert multiplies_on_cpu(64, "affine") and multiplies_on_cpu(None, "affine")
    assert not multiplies_on_cpu(32, "mxfp4") and not multiplies_on_cpu(16, "affine")


def test_without_the_extension_products_are_those_of_mlx(monkeypatch):
    monkeypatch.setattr(module, "load_extension", lambda: Extension(None, "no compiler"))
    parts, matrix = quantized((40, 64), 64, 4, mx.float32)
    x = mx.random.normal((2, 64))
    assert not multiplies_on_cpu(64, "affine")
    assert_near(quantized_matmul(x, *parts, group_size=64, bits=4, mode="affine"), x @ matrix.T)


def test_the_check_finds_wrong_products(monkeypatch):
    class Wrong:
        def quantized_matmul(self, *arguments):
            return load_extension().module.quantized_matmul(*arguments) * 1.0001

    monkeypatch.setattr(cpu_extension, "_load", lambda path: Wrong())
    with pytest.raises(PlatformError, match="a product of 1 rows with 2 bits has an error of"):
        cpu_extension.check("module.so")


@pytest.mark.parametrize(
    ("compiler", "reason", "kept"),
    [
        ("echo 'x.cpp:1: error: no' >&2; exit 1", "g++ ended with status 1: x.cpp:1: error: no", True),
        ("exit 0", "python", True),  # nothing to check
        (None, "there is no C++ compiler, g++", False),
    ],
)
def test_a_compiler_that_fails(monkeypatch, tmp_path, compiler, reason, kept):
    """The failure is kept, so that not every start tries again, unless a compiler may be installed later."""
    (tmp_path / "bin").mkdir()
    if compiler:
        (tmp_path / "bin/g++").write_text(f"#!/bin/sh\n{compiler}\n")
        (tmp_path / "bin/g++").chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = load_extension.__wrapped__()
    assert found.module is None and reason in found.unavailable_reason
    assert len(list(tmp_path.glob("mlxlm/*.txt"))) == kept and not list(tmp_path.glob("mlxlm/*.so"))
    if kept:
        assert "to try again" in load_extension.__wrapped__().unavailable_reason
