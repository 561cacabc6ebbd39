// A division by zero, a stack that overflows or a loop without end would otherwise take the whole test run along.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

#include "memory.h"

// The traps of -fsanitize-trap are SIGILL on x86-64 and SIGTRAP on aarch64.
static const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGVTALRM};
constexpr int kSignalCount = sizeof kSignals / sizeof *kSignals;
static struct {
  struct sigaction actions[kSignalCount];
  stack_t stack;
  itimerval limit;
} before;  // what the process had set, put back after the launch
static pthread_t launching;
static double seconds_allowed;

static void on_signal(int number, siginfo_t*, void* context) {
  const bool here = pthread_equal(pthread_self(), launching);
  if (number == SIGVTALRM && !here) {
    pthread_kill(launching, number);
    return;
  }
  const mcontext_t& machine = ((ucontext_t*)context)->uc_mcontext;
#if defined(__x86_64__)
  const uintptr_t at = machine.gregs[REG_RIP], stack = machine.gregs[REG_RSP];
#else
  const uintptr_t at = machine.pc, stack = machine.sp;
#endif
  // Only from a fiber's stack (or the guard below it) is there a way back to the scheduler.
  if (!here || !L.current || stack - (uintptr_t)(L.current->stack - kGuardBytes) > kStackBytes + kGuardBytes) {
    for (int i = 0; i < kSignalCount; i++)  // not a kernel's: the instruction runs again, under the old handler
      if (kSignals[i] == number && number != SIGVTALRM) sigaction(number, &before.actions[i], nullptr);
    return;  // the timer comes again
  }
  const char* what = "";
  switch (number) {
    case SIGVTALRM: fault(nullptr, -1, "still running after %g seconds of processor time", seconds_allowed);
    case SIGILL:
    case SIGTRAP: what = ": an index outside an array of the kernel's own, or a division by zero"; break;
    case SIGFPE: what = ": an integer division without a result"; break;
    case SIGSEGV: what = " (out of stack?)";
  }
  fault((const void*)(at + 1), -1, "stopped by signal %d%s", number, what);  // + 1: places are return addresses
}

static void watch(double seconds) {
  static uint8_t stack[64 << 10];
  launching = pthread_self();
  seconds_allowed = seconds;
  stack_t mine = {stack, 0, sizeof stack};
  sigaltstack(&mine, &before.stack);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_ONSTACK | SA_NODEFER | SA_SIGINFO;  // the handler does not return: it switches stacks
  for (int i = 0; i < kSignalCount; i++) sigaction(kSignals[i], &action, &before.actions[i]);
  const itimerval limit = {{0, 10000}, {time_t(seconds), suseconds_t((seconds - time_t(seconds)) * 1e6)}};
  setitimer(ITIMER_VIRTUAL, &limit, &before.limit);
}

static void unwatch() {
  setitimer(ITIMER_VIRTUAL, &before.limit, nullptr);
  for (int i = 0; i < kSignalCount; i++) sigaction(kSignals[i], &before.actions[i], nullptr);
  sigaltstack(&before.stack, nullptr);
}
