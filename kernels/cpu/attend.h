// A layer's attention, shared among the threads.
#pragma once
#include "frame.h"

namespace loraplex {

constexpr int64_t kRuns = 4;  // of heads, for each thread, before one thread takes them together

class Attention {
 public:
  explicit Attention(Frame& frame)
      : f(frame), e(frame.e), m(frame.m), b(frame.b), s(*e.scratch[frame.t]), cache(frame.m) {
    head_group = std::min(m.heads / m.kv_heads, kTileQueries);
  }

  // Clears the blocks that this thread's rows begin and that this step does not fill; long before
  // any thread writes to them.
  void begin_blocks() const {
    for_own_rows([&](const Sequence& sequence, int64_t r) {
      if (b.positions[r] % m.block_size == 0 && sequence.end - r < m.block_size)
        cache.clear(sequence.block_table[b.positions[r] / m.block_size]);
    });
  }

  // Norms and rotates queries and keys, and writes keys and values.
  void place_keys(int64_t l) {
    layer = &m.layer[l];
    const int64_t d = m.head_dim;
    if (f.t == 0) e.next_tile = 0;
    e.attention_shares.renew(f.t);
    for_own_rows([&](const Sequence& sequence, int64_t r) {
      float* head = e.qkv.row(r);
      const int64_t position = b.positions[r];
      for (int64_t i = 0; i < m.heads + m.kv_heads; i++) {
        const float* weight = i < m.heads ? layer->q_norm : layer->k_norm;
        if (weight)
          rms_norm(head + i * d, weight, d, m.norm_eps,
                   [&](int64_t j, F v) { store(head + i * d + j, v); });
        rotate(head + i * d, m.rotary + position * m.rotary_dim, m.rotary_dim);
      }
      const float *key = head + m.heads * d, *value = key + m.kv_heads * d;
      for (int64_t i = 0; i < m.kv_heads; i++)
        cache.write(sequence.block_table[position / m.block_size], position % m.block_size, l, i,
                    key + i * d, value + i * d);
    });
    f.meet();
  }
  // The rows that go on attend to the keys that they see.
  void attend(int64_t l) {
    const int64_t units =
        f.going->shared.empty() ? (int64_t)f.going->tiles.size() : (int64_t)f.going->shared.size();
    // Heads of a sequence lie side by side: one thread takes them all where there are enough.
    const int64_t run = units >= kRuns * f.threads ? groups() : 1, runs = units * groups() / run;
    const auto first = [&](int owner) { return f.share(runs, owner); };
    e.attention_shares.walk(
        f.t, f.threads, [&](int owner) { return first(owner + 1) - first(owner); },
        [&](int owner, int64_t at, int64_t next) {
          const int64_t item = (first(owner) + at) * run;
          for (int64_t i = item; i < item + run; i++)
            attend_item(i,
                        i + 1 < item + run ? i + 1
                        : next < 0         ? -1
                                           : (first(owner) + next) * run,
                        l);
        });
    f.meet();
    if (f.going->shared.empty()) return;
    for (int64_t i; (i = e.next_tile.fetch_add(1)) < (int64_t)f.going->tiles.size() * groups();) {
      const AttentionTile& tile = f.going->tiles[i / groups()];
      const State whole = slot(tile, 0, i % groups());
      const Task task = task_of(tile, i % groups(), l);
      for (int64_t part = 1; part < tile.parts; part++)
        add_part(task, whole, slot(tile, part, i % groups()));
      finish(task, whole);
    }
    f.meet();
  }

 private:
  template <class Do>
  void for_own_rows(Do what) const {
    for (int64_t s = 0; s < b.sequences; s++) {
      const Sequence& sequence = b.sequence[s];
      const int64_t end = std::min(sequence.end, f.end(b.rows));
      for (int64_t r = std::max(sequence.start, f.begin(b.rows)); r < end; r++)
        what(sequence, r);
    }
  }

  // Query heads of a KV head attend together, in groups of up to kTileQueries.
  int64_t groups() const { return m.kv_heads * ceil_div(m.heads / m.kv_heads, head_group); }

  Task task_of(const AttentionTile& tile, int64_t group, int64_t l) const {
    const int64_t per_head = groups() / m.kv_heads, all = m.heads / m.kv_heads;
    const int64_t kv_head = group / per_head, within = group % per_head * head_group;
    const Sequence& sequence = b.sequence[tile.sequence];
    return {sequence.block_table,
            l,
            kv_head,
            layer->window,
            sequence.position(tile.row),
            tile.rows,
            std::min(head_group, all - within),
            kv_head * all + within,
            e.qkv.row(tile.row),
            e.qkv.ld,
            tile.out};
  }

  // Item i; `next` is the one that this thread is likely to take then, or -1.
  void attend_item(int64_t i, int64_t next, int64_t l) {
    const auto [index, part] = unit(i / groups());
    const AttentionTile& tile = f.going->tiles[index];
    const Task task = task_of(tile, i % groups(), l);
    const int64_t after = next < 0 ? i : next;
    const auto [after_index, after_part] = unit(after / groups());
    const Task coming = task_of(f.going->tiles[after_index], after % groups(), l);
    const Part first(cache, coming, std::max(after_part, coming.oldest() / kPartKeys), s),
        *then = next < 0 ? nullptr : &first;
    gather_queries(task);
    if (f.going->shared.empty())
      attend_whole(task, tile.parts, then);
    else
      attend_part({cache, task, part, s}, (float)m.attention_softcap, then,
                  slot(tile, part, i % groups()));
  }
  // What one item works on: a tile, and a part of its context where parts are shared.
  std::pair<int64_t, int64_t> unit(int64_t i) const {
    return f.going->shared.empty() ? std::pair<int64_t, int64_t>(i, 0) : f.going->shared[i];
  }

  // Where the softmax of a shared part is kept until it is merged.
  State slot(const AttentionTile& tile, int64_t part, int64_t group) const {
    float* at = e.partial.data() + ((tile.slot + part) * groups() + group) * f.going->slot_floats;
    const int64_t queries = tile.rows * head_group;
    return {at, at + queries, at + 2 * queries, m.head_dim};
  }

  // Scaled, and as bf16 where tiles multiply that.
  void gather_queries(const Task& task) const {
    const F scale = splat((float)m.attention_scale);
    const int64_t n = task.heads * m.head_dim;
    float* to = s.queries.data();
    const bool narrow = cache.read == Read::bf16_by_bf16;
    for (int64_t r = 0; r < task.positions; r++) {
      const float* q = task.q + r * task.row_stride + task.first_head * m.head_dim;
      for (int64_t i = 0; i < n; i += W)
        if (narrow)
          store_bf16((bf16*)to + r * n + i, load(q + i) * scale);
        else
          store(to + r * n + i, load(q + i) * scale);
    }
  }
  void attend_whole(const Task& task, int64_t parts, const Part* then) const {
    const State whole{s.highest.data(), s.total.data(), s.out.data(), m.head_dim},
        more{s.part_highest.data(), s.part_total.data(), s.part_out.data(), m.head_dim};
    const int64_t first = task.oldest() / kPartKeys;
    for (int64_t part = first; part < parts; part++) {
      const Part next(cache, task, part + 1, s);
      attend_part({cache, task, part, s}, (float)m.attention_softcap,
                  part + 1 < parts ? &next : then, part == first ? whole : more);
      if (part > first) add_part(task, whole, more);
    }
    finish(task, whole);
  }
  void add_part(const Task& task, const State& to, const State& part) const {
    for (int64_t i = 0; i < task.positions * task.heads; i++)
      merge(to, part, i, m.head_dim);
  }
  void finish(const Task& task, const State& whole) const {
    for (int64_t i = 0; i < task.positions * task.heads; i++) {
      const int64_t row = task.out + i / task.heads,
                    column = (task.first_head + i % task.heads) * m.head_dim;
      const F inverse = splat(1.f / whole.total[i]);
      for (int64_t d = 0; d < m.head_dim; d += W)
        e.attended.put(row, column + d, load(whole.out + i * whole.ld + d) * inverse);
    }
  }

  Frame& f;
  Engine& e;
  const Model& m;
  const Batch& b;
  AttentionScratch& s;
  const Cache cache;
  int64_t head_group;  // query heads of a KV head that attend together
  const Layer* layer = nullptr;
};

}  // namespace loraplex
