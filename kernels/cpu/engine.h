// What a step works on and outlives it: a model, its threads, their memory; and the step's plan of
// attention.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>

#include "attention.h"
#include "draw.h"
#include "lora.h"
#include "shares.h"
#include "team.h"

namespace loraplex {

// Zeroed memory that is taken when it is first touched.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_((size_t)round_up(bytes + 1, 1 << 21)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  template <class T>
  T* as() const {
    return (T*)data_;
  }

 private:
  size_t bytes_;
  void* data_;
};

// From one row of so many bytes to the next: an odd number of cache lines, so that rows do not
// share a few sets of a cache.
inline int64_t row_bytes(int64_t bytes) { return (ceil_div(bytes, kLine) | 1) * kLine; }

// Rows of fp32, padded to whole vectors.
struct Buffer {
  int64_t ld;
  Memory memory;
  Buffer(int64_t rows, int64_t columns) : ld(row_bytes(columns * 4) / 4), memory(rows * ld * 4) {}
  float* row(int64_t r) const { return memory.as<float>() + r * ld; }
};

// Rows that enter products, as fp32 or, where these multiply it, as bf16.
class Operand {
 public:
  Operand(int64_t rows, int64_t columns, bool bf16_rows)
      : bf16_rows_(bf16_rows),
        ld_(row_bytes(columns * (bf16_rows ? 2 : 4)) / (bf16_rows ? 2 : 4)),
        memory_(rows * ld_ * (bf16_rows ? 2 : 4)) {}

  Rows rows() const { return {memory_.as<void>(), ld_}; }
  const float* row(int64_t r) const { return memory_.as<float>() + r * ld_; }  // of fp32
  // Sets W columns of a row; `at(r)` is what does so for one row.
  LPX_INLINE void put(int64_t r, int64_t column, F v) const {
    if (bf16_rows_)
      store_bf16(memory_.as<bf16>() + r * ld_ + column, v);
    else
      store(memory_.as<float>() + r * ld_ + column, v);
  }
  auto at(int64_t r) const {
    return [this, r](int64_t column, F v) __attribute__((always_inline)) { put(r, column, v); };
  }

 private:
  bool bf16_rows_;
  int64_t ld_;
  Memory memory_;
};

// Some rows of one sequence that attend together; the first is number `out` of those that do. When
// parts of the context are shared among threads, their results go to slots from `slot` on.
struct AttentionTile {
  int64_t sequence, row, rows, out, parts, slot;
};

// The rows that go on: all of a batch, or, once the last layer's keys are kept, those that are
// wanted, numbered anew.
struct Going {
  int64_t rows = 0, slots = 0, slot_floats = 0;
  std::vector<Segment> segments;
  std::vector<AttentionTile> tiles;
  std::vector<std::pair<int64_t, int64_t>> shared;  // (tile, part) when parts are shared
};

struct Engine {
  const Model& m;
  Team team;
  int64_t max_rows, width, groups;
  Buffer x, qkv, h;
  Operand xn, attended, active;
  Memory rounded, scale, start;  // rows of integers; fp32 and int32 [rows, groups]
  std::vector<float> best;       // [threads, wanted]
  std::vector<int32_t> best_token;
  Going all, last;  // the rows of the step, and of its last layer
  std::vector<float> partial;
  std::vector<std::unique_ptr<AttentionScratch>> scratch;
  std::atomic<int64_t> next_tile;  // of those whose parts are merged
  Shares attention_shares;         // of its items
  Shares shares[2];                // of the products' panels, in turn
  std::vector<Drawer> drawers;     // one a thread

  Engine(const Model& model, int64_t rows, int64_t wanted, int threads, const int32_t* cores)
      : m(model),
        team(threads, cores),
        max_rows(rows > wanted ? rows : wanted),
        width(std::max({m.hidden, m.heads * m.head_dim, m.inner})),
        groups(ceil_div(width, kGroup)),
        x(rows, m.hidden),
        qkv(rows, (m.heads + 2 * m.kv_heads) * m.head_dim),
        h(max_rows + threads * kSegmentRows, kRankStride),  // and some rows of each thread's own
        xn(max_rows, m.hidden, m.activations == kActBf16),
        attended(rows, m.heads * m.head_dim, m.activations == kActBf16),
        active(rows, m.inner, m.activations == kActBf16),
        rounded(max_rows * row_bytes(width * 2)),
        scale(max_rows * groups * 4),
        start(max_rows * groups * 4),
        best(threads * wanted),
        best_token(threads * wanted),
        attention_shares(threads),
        shares{Shares(threads), Shares(threads)},
        drawers(threads, Drawer(m.vocab)) {
    for (int t = 0; t < threads; t++)
      scratch.push_back(std::make_unique<AttentionScratch>(m.head_dim));
  }
};

}  // namespace loraplex
