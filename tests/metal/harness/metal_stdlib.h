// Metal's standard library in clang's "C++ for OpenCL", as far as the harness supports it.
//
// The dialect has Metal's address spaces under other names (see the end of this file), so pointers to device and to
// threadgroup memory are different types here, too. Anything missing here is a compile error. Only what Metal declares
// constexpr is constexpr here: min, max and as_type are not. SIMD-group functions and barriers are in
// metal_simdgroup.h.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;  // MLX's names
typedef half float16_t;

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define HX_VECTORS(T)     \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
HX_VECTORS(char) HX_VECTORS(uchar) HX_VECTORS(short) HX_VECTORS(ushort) HX_VECTORS(int) HX_VECTORS(uint)
HX_VECTORS(half) HX_VECTORS(float) HX_VECTORS(bfloat)
#undef HX_VECTORS

template <typename A, typename B>
__constant constexpr bool is_same_v = __is_same(A, B);
template <bool condition, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool condition, typename T = void>
using enable_if_t = typename enable_if<condition, T>::type;
template <bool condition, typename A, typename B>
struct conditional {
  using type = A;
};
template <typename A, typename B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool condition, typename A, typename B>
using conditional_t = typename conditional<condition, A, B>::type;

}  // namespace metal

// Used by translate.py.
namespace hx {

template <typename T>
struct shape {
  using element = T;
  static __constant constexpr int size = 0;  // scalars and classes
};
#define HX_SHAPE(T, N)                   \
  template <>                            \
  struct shape<metal::vec<T, N>> {       \
    using element = T;                   \
    static __constant constexpr int size = N; \
  };
#define HX_SHAPES(T) HX_SHAPE(T, 2) HX_SHAPE(T, 3) HX_SHAPE(T, 4)
HX_SHAPES(char) HX_SHAPES(uchar) HX_SHAPES(short) HX_SHAPES(ushort) HX_SHAPES(int) HX_SHAPES(uint)
HX_SHAPES(half) HX_SHAPES(float) HX_SHAPES(bfloat)
#undef HX_SHAPES
#undef HX_SHAPE
template <typename T>
using element = typename shape<T>::element;
template <typename T>
__constant constexpr bool is_vector = shape<T>::size > 0;
template <typename T>
__constant constexpr bool is_float =
    __is_same(element<T>, float) || __is_same(element<T>, half) || __is_same(element<T>, bfloat);
template <typename T>
__constant constexpr bool is_number = is_float<T> || __is_integral(element<T>);
// Bytes per shadow cell of a threadgroup variable: different threads may write different cells.
template <typename T>
__constant constexpr ulong unit = __is_class(element<T>) ? 1 : sizeof(element<T>);
template <typename T>
using if_float = metal::enable_if_t<is_float<T>, T>;
template <typename T>
using if_integer = metal::enable_if_t<__is_integral(element<T>), T>;
template <typename T>
using if_number = metal::enable_if_t<is_number<T>, T>;

template <typename V, typename A>
METAL_FUNC constexpr int append(__private V& v, int at, A a) {
  if constexpr (is_vector<A>) {
    for (int i = 0; i < shape<A>::size; i++) v[at + i] = static_cast<element<V>>(a[i]);
    return at + shape<A>::size;
  } else {
    v[at] = static_cast<element<V>>(a);
    return at + 1;
  }
}

// T(arguments). With an int4 a, float4(a) converts in Metal, but reinterprets the bits in OpenCL.
template <typename T, typename... A>
METAL_FUNC constexpr T make(A... a) {
  if constexpr (!is_vector<T>) {
    return T(a...);
  } else {
    static_assert(sizeof...(A) > 0, "a vector needs arguments");
    constexpr int given = ((is_vector<A> ? shape<A>::size : 1) + ...);
    static_assert(given == shape<T>::size || given == 1, "wrong number of elements for this vector");
    T v{};
    int at = 0;
    ((at = append(v, at, a)), ...);
    if constexpr (given == 1) v = v[0];
    return v;
  }
}

}  // namespace hx

namespace metal {

template <typename To, typename From>
METAL_FUNC To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs equal sizes");
  return __builtin_bit_cast(To, x);
}

// Functions of half and bfloat are computed in float and rounded once.
#define HX_UNARY(name, expression)                                                       \
  template <typename T>                                                                  \
  METAL_FUNC hx::if_float<T> name(T value) {                                             \
    if constexpr (hx::is_vector<T>) {                                                    \
      for (int i = 0; i < hx::shape<T>::size; i++) value[i] = name(hx::element<T>(value[i])); \
      return value;                                                                      \
    } else {                                                                             \
      float x = float(value);                                                            \
      return T(expression);                                                              \
    }                                                                                    \
  }
#define HX_BINARY(name, expression)                                                      \
  template <typename T>                                                                  \
  METAL_FUNC hx::if_float<T> name(T first, T second) {                                   \
    if constexpr (hx::is_vector<T>) {                                                    \
      for (int i = 0; i < hx::shape<T>::size; i++)                                       \
        first[i] = name(hx::element<T>(first[i]), hx::element<T>(second[i]));            \
      return first;                                                                      \
    } else {                                                                             \
      float x = float(first), y = float(second);                                         \
      return T(expression);                                                              \
    }                                                                                    \
  }
#define HX_MATH                                     \
  HX_UNARY(exp, __builtin_expf(x))                  \
  HX_UNARY(exp2, __builtin_exp2f(x))                \
  HX_UNARY(log, __builtin_logf(x))                  \
  HX_UNARY(log2, __builtin_log2f(x))                \
  HX_UNARY(sqrt, __builtin_sqrtf(x))                \
  HX_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))        \
  HX_UNARY(sin, __builtin_sinf(x))                  \
  HX_UNARY(cos, __builtin_cosf(x))                  \
  HX_UNARY(tanh, __builtin_tanhf(x))                \
  HX_UNARY(fabs, __builtin_fabsf(x))                \
  HX_BINARY(fmin, __builtin_fminf(x, y))            \
  HX_BINARY(fmax, __builtin_fmaxf(x, y))
HX_MATH
// On a GPU these differ in accuracy, here they don't.
namespace fast { HX_MATH }
namespace precise { HX_MATH }
#undef HX_MATH
#undef HX_UNARY
#undef HX_BINARY

template <typename T>
METAL_FUNC hx::if_number<T> min(T a, T b) {
  if constexpr (hx::is_vector<T>) {
    for (int i = 0; i < hx::shape<T>::size; i++) a[i] = min(hx::element<T>(a[i]), hx::element<T>(b[i]));
    return a;
  } else if constexpr (hx::is_float<T>) {
    return fmin(a, b);
  } else {
    return b < a ? b : a;
  }
}
template <typename T>
METAL_FUNC hx::if_number<T> max(T a, T b) {
  if constexpr (hx::is_vector<T>) {
    for (int i = 0; i < hx::shape<T>::size; i++) a[i] = max(hx::element<T>(a[i]), hx::element<T>(b[i]));
    return a;
  } else if constexpr (hx::is_float<T>) {
    return fmax(a, b);
  } else {
    return a < b ? b : a;
  }
}
template <typename T>
METAL_FUNC hx::if_number<T> clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <typename T>
METAL_FUNC hx::if_number<T> abs(T x) {
  if constexpr (hx::is_float<T>) {
    return fabs(x);
  } else if constexpr (hx::is_vector<T>) {
    return max(x, -x);
  } else {
    return x < 0 ? -x : x;
  }
}
template <typename T>
METAL_FUNC hx::element<hx::if_float<T>> dot(T a, T b) {
  static_assert(hx::is_vector<T>, "dot is for vectors");
  hx::element<T> sum = 0;
  for (int i = 0; i < hx::shape<T>::size; i++) sum += a[i] * b[i];
  return sum;
}

}  // namespace metal

#include "metal_atomic.h"
#include "metal_simdgroup.h"

using namespace metal;

// Metal's address spaces in OpenCL.
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
// Keywords of OpenCL that are ordinary names in Metal.
#define local hx_local
#define global hx_global
#define generic hx_generic
#define atomic_uint hx_atomic_uint
#define pipe hx_pipe
