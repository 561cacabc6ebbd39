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
    "a threadgroup atomic read without a barrier": BuggyKernel(
        TID + ADD + "atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed); y[t] = *(threadgroup uint*)&a;",
        r"data race: (read|atomic write) of a\[0\] and (atomic write|read) by",
    ),
    "an uninitialized threadgroup atomic": BuggyKernel(
        TID + "threadgroup atomic_uint a; atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed); y[t] = 1;",
        r"uninitialized atomic read of a\[0\]",
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
    "simd_broadcast of a lane that varies": BuggyKernel(
        TID + "y[t] = simd_broadcast(x[t], ushort(31 - t % 32));", "simd_broadcast with a different argument"
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
        TID + "simdgroup_float8x8 m; simdgroup_multiply_accumulate(m, m, m, m); y[t] = m.thread_elements()[0];",
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
    "a list for a vector": BuggyKernel(
        GID + "float4 v = (float4)(1.0f, 2.0f, 3.0f, 4.0f); y[g] = v.x;", "a vector type T"
    ),
    "a comparison of vectors": BuggyKernel(
        GID + "float4 v = float4(x[g]); y[g] = (v < float4(3)).x;", "comparison of vectors is not supported"
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
    # Functions that Metal doesn't declare constexpr
    **{
        f"{call} in a constant expression": BuggyKernel(
            GID + f"constexpr int n = {call}; y[g] = n;", "must be initialized by a constant expression"
        )
        for call in (
            "min(1, 2)",
            "clamp(1, 2, 3)",
            "as_type<int>(1u)",
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
        for call in ("max(1, g)", "min(x[g], 0)", "max(half(1), x[g])", "min(g, 3l)")
    },
    "an integer for a function of floats": BuggyKernel(GID + "y[g] = exp(2);", "no matching function"),
    "the value of an atomic": BuggyKernel(TID + "threadgroup atomic_uint a; y[t] = a.value;", "private member"),
    "a vector of 8": BuggyKernel(GID + "vec<float, 8> v = 1; y[g] = v[0];", "more than four elements"),
    # What MSL leaves out of C++14, and C++17
    **{
        f"{name} as a variable": BuggyKernel(GID + f"int {name} = 1; y[g] = {name};", message)
        for name, message in (
            ("vertex", "'vertex' is a Metal keyword"),
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
            ("static int", "1", "constant address space"),
            ("__private float", "1", "'__private' is OpenCL's"),
            ("device float", "1", "address space"),
            ("bool", "noexcept(sin(1.0f))", "the noexcept operator"),
        )
    },
    "a static variable in a function": BuggyKernel(
        GID + "y[g] = f();", "constant address space", header="inline int f() { static int n = 0; return ++n; }"
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
