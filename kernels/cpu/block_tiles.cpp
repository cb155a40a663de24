// The register tiles of attention.
#include "block_tiles.h"

#include "readers.h"

namespace loraplex {
namespace {

template <int MR, int NV>
LPX_INLINE void end(const F (&acc)[MR][NV], float* c, int64_t ldc) {
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      store(c + i * ldc + j * W, acc[i][j]);
}

template <class R, int MR, int NV>
void score_tile(const Rows& rows, const char* const* w, const char* const* then, int64_t stride,
                int64_t k, float* c, int64_t ldc) {
  const typename R::X* x[MR];
  F acc[MR][NV];
  begin(rows, x, acc);
  for (int64_t at = 0, place = 0; at < k; at += R::step, place += stride) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      __builtin_prefetch(then[j] + place, 0, 2);
    R::add(acc, x, at, Apart{w, place}, false);
  }
  end(acc, c, ldc);
}

template <class R, int MR, int NV>
void value_tile(const Rows& rows, const char* const* block, const char* const* then, int64_t place,
                int64_t count, int64_t stride, int64_t keys, float* c, int64_t ldc) {
  const typename R::X* x[MR];
  F acc[MR][NV];
  begin(rows, x, acc);
  for (int64_t b = 0; b < count; b++) {
    const char *w = block[b] + place, *ahead = then[b] + place;
    for (int64_t at = 0; at < keys; at += R::step, w += stride, ahead += stride) {
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++)
        __builtin_prefetch(ahead + j * W * R::bytes, 0, 2);
      R::add(acc, x, b * keys + at, Beside<R>{w}, false);
    }
  }
  end(acc, c, ldc);
}

// The tiles of each reader by rows and vectors, those that fit registers.
template <class R, int MR, int NV>
constexpr BlockTile block_tile() {
  if constexpr (NV <= block_vectors(MR))
    return {score_tile<R, MR, NV>, value_tile<R, MR, NV>};
  else
    return {};
}
template <class R, int... at>
constexpr std::array<BlockTile, sizeof...(at)> block_tiles(std::integer_sequence<int, at...>) {
  return {block_tile<R, at / kBlockVectors + 1, at % kBlockVectors + 1>()...};
}
template <class R>
constexpr auto kBlockTiles =
    block_tiles<R>(std::make_integer_sequence<int, kMostRows * kBlockVectors>());

}  // namespace

BlockTile choose_block_tile(Read read, int rows, int vectors) {
  const int at = (rows - 1) * kBlockVectors + vectors - 1;
  switch (read) {
    case Read::bf16:
      return kBlockTiles<ReadBf16>[at];
    case Read::bf16_by_bf16:
      return kBlockTiles<ReadBf16ByBf16>[at];
    case Read::fp32:
      return kBlockTiles<ReadFp32>[at];
    default:
      return kBlockTiles<ReadInt8>[at];
  }
}

}  // namespace loraplex
