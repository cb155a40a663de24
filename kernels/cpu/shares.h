// The items of one product, shared among threads: each has a share of its own, which it takes from
// the front; whoever has done its own takes from the back of another's. So a core that is slower
// for a moment keeps nobody waiting, and weights still come in the order in which they lie.
//
// This file knows numbers of items; it refuses to know what they are.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

namespace loraplex {

class Shares {
 public:
  explicit Shares(int threads) : taken_(threads) {}

  // Nothing of a thread's share is taken yet.
  void renew(int thread) { taken_[thread].ends.store(0, std::memory_order_relaxed); }
  // Takes items for a thread until none is left: take(owner, item, the item of this share that is
  // likely taken then or -1), with count(owner) items in each share.
  template <class Count, class Take>
  void walk(int thread, int threads, Count count, Take take) {
    for (int i = 0; i < threads; i++) {
      const int owner = (thread + i) % threads;
      const int64_t n = count(owner);
      for (;;) {
        const int64_t at = i ? take_last(owner, n) : take_first(owner, n);
        if (at < 0) break;
        const int64_t next = i ? at - 1 : at + 1;
        take(owner, at, next < n ? next : -1);
      }
    }
  }

 private:
  // The number of the next item of a share of n, from its front or its back; -1 when all are taken.
  int64_t take_first(int thread, int64_t n) {
    const Ends was = take(thread, n, {1, 0});
    return was.front + was.back < n ? was.front : -1;
  }
  int64_t take_last(int thread, int64_t n) {
    const Ends was = take(thread, n, {0, 1});
    return was.front + was.back < n ? n - 1 - was.back : -1;
  }

  struct Ends {  // how many are taken from either
    int64_t front, back;
  };
  Ends take(int thread, int64_t n, Ends more) {
    std::atomic<uint64_t>& ends = taken_[thread].ends;
    uint64_t was = ends.load(std::memory_order_relaxed);
    Ends at;
    do {
      at = {(int64_t)(was >> 32), (int64_t)(uint32_t)was};
    } while (at.front + at.back < n &&
             !ends.compare_exchange_weak(was, was + ((uint64_t)more.front << 32) + more.back,
                                         std::memory_order_relaxed));
    return at;
  }

  struct alignas(64) Taken {
    std::atomic<uint64_t> ends{0};
  };
  std::vector<Taken> taken_;
};

}  // namespace loraplex
