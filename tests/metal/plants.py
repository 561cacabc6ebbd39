"""Small kernels with one bug each, and what the harness must say of it.

A kernel gets x, 64 floats 0 to 63, writes y, 64 floats, and runs 64 threads in one threadgroup unless the plant says
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxlm.backend.mlx import mx

TID = "uint t = thread_index_in_threadgroup;\n"
GID = "uint g = thread_position_in_grid.x;\n"
# Any function that clang would not inline by itself.
LONG = "inline float big(float v) {" + " v = sin(v) * cos(v) + tanh(v);" * 60 + " return simd_sum(v); }"
BFLOAT = {"dtype": mx.bfloat16, "outputs": [((64,), mx.bfloat16)]}


@dataclass
class Plant:
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

PLANTS = {
    # Memory order within a threadgroup
    "missing barrier, read after write": Plant(REVERSED.format(""), r"a\[\d+\] is read before|race: a\[\d+\] is read"),
    "missing barrier, write after read": Plant(
        TID
        + """threadgroup float a[64];
        a[t] = x[t];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float other = a[(t + 40) % 64];
        a[t] = 2 * other;
        y[t] = a[t];""",
        r"race: a\[\d+\] is (written while|read while)",
    ),
    "missing barrier, write after write": Plant(
        TID + "threadgroup float a[32]; a[t % 32] = x[t]; y[t] = x[t];", r"race: a\[\d+\] is written while thread"
    ),
    "a race of equal values": Plant(
        TID + "threadgroup float a[1]; a[0] = 1.0f; y[t] = 1.0f;", r"race: a\[0\] is written while thread"
    ),
    "a race within one SIMD group": Plant(
        TID + "threadgroup float a[64]; a[t] = x[t]; y[t] = a[t ^ 1];",
        r"a\[\d+\] is read before|race: a\[\d+\] is read",
    ),
    "simd_sum taken for a memory barrier": Plant(
        TID + "threadgroup float a[64]; a[t] = x[t]; y[t] = simd_sum(x[t]) + a[t ^ 1];", r"race: a\[\d+\] is read"
    ),
    "simdgroup_barrier across SIMD groups": Plant(
        REVERSED.format("simdgroup_barrier(mem_flags::mem_threadgroup);"),
        r"a\[\d+\] is read before|race: a\[\d+\] is read",
    ),
    "barrier with mem_none": Plant(
        REVERSED.format("threadgroup_barrier(mem_flags::mem_none);"), r"race: a\[\d+\] is read while thread"
    ),
    "simdgroup_barrier with the flag of the other memory": Plant(
        TID + "threadgroup float a[64]; a[t] = x[t]; simdgroup_barrier(mem_flags::mem_device); y[t] = a[t ^ 1];",
        r"race: a\[\d+\] is read while thread",
    ),
    "device memory behind a threadgroup flag": Plant(
        TID + "y[t] = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); float z = y[63 - t]; if (z < 0) y[t] = z;",
        r"race: y\[\d+\] is read while thread",
    ),
    "simdgroup_store without a barrier": Plant(
        TID
        + """threadgroup float a[64];
        simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        if (simdgroup_index_in_threadgroup == 0) simdgroup_store(m, a, 8);
        y[t] = t < 32 ? a[t] : 0.0f;""",
        r"race: a\[\d+\] is read while thread|a\[\d+\] is read before",
    ),
    # Between threadgroups
    "two threadgroups write one address": Plant(
        TID + "y[t] = x[t]; y[63 - t] = x[t];", "two threadgroups touch", threadgroup=32
    ),
    "a threadgroup reads what another writes": Plant(
        GID + "y[g] = x[g]; float z = y[(g + 32) % 64]; if (z < 0) y[g] = z;",
        r"two threadgroups touch y|y\[\d+\] is read before",
        threadgroup=32,
    ),
    "a threadgroup reads the initial value of what another writes": Plant(
        GID + "float z = y[(g + 32) % 64]; y[g] = x[g] + z;", "two threadgroups touch y", threadgroup=32, init_value=0
    ),
    "two threadgroups add to an initialized output": Plant(
        GID + "y[g % 8] += x[g];", "two threadgroups touch y|race: y", threadgroup=8, init_value=0
    ),
    "a race on an initialized output": Plant(GID + "y[g % 8] += x[g];", r"race: y\[\d\]", init_value=0),
    # Bounds
    "read one past the end": Plant(GID + "y[g] = x[g + 1];", r"out of bounds: read of 4 bytes at x\[64\]"),
    "read one before the start": Plant(GID + "y[g] = x[int(g) - 1];", r"out of bounds: read of 4 bytes at x\[-1\]"),
    "write one past the end": Plant(GID + "y[g + 1] = x[g];", r"out of bounds: write of 4 bytes at y\[64\]"),
    "write one before the start": Plant(GID + "y[int(g) - 1] = x[g];", r"out of bounds: write of 4 bytes at y\[-1\]"),
    "a vector half outside": Plant(
        TID + "threadgroup float a[6]; if (t < 6) a[t] = 0; threadgroup_barrier(mem_flags::mem_threadgroup);"
        "y[t] = reinterpret_cast<threadgroup float4*>(a)[1].x;",
        r"out of bounds: read of \d+ bytes at a\[4\]",
    ),
    "a vector at an address that is no multiple": Plant(
        TID + "threadgroup float a[8]; if (t < 8) a[t] = 0; threadgroup_barrier(mem_flags::mem_threadgroup);"
        "y[t] = dot(reinterpret_cast<threadgroup float4*>(a + 1)[0], float4(1));",
        "misaligned read: 16 bytes",
    ),
    "an unsigned index below zero": Plant(GID + "y[g] = x[g - 1];", "outside every buffer|out of bounds"),
    "off the end of a threadgroup array": Plant(
        TID + "threadgroup float a[64], b[64]; threadgroup float* p = a; p[t + 1] = x[t]; b[t] = 0; y[t] = x[t];",
        r"out of bounds: write of 4 bytes at a\[64\]",
    ),
    "before the start of a threadgroup array": Plant(
        TID + "threadgroup float a[64], b[64]; threadgroup float* p = b; p[int(t) - 1] = x[t]; a[t] = 0; y[t] = x[t];",
        r"out of bounds: write of 4 bytes at b\[-1\]",
    ),
    "past the end of a small constant input": Plant(
        GID + "y[g] = x[7];", r"out of bounds: read of 4 bytes at x\[7\]", inputs=7
    ),
    "past the end of a shape": Plant(GID + "y[g] = x[g] + x_shape[1];", r"out of bounds: .* x_shape\[1\]"),
    "half of an element": Plant(
        GID + "reinterpret_cast<device half*>(y)[2 * g] = 1; y[g] = x[g];", "writes part of an element of y"
    ),
    "past the end of an array of the thread": Plant(
        TID + "float v[4] = {1, 2, 3, 4}; v[t % 6] += 1; y[t] = v[t % 4];", "an index outside an array of the kernel's"
    ),
    "past the end of a vector": Plant(
        TID + "float4 v = float4(x[t]); v[t % 5] = 1; y[t] = v.x;", "an index outside an array of the kernel's"
    ),
    "past the inner extent of a threadgroup array": Plant(
        TID + "threadgroup float a[4][16]; a[0][t] = x[t]; y[t] = x[t];", "an index outside an array of the kernel's"
    ),
    "a small constant input read as a vector": Plant(
        TID + "y[t] = dot(reinterpret_cast<const constant float4*>(x)[0], float4(1));", "misaligned read", inputs=4
    ),
    # Initialisation
    "threadgroup memory read before it is written": Plant(
        TID + "threadgroup float a[64]; y[t] = a[t];", r"a\[\d+\] is read before it is written in this threadgroup"
    ),
    "threadgroup memory of the group before": Plant(
        TID + "threadgroup float a[32]; if (threadgroup_position_in_grid.x == 1) a[t] = x[t];"
        "y[thread_position_in_grid.x] = a[t];",
        r"a\[\d+\] is read before it is written in this threadgroup",
        threadgroup=32,
    ),
    "an output read before it is written": Plant(GID + "y[g] += x[g];", r"y\[\d+\] is read before it is written"),
    "an output not written to its end": Plant(GID + "if (g < 63) y[g] = x[g];", r"no thread writes y\[63\]"),
    "a grid that is too small": Plant(GID + "y[g] = x[g];", r"no thread writes y\[48\]", grid=48),
    # Writes to what is not the kernel's
    "a write to an input": Plant(GID + "x[g] = 1; y[g] = 1;", "read-only variable is not assignable"),
    "a write to an input behind a cast": Plant(
        GID + "const_cast<device float*>(x)[g] = 1; y[g] = 1;", "write to the input x"
    ),
    # Divergence
    "a barrier that half of the threads reach": Plant(
        TID + "if (t < 32) threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = x[t];",
        "divergent threadgroup_barrier: thread .* has returned",
    ),
    "a return before a barrier": Plant(
        TID + "y[t] = x[t]; if (t == 5) return; threadgroup_barrier(mem_flags::mem_threadgroup);",
        "divergent threadgroup_barrier: thread .*, thread 5 has returned",
    ),
    "two barriers in two branches": Plant(
        TID
        + """y[t] = x[t];
        if (t < 32) threadgroup_barrier(mem_flags::mem_threadgroup);
        else threadgroup_barrier(mem_flags::mem_device);""",
        "divergent threadgroup_barrier: .* elsewhere",
    ),
    "two equal barriers in two branches": Plant(
        TID
        + """if (t < 32) { y[t] = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = 1; }
        else { y[t] = 2; threadgroup_barrier(mem_flags::mem_threadgroup); y[t] = x[t]; }""",
        "divergent threadgroup_barrier: .* elsewhere",
    ),
    "simd_sum that a lane skips": Plant(
        TID + "y[t] = x[t]; if (t != 7) y[t] = simd_sum(x[t]);", "divergent SIMD collective: .* thread 7 has returned"
    ),
    "simd_sum in both branches": Plant(
        TID + "if (t % 2) y[t] = simd_sum(x[t]); else y[t] = 2 * simd_sum(x[t]) + 1;",
        "divergent SIMD collective: .* elsewhere",
    ),
    "simd_sum of the same text in both branches": Plant(
        TID + "float r; if (t % 2) r = simd_sum(x[t]); else r = simd_sum(x[63 - t]); y[t] = r;",
        "divergent SIMD collective: .* elsewhere",
    ),
    "simd_sum in two calls of a long helper": Plant(
        TID + "y[t] = t % 2 ? big(x[t]) : big(2 * x[t]) + 1;", "divergent SIMD collective: .* elsewhere", header=LONG
    ),
    "a barrier in two calls of a helper": Plant(
        TID + "threadgroup float a[64]; if (t < 32) put(a, t, x[t]); else put(a, t, 2 * x[t]); y[t] = a[63 - t];",
        "divergent threadgroup_barrier: .* elsewhere",
        header="""inline void put(threadgroup float* a, uint t, float v) {
            a[t] = v; threadgroup_barrier(mem_flags::mem_threadgroup); }""",
    ),
    "barriers at the end of two branches": Plant(
        TID
        + """if (t < 32) { y[t] = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); }
        else { y[t] = 2 * x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); }""",
        "divergent threadgroup_barrier: .* elsewhere",
    ),
    "simd_broadcast of a lane that varies": Plant(
        TID + "y[t] = simd_broadcast(x[t], ushort(31 - t % 32));", "simd_broadcast with another argument"
    ),
    "a shuffle against a barrier": Plant(
        TID + "y[t] = x[t]; if (t < 16) y[t] = simd_shuffle_xor(x[t], 1);"
        "else threadgroup_barrier(mem_flags::mem_threadgroup);",
        "divergent SIMD collective",
    ),
    "a loop of different length per lane": Plant(
        TID + "float s = 0; for (uint i = 0; i < t; i++) s += simd_max(x[t]); y[t] = s;", "divergent SIMD collective"
    ),
    "a shuffle from a lane that does not exist": Plant(
        TID + "y[t] = simd_shuffle_xor(x[t], 16);",
        "reads lane .* does not exist",
        grid=40,
        outputs=[((40,), mx.float32)],
    ),
    "a matrix in part of a SIMD group": Plant(
        TID + "simdgroup_float8x8 m; simdgroup_load(m, x, 8); y[t] = m.thread_elements()[0];",
        "SIMD group of less than 32 threads",
        grid=40,
        outputs=[((40,), mx.float32)],
    ),
    # What Apple's compiler refuses and clang alone would take
    "an unqualified pointer": Plant(
        GID + "float v = x[g]; float* p = &v; y[g] = *p;", "pointer or reference without an address space"
    ),
    "an unqualified reference": Plant(
        GID + "float v = x[g]; float& p = v; y[g] = p;", "pointer or reference without an address space"
    ),
    "auto* without an address space": Plant(GID + "auto* p = x; y[g] = p[g];", r"'auto\* p' needs device"),
    "an unqualified parameter": Plant(
        GID + "y[g] = f(x, g);",
        "pointer or reference without an address space",
        header="template <typename T> T f(const T* p, int i) { return p[i]; }",
    ),
    "an unqualified pointer behind a macro": Plant(
        GID + "float v = x[g]; PTR p = &v; y[g] = *p;",
        "pointer or reference without an address space",
        header="#define PTR float*\n",
    ),
    "an unqualified pointer in a cast": Plant(
        GID + "y[g] = *(const float*)(x + g);", "pointer or reference without an address space"
    ),
    "mixed address spaces": Plant(
        TID + "threadgroup float a[64]; device float* p = a; p[t] = x[t]; y[t] = x[t];", "'__global float .* '__local"
    ),
    "a device pointer for a threadgroup parameter": Plant(
        GID + "y[g] = f(x, g);",
        "no matching function",
        header="float f(threadgroup const float* p, int i) { return p[i]; }",
    ),
    "a cast between address spaces": Plant(
        TID + "threadgroup float a[64]; a[t] = x[t]; y[t] = ((device float*)a)[t];", "address space"
    ),
    "a small input taken for device memory": Plant(
        GID + "const device float* p = x; y[g] = p[0];", "'const __global float .* 'const __constant", inputs=7
    ),
    "double": Plant(GID + "double v = x[g]; y[g] = v;", "double"),
    "float assigned to bfloat": Plant(
        GID + "y[g] = float(x[g]) * 2;",
        "no implicit conversion from float to bfloat",
        **BFLOAT,
    ),
    "a threadgroup array in a nested block": Plant(
        TID + "if (x[0] == 0) { threadgroup float a[64]; a[t] = x[t]; } y[t] = x[t];", "outermost level"
    ),
    "a threadgroup array in a helper function": Plant(
        TID + "y[t] = f(x[t]);",
        "outermost level",
        header="float f(float v) { threadgroup float a[2]; a[0] = v; return v; }",
    ),
    "an initialised threadgroup array": Plant(TID + "threadgroup float a[1] = {0}; y[t] = x[t];", "initialised"),
    "an array whose length is not known": Plant(
        TID + "float a[x_ndim]; a[0] = 0; y[t] = a[0];", "variable length array|constant expression"
    ),
    "a constant without its address space": Plant(
        GID + "y[g] = x[g] * K;", "constant address space", header="constexpr int K = 3;"
    ),
    "a static member without its address space": Plant(
        GID + "y[g] = x[g] * S::n;", "constant address space", header="struct S { static constexpr int n = 3; };"
    ),
    "an unqualified pointer that the text does not show": Plant(
        GID + "float v = x[g]; conditional_t<true, float, int>* p = &v; y[g] = *p;",
        "pointer or reference without an address space",
    ),
    "a float literal for a bfloat": Plant(
        GID + "y[g] = x[g] > 1 ? x[g] : 0.0f;",
        "no implicit conversion from float to bfloat",
        **BFLOAT,
    ),
    "a member function that does not say where its object lies": Plant(
        GID + "S s = {x[g]}; y[g] = s.twice();",
        "where its object lies",
        header="struct S { float v; float twice() const { return 2 * v; } };",
    ),
    "a cast of a vector": Plant(GID + "int4 i = int4(1); y[g] = ((float4)i).x;", "a vector T"),
    "a cast of a vector by an alias": Plant(
        GID + "int4 i = int4(1); y[g] = ((F)i).x;", "a vector T", header="typedef float4 F;"
    ),
    "a list for a vector": Plant(GID + "float4 v = (float4)(1.0f, 2.0f, 3.0f, 4.0f); y[g] = v.x;", "a vector T"),
    "a comparison of vectors": Plant(
        GID + "float4 v = float4(x[g]); y[g] = float4(v < float4(3)).x;", "no vectors of bool"
    ),
    "a negated vector": Plant(GID + "int4 i = int4(1); y[g] = (!i).x;", "no vectors of bool"),
    "half of a vector by OpenCL's name": Plant(GID + "float4 v = float4(x[g]); y[g] = v.lo.x;", "OpenCL's names"),
    "a function that calls itself": Plant(
        GID + "y[g] = f(3);", "no recursion", header="inline float f(int n) { return n ? n * f(n - 1) : 1.0f; }"
    ),
    "goto": Plant(GID + "if (g) goto end; y[g] = 1; end: y[g] = x[g];", "no goto"),
    "a pointer that a function gives back": Plant(
        GID + "y[g] = f(x)[g];",
        "pointer or reference without an address space",
        header="const float* f(const device float* p) { return p; }",
    ),
    "a lambda": Plant(GID + "auto f = [](float v) { return v; }; y[g] = f(x[g]);", "no lambdas"),
    "structured bindings": Plant(GID + "float v[2] = {1, 2}; auto [p, q] = v; y[g] = p + q;", "no structured bindings"),
    "an unknown function": Plant(GID + "y[g] = metal::expm1(x[g]);", "no member named 'expm1'"),
    "atomics": Plant(GID + "y[g] = x[g]; device atomic_float* p = (device atomic_float*)y;", "has no atomics"),
    # Limits of a launch
    "more than 32 KiB": Plant(TID + "threadgroup float a[8193]; a[t] = x[t]; y[t] = x[t];", "32784 bytes .* 32768"),
    "an empty grid": Plant(GID + "y[g] = x[g];", "positive", grid=0),
    "a negative template argument": Plant(GID + "y[g] = x[g] * N;", "can't parse", template={"N": -1}),
    "a signature that MLX closes too early": Plant(
        "y[0] = z[0] = x_shape[0];",
        "closes the signature too early",
        outputs=[((1,), mx.float32)] * 2,
        results=("y", "z"),
    ),
    # What would stop the whole test run
    "a division by zero": Plant(TID + "int n = int(x[0]); y[t] = 5 / n;", "division by zero"),
    "too many local variables": Plant(
        TID + "float a[1 << 17]; for (int i = 0; i < 1 << 17; i++) a[i] = x[t]; y[t] = a[int(x[3]) << 10];",
        "out of stack",
    ),
}
