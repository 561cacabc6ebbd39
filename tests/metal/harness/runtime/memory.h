// What a launch knows about its memory: where every buffer begins and ends, who touched which element, and when.
//
// Every load and store of a kernel comes here before it happens (see runtime.cpp). Elements are tracked in cells of
// `granule` bytes, the size of a scalar. Cells exist for memory that kernels write: outputs and threadgroup arrays.
//
// Order. Groups run one after another, so each group has a number. Within a group the clock of each kind of memory
// ticks at a barrier that orders that memory: `all` at a threadgroup barrier, `simd[s]` at a barrier of SIMD group
// s, or of all. Two accesses of different threads are ordered if `all` ticked between them, or if both threads are
// of one SIMD group whose clock ticked. That holds whatever order the threads happened to run in.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fibers.h"
#include "shared.h"

// Constants are inputs of few elements; a layout is the shape, strides or ndim of an input.
enum Kind : uint32_t { kInput, kOutput, kInitializedOutput, kConstant, kLayout, kThreadgroup };
constexpr uint32_t kBeforeLaunch = ~0u;  // as the number of the group that wrote a cell of an initialized output

inline bool is_output(Kind kind) { return kind == kOutput || kind == kInitializedOutput; }

struct Cell {
  uint32_t write_group, read_group;  // number of the threadgroup, 0: never
  uint32_t write_all, write_simd;    // the clock at the last write
  uint32_t read_all, read_simd;      // the clock at the last read
  int32_t write_place, read_place;   // where in the kernel's code, or -1
  uint16_t writer, reader;           // threads
  uint8_t readers;                   // since that clock: 0 one thread, 1 several of one SIMD group, 2 several groups
  bool other_group_read;             // a threadgroup other than read_group
};

struct Clock {
  uint32_t all;
  uint32_t simd[kMaxThreads / kLanes];
};

struct Buffer {  // as Python fills it in
  const char* name;
  uint8_t* data;
  uint64_t bytes;
  uint64_t start;  // offset of what the kernel's pointer points to: not 0 with negative strides
  uint32_t granule;
  Kind kind;
};

struct Region {  // a buffer of the launch, or a threadgroup array
  const char* name;
  uint8_t* base;
  uint64_t bytes, start;
  uint32_t granule;
  Kind kind;
  Cell* cells;
  uint32_t* read_marks;  // of an input, per granule: the last group that read it
};

struct Report {  // as Python reads it
  uint64_t read, written, unique_read, unique_written, loaded, stored, threadgroup_memory;
  uint64_t threadgroup_loads, products, barriers, groups;
  int64_t place, other_place;  // of a fault: offsets into the kernel's code, or -1
  char message[1000];
};

constexpr int kMaxBuffers = 64, kMaxSites = 64;
constexpr size_t kArenaSlot = 128 << 10, kArenaFront = 40 << 10;  // 32 KiB at most, with room on both sides
constexpr size_t kThreadgroupLimit = 32 << 10;

struct Launch {
  Report* report;
  void (*entry)();
  uintptr_t code_low, code_high;  // the kernel's shared object

  Region buffers[kMaxBuffers];
  int buffer_count;
  uintptr_t space;  // all buffers, each in a slot of 1 << slot_shift bytes that is mostly unused
  size_t space_bytes;
  int slot_shift;

  Region sites[kMaxSites];

  uint32_t grid[3], dispatched[3], groups[3];  // threads, threads per full group, groups
  uint32_t group_position[3], group_size[3];
  uint32_t group;  // number, from 1
  Fiber fibers[kMaxThreads];
  int threads, simds;
  Clock device_clock, threadgroup_clock;

  Fiber* current;
  void* main_stack_pointer;
  bool faulted;
};

inline Launch L;

inline uint8_t* arena() {
  static uint8_t* p = (uint8_t*)mmap(nullptr, kMaxSites * kArenaSlot, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p;
}

inline int64_t code_offset(const void* place) {
  uintptr_t p = (uintptr_t)place;
  return p >= L.code_low && p < L.code_high ? int64_t(p - L.code_low) : -1;
}

// Notes what went wrong. `place` and `other` say where in the kernel, if known.
inline void record(const void* place, int64_t other, const char* format, va_list arguments) {
  Report& report = *L.report;
  int n = vsnprintf(report.message, sizeof report.message, format, arguments);
  if (n < 0 || n >= int(sizeof report.message)) n = sizeof report.message - 1;
  if (Fiber* f = L.current)
    snprintf(report.message + n, sizeof report.message - n, "; thread (%u, %u, %u) of threadgroup (%u, %u, %u)",
             f->position[0], f->position[1], f->position[2], L.group_position[0], L.group_position[1],
             L.group_position[2]);
  report.place = code_offset(place);
  report.other_place = other;
  L.faulted = true;
}

// From the scheduler, which looks at L.faulted.
__attribute__((format(printf, 3, 4))) inline void stop(const void* place, int64_t other, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  L.current = nullptr;
  record(place, other, format, arguments);
  va_end(arguments);
}

// From a fiber: goes back to the scheduler, for good.
[[noreturn]] __attribute__((format(printf, 3, 4))) inline void fault(const void* place, int64_t other,
                                                                     const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(place, other, format, arguments);
  va_end(arguments);
  void* abandoned;
  hx_switch(&abandoned, L.main_stack_pointer);
  __builtin_unreachable();
}

// One access of the current thread to one cell of memory that threads share.
inline void touch(const Region& r, Cell& c, const Clock& clock, bool write, const void* place) {
  const Fiber& me = *L.current;
  const uint32_t all = clock.all, simd = clock.simd[me.simd];
  const bool device = &clock == &L.device_clock;
  const long index = &c - r.cells;
  // Ordered after an access of the same group by `thread`, at the clock (`then_all`, `then_simd`)?
  auto ordered = [&](uint16_t thread, uint32_t then_all, uint32_t then_simd) {
    return then_all != all || (thread / kLanes == me.simd && then_simd != simd);
  };
  if (c.write_group != L.group) {
    const bool initialized = device && c.write_group == kBeforeLaunch;
    if (device && c.write_group && !initialized)
      fault(place, c.write_place, "two threadgroups touch %s[%ld], one of them writes it", r.name, index);
    if (!write && !initialized)
      fault(place, -1, "%s[%ld] is read before it is written%s", r.name, index, device ? "" : " in this threadgroup");
  } else if (c.writer != me.thread && !ordered(c.writer, c.write_all, c.write_simd)) {
    fault(place, c.write_place, "race: %s[%ld] is %s while thread %u of the group writes it: no barrier between them",
          r.name, index, write ? "written" : "read", c.writer);
  }
  const bool read_here = c.read_group == L.group && c.read_all == all;
  if (write) {
    if (device && c.read_group && (c.read_group != L.group || c.other_group_read))
      fault(place, c.read_place, "two threadgroups touch %s[%ld], one of them writes it", r.name, index);
    const bool others = c.readers || c.reader != me.thread;
    if (read_here && others && (c.readers == 2 || !ordered(c.reader, c.read_all, c.read_simd)))
      fault(place, c.read_place, "race: %s[%ld] is written while %s of the group reads it: no barrier between them",
            r.name, index, c.readers ? "another thread" : "a thread");
    c.write_group = L.group;
    c.write_all = all, c.write_simd = simd;
    c.writer = me.thread;
    c.write_place = code_offset(place);
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
  c.read_place = code_offset(place);
}

[[noreturn]] __attribute__((noinline)) inline void out_of_bounds(const Region& r, int64_t at, size_t n, bool write,
                                                                 const void* place) {
  at -= r.start;
  fault(place, -1, "out of bounds: %s of %zu bytes at %s[%ld], which has %lu elements", write ? "write" : "read", n,
        r.name, long(at >= 0 ? at / r.granule : -((-at + r.granule - 1) / r.granule)),
        (unsigned long)(r.bytes / r.granule));
}

inline void whole_elements(const Region& r, uint64_t at, size_t n, const void* place) {
  if (at % r.granule || n % r.granule)
    fault(place, -1, "a store of %zu bytes writes part of an element of %s: the harness can't follow that", n, r.name);
}

inline void device_access(uintptr_t address, size_t n, bool write, const void* place) {
  const Region& r = L.buffers[(address - L.space) >> L.slot_shift];
  const uint64_t at = address - (uintptr_t)r.base;
  if (at >= r.bytes || n > r.bytes - at) out_of_bounds(r, int64_t(at), n, write, place);
  if (write && !is_output(r.kind)) fault(place, -1, "write to the input %s", r.name);
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
  if (write) whole_elements(r, at, n, place);
  (write ? report.written : report.read) += n;
  for (uint64_t i = first; i <= last; i++) {
    Cell& c = r.cells[i];
    const uint32_t wrote = c.write_group, read = c.read_group;
    touch(r, c, L.device_clock, write, place);
    if (write) {
      if (!wrote || wrote == kBeforeLaunch) report.unique_written += r.granule;
      if (wrote != L.group) report.stored += r.granule;
    } else {
      if (!read) report.unique_read += r.granule;
      if (read != L.group) report.loaded += r.granule;
    }
  }
}

inline void threadgroup_access(uintptr_t address, size_t n, bool write, const void* place) {
  const Region& r = L.sites[(address - (uintptr_t)arena()) / kArenaSlot];
  if (!r.base) fault(place, -1, "access to threadgroup memory that is not declared");
  const uint64_t at = address - (uintptr_t)r.base;
  if (at >= r.bytes || n > r.bytes - at) out_of_bounds(r, int64_t(at), n, write, place);
  if (write) whole_elements(r, at, n, place);
  else L.report->threadgroup_loads++;
  for (uint64_t i = at / r.granule; i <= (at + n - 1) / r.granule; i++)
    touch(r, r.cells[i], L.threadgroup_clock, write, place);
}

inline void access(const void* pointer, size_t n, bool write, const void* place) {
  if (!L.current || !n) return;
  const uintptr_t address = (uintptr_t)pointer;
  if (address - L.space < L.space_bytes) return device_access(address, n, write, place);
  if (address - (uintptr_t)arena() < kMaxSites * kArenaSlot) return threadgroup_access(address, n, write, place);
  if (address - (uintptr_t)L.current->stack < kStackBytes) return;
  if (!write && address >= L.code_low && address < L.code_high) return;  // the kernel's own constants
  fault(place, -1, "%s of %zu bytes outside every buffer, threadgroup array and the thread's own variables",
        write ? "write" : "read", n);
}
