// Fibers: one per thread of a threadgroup, each with its own stack. A switch needs no system call.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

// void hx_switch(void** save, void* to): save the callee-saved registers on this stack and continue on the other one.
#if defined(__x86_64__)
asm(R"(
.text
.globl hx_switch
.type hx_switch, @function
hx_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size hx_switch, .-hx_switch
)");
constexpr int kReturnWord = 6, kFrameWords = 8;
#elif defined(__aarch64__)
asm(R"(
.text
.globl hx_switch
.type hx_switch, %function
hx_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size hx_switch, .-hx_switch
)");
constexpr int kReturnWord = 11, kFrameWords = 20;
#else
#error "unsupported processor"
#endif
extern "C" void hx_switch(void** save, void* to);

constexpr int kMaxThreads = 1024, kLanes = 32;
constexpr size_t kStackBytes = 256 << 10, kGuardBytes = 64 << 10;

enum class State : uint8_t { runnable, collective, barrier, returned };

struct Fiber {
  void* stack_pointer;
  uint8_t* stack;  // kStackBytes, with an inaccessible guard below
  uint32_t position[3];  // in the threadgroup
  uint16_t thread, simd;
  uint8_t lane;
  State state;
  uint8_t phase;  // index of the SIMD group's Exchange
  int what, flags;  // of the SIMD-group function or barrier that it waits at
  const void* pc;  // return address of that call
};

// All stacks are mapped once per process; pages are allocated when kernels use them.
inline uint8_t* all_stacks() {
  static uint8_t* all = [] {
    size_t bytes = kMaxThreads * (kStackBytes + kGuardBytes);
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int i = 0; i < kMaxThreads && p != MAP_FAILED; i++)
      mprotect((uint8_t*)p + i * (kStackBytes + kGuardBytes), kGuardBytes, PROT_NONE);
    return (uint8_t*)p;
  }();
  return all;  // or MAP_FAILED
}

inline uint8_t* stack_of(int thread) { return all_stacks() + thread * (kStackBytes + kGuardBytes) + kGuardBytes; }

// Makes the next switch to the fiber call `start` on an empty stack.
inline void prepare(Fiber& fiber, void (*start)()) {
  void** top = (void**)(fiber.stack + kStackBytes);
  void** frame = top - kFrameWords;
  for (int i = 0; i < kFrameWords; i++) frame[i] = nullptr;
  frame[kReturnWord] = (void*)start;
  fiber.stack_pointer = frame;
}
