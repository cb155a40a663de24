// The one product that everything in the step is made of, in register tiles.
//
// Semantics: C[i, o] (+)= sum_k X[i, k] W[o, k], sums in fp32, taken in order of k in parts of
// `part_of` (so that a long sum loses no more digits than a blocked BLAS does). Rows of int16 have
// a scale for each kGroup inputs, whose sum is taken in int32, exactly. A row's sum never depends
// on how many rows share the product.
#pragma once
#include <array>
#include <utility>

#include "panels.h"
#include "prefetch.h"

namespace loraplex {

constexpr int64_t kPart = 192;
constexpr int64_t kLongPart = 576;

// What rows are best rounded to for bf16 weights. On AVX2 an instruction multiplies and adds pairs
// of int16, where one of fp32 takes half as many, and their weights are widened before.
constexpr Activations kBestActivations =
#if defined(LPX_AVX512)
    kActBf16;
#elif defined(LPX_AVX2)
    kActInt16;
#else
    kActFp32;
#endif

// The rows X of a product, in what form the kind of W asks for.
struct Rows {
  const void* x;  // fp32, bf16 or int16, [rows, ld]
  int64_t ld;
  const float* scale = nullptr;  // of int16: [rows, groups]
  int64_t groups = 0;

  Rows from(int64_t row, int x_bytes) const {
    return {(const char*)x + row * ld * x_bytes, ld, scale ? scale + row * groups : nullptr,
            groups};
  }
};

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
    I b[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      b[j] = load_raw(w(j));
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      int32_t pair;
      memcpy(&pair, x[i] + k, 4);
      I a = splat(pair);
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++)
        acc[i][j] = dot_bf16(acc[i][j], b[j], a);
    }
  }
};

// Pairs of int16 in rows, of T in panels, padded with zeroes to whole pairs.
template <class T>
struct ReadPairs {
  template <int MR, int NV>
  static LPX_INLINE void add(I (&acc)[MR][NV], const int16_t* const* x, int64_t k, const char* w) {
    I b[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      b[j] = load_pairs((const T*)w + j * W * 2);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      int32_t pair;
      memcpy(&pair, x[i] + k, 4);
      const I a = splat(pair);
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++)
        acc[i][j] = dot_int16(acc[i][j], b[j], a);
    }
  }
};

// MR rows by NV vectors, over one part of k. `w` has `stride` bytes for each step of k; C [MR, ldc]
// is added to, or else written; `ahead` goes on from tile to tile.
template <class R, int MR, int NV>
static void tile(const Rows& rows, const char* w, int64_t stride, int64_t k, float* c, int64_t ldc,
                 bool add, const float*, Prefetch& ahead) {
  const typename R::X* x[MR];
  F acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    x[i] = (const typename R::X*)rows.x + i * rows.ld;
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      acc[i][j] = F{};
  }
  int64_t at = 0;
  Prefetch::Walk walk = ahead.walk();
  for (; at + kTurn <= k; at += kTurn) {
    walk.turn();
#pragma GCC unroll 8
    for (int u = 0; u < kTurn; u += R::step, w += stride)
      R::add(acc, x, at + u, Beside<R>{w}, false);
  }
  ahead.walked(walk);
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
// The same for rows of int16, which have a scale for each group, and weights that have one for each
// output.
template <class R, int MR, int NV>
static void int16_tile(const Rows& rows, const char* w, int64_t stride, int64_t k, float* c,
                       int64_t ldc, bool add, const float* scale, Prefetch& ahead) {
  const int16_t* x[MR];
  F total[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    x[i] = (const int16_t*)rows.x + i * rows.ld;
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
      total[i][j] = F{};
  }
  Prefetch::Walk walk = ahead.walk();
  const float* row_scale = rows.scale;
  auto group = [&](int64_t size) __attribute__((always_inline)) {
    I acc[MR][NV];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++)
        acc[i][j] = I{};
    int64_t at = 0;
    for (; at + kTurn <= size; at += kTurn) {
      walk.turn();
#pragma GCC unroll 4
      for (int u = 0; u < kTurn; u += 2, w += stride)
        R::add(acc, x, at + u, w);
    }
    for (; at < size; at += 2, w += stride)
      R::add(acc, x, at, w);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const F s = splat(row_scale[i * rows.groups]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++)
        total[i][j] = fma(to_float(acc[i][j]), s, total[i][j]);
      x[i] += kGroup;
    }
    row_scale++;
  };
  int64_t from = 0;
  for (; from + kGroup <= k; from += kGroup)
    group(kGroup);
  if (from < k) group(k - from);
  ahead.walked(walk);
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) {
      float* y = c + i * ldc + j * W;
      const F v = total[i][j] * load(scale + j * W);
      store(y, add ? load(y) + v : v);
    }
}

typedef void (*Tile)(const Rows&, const char*, int64_t, int64_t, float*, int64_t, bool,
                     const float*, Prefetch&);

// All tiles of one way to read, by rows and vectors.
template <class Make, int... at>
constexpr std::array<Tile, sizeof...(at)> all_tiles(std::integer_sequence<int, at...>) {
  return {Make::template tile<at / kVectors + 1, at % kVectors + 1>...};
}
template <class R>
struct Plainly {
  template <int MR, int NV>
  static constexpr Tile tile = loraplex::tile<R, MR, NV>;
};
template <class T>
struct InGroups {
  template <int MR, int NV>
  static constexpr Tile tile = int16_tile<ReadPairs<T>, MR, NV>;
};
template <class Make>
constexpr auto kTiles = all_tiles<Make>(std::make_integer_sequence<int, kMostRows * kVectors>());

// A way to read a panel: the kind of W, and of X where that is not fp32.
enum class Read { bf16, fp32, int8, bf16_by_bf16, fp32_by_bf16, int8_by_bf16, quant8, fixed16 };

inline bool in_groups(Read read) { return read == Read::quant8 || read == Read::fixed16; }

inline Read read_of(int64_t kind, bool bf16_rows) {
  switch (kind) {
    case kBf16:
      return bf16_rows ? Read::bf16_by_bf16 : Read::bf16;
    case kFp32:
      return bf16_rows ? Read::fp32_by_bf16 : Read::fp32;
    default:
      return bf16_rows ? Read::int8_by_bf16 : Read::int8;
  }
}
inline bool is_int8(Read read) { return read == Read::int8 || read == Read::int8_by_bf16; }
inline bool is_fp32(Read read) { return read == Read::fp32 || read == Read::fp32_by_bf16; }
inline int x_bytes(Read read) { return read <= Read::int8 ? 4 : 2; }
inline int step_of(Read read) { return is_fp32(read) || is_int8(read) ? 1 : 2; }
inline int64_t step_bytes(Read read) {
  return is_int8(read) ? W : read == Read::quant8 ? W * 2 : W * 4;
}  // of one vector

inline Tile choose_tile(Read read, int rows, int vectors) {
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
    case Read::quant8:
      return kTiles<InGroups<int8_t>>[at];
    default:
      return kTiles<InGroups<int16_t>>[at];
  }
}

// Values of k that tiles take at once. Longer parts where sums lose nothing, as of int16, or less
// than rows of bf16 have lost.
inline int64_t part_of(Read read, int64_t k) {
  if (!in_groups(read) && read != Read::bf16_by_bf16) return kPart;
  return round_up(ceil_div(k, ceil_div(k, kLongPart)), kGroup);
}

// How many tiles take `count` rows: kTileRows each, or a little more where one more tile would have
// few.
inline int64_t tiles_of(int64_t count) {
  const int64_t tiles = std::max<int64_t>(count / kTileRows, 1);
  return count <= tiles * kMostRows ? tiles : tiles + 1;
}

// Calls take(first, rows) for each of these tiles, which are about the same height.
template <class Take>
LPX_INLINE void in_tiles(int64_t count, Take take) {
  const int64_t tiles = tiles_of(count);
  for (int64_t i = 0, row = 0; i < tiles; i++) {
    const int64_t height = ceil_div(count - row, tiles - i);
    take(row, (int)height);
    row += height;
  }
}

// `count` rows by one panel of `vectors` vectors, in register tiles. A part of the panel stays in
// the first-level cache while all rows pass.
inline void product(Read read, Rows rows, int64_t count, const char* w, int vectors, int64_t k,
                    float* c, int64_t ldc, bool add, Prefetch& ahead) {
  const int64_t stride = step_bytes(read) * vectors;
  const float* scale = (const float*)w;
  if (in_groups(read)) w += vectors * W * sizeof(float);
  const int64_t part = part_of(read, k);
  for (int64_t from = 0; from < k; from += part) {
    const int64_t size = k - from < part ? k - from : part;
    in_tiles(count, [&](int64_t row, int height) {
      const Rows some = rows.from(row, x_bytes(read));
      ahead.before_tile();
      choose_tile(read, height, vectors)(some, w, stride, size, c + row * ldc, ldc, add || from > 0,
                                         scale, ahead);
    });
    rows.x = (const char*)rows.x + size * x_bytes(read);
    if (rows.scale) rows.scale += size / kGroup;
    w += size / step_of(read) * stride;
  }
}

}  // namespace loraplex
