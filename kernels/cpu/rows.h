// What the step does to one row between products. Rows are fp32; their columns up to a whole vector
// exist, and hold zeroes.
#pragma once
#include <cmath>

#include "panels.h"

namespace loraplex {

// Semantics: OUT[i] = X[i] / sqrt(mean_i X[i]^2 + eps) * WEIGHT[i].
inline void rms_norm(const float* x, const float* weight, int64_t n, double eps, float* out) {
  F squares = {};
  for (int64_t i = 0; i < n; i += W) {
    F v = load_of(x, i, n);
    squares = fma(v, v, squares);
  }
  const F factor = splat(1.f / sqrtf(sum(squares) / (float)n + (float)eps));
  for (int64_t i = 0; i < n; i += W) {
    F v = load_of(x, i, n) * factor * load_of(weight, i, n);
    if (i + W <= n)
      store(out + i, v);
    else
      for (int64_t j = i; j < n; j++)
        out[j] = v[j - i];
  }
}

// Semantics: silu(G) * U with silu(g) = g / (1 + exp(-g)).
LPX_INLINE F silu_mul(F gate, F up) {
  const F zero = {}, one = splat(1.f);
  F size = gate < zero ? -gate : gate;
  F e = exp2(size * splat(-kLog2E));  // exp(-|g|)
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

// To int16 with one scale, which is returned: `top` is the largest value, 32767 or 127. Pads to a
// whole pair. A row that is not finite gets the scale NaN, so that it does not pass for a sound
// one.
inline float quantise(const float* x, int64_t n, float top, int16_t* q) {
  F most = {}, fault = {};
  for (int64_t i = 0; i < n; i += W) {
    F v = load_of(x, i, n);
    most = max(most, v < F{} ? -v : v);
    fault = fault + v * F{};
  }
  const float m = highest(most) + sum(fault), inverse = m > 0 ? top / m : 0;
  for (int64_t i = 0; i < n; i++)
    q[i] = (int16_t)__builtin_rintf(x[i] * inverse);
  if (n % 2) q[n] = 0;
  return m / top;
}

inline void to_bf16(const float* x, int64_t n, bf16* out) {
  for (int64_t i = 0; i < n; i++)
    out[i] = round_bf16(x[i]);
  if (n % 2) out[n] = 0;
}

}  // namespace loraplex
