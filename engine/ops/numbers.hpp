// Numbers as the kernels keep them: float, and bfloat16 as its 16 bits.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;

inline float load(float x) { return x; }

inline float load(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void store(float* at, float x) { *at = x; }

inline void store(bf16* at, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  // Round to nearest even; a NaN keeps its top bits and is made quiet, or rounding could turn it into infinity.
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint32_t quiet = bits | 0x400000u;
  *at = static_cast<bf16>((((bits & 0x7fffffffu) > 0x7f800000u) ? quiet : rounded) >> 16);
}

// exp(x) for x <= 88, to about 2 ulp, without branches so that the compiler vectorises the loops around it.
inline float fast_exp(float x) {
  x = std::max(x, -87.0f);
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

} // namespace
