// Writes panels (panels.h) from plain matrices.
#pragma once
#include <cmath>

#include "panels.h"

namespace loraplex {

// A matrix [n, k] as it comes: element (i, j) stands at source[i * stride_n + j * stride_k].
template <class T>
struct Plain {
  const T* source;
  int64_t n, k, stride_n, stride_k;
  T at(int64_t i, int64_t j) const {
    return i < n && j < k ? source[i * stride_n + j * stride_k] : T{};
  }
};

// [k / step][outputs][step], for the outputs of one panel.
template <class T>
inline void pack_panel(const Plain<T>& w, int64_t first, int64_t outputs, int step, T* to) {
  for (int64_t k = 0; k < w.k; k += step)
    for (int64_t j = 0; j < outputs; j++)
      for (int u = 0; u < step; u++)
        *to++ = w.at(first + j, k + u);
}

// So many inputs of an output side by side, padded with zeroes; `zero` is added to each code.
inline void pack_quantised(const Plain<bf16>& w, int64_t first, int64_t outputs, int64_t side,
                           int zero, char* to) {
  float* scale = (float*)to;
  int8_t* q = (int8_t*)(scale + outputs);
  for (int64_t j = 0; j < outputs; j++) {
    float top = 0;
    for (int64_t k = 0; k < w.k; k++) {
      const float v = __builtin_fabsf(widen(w.at(first + j, k)));
      top = v > top ? v : top;
    }
    scale[j] = top / 127;
    const float inverse = top > 0 ? 127 / top : 0;
    for (int64_t k = 0; k < round_up(w.k, side); k++)
      q[(k / side * outputs + j) * side + k % side] =
          (int8_t)((int)__builtin_rintf(widen(w.at(first + j, k)) * inverse) + zero);
  }
}

// The power of two by which the weights of one output become int16: each fits, and those of no
// group sum to more than kFixedSum once rounded. Weights of at least 128 steps are exact then.
// NaN where a weight is not finite.
inline float fixed_factor(const Plain<bf16>& w, int64_t output) {
  float top = 0, most = 0, fault = 0;
  for (int64_t from = 0; from < w.k; from += kGroup) {
    float total = 0;
    for (int64_t k = from; k < from + kGroup && k < w.k; k++) {
      const float v = __builtin_fabsf(widen(w.at(output, k)));
      top = v > top ? v : top, total += v, fault += v * 0;
    }
    most = total > most ? total : most;
  }
  if (fault != 0) return fault;
  if (most < 0x1p-100f) return 0;
  const float sum = (kFixedSum - kGroup) / most, each = 32767 / top;
  int exponent;
  frexpf(sum < each ? sum : each, &exponent);
  return ldexpf(1, exponent - 1);
}
inline void pack_fixed(const Plain<bf16>& w, int64_t first, int64_t outputs, char* to) {
  float* scale = (float*)to;
  int16_t* q = (int16_t*)(scale + outputs);
  for (int64_t j = 0; j < outputs; j++) {
    const float factor = fixed_factor(w, first + j);
    scale[j] = factor == 0 ? 0 : 1 / factor;
    for (int64_t k = 0; k < round_up(w.k, 2); k++)
      q[(k / 2 * outputs + j) * 2 + k % 2] =
          factor > 0 ? (int16_t)__builtin_rintf(widen(w.at(first + j, k)) * factor) : 0;
  }
}

template <class T>
inline void pack_matrix(const Plain<T>& w, int64_t kind, char* to) {
  const Cut cut(w.n);
  for (int64_t p = 0; p < cut.panels; p++) {
    const Panel at = cut.panel(p);
    const int64_t first = at.output(), outputs = (int64_t)at.count * W;
    char* panel = to + at.first * vector_bytes(kind, w.k);
    if constexpr (sizeof(T) == 2) {
      if (kind == kQuant8)
        pack_quantised(w, first, outputs, 2, 0, panel);
      else if (kind == kOffset8)
        pack_quantised(w, first, outputs, 4, 128, panel);
      else if (kind == kFixed16)
        pack_fixed(w, first, outputs, panel);
      else
        pack_panel(w, first, outputs, 2, (T*)panel);
    } else {
      pack_panel(w, first, outputs, 1, (T*)panel);
    }
  }
}

}  // namespace loraplex
