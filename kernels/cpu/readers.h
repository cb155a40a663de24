// How tiles read each kind of panel and row, for a step of k at a time.
//
// This file knows instructions and how numbers lie; it refuses to know how large a tile is.
#pragma once
#include <array>
#include <utility>

#include "tiles.h"

namespace loraplex {

// ACC[i, j] += X[i, k] B[j], for one k.
template <class X, int MR, int NV>
LPX_INLINE void multiply_add(F (&acc)[MR][NV], const X* const* x, int64_t k, const F (&b)[NV]) {
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    F a = splat(widen(x[i][k]));
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      acc[i][j] = fma(a, b[j], acc[i][j]);
  }
}

// The same for some k that lie side by side in 32 bits of a row, and of each output in b_at(j).
template <class T, class X, int MR, int NV, class Dot, class At>
LPX_INLINE void multiply_sides(T (&acc)[MR][NV], const X* const* x, int64_t k, Dot dot, At b_at) {
  I b[NV];
#pragma GCC unroll 4
  for (int j = 0; j < NV; j++)
    b[j] = b_at(j);
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    int32_t some;
    memcpy(&some, x[i] + k, 4);
    const I a = splat(some);
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      acc[i][j] = dot(acc[i][j], b[j], a);
  }
}

// Where the vectors of a step of k lie: side by side, or each at its own place.
template <class R>
struct Beside {
  const char* w;
  LPX_INLINE const char* operator()(int j) const { return w + j * W * R::bytes; }
};
struct Apart {
  const char* const* w;
  int64_t place;
  LPX_INLINE const char* operator()(int j) const { return w[j] + place; }
};

// How the tile reads each kind: `step` values of k at a time, `bytes` of each output; vector j lies
// at `w(j)`.
struct ReadBf16 {
  typedef float X;
  static constexpr int step = 2, bytes = 4;
  template <int MR, int NV, class At>
  static LPX_INLINE void add(F (&acc)[MR][NV], const X* const* x, int64_t k, At w, bool half) {
    F b[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      b[j] = first(load_raw(w(j)));
    multiply_add(acc, x, k, b);
    if (half) return;
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      b[j] = second(load_raw(w(j)));
    multiply_add(acc, x, k + 1, b);
  }
};
template <class T, class RowsOf>
struct ReadWhole {
  typedef RowsOf X;
  static constexpr int step = 1, bytes = sizeof(T);
  template <int MR, int NV, class At>
  static LPX_INLINE void add(F (&acc)[MR][NV], const X* const* x, int64_t k, At w, bool) {
    F b[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      b[j] = load((const T*)w(j));
    multiply_add(acc, x, k, b);
  }
};
typedef ReadWhole<float, float> ReadFp32;
typedef ReadWhole<int8_t, float> ReadInt8;
typedef ReadWhole<float, bf16> ReadFp32ByBf16;
typedef ReadWhole<int8_t, bf16> ReadInt8ByBf16;

// Rows of bf16, padded with zeroes to whole pairs.
struct ReadBf16ByBf16 {
  typedef bf16 X;
  static constexpr int step = 2, bytes = 4;
  template <int MR, int NV, class At>
  static LPX_INLINE void add(F (&acc)[MR][NV], const X* const* x, int64_t k, At w, bool) {
    multiply_sides(acc, x, k, dot_bf16, [&](int j) { return load_raw(w(j)); });
  }
};

// Pairs of int16 in rows, of T in panels, padded with zeroes to whole pairs.
template <class T>
struct ReadPairs {
  typedef int16_t X;
  static constexpr int step = 2;
  static I start(const Rows&, int64_t, int64_t) { return I{}; }
  template <int MR, int NV>
  static LPX_INLINE void add(I (&acc)[MR][NV], const X* const* x, int64_t k, const char* w) {
    multiply_sides(acc, x, k, dot_int16,
                   [&](int j) { return load_pairs((const T*)w + j * W * 2); });
  }
};

// Fours of int8 in rows, of uint8 in panels.
struct ReadFours {
  typedef int8_t X;
  static constexpr int step = 4;
  static LPX_INLINE I start(const Rows& rows, int64_t row, int64_t group) {
    return splat(rows.start[row * rows.groups + group]);
  }
  template <int MR, int NV>
  static LPX_INLINE void add(I (&acc)[MR][NV], const X* const* x, int64_t k, const char* w) {
    multiply_sides(acc, x, k, dot_bytes, [&](int j) { return load_raw(w + j * W * 4); });
  }
};

// Where the rows of a tile lie; their sums are nothing yet.
template <class X, int MR, int NV>
LPX_INLINE void begin(const Rows& rows, const X* (&x)[MR], F (&acc)[MR][NV]) {
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    x[i] = (const X*)rows.x + i * rows.ld;
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      acc[i][j] = F{};
  }
}

// All tiles of one way to read, by rows and vectors.
template <class Make, int... at>
constexpr std::array<Tile, sizeof...(at)> all_tiles(std::integer_sequence<int, at...>) {
  return {Make::template tile<at / kVectors + 1, at % kVectors + 1>...};
}
template <class Make>
constexpr auto kTiles = all_tiles<Make>(std::make_integer_sequence<int, kMostRows * kVectors>());

}  // namespace loraplex
