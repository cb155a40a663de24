// Register tiles whose rows each have a panel of their own.
#include "own_tiles.h"

#include "readers.h"

namespace loraplex {
namespace {

template <class R, int MR, int NV>
void own_tile(const void* const* x, const char* const* w, int64_t k, float* const* c) {
  F acc[MR][1][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      acc[i][0][j] = F{};
  int64_t place = 0;
  for (int64_t at = 0; at < k; at += R::step, place += NV * W * R::bytes)
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
      R::add(acc[i], (const typename R::X* const*)x + i, at, Beside<R>{w[i] + place}, at + 1 == k);
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      store(c[i] + j * W, load(c[i] + j * W) + acc[i][0][j]);
}
template <class R, int... at>
constexpr std::array<OwnTile, sizeof...(at)> own_tiles(std::integer_sequence<int, at...>) {
  return {own_tile<R, at / kVectors + 1, at % kVectors + 1>...};
}
template <class R>
constexpr auto kOwnTiles = own_tiles<R>(std::make_integer_sequence<int, kOwnRows * kVectors>());

}  // namespace

OwnTile choose_own_tile(Read read, int rows, int vectors) {
  const int at = (rows - 1) * kVectors + vectors - 1;
  switch (read) {
    case Read::bf16:
      return kOwnTiles<ReadBf16>[at];
    case Read::bf16_by_bf16:
      return kOwnTiles<ReadBf16ByBf16>[at];
    case Read::fp32:
      return kOwnTiles<ReadFp32>[at];
    case Read::fp32_by_bf16:
      return kOwnTiles<ReadFp32ByBf16>[at];
    case Read::int8:
      return kOwnTiles<ReadInt8>[at];
    default:
      return kOwnTiles<ReadInt8ByBf16>[at];
  }
}

}  // namespace loraplex
