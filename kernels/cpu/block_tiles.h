// Attention's two products in register tiles (block_tiles.cpp): queries by the keys of several
// blocks, weights by the values of all of them. Each vector is read where its block lies, and while
// it is multiplied the same place of another is prefetched.
//
// This file knows where blocks lie; it refuses to know whose they are. A row's sum is one sum over
// k, or over all keys, in order: it never depends on how many rows or vectors share a tile.
#pragma once
#include "tiles.h"

namespace loraplex {

// Vectors that some rows of a block tile take: as many as there are registers for, with their sums
// and a row's value.
constexpr int kBlockVectors = kVectors + 1;
constexpr int block_vectors(int rows) {
  return std::min(kBlockVectors, (kRegisters - 2) / (rows + 1));
}

// Semantics: C[i, j W + l] = sum_k X[i, k] K_j[k, l], for vectors of keys at w[j], each with
// `stride` bytes from one step of k to the next; then[j] is prefetched.
typedef void (*ScoreTile)(const Rows&, const char* const* w, const char* const* then,
                          int64_t stride, int64_t k, float* c, int64_t ldc);
// Semantics: C[i, j W + l] = sum_{b, k} X[i, b keys + k] V_b[k, j W + l] over `count` blocks of so
// many keys, whose vectors lie side by side from block[b] + place on; the same of then[b] is
// prefetched.
typedef void (*ValueTile)(const Rows&, const char* const* block, const char* const* then,
                          int64_t place, int64_t count, int64_t stride, int64_t keys, float* c,
                          int64_t ldc);
struct BlockTile {
  ScoreTile score;
  ValueTile value;
};

BlockTile choose_block_tile(Read read, int rows, int vectors);

}  // namespace loraplex
