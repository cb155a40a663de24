// Causal attention over the paged KV cache, for prefill and decode rows alike.
//
// Semantics: O[t, h] = sum_j softmax_j(cap(scale Q[t, h] . K[j, g(h)])) V[j, g(h)] over the keys j
// of t's own sequence with p(t) - window < j <= p(t), p being positions and g mapping heads to KV
// heads.
//
// Where keys and values have scales (cache.h), scores are multiplied by those of their keys, and
// weights, once the softmax has its total, by those of their values.
//
// Keys are taken in parts of kPartKeys at fixed places of the sequence. Each part has a softmax of
// its own, and parts are merged in order (Milakov and Gimelshein, 2018), whether one thread walks
// them all or several share them: a row's bits depend on its own context only.
#pragma once
#include <vector>

#include "cache.h"
#include "rows.h"

namespace loraplex {

constexpr int64_t kPartKeys = 512;
constexpr int64_t kTilePositions = 8;  // rows of one sequence that share a walk over its keys
constexpr int64_t kTileQueries = 16;   // and query heads of one KV head

// Softmax state of some query rows: highest score, sum of weights, weighted sum of values.
struct State {
  float *highest, *total, *out;  // [queries], [queries], [queries, ld]
  int64_t ld;
};

struct Task {
  const int32_t* block_table;
  int64_t layer, kv_head, window;
  int64_t position, positions;  // of the first row; rows
  int64_t heads, first_head;    // query heads a row has here; in Q and O
  const float* q;  // scaled; the first row's heads, [positions, heads, dim] with strides
  int64_t row_stride;

  // The oldest key that a row at a position sees; that any row of the task sees.
  int64_t first_key(int64_t at) const { return window && at >= window ? at - window + 1 : 0; }
  int64_t oldest() const { return first_key(position); }
};

// Work memory of one thread.
struct AttentionScratch {
  std::vector<float> scores, part_out, queries;
  std::vector<float> highest, total;
  explicit AttentionScratch(int64_t dim)
      : scores(kTilePositions * kTileQueries * (kPartKeys + 64)),
        part_out(kTilePositions * kTileQueries * (dim + W)),
        queries(kTilePositions * kTileQueries * dim),
        highest(kTilePositions * kTileQueries),
        total(kTilePositions * kTileQueries) {}
};

// Merges the softmax of later keys into that of earlier ones, one query row.
inline void merge(float& highest, float& total, float* out, float part_highest, float part_total,
                  const float* part_out, int64_t dim) {
  if (part_total == 0) return;
  const float top = part_highest > highest ? part_highest : highest;
  const float keep = exp2(splat((highest - top) * kLog2E))[0],
              add = exp2(splat((part_highest - top) * kLog2E))[0];
  for (int64_t d = 0; d < dim; d++)
    out[d] = out[d] * keep + part_out[d] * add;
  total = total * keep + part_total * add;
  highest = top;
}

// One part of a task's context: whole blocks of keys from `begin` on. Its scores are [queries,
// keys].
struct Part {
  const Cache& cache;
  const Task& task;
  AttentionScratch& s;
  const char* then;  // the first block of keys that is read after this part, or null
  int64_t begin, blocks, keys, queries;

  Part(const Cache& cache, const Task& task, int64_t number, AttentionScratch& s, const char* then)
      : cache(cache), task(task), s(s), then(then), queries(task.positions * task.heads) {
    const int64_t size = cache.block_size, after = task.position + task.positions;
    const int64_t end = (number + 1) * kPartKeys < after ? (number + 1) * kPartKeys : after;
    begin = (number * kPartKeys > task.oldest() ? number * kPartKeys : task.oldest()) / size * size;
    blocks = end > begin ? ceil_div(end - begin, size) : 0;
    keys = blocks * size;
  }
  const char* block(int64_t b, int values) const {
    return cache.head(task.block_table[begin / cache.block_size + b], task.layer, values,
                      task.kv_head);
  }

  // What is read after a block, for the tiles that it is multiplied in: so many panels of k.
  Prefetch after(int64_t b, int values, int64_t panels, int64_t k) const {
    const char* next = b + 1 < blocks ? block(b + 1, values) : values ? then : block(0, 1);
    if (!next) return {};
    for (const char* at = next + cache.panel_bytes; at < next + cache.head_bytes; at += kLine)
      __builtin_prefetch(at, 0, 2);
    return {{next, next + cache.panel_bytes}, panels * tiles_of(queries) * (k / kTurn)};
  }

  // Semantics: S[r, j] *= scale_j over the keys of a block, of its keys or of its values.
  void rescale(int64_t b, int values) const {
    const float* scales = cache.scales(block(b, values));
    if (!scales) return;
    float* score = s.scores.data() + b * cache.block_size;
    for (int64_t i = 0; i < cache.block_size; i += W) {
      const F scale = load(scales + i);
      for (int64_t r = 0; r < queries; r++)
        store(score + r * keys + i, load(score + r * keys + i) * scale);
    }
  }

  // Semantics: S[r, j] = Q[r] . K[j].
  void score() const {
    const int vectors = (int)(cache.block_size / W);
    const int64_t bytes = step_bytes(cache.read);
    for (int64_t b = 0; b < blocks; b++) {
      Prefetch ahead = after(b, 0, ceil_div(vectors, kVectors), cache.dim);
      for (int v = 0; v < vectors; v += kVectors) {
        const int count = vectors - v < kVectors ? vectors - v : kVectors;
        in_tiles(queries, [&](int64_t r, int height) {
          choose_tile(cache.read, height, count)(
              {s.queries.data() + r * cache.dim, cache.dim}, block(b, 0) + v * bytes,
              vectors * bytes, cache.dim, s.scores.data() + r * keys + b * cache.block_size + v * W,
              keys, false, nullptr, ahead);
        });
      }
      rescale(b, 0);
    }
  }

  // Semantics: P[r, j] = exp(cap(S[r, j]) - max_j) over the keys that row r sees, 0 elsewhere; in
  // place. The total shows a score that is NaN.
  void weigh(int64_t r, float softcap, const State& to) const {
    const int64_t position = task.position + r / task.heads, first = task.first_key(position);
    float* score = s.scores.data() + r * keys;
    const F unseen = splat(-__builtin_inff());
    I key = splat((int32_t)begin) + lane_numbers();
    F top = unseen, total = {};
    for (int64_t i = 0; i < keys; i += W, key = key + W) {
      F x = load(score + i);
      if (softcap != 0) x = soften(x, softcap);
      x = (key >= splat((int32_t)first)) & (key <= splat((int32_t)position)) ? x : unseen;
      top = max(top, x);
      store(score + i, x);
    }
    const F most = splat(highest(top));
    for (int64_t i = 0; i < keys; i += W) {
      const F x = load(score + i), seen = exp2((x - most) * splat(kLog2E)) + (x - x),
              weight = x == unseen ? F{} : seen;
      total = total + weight;
      store(score + i, weight);
    }
    to.highest[r] = most[0];
    to.total[r] = sum(total);
  }

  // Semantics: O[r] = sum_j P[r, j] V[j].
  void add_values(const State& to) const {
    const Cut cut(cache.dim);
    const int64_t bytes = step_bytes(cache.read);
    for (int64_t r = 0; r < queries; r++)
      memset(to.out + r * to.ld, 0, cache.dim * sizeof(float));
    for (int64_t b = 0; b < blocks; b++) {
      rescale(b, 1);
      Prefetch ahead = after(b, 1, cut.panels, cache.block_size);
      for (int64_t p = 0; p < cut.panels; p++) {
        const Panel at = cut.panel(p);
        in_tiles(queries, [&](int64_t r, int height) {
          choose_tile(cache.read, height, at.count)(
              {s.scores.data() + r * keys + b * cache.block_size, keys},
              block(b, 1) + at.first * bytes, cut.vectors * bytes, cache.block_size,
              to.out + r * to.ld + at.output(), to.ld, true, nullptr, ahead);
        });
      }
    }
  }
};

// The softmax of the keys of one part, for the query rows in `s.queries` [positions * heads, dim].
// `then` is the first block of keys that is read next, or null.
inline void attend_part(const Cache& cache, const Task& task, int64_t number, float softcap,
                        AttentionScratch& s, const char* then, const State& to) {
  const Part part(cache, task, number, s, then);
  part.score();
  for (int64_t r = 0; r < part.queries; r++)
    part.weigh(r, softcap, to);
  part.add_values(to);
}

}  // namespace loraplex
