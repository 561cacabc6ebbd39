"""The buffers of a cache."""

import pytest

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache.kv_buffer import KVBuffer
from tests.graphs import operations

CASES = pytest.mark.parametrize("quantization", [None, (8, 64), (4, 32)])
DIMS = pytest.mark.parametrize("D", [64, 128])


def buffer_and_token(D, quantization):
    keys = mx.random.normal((2, 3, 9, D), key=mx.random.key(0)).astype(mx.bfloat16)
    buffer = KVBuffer.like(keys, quantization)
    buffer = KVBuffer([mx.array(part) for part in buffer.quantize(keys)], quantization)
    mx.eval(buffer.arrays)
    return buffer, keys[:, :, :1] + 1


@DIMS
@CASES
def test_a_position_given_as_an_array(D, quantization):
    buffer, token = buffer_and_token(D, quantization)
    write = mx.compile(lambda index, token, *arrays: KVBuffer(arrays, quantization).with_position(index, token).arrays)
    written = write(mx.array([4], mx.int32), token, *buffer.arrays)
    buffer.write(4, 5, token)
    assert all(mx.array_equal(x, y).item() for x, y in zip(written, buffer.arrays, strict=True))


@pytest.mark.skipif(ON_CPU, reason="a CPU writes faster with slice_update")
@CASES
def test_writing_a_position_takes_one_kernel_per_array(quantization):
    buffer, token = buffer_and_token(128, quantization)
    mx.eval(token)
    written = buffer.with_position(mx.array([4], mx.int32), token).arrays
    names = operations(written)
    assert names.count("ScatterAxis") == len(buffer.arrays) and "DynamicSliceUpdate" not in names


@pytest.mark.skipif(ON_CPU, reason="a CPU writes faster with slice_update")
def test_rows_that_begin_with_half_a_pair_are_not_scattered():
    """With head dim 64 in groups of 64, a row of scales has one element of 16 bits; ScatterAxis stores pairs."""
    buffer, token = buffer_and_token(64, (8, 64))
    packed, scales, biases = buffer.with_position(mx.array([4], mx.int32), token).arrays
    assert "ScatterAxis" in operations([packed])
    for part in (scales, biases):
        assert "DynamicSliceUpdate" in operations([part]) and "ScatterAxis" not in operations([part])
