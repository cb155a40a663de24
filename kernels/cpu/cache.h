// The paged KV cache: how a block holds keys and values, and how they are written.
//
// A block holds, for each layer, K and then V of each KV head: K as a panel whose outputs are the
// block's keys, V as a panel whose outputs are the head's columns, of a kind of its own:
//   kBf16  [D/2][keys][2] and [keys/2][D][2]     kFp32, kInt8  [D][keys] and [keys][D]
// Behind a panel of kInt8 lie the scales of its keys, fp32 [keys]. Head sizes and block sizes are
// multiples of 16, so that whatever lies in a block begins at a multiple of 64 bytes.
//
// This file knows blocks and slots; it refuses to know whose they are and how attention reads them.
#pragma once
#include "tiles.h"

namespace loraplex {

// Writes the codes of a row X [n], `stride` apart, and returns their scale.
//
// Semantics, to the bit: `quantise` of kernels/kv_rows.py. The scale is max_i |x_i| / 127, or 0
// where that is no normal number; codes are x_i / scale, halves to even; the codes of a row that is
// not finite are 0 and its scale is not finite.
inline float quantise_row(const float* x, int64_t n, int8_t* codes, int64_t stride) {
  F most = {}, fault = {};
  for (int64_t i = 0; i < n; i += W) {
    const F v = load(x + i);
    most = max(most, v < F{} ? -v : v);
    fault = v != v ? v : fault;
  }
  float scale = (highest(most) + sum(fault)) / 127;
  if (scale < 0x1p-126f) scale = 0;
  const bool divides = scale > 0 && scale < __builtin_inff();
  for (int64_t i = 0; i < n; i += W) {
    const F steps = divides ? nearest(load(x + i) / splat(scale)) : F{};
    for (int u = 0; u < W; u++)
      codes[(i + u) * stride] = (int8_t)steps[u];
  }
  return scale;
}

// Whether queries and weights of values are multiplied as bf16.
inline bool multiplies_bf16(const Model& m) {
  return m.activations == kActBf16 || (m.activations != kActFp32 && kBestActivations == kActBf16);
}

constexpr int64_t kLeastBlock = 16;  // keys

struct Cache {
  char* data;
  int64_t kind, block_size, dim, kv_heads;
  int64_t panel_bytes, head_bytes, block_bytes;
  Read read;

  explicit Cache(const Model& m)
      : data((char*)m.kv),
        kind(m.kv_kind),
        block_size(m.block_size),
        dim(m.head_dim),
        kv_heads(m.kv_heads),
        panel_bytes(dim / W * vector_bytes(kind, block_size)),
        head_bytes(panel_bytes + (kind == kInt8 ? block_size * (int64_t)sizeof(float) : 0)),
        block_bytes(m.layers * 2 * kv_heads * head_bytes),
        read(read_of(kind, kind == kBf16 && multiplies_bf16(m))) {}

  char* head(int64_t block, int64_t layer, int values, int64_t kv_head) const {
    return data + block * block_bytes + ((layer * 2 + values) * kv_heads + kv_head) * head_bytes;
  }
  // The scales of a head's keys or values, or null.
  float* scales(const char* head) const {
    return kind == kInt8 ? (float*)(head + panel_bytes) : nullptr;
  }
  // Before a block's first slot is written: what lies beyond a sequence's last key is multiplied by
  // zero, which would not silence a NaN that another sequence left.
  void clear(int64_t block) const { memset(data + block * block_bytes, 0, block_bytes); }
  // One key and value of one head.
  void write(int64_t block, int64_t slot, int64_t layer, int64_t kv_head, const float* key,
             const float* value) const {
    char *k = head(block, layer, 0, kv_head), *v = head(block, layer, 1, kv_head);
    if (kind == kInt8) {
      scales(k)[slot] = quantise_row(key, dim, (int8_t*)k + slot, block_size);
      scales(v)[slot] = quantise_row(value, dim, (int8_t*)v + slot * dim, 1);
    } else if (kind == kFp32) {
      for (int64_t d = 0; d < dim; d++)
        ((float*)k)[d * block_size + slot] = key[d];
      memcpy((float*)v + slot * dim, value, dim * sizeof(float));
    } else {
      bf16 *pairs = (bf16*)k + slot * 2, *values = (bf16*)v + slot / 2 * dim * 2 + slot % 2;
      for (int64_t d = 0; d < dim; d += W) {
        alignas(64) bf16 some[W];
        store_bf16(some, load(key + d));
        for (int64_t i = 0; i < W; i += 2)
          memcpy(pairs + (d + i) * block_size, some + i, 4);
        store_bf16(some, load(value + d));
        for (int64_t i = 0; i < W; i++)
          values[(d + i) * 2] = some[i];
      }
    }
  }
};

}  // namespace loraplex
