// The few vector instructions that the linear kernels are written in: 8 lanes with AVX2, 16 with AVX-512 and VNNI.
//
// Both give the same results to the last bit: dot products of whole numbers are exact, and every float result is built
// by the same sequence of operations in its own lane.

#pragma once

#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define ST_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ST_LANES 8
#else
#define ST_LANES 0
#endif

#if ST_LANES
#include <immintrin.h>

namespace {

constexpr int kLanes = ST_LANES;
constexpr int kVectorBytes = 4 * kLanes;

// Keeps the compiler from adding in another order, for which it would hold many products at once and spill them.
template <typename Vector> inline Vector in_order(Vector x) {
  asm("" : "+v"(x));
  return x;
}

#if ST_LANES == 16

using Floats = __m512;
using Bytes = __m512i;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load_floats(const float* at) { return _mm512_loadu_ps(at); }
inline void store_floats(float* at, Floats x) { _mm512_storeu_ps(at, x); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats load_halves(const uint16_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
inline Floats as_floats(Bytes bits) { return _mm512_castsi512_ps(bits); }
inline Floats from_int32(Bytes x) { return _mm512_cvtepi32_ps(x); }

inline Bytes no_bytes() { return _mm512_setzero_si512(); }
inline Bytes load_bytes(const void* at) { return _mm512_loadu_si512(at); }
inline Bytes all_int32(int32_t x) { return _mm512_set1_epi32(x); }
inline Bytes both(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
inline Bytes right(Bytes x, int bits) { return _mm512_srli_epi32(x, bits); }
inline Bytes left(Bytes x, int bits) { return _mm512_slli_epi32(x, bits); }

// sum + the products of four neighbours, weights 0 to 15.
inline Bytes dot_small(Bytes sum, Bytes weights, Bytes x) { return _mm512_dpbusd_epi32(sum, weights, x); }
inline Bytes small_sum(Bytes sum) { return sum; }

// sum + the products of four neighbours, weights -127 to 127. `byte_sum` takes back what the shift of the weights to
// unsigned numbers added: 128 times the sum of x.
inline Bytes dot_byte(Bytes sum, Bytes weights, Bytes x, Bytes) {
  return _mm512_dpbusd_epi32(sum, _mm512_xor_si512(weights, _mm512_set1_epi8(-128)), x);
}
inline Bytes byte_sum(Bytes sum, int32_t x_sum) { return _mm512_sub_epi32(sum, _mm512_set1_epi32(128 * x_sum)); }

#else

using Floats = __m256;
using Bytes = __m256i;

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats load_floats(const float* at) { return _mm256_loadu_ps(at); }
inline void store_floats(float* at, Floats x) { _mm256_storeu_ps(at, x); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats load_halves(const uint16_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline Floats as_floats(Bytes bits) { return _mm256_castsi256_ps(bits); }
inline Floats from_int32(Bytes x) { return _mm256_cvtepi32_ps(x); }

inline Bytes no_bytes() { return _mm256_setzero_si256(); }
inline Bytes load_bytes(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
inline Bytes all_int32(int32_t x) { return _mm256_set1_epi32(x); }
inline Bytes both(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
inline Bytes right(Bytes x, int bits) { return _mm256_srli_epi32(x, bits); }
inline Bytes left(Bytes x, int bits) { return _mm256_slli_epi32(x, bits); }

// Sums stay 16 bits wide within a group: 32 / 2 products of at most 15 * 127 fit. `small_sum` widens them.
inline Bytes dot_small(Bytes sum, Bytes weights, Bytes x) {
  return in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x)));
}
inline Bytes small_sum(Bytes sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

// Two products of at most 127 * 127 just fit into 16 bits, so they are widened at once.
inline Bytes dot_byte(Bytes sum, Bytes weights, Bytes x, Bytes x_magnitude) {
  const Bytes pairs = _mm256_maddubs_epi16(x_magnitude, _mm256_sign_epi8(weights, x));
  return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
inline Bytes byte_sum(Bytes sum, int32_t) { return sum; }

#endif

inline Bytes all_int32_at(const void* at) {
  int32_t x;
  __builtin_memcpy(&x, at, 4);
  return all_int32(x);
}

} // namespace

#endif
