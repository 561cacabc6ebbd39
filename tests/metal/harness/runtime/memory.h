// Checks accesses to memory: bounds, uninitialized reads, data races.
//
// Each load and store of a kernel is checked before it happens (see runtime.cpp). Outputs and threadgroup arrays have
// shadow cells, one per `granule` bytes (the size of a scalar), which hold the last write and read.
//
// Data races are found with clocks, independently of the order in which the threads happen to run. Threadgroups have
// numbers; accesses of different threadgroups are never ordered. Device and threadgroup memory have a clock each. A
// threadgroup barrier for that memory advances `all`, a barrier of SIMD group s advances `simd[s]`. Two accesses
// of different threads are ordered if `all` advanced in between, or if both threads are in one SIMD group whose clock
// advanced.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fibers.h"
#include "shared.h"

// kConstant: an input of few elements; kLayout: the shape, strides or ndim of an input.
enum Kind : uint32_t { kInput, kOutput, kInitializedOutput, kConstant, kLayout, kThreadgroup };
constexpr uint32_t kBeforeLaunch = ~0u;  // write_group of the cells of an initialized output

inline bool is_output(Kind kind) { return kind == kOutput || kind == kInitializedOutput; }

struct Cell {
  uint32_t write_group, read_group;  // number of the threadgroup; 0: none
  uint32_t write_all, write_simd;    // the clock at the last write
  uint32_t read_all, read_simd;      // the clock at the last read
  int32_t write_pc, read_pc;         // relative to the kernel's code, or -1
  uint16_t writer, reader;           // threads
  uint8_t readers;                   // since that clock: 0 one thread, 1 several of one SIMD group, 2 of several
  bool other_group_read;             // by a threadgroup other than read_group
};

struct Clock {
  uint32_t all;
  uint32_t simd[kMaxThreads / kLanes];
};

struct Buffer {  // matches _Buffer in run.py
  const char* name;
  uint8_t* data;
  uint64_t bytes;
  uint64_t start;  // offset of the kernel's pointer: not 0 with negative strides
  uint32_t granule;
  Kind kind;
};

struct Region {  // a buffer or a threadgroup array
  const char* name;
  uint8_t* base;
  uint64_t bytes, start;
  uint32_t granule;
  Kind kind;
  Cell* cells;
  uint32_t* read_marks;  // of an input, per granule: the last threadgroup that read it
};

struct Report {  // matches _Report in run.py
  uint64_t read, written, unique_read, unique_written, loaded, stored, threadgroup_memory;
  uint64_t threadgroup_loads, products, barriers, groups;
  int64_t pc, other_pc;  // of a fault, relative to the kernel's code, or -1
  char message[1000];
};

constexpr int kMaxBuffers = 64, kMaxThreadgroupArrays = 64;
constexpr size_t kArenaSlot = 128 << 10, kArenaFront = 40 << 10;  // up to 32 KiB, with space on both sides
constexpr size_t kThreadgroupLimit = 32 << 10;

struct Launch {
  Report* report;
  void (*entry)();
  uintptr_t code_low, code_high;  // the kernel's shared object

  Region buffers[kMaxBuffers];
  int buffer_count;
  uintptr_t space;  // of all buffers, each in a slot of 1 << slot_shift bytes
  size_t space_bytes;
  int slot_shift;

  Region threadgroup_arrays[kMaxThreadgroupArrays];

  uint32_t grid[3], dispatched[3], groups[3];  // threads, threads per full group, groups
  uint32_t group_position[3], group_size[3];
  uint32_t group;  // number of the current threadgroup, from 1
  Fiber fibers[kMaxThreads];
  int threads, simds;
  Clock device_clock, threadgroup_clock;

  Fiber* current;
  void* main_stack_pointer;
  bool faulted;
};

inline Launch L;

inline uint8_t* arena() {
  static uint8_t* p = (uint8_t*)mmap(nullptr, kMaxThreadgroupArrays * kArenaSlot, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p;
}

inline int64_t relative_pc(const void* pc) {
  uintptr_t p = (uintptr_t)pc;
  return p >= L.code_low && p < L.code_high ? int64_t(p - L.code_low) : -1;
}

// Writes the report of a fault. `pc` and `other` are the return addresses of the two accesses, if known.
inline void record(const void* pc, int64_t other, const char* format, va_list arguments) {
  Report& report = *L.report;
  int n = vsnprintf(report.message, sizeof report.message, format, arguments);
  if (n < 0 || n >= int(sizeof report.message)) n = sizeof report.message - 1;
  if (Fiber* f = L.current)
    snprintf(report.message + n, sizeof report.message - n, "; thread (%u, %u, %u) in threadgroup (%u, %u, %u)",
             f->position[0], f->position[1], f->position[2], L.group_position[0], L.group_position[1],
             L.group_position[2]);
  report.pc = relative_pc(pc);
  report.other_pc = other;
  L.faulted = true;
}

// Called by the scheduler, which then checks L.faulted.
__attribute__((format(printf, 3, 4))) inline void report_fault(const void* pc, int64_t other, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  L.current = nullptr;
  record(pc, other, format, arguments);
  va_end(arguments);
}

// Called in a fiber. Switches to the scheduler and doesn't return.
[[noreturn]] __attribute__((format(printf, 3, 4))) inline void fault(const void* pc, int64_t other,
                                                                     const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(pc, other, format, arguments);
  va_end(arguments);
  void* abandoned;
  hx_switch(&abandoned, L.main_stack_pointer);
  __builtin_unreachable();
}

// Checks and records one access of the current thread.
inline void check(const Region& r, Cell& c, const Clock& clock, bool write, const void* pc) {
  const Fiber& me = *L.current;
  const uint32_t all = clock.all, simd = clock.simd[me.simd];
  const bool device = &clock == &L.device_clock;
  const long index = &c - r.cells;
  // Whether a barrier orders this access after one of `thread` at the clock (`then_all`, `then_simd`).
  auto ordered = [&](uint16_t thread, uint32_t then_all, uint32_t then_simd) {
    return then_all != all || (thread / kLanes == me.simd && then_simd != simd);
  };
  if (c.write_group != L.group) {
    const bool initialized = device && c.write_group == kBeforeLaunch;
    if (device && c.write_group && !initialized)
      fault(pc, c.write_pc, "data race: %s of %s[%ld] and write by another threadgroup", write ? "write" : "read",
            r.name, index);
    if (!write && !initialized)
      fault(pc, -1, "uninitialized read of %s[%ld]%s", r.name, index,
            device ? "" : ", which this threadgroup has not written");
  } else if (c.writer != me.thread && !ordered(c.writer, c.write_all, c.write_simd)) {
    fault(pc, c.write_pc, "data race: %s of %s[%ld] and write by thread %u of the threadgroup, without a barrier",
          write ? "write" : "read", r.name, index, c.writer);
  }
  const bool read_here = c.read_group == L.group && c.read_all == all;
  if (write) {
    if (device && c.read_group && (c.read_group != L.group || c.other_group_read))
      fault(pc, c.read_pc, "data race: write of %s[%ld] and read by another threadgroup", r.name, index);
    const bool others = c.readers || c.reader != me.thread;
    if (read_here && others && (c.readers == 2 || !ordered(c.reader, c.read_all, c.read_simd)))
      fault(pc, c.read_pc,
            "data race: write of %s[%ld] and read by another thread of the threadgroup, without a barrier", r.name,
            index);
    c.write_group = L.group;
    c.write_all = all, c.write_simd = simd;
    c.writer = me.thread;
    c.write_pc = relative_pc(pc);
    return;
  }
  if (!read_here) {
    c.readers = 0;
  } else if (c.reader / kLanes != me.simd) {
    c.readers = 2;
  } else if (c.readers != 2) {
    if (c.read_simd != simd) c.readers = 0;
    else if (c.reader != me.thread) c.readers = 1;
  }
  if (c.read_group && c.read_group != L.group) c.other_group_read = true;
  c.read_group = L.group;
  c.read_all = all, c.read_simd = simd;
  c.reader = me.thread;
  c.read_pc = relative_pc(pc);
}

[[noreturn]] __attribute__((noinline)) inline void out_of_bounds(const Region& r, int64_t at, size_t n, bool write,
                                                                 const void* pc) {
  at -= r.start;
  fault(pc, -1, "out-of-bounds %s of %zu bytes at %s[%ld], which has %lu elements", write ? "write" : "read", n,
        r.name, long(at >= 0 ? at / r.granule : -((-at + r.granule - 1) / r.granule)),
        (unsigned long)(r.bytes / r.granule));
}

inline void require_whole_elements(const Region& r, uint64_t at, size_t n, const void* pc) {
  if (at % r.granule || n % r.granule)
    fault(pc, -1, "write of %zu bytes to part of an element of %s is not supported by the harness", n, r.name);
}

inline void device_access(uintptr_t address, size_t n, bool write, const void* pc) {
  const Region& r = L.buffers[(address - L.space) >> L.slot_shift];
  const uint64_t at = address - (uintptr_t)r.base;
  if (at >= r.bytes || n > r.bytes - at) out_of_bounds(r, int64_t(at), n, write, pc);
  if (write && !is_output(r.kind)) fault(pc, -1, "write to input %s", r.name);
  if (r.kind == kConstant || r.kind == kLayout) return;
  Report& report = *L.report;
  const uint64_t first = at / r.granule, last = (at + n - 1) / r.granule;
  if (r.kind == kInput) {
    report.read += n;
    for (uint64_t i = first; i <= last; i++) {
      uint32_t& mark = r.read_marks[i];
      if (mark == L.group) continue;
      if (!mark) report.unique_read += r.granule;
      report.loaded += r.granule;
      mark = L.group;
    }
    return;
  }
  if (write) require_whole_elements(r, at, n, pc);
  (write ? report.written : report.read) += n;
  for (uint64_t i = first; i <= last; i++) {
    Cell& c = r.cells[i];
    const uint32_t wrote = c.write_group, read = c.read_group;
    check(r, c, L.device_clock, write, pc);
    if (write) {
      if (!wrote || wrote == kBeforeLaunch) report.unique_written += r.granule;
      if (wrote != L.group) report.stored += r.granule;
    } else {
      if (!read) report.unique_read += r.granule;
      if (read != L.group) report.loaded += r.granule;
    }
  }
}

inline void threadgroup_access(uintptr_t address, size_t n, bool write, const void* pc) {
  const Region& r = L.threadgroup_arrays[(address - (uintptr_t)arena()) / kArenaSlot];
  if (!r.base) fault(pc, -1, "out-of-bounds %s of %zu bytes of threadgroup memory", write ? "write" : "read", n);
  const uint64_t at = address - (uintptr_t)r.base;
  if (at >= r.bytes || n > r.bytes - at) out_of_bounds(r, int64_t(at), n, write, pc);
  if (write) require_whole_elements(r, at, n, pc);
  else L.report->threadgroup_loads++;
  for (uint64_t i = at / r.granule; i <= (at + n - 1) / r.granule; i++)
    check(r, r.cells[i], L.threadgroup_clock, write, pc);
}

inline void access(const void* pointer, size_t n, bool write, const void* pc) {
  if (!L.current || !n) return;
  const uintptr_t address = (uintptr_t)pointer;
  if (address - L.space < L.space_bytes) return device_access(address, n, write, pc);
  if (address - (uintptr_t)arena() < kMaxThreadgroupArrays * kArenaSlot)
    return threadgroup_access(address, n, write, pc);
  if (address - (uintptr_t)L.current->stack < kStackBytes) return;
  if (!write && address >= L.code_low && address < L.code_high) return;  // constants of the kernel
  fault(pc, -1, "out-of-bounds %s of %zu bytes: not in a buffer, threadgroup array or local variable",
        write ? "write" : "read", n);
}
