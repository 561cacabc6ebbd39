// Atomic operations in threadgroup memory. Included by metal_stdlib.h.
//
// Only one thread runs at a time, and it is not interrupted in a function, so these are atomic as they are. The runtime
// checks each access; it knows that atomic operations don't race with each other.
#pragma once

namespace hx {
// Defined in runtime/runtime.cpp. Modes: 1 read, 2 write, 3 both.
extern "C" uint hx_atomic(ulong address, int mode);
extern "C" void hx_atomic_set(ulong address, uint value);
}  // namespace hx

namespace metal {

enum memory_order { memory_order_relaxed };

template <typename T>
struct atomic {
  static_assert(is_same_v<T, uint>, "the harness has atomics of uint");

 private:
  uint value;
};
typedef atomic<uint> hx_atomic_uint;  // OpenCL has another type of this name, see the end of metal_stdlib.h

METAL_FUNC uint atomic_load_explicit(const volatile __local hx_atomic_uint* object, memory_order) {
  return hx::hx_atomic(ulong(object), 1);
}
METAL_FUNC void atomic_store_explicit(volatile __local hx_atomic_uint* object, uint value, memory_order) {
  hx::hx_atomic(ulong(object), 2);
  hx::hx_atomic_set(ulong(object), value);
}
METAL_FUNC uint atomic_fetch_add_explicit(volatile __local hx_atomic_uint* object, uint operand, memory_order) {
  const uint before = hx::hx_atomic(ulong(object), 3);
  hx::hx_atomic_set(ulong(object), before + operand);
  return before;
}

}  // namespace metal

namespace hx {
template <>
struct shape<metal::hx_atomic_uint> {
  using element = uint;
  static __constant constexpr int size = 0;
};
}  // namespace hx
