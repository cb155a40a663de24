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

#include "block_tiles.h"
#include "cache.h"
#include "rows.h"

namespace loraplex {

constexpr int64_t kPartKeys = 512;
constexpr int64_t kTilePositions = 8;  // rows of one sequence that share a walk over its keys
constexpr int64_t kTileQueries = 16;   // and query heads of one KV head
constexpr int64_t kMostQueries = kTilePositions * kTileQueries;

// Softmax state of some query rows: highest score, sum of weights, weighted sum of values.
struct State {
  float *highest, *total, *out;  // [queries], [queries], [queries, ld]
  int64_t ld;
};

// The oldest key that a row at a position sees through a window, 0 for none.
inline int64_t first_key(int64_t window, int64_t at) {
  return window && at >= window ? at - window + 1 : 0;
}

struct Task {
  const int32_t* block_table;
  int64_t layer, kv_head, window;
  int64_t position, positions;  // of the first row; rows
  int64_t heads, first_head;    // query heads a row has here; in Q and O
  const float* q;  // scaled; the first row's heads, [positions, heads, dim] with strides
  int64_t row_stride;
  int64_t out;  // the first row's number among those that attend

  // The oldest key that a row at a position sees; that any row of the task sees.
  int64_t first_key(int64_t at) const { return loraplex::first_key(window, at); }
  int64_t oldest() const { return first_key(position); }
};

// Work memory of one thread.
struct AttentionScratch {
  std::vector<float> scores, out, part_out, queries;
  std::vector<float> highest, total, part_highest, part_total;
  // Where vectors of keys lie, and what is prefetched meanwhile: the same of values; then blocks of
  // values, and those of the keys that come next.
  std::vector<const char*> keys, ahead, values, next;
  explicit AttentionScratch(int64_t dim)
      : scores(kMostQueries * (kPartKeys + 64)),
        out(kMostQueries * dim),
        part_out(kMostQueries * dim),
        queries(kMostQueries * dim),
        highest(kMostQueries),
        total(kMostQueries),
        part_highest(kMostQueries),
        part_total(kMostQueries),
        keys(kPartKeys / W + 1),
        ahead(kPartKeys / W + 1),
        values(kPartKeys / kLeastBlock + 1),
        next(kPartKeys / kLeastBlock + 1) {}
};

// Merges the softmax of later keys, query row r of `part`, into that of earlier ones.
inline void merge(const State& to, const State& part, int64_t r, int64_t dim) {
  if (part.total[r] == 0) return;
  const float before = to.highest[r], top = std::max(before, part.highest[r]);
  const float keep = exp2(splat((before - top) * kLog2E))[0],
              add = exp2(splat((part.highest[r] - top) * kLog2E))[0];
  float* out = to.out + r * to.ld;
  for (int64_t d = 0; d < dim; d += W)
    store(out + d, load(out + d) * splat(keep) + load(part.out + r * part.ld + d) * splat(add));
  to.total[r] = to.total[r] * keep + part.total[r] * add;
  to.highest[r] = top;
}

// One part of a task's context: whole blocks of keys from `begin` on. Its scores are [queries,
// keys].
struct Part {
  const Cache& cache;
  const Task& task;
  AttentionScratch& s;
  int64_t begin, blocks, keys, queries;

  Part(const Cache& cache, const Task& task, int64_t number, AttentionScratch& s)
      : cache(cache), task(task), s(s), queries(task.positions * task.heads) {
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

  bool narrow() const { return cache.read == Read::bf16_by_bf16; }

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
    if (!blocks) return;
    const int64_t vectors = cache.block_size / W, all = blocks * vectors,
                  bytes = step_bytes(cache.read);
    for (int64_t i = 0; i < all; i++) {
      s.keys[i] = block(i / vectors, 0) + i % vectors * bytes;
      s.ahead[i] = block(i / vectors, 1) + i % vectors * bytes;
    }
    const Rows rows{s.queries.data(), cache.dim};
    in_tiles(queries, kTileRows, [&](int64_t r, int height) {
      const int wide = block_vectors(height);
      for (int64_t v = 0; v < all; v += wide) {
        const int count = (int)std::min<int64_t>(wide, all - v);
        const char* const* at = s.keys.data() + v;
        choose_block_tile(cache.read, height, count)
            .score(rows.from(r, x_bytes(cache.read)), at, r ? at : s.ahead.data() + v,
                   vectors * bytes, cache.dim, s.scores.data() + r * keys + v * W, keys);
      }
    });
    for (int64_t b = 0; b < blocks; b++)
      rescale(b, 0);
  }

  // Hides the scores of a row before `from` and from `past` on.
  static void hide(float* score, int64_t from, int64_t past, int64_t keys) {
    const F unseen = splat(-__builtin_inff());
    for (int64_t i = 0; i < from; i += W)
      store(score + i, lane_numbers() < splat((int32_t)(from - i)) ? unseen : load(score + i));
    for (int64_t i = past / W * W; i < keys; i += W)
      store(score + i, lane_numbers() < splat((int32_t)(past - i)) ? load(score + i) : unseen);
  }

  // Semantics: S[r, j] = cap(S[r, j]) over the keys that row r sees, -infinity elsewhere; and the
  // highest of them.
  void bound(int64_t r, float softcap, const State& to) const {
    const int64_t position = task.position + r / task.heads;
    float* score = s.scores.data() + r * keys;
    if (softcap != 0)
      for (int64_t i = 0; i < keys; i += W)
        store(score + i, soften(load(score + i), softcap));
    hide(score, std::clamp<int64_t>(task.first_key(position) - begin, 0, keys),
         std::clamp<int64_t>(position + 1 - begin, 0, keys), keys);
    F top = splat(-__builtin_inff());
    for (int64_t i = 0; i < keys; i += W)
      top = max(top, load(score + i));
    to.highest[r] = highest(top);
  }

  // Semantics: P[r, j] = exp(S[r, j] - max_j); in place, as bf16 where tiles multiply that. The
  // total is of what is multiplied, and shows a score that is NaN.
  void weigh(int64_t r, const State& to) const {
    float* score = s.scores.data() + r * keys;
    F total = {};
    const F most = splat(to.highest[r] == -__builtin_inff() ? 0 : to.highest[r]);
    for (int64_t i = 0; i < keys; i += W) {
      const F weight = exp2((load(score + i) - most) * splat(kLog2E));
      if (narrow()) {
        const Halves rounded = to_bf16(weight);
        store((bf16*)score + i, rounded), total = total + widen(rounded);
      } else {
        store(score + i, weight), total = total + weight;
      }
    }
    to.total[r] = sum(total);
  }

  // Semantics: O[r] = sum_j P[r, j] V[j]. Meanwhile the keys of `then` are prefetched, or none.
  void add_values(const Part* then, const State& to) const {
    for (int64_t b = 0; b < blocks; b++) {
      s.values[b] = block(b, 1);
      s.next[b] = then && b < then->blocks ? then->block(b, 0) : s.values[b];
      rescale(b, 1);
    }
    const int64_t bytes = step_bytes(cache.read), all = cache.dim / W;
    const Rows rows{s.scores.data(), narrow() ? 2 * keys : keys};
    in_tiles(queries, kTileRows, [&](int64_t r, int height) {
      const int wide = block_vectors(height);
      for (int64_t v = 0; v < all; v += wide)
        choose_block_tile(cache.read, height, (int)std::min<int64_t>(wide, all - v))
            .value(rows.from(r, x_bytes(cache.read)), s.values.data(),
                   r ? s.values.data() : s.next.data(), v * bytes, blocks, all * bytes,
                   cache.block_size, to.out + r * to.ld + v * W, to.ld);
    });
  }
};

// The softmax of the keys of one part, for the query rows in `s.queries` [positions * heads, dim].
// `then` is the part that is likely to come next, or null.
inline void attend_part(const Part& part, float softcap, const Part* then, const State& to) {
  part.score();
  for (int64_t r = 0; r < part.queries; r++)
    part.bound(r, softcap, to);
  for (int64_t r = 0; r < part.queries; r++)  // whose highest scores are known by now
    part.weigh(r, to);
  part.add_values(then, to);
}

}  // namespace loraplex
