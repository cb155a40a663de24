// Packed matrices, and the one product that everything in the step is made of.
//
// A matrix [n, k] is cut into panels of up to kVectors vectors of outputs, as equal as can be. A
// panel holds, for each k or pair of k, its outputs side by side, so that a product reads it once
// from front to back:
//   kBf16   [k/2][outputs][2] bf16        kFp32  [k][outputs] fp32
//   kInt8   [k][outputs] int8             kQuant8  [outputs] fp32 scales, then [k/2][outputs][2]
//   int8
// Outputs are padded with zeroes to whole vectors, k to whole pairs. The KV cache, the adapters' A
// and B and the base are all panels.
//
// Semantics: C[i, o] (+)= sum_k X[i, k] W[o, k], sums in fp32, taken in order of k in parts of
// kPart (so that a long sum loses no more digits than a blocked BLAS does; quantised rows: in
// int32, exactly, in parts of kQuantPart). A row's sum never depends on how many rows share the
// product.
#pragma once
#include <algorithm>
#include <array>
#include <utility>

#include "abi.h"
#include "simd.h"

namespace loraplex {

constexpr int PN = kVectors * W;  // outputs of the widest panel
constexpr int64_t kPart = 192;
constexpr int64_t kQuantPart = 512;  // 127 * 32767 * 512 < 2^31
static_assert(127LL * 32767 * kQuantPart < (1LL << 31));

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Bytes of one vector of outputs.
inline int64_t vector_bytes(int64_t kind, int64_t k) {
  switch (kind) {
    case kBf16:
      return ceil_div(k, 2) * W * 4;
    case kFp32:
      return k * W * 4;
    case kInt8:
      return k * W;
    default:
      return W * 4 + ceil_div(k, 2) * W * 2;
  }
}

// One panel of a matrix: vectors [first, first + count) of its outputs.
struct Panel {
  int64_t first;
  int count;
  int64_t output() const { return first * W; }
  const char* in(const void* panels, int64_t kind, int64_t k) const {
    return (const char*)panels + first * vector_bytes(kind, k);
  }
};
// How a matrix of n outputs is cut.
struct Cut {
  int64_t vectors, panels;
  explicit Cut(int64_t n) : vectors(ceil_div(n, W)), panels(ceil_div(vectors, kVectors)) {}
  Panel panel(int64_t p) const {
    const int64_t first = vectors * p / panels;
    return {first, (int)(vectors * (p + 1) / panels - first)};
  }
};

constexpr int kTurn = 8;       // k that a tile takes between two looks at what it is to prefetch
constexpr int64_t kLine = 64;  // bytes that a prefetch brings

struct Range {
  const char *at = nullptr, *end = nullptr;
  int64_t lines() const { return ceil_div(end - at, kLine); }
};
// Memory to bring into the second-level cache while tiles compute. More than an add and a prefetch
// for each line costs a tile a third of its speed, and many lines at once wait for each other: a
// long range comes by some lines each turn, short ones by some lines before each tile.
class Prefetch {
 public:
  Prefetch() = default;
  // All of a range within about so many turns; tiles of less than one have none.
  Prefetch(Range range, int64_t turns)
      : rest_(range),
        lines_(turns ? std::max<int64_t>((range.lines() + turns / 2) / turns, 1) : 0) {}

  // And all of some other ranges, which are used up, before so many tiles.
  void scatter(Range* first, Range* stop, int64_t tiles) {
    int64_t lines = 0;
    for (Range* range = first; range < stop; range++)
      lines += range->lines();
    short_ = first, stop_ = stop, burst_ = ceil_div(lines, tiles);
  }
  LPX_INLINE void before_tile() {
    for (int64_t i = 0; i < burst_ && short_ < stop_; i++) {
      __builtin_prefetch(short_->at, 0, 2);
      short_->at += kLine;
      if (short_->at >= short_->end) short_++;
    }
  }

  // What one tile has of the long range, in registers.
  struct Walk {
    const char* at;
    int64_t lines;
    LPX_INLINE void turn() {
      for (int64_t i = 0; i < lines; i++, at += kLine)
        __builtin_prefetch(at, 0, 2);
    }
  };
  LPX_INLINE Walk walk() const { return {rest_.at, rest_.at < rest_.end ? lines_ : 0}; }
  LPX_INLINE void walked(const Walk& walk) { rest_.at = walk.at; }

 private:
  Range rest_;
  int64_t lines_ = 0;  // each turn
  Range *short_ = nullptr, *stop_ = nullptr;
  int64_t burst_ = 0;  // lines before each tile
};

// The rows X of a product, in what form the kind of W asks for.
struct Rows {
  const void* x;       // fp32, bf16 or int16, [rows, ld]
  const float* scale;  // of each int16 row
  int64_t ld;
};

// ACC[i, j] += X[i, k] B[j], for one k.
template <int MR, int NV>
LPX_INLINE void multiply_add(F (&acc)[MR][NV], const float* const* x, int64_t k, const F (&b)[NV]) {
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    F a = splat(x[i][k]);
#pragma GCC unroll 3
    for (int j = 0; j < NV; j++)
      acc[i][j] = fma(a, b[j], acc[i][j]);
  }
}

// How the tile reads each kind: `step` values of k at a time, `bytes` of each output.
struct ReadBf16 {
  typedef float X;
  static constexpr int step = 2, bytes = 4;
  template <int MR, int NV>
  static LPX_INLINE void add(F (&acc)[MR][NV], const X* const* x, int64_t k, const char* w,
                             bool half) {
    F b[NV];
#pragma GCC unroll 3
    for (int j = 0; j < NV; j++)
      b[j] = first(load_raw(w + j * W * bytes));
    multiply_add(acc, x, k, b);
    if (half) return;
#pragma GCC unroll 3
    for (int j = 0; j < NV; j++)
      b[j] = second(load_raw(w + j * W * bytes));
    multiply_add(acc, x, k + 1, b);
  }
};
template <class T>
struct ReadWhole {
  typedef float X;
  static constexpr int step = 1, bytes = sizeof(T);
  template <int MR, int NV>
  static LPX_INLINE void add(F (&acc)[MR][NV], const X* const* x, int64_t k, const char* w, bool) {
    F b[NV];
#pragma GCC unroll 3
    for (int j = 0; j < NV; j++)
      b[j] = load((const T*)w + j * W);
    multiply_add(acc, x, k, b);
  }
};
typedef ReadWhole<float> ReadFp32;
typedef ReadWhole<int8_t> ReadInt8;

// bf16 panels and rows rounded to bf16, padded with zeroes to whole pairs.
struct ReadBf16Rows {
  typedef bf16 X;
  static constexpr int step = 2, bytes = 4;
  template <int MR, int NV>
  static LPX_INLINE void add(F (&acc)[MR][NV], const X* const* x, int64_t k, const char* w, bool) {
    I b[NV];
#pragma GCC unroll 3
    for (int j = 0; j < NV; j++)
      b[j] = load_raw(w + j * W * 4);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      int32_t pair;
      memcpy(&pair, x[i] + k, 4);
      I a = splat(pair);
#pragma GCC unroll 3
      for (int j = 0; j < NV; j++)
        acc[i][j] = dot_bf16(acc[i][j], b[j], a);
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
#pragma GCC unroll 3
    for (int j = 0; j < NV; j++)
      acc[i][j] = F{};
  }
  int64_t at = 0;
  Prefetch::Walk walk = ahead.walk();
  for (; at + kTurn <= k; at += kTurn) {
    walk.turn();
#pragma GCC unroll 8
    for (int u = 0; u < kTurn; u += R::step, w += stride)
      R::add(acc, x, at + u, w, false);
  }
  ahead.walked(walk);
  for (; at < k; at += R::step, w += stride)
    R::add(acc, x, at, w, at + 1 == k);
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 3
    for (int j = 0; j < NV; j++) {
      float* y = c + i * ldc + j * W;
      store(y, add ? load(y) + acc[i][j] : acc[i][j]);
    }
}
// The same for kQuant8, whose outputs have scales.
template <int MR, int NV>
static void quant_tile(const Rows& rows, const char* w, int64_t stride, int64_t k, float* c,
                       int64_t ldc, bool add, const float* scale, Prefetch& ahead) {
  const int16_t* x[MR];
  I acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    x[i] = (const int16_t*)rows.x + i * rows.ld;
#pragma GCC unroll 3
    for (int j = 0; j < NV; j++)
      acc[i][j] = I{};
  }
  auto step = [&](int64_t at) __attribute__((always_inline)) {
    I b[NV];
#pragma GCC unroll 3
    for (int j = 0; j < NV; j++)
      b[j] = load_int8_pairs((const int8_t*)w + j * W * 2);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      int32_t pair;
      memcpy(&pair, x[i] + at, 4);
      I a = splat(pair);
#pragma GCC unroll 3
      for (int j = 0; j < NV; j++)
        acc[i][j] = dot_int16(acc[i][j], b[j], a);
    }
    w += stride;
  };
  int64_t at = 0;
  Prefetch::Walk walk = ahead.walk();
  for (; at + kTurn <= k; at += kTurn) {
    walk.turn();
#pragma GCC unroll 4
    for (int u = 0; u < kTurn; u += 2)
      step(at + u);
  }
  ahead.walked(walk);
  for (; at < k; at += 2)
    step(at);
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 3
    for (int j = 0; j < NV; j++) {
      float* y = c + i * ldc + j * W;
      F v = to_float(acc[i][j]) * (load(scale + j * W) * splat(rows.scale[i]));
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
struct Quantised {
  template <int MR, int NV>
  static constexpr Tile tile = quant_tile<MR, NV>;
};
template <class Make>
constexpr auto kTiles = all_tiles<Make>(std::make_integer_sequence<int, kMostRows * kVectors>());

// A way to read a panel: the kind of W, and of X where there is a choice.
enum class Read { bf16, fp32, int8, bf16_rows, quant };

inline Read read_of(int64_t kind) {
  return kind == kBf16 ? Read::bf16 : kind == kFp32 ? Read::fp32 : Read::int8;
}
inline int x_bytes(Read read) { return read == Read::bf16_rows || read == Read::quant ? 2 : 4; }
inline int step_of(Read read) { return read == Read::fp32 || read == Read::int8 ? 1 : 2; }
inline int64_t step_bytes(Read read) {
  return read == Read::int8 ? W : read == Read::quant ? W * 2 : W * 4;
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
    case Read::bf16_rows:
      return kTiles<Plainly<ReadBf16Rows>>[at];
    default:
      return kTiles<Quantised>[at];
  }
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
  const int64_t part = read == Read::quant ? kQuantPart : kPart,
                stride = step_bytes(read) * vectors;
  const float* scale = (const float*)w;
  if (read == Read::quant) w += vectors * W * sizeof(float);
  for (int64_t from = 0; from < k; from += part) {
    const int64_t size = k - from < part ? k - from : part;
    in_tiles(count, [&](int64_t row, int height) {
      const Rows some{(const char*)rows.x + row * rows.ld * x_bytes(read),
                      rows.scale ? rows.scale + row : nullptr, rows.ld};
      ahead.before_tile();
      choose_tile(read, height, vectors)(some, w, stride, size, c + row * ldc, ldc, add || from > 0,
                                         scale, ahead);
    });
    rows.x = (const char*)rows.x + size * x_bytes(read);
    w += size / step_of(read) * stride;
  }
}

}  // namespace loraplex
