// Atomic operations. Included by metal_stdlib.h.
//
// Only one thread runs at a time, and it is not interrupted in a function, so these are atomic as they are. The runtime
// checks each access; it knows that atomic operations don't race with each other.
#pragma once

namespace hx {
// Defined in runtime/runtime.cpp. Modes: 1 read, 2 write, 3 both.
extern "C" {
ulong hx_atomic(ulong address, int bytes, int mode);
void hx_atomic_set(ulong address, int bytes, ulong value);
bool hx_atomic_fails();
}

template <typename T>
METAL_FUNC ulong to_bits(T value) {
  if constexpr (sizeof(T) == 1) return ulong(value);
  else if constexpr (sizeof(T) == 4) return __builtin_bit_cast(uint, value);
  else return __builtin_bit_cast(ulong, value);
}
template <typename T>
METAL_FUNC T from_bits(ulong bits) {
  if constexpr (sizeof(T) == 1) return T(bits);
  else if constexpr (sizeof(T) == 4) return __builtin_bit_cast(T, uint(bits));
  else return __builtin_bit_cast(T, bits);
}

// Which operations Metal has, by type and address space. Of ulong, it has only atomic_min_explicit and
// atomic_max_explicit, which are not here.
template <typename T, typename Value = metal::remove_addrspace_t<T>>
__constant constexpr bool has_exchange = !__is_same(Value, ulong) && !__is_same(T, __local float);
template <typename T, typename Value = metal::remove_addrspace_t<T>>
__constant constexpr bool has_sum = has_exchange<T> && !__is_same(Value, bool);
template <typename T, typename Value = metal::remove_addrspace_t<T>>
__constant constexpr bool has_bits = has_sum<T> && !__is_same(Value, float);
}  // namespace hx

namespace metal {

enum memory_order { memory_order_relaxed };

template <typename T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, float> || is_same_v<T, bool> ||
                    is_same_v<T, ulong>,
                "Metal has atomics of int, uint, float, bool and ulong");

 private:
  T value;
};
// OpenCL has types of these names, see the macros at the end of metal_stdlib.h.
typedef atomic<int> hx_atomic_int;
typedef atomic<uint> hx_atomic_uint;
typedef atomic<float> hx_atomic_float;
typedef atomic<bool> hx_atomic_bool;
typedef atomic<ulong> hx_atomic_ulong;

#define HX_FETCH(space, name, condition, expression)                                                         \
  template <typename T, typename U>                                                                          \
  METAL_FUNC T atomic_##name##_explicit(volatile space atomic<T>* object, U operand, memory_order) {         \
    static_assert(hx::condition<space T>, "Metal has no atomic_" #name "_explicit of this type");            \
    T a = hx::from_bits<T>(hx::hx_atomic(ulong(object), sizeof(T), 3)), b = T(operand);                      \
    hx::hx_atomic_set(ulong(object), sizeof(T), hx::to_bits(T(expression)));                                 \
    return a;                                                                                                \
  }
#define HX_ATOMICS(space)                                                                                    \
  template <typename T>                                                                                      \
  METAL_FUNC T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) {                  \
    static_assert(hx::has_exchange<space T>, "Metal has no atomic_load_explicit of this type");              \
    return hx::from_bits<T>(hx::hx_atomic(ulong(object), sizeof(T), 1));                                     \
  }                                                                                                          \
  template <typename T, typename U>                                                                          \
  METAL_FUNC void atomic_store_explicit(volatile space atomic<T>* object, U value, memory_order) {           \
    static_assert(hx::has_exchange<space T>, "Metal has no atomic_store_explicit of this type");             \
    hx::hx_atomic(ulong(object), sizeof(T), 2);                                                              \
    hx::hx_atomic_set(ulong(object), sizeof(T), hx::to_bits(T(value)));                                      \
  }                                                                                                          \
  template <typename T, typename U>                                                                          \
  METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* object, __private T* expected,\
                                                        U desired, memory_order, memory_order) {             \
    static_assert(hx::has_exchange<space T>, "Metal has no atomic_compare_exchange_weak_explicit of this type");\
    ulong bits = hx::hx_atomic(ulong(object), sizeof(T), 3);                                                 \
    bool equal = bits == hx::to_bits(*expected) && !hx::hx_atomic_fails();                                   \
    if (equal) hx::hx_atomic_set(ulong(object), sizeof(T), hx::to_bits(T(desired)));                         \
    else *expected = hx::from_bits<T>(bits);                                                                 \
    return equal;                                                                                            \
  }                                                                                                          \
  HX_FETCH(space, exchange, has_exchange, b)                                                                 \
  HX_FETCH(space, fetch_add, has_sum, a + b)                                                                 \
  HX_FETCH(space, fetch_sub, has_sum, a - b)                                                                 \
  HX_FETCH(space, fetch_min, has_bits, b < a ? b : a)                                                        \
  HX_FETCH(space, fetch_max, has_bits, a < b ? b : a)                                                        \
  HX_FETCH(space, fetch_and, has_bits, a & b)                                                                \
  HX_FETCH(space, fetch_or, has_bits, a | b)                                                                 \
  HX_FETCH(space, fetch_xor, has_bits, a ^ b)
HX_ATOMICS(__global)
HX_ATOMICS(__local)
#undef HX_ATOMICS
#undef HX_FETCH

}  // namespace metal

namespace hx {
template <typename T>
struct shape<metal::atomic<T>> {
  using element = T;
  static __constant constexpr int size = 0;
};
}  // namespace hx
