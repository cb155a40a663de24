// The products of a step: base panels, the rows' adapters, biases.
#pragma once
#include "expect.h"

namespace loraplex {

constexpr int64_t kPassRows = 128;  // rows that a thread takes through its panels at once, at most
constexpr int64_t kOwnPass = 128;   // rows for each thread, so that each has rows of its own
constexpr int64_t kNear = 4 << 10;  // bytes by which a single tile's weights come before it
constexpr int64_t kBusyTiles = 3;   // of a panel, that leave the memory time for something else

// One projection's base matrices.
struct Weights {
  const Matrix* matrix[3];
  int64_t n[3];
  int count;
  int64_t k;

  int64_t panels() const {
    int64_t total = 0;
    for (int s = 0; s < count; s++)
      total += Cut(n[s]).panels;
    return total;
  }
  // Panel p of them all: its slice, and itself.
  std::pair<int, Panel> panel(int64_t p) const {
    for (int s = 0;; s++) {
      const Cut cut(n[s]);
      if (p < cut.panels) return {s, cut.panel(p)};
      p -= cut.panels;
    }
  }
};

class Products {
 public:
  Read read;  // of base matrices

  explicit Products(Frame& frame)
      : f(frame),
        e(frame.e),
        m(frame.m),
        b(frame.b),
        lora{nullptr, 0, 0, kLoraQkv, m.activations == kActBf16, nullptr} {
    read = m.kind == kQuant8    ? Read::quant8
           : m.kind == kFixed16 ? Read::fixed16
           : m.kind == kOffset8 ? Read::offset8
                                : read_of(m.kind, m.activations == kActBf16);
    most = m.activations == kActInt8 ? 127 : m.kind == kFixed16 ? kMostFixed : kMostInt16;
  }

  void enter_layer(int64_t l) {
    lora.layer = l;
    ahead_.clear();
  }

  // Rows as the base's products want them.
  Rows operand(const Operand& from, int64_t k) const {
    if (!in_groups(read)) return from.rows();
    const int bytes = x_bytes(read);
    return {e.rounded.as<void>(), row_bytes(k * bytes) / bytes, e.scale.as<float>(),
            e.start.as<int32_t>(), e.groups};
  }
  void round_row(const Operand& from, int64_t k, int64_t r) {
    if (!in_groups(read)) return;
    char* to = e.rounded.as<char>() + r * row_bytes(k * x_bytes(read));
    float* scale = e.scale.as<float>() + r * e.groups;
    if (read == Read::offset8)
      quantise(from.row(r), k, (int8_t*)to, scale, e.start.as<int32_t>() + r * e.groups);
    else
      quantise(from.row(r), k, most, (int16_t*)to, scale);
  }

  // Inputs of a part's products.
  int64_t inputs(LoraPart part) const {
    return part == kLoraO ? m.heads * m.head_dim : part == kLoraDown ? m.inner : m.hidden;
  }

  // What a projection of so many panels needs before them: its rows rounded, where no norm did it,
  // and the adapters' shrink. A single unit of that is done by every thread for itself: others
  // would only wait for it.
  void enter(LoraPart part, const Operand& from, bool rounded, int64_t panels) {
    const int64_t k = inputs(part);
    const bool round = !rounded && in_groups(read);
    if (round)
      for (int64_t r = f.begin(f.going->rows); r < f.end(f.going->rows); r++)
        round_row(from, k, r);
    lora.part = part;
    lora.segment = f.going->segments.data(), lora.segments = (int64_t)f.going->segments.size();
    const int64_t units = lora.units();
    const bool alone = units == 1 && lora.segments == 1;
    lora.keep(e.h.row(alone ? e.max_rows + f.t * kSegmentRows : 0),
              alone ? lora.segment->start : 0);
    Shrink(lora, from.rows(), k).run(alone ? 0 : f.t, alone ? 1 : f.threads);
    if (round || (units && !alone)) f.meet();
    addends_.renew(lora, part == kLoraQkv ? 3 : part == kLoraGateUp ? 2 : 1);
    expect(panels);
    f.lap(kShrink);
  }

  // Has what this thread reads next prefetched during the products of so many panels, if these are
  // bound by what they compute: what its next shrink reads, and the next layer's keys and values.
  void expect(int64_t panels) {
    if (tiles_of(f.going->rows, best_rows(read)) < kBusyTiles) return;
    Lora next = lora;
    next.part = lora.part == kLoraDown ? kLoraQkv : LoraPart(lora.part + 1);
    next.layer += next.part == kLoraQkv;
    if (next.layer < m.layers) expect_shrink(next, inputs(next.part), f.t, f.threads, ahead_);
    int64_t lines = ahead_.lines();
    if (lora.part == kLoraGateUp && lora.layer + 1 < m.layers) {
      expect_attention(f, lora.layer + 1, ahead_);
      lines += (ahead_.lines() - lines) * 2 / 3;  // the rest during `down`
    }
    ahead_lines_ = ceil_div(lines * f.threads, panels);
  }

  void qkv(const Layer& layer) {
    const int64_t q = m.heads * m.head_dim, kv = m.kv_heads * m.head_dim,
                  column[3] = {0, q, q + kv};
    const Weights w{{&layer.q, &layer.k, &layer.v}, {q, kv, kv}, 3, m.hidden};
    enter(kLoraQkv, e.xn, true, w.panels());
    project(
        w, e.xn, first_of(layer.o, m.hidden, q), false,
        [&](int s, Panel at, int64_t r0, int64_t) {
          return Place{e.qkv.row(r0) + column[s] + at.output(), e.qkv.ld};
        },
        [](Panel, int64_t, int64_t) {});
  }

  // x += a projection of one slice. Its sums go on from x, but for rows that are set aside.
  void residual(const Matrix& matrix, LoraPart part, const Operand& from, Range then) {
    const Weights w{{&matrix}, {m.hidden}, 1, inputs(part)};
    enter(part, from, false, w.panels());
    project(
        w, from, then, true,
        [&](int, Panel at, int64_t r0, int64_t r1) {
          set_aside(at, r0, r1, [](float* x, float* kept) { store(kept, load(x)), store(x, F{}); });
          return Place{e.x.row(r0) + at.output(), e.x.ld};
        },
        [&](Panel at, int64_t r0, int64_t r1) {
          set_aside(at, r0, r1, [](float* x, float* kept) { store(x, load(kept) + load(x)); });
        });
  }

  // active = silu(gate) * up. Both panels of the same outputs are taken together, so that the
  // product is an epilogue.
  void gate_up(const Layer& layer) {
    const Rows rows = operand(e.xn, m.hidden);
    const Cut cut(m.inner);
    enter(kLoraGateUp, e.xn, true, 2 * cut.panels);
    each_panel(cut.panels, f.going->rows, [&](int64_t p, int64_t next, int64_t r0, int64_t r1) {
      const Panel at = cut.panel(p);
      const Range up = panel_range(layer.up, at, m.hidden);
      const Range then = next < 0 ? first_of(layer.down, m.hidden, m.inner)
                                  : panel_range(layer.gate, cut.panel(next), m.hidden);
      panel_rows(layer.gate, 0, m.inner, m.hidden, at, rows, r0, r1, up, tile(0), false);
      panel_rows(layer.up, 1, m.inner, m.hidden, at, rows, r0, r1, then, tile(1), false);
      activate(at, r0, r1);
    });
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

  Range range_of(const Weights& w, std::pair<int, Panel> panel) const {
    return panel_range(*w.matrix[panel.first], panel.second, w.k);
  }

  // One panel of a base matrix by some rows; C is added to, or else written.
  void panel_base(const Matrix& w, int64_t k, Panel at, const Rows& rows, int64_t count, Place c,
                  bool add, Prefetch& ahead) {
    product(read, rows, count, at.in(w.panels, m.kind, k), at.count, k, c, add, ahead);
  }
  static void add_bias(const float* bias, int64_t n, Panel at, int64_t rows, Place c) {
    for (int64_t j = 0; j < at.count; j++) {
      const F v = load_of(bias, (at.first + j) * W, n);
      for (int64_t r = 0; r < rows; r++)
        store(c.row(r) + j * W, load(c.row(r) + j * W) + v);
    }
  }
  // Spreads over the product of the panel `now` by so many rows what is read behind it: the ranges
  // [first + 1, stop), and `next`. A single tile waits for memory: what is near to where it reads
  // comes faster than all of the next panel, so of that only the beginning comes, and before it, at
  // *first, the rest of this one. Tiles of groups would lose more by a range more.
  Prefetch during(int64_t k, int64_t rows, Range now, Range next, Range* first, Range* stop) const {
    const bool near = !in_groups(read) && rows <= best_rows(read) && now.end - now.at > kNear;
    if (near) {
      *first = {now.at + kNear, now.end};
      next.end = std::min(next.end, next.at + kNear);
    }
    Prefetch ahead{next, turns_of(k, rows)};
    ahead.before(near ? first : first + 1, stop, turns_of(k, rows));
    return ahead;
  }
  // Bytes of B to prefetch during a product by so many rows. Where that waits for memory, more of
  // them would come later than those that the processor sees coming.
  int64_t most_of_b(int64_t rows) const {
    const int64_t tiles = tiles_of(rows, best_rows(read));
    return tiles < kBusyTiles ? kAheadB * tiles : INT64_MAX;
  }
  int64_t turns_of(int64_t k, int64_t rows) const {
    return k / kTurn * tiles_of(rows, best_rows(read));
  }

  // All panels by so many rows, kPassRows at a time, shared among the threads: take(panel, the one
  // that this thread is likely to take then or -1, rows). Threads have rows of their own where
  // there are enough, as in a norm, or else panels.
  template <class Take>
  void each_panel(int64_t panels, int64_t rows, Take take) {
    Shares& shares = e.shares[turn_];
    turn_ = !turn_;
    e.shares[turn_].renew(f.t);  // for the next product: nobody takes from it before the barrier
    const bool by_rows = rows >= kOwnPass * f.threads;
    const int64_t own = round_up(ceil_div(rows, f.threads), kTileRows),
                  pass = std::min(kPassRows, by_rows ? own : rows), passes = ceil_div(rows, pass);
    const int64_t things = by_rows ? passes : panels, each = by_rows ? panels : passes;
    const auto first = [&](int owner) { return f.share(things, owner); };
    const auto width = [&](int owner) { return first(owner + 1) - first(owner); };
    const auto panel = [&](int owner, int64_t at) {
      return by_rows ? at % panels : first(owner) + at % width(owner);
    };
    shares.walk(
        f.t, f.threads, [&](int owner) { return width(owner) * each; },
        [&](int owner, int64_t at, int64_t next) {
          const int64_t row = (by_rows ? first(owner) + at / panels : at / width(owner)) * pass;
          take(panel(owner, at), next < 0 ? -1 : panel(owner, next), row,
               std::min(row + pass, rows));
        });
    f.meet();
  }

 private:
  // The same with the rows' adapters.
  void panel_rows(const Matrix& w, int slice, int64_t n, int64_t k, Panel at, const Rows& rows,
                  int64_t from, int64_t to, Range then, Place c, bool add) {
    Range range[1 + 2 * kMaxRanges], *stop = range + 1;
    stop += addends_.ranges(slice, at, from, to, most_of_b(to - from), stop);
    stop += ahead_.take(ahead_lines_, stop, kMaxRanges);
    Prefetch ahead = during(k, to - from, panel_range(w, at, k), then, range, stop);
    panel_base(w, k, at, rows.from(from, x_bytes(read)), to - from, c, add, ahead);
    expand(lora, addends_.of(slice), n, at, from, to, c);
    if (w.bias) add_bias(w.bias, n, at, to - from, c);
  }

  // A projection: place(slice, panel, from, to) is where its outputs go, which are added to or else
  // written, for done(panel, from, to); `then` is what this thread reads next.
  template <class At, class Done>
  void project(const Weights& w, const Operand& from, Range then, bool add, At place, Done done) {
    const Rows rows = operand(from, w.k);
    each_panel(w.panels(), f.going->rows, [&](int64_t p, int64_t next, int64_t r0, int64_t r1) {
      const auto [s, at] = w.panel(p);
      const Range range = next < 0 ? then : range_of(w, w.panel(next));
      panel_rows(*w.matrix[s], s, w.n[s], w.k, at, rows, r0, r1, range, place(s, at, r0, r1), add);
      done(at, r0, r1);
    });
  }

  // Calls take(place in x, place in a tile) for all vectors of a panel's rows that a projection
  // must not be added to as it is summed: where that would cost digits, and where an adapter's gain
  // is for the projection alone.
  template <class Take>
  void set_aside(Panel at, int64_t r0, int64_t r1, Take take) {
    const auto rows = [&](int64_t from, int64_t to) {
      for (int64_t r = from; r < to; r++)
        for (int64_t j = 0; j < at.count; j++)
          take(e.x.row(r) + at.output() + j * W, tile(0).row(r - r0) + j * W);
    };
    sums_lose_little(read) ? addends_.each_gained(0, r0, r1, rows) : rows(r0, r1);
  }

  void activate(Panel at, int64_t r0, int64_t r1) {
    for (int64_t r = 0; r < r1 - r0; r++)
      for (int64_t j = 0; j < at.count; j++)
        e.active.put(r0 + r, (at.first + j) * W,
                     silu_mul(load(tile(0).row(r) + j * W), load(tile(1).row(r) + j * W)));
  }

  Place tile(int i) { return {tile_[i], PN}; }

  Frame& f;
  Engine& e;
  const Model& m;
  const Batch& b;
  float most;          // that a row is rounded to, where it is to int16
  bool turn_ = false;  // which of the engine's shares is this product's
  Lora lora;
  Addends addends_;
  Backlog ahead_;            // what is read after the products
  int64_t ahead_lines_ = 0;  // of it, during each
  alignas(64) float tile_[2][kPassRows * PN];
};

}  // namespace loraplex
