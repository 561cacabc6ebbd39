// A division by zero, a stack that overflows or a loop without end would otherwise take the whole test run along.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

#include "memory.h"

constexpr int kSecondsOfProcessor = 60;
static const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
static struct sigaction previous[5];
static pthread_t launching;

static void on_signal(int number, siginfo_t*, void*) {
  if (!pthread_equal(pthread_self(), launching)) {
    if (number == SIGVTALRM) pthread_kill(launching, number);
    else signal(number, SIG_DFL);
    return;
  }
  if (!L.current) {
    if (number != SIGVTALRM) signal(number, SIG_DFL);
    return;
  }
  if (number == SIGVTALRM) fault(nullptr, -1, "still running after %d seconds", kSecondsOfProcessor);
  const char* what = number == SIGFPE ? " (a division by zero?)" : number == SIGSEGV ? " (out of stack?)" : "";
  fault(nullptr, -1, "stopped by signal %d%s", number, what);
}

static void watch(bool on) {
  static uint8_t stack[64 << 10];
  if (on) {
    launching = pthread_self();
    stack_t mine = {stack, 0, sizeof stack};
    sigaltstack(&mine, nullptr);
  }
  for (int i = 0; i < 5; i++) {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_ONSTACK | SA_NODEFER | SA_SIGINFO;  // the handler does not return: it switches stacks
    sigaction(kSignals[i], on ? &action : &previous[i], on ? &previous[i] : nullptr);
  }
  itimerval limit = {{0, 0}, {on ? kSecondsOfProcessor : 0, 0}};
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);
}
