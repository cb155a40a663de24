// Draws a token from one row of logits, within limits.
//
// Semantics, as of engine/draw.py: a row's tokens have the weights w = exp((l - peak) / T). Top-k
// keeps those whose logit is no less than the k-th largest, top-p those of these whose weight is no
// less than that of the last token of the shortest prefix, likeliest first, which has `top_p` of
// their sum, min-p those with w >= min_p. The token is the first where the running sum of what is
// kept, in the order of tokens, passes `share` of its whole.
//
// Nothing is sorted. Each limit bounds the logits from below, so the few tokens above are gathered,
// and top-p's least weight is found among them by bisection over the bits of fp32. Sums are fp32
// within a block of tokens and fp64 from block to block. A token depends on its own row alone. It
// refuses to know threads and batches.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "abi.h"
#include "simd.h"

namespace loraplex {

// What one thread draws with, row after row of `vocab` logits.
class Drawer {
 public:
  explicit Drawer(int64_t vocab)
      : n_(vocab),
        sums_(vocab / kBlock + 1),
        values_(vocab + W),
        spare_(std::max(vocab, kGroups)),
        tokens_(vocab) {}

  int64_t draw(const Draw& row) {
    row_ = &row, factor_ = (float)row.factor * kLog2E;
    const bool ranked = row.top_k > 0 && row.top_k < n_;
    if (!ranked && row.top_p >= 1 && row.min_p <= 0)
      return place(n_, [this](int64_t i) { return weigh(logits(i)); });
    const float floor = (float)std::max(row.min_p, ranked ? gather_top_k() : gather_likely());
    return tokens_[place(count_, [this, floor](int64_t i) { return kept(i, floor); })];
  }

 private:
  static constexpr int64_t kBlock = 512;    // tokens whose weights are added in fp32
  static constexpr int64_t kGroups = 1024;  // of tokens, whose highest logits bound the k-th
  static constexpr double kLikely = 2048;   // this part of what top-p leaves out is tried first,
  static constexpr double kMore = 4;        // then one that is so much smaller, and so on
  static constexpr float kLowest = -3.40282347e38f;  // above that of a token which may not come

  // Gathers what top-k keeps. Returns the least weight of these that top-p keeps.
  double gather_top_k() {
    gather(kth(row_->top_k));
    weigh_gathered();
    return row_->top_p < 1 ? least(row_->top_p * mass_from(0)) : 0;
  }
  // Gathers tokens among which are all that top-p and min-p keep. Returns the least weight that
  // top-p keeps.
  double gather_likely() {
    if (row_->top_p >= 1) return gather_from(row_->min_p), 0;
    const double whole = add_up(n_, [this](int64_t i) { return weigh(logits(i)); });
    const double goal = row_->top_p * whole, others = (1 - row_->top_p) * whole;
    double part = kLikely, weight;
    do {
      weight = others / part, part *= kMore;
      gather_from(std::max(row_->min_p, weight));
      // Tokens under `others / n` are less than `others`; half leaves room for rounding.
    } while (mass_from(0) < goal && weight > row_->min_p && weight > others / (double)n_ / 2);
    return least(goal);
  }

  // Logits [i, i + W); -inf follows the last.
  F logits(int64_t i) const {
    if (i + W <= n_) return load(row_->logits + i);
    F v = splat(-__builtin_inff());
    memcpy(&v, row_->logits + i, (n_ - i) * sizeof(float));
    return v;
  }
  F weigh(F v) const { return exp2((v - splat((float)row_->peak)) * splat(factor_)); }
  // Gathered weights [i, i + W), those under `floor` as 0.
  F kept(int64_t i, float floor) const {
    const F w = load(&values_[i]);
    return w >= splat(floor) ? w : F{};
  }

  // All tokens in their order whose logit is no less than `bound`, with these.
  void gather(float bound) {
    count_ = 0;
    for (int64_t i = 0; i < n_; i += W)
      for (uint32_t lanes = bits(logits(i) >= splat(bound)); lanes; lanes &= lanes - 1) {
        const int64_t token = i + __builtin_ctz(lanes);
        tokens_[count_] = (int32_t)token, values_[count_++] = row_->logits[token];
      }
    std::fill_n(&values_[count_], W, -__builtin_inff());
  }
  void weigh_gathered() {
    for (int64_t i = 0; i < count_; i += W)
      store(&values_[i], weigh(load(&values_[i])));
  }
  // All tokens whose weight is no less than `weight`, and some just below, with their weights.
  void gather_from(double weight) {
    const double bound = row_->peak + (std::log(weight) - 1e-3) / row_->factor;
    gather((float)std::max(bound, (double)kLowest));
    weigh_gathered();
  }

  // The k-th largest logit; the least finite number when there are not so many. The k-th largest of
  // the groups' highest is no more, and few logits lie between.
  float kth(int64_t k) {
    float bound = kLowest;
    if (k <= kGroups) {
      std::fill_n(spare_.begin(), kGroups, kLowest);
      for (int64_t i = 0; i < n_; i += kGroups)
        for (int64_t g = 0; g < std::min(kGroups, n_ - i); g++)
          spare_[g] = row_->logits[i + g] > spare_[g] ? row_->logits[i + g] : spare_[g];
      bound = nth(kGroups, k);
    }
    gather(bound);
    if (count_ < k) return kLowest;
    std::copy_n(values_.begin(), count_, spare_.begin());
    return nth(count_, k);
  }
  // The k-th largest of the first n spare numbers.
  float nth(int64_t n, int64_t k) {
    const auto at = spare_.begin() + (k - 1);
    std::nth_element(spare_.begin(), at, spare_.begin() + n, std::greater<float>());
    return *at;
  }

  // The largest weight such that those that are no less have a mass of `goal`.
  double least(double goal) {
    int32_t low = 0, high = 0x3f800001;  // the bits of 0, and those after 1
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      (mass_from(as_float(middle)) >= goal ? low : high) = middle;
    }
    return as_float(low);
  }
  static float as_float(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }
  double mass_from(float floor) {
    return add_up(count_, [this, floor](int64_t i) { return kept(i, floor); });
  }

  // The sum of n weights; `sums_` has it block by block.
  template <class Weights>
  double add_up(int64_t n, const Weights& weights) {
    double whole = 0;
    for (int64_t from = 0; from < n; from += kBlock) {
      F block = {};
      for (int64_t i = from; i < std::min(from + kBlock, n); i += W)
        block = block + weights(i);
      sums_[from / kBlock] = whole += sum(block);
    }
    return whole;
  }
  // Where the running sum of n weights passes `share` of the whole. What is there has some weight.
  template <class Weights>
  int64_t place(int64_t n, const Weights& weights) {
    const double whole = add_up(n, weights), goal = row_->share * whole;
    const auto begin = sums_.begin(), end = begin + (n + kBlock - 1) / kBlock;
    auto block = std::upper_bound(begin, end, goal);
    if (block == end) block = std::lower_bound(begin, end, whole);
    double passed = block == begin ? 0 : block[-1];
    int64_t found = 0;
    for (int64_t i = (block - begin) * kBlock; i < n; i += W) {
      const F w = weights(i);
      for (int64_t lane = 0; lane < W; lane++)
        if (w[lane] > 0) {
          found = i + lane;
          if ((passed += w[lane]) > goal) return found;
        }
    }
    return found;
  }

  const int64_t n_;
  const Draw* row_ = nullptr;
  float factor_ = 0;
  std::vector<double> sums_;
  std::vector<float> values_, spare_;  // values_: gathered logits, then their weights
  std::vector<int32_t> tokens_;        // gathered, in their order
  int64_t count_ = 0;
};

}  // namespace loraplex
