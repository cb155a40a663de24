// The adapters of a step's rows: shrink to the rank, and expand into the tile of the base product.
//
// Semantics, for rows t of a segment and slices s of a fused projection: H[t, r] = SCALE[r] sum_i
// X[t, i] A[r, i], then C[t, o] <- GAIN_s[o] (C[t, o] + sum_r H[t, r] B_s[o, r]) + BIAS_s[o].
// (Punica: Chen et al., 2023.)
//
// Both products are products by panels. Rows of no segment are not touched; an adapter's part that
// is absent costs nothing.
#pragma once
#include "panels.h"

namespace loraplex {

constexpr int64_t kMaxRanks = 3 * 512;          // of a projection's slices together
constexpr int64_t kSegmentRows = kTileRows;     // rows of one unit of the shrink's work
constexpr int64_t kRankStride = kMaxRanks + W;  // H's row

enum LoraPart { kLoraQkv, kLoraO, kLoraGateUp, kLoraDown };

struct Lora {
  const Segment* segment;
  int64_t segments, layer;
  LoraPart part;
  float* h;  // [rows, kRankStride]

  const LoraProjection& projection(const Segment& s) const {
    return s.adapter->projection[layer * 4 + part];
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

// Thread t's share of H, for X [rows, ld] with `k` columns. A unit is one panel of A by some rows
// of a segment.
inline void shrink(const Lora& lora, const float* x, int64_t ld, int64_t k, int t, int threads) {
  int64_t units = 0, unit = 0;
  for (int64_t s = 0; s < lora.segments; s++) {
    const Segment& segment = lora.segment[s];
    units += Cut(lora.projection(segment).ranks).panels *
             ceil_div(segment.end - segment.start, kSegmentRows);
  }
  const int64_t from = units * t / threads, to = units * (t + 1) / threads;
  for (int64_t s = 0; s < lora.segments && unit < to; s++) {
    const Segment& segment = lora.segment[s];
    const LoraProjection& p = lora.projection(segment);
    const Cut cut(p.ranks);
    for (int64_t i = 0; i < cut.panels; i++)
      for (int64_t row = segment.start; row < segment.end; row += kSegmentRows, unit++) {
        if (unit < from || unit >= to) continue;
        const int64_t rows = segment.end - row < kSegmentRows ? segment.end - row : kSegmentRows,
                      kind = segment.adapter->kind;
        const Panel at = cut.panel(i);
        float* h = lora.h + row * kRankStride + at.output();
        Prefetch ahead;
        if (row + rows == segment.end) ahead = {next_a(lora, s, i, k), k / kTurn};
        product(read_of(kind), {x + row * ld, nullptr, ld}, rows, at.in(p.a, kind, k), at.count, k,
                h, kRankStride, false, ahead);
        for (int64_t r = 0; r < rows; r++, h += kRankStride)
          for (int64_t j = 0; j < at.count; j++)
            store(h + j * W, load(h + j * W) * load_of(p.scale, at.output() + j * W, p.ranks));
      }
  }
}

// Where B's outputs of a base panel lie for rows [from, to), to be prefetched; returns how many
// ranges were written.
inline int64_t b_ranges(const Lora& lora, int slice, Panel at, int64_t from, int64_t to,
                        Range* range, int64_t most) {
  int64_t count = 0;
  for (int64_t s = 0; s < lora.segments && count < most; s++) {
    if (lora.segment[s].end <= from || lora.segment[s].start >= to) continue;
    const int64_t kind = lora.segment[s].adapter->kind;
    const LoraSlice& b = lora.projection(lora.segment[s]).slice[slice];
    if (!b.rank) continue;
    const char* from = at.in(b.b, kind, b.rank);
    range[count++] = {from, from + at.count * vector_bytes(kind, b.rank)};
  }
  return count;
}

// Adds to C [rows from `from` to `to`, PN], which holds the base product of a panel of a slice of n
// outputs.
inline void expand(const Lora& lora, int slice, int64_t n, Panel at, int64_t from, int64_t to,
                   float* c) {
  for (int64_t s = 0; s < lora.segments; s++) {
    const Segment& segment = lora.segment[s];
    const int64_t begin = segment.start > from ? segment.start : from,
                  end = segment.end < to ? segment.end : to;
    if (begin >= end) continue;
    const int64_t kind = segment.adapter->kind;
    const LoraSlice& b = lora.projection(segment).slice[slice];
    float* tile = c + (begin - from) * PN;
    Prefetch none;
    if (b.rank)
      product(read_of(kind), {lora.h + begin * kRankStride + b.first_rank, nullptr, kRankStride},
              end - begin, at.in(b.b, kind, b.rank), at.count, b.rank, tile, PN, true, none);
    if (!b.gain && !b.bias) continue;
    for (int64_t r = begin; r < end; r++, tile += PN)
      for (int64_t j = 0; j < at.count; j++) {
        F v = load(tile + j * W);
        if (b.gain) v = v * load_of(b.gain, at.output() + j * W, n);
        if (b.bias) v = v + load_of(b.bias, at.output() + j * W, n);
        store(tile + j * W, v);
      }
  }
}

}  // namespace loraplex
