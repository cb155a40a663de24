// The register tiles of products whose rows are integers.
#include "readers.h"

namespace loraplex {
namespace {

// MR rows by NV vectors, for rows that have a scale for each group, and weights that have one for
// each output.
template <class R, int MR, int NV>
void integer_tile(const Rows& rows, const char* w, int64_t stride, int64_t k, float* c, int64_t ldc,
                  bool add, const float* scale, Prefetch& ahead) {
  const typename R::X* x[MR];
  F total[MR][NV];
  begin(rows, x, total);
  Prefetch::Walk walk;
  int64_t number = 0;
  auto group = [&](int64_t size, auto each_turn) __attribute__((always_inline)) {
    I acc[MR][NV];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++)
        acc[i][j] = R::start(rows, i, number);
    int64_t at = 0;
    for (; at + kTurn <= size; at += kTurn) {
      if (each_turn) walk = ahead.walk(1);
      walk.turn();
      if (each_turn) ahead.walked(walk);
#pragma GCC unroll 4
      for (int u = 0; u < kTurn; u += R::step, w += stride)
        R::add(acc, x, at + u, w);
    }
    for (; at < size; at += R::step, w += stride)
      R::add(acc, x, at, w);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const F s = splat(rows.scale[i * rows.groups + number]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++)
        total[i][j] = fma(to_float(acc[i][j]), s, total[i][j]);
      x[i] += kGroup;
    }
    number++;
  };
  // Legs of whole groups keep what a walk needs in registers; shorter ones are looked at each turn.
  for (int64_t from = 0; from < k;) {
    walk = ahead.walk(kGroup / kTurn);
    const int64_t end = walk.more ? std::min(from + kGroup, k) : k;
    if (walk.turns < kGroup / kTurn) {
      group(end - from, std::true_type{}), from = end;
      continue;
    }
    for (; from + kGroup <= end; from += kGroup)
      group(kGroup, std::false_type{});
    if (from < end) group(end - from, std::false_type{}), from = end;
    ahead.walked(walk);
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      float* y = c + i * ldc + j * W;
      const F v = total[i][j] * load(scale + j * W);
      store(y, add ? load(y) + v : v);
    }
}

template <class R>
struct InGroups {
  template <int MR, int NV>
  static constexpr Tile tile = integer_tile<R, MR, NV>;
};

}  // namespace

Tile choose_integer_tile(Read read, int rows, int vectors) {
  const int at = (rows - 1) * kVectors + vectors - 1;
  switch (read) {
    case Read::quant8:
      return kTiles<InGroups<ReadPairs<int8_t>>>[at];
    case Read::fixed16:
      return kTiles<InGroups<ReadPairs<int16_t>>>[at];
    default:
      return kTiles<InGroups<ReadFours>>[at];
  }
}

}  // namespace loraplex
