// The products of a step: base panels, the rows' adapters, biases.
#pragma once
#include "frame.h"

namespace loraplex {

constexpr int64_t kMaxRanges = 64;
constexpr int64_t kPassRows = 64;  // rows that a thread takes through its panels at once

// One projection's base matrices, and where its panels are.
struct Weights {
  const Matrix* matrix[3];
  int64_t n[3];
  int count;
  int64_t k;
};

class Products {
 public:
  explicit Products(Frame& frame) : f(frame), e(frame.e), m(frame.m), b(frame.b) {
    read = m.activations == kActBf16 ? Read::bf16_rows
           : m.kind == kQuant8       ? Read::quant
                                     : read_of(m.kind);
  }

  void enter_layer(int64_t l) { lora = {b.segment, b.segments, l, kLoraQkv, e.h.row(0)}; }

  // Rows of fp32 as the base's products want them.
  Rows operand(const Buffer& from) const {
    if (m.activations == kActFp32) return {from.row(0), nullptr, from.ld};
    return {e.rounded.as<void>(), m.kind == kQuant8 ? e.scale.as<float>() : nullptr, e.width};
  }
  void round_row(const float* x, int64_t k, int64_t r) {
    if (m.activations == kActFp32) return;
    int16_t* to = e.rounded.as<int16_t>() + r * e.width;
    if (m.activations == kActBf16)
      to_bf16(x, k, (bf16*)to);
    else
      e.scale.as<float>()[r] = quantise(x, k, m.activations == kActInt16 ? 32767.f : 127.f, to);
  }

  // What a projection needs before its panels: its rows rounded, where no norm did it, and the
  // adapters' shrink.
  void enter(LoraPart part, const Buffer& from, int64_t k, bool rounded) {
    const bool round = !rounded && m.activations != kActFp32;
    if (round)
      for (int64_t r = f.begin(b.rows); r < f.end(b.rows); r++)
        round_row(from.row(r), k, r);
    lora.part = part;
    if (b.segments) shrink(lora, from.row(0), from.ld, k, f.t, f.threads);
    if (round || b.segments) f.meet();
    f.lap(kShrink);
  }

  void qkv(const Layer& layer) {
    enter(kLoraQkv, e.xn, m.hidden, true);
    const int64_t q = m.heads * m.head_dim, kv = m.kv_heads * m.head_dim,
                  column[3] = {0, q, q + kv};
    project({{&layer.q, &layer.k, &layer.v}, {q, kv, kv}, 3, m.hidden}, e.xn,
            first_of(layer.o, m.hidden, q),
            [&](int s, Panel at, int64_t r0, int64_t r1, const float* c) {
              for (int64_t r = r0; r < r1; r++)
                for (int64_t j = 0; j < at.count; j++)
                  store(e.qkv.row(r) + column[s] + (at.first + j) * W,
                        load(c + (r - r0) * PN + j * W));
            });
  }

  // x += a projection of one slice.
  void residual(const Matrix& w, LoraPart part, int64_t k, const Buffer& from, Range then) {
    enter(part, from, k, false);
    project({{&w}, {m.hidden}, 1, k}, from, then,
            [&](int, Panel at, int64_t r0, int64_t r1, const float* c) {
              for (int64_t r = r0; r < r1; r++)
                for (int64_t j = 0; j < at.count; j++) {
                  float* to = e.x.row(r) + (at.first + j) * W;
                  store(to, load(to) + load(c + (r - r0) * PN + j * W));
                }
            });
  }

  // active = silu(gate) * up. Both panels of the same outputs are taken together, so that the
  // product is an epilogue.
  void gate_up(const Layer& layer) {
    enter(kLoraGateUp, e.xn, m.hidden, true);
    const Rows rows = operand(e.xn);
    const Cut cut(m.inner);
    for (int64_t r0 = 0; r0 < b.rows; r0 += kPassRows) {
      const int64_t r1 = std::min(r0 + kPassRows, b.rows);
      for (int64_t p = f.begin(cut.panels); p < f.end(cut.panels); p++) {
        const Panel at = cut.panel(p);
        const Range up = panel_range(layer.up, at, m.hidden);
        const Range next = p + 1 < f.end(cut.panels)
                               ? panel_range(layer.gate, cut.panel(p + 1), m.hidden)
                               : first_of(layer.down, m.hidden, m.inner);
        panel_rows(layer.gate, 0, m.inner, m.hidden, at, rows, r0, r1, up, tile_[0]);
        panel_rows(layer.up, 1, m.inner, m.hidden, at, rows, r0, r1, next, tile_[1]);
        activate(at, r0, r1);
      }
    }
    f.meet();
  }

  // The panel that this thread takes first of one matrix.
  Range first_of(const Matrix& w, int64_t n, int64_t k) const {
    const Cut cut(n);
    return panel_range(w, cut.panel(std::min(f.begin(cut.panels), cut.panels - 1)), k);
  }
  Range panel_range(const Matrix& w, Panel at, int64_t k) const {
    const char* from = at.in(w.panels, m.kind, k);
    return {from, from + at.count * vector_bytes(m.kind, k)};
  }

  // One panel of a base matrix by rows [from, to).
  void panel_base(const Matrix& w, int64_t k, Panel at, Rows rows, int64_t from, int64_t to,
                  float* c, Prefetch& ahead) {
    rows.x = (const char*)rows.x + from * rows.ld * x_bytes(read);
    if (rows.scale) rows.scale += from;
    product(read, rows, to - from, at.in(w.panels, m.kind, k), at.count, k, c, PN, false, ahead);
  }
  static void add_bias(const float* bias, int64_t n, Panel at, int64_t rows, float* c) {
    for (int64_t j = 0; j < at.count; j++) {
      const F v = load_of(bias, (at.first + j) * W, n);
      for (int64_t r = 0; r < rows; r++)
        store(c + r * PN + j * W, load(c + r * PN + j * W) + v);
    }
  }
  // Spreads what is read next over the product of one panel by so many rows.
  static Prefetch during(int64_t k, int64_t rows, Range next) {
    return {next, k / kTurn * tiles_of(rows)};
  }

 private:
  // The same with the rows' adapters.
  void panel_rows(const Matrix& w, int slice, int64_t n, int64_t k, Panel at, const Rows& rows,
                  int64_t from, int64_t to, Range then, float* c) {
    Range range[kMaxRanges];
    const int64_t count = b_ranges(lora, slice, at, from, to, range, kMaxRanges);
    Prefetch ahead = during(k, to - from, then);
    ahead.scatter(range, range + count, ceil_div(k, kPart) * tiles_of(to - from));
    panel_base(w, k, at, rows, from, to, c, ahead);
    expand(lora, slice, n, at, from, to, c);
    if (w.bias) add_bias(w.bias, n, at, to - from, c);
  }

  // This thread's share of a projection. done(slice, panel, from, to, tile) takes each finished
  // tile; `then` is what it reads next.
  template <class Done>
  void project(const Weights& w, const Buffer& from, Range then, Done done) {
    const Rows rows = operand(from);
    int64_t total = 0;
    for (int s = 0; s < w.count; s++)
      total += Cut(w.n[s]).panels;
    const int64_t first = f.begin(total), last = f.end(total);
    for (int64_t r = 0; r < b.rows; r += kPassRows) {
      const int64_t to = std::min(r + kPassRows, b.rows);
      int64_t before = 0;
      for (int s = 0; s < w.count; s++) {
        const Cut cut(w.n[s]);
        const int64_t begin = std::max<int64_t>(first - before, 0),
                      end = std::min(last - before, cut.panels);
        for (int64_t p = begin; p < end; p++) {
          const Panel at = cut.panel(p);
          Range next = then;
          if (p + 1 < end)
            next = panel_range(*w.matrix[s], cut.panel(p + 1), w.k);
          else if (before + cut.panels < last)
            next = panel_range(*w.matrix[s + 1], Cut(w.n[s + 1]).panel(0), w.k);
          panel_rows(*w.matrix[s], s, w.n[s], w.k, at, rows, r, to, next, tile_[0]);
          done(s, at, r, to, tile_[0]);
        }
        before += cut.panels;
      }
    }
    f.meet();
  }

  void activate(Panel at, int64_t r0, int64_t r1) {
    for (int64_t r = 0; r < r1 - r0; r++)
      for (int64_t j = 0; j < at.count; j++)
        store(e.active.row(r0 + r) + (at.first + j) * W,
              silu_mul(load(tile_[0] + r * PN + j * W), load(tile_[1] + r * PN + j * W)));
  }

  Frame& f;
  Engine& e;
  const Model& m;
  const Batch& b;
  Read read;
  Lora lora{};
  alignas(64) float tile_[2][kPassRows * PN];
};

}  // namespace loraplex
