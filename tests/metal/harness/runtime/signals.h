// Turns crashes and endless loops of a kernel into faults, so that they don't end the process.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

#include "memory.h"

static const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
constexpr int kSignalCount = sizeof kSignals / sizeof *kSignals;
static struct {
  struct sigaction actions[kSignalCount];
  stack_t stack;
  itimerval limit;
} before;  // of the process, restored after the launch
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
  // Only a fiber (its stack or the guard page below it) can switch to the scheduler.
  if (!here || !L.current || stack - (uintptr_t)(L.current->stack - kGuardBytes) > kStackBytes + kGuardBytes) {
    for (int i = 0; i < kSignalCount; i++)  // not in a kernel: return to the instruction, with the old handler
      if (kSignals[i] == number && number != SIGVTALRM) sigaction(number, &before.actions[i], nullptr);
    return;  // the timer repeats
  }
  const char* what = "";
  switch (number) {
    case SIGVTALRM: fault(nullptr, -1, "timeout after %g seconds of CPU time", seconds_allowed);
    case SIGFPE: what = ": integer division overflow"; break;
    case SIGSEGV: what = " (stack overflow?)";
  }
  fault((const void*)(at + 1), -1, "signal %d%s", number, what);  // + 1: like a return address
}

static void install_handlers(double seconds) {
  static uint8_t stack[64 << 10];
  launching = pthread_self();
  seconds_allowed = seconds;
  stack_t current_exchange = {stack, 0, sizeof stack};
  sigaltstack(&current_exchange, &before.stack);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_ONSTACK | SA_NODEFER | SA_SIGINFO;  // the handler switches stacks and doesn't return
  for (int i = 0; i < kSignalCount; i++) sigaction(kSignals[i], &action, &before.actions[i]);
  const itimerval limit = {{0, 10000}, {time_t(seconds), suseconds_t((seconds - time_t(seconds)) * 1e6)}};
  setitimer(ITIMER_VIRTUAL, &limit, &before.limit);
}

static void restore_handlers() {
  setitimer(ITIMER_VIRTUAL, &before.limit, nullptr);
  for (int i = 0; i < kSignalCount; i++) sigaction(kSignals[i], &before.actions[i], nullptr);
  sigaltstack(&before.stack, nullptr);
}
