// What a thread's attention will read, to be prefetched during products that leave the memory time.
//
// This file knows who attends to which blocks; it refuses to know how.
#pragma once
#include "frame.h"

namespace loraplex {

constexpr int64_t kAheadKeys = 2 << 20;  // bytes; what one cache does not hold waits in the next

// Adds the keys and values that this thread's rows attend to in a layer.
inline void expect_attention(const Frame& f, int64_t layer, Backlog& to) {
  const Cache cache(f.m);
  const int64_t bytes = 2 * f.m.kv_heads * cache.head_bytes;
  const std::vector<AttentionTile>& tiles = f.going->tiles;
  const int64_t end = f.end((int64_t)tiles.size());
  int64_t room = kAheadKeys / bytes, last = -1;
  for (int64_t i = f.begin((int64_t)tiles.size()); i < end; last = tiles[i++].sequence) {
    if (tiles[i].sequence == last) continue;
    const Sequence& s = f.b.sequence[tiles[i].sequence];
    const int64_t size = f.m.block_size,
                  oldest = first_key(f.m.layer[layer].window, s.position(tiles[i].row));
    for (int64_t block = oldest / size; block * size < s.context; block++) {
      const char* at = cache.head(s.block_table[block], layer, 0, 0);
      if (room-- <= 0 || !to.add({at, at + bytes})) return;
    }
  }
}

}  // namespace loraplex
