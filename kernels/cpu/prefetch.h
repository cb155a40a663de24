// What to bring into the second-level cache while tiles compute.
//
// This file knows addresses; it refuses to know what lies there.
#pragma once
#include <algorithm>

#include "simd.h"

namespace loraplex {

constexpr int kTurn = 8;       // k that a tile takes between two looks at what it is to prefetch
constexpr int64_t kLine = 64;  // bytes that a prefetch brings

struct Range {
  const char *at = nullptr, *end = nullptr;
  int64_t lines() const { return (end - at + kLine - 1) / kLine; }
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
    short_ = first, stop_ = stop, burst_ = (lines + tiles - 1) / tiles;
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

}  // namespace loraplex
