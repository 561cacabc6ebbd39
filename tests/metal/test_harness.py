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


def run(source, inputs, outputs, grid, threadgroup=None, template=None, seed=0, report=None, **options):
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
    simdgroup_float8x8 sum;
    short lane = thread_index_in_simdgroup, quad = lane / 4;
    short row = (quad & 4) + lane / 2 % 4, column = (quad & 2) * 2 + lane % 2 * 2;
    for (int i = 0; i < 2; i++) {
        left.thread_elements()[i] = a[row * 8 + column + i];
        right.thread_elements()[i] = b[row * 8 + column + i];
        sum.thread_elements()[i] = 1;
    }
    simdgroup_multiply_accumulate(sum, left, right, sum);
    for (int i = 0; i < 2; i++) y[row * 8 + column + i] = sum.thread_elements()[i];
"""


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matrix_product(dtype):
    a, b, report = numbers(8, 8, dtype=dtype), numbers(8, 8, dtype=dtype, seed=1), []
    (y,) = run(MATRICES, [a, b], [((8, 8), mx.float32)], 32, template={"T": dtype}, report=report)
    assert report[0].products == 1
    assert_allclose(y, as_numpy(a) @ as_numpy(b) + 1, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("dtype", [*FLOATS, mx.int8, mx.uint32, mx.int64, mx.bool_], ids=str)
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
        "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "abs": np.abs, "sin": np.sin,
    }  # fmt: skip
    source = GID + "".join(f"y[{i} * 64 + g] = {name}(a[g]);" for i, name in enumerate(functions))
    (results,) = run(source, [a], [((len(functions), 64), dtype)], 64)
    # Half an ulp of the result's type, on top of the function's own error in float.
    tolerance = {mx.float32: 3e-7, mx.float16: 5e-4, mx.bfloat16: 4e-3}[dtype]
    for (name, function), y in zip(functions.items(), results, strict=True):
        assert_allclose(y, function(as_numpy(a).astype(np.float64)), rtol=tolerance, atol=tolerance, err_msg=name)


def test_special_values():
    source = """
        y[0] = -INFINITY; y[1] = max(NAN, 1.0f); y[2] = exp(-INFINITY); y[3] = clamp(3.0f, 0.0f, 1.0f);
        y[4] = as_type<float>(as_type<uint>(a[0])); y[5] = float(min(-3, 2));
    """
    (y,) = run(source, [mx.array([0.1])], [((6,), mx.float32)], 1)
    assert_array_equal(y, np.float32([-np.inf, 1, 0, 1, 0.1, -3]))


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


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.int32], ids=str)
def test_collectives(dtype):
    source = """
        ushort lane = thread_index_in_simdgroup;
        T v = a[lane];
        T values[8] = {simd_sum(v), simd_max(v), simd_min(v), simd_shuffle_xor(v, 5), simd_shuffle_down(v, 3),
                       simd_shuffle_up(v, 2), simd_broadcast(v, 7), simd_shuffle(v, lane / 2)};
        for (int i = 0; i < 8; i++) y[i * 32 + lane] = values[i];
    """
    a = mx.arange(32).astype(dtype)
    (y,) = run(source, [a], [((8, 32), dtype)], 32, template={"T": dtype})
    n = np.arange(32)
    shifted = np.where(n + 3 < 32, n + 3, n), np.where(n >= 2, n - 2, n)
    expected = [n * 0 + 496, n * 0 + 31, n * 0, n ^ 5, *shifted, n * 0 + 7, n // 2]
    assert_array_equal(y, expected)


def test_prefix_sums():
    source = "uint t = thread_index_in_simdgroup; y[t] = simd_prefix_exclusive_sum(a[t]);"
    (y,) = run(source, [mx.arange(32)], [((32,), mx.int32)], 32)
    assert_array_equal(y, np.arange(32).cumsum() - np.arange(32))


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
    construct |= {name: changes.pop(name) for name in [*construct] if name in changes}
    arguments = {"inputs": [mx.ones(8)], "output_shapes": [(8,)], "output_dtypes": [mx.float32]}
    arguments |= {"grid": (8, 1, 1), "threadgroup": (8, 1, 1)} | changes
    return harness.metal_kernel(**construct)(**arguments)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"output_names": []}, ValueError, "at least one output"),
        ({"input_names": "x"}, TypeError, "incompatible"),
        ({"inputs": []}, ValueError, "`inputs` to have size 1"),
        ({"output_shapes": [(8,)] * 2}, ValueError, "`output_shapes` to have size 1"),
        ({"threadgroup": (1056, 1, 1)}, ValueError, r"Thread group size \(1056\)"),
        ({"threads": 3}, TypeError, "unexpected keyword"),
    ],
    ids=str,
)
def test_what_mlx_rejects_raises_mlx_s_error(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_inputs_may_be_numbers_and_numpy_arrays():
    (y,) = call(inputs=[np.arange(8.0)])
    assert_array_equal(y, np.arange(8))
    (y,) = call(inputs=[2], source=GID + "y[g] = x + 0.5f;")
    assert_array_equal(y, np.full(8, 2.5))


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
def test_generated_source_is_mlx_s(name, tmp_path, capfd):
    """Without Metal, too, MLX prints the source of a kernel that is exported."""
    source, size, count, has_template = SIGNATURES[name]
    template = [("T", mx.bfloat16), ("N", 3), ("B", True), ("S", mx.float16)] if has_template else []
    inputs = [mx.zeros(size, mx.float16), mx.array(1.0)]
    dtypes = [mx.float32, mx.bfloat16][:count]
    arguments = "inline", ["a", "b"], ["y", "z"][:count], source, "// header\n"
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
