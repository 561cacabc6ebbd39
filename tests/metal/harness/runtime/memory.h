// Checks accesses to memory: bounds, uninitialized reads, data races.
//
// Each load and store of a kernel is checked before it happens (see runtime.cpp). Outputs and threadgroup arrays have
// shadow cells, one per `granule` bytes (the size of a scalar), which hold the last write and read, and the last atomic
// ones. Two accesses can race if one of them is a write and not both are atomic.
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
enum Kind : uint32_t { kInput, kOutput, kConstant, kLayout, kThreadgroup };

struct Access {              // the last one of its kind to a cell
  uint32_t group;            // number of the threadgroup; 0: none
  uint32_t all, simd;        // the clock
  int32_t pc;                // relative to the kernel's code, or -1
  uint16_t thread;
  uint8_t threads;           // since that clock: 0 one, 1 several of one SIMD group, 2 several of different SIMD groups
  bool other_groups;         // earlier accesses by other threadgroups
};

struct Cell {
  Access write, read;
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
  Cell* atomic_cells;  // allocated at the first atomic access
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

enum Mode { kRead = 1, kWrite = 2, kAtomic = 4 };

inline const char* name_of_mode(int mode) {
  if (mode & kAtomic) return mode == (kAtomic | kRead) ? "atomic load" : "atomic write";
  return mode & kWrite ? "write" : "read";
}

// Faults if `other`, an access of mode `other_mode`, is not ordered with one of the current thread.
inline void check_race(const Access& other, int other_mode, int mode, const Region& r, long index, const Clock& clock,
                       const void* pc) {
  const Fiber& me = *L.current;
  const bool device = &clock == &L.device_clock;
  if (!other.group) return;
  if (device && (other.group != L.group || other.other_groups))
    fault(pc, other.pc, "data race: %s of %s[%ld] and %s by another threadgroup", name_of_mode(mode), r.name, index,
          name_of_mode(other_mode));
  if (other.group != L.group || other.all != clock.all) return;
  const bool same_simd_group = other.threads != 2 && other.thread / kLanes == me.simd;
  if (same_simd_group && other.simd != clock.simd[me.simd]) return;
  if (!other.threads && other.thread == me.thread) return;
  char threads[40] = "other threads";
  if (!other.threads) snprintf(threads, sizeof threads, "thread %u", other.thread);
  fault(pc, other.pc, "data race: %s of %s[%ld] and %s by %s of the threadgroup, without a barrier",
        name_of_mode(mode), r.name, index, name_of_mode(other_mode), threads);
}

inline void record_access(Access& a, const Clock& clock, const void* pc) {
  const Fiber& me = *L.current;
  const uint32_t simd = clock.simd[me.simd];
  if (a.group != L.group || a.all != clock.all) a.threads = 0;
  else if (a.thread / kLanes != me.simd) a.threads = 2;
  else if (a.threads != 2 && a.simd != simd) a.threads = 0;
  else if (a.threads == 0 && a.thread != me.thread) a.threads = 1;
  if (a.group && a.group != L.group) a.other_groups = true;
  a.group = L.group;
  a.all = clock.all, a.simd = simd;
  a.thread = me.thread;
  a.pc = relative_pc(pc);
}

// Checks and records one access of the current thread to a cell.
inline void check(Region& r, long index, const Clock& clock, int mode, const void* pc) {
  Cell& c = r.cells[index];
  const bool device = &clock == &L.device_clock, write = mode & kWrite;
  if (mode & kAtomic && !r.atomic_cells)
    r.atomic_cells = (Cell*)calloc(r.bytes / r.granule + 1, sizeof(Cell));
  Cell* atomic = r.atomic_cells ? &r.atomic_cells[index] : nullptr;
  check_race(c.write, kWrite, mode, r, index, clock, pc);
  if (write) check_race(c.read, kRead, mode, r, index, clock, pc);
  if (atomic && !(mode & kAtomic)) {
    check_race(atomic->write, kAtomic | kWrite, mode, r, index, clock, pc);
    if (write) check_race(atomic->read, kAtomic | kRead, mode, r, index, clock, pc);
  }
  auto wrote = [&](const Access& a) { return device ? a.group != 0 : a.group == L.group; };
  if (mode & kRead && !wrote(c.write) && !(atomic && wrote(atomic->write)))
    fault(pc, -1, "uninitialized %s of %s[%ld]%s", mode & kAtomic ? "atomic read" : "read", r.name, index,
          device ? "" : ", which this threadgroup has not written");
  record_access(mode & kAtomic ? write ? atomic->write : atomic->read : write ? c.write : c.read, clock, pc);
}

[[noreturn]] __attribute__((noinline)) inline void out_of_bounds(const Region& r, int64_t at, size_t n, int mode,
                                                                 const void* pc) {
  at -= r.start;
  fault(pc, -1, "out-of-bounds %s of %zu bytes at %s[%ld], which has %lu elements", name_of_mode(mode), n, r.name,
        long(at >= 0 ? at / r.granule : -((-at + r.granule - 1) / r.granule)), (unsigned long)(r.bytes / r.granule));
}

inline void require_whole_elements(const Region& r, uint64_t at, size_t n, const void* pc) {
  if (at % r.granule || n % r.granule)
    fault(pc, -1, "write of %zu bytes to part of an element of %s is not supported by the harness", n, r.name);
}

inline void device_access(uintptr_t address, size_t n, int mode, const void* pc) {
  Region& r = L.buffers[(address - L.space) >> L.slot_shift];
  const uint64_t at = address - (uintptr_t)r.base;
  if (at >= r.bytes || n > r.bytes - at) out_of_bounds(r, int64_t(at), n, mode, pc);
  if (mode & kWrite && r.kind != kOutput) fault(pc, -1, "write to input %s", r.name);
  if (r.kind == kConstant || r.kind == kLayout) return;
  Report& report = *L.report;
  const uint64_t first = at / r.granule, last = (at + n - 1) / r.granule;
  if (mode & kRead) report.read += n;
  if (r.kind == kInput) {
    for (uint64_t i = first; i <= last; i++) {
      uint32_t& mark = r.read_marks[i];
      if (mark == L.group) continue;
      if (!mark) report.unique_read += r.granule;
      report.loaded += r.granule;
      mark = L.group;
    }
    return;
  }
  if (mode & kWrite) {
    require_whole_elements(r, at, n, pc);
    report.written += n;
  }
  for (uint64_t i = first; i <= last; i++) {
    const Cell& c = r.cells[i];
    const uint32_t wrote = c.write.group, read = c.read.group;
    check(r, i, L.device_clock, mode, pc);
    if (mode & kAtomic) continue;  // counted in `read` and `written` only
    if (mode & kWrite) {
      if (!wrote) report.unique_written += r.granule;
      if (wrote != L.group) report.stored += r.granule;
    } else {
      if (!read) report.unique_read += r.granule;
      if (read != L.group) report.loaded += r.granule;
    }
  }
}

inline void threadgroup_access(uintptr_t address, size_t n, int mode, const void* pc) {
  Region& r = L.threadgroup_arrays[(address - (uintptr_t)arena()) / kArenaSlot];
  if (!r.base) fault(pc, -1, "out-of-bounds %s of %zu bytes of threadgroup memory", name_of_mode(mode), n);
  const uint64_t at = address - (uintptr_t)r.base;
  if (at >= r.bytes || n > r.bytes - at) out_of_bounds(r, int64_t(at), n, mode, pc);
  if (mode & kWrite) require_whole_elements(r, at, n, pc);
  if (mode & kRead) L.report->threadgroup_loads++;
  for (uint64_t i = at / r.granule; i <= (at + n - 1) / r.granule; i++) check(r, i, L.threadgroup_clock, mode, pc);
}

inline void access(const void* pointer, size_t n, int mode, const void* pc) {
  if (!L.current || !n) return;
  const uintptr_t address = (uintptr_t)pointer;
  if (address - L.space < L.space_bytes) return device_access(address, n, mode, pc);
  if (address - (uintptr_t)arena() < kMaxThreadgroupArrays * kArenaSlot)
    return threadgroup_access(address, n, mode, pc);
  if (address - (uintptr_t)L.current->stack < kStackBytes) return;
  if (mode == kRead && address >= L.code_low && address < L.code_high) return;  // constants of the kernel
  fault(pc, -1, "out-of-bounds %s of %zu bytes: not in a buffer, threadgroup array or local variable",
        name_of_mode(mode), n);
}
