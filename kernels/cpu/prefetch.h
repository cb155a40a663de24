// What to bring into the second-level cache while tiles compute.
//
// This file knows addresses; it refuses to know what lies there.
#pragma once
#include <algorithm>

#include "panels.h"

namespace loraplex {

constexpr int kTurn = 8;       // k that a tile takes between two looks at what it is to prefetch
constexpr int64_t kLine = 64;  // bytes that a prefetch brings

struct Range {
  const char *at, *end;
  int64_t lines() const { return (end - at + kLine - 1) / kLine; }
};
inline int64_t lines_of(const Range* first, const Range* stop) {
  int64_t lines = 0;
  for (; first < stop; first++)
    lines += first->lines();
  return lines;
}

// Ranges that come little by little, during several products.
class Backlog {
 public:
  void clear() { first_ = count_ = 0; }
  // Adds a range, and says whether there was room.
  bool add(Range range) {
    if (count_ == kMost) return false;
    range_[count_++] = range;
    return true;
  }
  int64_t lines() const { return lines_of(range_ + first_, range_ + count_); }
  // Moves so many lines to `to`, of at most so many ranges; returns how many these are.
  int64_t take(int64_t lines, Range* to, int64_t most) {
    int64_t count = 0;
    while (lines > 0 && first_ < count_ && count < most) {
      Range& from = range_[first_];
      const int64_t some = std::min(lines, from.lines());
      to[count++] = {from.at, from.at + some * kLine};
      from.at += some * kLine, lines -= some;
      if (from.at >= from.end) first_++;
    }
    return count;
  }

 private:
  static constexpr int64_t kMost = 512;
  Range range_[kMost];
  int64_t first_ = 0, count_ = 0;
};

// Memory to bring into the second-level cache while tiles compute. More than an add and a prefetch
// for each line costs a tile a third of its speed, and many lines at once wait for each other: so
// many lines come each turn, and where a range ends is looked at between legs of some turns.
class Prefetch {
 public:
  Prefetch() = default;
  // All of a range within about so many turns; tiles of less than one have none.
  Prefetch(Range range, int64_t turns)
      : last_(range),
        lines_(turns ? std::max<int64_t>((range.lines() + turns / 2) / turns, 1) : 0) {}

  // And before it some others, none of them empty, which are used up; all within so many turns.
  void before(Range* first, Range* stop, int64_t turns) {
    if (first == stop || !turns) return;
    first_ = first, stop_ = stop;
    lines_ = ceil_div(lines_of(first, stop) + last_.lines(), turns);
  }

  // What some turns of a tile have of one range, in registers.
  struct Walk {
    const char* at;
    int64_t lines, turns;
    bool more;  // ranges follow
    LPX_INLINE void turn() {
      for (int64_t i = 0; i < lines; i++, at += kLine)
        __builtin_prefetch(at, 0, 2);
    }
  };
  // The next leg, of at most so many turns.
  LPX_INLINE Walk walk(int64_t turns) const {
    if (first_ == stop_) return {last_.at, last_.at < last_.end ? lines_ : 0, turns, false};
    return {first_->at, lines_, std::min(turns, ceil_div(first_->lines(), lines_)), true};
  }
  LPX_INLINE void walked(const Walk& walk) {
    if (walk.more)
      first_->at = walk.at, first_ += walk.at >= first_->end;
    else
      last_.at = walk.at;
  }

 private:
  Range *first_ = nullptr, *stop_ = nullptr, last_{};
  int64_t lines_ = 0;  // each turn
};

}  // namespace loraplex
