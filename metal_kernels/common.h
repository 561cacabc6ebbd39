// Functions for all kernels of this folder. MLX inserts its own utilities before this text (metal_stdlib, the types
// bfloat16_t and float16_t) and a kernel's generated function after it.

constant constexpr int SIMD = 32;  // threads of a SIMD group on every Apple GPU

#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLLED _Pragma("clang loop unroll(disable)")

// ---- Sums over a threadgroup ----

// Returns the sum of `value` over all threads of a threadgroup of whole SIMD groups, always in the same order.
// All threads must call it. `scratch` holds one value per SIMD group and can be reused immediately.
METAL_FUNC float threadgroup_sum(float value, threadgroup float* scratch, uint simdgroup, uint simdgroups, uint lane) {
  value = simd_sum(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // until the sums of the previous call have been read
  if (lane == 0) {
    scratch[simdgroup] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? scratch[lane] : 0.0f);
}

// Returns two sums with the barriers of one.
METAL_FUNC float2
threadgroup_sum(float2 value, threadgroup float2* scratch, uint simdgroup, uint simdgroups, uint lane) {
  value = float2(simd_sum(value.x), simd_sum(value.y));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    scratch[simdgroup] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  value = lane < simdgroups ? scratch[lane] : float2(0.0f);
  return float2(simd_sum(value.x), simd_sum(value.y));
}

// ---- Runs of four values ----

// Loads four consecutive values as float32; those from index `left` on are 0. `P` is a pointer in any address space.
template <typename P>
METAL_FUNC float4 load4(P from, int left) {
  if (left >= 4) {
    return float4(float(from[0]), float(from[1]), float(from[2]), float(from[3]));
  }
  return float4(
      left > 0 ? float(from[0]) : 0.0f, left > 1 ? float(from[1]) : 0.0f, left > 2 ? float(from[2]) : 0.0f, 0.0f);
}

// Rounds four values to T and returns them as float32.
template <typename T>
METAL_FUNC float4 round4(float4 values) {
  return float4(float(T(values.x)), float(T(values.y)), float(T(values.z)), float(T(values.w)));
}

// Stores the first `left` of four consecutive values, rounded to T.
template <typename T>
METAL_FUNC void store4(device T* to, float4 values, int left) {
  if (left >= 4) {
    to[0] = T(values.x);
    to[1] = T(values.y);
    to[2] = T(values.z);
    to[3] = T(values.w);
  } else {
    if (left > 0) to[0] = T(values.x);
    if (left > 1) to[1] = T(values.y);
    if (left > 2) to[2] = T(values.z);
  }
}
