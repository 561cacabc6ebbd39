// Barriers, SIMD-group functions and SIMD-group matrices. Included by metal_stdlib.h.
#pragma once
#include "runtime/shared.h"

namespace hx {
// Defined in runtime/collectives.h.
extern "C" {
void hx_threadgroup_barrier(int flags);
void hx_simdgroup_barrier(int flags);
void hx_simd_synchronize(int what);
float hx_simd_reduce_float(int what, float value);
long hx_simd_reduce_long(int what, long value);
ulong hx_simd_shuffle(int what, ulong bits, uint argument);
__attribute__((const)) uint hx_lane();
__attribute__((const)) uint hx_lanes();
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
METAL_FUNC hx::if_number<T> simd_product(T x) {
  return hx::reduce(hx::product, x);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_min(T x) {
  return hx::reduce(hx::minimum, x);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_max(T x) {
  return hx::reduce(hx::maximum, x);
}
METAL_FUNC bool simd_all(bool x) { return hx::reduce(hx::minimum, int(x)); }
METAL_FUNC bool simd_any(bool x) { return hx::reduce(hx::maximum, int(x)); }

template <typename T>
METAL_FUNC hx::if_number<T> simd_shuffle(T x, ushort lane) {
  return hx::exchange(hx::to_lane, x, lane);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_broadcast(T x, ushort lane) {
  return hx::exchange(hx::broadcast, x, lane);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_broadcast_first(T x) {
  return hx::exchange(hx::to_lane, x, 0);
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
METAL_FUNC hx::if_integer<T> simd_and(T x) {
  return hx::reduce(hx::bit_and, x);
}
template <typename T>
METAL_FUNC hx::if_integer<T> simd_or(T x) {
  return hx::reduce(hx::bit_or, x);
}
template <typename T>
METAL_FUNC hx::if_integer<T> simd_xor(T x) {
  return hx::reduce(hx::bit_xor, x);
}

class simd_vote {
 public:
  typedef ulong vote_t;
  explicit constexpr simd_vote(vote_t bits = 0) : bits(bits) {}
  explicit constexpr operator vote_t() const { return bits; }
  bool all() const { return bits == hx::hx_lanes(); }
  constexpr bool any() const { return bits != 0; }

 private:
  vote_t bits;
};
METAL_FUNC simd_vote simd_ballot(bool x) {
  return simd_vote(hx::hx_simd_reduce_long(hx::ballot, long(x) << hx::hx_lane()));
}
METAL_FUNC simd_vote simd_active_threads_mask() { return simd_ballot(true); }

template <typename T>
METAL_FUNC hx::if_number<T> simd_shuffle_rotate_down(T x, ushort delta) {
  return hx::exchange(hx::to_lane, x, (hx::hx_lane() + delta) % 32);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_shuffle_rotate_up(T x, ushort delta) {
  return hx::exchange(hx::to_lane, x, (hx::hx_lane() + 32 - delta) % 32);
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_shuffle_and_fill_down(T x, T filling, ushort delta) {
  T rotated = simd_shuffle_rotate_down(filling, delta), shifted = simd_shuffle_rotate_down(x, delta);
  return hx::hx_lane() + delta < 32 ? shifted : rotated;
}
template <typename T>
METAL_FUNC hx::if_number<T> simd_shuffle_and_fill_up(T x, T filling, ushort delta) {
  T rotated = simd_shuffle_rotate_up(filling, delta), shifted = simd_shuffle_rotate_up(x, delta);
  return hx::hx_lane() >= delta ? shifted : rotated;
}

#define HX_PREFIX(name, combine, identity)                                \
  template <typename T>                                                   \
  METAL_FUNC hx::if_number<T> simd_prefix_inclusive_##name(T x) {         \
    for (ushort delta = 1; delta < 32; delta *= 2) {                      \
      T below = simd_shuffle_up(x, delta);                                \
      if (hx::hx_lane() >= delta) x = below combine x;                    \
    }                                                                     \
    return x;                                                             \
  }                                                                       \
  template <typename T>                                                   \
  METAL_FUNC hx::if_number<T> simd_prefix_exclusive_##name(T x) {         \
    T below = simd_shuffle_up(simd_prefix_inclusive_##name(x), 1);        \
    return hx::hx_lane() ? below : T(identity);                           \
  }
HX_PREFIX(sum, +, 0)
HX_PREFIX(product, *, 1)
#undef HX_PREFIX

// Quad-group functions: here, all lanes of the SIMD group must reach them.
template <typename T>
METAL_FUNC hx::if_number<T> quad_shuffle(T x, ushort lane) {
  return hx::exchange(hx::to_lane, x, hx::hx_lane() / 4 * 4 + lane % 4);
}
template <typename T>
METAL_FUNC hx::if_number<T> quad_broadcast(T x, ushort lane) {
  return quad_shuffle(x, lane);
}
template <typename T>
METAL_FUNC hx::if_number<T> quad_shuffle_xor(T x, ushort mask) {
  return quad_shuffle(x, hx::hx_lane() ^ mask);
}
#define HX_QUAD(name, expression)                   \
  template <typename T>                             \
  METAL_FUNC hx::if_number<T> quad_##name(T a) {    \
    for (ushort mask = 1; mask < 4; mask *= 2) {    \
      T b = quad_shuffle_xor(a, mask);              \
      a = expression;                               \
    }                                               \
    return a;                                       \
  }
HX_QUAD(sum, a + b)
HX_QUAD(product, a * b)
HX_QUAD(min, min(a, b))
HX_QUAD(max, max(a, b))
#undef HX_QUAD

// Each of the 32 lanes holds two adjacent elements of a row. Metal doesn't specify the layout; this is the one that
// MLX's kernels assume.
template <typename T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 matrices only");
  static_assert(hx::is_float<T> && !hx::is_vector<T>, "a matrix of float, half or bfloat");
  vec<T, 2> elements;

  METAL_FUNC simdgroup_matrix() __private {}
  METAL_FUNC explicit simdgroup_matrix(T diagonal) __private {
    elements[0] = row() == column() ? diagonal : T(0);
    elements[1] = row() == column() + 1 ? diagonal : T(0);
  }
  METAL_FUNC __private vec<T, 2>& thread_elements() __private { return elements; }

  METAL_FUNC static uint row() {
    uint lane = hx::hx_lane();
    return (lane / 4 & 4) + lane / 2 % 4;
  }
  METAL_FUNC static uint column() {
    uint lane = hx::hx_lane();
    return (lane / 4 & 2) * 2 + lane % 2 * 2;
  }
  // Offset in memory of element i of this lane.
  METAL_FUNC static long offset(int i, ulong row_length, ulong2 origin, bool transposed) {
    ulong r = row(), c = column() + i;
    return (origin.y + (transposed ? c : r)) * row_length + origin.x + (transposed ? r : c);
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Rows, int Columns>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.elements = value;
  return m;
}

#define HX_LOAD_AND_STORE(space)                                                                            \
  template <typename T>                                                                                     \
  METAL_FUNC void simdgroup_load(__private simdgroup_matrix<T, 8, 8>& m, const space T* from,               \
                                 ulong row_length = 8, ulong2 origin = ulong2{0, 0}, bool transposed = false) { \
    hx::hx_simd_synchronize(0);                                                                                    \
    for (int i = 0; i < 2; i++) m.elements[i] = from[m.offset(i, row_length, origin, transposed)];          \
  }                                                                                                         \
  template <typename T>                                                                                     \
  METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> m, space T* to, ulong row_length = 8,           \
                                  ulong2 origin = ulong2{0, 0}, bool transposed = false) {                  \
    hx::hx_simd_synchronize(1);                                                                                    \
    for (int i = 0; i < 2; i++) to[m.offset(i, row_length, origin, transposed)] = m.elements[i];            \
  }
HX_LOAD_AND_STORE(__global)
HX_LOAD_AND_STORE(__local)
#undef HX_LOAD_AND_STORE

// d = a b + c, computed in float and rounded once to d's type.
template <typename D, typename A, typename B, typename C>
METAL_FUNC void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  float2 r = hx::hx_multiply(hx::make<float2>(a.elements), hx::make<float2>(b.elements), hx::make<float2>(c.elements));
  d.elements = hx::make<vec<D, 2>>(r);
}
template <typename D, typename A, typename B>
METAL_FUNC void simdgroup_multiply(__private simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b) {
  float2 r = hx::hx_multiply(hx::make<float2>(a.elements), hx::make<float2>(b.elements), float2{0, 0});
  d.elements = hx::make<vec<D, 2>>(r);
}

}  // namespace metal
