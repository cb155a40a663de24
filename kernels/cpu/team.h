// A fixed set of threads that run one function together with the caller, and meet at barriers
// within it.
//
// Waiting spins for a short bounded time; then it yields (within a job) or sleeps (between jobs),
// so that a busy neighbour costs a time slice and an idle engine costs nothing. An OpenMP region
// costs tens of microseconds where this costs less than one.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>
#ifdef __linux__
#include <sched.h>
#endif

namespace loraplex {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void pin_to(int32_t core) {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set,
                    &set);  // a core that is not ours leaves the thread where it may run
#else
  (void)core;
#endif
}

class Team {
 public:
  typedef void (*Job)(void*, int thread, int threads);

  Team(int threads, const int32_t* cores) : size_(threads) {
    if (cores) pin_to(cores[0]);
    for (int t = 1; t < size_; t++)
      threads_.emplace_back([this, t, core = cores ? cores[t] : -1] {
        if (core >= 0) pin_to(core);
        serve(t);
      });
  }
  ~Team() {
    stop_ = true;
    wake();
    for (auto& t : threads_)
      t.join();
  }
  int size() const { return size_; }

  void run(Job job, void* argument) {
    job_ = job, argument_ = argument;
    wake();
    job(argument, 0, size_);
    barrier();
  }

  void barrier() {
    if (size_ == 1) return;
    const uint32_t now = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(now + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; generation_.load(std::memory_order_acquire) == now; i++) {
      if (i < kSpin)
        relax();
      else
        std::this_thread::yield();
    }
  }

 private:
  static constexpr int kSpin = 4000, kSpinIdle = 20000;  // some 12 ns each

  void wake() {
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (!sleepers_.load(std::memory_order_seq_cst)) return;
    std::lock_guard<std::mutex> hold(mutex_);
    awake_.notify_all();
  }

  void serve(int t) {
    for (uint32_t seen = 0;;) {
      for (int i = 0; epoch_.load(std::memory_order_acquire) == seen; i++) {
        if (i < kSpinIdle)
          relax();
        else
          sleep_past(seen);
      }
      seen++;
      if (stop_) return;
      job_(argument_, t, size_);
      barrier();
    }
  }

  void sleep_past(uint32_t seen) {
    std::unique_lock<std::mutex> hold(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    awake_.wait(hold, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  const int size_;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  Job job_ = nullptr;
  void* argument_ = nullptr;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable awake_;
  std::vector<std::thread> threads_;
};

}  // namespace loraplex
