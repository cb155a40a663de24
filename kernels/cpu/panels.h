// Packed matrices.
//
// A matrix [n, k] is cut into panels of up to kVectors vectors of outputs, as equal as can be. A
// panel holds, for each k or pair of k, its outputs side by side, so that a product reads it once
// from front to back:
//   kBf16   [k/2][outputs][2] bf16        kFp32  [k][outputs] fp32
//   kInt8   [k][outputs] int8
//   kQuant8, kFixed16  [outputs] fp32 scales, then [k/2][outputs][2] int8 or int16
//   kOffset8           [outputs] fp32 scales, then [k/4][outputs][4] uint8
// Outputs are padded with zeroes to whole vectors, k to whole pairs or fours. The KV cache, the
// adapters' A and B and the base are all panels.
//
// This file knows how numbers lie; it refuses to know how they are multiplied.
#pragma once
#include "abi.h"
#include "simd.h"

namespace loraplex {

constexpr int PN = kVectors * W;  // outputs of the widest panel
constexpr int64_t kGroup = 64;    // inputs that share a scale in a row of integers
// The largest of a row of int16, and what a group's products may sum to: int8 weights are at most
// 127 each, those of kFixed16 at most kFixedSum together.
constexpr int64_t kMostInt16 = 32767, kMostFixed = 16383, kFixedSum = 1 << 17;
static_assert(127 * kMostInt16 * kGroup < (1LL << 31) && kFixedSum * kMostFixed < (1LL << 31));

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
    case kOffset8:
      return W * 4 + ceil_div(k, 4) * W * 4;
    default:
      return W * 4 + ceil_div(k, 2) * W * (kind == kFixed16 ? 4 : 2);
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

}  // namespace loraplex
