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

// The panel of A that is read after panel i of segment s.
inline Range next_a(const Lora& lora, int64_t s, int64_t i, int64_t k) {
  const LoraProjection* p = &lora.projection(lora.segment[s]);
  if (i + 1 == Cut(p->ranks).panels) {
    if (s + 1 == lora.segments) return {};
    p = &lora.projection(lora.segment[++s]), i = -1;
    if (!p->ranks) return {};
  }
  const int64_t kind = lora.segment[s].adapter->kind;
  const Panel next = Cut(p->ranks).panel(i + 1);
  const char* from = next.in(p->a, kind, k);
  return {from, from + next.count * vector_bytes(kind, k)};
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

// Thread t's share of H, for X with `k` columns.
inline void shrink(const Lora& lora, const Rows& x, int64_t k, int t, int threads) {
  each_unit(lora, t, threads, [&](int64_t s, int64_t i, Panel at, int64_t row, int64_t rows) {
    const Segment& segment = lora.segment[s];
    const LoraProjection& p = lora.projection(segment);
    const Read read = lora.read(segment);
    Prefetch ahead;
    if (row + rows == segment.end) ahead = {next_a(lora, s, i, k), k / kTurn};
    alignas(64) float c[kSegmentRows * PN];
    product(read, x.from(row, x_bytes(read)), rows, at.in(p.a, segment.adapter->kind, k), at.count,
            k, c, PN, false, ahead);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t j = 0; j < at.count; j++) {
        const int64_t rank = at.output() + j * W;
        lora.put_h(row + r, rank, load(c + r * PN + j * W) * load_of(p.scale, rank, p.ranks));
      }
  });
}

// Adds the panels of A that thread t reads in a shrink to what is prefetched.
inline void expect_shrink(const Lora& lora, int64_t k, int t, int threads, Backlog& to) {
  const char* last = nullptr;
  int64_t bytes = 0;
  each_unit(lora, t, threads, [&](int64_t s, int64_t, Panel at, int64_t, int64_t) {
    const Segment& segment = lora.segment[s];
    const int64_t kind = segment.adapter->kind, size = at.count * vector_bytes(kind, k);
    const char* from = at.in(lora.projection(segment).a, kind, k);
    if (from != last && (bytes += size) <= kAheadA) to.add({from, from + size});
    last = from;
  });
}

// Where B's outputs of a base panel lie for rows [from, to), to be prefetched; returns how many
// ranges were written.
inline int64_t b_ranges(const Lora& lora, int slice, Panel at, int64_t from, int64_t to,
                        Range* range) {
  int64_t count = 0;
  for (int64_t s = 0; s < lora.segments && count < kMaxRanges; s++) {
    if (lora.segment[s].end <= from || lora.segment[s].start >= to) continue;
    const int64_t kind = lora.segment[s].adapter->kind;
    const LoraSlice& b = lora.projection(lora.segment[s]).slice[slice];
    if (!b.rank) continue;
    const char* from = at.in(b.b, kind, b.rank);
    range[count++] = {from, from + at.count * vector_bytes(kind, b.rank)};
  }
  return count;
}

// Rows that are alone under their adapters, as in decoding: some are taken together, since the sums
// of one wait for each other.
class OwnRows {
 public:
  explicit OwnRows(int vectors) : vectors_(vectors) {}

  // Whether a row read so, of this rank, waits now to be added to; if not, the caller does it.
  bool take(Read read, int64_t rank, const void* h, const char* b, float* c) {
    if (rank > kPart) return false;
    if (count_ == kOwnRows || read != read_ || rank != rank_) flush();
    read_ = read, rank_ = rank;
    h_[count_] = h, b_[count_] = b, c_[count_++] = c;
    return true;
  }
  void flush() {
    if (!count_) return;
    choose_own_tile(read_, count_, vectors_)(h_, b_, rank_, c_);
    count_ = 0;
  }

 private:
  const int vectors_;
  int count_ = 0;
  Read read_ = Read::bf16;
  int64_t rank_ = 0;
  const void* h_[kOwnRows];
  const char* b_[kOwnRows];
  float* c_[kOwnRows];
};

// Adds to C [rows from `from` to `to`, PN], which holds the base product of a panel of a slice of n
// outputs.
inline void expand(const Lora& lora, int slice, int64_t n, Panel at, int64_t from, int64_t to,
                   float* c) {
  OwnRows own(at.count);
  for (int64_t s = 0; s < lora.segments; s++) {
    const Segment& segment = lora.segment[s];
    const int64_t begin = segment.start > from ? segment.start : from,
                  end = segment.end < to ? segment.end : to;
    if (begin >= end) continue;
    const Read read = lora.read(segment);
    const LoraSlice& b = lora.projection(segment).slice[slice];
    float* tile = c + (begin - from) * PN;
    Prefetch none;
    const void* h = lora.h_at(begin, b.first_rank);
    const char* panel = at.in(b.b, segment.adapter->kind, b.rank);
    if (b.rank && (end - begin > 1 || !own.take(read, b.rank, h, panel, tile)))
      product(read, {h, kRankStride}, end - begin, panel, at.count, b.rank, tile, PN, true, none);
    if (!b.gain && !b.bias) continue;
    own.flush();
    for (int64_t r = begin; r < end; r++, tile += PN)
      for (int64_t j = 0; j < at.count; j++) {
        F v = load(tile + j * W);
        if (b.gain) v = v * load_of(b.gain, at.output() + j * W, n);
        if (b.bias) v = v + load_of(b.bias, at.output() + j * W, n);
        store(tile + j * W, v);
      }
  }
  own.flush();
}

}  // namespace loraplex
