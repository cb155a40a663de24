// What one thread knows of the step that it shares.
#pragma once
#include <ctime>

#include "plan.h"

namespace loraplex {

enum Phase { kNorm, kShrink, kQkv, kAttention, kO, kGateUp, kDown, kHead };

inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct Frame {
  Engine& e;
  const Model& m;
  const Batch& b;
  const int t, threads;
  const Going* going = &e.all;
  double clock = now();

  // The first of this thread's share of n things; the share ends where the next one's begins.
  int64_t share(int64_t n, int of) const { return n * of / threads; }
  int64_t begin(int64_t n) const { return share(n, t); }
  int64_t end(int64_t n) const { return share(n, t + 1); }
  void meet() { e.team.barrier(); }

  // Adds the time since the last lap to a phase.
  void lap(Phase phase) {
    if (t || !b.seconds) return;
    const double at = now();
    b.seconds[phase] += at - clock;
    clock = at;
  }
};

}  // namespace loraplex
