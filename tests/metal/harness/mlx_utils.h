// The utilities that MLX puts before the source of a custom kernel.
#pragma once

template <typename T>
struct complex_t {
  using value_type = T;
  T real, imag;

  constexpr complex_t(T real = T(0), T imag = T(0)) : real(real), imag(imag) {}
  constexpr complex_t(metal::vec<T, 2> v) : real(v.x), imag(v.y) {}
  template <typename U, typename = metal::enable_if_t<metal::is_arithmetic_v<U>>>
  constexpr complex_t(U x) : real(T(x)), imag(T(0)) {}
  template <typename U>
  constexpr complex_t(complex_t<U> z) : real(T(z.real)), imag(T(z.imag)) {}
  constexpr complex_t(const complex_t&) = default;
  constexpr complex_t(const __constant complex_t& z) : real(z.real), imag(z.imag) {}
  constexpr complex_t& operator=(const complex_t&) = default;
  constexpr complex_t& operator=(const __constant complex_t& z) { return *this = complex_t(z); }

  constexpr operator metal::vec<T, 2>() const { return {real, imag}; }
  template <typename U, typename = metal::enable_if_t<metal::is_arithmetic_v<U>>>
  constexpr operator U() const { return U(real); }
  constexpr complex_t& operator+=(complex_t z) {
    real += z.real, imag += z.imag;
    return *this;
  }
};
using complex64_t = complex_t<float>;
using complex32_t = complex_t<half>;

template <typename T>
constexpr complex_t<T> operator-(complex_t<T> z) { return {-z.real, -z.imag}; }
// Like MLX, * is for two complex numbers, and / if the second one is complex.
#define HX_COMPLEX(op, real_part, imaginary_part)                                  \
  template <typename T>                                                            \
  constexpr complex_t<T> operator op(complex_t<T> a, complex_t<T> b) {             \
    return {T(real_part), T(imaginary_part)};                                      \
  }
HX_COMPLEX(+, a.real + b.real, a.imag + b.imag)
HX_COMPLEX(-, a.real - b.real, a.imag - b.imag)
HX_COMPLEX(*, a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
HX_COMPLEX(/, (a.real * b.real + a.imag * b.imag) / (b.real * b.real + b.imag * b.imag),
           (a.imag * b.real - a.real * b.imag) / (b.real * b.real + b.imag * b.imag))
#undef HX_COMPLEX
#define HX_COMPLEX(op)                                                             \
  template <typename T, typename U, typename = metal::enable_if_t<metal::is_arithmetic_v<U>>> \
  constexpr complex_t<T> operator op(U a, complex_t<T> b) { return complex_t<T>(a) op b; }
HX_COMPLEX(+) HX_COMPLEX(-) HX_COMPLEX(/)
#undef HX_COMPLEX
#define HX_COMPLEX(op)                                                             \
  template <typename T, typename U, typename = metal::enable_if_t<metal::is_arithmetic_v<U>>> \
  constexpr complex_t<T> operator op(complex_t<T> a, U b) { return a op complex_t<T>(b); }
HX_COMPLEX(+) HX_COMPLEX(-)
#undef HX_COMPLEX
// The order is that of the real parts, then of the imaginary parts.
#define HX_COMPLEX(op, expression)                                                 \
  template <typename T>                                                            \
  constexpr bool operator op(complex_t<T> a, complex_t<T> b) { return expression; }
HX_COMPLEX(==, a.real == b.real && a.imag == b.imag)
HX_COMPLEX(<, a.real < b.real || (a.real == b.real && a.imag < b.imag))
HX_COMPLEX(>, b < a)
HX_COMPLEX(<=, a < b || a == b)
HX_COMPLEX(>=, b <= a)
#undef HX_COMPLEX

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
  METAL_FUNC bool name(bool x, ushort argument) { return metal::name(uint(x), argument); } \
  METAL_FUNC complex64_t name(complex64_t z, ushort argument) { return metal::name(metal::float2(z), argument); }
HX_SHUFFLE(simd_shuffle, lane)
HX_SHUFFLE(simd_shuffle_up, delta)
HX_SHUFFLE(simd_shuffle_down, delta)
#undef HX_SHUFFLE
