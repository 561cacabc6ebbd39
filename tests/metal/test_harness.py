"""The harness computes what a GPU computes, and counts the bytes that are read and written."""

from __future__ import annotations

from functools import partial
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from mlxlm.backend.mlx import mx
from mlxlm.kernels.rms_norm import rms_norm_metal
from tests.metal import harness
from tests.metal.harness.kernel import Kernel
from tests.metal.harness.signature import ATTRIBUTES, signature
from tests.simulated_gpu import install

pytestmark = pytest.mark.usefixtures("needs_harness")
MLX_KERNELS = pytest.mark.skipif(install.current is not None, reason="about MLX's own launches, not simulated ones")

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
GID = "uint g = thread_position_in_grid.x;\n"


def run(
    source, inputs, outputs, grid, threadgroup=None, template=None, seed=0, report=None, init_value=None, **options
):
    """Inputs are called a, b, c, outputs y, z."""
    names = list("abc"[: len(inputs)]), list("yz"[: len(outputs)])
    with harness.use(seed) as log:
        results = mx.fast.metal_kernel("inline", *names, dedent(source), **options)(
            inputs=inputs,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=three(grid),
            threadgroup=three(threadgroup or 32),
            template=list((template or {}).items()),
            init_value=init_value,
        )
    if report is not None:
        report += log.launches
    return [np.array(r.astype(mx.float32) if r.dtype in FLOATS else r) for r in results]


def three(size):
    return tuple(int(n) for n in (*np.atleast_1d(size), 1, 1)[:3])


def as_numpy(x):
    return np.array(x.astype(mx.float32))


def numbers(*shape, dtype=mx.float32, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


REDUCTION = """
    uint t = thread_index_in_threadgroup, row = threadgroup_position_in_grid.x;
    threadgroup float parts[SIMD];
    float sum = 0;
    for (uint i = t; i < N; i += threads_per_threadgroup.x) sum += float(a[row * N + i]);
    sum = simd_sum(sum);
    if (thread_index_in_simdgroup == 0) parts[simdgroup_index_in_threadgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup_index_in_threadgroup == 0) {
        uint lane = thread_index_in_simdgroup;
        sum = simd_sum(lane < simdgroups_per_threadgroup ? parts[lane] : 0.0f);
        if (t == 0) y[row] = T(sum);
    }
"""


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("threads", [32, 1024])
def test_reduction_and_its_bytes(dtype, threads):
    a, report = numbers(5, 300, dtype=dtype), []
    template = {"T": dtype, "N": 300}
    header = "constant constexpr int SIMD = 32;"
    output = [((5,), dtype)]
    (y,) = run(REDUCTION, [a], output, 5 * threads, threads, template, header=header, report=report)
    assert_allclose(
        y, as_numpy(a).sum(1), rtol={mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype], atol=1e-2
    )
    (launch,) = report
    size = dtype.size
    assert (launch.kernel, launch.groups, launch.threads) == ("inline", 5, 5 * threads)
    assert launch.read == launch.unique_read == launch.loaded == 1500 * size
    assert launch.written == launch.unique_written == launch.stored == 5 * size
    assert launch.threadgroup_memory == 128
    assert (launch.threadgroup_loads, launch.products, launch.barriers) == (5 * threads // 32, 0, 5)


def test_bytes_of_repeated_reads():
    """64 threads in 2 groups read the same 16 floats; a small constant input is not counted."""
    report = []
    source = GID + "float s = 0; for (int i = 0; i < 16; i++) s += a[i]; y[g] = s * b[0] + a_shape[0];"
    (y,) = run(source, [mx.ones(16), mx.array([2.0])], [((64,), mx.float32)], 64, report=report)
    assert (y == 48).all()
    assert (report[0].read, report[0].loaded, report[0].unique_read) == (64 * 64, 2 * 64, 64)


def test_transpose_through_threadgroup_memory():
    a = numbers(70, 45)
    source = """
        threadgroup float tile[16][17];
        uint2 t = thread_position_in_threadgroup.xy, at = threadgroup_position_in_grid.xy * 16;
        uint rows = a_shape[0], columns = a_shape[1];
        if (at.y + t.y < rows && at.x + t.x < columns) tile[t.y][t.x] = a[(at.y + t.y) * columns + at.x + t.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (at.x + t.y < columns && at.y + t.x < rows) y[(at.x + t.y) * rows + at.y + t.x] = tile[t.x][t.y];
    """
    (y,) = run(source, [a], [((45, 70), mx.float32)], (48, 80), (16, 16))
    assert_array_equal(y, as_numpy(a).T)


MATRICES = """
    simdgroup_matrix<T, 8, 8> left, right;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    threadgroup T tile[8 * 8];
    ushort lane = thread_index_in_simdgroup;
    for (int k = 0; k < 24; k += 8) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (int i = lane; i < 64; i += 32) tile[i] = b[(k + i / 8) * 8 + i % 8];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_load(left, a + k, 24);
        simdgroup_load(right, tile, 8, ulong2(0, 0), TRANSPOSED);
        simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    simdgroup_store(sum, z, 8);
    short quad = lane / 4;
    short row = (quad & 4) + lane / 2 % 4, column = (quad & 2) * 2 + lane % 2 * 2;
    y[row * 8 + column] = sum.thread_elements()[0];
    y[row * 8 + column + 1] = sum.thread_elements()[1];
"""


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matrix_product_and_lane_layout(dtype, transposed):
    a, b, report = numbers(8, 24, dtype=dtype), numbers(24, 8, dtype=dtype, seed=1), []
    template = {"T": dtype, "TRANSPOSED": transposed}
    y, z = run(MATRICES, [a, b], [((8, 8), mx.float32)] * 2, 32, template=template, report=report)
    assert report[0].products == 3
    right = as_numpy(b).reshape(3, 8, 8)
    expected = as_numpy(a) @ (right.swapaxes(1, 2) if transposed else right).reshape(24, 8)
    assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    assert_array_equal(y, z)


def test_matrix_diagonal_origin_and_conversion():
    source = """
        simdgroup_half8x8 left(half(3)), right, product;
        simdgroup_load(right, a, 16, ulong2(8, 8));
        simdgroup_multiply(product, left, right);
        simdgroup_store(product, y, 8);
    """
    a = numbers(16, 16, dtype=mx.float16)
    (y,) = run(source, [a], [((8, 8), mx.float16)], 32)
    assert_array_equal(y, (3 * as_numpy(a)[8:, 8:]).astype(np.float16))


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), shape=st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_strides_describe_any_layout(seed, shape):
    a = mx.arange(int(np.prod(shape))).reshape(shape)
    source = """
        uint3 p = thread_position_in_grid;
        uint to = (p.z * a_shape[1] + p.y) * a_shape[2] + p.x;
        y[to] = a[p.z * a_strides[0] + p.y * a_strides[1] + p.x * a_strides[2]];
    """
    (y,) = run(source, [a], [(tuple(shape), a.dtype)], shape[::-1], (4, 2, 2), seed=seed, ensure_row_contiguous=False)
    assert_array_equal(y, np.array(a))


def test_contiguous_inputs_of_transposed_arrays():
    a = numbers(6, 9, dtype=mx.bfloat16).T
    (y,) = run(GID + "y[g] = a[g];", [a], [((9, 6), mx.bfloat16)], 54)
    assert_array_equal(y, as_numpy(a))


@pytest.mark.parametrize(
    "grid, threadgroup", [((40, 1, 1), (64, 1, 1)), ((10, 7, 3), (4, 3, 2)), ((100, 1, 1), (48, 1, 1))]
)
def test_positions_in_partial_groups(grid, threadgroup):
    source = """
        uint3 p = thread_position_in_grid;
        uint i = (p.z * grid_size.y + p.y) * grid_size.x + p.x;
        uint values[K] = {
            thread_position_in_threadgroup.x, threadgroup_position_in_grid.y, threads_per_threadgroup.x,
            dispatch_threads_per_threadgroup.x, threadgroups_per_grid.x, thread_index_in_threadgroup,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup, simdgroups_per_threadgroup, threads_per_simdgroup
        };
        for (int k = 0; k < K; k++) y[i * K + k] = values[k];
    """
    (y,) = run(source, [], [((*grid[::-1], 10), mx.uint32)], grid, threadgroup, {"K": 10})
    full = np.minimum(grid, threadgroup)
    z, yy, x = np.indices(grid[::-1])
    sizes = [np.minimum(full[i], grid[i] - (p // full[i]) * full[i]) for i, p in enumerate((x, yy, z))]
    index = ((z % full[2]) * sizes[1] + yy % full[1]) * sizes[0] + x % full[0]
    threads = sizes[0] * sizes[1] * sizes[2]
    ones = np.ones_like(x)
    expected = [x % full[0], yy // full[1], sizes[0], full[0] * ones, -(-grid[0] // full[0]) * ones, index]
    expected += [index // 32, index % 32, -(-threads // 32), 32 * ones]
    assert_array_equal(y, np.stack(expected, -1))


def test_small_inputs_are_constants_and_scalars_references():
    source = GID + "const constant float* p = a; const constant float& q = b; y[g] = p[g % 7] * q + float(c[0]);"
    inputs = [mx.arange(7).astype(mx.float32), mx.array(2.5), mx.array([4], dtype=mx.int32)]
    (y,) = run(source, inputs, [((21,), mx.float32)], 21)
    assert_array_equal(y, np.arange(21) % 7 * 2.5 + 4)


@pytest.mark.parametrize("dtype", [*FLOATS, mx.int8, mx.uint32, mx.int64, mx.bool_, mx.complex64], ids=str)
def test_every_type_passes_through(dtype):
    a = numbers(100).astype(dtype)
    (y,) = run(GID + "T value = a[g]; y[g] = value;", [a], [((100,), dtype)], 100, template={"T": dtype})
    assert_array_equal(y, np.array(a.astype(mx.float32) if dtype in FLOATS else a))


def test_half_and_bfloat_round_after_every_operation():
    source = GID + "y[g] = a[g] * a[g] + a[g] - T(1);"
    values = mx.linspace(0.5, 2, 64)
    for dtype in (mx.float16, mx.bfloat16):
        a = values.astype(dtype)
        (y,) = run(source, [a], [((64,), dtype)], 64, template={"T": dtype})
        assert_array_equal(y, as_numpy((a * a) + a - mx.array(1, dtype)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mathematics(dtype):
    a = mx.abs(numbers(64)).astype(dtype)
    functions = {
        "exp": np.exp, "fast::exp2": np.exp2, "metal::precise::log": np.log, "log2": np.log2, "tanh": np.tanh,
        "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "abs": np.abs, "floor": np.floor, "sin": np.sin,
    }  # fmt: skip
    source = GID + "".join(f"y[{i} * 64 + g] = {name}(a[g]);" for i, name in enumerate(functions))
    (results,) = run(source, [a], [((len(functions), 64), dtype)], 64)
    # Half an ulp of the result's type, on top of the function's own error in float.
    tolerance = {mx.float32: 3e-7, mx.float16: 5e-4, mx.bfloat16: 4e-3}[dtype]
    for (name, function), y in zip(functions.items(), results, strict=True):
        assert_allclose(y, function(as_numpy(a).astype(np.float64)), rtol=tolerance, atol=tolerance, err_msg=name)


def test_special_values():
    source = """
        y[0] = -INFINITY; y[1] = numeric_limits<float>::max(); y[2] = max(NAN, 1.0f); y[3] = isnan(a[0]) ? 1 : 0;
        y[4] = exp(-INFINITY); y[5] = clamp(3.0f, 0.0f, 1.0f); y[6] = select(1.0f, 2.0f, true);
        y[7] = as_type<float>(as_type<uint>(a[1])); y[8] = fma(2.0f, 3.0f, 1.0f); y[9] = float(min(-3, 2));
        y[10] = float(numeric_limits<half>::max()); y[11] = float(numeric_limits<bfloat>::lowest());
        y[12] = isinf(y[0]);
    """
    (y,) = run(source, [mx.array([np.nan, 0.1])], [((13,), mx.float32)], 1)
    biggest = np.finfo(np.float32).max
    bfloat = np.uint32(0xFF7F0000).view(np.float32)
    assert_array_equal(y, np.float32([-np.inf, biggest, 1, 1, 0, 1, 2, 0.1, 7, -3, 65504, bfloat, 1]))


def test_bits_are_those_of_the_type():
    source = """
        long values[] = {clz(ushort(1)), clz(1), clz(0u), ctz(uchar(0)), popcount(short(-1)), popcount(a[0])};
        for (int i = 0; i < 6; i++) y[i] = values[i];
    """
    (y,) = run(source, [mx.array([-1], dtype=mx.int64)], [((6,), mx.int32)], 1)
    assert_array_equal(y, [15, 31, 32, 8, 16, 64])


def test_vectors_convert_and_swizzle():
    source = """
        int4 whole = int4(1, 2, 3, -4);
        float4 f = float4(whole) * 1.5f;
        half2 h = half2(f.xy);
        vec<float, 4> mixed = vec<float, 4>(float2(h), f.zw);
        float3 three = float3(mixed.xyz);
        float4 loaded = float4(a[0], a[1], a[2], a[3]);
        reinterpret_cast<device float4*>(y)[0] = mixed + static_cast<float4>(uint4(1));
        reinterpret_cast<device float4*>(y)[1] = loaded.wzyx;
        y[8] = dot(three, float3(1.0f));
    """
    (y,) = run(source, [mx.arange(4, 8).astype(mx.float32)], [((9,), mx.float32)], 1)
    assert_array_equal(y, [2.5, 4, 5.5, -5, 7, 6, 5, 4, 9])


def test_vectors_of_bool():
    source = """
        float4 v = float4(a[0], a[1], a[2], a[3]), limit = float4(1.5f);
        bool4 low = v < limit;
        bool2 pair(true, false);
        bool3 three;
        three = !bool3(low.x, low[2], true) || bool3(false);
        float4 chosen = select(v, limit, v < limit);
        int values[] = {
            any(low), all(low), all((v < limit) || (v > limit)), any(low && !low), low.y, low[2], int(chosen.x * 2),
            int(chosen.w), sizeof(bool2), sizeof(bool3), int2(pair).x, three.y, three.z, all(bool4(v >= limit) || low),
        };
        for (int i = 0; i < 14; i++) y[i] = values[i];
    """
    (y,) = run(source, [mx.arange(4).astype(mx.float32)], [((14,), mx.int32)], 1)
    assert_array_equal(y, [1, 0, 1, 0, 1, 0, 3, 3, 2, 4, 1, 1, 0, 1])


def test_vectors_of_64_bits():
    source = """
        long4 v = long4(float4(1.5f)) - long4(0, 1, 2, 3) * (1l << 40);
        ulong3 u{a[0], 2, 3};
        u += ulong3(v.xyz) >> 63;
        y[0] = v.w; y[1] = u.x; y[2] = u.y; y[3] = vec<ulong, 4>(u, 7).w; y[4] = sizeof(u); y[5] = all(v < 2);
    """
    (y,) = run(source, [mx.array([9, 8], dtype=mx.uint32)], [((6,), mx.int64)], 1)
    assert_array_equal(y, [1 - 3 * 2**40, 9, 3, 7, 32, 1])


@pytest.mark.parametrize("n", [5, 40])  # in constant and in device memory
def test_complex_numbers(n):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(2, n)) + 1j * rng.normal(size=(2, n))).astype(np.complex64)
    source = (
        GID
        + """
        complex64_t p = a[g], q;
        q = b[g];
        T s = p * q - (1.0f - p) / q;
        s += -q + 2;
        y[g] = simd_shuffle_up(s, ushort(1));
        z[g] = a[g].imag + float(q) + (p < q);
    """
    )
    outputs = [((n,), mx.complex64), ((n,), mx.float32)]
    y, z = run(source, [mx.array(a), mx.array(b)], outputs, n, 64, {"T": mx.complex64})
    s, lane = a * b - (1 - a) / b - b + 2, np.arange(n)
    assert_allclose(y, s[np.where(lane % 32, lane - 1, lane)], rtol=1e-5)
    assert_allclose(z, a.imag + b.real + (a.real < b.real), rtol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.int32], ids=str)
def test_collectives(dtype):
    source = """
        ushort lane = thread_index_in_simdgroup;
        T v = a[lane];
        T values[9] = {simd_sum(v), simd_max(v), simd_min(v), simd_shuffle_xor(v, 5), simd_shuffle_down(v, 3),
                       simd_shuffle_up(v, 2), simd_broadcast(v, 7), simd_shuffle(v, lane / 2), simd_broadcast_first(v)};
        for (int i = 0; i < 9; i++) y[i * 32 + lane] = values[i];
        z[lane] = simd_all(lane < 32) && simd_any(lane == 3) && !simd_any(lane > 40);
    """
    a = mx.arange(32).astype(dtype)
    y, z = run(source, [a], [((9, 32), dtype), ((32,), mx.bool_)], 32, template={"T": dtype})
    n = np.arange(32)
    shifted = np.where(n + 3 < 32, n + 3, n), np.where(n >= 2, n - 2, n)
    expected = [n * 0 + 496, n * 0 + 31, n * 0, n ^ 5, *shifted, n * 0 + 7, n // 2, n * 0]
    assert_array_equal(y, expected)
    assert z.all()


@pytest.mark.parametrize("threads", [32, 20])
def test_ballot(threads):
    source = """
        ushort lane = thread_index_in_simdgroup;
        simd_vote vote = simd_ballot(a[lane] % 3 == 0);
        y[lane] = simd_vote::vote_t(vote);
        z[lane] = vote.all() + 2 * vote.any() + 4 * simd_ballot(lane < 32).all() + 8 * simd_ballot(lane > 40).any();
    """
    outputs = [((threads,), mx.uint64), ((threads,), mx.int32)]
    y, z = run(source, [mx.arange(threads)], outputs, threads)
    assert (y == sum(1 << lane for lane in range(0, threads, 3))).all() and (z == 6).all()


def test_prefix_sums_rotations_and_quad_groups():
    source = """
        ushort lane = thread_index_in_simdgroup;
        int v = a[lane];
        int values[11] = {
            simd_prefix_inclusive_sum(v), simd_prefix_exclusive_sum(v), simd_prefix_exclusive_product(v > 30 ? 2 : 1),
            simd_shuffle_rotate_down(v, 3), simd_shuffle_rotate_up(v, 2), simd_shuffle_and_fill_up(v, 100 + v, 2),
            simd_shuffle_and_fill_down(v, 100 + v, 3), simd_and(v | 8), simd_xor(v), quad_sum(v), quad_broadcast(v, 2),
        };
        for (int i = 0; i < 11; i++) y[i * 32 + lane] = values[i];
    """
    (y,) = run(source, [mx.arange(32)], [((11, 32), mx.int32)], 32)
    n = np.arange(32)
    down, up, quads = (n + 3) % 32, (n - 2) % 32, n // 4 * 4
    expected = [n.cumsum(), n.cumsum() - n, n * 0 + 1, down, up, np.where(n < 2, 100 + up, up)]
    expected += [np.where(n > 28, 100 + down, down), n * 0 + 8, n * 0, 4 * quads + 6, quads + 2]
    assert_array_equal(y, expected)


def test_utilities_of_mlx():
    source = """
        uint3 p = thread_position_in_grid;
        uint to = (p.z * a_shape[1] + p.y) * a_shape[2] + p.x;
        y[to] = a[elem_to_loc(int64_t(to), a_shape, a_strides, a_ndim)] + a[elem_to_loc(p, a_shape, a_strides, a_ndim)];
        ulong one = simd_shuffle(ulong(thread_index_in_simdgroup) << 40, 1) >> 40;
        z[to] = ceildiv(to, 4u) + one + (Limits<half>::max > Limits<half>::finite_max);
    """
    a = mx.arange(30).reshape(2, 3, 5).astype(mx.float32)
    y, z = run(source, [a], [(a.shape, a.dtype)] * 2, (5, 3, 2), (5, 3, 2), ensure_row_contiguous=False)
    assert_array_equal(y, 2 * np.array(a))
    assert_array_equal(z.reshape(-1), -(-np.arange(30) // 4) + 2)


def test_reductions_of_a_partial_simd_group_leave_out_missing_lanes():
    (y,) = run(GID + "y[g] = simd_sum(a[g]) + simd_min(a[g]);", [mx.ones(37) * 2], [((37,), mx.float32)], 37, 64)
    assert_array_equal(y, [66] * 32 + [12] * 5)


def test_text_that_depends_on_the_type():
    """Branches of `if constexpr`, helper templates and structs with methods, as Metal has them."""
    header = """
        template <typename T, int N> struct Pair {
            T first[N];
            METAL_FUNC void put(T value) thread { for (int i = 0; i < N; i++) first[i] = value; }
            METAL_FUNC T total() const thread { T s = T(0); for (int i = 0; i < N; i++) s += first[i]; return s; }
        };
        struct Two { float low, high; };
        template <typename U> METAL_FUNC U twice(const device U* p, uint i) { return p[i] + p[i]; }
        inline void add(thread float& to, float value) { to += value; }
        #define FOUR(x) { x; x; x; x; }
    """
    source = (
        GID
        + """
        Pair<float, 3> pair;
        pair.put(float(twice(a, g)));
        float s = pair.total();
        if constexpr (is_same_v<T, half>) { s = T(1).missing; } else { FOUR(add(s, 1.0f)) }
        Two two = reinterpret_cast<const device Two*>(b)[g];
        device Two* out = reinterpret_cast<device Two*>(z) + g;
        *out = two;
        _Pragma("clang loop unroll(full)")
        for (int i = 0; i < 2; i++) s += i == 0 ? two.low : two.high;
        y[g] = s;
    """
    )
    a, b = mx.arange(8).astype(mx.float32), mx.arange(16).astype(mx.float32)
    outputs = [((8,), mx.float32), ((16,), mx.float32)]
    y, z = run(source, [a, b], outputs, 8, template={"T": mx.float32}, header=header)
    n = np.arange(8)
    assert_array_equal(y, 6 * n + 4 + 4 * n + 1)
    assert_array_equal(z, np.arange(16))


def test_declarations_of_classes_functions_and_variables():
    """Forms that MLX's kernels use, and clang's OpenCL doesn't have or the rules of metal_rules.py must not reject."""
    header = """
        constant metal::os_log logger("tests", "harness");
        template <typename T> struct Pair {
            T first, second;
            constexpr Pair(T first, T second) thread : first(first), second(second) {}
            constexpr operator vec<T, 2>() const thread { return vec<T, 2>(first, second); }
        };
        template <typename T> constexpr Pair<T> swapped(Pair<T> p) { return {p.second, p.first}; }
        template <typename T, int N> void fill(T values[N], T value) { for (int i = 0; i < N; i++) values[i] = value; }
        template <typename T, int N> void add(thread T (&values)[N], T value) { values[N - 1] += value; }
        template <typename T> void advance(const device T*& p, int n) { p += n; }
        template <typename P, typename N> float after(P p, N n) { p += n; logger.log_debug("%f", *p); return *p; }
        short after_next(const thread short& i) { return i + 2; }
        short2 twice(short2);
        short2 twice(short2 v) { return v + v; }
    """
    source = """
        uint t = thread_index_in_threadgroup;
        short2 pair(t % 3, 2), other = twice(pair);
        Pair<float> two = swapped(Pair<float>(1, 2));
        float2 v = two;
        float values[4];
        fill<float, 4>(values, 3);
        add(values, 1.0f);
        const device float* p = a;
        advance(p, 1);
        metal::array<int, 2> both = {5, after_next(4)};
        if (threads_per_threadgroup.x > 1) {
            threadgroup float inner[32];
            inner[t] = t;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            v.y += inner[31 - t];
        }
        y[t] = other.y + 10 * v.x + 100 * v.y + values[3] + after(p, integral_constant<int, 2>{}) + both[1];
    """
    (y,) = run(source, [mx.arange(9).astype(mx.float32)], [((32,), mx.float32)], 32, header=header)
    assert_array_equal(y, 4 + 20 + 100 * (1 + 31 - np.arange(32)) + 4 + 3 + 6)


def test_threadgroup_declarations_of_all_forms():
    source = """
        threadgroup float one, two[4] = {0, 0, 0, 0}, three[2][N] = {};
        threadgroup vec<float, 4> four[2];
        uint t = thread_index_in_threadgroup;
        threadgroup float* p = &three[1][0];
        if (t == 0) { one = 1; two[3] = 2; p[1] = 3; four[1] = float4(4); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[t] = one + two[3] + three[1][1] + four[1].w + sizeof(three) + threadgroup_position_in_grid.x;
    """
    report = []
    (y,) = run(source, [], [((32,), mx.float32)], 32, template={"N": 3}, report=report)
    assert (y == 34).all()
    assert report[0].threadgroup_memory == 16 + 16 + 32 + 32


def test_extents_and_members_are_taken_as_written():
    """Conditions in brackets, a static member before && and *."""
    source = """
        threadgroup float a[N == 3 && N <= 4 ? 64 : 1];
        int t = thread_index_in_threadgroup, n = 2;
        a[t] = t < S::N && t > 3 ? 1 : n * S::N * n;
        y[t] = a[t];
    """
    header = "struct S { static constant constexpr int N = 5; };"
    (y,) = run(source, [], [((64,), mx.float32)], 64, 64, template={"N": 3}, header=header)
    assert_array_equal(y, np.where(np.arange(64) == 4, 1, 20))


def test_threads_may_share_out_a_vector_or_a_struct():
    source = """
        threadgroup half4 v[16];
        threadgroup Mixed m[32];
        uint t = thread_index_in_threadgroup;
        if (t < 32) { m[t].low = 2; } else { m[t - 32].high = 3; }
        v[t / 4][t % 4] = half(t);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[t] = float(v[15 - t / 4][t % 4]) + float(m[t / 2].low) + float(m[t / 2].high);
    """
    header = "struct Mixed { half low, high; float other; };"
    (y,) = run(source, [], [((64,), mx.float32)], 64, 64, header=header)
    t = np.arange(64)
    assert_array_equal(y, (15 - t // 4) * 4 + t % 4 + 5)


HISTOGRAM = """
    uint t = thread_index_in_threadgroup;
    threadgroup atomic_uint counts[8];
    if (t < 8) atomic_store_explicit(&counts[t], 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&counts[a[thread_position_in_grid.x] % 8], 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t < 8) {
        uint count = atomic_load_explicit(&counts[t], memory_order_relaxed);
        atomic_fetch_add_explicit(&y[t], count, memory_order_relaxed);
    }
"""


def test_atomics_of_threadgroup_and_device_memory():
    a = mx.random.randint(0, 1000, (300,), mx.uint32, key=mx.random.key(0))
    (y,) = run(HISTOGRAM, [a], [((8,), mx.uint32)], 300, 64, init_value=0, atomic_outputs=True)
    assert_array_equal(y, np.bincount(np.array(a) % 8, minlength=8))


def test_compare_exchange():
    """The maximum of floats, which Metal's atomic_fetch_max_explicit doesn't support."""
    source = (
        GID
        + """
        device atomic_float* largest = (device atomic_float*)y;
        float value = a[g], seen = atomic_load_explicit(largest, memory_order_relaxed);
        while (value > seen && !atomic_compare_exchange_weak_explicit(
                   largest, &seen, value, memory_order_relaxed, memory_order_relaxed)) {}
    """
    )
    a = numbers(200)
    (y,) = run(source, [a], [((1,), mx.float32)], 200, 64, init_value=-100)
    assert y == as_numpy(a).max()


def test_results_do_not_depend_on_the_seed():
    a = numbers(5, 300)
    arguments = ([a], [((5,), mx.float32)], 5 * 96, 96, {"T": mx.float32, "N": 300})
    header = "constant constexpr int SIMD = 32;"
    results = [run(REDUCTION, *arguments, header=header, seed=seed)[0] for seed in range(2)]
    for other in results[1:]:
        assert_array_equal(results[0], other)


def test_use_replaces_metal_kernel_and_puts_it_back():
    real = mx.fast.metal_kernel
    with harness.use(seed=3) as log:
        kernel = mx.fast.metal_kernel("double", ["x"], ["y"], GID + "y[g] = 2 * x[g];")
        (y,) = kernel(
            inputs=[mx.ones(8)], output_shapes=[(8,)], output_dtypes=[mx.float32], grid=(8, 1, 1), threadgroup=(8, 1, 1)
        )
    assert mx.fast.metal_kernel is real
    assert (y == 2).all() and [launch.kernel for launch in log.launches] == ["double"]


@MLX_KERNELS
def test_a_kernel_that_was_already_constructed_runs_in_the_harness():
    x, weight = numbers(3, 64), mx.ones(64)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="No Metal back-end"):
            rms_norm_metal(x, weight, 1e-5)
        with harness.use() as log:
            rms_norm_metal(x, weight, 1e-5)
        assert [launch.kernel for launch in log.launches] == ["mlxlm_rms_norm"]


def call(**changes):
    construct = {"name": "k", "input_names": ["x"], "output_names": ["y"], "source": GID + "y[g] = x[g];"}
    construct |= {name: changes.pop(name) for name in [*construct, "compile_options"] if name in changes}
    arguments = {"inputs": [mx.ones(8)], "output_shapes": [(8,)], "output_dtypes": [mx.float32]}
    arguments |= {"grid": (8, 1, 1), "threadgroup": (8, 1, 1)} | changes
    return harness.metal_kernel(**construct)(**arguments)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"output_names": []}, ValueError, "at least one output"),
        ({"input_names": "x"}, TypeError, "incompatible"),
        ({"compile_options": {"math_mode": "quick"}}, ValueError, "math_mode"),
        ({"inputs": []}, ValueError, "`inputs` to have size 1"),
        ({"output_shapes": [(8,)] * 2}, ValueError, "`output_shapes` to have size 1"),
        ({"output_dtypes": []}, ValueError, "`output_dtypes` to have size 1"),
        ({"template": {"N": 3}}, TypeError, "incompatible"),
        ({"template": [("N", 1.5)]}, ValueError, "Invalid template argument"),
        ({"template": [("N", 2**31)]}, ValueError, "Invalid template argument"),
        ({"grid": (8, 1)}, TypeError, "incompatible"),
        ({"grid": (2**32, 1, 1)}, TypeError, "incompatible"),
        ({"threadgroup": (1056, 1, 1)}, ValueError, r"Thread group size \(1056\)"),
        ({"init_value": "zero"}, TypeError, "incompatible"),
        ({"stream": mx.cpu}, ValueError, "Only supports the GPU"),
        ({"threads": 3}, TypeError, "unexpected keyword"),
    ],
    ids=str,
)
def test_what_mlx_rejects_raises_mlx_s_error(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_inputs_may_be_numbers_and_numpy_arrays():
    (y,) = call(inputs=[np.arange(8.0)], stream=mx.gpu)
    assert_array_equal(y, np.arange(8))
    (y,) = call(inputs=[2], source=GID + "y[g] = x + 0.5f;")
    assert_array_equal(y, np.full(8, 2.5))


@pytest.mark.parametrize("dtype", [*FLOATS, mx.int32], ids=str)
def test_init_value_is_what_the_outputs_contain_before_the_launch(dtype):
    source = GID + "if (g % 2) y[g] += T(1);"
    (y,) = run(source, [], [((8,), dtype)], 8, template={"T": dtype}, init_value=3)
    assert_array_equal(y, [3, 4] * 4)


SIGNATURES = {
    "constants, scalars, a template": ("y[0] = a[0] + a_shape[0] + b; uint3 p = thread_position_in_grid;", 3, 2, True),
    "shape, strides and ndim": (
        "y[0] = a_shape[0] + a_strides[0] + a_ndim; uint p = thread_index_in_threadgroup;",
        9,
        1,
        False,
    ),
    "no attribute": ("y[0] = a[0] + b;", 9, 2, False),
    "every attribute": ("y[0] = a[0]; " + " ".join(ATTRIBUTES), 8, 2, True),
}


@MLX_KERNELS
@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("atomic_outputs", [False, True])
def test_generated_source_is_mlx_s(name, atomic_outputs, tmp_path, capfd):
    """Without Metal, too, MLX prints the source of a kernel that is exported."""
    source, size, count, has_template = SIGNATURES[name]
    template = [("T", mx.bfloat16), ("N", 3), ("B", True), ("S", mx.float16)] if has_template else []
    inputs = [mx.zeros(size, mx.float16), mx.array(1.0)]
    dtypes = [mx.float32, mx.bfloat16][:count]
    arguments = "inline", ["a", "b"], ["y", "z"][:count], source, "// header\n", True, atomic_outputs
    kernel = mx.fast.metal_kernel(*arguments)
    call = partial(
        kernel,
        template=template,
        verbose=True,
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)] * count,
        output_dtypes=dtypes,
    )
    mx.export_function(str(tmp_path / "kernel.mlxfn"), lambda *arrays: call(inputs=list(arrays)), *inputs)
    kernel = Kernel(arguments[0], *map(tuple, arguments[1:3]), *arguments[3:])
    ours = signature(kernel, inputs, template, dtypes).source(kernel)
    assert capfd.readouterr().out == f"Generated source code for `inline`:\n```\n{ours}\n```\n"
