// What a step plans before its threads start: which rows go on, under which adapters, and how they
// attend.
#pragma once
#include "engine.h"

namespace loraplex {

// Rows [begin, end) of a sequence, numbered from `out` on, as tiles.
inline void add_tiles(Going& to, const Batch& b, int64_t s, int64_t begin, int64_t end,
                      int64_t out) {
  const Sequence& q = b.sequence[s];
  for (int64_t row = begin; row < end; row += kTilePositions) {
    const int64_t count = std::min(kTilePositions, end - row),
                  parts = ceil_div(q.position(row) + count, kPartKeys);
    to.tiles.push_back({s, row, count, out + row - begin, parts, to.slots});
    to.slots += parts;
  }
}

// A few long contexts are shared by parts, so that all threads have work.
inline void share_parts(Engine& e, Going& to) {
  int64_t longest = 0, rows = 0;
  for (const AttentionTile& tile : to.tiles)
    longest = std::max(longest, tile.parts), rows = std::max(rows, tile.rows);
  const int64_t heads = std::min<int64_t>(e.m.heads / e.m.kv_heads, kTileQueries),
                groups = e.m.kv_heads * ceil_div(e.m.heads / e.m.kv_heads, heads);
  if (longest <= 1 || (int64_t)to.tiles.size() * groups >= 4 * e.team.size() || e.team.size() == 1)
    return;
  for (int64_t i = 0; i < (int64_t)to.tiles.size(); i++)
    for (int64_t part = 0; part < to.tiles[i].parts; part++)
      to.shared.push_back({i, part});
  to.slot_floats = round_up(rows * heads * (e.m.head_dim + 2), 16);
  e.partial.resize(std::max<size_t>(e.partial.size(), to.slots * groups * to.slot_floats));
}

inline void clear(Going& to, int64_t rows) {
  to.rows = rows, to.slots = 0;
  to.segments.clear(), to.tiles.clear(), to.shared.clear();
}

inline void plan_all(Engine& e, const Batch& b) {
  Going& to = e.all;
  clear(to, b.rows);
  to.segments.assign(b.segment, b.segment + b.segments);
  for (int64_t s = 0; s < b.sequences; s++)
    add_tiles(to, b, s, b.sequence[s].start, b.sequence[s].end, b.sequence[s].start);
  share_parts(e, to);
}

// Neighbours among the wanted rows attend together.
inline void plan_last(Engine& e, const Batch& b) {
  Going& to = e.last;
  clear(to, b.wanted);
  const auto number = [&](int64_t row) {
    return std::lower_bound(b.want, b.want + b.wanted, row) - b.want;
  };
  for (int64_t i = 0; i < b.segments; i++) {
    const Segment& s = b.segment[i];
    if (number(s.start) < number(s.end))
      to.segments.push_back({number(s.start), number(s.end), s.adapter});
  }
  for (int64_t s = 0; s < b.sequences; s++)
    for (int64_t i = number(b.sequence[s].start), end = number(b.sequence[s].end), next; i < end;
         i = next) {
      for (next = i + 1; next < end && b.want[next] == b.want[next - 1] + 1;)
        next++;
      add_tiles(to, b, s, b.want[i], b.want[next - 1] + 1, i);
    }
  share_parts(e, to);
}

inline void plan(Engine& e, const Batch& b) {
  plan_all(e, b);
  if (b.wanted < b.rows) plan_last(e, b);
}

}  // namespace loraplex
