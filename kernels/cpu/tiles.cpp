// The register tiles of products whose rows are fp32 or bf16.
#include "readers.h"

namespace loraplex {
namespace {

// MR rows by NV vectors.
template <class R, int MR, int NV>
void tile(const Rows& rows, const char* w, int64_t stride, int64_t k, float* c, int64_t ldc,
          bool add, const float*, Prefetch& ahead) {
  const typename R::X* x[MR];
  F acc[MR][NV];
  begin(rows, x, acc);
  int64_t at = 0;
  for (int64_t turns = k / kTurn; turns;) {
    Prefetch::Walk walk = ahead.walk(turns);
    turns -= walk.turns;
    for (const int64_t end = at + walk.turns * kTurn; at < end; at += kTurn) {
      walk.turn();
#pragma GCC unroll 8
      for (int u = 0; u < kTurn; u += R::step, w += stride)
        R::add(acc, x, at + u, Beside<R>{w}, false);
    }
    ahead.walked(walk);
  }
  for (; at < k; at += R::step, w += stride)
    R::add(acc, x, at, Beside<R>{w}, at + 1 == k);
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      float* y = c + i * ldc + j * W;
      store(y, add ? load(y) + acc[i][j] : acc[i][j]);
    }
}
template <class R>
struct Plainly {
  template <int MR, int NV>
  static constexpr Tile tile = loraplex::tile<R, MR, NV>;
};

}  // namespace

Tile choose_tile(Read read, int rows, int vectors) {
  const int at = (rows - 1) * kVectors + vectors - 1;
  switch (read) {
    case Read::bf16:
      return kTiles<Plainly<ReadBf16>>[at];
    case Read::fp32:
      return kTiles<Plainly<ReadFp32>>[at];
    case Read::int8:
      return kTiles<Plainly<ReadInt8>>[at];
    case Read::bf16_by_bf16:
      return kTiles<Plainly<ReadBf16ByBf16>>[at];
    case Read::fp32_by_bf16:
      return kTiles<Plainly<ReadFp32ByBf16>>[at];
    case Read::int8_by_bf16:
      return kTiles<Plainly<ReadInt8ByBf16>>[at];
    default:
      return choose_integer_tile(read, rows, vectors);
  }
}

}  // namespace loraplex
