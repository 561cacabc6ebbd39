"""Small kernels with one bug each, and the error message that the harness must raise.

By default, the input x is the floats 0 to 63, the output y has 64 floats, and 64 threads run in one threadgroup.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxlm.backend.mlx import mx

TID = "uint t = thread_index_in_threadgroup;\n"
GID = "uint g = thread_position_in_grid.x;\n"
# A function that clang doesn't inline by default.
LONG = "inline float big(float v) {" + " v = sin(v) * cos(v) + tanh(v);" * 60 + " return simd_sum(v); }"
ADD = """threadgroup atomic_uint a;
    if (t == 0) atomic_store_explicit(&a, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
"""
BFLOAT = {"dtype": mx.bfloat16, "outputs": [((64,), mx.bfloat16)]}


@dataclass
class BuggyKernel:
    source: str
    message: str
    grid: int = 64
    threadgroup: int = 64
    template: dict = field(default_factory=dict)
    header: str = ""
    outputs: list = field(default_factory=lambda: [((64,), mx.float32)])
    dtype: mx.Dtype = mx.float32
    inputs: int = 64
    results: tuple = ("y",)
    init_value: float | None = None


REVERSED = TID + "threadgroup float a[64]; a[t] = x[t]; {} y[t] = a[63 - t];"

BUGGY_KERNELS = {
    # Data races within a threadgroup
    "missing barrier, read after write": BuggyKernel(
        REVERSED.format(""), r"uninitialized read of a\[\d+\]|data race: read of a\[\d+\]"
    ),
    "missing barrier, write after read": BuggyKernel(
        TID
        + """threadgroup float a[64];
        a[t] = x[t];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float other = a[(t + 40) % 64];
        a[t] = 2 * other;
        y[t] = a[t];""",
        r"data race: (write|read) of a\[\d+\]",
    ),
    "missing barrier, write after write": BuggyKernel(
        TID + "threadgroup float a[32]; a[t % 32] = x[t]; y[t] = x[t];",
        r"data race: write of a\[\d+\] and write by thread",
    ),
    "a race of equal values": BuggyKernel(
        TID + "threadgroup float a[1]; a[0] = 1.0f; y[t] = 1.0f;", r"data race: write of a\[0\] and write by thread"
    ),
    "a race within one SIMD group": BuggyKernel(
        TID + "threadgroup float a[64]; a[t] = x[t]; y[t] = a[t ^ 1];",
        r"uninitialized read of a\[\d+\]|data race: read of a\[\d+\]",
    ),
    "simd_sum taken for a memory barrier": BuggyKernel(
        TID + "threadgroup float a[64]; a[t] = x[t]; y[t] = simd_sum(x[t]) + a[t ^ 1];", r"data race: read of a\[\d+\]"
    ),
    "simdgroup_barrier across SIMD groups": BuggyKernel(
        REVERSED.format("simdgroup_barrier(mem_flags::mem_threadgroup);"),
        r"uninitialized read of a\[\d+\]|data race: read of a\[\d+\]",
    ),
    "barrier with mem_none": BuggyKernel(
        REVERSED.format("threadgroup_barrier(mem_flags::mem_none);"), r"data race: read of a\[\d+\] and write by thread"
    ),
    "simdgroup_barrier with the flag of the other memory": BuggyKernel(
        TID + "threadgroup float a[64]; a[t] = x[t]; simdgroup_barrier(mem_flags::mem_device); y[t] = a[t ^ 1];",
        r"data race: read of a\[\d+\] and write by thread",
    ),
    "device memory behind a threadgroup flag": BuggyKernel(
        TID + "y[t] = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); float z = y[63 - t]; if (z < 0) y[t] = z;",
        r"data race: read of y\[\d+\] and write by thread",
    ),
    "simdgroup_store without a barrier": BuggyKernel(
        TID
        + """threadgroup float a[64];
        simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        if (simdgroup_index_in_threadgroup == 0) simdgroup_store(m, a, 8);
        y[t] = t < 32 ? a[t] : 0.0f;""",
        r"data race: read of a\[\d+\] and write by thread|uninitialized read of a",
    ),
    # Data races between threadgroups
    "two threadgroups write one address": BuggyKernel(
        TID + "y[t] = x[t]; y[63 - t] = x[t];",
        r"data race: write of y\[\d+\] and write by another threadgroup",
        threadgroup=32,
    ),
    "a threadgroup reads what another writes": BuggyKernel(
        GID + "y[g] = x[g]; float z = y[(g + 32) % 64]; if (z < 0) y[g] = z;",
        r"data race: read of y\[\d+\] and write by another|uninitialized read of y",
        threadgroup=32,
    ),
    "a threadgroup reads the initial value of what another writes": BuggyKernel(
        GID + "float z = y[(g + 32) % 64]; y[g] = x[g] + z;",
        r"data race: .* of y\[\d+\] and .* by another threadgroup",
        threadgroup=32,
        init_value=0,
    ),
    "two threadgroups add to an initialized output": BuggyKernel(
        GID + "y[g % 8] += x[g];",
        r"data race: read of y\[\d+\] and write by another threadgroup",
        threadgroup=8,
        init_value=0,
    ),
    "a plain read of a device atomic": BuggyKernel(
        GID + "float z = y[0]; atomic_fetch_add_explicit((device atomic_float*)y, z + 1.0f, memory_order_relaxed);",
        r"data race: (read|atomic write) of y\[0\] and (atomic write|read) by",
        outputs=[((1,), mx.float32)],
        init_value=0,
    ),
    "a plain read of a device atomic of another threadgroup": BuggyKernel(
        TID + "if (!t) atomic_fetch_add_explicit((device atomic_float*)y, 1.0f, memory_order_relaxed);"
        "threadgroup_barrier(mem_flags::mem_device); if (y[0] < 0) y[1] = 0;",
        r"data race: (read|atomic write) of y\[0\] and (atomic write|read) by another threadgroup",
        outputs=[((2,), mx.float32)],
        threadgroup=32,
        init_value=0,
    ),
    "a threadgroup atomic read without a barrier": BuggyKernel(
        TID + ADD + "atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed); y[t] = *(threadgroup uint*)&a;",
        r"data race: (read|atomic write) of a\[0\] and (atomic write|read) by",
    ),
    "an uninitialized threadgroup atomic": BuggyKernel(
        TID + "threadgroup atomic_uint a; atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed); y[t] = 1;",
        r"uninitialized atomic read of a\[0\]",
    ),
    "an atomic past the end": BuggyKernel(
        GID + "atomic_store_explicit((device atomic_float*)y + g + 1, 1.0f, memory_order_relaxed);",
        r"out-of-bounds atomic write of 4 bytes at y\[64\]",
    ),
    "a race on an initialized output": BuggyKernel(
        GID + "y[g % 8] += x[g];",
        r"data race: read of y\[\d\] and write by thread|data race: write of y\[\d\] and read",
        init_value=0,
    ),
    # Bounds
    "read one past the end": BuggyKernel(GID + "y[g] = x[g + 1];", r"out-of-bounds read of 4 bytes at x\[64\]"),
    "read one before the start": BuggyKernel(
        GID + "y[g] = x[int(g) - 1];", r"out-of-bounds read of 4 bytes at x\[-1\]"
    ),
    "write one past the end": BuggyKernel(GID + "y[g + 1] = x[g];", r"out-of-bounds write of 4 bytes at y\[64\]"),
    "write one before the start": BuggyKernel(
        GID + "y[int(g) - 1] = x[g];", r"out-of-bounds write of 4 bytes at y\[-1\]"
    ),
    "a vector half outside": BuggyKernel(
        TID + "threadgroup float a[6]; if (t < 6) a[t] = 0; threadgroup_barrier(mem_flags::mem_threadgroup);"
        "y[t] = reinterpret_cast<threadgroup float4*>(a)[1].x;",
        r"out-of-bounds read of \d+ bytes at a\[4\]",
    ),
    "a vector at an address that is no multiple": BuggyKernel(
        TID + "threadgroup float a[8]; if (t < 8) a[t] = 0; threadgroup_barrier(mem_flags::mem_threadgroup);"
        "y[t] = dot(reinterpret_cast<threadgroup float4*>(a + 1)[0], float4(1));",
        "misaligned read of 16 bytes",
    ),
    "an unsigned index below zero": BuggyKernel(
        GID + "y[g] = x[g - 1];", "out-of-bounds read of 4 bytes: not in a buffer"
    ),
    "off the end of a threadgroup array": BuggyKernel(
        TID + "threadgroup float a[64], b[64]; threadgroup float* p = a; p[t + 1] = x[t]; b[t] = 0; y[t] = x[t];",
        r"out-of-bounds write of 4 bytes at a\[64\]",
    ),
    "before the start of a threadgroup array": BuggyKernel(
        TID + "threadgroup float a[64], b[64]; threadgroup float* p = b; p[int(t) - 1] = x[t]; a[t] = 0; y[t] = x[t];",
        r"out-of-bounds write of 4 bytes at b\[-1\]",
    ),
    "past the end of a small constant input": BuggyKernel(
        GID + "y[g] = x[7];", r"out-of-bounds read of 4 bytes at x\[7\]", inputs=7
    ),
    "past the end of a shape": BuggyKernel(
        GID + "y[g] = x[g] + x_shape[1];", r"out-of-bounds read of 4 bytes at x_shape\[1\]"
    ),
    "half of an element": BuggyKernel(
        GID + "reinterpret_cast<device half*>(y)[2 * g] = 1; y[g] = x[g];",
        "write of 2 bytes to part of an element of y",
    ),
    "past the end of an array of the thread": BuggyKernel(
        TID + "float v[4] = {1, 2, 3, 4}; v[t % 6] += 1; y[t] = v[t % 4];",
        r"index \d+ is out of bounds of a local array or vector of type",
    ),
    "past the end of a vector": BuggyKernel(
        TID + "float4 v = float4(x[t]); v[t % 5] = 1; y[t] = v.x;",
        r"index \d+ is out of bounds of a local array or vector of type",
    ),
    "past the end of an array at the end of a struct": BuggyKernel(
        TID + "S s = {3, {1, 2, 3, 4}}; s.v[t % 6] += 1; y[t] = s.v[t % 4];",
        r"index \d+ is out of bounds of a local array or vector of type 'float\[4\]'",
        header="struct S { int n; float v[4]; };",
    ),
    "past the end of a vector of bool": BuggyKernel(
        TID + "bool4 v = bool4(false); v[t % 5] = true; y[t] = v.x;",
        r"index \d+ is out of bounds of a local array or vector of type 'bool\[4\]'",
    ),
    "past the end of metal::array": BuggyKernel(
        TID + "metal::array<float, 4> v = {1, 2, 3, 4}; v[t % 5] += 1; y[t] = v[t % 4];",
        r"index \d+ is out of bounds of a local array or vector of type 'float\[4\]'",
    ),
    "a struct of 32 bytes half outside": BuggyKernel(
        GID + "*(device S*)(y + 4 * g) = *(const device S*)(x + 4 * (g % 15));",
        r"out-of-bounds write of \d+ bytes at y\[6[04]\]",
        header="struct S { float v[8]; };",
        grid=16,
        threadgroup=1,
        init_value=0,
    ),
    "a loop that starts at a negative index": BuggyKernel(
        """
        int lid = thread_index_in_threadgroup, n = 203 - 8 * lid;
        float values[8] = {0};
        if (n < 8)
            for (int i = n; i < 8; i++) values[i] = x[0];
        y[lid] = values[0];
        """,
        r"index -\d+ is out of bounds of a local array or vector of type 'float\[8\]'",
        grid=32,
        outputs=[((32,), mx.float32)],
    ),
    "past the inner extent of a threadgroup array": BuggyKernel(
        TID + "threadgroup float a[4][16]; a[0][t] = x[t]; y[t] = x[t];",
        r"index \d+ is out of bounds of a local array or vector of type",
    ),
    "a small constant input read as a vector": BuggyKernel(
        TID + "y[t] = dot(reinterpret_cast<const constant float4*>(x)[0], float4(1));",
        "misaligned read of 16 bytes",
        inputs=4,
    ),
    # Initialization
    "threadgroup memory read before it is written": BuggyKernel(
        TID + "threadgroup float a[64]; y[t] = a[t];", r"uninitialized read of a\[\d+\], which this threadgroup"
    ),
    "threadgroup memory with an initializer only": BuggyKernel(
        TID + "threadgroup float a[64] = {0}, b = 1; y[t] = a[t];", r"uninitialized read of a\[\d+\]"
    ),
    "threadgroup memory of the group before": BuggyKernel(
        TID + "threadgroup float a[32]; if (threadgroup_position_in_grid.x == 1) a[t] = x[t];"
        "y[thread_position_in_grid.x] = a[t];",
        r"uninitialized read of a\[\d+\], which this threadgroup",
        threadgroup=32,
    ),
    "an output read before it is written": BuggyKernel(GID + "y[g] += x[g];", r"uninitialized read of y\[\d+\]"),
    "an output not written to its end": BuggyKernel(GID + "if (g < 63) y[g] = x[g];", r"y\[63\] is never written"),
    "a grid that is too small": BuggyKernel(GID + "y[g] = x[g];", r"y\[48\] is never written", grid=48),
    # Writes to inputs
    "a write to an input": BuggyKernel(GID + "x[g] = 1; y[g] = 1;", "read-only variable is not assignable"),
    "a write to an input behind a cast": BuggyKernel(
        GID + "const_cast<device float*>(x)[g] = 1; y[g] = 1;", "write to input x"
    ),
    # Barrier and SIMD-group divergence
    "a barrier that half of the threads reach": BuggyKernel(
        TID + "if (t < 32) threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = x[t];",
        "barrier divergence: thread .* has returned",
    ),
    "a return before a barrier": BuggyKernel(
        TID + "y[t] = x[t]; if (t == 5) return; threadgroup_barrier(mem_flags::mem_threadgroup);",
        "barrier divergence: thread .*, thread 5 has returned",
    ),
    "two barriers in two branches": BuggyKernel(
        TID
        + """y[t] = x[t];
        if (t < 32) threadgroup_barrier(mem_flags::mem_threadgroup);
        else threadgroup_barrier(mem_flags::mem_device);""",
        "barrier divergence: .* in a different place",
    ),
    "two equal barriers in two branches": BuggyKernel(
        TID
        + """if (t < 32) { y[t] = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = 1; }
        else { y[t] = 2; threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = x[t]; }""",
        "barrier divergence: .* in a different place",
    ),
    "simd_sum that a lane skips": BuggyKernel(
        TID + "y[t] = x[t]; if (t != 7) y[t] = simd_sum(x[t]);", "SIMD-group divergence: .* thread 7 has returned"
    ),
    "simd_sum in both branches": BuggyKernel(
        TID + "if (t % 2) y[t] = simd_sum(x[t]); else y[t] = 2 * simd_sum(x[t]) + 1;",
        "SIMD-group divergence: .* in a different place",
    ),
    "simd_sum of the same text in both branches": BuggyKernel(
        TID + "float r; if (t % 2) r = simd_sum(x[t]); else r = simd_sum(x[63 - t]); y[t] = r;",
        "SIMD-group divergence: .* in a different place",
    ),
    "simd_sum in two calls of a long helper": BuggyKernel(
        TID + "y[t] = t % 2 ? big(x[t]) : big(2 * x[t]) + 1;",
        "SIMD-group divergence: .* in a different place",
        header=LONG,
    ),
    "a barrier in two calls of a helper": BuggyKernel(
        TID + "threadgroup float a[64]; if (t < 32) put(a, t, x[t]); else put(a, t, 2 * x[t]); y[t] = a[63 - t];",
        "barrier divergence: .* in a different place",
        header="""inline void put(threadgroup float* a, uint t, float v) {
            a[t] = v; threadgroup_barrier(mem_flags::mem_threadgroup); }""",
    ),
    "barriers at the end of two branches": BuggyKernel(
        TID
        + """if (t < 32) { y[t] = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); }
        else { y[t] = 2 * x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); }""",
        "barrier divergence: .* in a different place",
    ),
    "simd_broadcast of a lane that varies": BuggyKernel(
        TID + "y[t] = simd_broadcast(x[t], ushort(31 - t % 32));", "simd_broadcast with a different argument"
    ),
    "simd_ballot that a lane skips": BuggyKernel(
        TID + "y[t] = x[t]; if (t != 7) y[t] = simd_ballot(x[t] > 3).any();",
        "SIMD-group divergence: .* is at simd_ballot, thread 7 has returned",
    ),
    "a shuffle against a barrier": BuggyKernel(
        TID + "y[t] = x[t]; if (t < 16) y[t] = simd_shuffle_xor(x[t], 1);"
        "else threadgroup_barrier(mem_flags::mem_threadgroup);",
        "SIMD-group divergence",
    ),
    "a loop of different length per lane": BuggyKernel(
        TID + "float s = 0; for (uint i = 0; i < t; i++) s += simd_max(x[t]); y[t] = s;", "SIMD-group divergence"
    ),
    "a shuffle from a lane that does not exist": BuggyKernel(
        TID + "y[t] = simd_shuffle_xor(x[t], 16);",
        "reads lane .* doesn't exist",
        grid=40,
        outputs=[((40,), mx.float32)],
    ),
    "a matrix in part of a SIMD group": BuggyKernel(
        TID + "simdgroup_float8x8 m; simdgroup_load(m, x, 8); y[t] = m.thread_elements()[0];",
        "SIMD group with less than 32 threads",
        grid=40,
        outputs=[((40,), mx.float32)],
    ),
    # What Metal's compiler rejects and clang accepts
    "an unqualified pointer": BuggyKernel(
        GID + "float v = x[g]; float* p = &v; y[g] = *p;", "pointer or reference without an address space"
    ),
    "an unqualified reference": BuggyKernel(
        GID + "float v = x[g]; float& p = v; y[g] = p;", "pointer or reference without an address space"
    ),
    "auto* without an address space": BuggyKernel(GID + "auto* p = x; y[g] = p[g];", r"'auto\* p' needs device"),
    "an unqualified parameter": BuggyKernel(
        GID + "y[g] = f(x, g);",
        "pointer or reference without an address space",
        header="template <typename T> T f(const T* p, int i) { return p[i]; }",
    ),
    "an unqualified pointer behind a macro": BuggyKernel(
        GID + "float v = x[g]; PTR p = &v; y[g] = *p;",
        "pointer or reference without an address space",
        header="#define PTR float*\n",
    ),
    "an unqualified pointer in a cast": BuggyKernel(
        GID + "y[g] = *(const float*)(x + g);", "pointer or reference without an address space"
    ),
    "mixed address spaces": BuggyKernel(
        TID + "threadgroup float a[64]; device float* p = a; p[t] = x[t]; y[t] = x[t];", "'__global float .* '__local"
    ),
    "a device pointer for a threadgroup parameter": BuggyKernel(
        GID + "y[g] = f(x, g);",
        "no matching function",
        header="float f(threadgroup const float* p, int i) { return p[i]; }",
    ),
    "a cast between address spaces": BuggyKernel(
        TID + "threadgroup float a[64]; a[t] = x[t]; y[t] = ((device float*)a)[t];", "address space"
    ),
    "a small input taken for device memory": BuggyKernel(
        GID + "const device float* p = x; y[g] = p[0];", "'const __global float .* 'const __constant", inputs=7
    ),
    "double": BuggyKernel(GID + "double v = x[g]; y[g] = v;", "double"),
    "float assigned to bfloat": BuggyKernel(
        GID + "y[g] = float(x[g]) * 2;", "no implicit conversion from float to bfloat", **BFLOAT
    ),
    "a threadgroup array in a helper function": BuggyKernel(
        TID + "y[t] = f(x[t]);",
        "must be declared in the kernel function",
        header="float f(float v) { threadgroup float a[2]; a[0] = v; return v; }",
    ),
    "an array whose length is not known": BuggyKernel(
        TID + "float a[x_ndim]; a[0] = 0; y[t] = a[0];", "variable length array|constant expression"
    ),
    "a constant without its address space": BuggyKernel(
        GID + "y[g] = x[g] * K;", "constant address space", header="constexpr int K = 3;"
    ),
    "a static member without its address space": BuggyKernel(
        GID + "y[g] = x[g] * S::n;", "constant address space", header="struct S { static constexpr int n = 3; };"
    ),
    "an unqualified pointer that the text does not show": BuggyKernel(
        GID + "float v = x[g]; conditional_t<true, float, int>* p = &v; y[g] = *p;",
        "pointer or reference without an address space",
    ),
    "a float literal for a bfloat": BuggyKernel(
        GID + "y[g] = x[g] > 1 ? x[g] : 0.0f;", "no implicit conversion from float to bfloat", **BFLOAT
    ),
    "a member function without an address space": BuggyKernel(
        GID + "S s = {x[g]}; y[g] = s.twice();",
        "a member function without an address space",
        header="struct S { float v; float twice() const { return 2 * v; } };",
    ),
    "a cast of a vector": BuggyKernel(GID + "int4 i = int4(1); y[g] = ((float4)i).x;", "a vector type T"),
    "a cast of a vector by an alias": BuggyKernel(
        GID + "int4 i = int4(1); y[g] = ((F)i).x;", "a vector type T", header="typedef float4 F;"
    ),
    "a list for a vector": BuggyKernel(
        GID + "float4 v = (float4)(1.0f, 2.0f, 3.0f, 4.0f); y[g] = v.x;", "a vector type T"
    ),
    "a comparison of vectors": BuggyKernel(
        GID + "float4 v = float4(x[g]); y[g] = float4(v < float4(3)).x;",
        "only supported .* where it is converted to bool2",
    ),
    "a negated vector": BuggyKernel(
        GID + "int4 i = int4(1); y[g] = (!i).x;", "only supported .* where it is converted"
    ),
    "a vector of more than 16 bytes in memory": BuggyKernel(
        GID + "*(device long4*)y = long4(g);", "accesses of more than 16 bytes"
    ),
    "a field of more than 16 bytes": BuggyKernel(
        GID + "y[g] = ((const device S*)x)->n;",
        "accesses of more than 16 bytes",
        header="struct S { ulong3 v; int n; };",
    ),
    "half of a vector by OpenCL's name": BuggyKernel(GID + "float4 v = float4(x[g]); y[g] = v.lo.x;", "are OpenCL's"),
    "a function that calls itself": BuggyKernel(
        GID + "y[g] = f(3);", "recursion", header="inline float f(int n) { return n ? n * f(n - 1) : 1.0f; }"
    ),
    "functions that call each other": BuggyKernel(
        GID + "y[g] = f(3);",
        "header:2: recursion",
        header="inline float f(int n);\ninline float g(int n) { return f(n); } float f(int n) { return g(n); }",
    ),
    "member functions that call each other": BuggyKernel(
        GID + "y[g] = S().f(3);",
        "recursion",
        header="""struct S { METAL_FUNC float f(int n) const thread { return n ? g(n - 1) : 1; }
                   METAL_FUNC float g(int n) const thread { return f(n); } };""",
    ),
    "goto": BuggyKernel(GID + "if (g) goto end; y[g] = 1; end: y[g] = x[g];", "'goto' is not in Metal"),
    "a pointer that a function gives back": BuggyKernel(
        GID + "y[g] = f(x)[g];",
        "pointer or reference without an address space",
        header="const float* f(const device float* p) { return p; }",
    ),
    "a lambda": BuggyKernel(GID + "auto f = [](float v) { return v; }; y[g] = f(x[g]);", "a lambda expression"),
    "structured bindings": BuggyKernel(
        GID + "float v[2] = {1, 2}; auto [p, q] = v; y[g] = p + q;", "a structured binding"
    ),
    "an unknown function": BuggyKernel(GID + "y[g] = metal::expm1(x[g]);", "no member named 'expm1'"),
    # Functions that Metal doesn't declare constexpr
    **{
        f"{call} in a constant expression": BuggyKernel(
            GID + f"constexpr int n = {call}; y[g] = n;", "must be initialized by a constant expression"
        )
        for call in (
            "min(1, 2)",
            "max(1, 2)",
            "clamp(1, 2, 3)",
            "abs(-1)",
            "select(1, 2, true)",
            "any(bool2(true))",
            "all(bool2(true))",
            "as_type<int>(1u)",
            "popcount(7)",
            "clz(7)",
            "ctz(7)",
            "int(exp2(2.0f))",
        )
    },
    "max in a static member": BuggyKernel(
        GID + "y[g] = S<3>::n;",
        "must be initialized by a constant expression",
        header="template <int N> struct S { static constant constexpr int n = max(1, N); };",
    ),
    "max in a constexpr function": BuggyKernel(
        GID + "constexpr int n = f(2); y[g] = n;",
        "never produces a constant expression|must be initialized by a constant expression",
        header="constexpr int f(int n) { return max(1, n); }",
    ),
    # Conversions and overloads
    **{
        f"{source} for {target}": BuggyKernel(GID + f"{target} v = {source}; y[g] = v.x;", message)
        for target, source, message in (
            ("float4", "half4(1)", "cannot initialize|incompatible type"),
            ("uint4", "int4(1)", "cannot initialize|incompatible type"),
            ("float4", "float2(1)", "cannot initialize|incompatible type"),
            ("bool4", "float4(1)", "no viable conversion"),
            ("bool4", "int4(1)", "no implicit conversion to bool2"),
        )
    },
    "a vector before ?:": BuggyKernel(
        GID + "int4 i = int4(g); y[g] = (i ? float4(1) : float4(2)).x;", "a vector before \\?:"
    ),
    "half and bfloat": BuggyKernel(
        GID + "half h = 1; y[g] = h + bfloat(x[g]);", "no implicit conversion from bfloat to half"
    ),
    **{
        f"{call} of two types": BuggyKernel(GID + f"y[g] = {call};", f"no matching function for call to '{call[:3]}'")
        for call in ("max(1, g)", "min(x[g], 0)", "max(half(1), x[g])", "min(g, 3l)", "pow(x[g], 2)")
    },
    "an integer for a function of floats": BuggyKernel(GID + "y[g] = exp(2);", "no matching function"),
    # What Metal has, but not of every type
    **{
        f"atomic_{operation} of {kind}": BuggyKernel(
            GID + f"atomic_{operation}_explicit((device atomic_{kind}*)y, {kind}(1), memory_order_relaxed); y[g] = 1;",
            f"Metal has no atomic_{operation}_explicit of this type",
        )
        for operation, kind in (
            ("fetch_add", "ulong"),
            ("store", "ulong"),
            ("fetch_add", "bool"),
            ("fetch_max", "float"),
        )
    },
    "a float atomic in threadgroup memory": BuggyKernel(
        TID + "threadgroup atomic_float a; atomic_fetch_add_explicit(&a, 1.0f, memory_order_relaxed); y[t] = 1;",
        "Metal has no atomic_fetch_add_explicit of this type",
    ),
    "the value of an atomic": BuggyKernel(TID + "threadgroup atomic_int a; y[t] = a.value;", "private member"),
    "a vector of 8": BuggyKernel(GID + "vec<float, 8> v = 1; y[g] = v[0];", "more than four elements"),
    # What MSL leaves out of C++14, and C++17
    **{
        f"{name} as a variable": BuggyKernel(GID + f"int {name} = 1; y[g] = {name};", message)
        for name, message in (
            ("vertex", "'vertex' is a Metal keyword"),
            ("fragment", "Metal keyword"),
            ("ray_data", "Metal keyword"),
            ("kernel", "expected|cannot combine"),
            ("half", "expected|cannot combine"),
            ("thread", "expected"),
            ("device", "expected"),
            ("threadgroup", "expected|has no name"),
        )
    },
    **{
        f"{kind} {value}": BuggyKernel(GID + f"{kind} v = {value}; y[g] = v;", message)
        for kind, value, message in (
            ("long long", "1", "no long long"),
            ("auto", "1ull", "no long long"),
            ("long double", "1", "no long double"),
            ("auto", "1.0L", "no long double"),
            ("wchar_t", "1", "'wchar_t' is not a type in Metal"),
            ("static int", "1", "constant address space"),
            ("thread_local int", "1", "'thread_local' storage class"),
            ("__private float", "1", "'__private' is OpenCL's"),
            ("device float", "1", "address space"),
            ("bool", "noexcept(sin(1.0f))", "the noexcept operator"),
        )
    },
    "a static variable in a function": BuggyKernel(
        GID + "y[g] = f();", "constant address space", header="inline int f() { static int n = 0; return ++n; }"
    ),
    "a pointer to a function": BuggyKernel(
        GID + "float (*p)(float) = f; y[g] = p(x[g]);",
        "pointers to functions are not allowed",
        header="inline float f(float v) { return v; }",
    ),
    "a function as an argument": BuggyKernel(
        GID + "y[g] = apply(f);",
        "pointers to functions are not allowed|no matching function|taking address of function",
        header="inline float f(float v) { return v; } template <typename F> float apply(F f) { return f(1); }",
    ),
    **{
        text: BuggyKernel(GID + f"{text}; y[g] = 1;", message)
        for text, message in (
            ("throw 1", "exceptions"),
            ("try { y[0] = 1; } catch (...) {}", "exceptions"),
            ("thread float* p = new float", "'new' is not in Metal"),
            ("delete (thread float*)nullptr", "delete"),
            ('asm("nop")', "'asm' is not in Metal"),
            ("bool b = &typeid(float)", "typeid"),
        )
    },
    "a virtual function": BuggyKernel(
        GID + "S s; y[g] = s.f();",
        "'virtual' is not in Metal",
        header="struct S { virtual float f() thread { return 1; } };",
    ),
    "dynamic_cast": BuggyKernel(
        GID + "B b; y[g] = dynamic_cast<thread A*>(&b) != nullptr;",
        "dynamic_cast",
        header="struct A { int n; }; struct B : A {};",
    ),
    "a class template without its arguments": BuggyKernel(
        GID + "Pair p(x[g]); y[g] = p.v;",
        "needs C\\+\\+17",
        header="template <typename T> struct Pair { T v; Pair(T v_) : v(v_) {} };",
    ),
    "template <auto>": BuggyKernel(
        GID + "y[g] = f<3>();", "needs C\\+\\+17", header="template <auto N> float f() { return N; }"
    ),
    # Limits
    "more than 32 KiB": BuggyKernel(
        TID + "threadgroup float a[8193]; a[t] = x[t]; y[t] = x[t];", "32784 bytes .* 32768"
    ),
    "an empty grid": BuggyKernel(GID + "y[g] = x[g];", "positive", grid=0),
    "a negative template argument": BuggyKernel(GID + "y[g] = x[g] * N;", "is not an identifier", template={"N": -1}),
    "a signature that MLX closes too early": BuggyKernel(
        "y[0] = z[0] = x_shape[0];", "invalid signature", outputs=[((1,), mx.float32)] * 2, results=("y", "z")
    ),
    # What would end the process
    "a division by zero": BuggyKernel(TID + "int n = int(x[0]); y[t] = 5 / n;", "division by zero"),
    "too many local variables": BuggyKernel(
        TID + "float a[1 << 17]; for (int i = 0; i < 1 << 17; i++) a[i] = x[t]; y[t] = a[int(x[3]) << 10];",
        "stack overflow",
    ),
}
