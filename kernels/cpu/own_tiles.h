// Register tiles whose rows each have a panel of their own (own_tiles.cpp).
#pragma once
#include "tiles.h"

namespace loraplex {

constexpr int kOwnRows = 4;  // at most

// Semantics: C_i += X_i W_i, i being some rows and W_i panels of k inputs and one width, over one
// part of k. Each row's sum is what `product` makes of it.
typedef void (*OwnTile)(const void* const* x, const char* const* w, int64_t k, float* const* c);

OwnTile choose_own_tile(Read read, int rows, int vectors);

// Rows that are alone under their adapters, as in decoding: some are taken together, since the sums
// of one wait for each other.
class OwnRows {
 public:
  // Has a row's sum over k added to C. What waits is done when a row is unlike it, and at last by
  // `flush`.
  void take(Read read, int64_t k, int vectors, const void* x, const char* w, float* c) {
    if (count_ == kOwnRows || read != read_ || k != k_ || vectors != vectors_) flush();
    read_ = read, k_ = k, vectors_ = vectors;
    x_[count_] = (const char*)x, w_[count_] = w, c_[count_++] = c;
  }
  void flush() {
    if (!count_) return;
    const OwnTile tile = choose_own_tile(read_, count_, vectors_);
    const int64_t part = part_of(read_, k_);
    for (int64_t from = 0; from < k_; from += part) {
      const int64_t size = std::min(part, k_ - from);
      tile((const void* const*)x_, w_, size, c_);
      for (int i = 0; i < count_; i++)
        x_[i] += size * x_bytes(read_),
            w_[i] += size / step_of(read_) * step_bytes(read_) * vectors_;
    }
    count_ = 0;
  }

 private:
  int count_ = 0, vectors_ = 0;
  Read read_ = Read::bf16;
  int64_t k_ = 0;
  const char *x_[kOwnRows], *w_[kOwnRows];
  float* c_[kOwnRows];
};

}  // namespace loraplex
