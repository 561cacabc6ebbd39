// The runtime functions that kernels call, declared in metal_simdgroup.h.
#pragma once
#include <math.h>
#include <stdlib.h>

#include "schedule.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define PC __builtin_return_address(0)

EXPORT void hx_threadgroup_barrier(int flags) {
  if (!L.current->thread) L.report->barriers++;
  yield(State::barrier, 0, flags, PC);
}
EXPORT void hx_simdgroup_barrier(int flags) { yield(State::collective, kBarrier, flags, PC); }
EXPORT uint32_t hx_lane() { return L.current->lane; }

// The Exchange for the current lane's next SIMD-group function.
static Exchange& current_exchange() { return simds[L.current->simd].exchange[L.current->phase]; }

// Reduces in a tree. The first lane that continues computes the result for all.
template <typename T, typename Combine>
static T reduce(int what, T value, T identity, const void* pc, Combine combine) {
  Exchange& x = current_exchange();
  memcpy(&x.value[L.current->lane], &value, sizeof value);
  yield(State::collective, kReduce + what, 0, pc);
  if (!x.reduced) {
    T tree[kLanes];
    for (int i = 0; i < kLanes; i++) {
      tree[i] = identity;
      if (simds[L.current->simd].active >> i & 1) memcpy(&tree[i], &x.value[i], sizeof(T));
    }
    for (int width = kLanes / 2; width; width /= 2)
      for (int i = 0; i < width; i++) tree[i] = combine(tree[i], tree[i + width]);
    memcpy(&x.result, &tree[0], sizeof(T));
    x.reduced = true;
  }
  T result;
  memcpy(&result, &x.result, sizeof result);
  return result;
}

EXPORT float hx_simd_reduce_float(int what, float value) {
  const void* pc = PC;
  switch (what) {
    case hx::sum: return reduce(what, value, 0.0f, pc, [](float a, float b) { return a + b; });
    case hx::minimum: return reduce(what, value, INFINITY, pc, [](float a, float b) { return fminf(a, b); });
    default: return reduce(what, value, -INFINITY, pc, [](float a, float b) { return fmaxf(a, b); });
  }
}
EXPORT int64_t hx_simd_reduce_long(int what, int64_t value) {
  const void* pc = PC;
  switch (what) {
    case hx::sum: return reduce(what, value, int64_t(0), pc, [](int64_t a, int64_t b) { return a + b; });
    case hx::minimum: return reduce(what, value, INT64_MAX, pc, [](int64_t a, int64_t b) { return a < b ? a : b; });
    default: return reduce(what, value, INT64_MIN, pc, [](int64_t a, int64_t b) { return a > b ? a : b; });
  }
}

// Lanes without a source in a shift up or down keep their value. Another lane that doesn't exist is a fault, since the
// value is undefined on a GPU. The lane of a broadcast must be the same in all lanes.
EXPORT uint64_t hx_simd_shuffle(int what, uint64_t bits, uint32_t argument) {
  const int lane = L.current->lane;
  Exchange& x = current_exchange();
  x.value[lane] = bits;
  yield(State::collective, kShuffle + what, what == hx::broadcast ? argument : 0, PC);
  const bool shifts = what == hx::down || what == hx::up;
  int64_t from = argument;
  if (what == hx::exclusive_or) from = lane ^ from;
  if (shifts) from = what == hx::down ? lane + from : lane - from;
  if (shifts && (from < 0 || from >= kLanes)) from = lane;
  if (from >= kLanes || !(simds[L.current->simd].active >> from & 1))
    fault(PC, -1, "simd_shuffle reads lane %ld, which doesn't exist", long(from));
  return x.value[from];
}

typedef float float2 __attribute__((ext_vector_type(2)));
EXPORT float2 hx_multiply(float2 a, float2 b, float2 c) {
  if (simds[L.current->simd].active != ~0u) fault(PC, -1, "simdgroup_multiply in a SIMD group with less than 32 threads");
  Exchange& x = current_exchange();
  const int lane = L.current->lane;
  if (!lane) L.report->products++;
  const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  x.a[row * 8 + column] = a.x, x.a[row * 8 + column + 1] = a.y;
  x.b[row * 8 + column] = b.x, x.b[row * 8 + column + 1] = b.y;
  yield(State::collective, kMultiply, 0, PC);
  for (int k = 0; k < 8; k++) c += x.a[row * 8 + k] * float2{x.b[k * 8 + column], x.b[k * 8 + column + 1]};
  return c;
}

EXPORT uint64_t hx_buffer(int index) { return (uint64_t)(L.buffers[index].base + L.buffers[index].start); }

// Address of a threadgroup variable. Each has its own slot, so that out-of-bounds accesses don't reach another.
EXPORT uint64_t hx_threadgroup_memory(int index, const char* name, uint64_t bytes, uint64_t unit) {
  if (index >= kMaxThreadgroupArrays) fault(PC, -1, "more than %d threadgroup arrays", kMaxThreadgroupArrays);
  Region& array = L.threadgroup_arrays[index];
  if (!array.base) {
    L.report->threadgroup_memory += (bytes + 15) / 16 * 16;
    if (L.report->threadgroup_memory > kThreadgroupLimit)
      fault(PC, -1, "%lu bytes of threadgroup memory; the limit is %zu",
            (unsigned long)L.report->threadgroup_memory, kThreadgroupLimit);
    uint8_t* base = arena() + index * kArenaSlot + kArenaFront;
    array = {name, base, bytes, 0, uint32_t(unit), kThreadgroup, nullptr, nullptr, nullptr};
    array.cells = (Cell*)calloc(bytes / unit, sizeof(Cell));
    memset(array.base, 0xff, bytes);
  }
  return (uint64_t)array.base;
}

EXPORT uint32_t hx_attribute(int index, int axis) {
  const Fiber& f = *L.current;
  const uint32_t full = L.dispatched[0] * L.dispatched[1] * L.dispatched[2], threads = L.threads;
  switch (index) {
    case hx::dispatch_quadgroups_per_threadgroup: return (full + 3) / 4;
    case hx::dispatch_simdgroups_per_threadgroup: return (full + kLanes - 1) / kLanes;
    case hx::dispatch_threads_per_threadgroup: return L.dispatched[axis];
    case hx::grid_origin: return 0;
    case hx::grid_size: return L.grid[axis];
    case hx::quadgroup_index_in_threadgroup: return f.thread / 4;
    case hx::quadgroups_per_threadgroup: return (threads + 3) / 4;
    case hx::simdgroup_index_in_threadgroup: return f.simd;
    case hx::simdgroups_per_threadgroup: return L.simds;
    case hx::thread_execution_width: return kLanes;
    case hx::thread_index_in_quadgroup: return f.thread % 4;
    case hx::thread_index_in_simdgroup: return f.lane;
    case hx::thread_index_in_threadgroup: return f.thread;
    case hx::thread_position_in_grid: return L.group_position[axis] * L.dispatched[axis] + f.position[axis];
    case hx::thread_position_in_threadgroup: return f.position[axis];
    case hx::threadgroup_position_in_grid: return L.group_position[axis];
    case hx::threadgroups_per_grid: return L.groups[axis];
    case hx::threads_per_grid: return L.grid[axis];
    case hx::threads_per_simdgroup: return kLanes;
    case hx::threads_per_threadgroup: return L.group_size[axis];
  }
  __builtin_unreachable();
}

// Clang calls this to convert float to bfloat on processors without an instruction for it.
EXPORT __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint16_t rounded = value != value ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  __bf16 result;
  memcpy(&result, &rounded, 2);
  return result;
}
