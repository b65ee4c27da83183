// Vectors of floats with the width of the translation unit's instruction set. They use the compiler's own vector types,
// so one source serves AVX-512, AVX2 and any other machine. Everything is in the namespace of one instruction set
// (FRONTIER_ISA), so that the linker never merges the same templates compiled with other flags.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace frontier::FRONTIER_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

typedef float vf __attribute__((vector_size(kVectorBytes)));
typedef int32_t vi __attribute__((vector_size(kVectorBytes)));
typedef uint32_t vu __attribute__((vector_size(kVectorBytes)));
typedef uint16_t vh __attribute__((vector_size(kVectorBytes / 2)));
typedef float vf_memory __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef int32_t vi_memory __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef uint16_t vh_memory __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

ALWAYS_INLINE vf splat(float x) { return x - vf{}; }

ALWAYS_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_memory*>(p); }
ALWAYS_INLINE vi load(const int32_t* p) { return *reinterpret_cast<const vi_memory*>(p); }
ALWAYS_INLINE vf load(const bf16* p) {
#if defined(__AVX512F__)  // with __builtin_convertvector, GCC 12 would widen the halves one by one
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return reinterpret_cast<vf>(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<vf>(_mm256_slli_epi32(wide, 16));
#else
  return reinterpret_cast<vf>(__builtin_convertvector(*reinterpret_cast<const vh_memory*>(p), vu) << 16);
#endif
}

ALWAYS_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_memory*>(p) = x; }
ALWAYS_INLINE void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
  memcpy(p, &rounded, sizeof rounded);
#else
  const vu bits = reinterpret_cast<vu>(x);
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // round to nearest, ties to even
  const vu quiet_nan = vu{} + 0x7fc0;
  *reinterpret_cast<vh_memory*>(p) = __builtin_convertvector(x == x ? rounded : quiet_nan, vh);
#endif
}

// Loads the last, shorter vector of a row. The missing lanes are 0.
template <class T>
ALWAYS_INLINE vf load_part(const T* p, int64_t count) {
  T lanes[kLanes] = {};
  memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}
template <class T>
ALWAYS_INLINE void store_part(T* p, vf x, int64_t count) {
  T lanes[kLanes];
  store(lanes, x);
  memcpy(p, lanes, count * sizeof(T));
}

// Calls body(i, load, store) for each vector of [0, count). load(p) and store(p, x) act at p + i, also on the shorter
// last vector.
template <class Body>
ALWAYS_INLINE void for_vectors(int64_t count, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    body(i, [i](const auto* p) { return load(p + i); }, [i](auto* p, vf x) { store(p + i, x); });
  if (const int64_t rest = count - i; rest > 0)
    body(
        i, [i, rest](const auto* p) { return load_part(p + i, rest); },
        [i, rest](auto* p, vf x) { store_part(p + i, x, rest); });
}

// Adds halves repeatedly: with AVX-512 four steps, instead of sixteen dependent additions.
ALWAYS_INLINE float sum(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += x[lane];
  return total;
#endif
}
ALWAYS_INLINE vf max(vf a, vf b) { return a < b ? b : a; }  // both return NaN if a is NaN
ALWAYS_INLINE vf min(vf a, vf b) { return b < a ? b : a; }
ALWAYS_INLINE float max_lane(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x));
#else
  float best = x[0];
  for (int lane = 1; lane < kLanes; ++lane) best = x[lane] > best ? x[lane] : best;
  return best;
#endif
}
ALWAYS_INLINE vf sqrt(vf x) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_sqrt_ps(reinterpret_cast<__m512>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<vf>(_mm256_sqrt_ps(reinterpret_cast<__m256>(x)));
#else
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
#endif
}

// Polynomial of Cephes' expf: e^r for |r| <= ln 2 / 2.
ALWAYS_INLINE vf exp_near_zero(vf r) {
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + (r + 1.0f);
}

// e^x to about 1 ulp: x = n ln 2 + r, polynomial in r, then n is added to the exponent. e^-inf is 0, e^inf is inf, and
// NaN stays NaN.
ALWAYS_INLINE vf exp(vf x) {
#if defined(__AVX512F__)
  // scalef handles overflow, underflow and NaN. max and min return their second operand if it is NaN.
  const __m512 clamped =
      _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), reinterpret_cast<__m512>(x)));
  const vf c = reinterpret_cast<vf>(clamped),
           n = reinterpret_cast<vf>(_mm512_roundscale_ps(reinterpret_cast<__m512>(c * 1.44269504088896341f), 0));
  const vf p = exp_near_zero(c - n * 0.693359375f + n * 2.12194440e-4f);
  return reinterpret_cast<vf>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low mantissa bits
  const vf clamped = min(max(x, splat(-87.3f)), splat(88.7f));
  const vf shifted = clamped * 1.44269504088896341f + magic, n = shifted - magic;
  const vf p = exp_near_zero(clamped - n * 0.693359375f + n * 2.12194440e-4f);
  const vi exponent = reinterpret_cast<vi>(shifted) - reinterpret_cast<vi>(splat(magic));
  vf result = reinterpret_cast<vf>(reinterpret_cast<vi>(p) + (exponent << 23));
  result = x < -87.3f ? vf{} : result;  // 0 if the result would be denormal
  result = x > 88.7f ? splat(__builtin_inff()) : result;
  return x == x ? result : x;
#endif
}

// 1 / x for |x| in [1e-30, 1e30]. AVX-512 refines a 14-bit estimate once, three times as fast as its division.
ALWAYS_INLINE vf reciprocal(vf x) {
#if defined(__AVX512F__)
  const vf estimate = reinterpret_cast<vf>(_mm512_rcp14_ps(reinterpret_cast<__m512>(x)));
  return estimate * (2.0f - x * estimate);
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + e^-x). For x below -60 the result is 1e-26.
ALWAYS_INLINE vf sigmoid(vf x) { return reciprocal(1.0f + exp(min(-x, splat(60.0f)))); }

// tanh with an absolute error of 1e-7. This is enough for the soft cap of scores, but not for relative accuracy near 0.
ALWAYS_INLINE vf tanh(vf x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// The normal distribution's cdf at x, for the forward of exact GELU: erf as a rational function on [-4, 4] (the minimax
// fit of Eigen and XLA), |error of erf| < 5e-7. It needs half the instructions of a formula with an exponential. NaN
// stays NaN.
ALWAYS_INLINE vf normal_cdf(vf x) {
  const vf z = min(max(x * 0.70710678118654752f, splat(-4.0f)), splat(4.0f)), z2 = z * z;
  vf p = z2 * 2.72614225801306e-10f - 2.77068142495902e-08f;
  p = p * z2 + 2.10102402082508e-06f;
  p = p * z2 + 5.69250639462346e-05f;
  p = p * z2 + 7.34990630326855e-04f;
  p = p * z2 + 2.95459980854025e-03f;
  p = p * z2 + 1.60960333262415e-02f;
  vf q = z2 * 1.45660718464996e-05f + 2.13374055278905e-04f;
  q = q * z2 + 1.68282697438203e-03f;
  q = q * z2 + 7.37332916720468e-03f;
  q = q * z2 + 1.42647390514189e-02f;
  const vf cdf = 0.5f + 0.5f * z * p * reciprocal(q);
  return x < -5.65f ? vf{} : cdf;  // prevents that a rounding error is multiplied by a large x
}

// The cdf and exp(-x^2 / 2), for the backward of GELU: Abramowitz & Stegun 7.1.26, |error| < 1.5e-7.
ALWAYS_INLINE void normal_cdf(vf x, vf& cdf, vf& bell) {
  const vf a = min((x < 0.0f ? -x : x) * 0.70710678118654752f, splat(1e4f));
  bell = exp(-a * a);
  const vf t = reciprocal(1.0f + 0.3275911f * a);
  vf p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const vf tail = 0.5f * p * t * bell;  // P(X > |x|)
  cdf = x < 0.0f ? tail : 1.0f - tail;
}

}  // namespace frontier::FRONTIER_ISA
