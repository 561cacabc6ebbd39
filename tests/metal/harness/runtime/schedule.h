// Which thread runs when, and where threads wait for each other.
//
// A SIMD group runs until all its lanes wait at a threadgroup barrier or have returned; then the next one does. The
// order of lanes and of SIMD groups is by lot. All lanes must come to the same collective, and all threads of the
// threadgroup to the same barrier: "the same" is the same call in the compiled kernel, told by its return address,
// with the same fence or, of simd_broadcast, the same lane. (build.py has the compiler keep calls apart.)
#pragma once
#include "memory.h"

static uint64_t random_state;
static uint32_t random_below(uint32_t n) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return uint32_t((random_state >> 32) * n >> 32);
}

// What lanes hand to each other. Double-buffered: a lane may be one collective ahead of the others, not two.
struct Exchange {
  uint64_t value[kLanes];
  float a[64], b[64];
  bool reduced;
  uint64_t result;
};
static struct Simd {
  Exchange exchange[2];
  uint32_t active;  // mask of the lanes that exist
} simds[kMaxThreads / kLanes];

enum What { kReduce = 16, kShuffle = 32, kMultiply = 48, kBarrier = 49 };

static const char* name_of(int what) {
  static const char* const names[] = {"simdgroup_load", "simdgroup_store"};
  static const char* const reductions[] = {"simd_sum", "simd_product", "simd_min", "simd_max"};
  if (what >= kBarrier) return "simdgroup_barrier";
  if (what >= kMultiply) return "simdgroup_multiply";
  if (what >= kShuffle) return what == kShuffle + hx::broadcast ? "simd_broadcast" : "a SIMD shuffle";
  if (what >= kReduce) return reductions[what - kReduce];
  return names[what];
}

static void yield(State state, int what, int flags, const void* place) {
  Fiber& me = *L.current;
  me.state = state, me.what = what, me.flags = flags, me.place = place;
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

static void diverged(const char* which, const Fiber& waiting, const Fiber& other) {
  char one[120], two[120];
  describe(one, waiting), describe(two, other);
  int64_t there = other.state == State::returned ? -1 : code_offset(other.place);
  const char* how = other.state != waiting.state                                         ? ""
                    : other.place == waiting.place && other.what == waiting.what ? " with another argument"
                                                                                         : " elsewhere";
  stop(waiting.place, there, "divergent %s: %s, %s%s", which, one, two, how);
}

static bool together(const Fiber& a, const Fiber& b) {
  return a.state == b.state && a.place == b.place && a.what == b.what && a.flags == b.flags;
}

static void tick(int flags, bool all, int simd) {
  if (flags & hx::device_fence) (all ? L.device_clock.all : L.device_clock.simd[simd])++;
  if (flags & hx::threadgroup_fence) (all ? L.threadgroup_clock.all : L.threadgroup_clock.simd[simd])++;
}

// Runs the lanes of one SIMD group until each waits at a threadgroup barrier or has returned.
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
      if (!together(*waiting, first[i])) return diverged("SIMD collective", *waiting, first[i]);
    if (waiting->what == kBarrier) tick(waiting->flags, false, s);
    const int next = first[0].phase ^ 1;
    simds[s].exchange[next].reduced = false;
    for (int i = 0; i < lanes; i++) first[i].state = State::runnable, first[i].phase = next;
  }
}

static void run_group() {
  L.group++;
  tick(hx::device_fence | hx::threadgroup_fence, true, 0);
  L.threads = L.group_size[0] * L.group_size[1] * L.group_size[2];
  L.simds = (L.threads + kLanes - 1) / kLanes;
  for (Region& site : L.sites)
    if (site.base) memset(site.base, 0xff, site.bytes);
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
      if (!together(*waiting, L.fibers[t])) return diverged("threadgroup_barrier", *waiting, L.fibers[t]);
    tick(waiting->flags, true, 0);
    for (int t = 0; t < L.threads; t++) L.fibers[t].state = State::runnable;
  }
}
