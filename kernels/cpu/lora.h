// The adapters of a step's rows: shrink to the rank, and expand into the tile of the base product.
//
// Semantics, for rows t of a segment and slices s of a fused projection: H[t, r] = SCALE[r] sum_i
// X[t, i] A[r, i], then C[t, o] <- GAIN_s[o] (C[t, o] + sum_r H[t, r] B_s[o, r]) + BIAS_s[o].
// (Punica: Chen et al., 2023.)
//
// Both products are products by panels. Rows of no segment are not touched; an adapter's part that
// is absent costs nothing.
#pragma once
#include "own_tiles.h"

namespace loraplex {

constexpr int64_t kMaxRanks = 3 * 512;          // of a projection's slices together
constexpr int64_t kSegmentRows = kTileRows;     // rows of one unit of the shrink's work
constexpr int64_t kRankStride = kMaxRanks + W;  // H's row

constexpr int64_t kAheadA = 256 << 10;  // bytes that a thread prefetches for the next shrink
constexpr int64_t kMaxRanges = 64;      // of B that are prefetched during a base product
constexpr int64_t kAheadB = 8 << 10;    // bytes of them for each tile, where memory has no time

enum LoraPart { kLoraQkv, kLoraO, kLoraGateUp, kLoraDown };

struct Lora {
  const Segment* segment;
  int64_t segments, layer;
  LoraPart part;
  bool bf16_rows;  // X and H, else fp32
  char* h;         // [rows, kRankStride]

  const LoraProjection& projection(const Segment& s) const {
    return s.adapter->projection[layer * 4 + part];
  }
  // Of the shrink: one is a panel of A by some rows of a segment.
  int64_t units() const {
    int64_t units = 0;
    for (int64_t s = 0; s < segments; s++)
      units += Cut(projection(segment[s]).ranks).panels *
               ceil_div(segment[s].end - segment[s].start, kSegmentRows);
    return units;
  }
  Read read(const Segment& s) const { return read_of(s.adapter->kind, bf16_rows); }
  // Has H's rows from `first` on kept at `place`.
  void keep(void* place, int64_t first) {
    h = (char*)place - first * kRankStride * (bf16_rows ? 2 : 4);
  }
  char* h_at(int64_t row, int64_t rank) const {
    return h + (row * kRankStride + rank) * (bf16_rows ? 2 : 4);
  }
  void put_h(int64_t row, int64_t rank, F v) const {
    char* at = h_at(row, rank);
    bf16_rows ? store_bf16((bf16*)at, v) : store((float*)at, v);
  }
};

// A panel of A of segment s, for `k` inputs.
inline Range a_panel(const Lora& lora, int64_t s, Panel at, int64_t k) {
  const int64_t kind = lora.segment[s].adapter->kind;
  const char* from = at.in(lora.projection(lora.segment[s]).a, kind, k);
  return {from, from + at.count * vector_bytes(kind, k)};
}
// The one that is read after panel i of segment s.
inline Range next_a(const Lora& lora, int64_t s, int64_t i, int64_t k) {
  const LoraProjection* p = &lora.projection(lora.segment[s]);
  if (i + 1 == Cut(p->ranks).panels) {
    if (s + 1 == lora.segments) return {};
    p = &lora.projection(lora.segment[++s]), i = -1;
    if (!p->ranks) return {};
  }
  return a_panel(lora, s, Cut(p->ranks).panel(i + 1), k);
}

// Thread t's share of the shrink's units: take(segment, its number, panel of A, row, rows). A unit
// is one panel of A by some rows of a segment.
template <class Take>
inline void each_unit(const Lora& lora, int t, int threads, Take take) {
  const int64_t units = lora.units();
  int64_t unit = 0;
  const int64_t from = units * t / threads, to = units * (t + 1) / threads;
  for (int64_t s = 0; s < lora.segments && unit < to; s++) {
    const Segment& segment = lora.segment[s];
    const Cut cut(lora.projection(segment).ranks);
    for (int64_t i = 0; i < cut.panels; i++)
      for (int64_t row = segment.start; row < segment.end; row += kSegmentRows, unit++)
        if (unit >= from && unit < to)
          take(s, i, cut.panel(i), row, std::min(segment.end - row, kSegmentRows));
  }
}

// H, for X with `k` columns.
class Shrink {
 public:
  Shrink(const Lora& lora, const Rows& x, int64_t k) : lora(lora), x(x), k(k) {}

  // Thread t's share of it.
  void run(int t, int threads) {
    each_unit(lora, t, threads, [&](int64_t s, int64_t i, Panel at, int64_t row, int64_t rows) {
      rows == 1 ? take_row({s, at, row}) : take_rows({s, at, row}, i, rows);
    });
    flush();
  }

 private:
  struct Unit {
    int64_t segment;
    Panel at;
    int64_t row;
  };
  const char* a(const Unit& unit) const { return a_panel(lora, unit.segment, unit.at, k).at; }
  void take_rows(const Unit& unit, int64_t panel, int64_t rows) {
    const Segment& segment = lora.segment[unit.segment];
    const Read read = lora.read(segment);
    Prefetch ahead;
    if (unit.row + rows == segment.end) ahead = {next_a(lora, unit.segment, panel, k), k / kTurn};
    alignas(64) float c[kSegmentRows * PN];
    product(read, x.from(unit.row, x_bytes(read)), rows, a(unit), unit.at.count, k, {c, PN}, false,
            ahead);
    for (int64_t r = 0; r < rows; r++)
      put(unit, unit.row + r, c + r * PN);
  }
  void take_row(const Unit& unit) {
    if (count_ == kOwnRows) flush();
    const Read read = lora.read(lora.segment[unit.segment]);
    memset(c_[count_], 0, sizeof(c_[0]));
    own_.take(read, k, unit.at.count, x.from(unit.row, x_bytes(read)).x, a(unit), c_[count_]);
    alone_[count_++] = unit;
  }
  void flush() {
    own_.flush();
    for (int i = 0; i < count_; i++)
      put(alone_[i], alone_[i].row, c_[i]);
    count_ = 0;
  }
  void put(const Unit& unit, int64_t row, const float* c) const {
    const LoraProjection& p = lora.projection(lora.segment[unit.segment]);
    for (int64_t j = 0; j < unit.at.count; j++) {
      const int64_t rank = unit.at.output() + j * W;
      lora.put_h(row, rank, load(c + j * W) * load_of(p.scale, rank, p.ranks));
    }
  }

  const Lora& lora;
  const Rows x;
  const int64_t k;
  OwnRows own_;
  int count_ = 0;  // units of one row that wait
  Unit alone_[kOwnRows];
  alignas(64) float c_[kOwnRows][PN];
};

// Adds the panels of A that thread t reads in a shrink to what is prefetched.
inline void expect_shrink(const Lora& lora, int64_t k, int t, int threads, Backlog& to) {
  const char* last = nullptr;
  int64_t bytes = 0;
  each_unit(lora, t, threads, [&](int64_t s, int64_t, Panel at, int64_t, int64_t) {
    const Range panel = a_panel(lora, s, at, k);
    if (panel.at != last && (bytes += panel.end - panel.at) <= kAheadA) to.add(panel);
    last = panel.at;
  });
}

// What a segment's adapter adds to a slice of a projection, looked up once for all of its panels.
struct Addend {
  int64_t start, end;  // rows
  Read read;
  int64_t rank, first_rank, vector_bytes;
  const char* b;
  const float *gain, *bias;

  Range panel(Panel at) const {
    const char* from = b + at.first * vector_bytes;
    return {from, from + at.count * vector_bytes};
  }
};

class Addends {
 public:
  void renew(const Lora& lora, int slices) {
    for (int i = 0; i < slices; i++) {
      slice_[i].clear();
      for (const Segment* s = lora.segment; s < lora.segment + lora.segments; s++) {
        const LoraSlice& b = lora.projection(*s).slice[i];
        if (b.rank || b.gain || b.bias)
          slice_[i].push_back({s->start, s->end, lora.read(*s), b.rank, b.first_rank,
                               vector_bytes(s->adapter->kind, b.rank), (const char*)b.b, b.gain,
                               b.bias});
      }
    }
  }
  const std::vector<Addend>& of(int slice) const { return slice_[slice]; }
  // Calls take(from, to) for the rows of [from, to) that have a gain.
  template <class Take>
  void each_gained(int slice, int64_t from, int64_t to, Take take) const {
    for (const Addend& a : slice_[slice])
      if (a.gain && a.end > from && a.start < to)
        take(std::max(a.start, from), std::min(a.end, to));
  }
  // Where B's outputs of a base panel lie for rows [from, to), to be prefetched, of at most so many
  // bytes; returns how many ranges were written.
  int64_t ranges(int slice, Panel at, int64_t from, int64_t to, int64_t most, Range* range) const {
    int64_t count = 0;
    for (const Addend& a : slice_[slice]) {
      if (a.end <= from || a.start >= to || !a.rank) continue;
      const Range panel = a.panel(at);
      if (count == kMaxRanges || (most -= panel.end - panel.at) < 0) break;
      range[count++] = panel;
    }
    return count;
  }

 private:
  std::vector<Addend> slice_[3];
};

// Adds to C, rows from `from` to `to`, which holds the base product of a panel of a slice of n
// outputs.
inline void expand(const Lora& lora, const std::vector<Addend>& addends, int64_t n, Panel at,
                   int64_t from, int64_t to, Place c) {
  OwnRows own;
  for (const Addend& a : addends) {
    const int64_t begin = std::max(a.start, from), end = std::min(a.end, to);
    if (begin >= end) continue;
    const Place tile{c.row(begin - from), c.ld};
    Prefetch none;
    const void* h = lora.h_at(begin, a.first_rank);
    const char* panel = a.panel(at).at;
    if (a.rank && end - begin == 1)
      own.take(a.read, a.rank, at.count, h, panel, tile.c);
    else if (a.rank)
      product(a.read, {h, kRankStride}, end - begin, panel, at.count, a.rank, tile, true, none);
    if (!a.gain && !a.bias) continue;
    own.flush();
    for (int64_t r = 0; r < end - begin; r++)
      for (int64_t j = 0; j < at.count; j++) {
        F v = load(tile.row(r) + j * W);
        if (a.gain) v = v * load_of(a.gain, at.output() + j * W, n);
        if (a.bias) v = v + load_of(a.bias, at.output() + j * W, n);
        store(tile.row(r) + j * W, v);
      }
  }
  own.flush();
}

}  // namespace loraplex
