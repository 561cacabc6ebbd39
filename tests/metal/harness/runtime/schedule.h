// Schedules the threads of a threadgroup, and checks barriers and SIMD-group functions for divergence.
//
// A SIMD group runs until each lane waits at a threadgroup barrier or has returned, then the next one runs. The order
// of lanes and SIMD groups is random. All lanes must reach the same call of a SIMD-group function, and all threads of
// the threadgroup the same call of threadgroup_barrier: the same return address (see KERNEL_FLAGS in build.py), with
// the same mem_flags, or for simd_broadcast the same lane.
#pragma once
#include "memory.h"

static uint64_t random_state;
static uint32_t random_below(uint32_t n) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return uint32_t((random_state >> 32) * n >> 32);
}

// Values that the lanes exchange. Double-buffered, since a lane can be one SIMD-group function ahead of others.
struct Exchange {
  uint64_t value[kLanes];
  float a[64], b[64];
  bool reduced;
  uint64_t result;
};
static struct Simd {
  Exchange exchange[2];
  uint32_t active;  // bit mask of the existing lanes
} simds[kMaxThreads / kLanes];

enum Collective { kReduce = 0, kShuffle = 16, kMultiply = 32, kBarrier = 33 };

static const char* name_of(int what) {
  static const char* const reductions[] = {"simd_sum", "simd_min", "simd_max"};
  if (what >= kBarrier) return "simdgroup_barrier";
  if (what >= kMultiply) return "simdgroup_multiply";
  if (what >= kShuffle) return what == kShuffle + hx::broadcast ? "simd_broadcast" : "simd_shuffle";
  return reductions[what - kReduce];
}

static void yield(State state, int what, int flags, const void* pc) {
  Fiber& me = *L.current;
  me.state = state, me.what = what, me.flags = flags, me.pc = pc;
  hx_switch(&me.stack_pointer, L.main_stack_pointer);
}

static void fiber_main() {
  L.entry();
  yield(State::returned, 0, 0, nullptr);
}

static void describe(char (&text)[120], const Fiber& f) {
  if (f.state == State::returned) snprintf(text, sizeof text, "thread %u has returned", f.thread);
  else
    snprintf(text, sizeof text, "thread %u is at %s", f.thread,
             f.state == State::barrier ? "threadgroup_barrier" : name_of(f.what));
}

static void report_divergence(const char* which, const Fiber& waiting, const Fiber& other) {
  char one[120], two[120];
  describe(one, waiting), describe(two, other);
  int64_t there = other.state == State::returned ? -1 : relative_pc(other.pc);
  const char* how = other.state != waiting.state                                         ? ""
                    : other.pc == waiting.pc && other.what == waiting.what ? " with a different argument"
                                                                                         : " in a different place";
  report_fault(waiting.pc, there, "%s divergence: %s, %s%s", which, one, two, how);
}

static bool same_call(const Fiber& a, const Fiber& b) {
  return a.state == b.state && a.pc == b.pc && a.what == b.what && a.flags == b.flags;
}

static void advance_clock(int flags, bool all, int simd) {
  if (flags & hx::device_fence) (all ? L.device_clock.all : L.device_clock.simd[simd])++;
  if (flags & hx::threadgroup_fence) (all ? L.threadgroup_clock.all : L.threadgroup_clock.simd[simd])++;
}

// Runs one SIMD group until each lane waits at a threadgroup barrier or has returned.
static void run_simd(int s) {
  Fiber* first = &L.fibers[s * kLanes];
  const int lanes = L.threads - s * kLanes < kLanes ? L.threads - s * kLanes : kLanes;
  for (;;) {
    const int start = random_below(kLanes), step = random_below(kLanes / 2) * 2 + 1;  // odd: visits all
    for (int i = 0; i < kLanes; i++) {
      const int lane = (start + i * step) % kLanes;
      if (lane >= lanes || first[lane].state != State::runnable) continue;
      L.current = &first[lane];
      hx_switch(&L.main_stack_pointer, first[lane].stack_pointer);
      if (L.faulted) return;
    }
    const Fiber* waiting = nullptr;
    for (int i = 0; i < lanes; i++)
      if (first[i].state == State::collective) waiting = &first[i];
    if (!waiting) return;
    for (int i = 0; i < lanes; i++)
      if (!same_call(*waiting, first[i])) return report_divergence("SIMD-group", *waiting, first[i]);
    if (waiting->what == kBarrier) advance_clock(waiting->flags, false, s);
    const int next = first[0].phase ^ 1;
    simds[s].exchange[next].reduced = false;
    for (int i = 0; i < lanes; i++) first[i].state = State::runnable, first[i].phase = next;
  }
}

static void run_group() {
  L.group++;
  advance_clock(hx::device_fence | hx::threadgroup_fence, true, 0);
  L.threads = L.group_size[0] * L.group_size[1] * L.group_size[2];
  L.simds = (L.threads + kLanes - 1) / kLanes;
  for (Region& array : L.threadgroup_arrays)
    if (array.base) memset(array.base, 0xff, array.bytes);
  for (int t = 0; t < L.threads; t++) {
    Fiber& f = L.fibers[t];
    f.thread = t, f.simd = t / kLanes, f.lane = t % kLanes;
    f.position[0] = t % L.group_size[0];
    f.position[1] = t / L.group_size[0] % L.group_size[1];
    f.position[2] = t / L.group_size[0] / L.group_size[1];
    f.stack = stack_of(t);
    f.state = State::runnable, f.phase = 0;
    prepare(f, fiber_main);
  }
  for (int s = 0; s < L.simds; s++) {
    const int lanes = L.threads - s * kLanes;
    simds[s].active = lanes >= kLanes ? ~0u : (1u << lanes) - 1;
    simds[s].exchange[0].reduced = simds[s].exchange[1].reduced = false;
  }
  for (;;) {
    int order[kMaxThreads / kLanes];
    for (int s = 0; s < L.simds; s++) {
      const int other = random_below(s + 1);
      order[s] = order[other], order[other] = s;
    }
    for (int i = 0; i < L.simds; i++) {
      run_simd(order[i]);
      if (L.faulted) return;
    }
    const Fiber* waiting = nullptr;
    for (int t = 0; t < L.threads; t++)
      if (L.fibers[t].state == State::barrier) waiting = &L.fibers[t];
    if (!waiting) return;
    for (int t = 0; t < L.threads; t++)
      if (!same_call(*waiting, L.fibers[t])) return report_divergence("barrier", *waiting, L.fibers[t]);
    advance_clock(waiting->flags, true, 0);
    for (int t = 0; t < L.threads; t++) L.fibers[t].state = State::runnable;
  }
}
