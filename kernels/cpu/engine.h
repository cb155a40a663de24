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

// fp32 rows, padded to whole vectors.
struct Buffer {
  int64_t ld;
  Memory memory;
  Buffer(int64_t rows, int64_t columns) : ld(round_up(columns, 16)), memory(rows * ld * 4) {}
  float* row(int64_t r) const { return memory.as<float>() + r * ld; }
};

// From one rounded row of k values to the next: an odd number of cache lines, so that rows do not
// share a few sets of a cache.
inline int64_t rounded_ld(int64_t k) { return (ceil_div(k * 2, kLine) | 1) * (kLine / 2); }

// Some rows of one sequence that attend together. When parts of the context are shared among
// threads, their results go to slots from `slot` on.
struct AttentionTile {
  int64_t sequence, row, rows, parts, slot;
};

struct Engine {
  const Model& m;
  Team team;
  int64_t max_rows, width, groups;
  Buffer x, xn, qkv, attended, active, h;
  Memory rounded, scale;    // rows that are not fp32: int16 or bf16; [rows, groups]
  std::vector<float> best;  // [threads, wanted]
  std::vector<int32_t> best_token;
  std::vector<AttentionTile> tiles;
  std::vector<std::pair<int64_t, int64_t>> shared;  // (tile, part) when parts are shared
  std::vector<float> partial;
  int64_t slot_floats = 0;
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
        xn(max_rows, m.hidden),
        qkv(rows, (m.heads + 2 * m.kv_heads) * m.head_dim),
        attended(rows, m.heads * m.head_dim),
        active(rows, m.inner),
        h(rows, kRankStride),
        rounded(max_rows * rounded_ld(width) * 2),
        scale(max_rows * groups * 4),
        best(threads * wanted),
        best_token(threads * wanted),
        attention_shares(threads),
        shares{Shares(threads), Shares(threads)},
        drawers(threads, Drawer(m.vocab)) {
    for (int t = 0; t < threads; t++)
      scratch.push_back(std::make_unique<AttentionScratch>(m.head_dim));
  }
};

// The step's attention as tiles; a few long contexts are shared by parts, so that all threads have
// work.
void plan_attention(Engine& e, const Batch& b) {
  e.tiles.clear(), e.shared.clear();
  int64_t longest = 0, slots = 0, rows = 0;
  for (int64_t s = 0; s < b.sequences; s++) {
    const Sequence& q = b.sequence[s];
    for (int64_t row = q.start; row < q.end; row += kTilePositions) {
      const int64_t count = std::min(kTilePositions, q.end - row),
                    end = q.context - (q.end - row) + count;
      const int64_t parts = ceil_div(end, kPartKeys);
      e.tiles.push_back({s, row, count, parts, slots});
      slots += parts, longest = std::max(longest, parts), rows = std::max(rows, count);
    }
  }
  const int64_t heads = std::min<int64_t>(e.m.heads / e.m.kv_heads, kTileQueries),
                groups = e.m.kv_heads * ceil_div(e.m.heads / e.m.kv_heads, heads);
  if (longest == 1 || (int64_t)e.tiles.size() * groups >= 4 * e.team.size() || e.team.size() == 1)
    return;
  for (int64_t i = 0; i < (int64_t)e.tiles.size(); i++)
    for (int64_t part = 0; part < e.tiles[i].parts; part++)
      e.shared.push_back({i, part});
  e.slot_floats = round_up(rows * heads * (e.m.head_dim + 2), 16);
  e.partial.resize(slots * groups * e.slot_floats);
}

}  // namespace loraplex
