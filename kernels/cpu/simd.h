// Vectors of W lanes and the few operations that differ between instruction sets.
// GCC's vector types carry + - * / < and ?: on every machine; what is spelt here is what they lack
// or do slowly. The body without AVX is the same code, and the only one that a machine other than
// x86 needs.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#pragma GCC diagnostic ignored \
    "-Wpsabi"  // vectors wider than the machine's are passed in memory, within this library only

namespace loraplex {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define LPX_AVX512
#if defined(__AVX512BF16__)
#define LPX_BF16
constexpr const char* kIsa = "avx512";
#else
constexpr const char* kIsa = "avx512-vnni";
#endif
// Lanes; rows of a register tile, at best and at most; vectors of the largest; registers.
constexpr int W = 16, kTileRows = 8, kMostRows = 8, kVectors = 3, kRegisters = 32;
#elif defined(__AVX2__) && defined(__FMA__)
#define LPX_AVX2
#if defined(__AVXVNNI__)
#define LPX_AVX_VNNI
constexpr const char* kIsa = "avx2-vnni";
#else
constexpr const char* kIsa = "avx2";
#endif
constexpr int W = 8, kTileRows = 4, kMostRows = 6, kVectors = 2, kRegisters = 16;
#else
constexpr const char* kIsa = "scalar";
constexpr int W = 8, kTileRows = 4, kMostRows = 4, kVectors = 2, kRegisters = 16;
#endif

#define LPX_INLINE inline __attribute__((always_inline))

typedef float F __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef float FLoad __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t ILoad __attribute__((vector_size(W * 4), aligned(1), may_alias));
typedef uint16_t bf16;

LPX_INLINE F splat(float x) { return x - F{}; }
LPX_INLINE I splat(int32_t x) { return x - I{}; }
LPX_INLINE I lane_numbers() {
  static const int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return *(const ILoad*)numbers;
}
LPX_INLINE F load(const float* p) { return *(const FLoad*)p; }
LPX_INLINE I load_raw(const void* p) { return *(const ILoad*)p; }
LPX_INLINE void store(float* p, F v) { *(FLoad*)p = v; }
// Past the caches, for what is not read soon: a line that is written whole is not read before. `p`
// is aligned to a vector; another thread sees it after `end_streams`.
LPX_INLINE void stream(float* p, F v) {
#if defined(LPX_AVX512)
  _mm512_stream_ps(p, v);
#elif defined(LPX_AVX2)
  _mm256_stream_ps(p, v);
#else
  store(p, v);
#endif
}
LPX_INLINE void end_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}
LPX_INLINE F max(F a, F b) { return a > b ? a : b; }

// Bit i: whether a comparison holds in lane i.
LPX_INLINE uint32_t bits(I holds) {
#if defined(LPX_AVX512)
  return _mm512_movepi32_mask((__m512i)holds);
#elif defined(LPX_AVX2)
  return (uint32_t)_mm256_movemask_ps((__m256)holds);
#else
  uint32_t found = 0;
  for (int i = 0; i < W; i++)
    found |= (uint32_t)(holds[i] & 1) << i;
  return found;
#endif
}

// The first n < W lanes; zeroes follow.
inline F load_part(const float* p, int64_t n) {
  alignas(64) float x[W] = {};
  memcpy(x, p, n * sizeof(float));
  return load(x);
}
// Lanes [i, i + W) of an array of n.
LPX_INLINE F load_of(const float* p, int64_t i, int64_t n) {
  return i + W <= n ? load(p + i) : load_part(p + i, n - i);
}

// a * b + c, rounded once where the machine can.
LPX_INLINE F fma(F a, F b, F c) {
#if defined(LPX_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(LPX_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The sum of all lanes, halves first: one order on every machine.
inline float sum(F v) {
#if defined(LPX_AVX512)
  return _mm512_reduce_add_ps(v);
#elif defined(LPX_AVX2)
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return x[0] + x[1];
#else
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; i++)
      v[i] += v[i + n];
  return v[0];
#endif
}
inline float highest(F v) {
#if defined(LPX_AVX512)
  return _mm512_reduce_max_ps(v);
#elif defined(LPX_AVX2)
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return x[0] > x[1] ? x[0] : x[1];
#else
  for (int i = 1; i < W; i++)
    v[0] = v[i] > v[0] ? v[i] : v[0];
  return v[0];
#endif
}

// Lanes hold two bf16: the first in the low half.
LPX_INLINE F first(I pair) { return (F)(pair << 16); }
LPX_INLINE F second(I pair) { return (F)(pair & (int32_t)0xffff0000); }
inline float widen(bf16 x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline float widen(float x) { return x; }
typedef uint16_t Halves __attribute__((vector_size(W * 2)));
typedef uint16_t HalvesLoad __attribute__((vector_size(W * 2), aligned(2), may_alias));
// W bf16 as floats.
LPX_INLINE F widen(Halves x) {
#if defined(LPX_AVX512)
  const I low = (I)_mm512_cvtepu16_epi32((__m256i)x);
#else
  const I low = __builtin_convertvector(x, I);
#endif
  return (F)(low << 16);
}
LPX_INLINE F load(const bf16* p) { return widen(*(const HalvesLoad*)p); }
// W floats to the nearest bf16, ties to even; NaN stays NaN.
LPX_INLINE Halves to_bf16(F v) {
#if defined(LPX_BF16)
  return (Halves)_mm512_cvtneps_pbh(v);
#else
  typedef uint32_t U __attribute__((vector_size(W * 4)));
  const U u = (U)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? rounded : U{} + 0x7fc0, Halves);
#endif
}
LPX_INLINE void store(bf16* p, Halves v) { *(HalvesLoad*)p = v; }
LPX_INLINE void store_bf16(bf16* p, F v) { store(p, to_bf16(v)); }

// W int8 as floats.
LPX_INLINE F load(const int8_t* p) {
#if defined(LPX_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(LPX_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  F v;
  for (int i = 0; i < W; i++)
    v[i] = p[i];
  return v;
#endif
}
// 2 W int8 as int16, two to a lane.
LPX_INLINE I load_pairs(const int8_t* p) {
#if defined(LPX_AVX512)
  return (I)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(LPX_AVX2)
  return (I)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  I v;
  for (int i = 0; i < W; i++)
    v[i] = (int32_t)((uint32_t)(uint16_t)p[2 * i] | (uint32_t)(uint16_t)p[2 * i + 1] << 16);
  return v;
#endif
}
LPX_INLINE I load_pairs(const int16_t* p) { return load_raw(p); }
// acc + the sum of the products of each lane's two int16.
LPX_INLINE I dot_int16(I acc, I a, I b) {
#if defined(LPX_AVX512)
  return (I)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(LPX_AVX_VNNI)
  return (I)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif defined(LPX_AVX2)
  acc += (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  asm("" : "+x"(acc));  // or GCC adds up products first, and keeps them in memory meanwhile
  return acc;
#else
  return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}
// acc + the sum of the products of each lane's four bytes: those of `a` have no sign.
LPX_INLINE I dot_bytes(I acc, I a, I b) {
#if defined(LPX_AVX512)
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(LPX_AVX_VNNI)
  return (I)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#else
  for (int shift = 24; shift >= 0; shift -= 8)
    acc += (a >> (24 - shift) & 0xff) * ((b << shift) >> 24);
  return acc;
#endif
}
// acc + the sum of the products of each lane's two bf16.
LPX_INLINE F dot_bf16(F acc, I a, I b) {
#if defined(LPX_BF16)
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  return fma(second(a), second(b), fma(first(a), first(b), acc));
#endif
}
LPX_INLINE F to_float(I v) {
#if defined(LPX_AVX512)
  return _mm512_cvtepi32_ps((__m512i)v);
#elif defined(LPX_AVX2)
  return _mm256_cvtepi32_ps((__m256i)v);
#else
  return __builtin_convertvector(v, F);
#endif
}
// 2 W floats to the nearest int16, ties to even.
LPX_INLINE void store_int16(int16_t* p, F a, F b) {
#if defined(LPX_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)));
  _mm256_storeu_si256((__m256i*)p + 1, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(b)));
#elif defined(LPX_AVX2)
  const __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(pairs, 0xd8));  // lanes in order
#else
  for (int i = 0; i < W; i++)
    p[i] = (int16_t)__builtin_rintf(a[i]), p[W + i] = (int16_t)__builtin_rintf(b[i]);
#endif
}
// W floats to the nearest int8, ties to even; returns them as int32.
LPX_INLINE I store_int8(int8_t* p, F v) {
#if defined(LPX_AVX512)
  const __m512i i = _mm512_cvtps_epi32(v);
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(i));
  return (I)i;
#elif defined(LPX_AVX2)
  const __m256i i = _mm256_cvtps_epi32(v);
  const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
  return (I)i;
#else
  I i;
  for (int j = 0; j < W; j++)
    i[j] = (int32_t)__builtin_rintf(v[j]), p[j] = (int8_t)i[j];
  return i;
#endif
}
// To the nearest integer, |x| < 2^22.
LPX_INLINE F nearest(F x) {
  const F big = splat(12582912.f);  // 1.5 * 2^23: its unit is 1
  return (x + big) - big;
}
// 2^x for x <= 0, to 2e-7 relative; 0 below 2^-126, NaN for NaN. The polynomial is the minimax one
// of degree 5 on [-1/2, 1/2].
LPX_INLINE F exp2(F x) {
  const F low = splat(-126.f);
#if defined(LPX_AVX512)
  const F n = _mm512_roundscale_ps(x, 8), f = x - n;
#else
  F y = x > low ? x : low, n = nearest(y), f = y - n;
#endif
  F p = splat(1.33976015e-3f);
  p = fma(p, f, splat(9.61815726e-3f));
  p = fma(p, f, splat(5.55033945e-2f));
  p = fma(p, f, splat(2.40226522e-1f));
  p = fma(p, f, splat(6.93147182e-1f));
  p = fma(p, f, splat(1.f));
#if defined(LPX_AVX512)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), p, n);
#else
  const I exponent = (I)(n + splat(12582912.f)) << 23;  // n stands in the low bits of this sum
  return x < low ? F{} : (F)((I)p + exponent) + (x - x);
#endif
}
LPX_INLINE F abs(F x) { return (F)((I)x & 0x7fffffff); }
constexpr float kLog2E = 1.44269504f;

}  // namespace loraplex
