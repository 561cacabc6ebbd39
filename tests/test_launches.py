"""The counter of launches, against MLX's sources (0.32.2), named beside each number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from tests.launches import count_launches, recording, strides

VOCAB = 128_256


def evaluated(*shape, dtype=mx.float32):
    x = mx.zeros(shape, dtype)
    mx.eval(x)
    return x


LOGITS, MATRIX, CUBE = evaluated(1, VOCAB), evaluated(8, 6), evaluated(2, 3, 4)
GRAPHS = {
    # metal/sort.cpp: 63 blocks of 2,048; a sort of the blocks, 6 rounds of 2 kernels, a copy
    "argsort": (lambda: mx.argsort(LOGITS, axis=-1), {"ArgSort": 14}),
    "a partition is a sort": (lambda: mx.argpartition(LOGITS, 40, axis=-1), {"ArgPartition": 14}),
    "sort of one block": (lambda: mx.sort(evaluated(1, 2048), axis=-1), {"Sort": 1}),
    "sort of two blocks": (lambda: mx.sort(evaluated(1, 2049), axis=-1), {"Sort": 4}),
    # metal/primitives.cpp: ArgReduce::eval_gpu dispatches once for any size
    "argmax": (lambda: mx.argmax(LOGITS, axis=-1), {"ArgReduce": 1}),
    # metal/reduce.cpp: row_reduce_general_dispatch; all_reduce_dispatch has a second pass above 4,096 elements
    "maximum of a row": (lambda: LOGITS.max(axis=-1), {"Max": 1}),
    "maximum of all": (lambda: LOGITS.max(), {"Max": 2}),
    "maximum of few": (lambda: evaluated(4096).max(), {"Max": 1}),
    "sum of columns": (lambda: evaluated(31, 64).sum(axis=0), {"Sum": 1}),
    "sum of long columns": (lambda: evaluated(257, 64).sum(axis=0), {"Sum": 2}),
    "sum of rows of a transpose": (lambda: MATRIX.T.sum(axis=0), {"Sum": 1}),
    # metal/softmax.cpp, logsumexp.cpp: a loop, no second kernel; rows must be contiguous
    "softmax": (lambda: mx.softmax(LOGITS, axis=-1), {"Softmax": 1}),
    "softmax of a transpose": (lambda: mx.softmax(MATRIX.T, axis=-1), {"Softmax": 1, "copy": 1}),
    "logsumexp": (lambda: mx.logsumexp(LOGITS, axis=-1), {"LogSumExp": 1}),
    "cumsum": (lambda: mx.cumsum(LOGITS, axis=-1), {"CumSum": 1}),
    # common/compiled.cpp, metal/compiled.cpp: one kernel for a chain, apart from reductions
    "chain": (lambda: mx.exp(LOGITS * 2 + 1), {"Multiply": 1, "Add": 1, "Exp": 1}),
    "compiled chain": (lambda: mx.compile(lambda x: mx.exp(x * 2 + 1))(LOGITS), {"Compiled": 1}),
    "compiled softmax": (
        lambda: mx.compile(lambda x: mx.exp(x * 2 - x.max(axis=-1, keepdims=True)))(LOGITS),
        {"Max": 1, "Compiled": 1},
    ),
    # gpu/primitives.cpp: views share the buffer; metal/copy.cpp: reshape_gpu copies what isn't one
    "views": (lambda: CUBE.transpose(2, 0, 1)[:, None, ::2].swapaxes(0, 1).view(mx.int32), {}),
    "reshape": (lambda: CUBE.reshape(6, 4), {}),
    "reshape of a transpose": (lambda: MATRIX.T.reshape(6, 2, 4), {}),
    "flattened transpose": (lambda: CUBE.swapaxes(0, 2).flatten(), {"copy": 1}),
    "a transpose of one position": (lambda: evaluated(1, 4, 1, 8).swapaxes(1, 2).reshape(1, 1, 32), {}),
    "contiguous": (lambda: mx.contiguous(MATRIX), {}),
    "contiguous transpose": (lambda: mx.contiguous(MATRIX.T), {"copy": 1}),
    # metal/slicing.cpp: concatenate_gpu copies each input
    "concatenate": (lambda: mx.concatenate([MATRIX, MATRIX, MATRIX[:0]]), {"Concatenate": 2}),
    "pad": (lambda: mx.pad(MATRIX, 1), {"Pad": 2}),
    # metal/indexing.cpp: the input is copied unless nothing else holds it
    "put along an axis": (
        lambda: mx.put_along_axis(MATRIX, mx.array([[1]]), mx.array(2.0), axis=-1),
        {"ScatterAxis": 1, "copy": 1},
    ),
    "put into a result": (
        lambda: mx.put_along_axis(MATRIX + 1, mx.array([[1]]), mx.array(2.0), axis=-1),
        {"Add": 1, "ScatterAxis": 1},
    ),
    "slice update": (
        lambda: mx.slice_update(MATRIX, MATRIX[:1], mx.array([2]), (0,)),
        {"DynamicSliceUpdate": 2, "copy": 1},
    ),
    "gather": (lambda: MATRIX[mx.array([1, 2])], {"Gather": 1}),
    # metal/primitives.cpp: one kernel for all keys
    "keys": (lambda: mx.random.split(mx.array([1, 2], mx.uint32), 5), {"RandomBits": 1}),
    # metal/matmul.cpp: gemv
    "matrix times vector": (lambda: evaluated(1, 64) @ evaluated(64, 32), {"Matmul": 1}),
    "dot product": (lambda: evaluated(1, 64) @ evaluated(64, 1), {"Matmul": 3}),
    # common/compiled.cpp: a half of a row keeps the row's stride; metal/matmul.cpp: check_transpose
    "product of a half row": (
        lambda: (evaluated(1, 64)[:, :32] * 2) @ evaluated(32, 8),
        {"Multiply": 1, "Matmul": 1, "copy": 1},
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_with_known_launches(name):
    build, expected = GRAPHS[name]
    assert count_launches(build()) == expected


def heads(H, S, D=64):
    return evaluated(1, H, S, D, dtype=mx.bfloat16)


def attention(S, D=64):
    return mx.fast.scaled_dot_product_attention(heads(8, 1, D), heads(2, S, D), heads(2, S, D), scale=1.0)


def rope(x, dims):
    return mx.fast.rope(x, dims, traditional=False, base=1e4, scale=1.0, offset=3)


def quantized(M, N=2048, K=2048, bits=4):
    w, scales = evaluated(N, K * bits // 32, dtype=mx.uint32), evaluated(N, K // 64, dtype=mx.bfloat16)
    return mx.quantized_matmul(evaluated(M, K, dtype=mx.bfloat16), w, scales, scales, bits=bits)


ON_METAL = {
    # metal/normalization.cpp: looped above 4,096, in one kernel
    "RMSNorm": (lambda: mx.fast.rms_norm(evaluated(1, 8192), evaluated(8192), 1e-5), {"RMSNorm": 1}),
    "RMSNorm of a transpose": (
        lambda: mx.fast.rms_norm(MATRIX.T, evaluated(8), 1e-5),
        {"RMSNorm": 1, "copy": 1},
    ),
    "compiled RMSNorm": (
        lambda: mx.compile(lambda x, w: 2 * mx.fast.rms_norm(x + 1, w, 1e-5) + 1)(MATRIX, evaluated(6)),
        {"Compiled": 2, "RMSNorm": 1},
    ),
    # metal/rope.cpp: a part of the dimensions is rotated in a copy
    "RoPE": (lambda: rope(CUBE, 4), {"RoPE": 1}),
    "RoPE of some dimensions": (lambda: rope(CUBE, 2), {"RoPE": 1, "copy": 1}),
    "RoPE of some dimensions of a result": (lambda: rope(CUBE * 2, 2), {"RoPE": 1, "Multiply": 1}),
    "RoPE of transposed heads": (lambda: rope(evaluated(2, 5, 4, 64).swapaxes(1, 2), 64), {"RoPE": 1}),
    # metal/scaled_dot_product_attention.cpp
    "attention": (lambda: attention(1023), {"ScaledDotProductAttention": 1}),
    "attention, long": (lambda: attention(4096), {"ScaledDotProductAttention": 2}),
    # metal/quantized.cpp: dispatch_qmv; qmm_splitk has a sum
    "quantized product": (lambda: quantized(1), {"QuantizedMatmul": 1}),
    "quantized product of many rows": (lambda: quantized(64), {"QuantizedMatmul": 2}),
    "quantize": (lambda: mx.quantize(evaluated(4, 64)), {"Quantize": 1}),
    "dequantize": (
        lambda: mx.dequantize(evaluated(4, 8, dtype=mx.uint32), evaluated(4, 1), evaluated(4, 1)),
        {"Quantize": 1},
    ),
}


@pytest.mark.parametrize("name", ON_METAL)
def test_functions_that_have_a_kernel_on_a_gpu(simulated_gpu, name):
    if simulated_gpu.device.backend != "metal":
        pytest.skip("Metal's launches")
    build, expected = ON_METAL[name]
    with recording():
        assert count_launches(build()) == expected


def test_attention_in_two_passes_begins_earlier_on_large_gpus(simulated_gpu):
    with recording():
        passes = count_launches(attention(1024))
    assert passes.total() == (2 if simulated_gpu.device.name == "Apple M2 Max" else 1)


def test_functions_compute_when_nothing_is_recorded(simulated_gpu):
    with recording():
        zeros = mx.fast.rms_norm(mx.ones((1, 4)), mx.ones(4), 1e-5)
    ones = mx.fast.rms_norm(mx.ones((1, 4)), mx.ones(4), 1e-5)
    assert not zeros.any() and mx.allclose(ones, mx.ones((1, 4)), atol=1e-4)


VIEWS = st.lists(
    st.sampled_from(
        [
            lambda x: x.swapaxes(0, -1),
            lambda x: x.transpose(*range(1, x.ndim), 0),
            lambda x: x[:1],
            lambda x: x[..., 1:],
            lambda x: x[..., ::2],
            lambda x: x[None],
            lambda x: x[:, None],
            lambda x: x.squeeze() if x.ndim > 2 and x.size > 1 else x,
            lambda x: x.reshape(-1, x.shape[-1]),
            lambda x: x.reshape(x.shape[0], -1),
            lambda x: x.flatten(0, 1),
            lambda x: mx.broadcast_to(x, (2, *x.shape)),
            lambda x: mx.split(x, [1], axis=0)[0],
            lambda x: mx.exp(x),
            lambda x: x + 1.0,
            lambda x: x * x,
        ]
    ),
    max_size=6,
)


@given(VIEWS)
def test_layouts_are_those_that_mlx_gives(operations):
    """The CPU shares the code of views, and that which gives results of element-wise operations their layout."""
    x = evaluated(2, 3, 4, 5)
    for operation in operations:
        if x.ndim < 2 or x.shape[-1] < 2 or x.ndim > 6:
            break
        x = operation(x)
    expected = strides(x)
    mx.eval(x)
    assert strides(x) == expected
