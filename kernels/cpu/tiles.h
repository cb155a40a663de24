// The one product that everything in the step is made of, in register tiles (tiles.cpp).
//
// Semantics: C[i, o] (+)= sum_k X[i, k] W[o, k], sums in fp32, taken in order of k in parts of
// `part_of` (so that a long sum loses no more digits than a blocked BLAS does). Rows of integers
// have a scale for each kGroup inputs, whose sum is taken in int32, exactly. A row's sum never
// depends on how many rows share the product.
#pragma once
#include "panels.h"
#include "prefetch.h"

namespace loraplex {

constexpr int64_t kPart = 192;
constexpr int64_t kLongPart = 576;

// What rows are best rounded to for bf16 weights. Where pairs of bf16 are not multiplied, those of
// int16 are: an instruction takes twice as many as one of fp32, and weights need not be widened.
constexpr Activations kBestActivations =
#if defined(LPX_BF16)
    kActBf16;
#elif defined(LPX_AVX512) || defined(LPX_AVX2)
    kActInt16;
#else
    kActFp32;
#endif

// And what weights int8 rows are best multiplied with.
constexpr Kind kW8A8Kind =
#if defined(LPX_AVX512) || defined(LPX_AVX_VNNI)
    kOffset8;
#else
    kQuant8;
#endif

// The rows X of a product, in what form the kind of W asks for.
struct Rows {
  const void* x;  // fp32, bf16 or integers, [rows, ld]
  int64_t ld;
  const float* scale = nullptr;    // of integers: [rows, groups]
  const int32_t* start = nullptr;  // of int8: [rows, groups]
  int64_t groups = 0;

  Rows from(int64_t row, int x_bytes) const {
    return {(const char*)x + row * ld * x_bytes, ld, scale ? scale + row * groups : nullptr,
            start ? start + row * groups : nullptr, groups};
  }
};

// Where outputs of a product go: fp32, `ld` from one row to the next.
struct Place {
  float* c;
  int64_t ld;
  float* row(int64_t r) const { return c + r * ld; }
};

// A way to read a panel: the kind of W, and of X where that is not fp32.
enum class Read {
  bf16,
  fp32,
  int8,
  bf16_by_bf16,
  fp32_by_bf16,
  int8_by_bf16,
  quant8,
  fixed16,
  offset8
};

inline bool in_groups(Read read) { return read >= Read::quant8; }

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
inline int x_bytes(Read read) { return read <= Read::int8 ? 4 : read == Read::offset8 ? 1 : 2; }
inline int step_of(Read read) {
  return is_fp32(read) || is_int8(read) ? 1 : read == Read::offset8 ? 4 : 2;
}
inline int64_t step_bytes(Read read) {
  return is_int8(read) ? W : read == Read::quant8 ? W * 2 : W * 4;
}  // of one vector

// Some rows by some vectors over one part of k. `w` has `stride` bytes for each step of k; C [rows,
// ldc] is added to, or else written; integers have a scale for each output; `ahead` goes on from
// tile to tile.
typedef void (*Tile)(const Rows&, const char* w, int64_t stride, int64_t k, float* c, int64_t ldc,
                     bool add, const float* scale, Prefetch& ahead);

Tile choose_tile(Read read, int rows, int vectors);
Tile choose_integer_tile(Read read, int rows, int vectors);

// Whether sums lose nothing, as those of int16, or less than rows of bf16 have lost.
inline bool sums_lose_little(Read read) { return in_groups(read) || read == Read::bf16_by_bf16; }

// Values of k that tiles take at once.
inline int64_t part_of(Read read, int64_t k) {
  if (!sums_lose_little(read)) return kPart;
  return round_up(ceil_div(k, ceil_div(k, kLongPart)), kGroup);
}

// Rows of a tile, at best. Where many would fit, sums of bytes leave registers for their totals,
// which come soon.
inline int best_rows(Read read) {
  return read == Read::offset8 ? std::min(kTileRows, 4) : kTileRows;
}

// How many tiles take `count` rows: about `best` each, or a little more where one more tile would
// have few.
inline int64_t tiles_of(int64_t count, int best) {
  const int64_t tiles = std::max<int64_t>(count / best, 1);
  return count <= tiles * kMostRows ? tiles : tiles + 1;
}

// Calls take(first, rows) for each of these tiles, which are about the same height.
template <class Take>
LPX_INLINE void in_tiles(int64_t count, int best, Take take) {
  const int64_t tiles = tiles_of(count, best);
  for (int64_t i = 0, row = 0; i < tiles; i++) {
    const int64_t height = ceil_div(count - row, tiles - i);
    take(row, (int)height);
    row += height;
  }
}

// `count` rows by one panel of `vectors` vectors, in register tiles. A part of the panel stays in a
// near cache while all rows pass.
inline void product(Read read, Rows rows, int64_t count, const char* w, int vectors, int64_t k,
                    Place c, bool add, Prefetch& ahead) {
  const int64_t stride = step_bytes(read) * vectors;
  const float* scale = (const float*)w;
  if (in_groups(read)) w += vectors * W * sizeof(float);
  const int64_t part = part_of(read, k);
  Tile tile = nullptr;
  int high = 0;  // rows that it takes
  for (int64_t from = 0; from < k; from += part) {
    const int64_t size = k - from < part ? k - from : part;
    in_tiles(count, best_rows(read), [&](int64_t row, int height) {
      if (height != high) tile = choose_tile(read, high = height, vectors);
      tile(rows.from(row, x_bytes(read)), w, stride, size, c.row(row), c.ld, add || from > 0, scale,
           ahead);
    });
    rows.x = (const char*)rows.x + size * x_bytes(read);
    if (rows.scale) rows.scale += size / kGroup;
    if (rows.start) rows.start += size / kGroup;
    w += size / step_of(read) * stride;
  }
}

}  // namespace loraplex
