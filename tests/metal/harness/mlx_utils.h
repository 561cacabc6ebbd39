// The utilities that MLX puts before the source of a custom kernel, except complex numbers. Included by metal_stdlib.h.
#pragma once

template <typename T>
struct Limits {
  static __constant constexpr T finite_max = metal::numeric_limits<T>::max();
  static __constant constexpr T finite_min = metal::numeric_limits<T>::lowest();
  static __constant constexpr T max = hx::is_float<T> ? hx::infinity_or<T>() : finite_max;
  static __constant constexpr T min = hx::is_float<T> ? T(-hx::infinity_or<T>()) : finite_min;
};
template <>
struct Limits<bool> {
  static __constant constexpr bool max = true, min = false;
};

// Offsets of an element of an array with these strides; the last axis varies fastest.
template <typename Index = int64_t>
METAL_FUNC Index elem_to_loc(Index element, __constant const int* shape, __constant const int64_t* strides, int ndim) {
  Index offset = 0;
  for (int axis = ndim - 1; axis >= 0; axis--) {
    offset += element % shape[axis] * Index(strides[axis]);
    element /= shape[axis];
  }
  return offset;
}
template <typename Index = int64_t>
METAL_FUNC Index elem_to_loc(metal::uint3 element, __constant const int* shape, __constant const int64_t* strides,
                             int ndim) {
  const Index last = element.x * Index(strides[ndim - 1]) + element.y * Index(strides[ndim - 2]);
  return last + elem_to_loc<Index>(Index(element.z), shape, strides, ndim - 2);
}
template <typename Index = int64_t>
METAL_FUNC Index elem_to_loc_1(uint element, __constant const int64_t& stride) {
  return element * Index(stride);
}
template <typename Index = int64_t>
METAL_FUNC Index elem_to_loc_2(metal::uint2 element, __constant const int64_t* strides) {
  return element.x * Index(strides[1]) + element.y * Index(strides[0]);
}
template <typename Index = int64_t>
METAL_FUNC Index elem_to_loc_3(metal::uint3 element, __constant const int64_t* strides) {
  return element.x * Index(strides[2]) + element.y * Index(strides[1]) + element.z * Index(strides[0]);
}

template <typename T, typename U>
METAL_FUNC T ceildiv(T n, U divisor) {
  return (n + divisor - 1) / divisor;
}
template <typename T>
METAL_FUNC hx::if_float<T> log1p(T x) {
  return T(__builtin_log1pf(float(x)));
}
template <typename To, typename From>
METAL_FUNC To cast_to(From x) {
  return static_cast<To>(x);
}

// Metal's shuffles are for at most 32 bits, and not for bool.
#define HX_SHUFFLE(name, argument)                                                        \
  METAL_FUNC int64_t name(int64_t x, ushort argument) {                                   \
    return metal::as_type<int64_t>(metal::name(metal::as_type<metal::uint2>(x), argument)); \
  }                                                                                       \
  METAL_FUNC uint64_t name(uint64_t x, ushort argument) {                                 \
    return metal::as_type<uint64_t>(metal::name(metal::as_type<metal::uint2>(x), argument)); \
  }                                                                                       \
  METAL_FUNC bool name(bool x, ushort argument) { return metal::name(uint(x), argument); }
HX_SHUFFLE(simd_shuffle, lane)
HX_SHUFFLE(simd_shuffle_up, delta)
HX_SHUFFLE(simd_shuffle_down, delta)
#undef HX_SHUFFLE
