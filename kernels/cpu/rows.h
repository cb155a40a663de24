// What the step does to one row between products. Rows are fp32; their columns up to a whole vector
// exist, and hold zeroes.
#pragma once
#include <algorithm>
#include <cmath>

#include "panels.h"

namespace loraplex {

// Semantics: OUT[i] = X[i] / sqrt(mean_i X[i]^2 + eps) * WEIGHT[i]; `put(i, v)` takes it, a vector
// at a time.
template <class Put>
inline void rms_norm(const float* x, const float* weight, int64_t n, double eps, Put put) {
  constexpr int sums = 4;  // one would wait for itself
  F squares[sums] = {};
  int64_t at = 0;
  for (; at + sums * W <= n; at += sums * W)
#pragma GCC unroll 4
    for (int j = 0; j < sums; j++) {
      const F v = load(x + at + j * W);
      squares[j] = fma(v, v, squares[j]);
    }
  for (; at < n; at += W) {
    const F v = load_of(x, at, n);
    squares[0] = fma(v, v, squares[0]);
  }
  const F all = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  const F factor = splat(1.f / sqrtf(sum(all) / (float)n + (float)eps));
  for (int64_t i = 0; i < n; i += W)
    put(i, load_of(x, i, n) * factor * load_of(weight, i, n));
}

// Semantics: silu(G) * U with silu(g) = g / (1 + exp(-g)).
LPX_INLINE F silu_mul(F gate, F up) {
  const F zero = {}, one = splat(1.f);
  F e = exp2(abs(gate) * splat(-kLog2E));  // exp(-|g|)
  return gate * (gate < zero ? e : one) / (one + e) * up;
}

// Semantics: cap * tanh(X / cap).
LPX_INLINE F soften(F x, float cap) {
  const F zero = {}, one = splat(1.f);
  F size = x < zero ? -x : x;
  F e = exp2(size *
             splat(-2 * kLog2E / cap));  // tanh(y) = (1 - exp(-2 y)) / (1 + exp(-2 y)) for y >= 0
  F t = splat(cap) * (one - e) / (one + e);
  return x != x ? x : x < zero ? -t : t;
}

// Rotates the leading `dim` columns of a head (halves as pairs: Su et al., 2021); `turn` holds
// their cosines, then sines.
inline void rotate(float* x, const float* turn, int64_t dim) {
  const int64_t half = dim / 2;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const F a = load(x + i), b = load(x + half + i), c = load(turn + i), s = load(turn + half + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i], c = turn[i], s = turn[half + i];
    x[i] = a * c - b * s;
    x[half + i] = b * c + a * s;
  }
}

// The largest of some numbers, NaN where one is not finite.
inline float largest(const float* x, int64_t n) {
  F top = {}, fault = {};
  for (int64_t i = 0; i < n; i += W) {
    const F v = load_of(x, i, n);
    top = max(top, abs(v));
    fault = fault + v * F{};
  }
  return highest(top) + sum(fault);
}
// What a group with this largest number is multiplied by to be at most `most`.
inline F steps(float top, float most) {
  return splat(top > 0x1p-100f ? most / top : 0);  // NaN > ... is false
}

// To int16 with a scale for each kGroup values, at most `most` and padded to a whole pair. A group
// that is not finite gets the scale NaN, so that it does not pass for a sound one.
inline void quantise(const float* x, int64_t n, float most, int16_t* q, float* scale) {
  for (int64_t from = 0; from < n; from += kGroup, x += kGroup, q += kGroup) {
    const int64_t size = std::min(n - from, kGroup);
    const float top = largest(x, size);
    *scale++ = top / most;
    const F factor = steps(top, most);
    int64_t i = 0;
    for (; i + 2 * W <= size; i += 2 * W)
      store_int16(q + i, load(x + i) * factor, load(x + i + W) * factor);
    for (; i < size; i++)
      q[i] = (int16_t)__builtin_rintf(x[i] * factor[0]);
    if (size % 2) q[size] = 0;
  }
}
// To int8, padded to a whole group. `start` is what a group's sum begins with, so that it comes to
// what it would be without the 128 by which weights of kOffset8 are too large.
inline void quantise(const float* x, int64_t n, int8_t* q, float* scale, int32_t* start) {
  for (int64_t from = 0; from < n; from += kGroup, x += kGroup, q += kGroup) {
    const int64_t size = std::min(n - from, kGroup);
    const float top = largest(x, size);
    *scale++ = top / 127;
    const F factor = steps(top, 127);
    I total = {};
    for (int64_t i = 0; i < kGroup; i += W)
      total += store_int8(q + i, i < size ? load_of(x, i, size) * factor : F{});
    int32_t sum = 0;
    for (int i = 0; i < W; i++)
      sum += total[i];
    *start++ = -128 * sum;
  }
}

}  // namespace loraplex
