"""Tensor types against the gguf package, and values that a type cannot hold."""

from __future__ import annotations

import gguf as gguf_package
import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.header import ggml_types, read_header
from mlxlm.checkpoint.gguf.tensors import _CHUNK, encode_tensor, read_tensor
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.raw_files import finish


@pytest.mark.parametrize("number", ggml_types(), ids=lambda number: ggml_types()[number].name)
def test_every_type_reads_like_the_gguf_package(number, tmp_path):
    kind, rng = ggml_types()[number], np.random.default_rng(number)
    rows = 3 if number % 2 else _CHUNK // 512 + 3  # some in more than one part
    if kind.block_size == 1:
        values = rng.normal(size=(rows, 512)).astype(np.float32)
        stored = gguf_package.quants.quantize(values, gguf_package.GGMLQuantizationType(number))
    else:
        stored = rng.integers(0, 256, (rows, 512 // kind.block_size * kind.type_size), dtype=np.uint8)
    writer = gguf_package.GGUFWriter(tmp_path / "m.gguf", "test")
    writer.add_tensor("x", stored, raw_dtype=gguf_package.GGMLQuantizationType(number))
    finish(writer)
    tensor = read_tensor(read_header(tmp_path / "m.gguf").tensors["x"])
    value = tensor.read()
    assert (tensor.shape, tensor.stored_dtype, tensor.nbytes) == ((rows, 512), kind.name, stored.nbytes)
    assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype)
    with np.errstate(all="ignore"):
        expected = gguf_package.quants.dequantize(stored, gguf_package.GGMLQuantizationType(number))
    np.testing.assert_array_equal(np.array(value.astype(mx.float32)), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_errors(kind, dtype, bad):
    values = mx.ones((40, 256), dtype)
    values[5, 7] = bad
    with pytest.raises(CheckpointError, match="tensor x has values that are NaN"):
        list(encode_tensor("x", lazy_tensor(values), kind))


def test_values_too_large_for_float16_are_errors():
    with pytest.raises(CheckpointError, match="tensor x has values that are too large for F16"):
        list(encode_tensor("x", lazy_tensor(mx.full((4, 32), -1e5)), "F16"))
