// Barriers, SIMD-group functions and SIMD-group matrices. Included by metal_stdlib.h.
#pragma once
#include "runtime/shared.h"

namespace hx {
// Defined in runtime/collectives.h.
extern "C" {
void hx_threadgroup_barrier(int flags);
void hx_simdgroup_barrier(int flags);
float hx_simd_reduce_float(int what, float value);
long hx_simd_reduce_long(int what, long value);
ulong hx_simd_shuffle(int what, ulong bits, uint argument);
__attribute__((const)) uint hx_lane();
metal::float2 hx_multiply(metal::float2 a, metal::float2 b, metal::float2 c);
ulong hx_buffer(int index);
uint hx_attribute(int index, int axis);
ulong hx_threadgroup_memory(int site, __constant const char* name, ulong bytes, ulong unit);
}

METAL_FUNC metal::uint3 attribute(int index) {
  return metal::uint3{hx_attribute(index, 0), hx_attribute(index, 1), hx_attribute(index, 2)};
}

template <typename T>
METAL_FUNC T reduce(int what, T value) {
  static_assert(sizeof(element<T>) <= 4, "Metal has no SIMD reduction for 64 bits");
  if constexpr (is_vector<T>) {
    for (int i = 0; i < shape<T>::size; i++) value[i] = reduce(what, element<T>(value[i]));
    return value;
  } else if constexpr (is_float<T>) {
    return T(hx_simd_reduce_float(what, float(value)));
  } else {
    return T(hx_simd_reduce_long(what, long(value)));
  }
}

template <typename T>
METAL_FUNC T exchange(int what, T value, uint argument) {
  if constexpr (is_vector<T>) {
    for (int i = 0; i < shape<T>::size; i++) value[i] = exchange(what, element<T>(value[i]), argument);
    return value;
  } else if constexpr (sizeof(T) == 1) {
    return __builtin_bit_cast(T, uchar(hx_simd_shuffle(what, __builtin_bit_cast(uchar, value), argument)));
  } else if constexpr (sizeof(T) == 2) {
    return __builtin_bit_cast(T, ushort(hx_simd_shuffle(what, __builtin_bit_cast(ushort, value), argument)));
  } else {
    static_assert(sizeof(T) == 4, "Metal shuffles at most 32 bits");
    return __builtin_bit_cast(T, uint(hx_simd_shuffle(what, __builtin_bit_cast(uint, value), argument)));
  }
}
}  // namespace hx

namespace metal {

enum class mem_flags {
  mem_none = hx::no_fence,
  mem_device = hx::device_fence,
  mem_threadgroup = hx::threadgroup_fence,
};
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
METAL_FUNC void threadgroup_barrier(mem_flags flags) { hx::hx_threadgroup_barrier(int(flags)); }
METAL_FUNC void simdgroup_barrier(mem_flags flags) { hx::hx_simdgroup_barrier(int(flags)); }

template <typename T>
METAL_FUNC hx::if_number<T> simd_sum(T x) {
  return hx::reduce(hx::sum, x);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_min(T x) {
  return hx::reduce(hx::minimum, x);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_max(T x) {
  return hx::reduce(hx::maximum, x);
}

template <typename T>
METAL_FUNC hx::if_number<T> simd_shuffle(T x, ushort lane) {
  return hx::exchange(hx::to_lane, x, lane);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_broadcast(T x, ushort lane) {
  return hx::exchange(hx::broadcast, x, lane);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_shuffle_xor(T x, ushort mask) {
  return hx::exchange(hx::exclusive_or, x, mask);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_shuffle_down(T x, ushort delta) {
  return hx::exchange(hx::down, x, delta);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_shuffle_up(T x, ushort delta) {
  return hx::exchange(hx::up, x, delta);
}

template <typename T>
METAL_FUNC hx::if_number<T> simd_prefix_inclusive_sum(T x) {
  for (ushort delta = 1; delta < 32; delta *= 2) {
    T below = simd_shuffle_up(x, delta);
    if (hx::hx_lane() >= delta) x += below;
  }
  return x;
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_prefix_exclusive_sum(T x) {
  T below = simd_shuffle_up(simd_prefix_inclusive_sum(x), 1);
  return hx::hx_lane() ? below : T(0);
}

// Each of the 32 lanes holds two adjacent elements of a row. Metal doesn't specify the layout; this is the one that
// MLX's kernels assume.
template <typename T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 matrices only");
  static_assert(hx::is_float<T> && !hx::is_vector<T>, "a matrix of float, half or bfloat");
  vec<T, 2> elements;

  METAL_FUNC simdgroup_matrix() __private {}
  METAL_FUNC __private vec<T, 2>& thread_elements() __private { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

// d = a b + c, computed in float and rounded once to d's type.
template <typename D, typename A, typename B, typename C>
METAL_FUNC void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  float2 r = hx::hx_multiply(hx::make<float2>(a.elements), hx::make<float2>(b.elements), hx::make<float2>(c.elements));
  d.elements = hx::make<vec<D, 2>>(r);
}

}  // namespace metal
