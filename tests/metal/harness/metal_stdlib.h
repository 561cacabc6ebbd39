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
typedef long ptrdiff_t;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;  // MLX's names
typedef half float16_t;

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define MAXFLOAT 3.40282346638528859811704183484516925e+38f
#define FLT_MAX MAXFLOAT
#define FLT_MIN 1.17549435082228750796873653722224568e-38f
#define FLT_EPSILON 1.1920928955078125e-07f
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define HX_VECTORS(T)     \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
HX_VECTORS(char) HX_VECTORS(uchar) HX_VECTORS(short) HX_VECTORS(ushort) HX_VECTORS(int) HX_VECTORS(uint)
HX_VECTORS(long) HX_VECTORS(ulong) HX_VECTORS(half) HX_VECTORS(float) HX_VECTORS(bfloat)
#undef HX_VECTORS

template <typename T, T v>
struct integral_constant {
  using value_type = T;
  using type = integral_constant;
  static __constant constexpr T value = v;
  constexpr operator T() const { return v; }
};
template <bool v>
using bool_constant = integral_constant<bool, v>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
#define HX_TRAIT(name, parameters, arguments, expression)          \
  template <parameters>                                            \
  struct name : bool_constant<expression> {};                      \
  template <parameters>                                            \
  __constant constexpr bool name##_v = name<arguments>::value;
#define HX_COMMA ,
HX_TRAIT(is_same, typename A HX_COMMA typename B, A HX_COMMA B, __is_same(A, B))
HX_TRAIT(is_convertible, typename A HX_COMMA typename B, A HX_COMMA B, __is_convertible(A, B))
HX_TRAIT(is_integral, typename T, T, __is_integral(T))
HX_TRAIT(is_floating_point, typename T, T, __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat))
HX_TRAIT(is_arithmetic, typename T, T, is_integral_v<T> || is_floating_point_v<T>)
HX_TRAIT(is_signed, typename T, T, is_floating_point_v<T> || __is_signed(T))
HX_TRAIT(is_unsigned, typename T, T, __is_unsigned(T))
HX_TRAIT(_disjunction, typename... T, T..., (T::value || ...))
#undef HX_TRAIT
#undef HX_COMMA
template <typename T>
using remove_cv_t = __remove_cv(T);
template <typename T>
struct remove_addrspace {
  using type = T;
};
#define HX_SPACE(space)          \
  template <typename T>          \
  struct remove_addrspace<space T> { \
    using type = T;              \
  };
HX_SPACE(__private) HX_SPACE(__local) HX_SPACE(__global) HX_SPACE(__constant)
#undef HX_SPACE
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
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

// Clang has no vectors of bool. The comparison of two vectors is a vector of integers, 0 or -1, which converts to bool4
// (metal_rules.py rejects other uses).
#define HX_BOOLS(N, ...)                                                                          \
  struct alignas(N == 3 ? 4 : N) bool##N {                                                        \
    union {                                                                                       \
      struct { bool __VA_ARGS__; };                                                               \
      bool elements[N];                                                                           \
    };                                                                                            \
    bool##N() = default;                                                                          \
    constexpr bool##N(bool value) : elements{} { for (int i = 0; i < N; i++) elements[i] = value; } \
    template <typename... B, typename = enable_if_t<sizeof...(B) == N>>                           \
    constexpr bool##N(B... values) : elements{bool(values)...} {}                                 \
    template <typename T, typename = enable_if_t<__is_integral(T)>>                               \
    constexpr bool##N(vec<T, N> mask) : elements{} { for (int i = 0; i < N; i++) elements[i] = mask[i] != 0; } \
    constexpr bool operator[](int i) const { return elements[i]; }                                \
    constexpr bool& operator[](int i) {                                                           \
      (void)bool(elements[i]); /* clang checks an access, and lets a reference be to the end */   \
      return elements[i];                                                                         \
    }                                                                                             \
  };                                                                                              \
  METAL_FUNC bool any(bool##N v) {                                                                \
    for (int i = 0; i < N; i++) if (v[i]) return true;                                            \
    return false;                                                                                 \
  }                                                                                               \
  METAL_FUNC bool all(bool##N v) {                                                                \
    for (int i = 0; i < N; i++) if (!v[i]) return false;                                          \
    return true;                                                                                  \
  }                                                                                               \
  METAL_FUNC constexpr bool##N operator!(bool##N v) {                                             \
    for (int i = 0; i < N; i++) v[i] = !v[i];                                                     \
    return v;                                                                                     \
  }                                                                                               \
  METAL_FUNC constexpr bool##N operator&&(bool##N a, bool##N b) {                                 \
    for (int i = 0; i < N; i++) a[i] = a[i] && b[i];                                              \
    return a;                                                                                     \
  }                                                                                               \
  METAL_FUNC constexpr bool##N operator||(bool##N a, bool##N b) {                                 \
    for (int i = 0; i < N; i++) a[i] = a[i] || b[i];                                              \
    return a;                                                                                     \
  }                                                                                               \
  template <typename T>                                                                           \
  METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, bool##N second) {                         \
    for (int i = 0; i < N; i++) if (second[i]) a[i] = b[i];                                       \
    return a;                                                                                     \
  }
HX_BOOLS(2, x, y)
HX_BOOLS(3, x, y, z)
HX_BOOLS(4, x, y, z, w)
#undef HX_BOOLS

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
HX_SHAPES(long) HX_SHAPES(ulong) HX_SHAPES(half) HX_SHAPES(float) HX_SHAPES(bfloat)
#undef HX_SHAPES
#undef HX_SHAPE
#define HX_SHAPE(N)                         \
  template <>                               \
  struct shape<metal::bool##N> {            \
    using element = bool;                   \
    static __constant constexpr int size = N; \
  };
HX_SHAPE(2) HX_SHAPE(3) HX_SHAPE(4)
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

template <typename T>
struct numeric_limits;
#define HX_INTEGER(T, low, high)                      \
  template <>                                         \
  struct numeric_limits<T> {                          \
    static constexpr T min() { return low; }          \
    static constexpr T lowest() { return low; }       \
    static constexpr T max() { return high; }         \
  };
HX_INTEGER(char, -128, 127)
HX_INTEGER(int8_t, -128, 127)
HX_INTEGER(uchar, 0, 255)
HX_INTEGER(short, -32768, 32767)
HX_INTEGER(ushort, 0, 65535)
HX_INTEGER(int, -2147483647 - 1, 2147483647)
HX_INTEGER(uint, 0, 4294967295u)
HX_INTEGER(long, -9223372036854775807L - 1, 9223372036854775807L)
HX_INTEGER(ulong, 0, 18446744073709551615ul)
#undef HX_INTEGER
#define HX_FLOAT(T, B, smallest, largest, one_ulp, inf, nan)                        \
  template <>                                                                       \
  struct numeric_limits<T> {                                                        \
    static constexpr T min() { return __builtin_bit_cast(T, B(smallest)); }         \
    static constexpr T max() { return __builtin_bit_cast(T, B(largest)); }          \
    static constexpr T lowest() { return -max(); }                                  \
    static constexpr T epsilon() { return __builtin_bit_cast(T, B(one_ulp)); }      \
    static constexpr T infinity() { return __builtin_bit_cast(T, B(inf)); }         \
    static constexpr T quiet_NaN() { return __builtin_bit_cast(T, B(nan)); }        \
  };
HX_FLOAT(float, uint, 0x00800000, 0x7f7fffff, 0x34000000, 0x7f800000, 0x7fc00000)
HX_FLOAT(half, ushort, 0x0400, 0x7bff, 0x1400, 0x7c00, 0x7e00)
HX_FLOAT(bfloat, ushort, 0x0080, 0x7f7f, 0x3c00, 0x7f80, 0x7fc0)
#undef HX_FLOAT

}  // namespace metal
namespace hx {
template <typename T>
METAL_FUNC constexpr T infinity_or() {  // 0 for integers
  if constexpr (is_float<T>) return metal::numeric_limits<T>::infinity();
  else return T(0);
}
}  // namespace hx
namespace metal {

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
  HX_UNARY(exp10, __builtin_powf(10.0f, x))         \
  HX_UNARY(log, __builtin_logf(x))                  \
  HX_UNARY(log2, __builtin_log2f(x))                \
  HX_UNARY(log10, __builtin_log10f(x))              \
  HX_UNARY(sqrt, __builtin_sqrtf(x))                \
  HX_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))        \
  HX_UNARY(sin, __builtin_sinf(x))                  \
  HX_UNARY(cos, __builtin_cosf(x))                  \
  HX_UNARY(tan, __builtin_tanf(x))                  \
  HX_UNARY(asin, __builtin_asinf(x))                \
  HX_UNARY(acos, __builtin_acosf(x))                \
  HX_UNARY(atan, __builtin_atanf(x))                \
  HX_UNARY(sinh, __builtin_sinhf(x))                \
  HX_UNARY(cosh, __builtin_coshf(x))                \
  HX_UNARY(tanh, __builtin_tanhf(x))                \
  HX_UNARY(fabs, __builtin_fabsf(x))                \
  HX_UNARY(floor, __builtin_floorf(x))              \
  HX_UNARY(ceil, __builtin_ceilf(x))                \
  HX_UNARY(round, __builtin_roundf(x))              \
  HX_UNARY(rint, __builtin_rintf(x))                \
  HX_UNARY(trunc, __builtin_truncf(x))              \
  HX_UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f * x)  \
  HX_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f)) \
  HX_BINARY(pow, __builtin_powf(x, y))              \
  HX_BINARY(powr, __builtin_powf(x, y))             \
  HX_BINARY(atan2, __builtin_atan2f(x, y))          \
  HX_BINARY(fmod, __builtin_fmodf(x, y))            \
  HX_BINARY(copysign, __builtin_copysignf(x, y))    \
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
METAL_FUNC hx::if_float<T> fma(T a, T b, T c) {
  if constexpr (hx::is_vector<T>) {
    for (int i = 0; i < hx::shape<T>::size; i++)
      c[i] = fma(hx::element<T>(a[i]), hx::element<T>(b[i]), hx::element<T>(c[i]));
    return c;
  } else {
    return T(__builtin_fmaf(float(a), float(b), float(c)));
  }
}
template <typename T>
METAL_FUNC hx::if_float<T> mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <typename T>
METAL_FUNC hx::if_number<T> select(T a, T b, bool second) {
  return second ? b : a;
}
template <typename T>
METAL_FUNC hx::element<hx::if_float<T>> dot(T a, T b) {
  static_assert(hx::is_vector<T>, "dot is for vectors");
  hx::element<T> sum = 0;
  for (int i = 0; i < hx::shape<T>::size; i++) sum += a[i] * b[i];
  return sum;
}
template <typename T, typename = hx::if_float<T>>
METAL_FUNC bool isnan(T x) {
  return x != x;
}
template <typename T, typename = hx::if_float<T>>
METAL_FUNC bool isinf(T x) {
  return fabs(x) == numeric_limits<T>::infinity();
}
template <typename T, typename = hx::if_float<T>>
METAL_FUNC bool isfinite(T x) {
  return fabs(x) < numeric_limits<T>::infinity();
}
template <typename T, size_t N>
struct array {
  T elements[N];
  constexpr T& operator[](size_t i) {
    (void)T(elements[i]);  // as in bool4
    return elements[i];
  }
  constexpr T operator[](size_t i) const { return elements[i]; }
  static constexpr size_t size() { return N; }
};
// Messages are not printed.
struct os_log {
  constexpr os_log(__constant const char*, __constant const char*) __constant {}
#define HX_LOG(name)     \
  template <typename... T> \
  void name(__constant const char*, T...) const __constant {}
  HX_LOG(log) HX_LOG(log_debug) HX_LOG(log_info) HX_LOG(log_error) HX_LOG(log_fault)
#undef HX_LOG
};
__constant constexpr os_log os_log_default("", "");

#define HX_BITS(name, ...)                                                         \
  template <typename T>                                                            \
  METAL_FUNC hx::if_integer<T> name(T x) {                                         \
    return __builtin_##name##g(static_cast<__make_unsigned(T)>(x), ##__VA_ARGS__); \
  }
HX_BITS(popcount)
HX_BITS(clz, int(8 * sizeof(T)))
HX_BITS(ctz, int(8 * sizeof(T)))
#undef HX_BITS

}  // namespace metal

#include "metal_atomic.h"
#include "metal_simdgroup.h"

using namespace metal;

// In clang, += and -= of a pointer with an address space don't convert a class to an integer.
#define HX_ADVANCE(space, op)                                                             \
  template <typename T, typename N>                                                       \
  METAL_FUNC enable_if_t<__is_class(N), space T* __private&> operator op(space T* __private& pointer, N n) { \
    return pointer op static_cast<long>(n);                                               \
  }
HX_ADVANCE(__global, +=) HX_ADVANCE(__global, -=) HX_ADVANCE(__local, +=) HX_ADVANCE(__local, -=)
#undef HX_ADVANCE

// Metal's address spaces in OpenCL.
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
// Keywords of OpenCL that are ordinary names in Metal.
#define local hx_local
#define global hx_global
#define generic hx_generic
#define atomic_int hx_atomic_int
#define atomic_uint hx_atomic_uint
#define atomic_float hx_atomic_float
#define atomic_bool hx_atomic_bool
#define atomic_ulong hx_atomic_ulong
#define pipe hx_pipe
