// The head: logits of the wanted rows, and each row's likeliest token.
#pragma once
#include "products.h"

namespace loraplex {

// Of some rows, lane by lane: the highest logit so far, its token, and NaN once a logit was not
// finite.
struct Best {
  F value[kPassRows];
  I token[kPassRows];
  F fault[kPassRows];
};

class Head {
 public:
  Head(Frame& frame, Products& products)
      : f(frame),
        e(frame.e),
        m(frame.m),
        b(frame.b),
        products(products),
        aligned(m.vocab % W == 0 && (uintptr_t)b.logits % sizeof(F) == 0) {}

  void run() {
    for (int64_t i = f.begin(b.wanted); i < f.end(b.wanted); i++) {
      rms_norm(e.x.row(i), m.norm, m.hidden, m.norm_eps, e.xn.at(i));
      products.round_row(e.xn, m.hidden, i);
    }
    f.meet();
    f.lap(kNorm);
    for (int64_t from = 0; from < b.wanted; from += kPassRows)
      score(from, std::min(from + kPassRows, b.wanted));
    f.meet();
    if (f.t == 0)
      for (int64_t i = 0; i < b.wanted; i++)
        choose(i);
    f.lap(kHead);
  }
  // Logits of some wanted rows, at most kPassRows, and this thread's best of each.
  void score(int64_t from, int64_t to) {
    const Rows rows = products.operand(e.xn, m.hidden).from(from, x_bytes(products.read));
    const Cut cut(m.vocab);
    Best best;
    for (int64_t r = 0; r < to - from; r++)
      best.value[r] = splat(-__builtin_inff()), best.token[r] = I{}, best.fault[r] = F{};
    products.each_panel(cut.panels, to - from, [&](int64_t p, int64_t next, int64_t, int64_t) {
      const Panel at = cut.panel(p);
      const Range then =
          next < 0 ? Range{} : products.panel_range(m.head, cut.panel(next), m.hidden);
      Range near[1];
      Prefetch ahead = products.during(
          m.hidden, to - from, products.panel_range(m.head, at, m.hidden), then, near, near + 1);
      products.panel_base(m.head, m.hidden, at, rows, to - from, {tile_, PN}, false, ahead);
      if (m.head.bias) Products::add_bias(m.head.bias, m.vocab, at, to - from, {tile_, PN});
      for (int64_t r = 0; r < to - from; r++)
        for (int64_t j = 0; j < at.count; j++)
          take(best, r, (at.first + j) * W, load(tile_ + r * PN + j * W), from + r);
    });
    end_streams();
    for (int64_t r = 0; r < to - from; r++)
      settle(best, r, from + r);
  }
  void take(Best& best, int64_t r, int64_t token, F v, int64_t row) const {
    if (m.logit_softcap != 0) v = soften(v, (float)m.logit_softcap);
    const int64_t real = m.vocab - token;
    best.fault[r] = best.fault[r] + v * F{};
    if (b.logits) {
      float* to = b.logits + row * m.vocab + token;
      if (aligned)
        stream(to, v);
      else if (real >= W)
        store(to, v);
      else
        for (int64_t i = 0; i < real; i++)
          to[i] = v[i];
    }
    if (!bits(v >= best.value[r])) return;
    const I id = splat((int32_t)token) + lane_numbers();
    I higher = (v > best.value[r]) | ((v == best.value[r]) & (id < best.token[r]));
    if (real < W) higher &= id < splat((int32_t)m.vocab);
    best.value[r] = higher ? v : best.value[r];
    best.token[r] = higher ? id : best.token[r];
  }
  void settle(const Best& best, int64_t r, int64_t row) const {
    int k = 0;
    for (int i = 1; i < W; i++)
      if (best.value[r][i] > best.value[r][k] ||
          (best.value[r][i] == best.value[r][k] && best.token[r][i] < best.token[r][k]))
        k = i;
    e.best[f.t * b.wanted + row] = best.value[r][k] + sum(best.fault[r]);
    e.best_token[f.t * b.wanted + row] = best.token[r][k];
  }
  void choose(int64_t row) const {
    float peak = e.best[row];
    int32_t token = e.best_token[row];
    for (int i = 1; i < f.threads; i++) {
      const float v = e.best[i * b.wanted + row];
      const int32_t other = e.best_token[i * b.wanted + row];
      if (peak != peak) break;
      if (v > peak || v != v || (v == peak && other < token)) peak = v, token = other;
    }
    b.likeliest[row] = token;
    b.peak[row] = peak;
  }

  Frame& f;
  Engine& e;
  const Model& m;
  const Batch& b;
  Products& products;
  const bool aligned;  // all vectors of all rows of logits
  alignas(64) float tile_[kPassRows * PN];
};

}  // namespace loraplex
