// Multiplication by prepared weights: out[m, n] = x[m, k] · W[n, k]ᵀ (+ bias).
//
// Three kinds of weights. bfloat16 ones are multiplied in float. int8 and int4 ones come in groups of 32 along k with a
// scale (and, int4, a minimum) each; x is rounded to 8 bits by groups of 32 as well, a group's dot product is exact in
// whole numbers, and the groups are added in order in float. So a row's result depends neither on how many rows are
// multiplied together, nor on the instructions that do it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "lanes.hpp"
#include "numbers.hpp"
#include "pool.hpp"

namespace {

constexpr int kGroup = 32;   // values that share a scale
constexpr int kColumns = 16; // outputs in a panel of int8 or int4 weights

enum class Kind : int32_t { kBf16 = 0, kInt8 = 1, kInt4 = 2 };

// Bytes of one group of one panel: numbers [4 of k][16 columns][4 of k], two of them to a byte for int4 (k and k + 16);
// then a scale, float16, per column; then, for int4, a minimum per column.
constexpr int64_t group_bytes(Kind kind) {
  return kind == Kind::kInt8 ? kColumns * (kGroup + 2) : kColumns * (kGroup / 2 + 4);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lays out numbers[n, groups * 32], scale[n, groups] and minimum[n, groups] in panels; missing columns are zeros.
void pack_groups(Kind kind, const uint8_t* numbers, const uint16_t* scale, const uint16_t* minimum, uint8_t* out,
                 int64_t n, int64_t groups) {
  const int64_t bytes = group_bytes(kind);
  parallel(ceil_div(n, kColumns), 16, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel)
      for (int64_t g = 0; g < groups; ++g) {
        uint8_t* to = out + (panel * groups + g) * bytes;
        std::memset(to, 0, bytes);
        const int64_t columns = std::min<int64_t>(kColumns, n - panel * kColumns);
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t row = panel * kColumns + c;
          const uint8_t* from = numbers + (row * groups + g) * kGroup;
          for (int i = 0; i < kGroup; ++i) {
            const int four = i / 4;
            if (kind == Kind::kInt8)
              to[four * 64 + c * 4 + i % 4] = from[i];
            else
              to[four % 4 * 64 + c * 4 + i % 4] |= static_cast<uint8_t>(four < 4 ? from[i] : from[i] << 4);
          }
          uint8_t* behind = to + kColumns * (kind == Kind::kInt8 ? kGroup : kGroup / 2);
          std::memcpy(behind + 2 * c, scale + row * groups + g, 2);
          if (kind == Kind::kInt4)
            std::memcpy(behind + 2 * kColumns + 2 * c, minimum + row * groups + g, 2);
        }
      }
  });
}

#if ST_LANES

constexpr int kVectors = kColumns / kLanes;      // vectors across an int8 or int4 panel
constexpr int kWide = 2 * kLanes;                // outputs in a panel of bfloat16 weights
constexpr int kFewRows = ST_LANES == 16 ? 8 : 4; // rows of whole-number kernels: what the registers hold
constexpr int kFloatRows = ST_LANES == 16 ? 12 : 6;
constexpr int64_t kAhead = 2560;  // bytes
constexpr int64_t kRowBlock = 48; // rows that go over a panel together: they stay in the cache

inline int64_t wide_size(int64_t n, int64_t k) { return ceil_div(n, kWide) * kWide * k; }

// Lays W[n, k] out in panels [k][lane][2]: two neighbours in memory are one column in each half of the panel.
void pack_wide(const bf16* w, bf16* out, int64_t n, int64_t k) {
  parallel(ceil_div(n, kWide), 16, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel)
      for (int64_t c = 0; c < kWide; ++c) {
        const int64_t column = panel * kWide + c;
        bf16* to = out + panel * kWide * k + c % kLanes * 2 + c / kLanes;
        for (int64_t i = 0; i < k; ++i)
          to[i * kWide] = column < n ? w[column * k + i] : 0;
      }
  });
}

inline __m256 load_eight(const float* at) { return _mm256_loadu_ps(at); }

inline __m256 load_eight(const bf16* at) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Rows of x rounded to 8 bits: x = scale * number, by groups.
struct Rounded {
  int64_t groups;
  std::vector<int8_t> numbers;     // [m, groups * 32]
  std::vector<uint8_t> magnitudes; // of numbers
  std::vector<int32_t> sum;        // [m, groups], of numbers
  std::vector<float> scale, shift; // [m, groups]; shift = scale * sum
};

template <typename T> void round_rows(const T* x, int64_t m, int64_t k, Rounded& out) {
  const int64_t groups = ceil_div(k, kGroup);
  const auto width = static_cast<size_t>(groups * kGroup), rows = static_cast<size_t>(m);
  out.groups = groups;
  if (out.numbers.size() < rows * width)
    out.numbers.resize(rows * width), out.magnitudes.resize(rows * width);
  if (out.sum.size() < rows * groups)
    out.sum.resize(rows * groups), out.scale.resize(rows * groups), out.shift.resize(rows * groups);
  parallel(m, 8, [&](int64_t first, int64_t last) {
    for (int64_t at = first * groups; at < last * groups; ++at) {
      const int64_t row = at / groups, start = at % groups * kGroup;
      const int64_t count = std::min<int64_t>(kGroup, k - start);
      const T* from = x + row * k + start;
      T padded[kGroup] = {};
      if (count < kGroup) {
        std::memcpy(padded, from, sizeof(T) * count);
        from = padded;
      }
      __m256 value[4];
      __m256i most = _mm256_setzero_si256();
      for (int i = 0; i < 4; ++i) {
        value[i] = load_eight(from + 8 * i);
        // As whole numbers, the bits are ordered by magnitude with infinity and NaN on top: none of these is lost.
        const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(value[i]), _mm256_set1_epi32(0x7fffffff));
        most = _mm256_max_epi32(most, magnitude);
      }
      __m128i top = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
      top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
      top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
      const float largest = _mm_cvtss_f32(_mm_castsi128_ps(top));
      const bool finite = _mm_cvtsi128_si32(top) < 0x7f800000;
      const __m256 inverse = _mm256_set1_ps(finite && largest > 1e-30f ? 127.0f / largest : 0.0f);
      __m256i whole[4];
      for (int i = 0; i < 4; ++i)
        whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(value[i], inverse));               // to nearest, ties to even
      const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), //
                                               _mm256_packs_epi32(whole[2], whole[3]));
      const __m256i numbers = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(&out.numbers[at * kGroup]), numbers);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(&out.magnitudes[at * kGroup]), _mm256_abs_epi8(numbers));
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), numbers);
      const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
      __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
      sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
      sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1));
      const int32_t sum = _mm_cvtsi128_si32(sums);
      const float scale = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
      out.sum[at] = sum, out.scale[at] = scale, out.shift[at] = scale * static_cast<float>(sum);
    }
  });
}

// Fetches what one group of a panel needs, some groups ahead of its use.
template <Kind kind> inline void fetch_ahead(const uint8_t* w) {
  for (int64_t at = 0; at < group_bytes(kind); at += 64)
    _mm_prefetch(reinterpret_cast<const char*>(w + kAhead + at), _MM_HINT_T0);
}

// One panel times R rows: total[R][16].
template <int R> void int4_panel(const uint8_t* w, const Rounded& x, int64_t row, float* total) {
  const int64_t groups = x.groups, width = groups * kGroup;
  const int8_t* numbers = &x.numbers[row * width];
  const float* scales = &x.scale[row * groups];
  const float* shifts = &x.shift[row * groups];
  const Bytes low_bits = all_int32(0x0f0f0f0f);
  Floats sum[R][kVectors];
  for (auto& line : sum)
    for (auto& lane : line)
      lane = zeros();
  for (int64_t g = 0; g < groups; ++g, w += group_bytes(Kind::kInt4)) {
    fetch_ahead<Kind::kInt4>(w);
    Bytes dot[R][kVectors];
    for (auto& line : dot)
      for (auto& lane : line)
        lane = no_bytes();
    const int8_t* from = numbers + g * kGroup;
#pragma GCC unroll 4
    for (int four = 0; four < 4; ++four) {
      Bytes low[kVectors], high[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const Bytes packed = load_bytes(w + four * 64 + v * kVectorBytes);
        low[v] = both(packed, low_bits), high[v] = both(right(packed, 4), low_bits);
      }
      for (int r = 0; r < R; ++r) {
        const Bytes a = all_int32_at(from + r * width + four * 4), b = all_int32_at(from + r * width + four * 4 + 16);
        for (int v = 0; v < kVectors; ++v)
          dot[r][v] = dot_small(dot_small(dot[r][v], low[v], a), high[v], b);
      }
    }
    const auto* scale = reinterpret_cast<const uint16_t*>(w + kColumns * kGroup / 2);
    for (int v = 0; v < kVectors; ++v) {
      const Floats by = load_halves(scale + v * kLanes), minimum = load_halves(scale + kColumns + v * kLanes);
      for (int r = 0; r < R; ++r) {
        const Floats whole = from_int32(small_sum(dot[r][v]));
        sum[r][v] = fused(whole, times(by, all(scales[r * groups + g])), sum[r][v]);
        sum[r][v] = fused(minimum, all(shifts[r * groups + g]), sum[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      store_floats(total + r * kColumns + v * kLanes, sum[r][v]);
}

template <int R> void int8_panel(const uint8_t* w, const Rounded& x, int64_t row, float* total) {
  const int64_t groups = x.groups, width = groups * kGroup;
  const int8_t* numbers = &x.numbers[row * width];
  const uint8_t* magnitudes = &x.magnitudes[row * width];
  Floats sum[R][kVectors];
  for (auto& line : sum)
    for (auto& lane : line)
      lane = zeros();
  for (int64_t g = 0; g < groups; ++g, w += group_bytes(Kind::kInt8)) {
    fetch_ahead<Kind::kInt8>(w);
    Bytes dot[R][kVectors];
    for (auto& line : dot)
      for (auto& lane : line)
        lane = no_bytes();
    const int64_t from = g * kGroup;
#pragma GCC unroll 8
    for (int four = 0; four < 8; ++four) {
      Bytes weights[kVectors];
      for (int v = 0; v < kVectors; ++v)
        weights[v] = load_bytes(w + four * 64 + v * kVectorBytes);
      for (int r = 0; r < R; ++r) {
        const Bytes a = all_int32_at(numbers + from + r * width + four * 4);
        const Bytes size = all_int32_at(magnitudes + from + r * width + four * 4);
        for (int v = 0; v < kVectors; ++v)
          dot[r][v] = dot_byte(dot[r][v], weights[v], a, size);
      }
    }
    const auto* scale = reinterpret_cast<const uint16_t*>(w + kColumns * kGroup);
    for (int v = 0; v < kVectors; ++v) {
      const Floats by = load_halves(scale + v * kLanes);
      for (int r = 0; r < R; ++r) {
        const int64_t at = (row + r) * groups + g;
        const Floats whole = from_int32(byte_sum(dot[r][v], x.sum[at]));
        sum[r][v] = fused(whole, times(by, all(x.scale[at])), sum[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      store_floats(total + r * kColumns + v * kLanes, sum[r][v]);
}

// One panel of bfloat16 weights times R rows of floats [m, k]: total[R][kWide].
template <int R> void wide_panel(const bf16* w, const float* x, int64_t k, float* total) {
  const Bytes upper = all_int32(static_cast<int32_t>(0xffff0000u));
  Floats sum[R][2];
  for (auto& line : sum)
    line[0] = zeros(), line[1] = zeros();
  for (int64_t i = 0; i < k; ++i) {
    const Bytes pair = load_bytes(w + i * kWide);
    const Floats first = as_floats(left(pair, 16)), second = as_floats(both(pair, upper));
    for (int r = 0; r < R; ++r) {
      const Floats a = all(x[r * k + i]);
      sum[r][0] = fused(first, a, sum[r][0]);
      sum[r][1] = fused(second, a, sum[r][1]);
    }
  }
  for (int r = 0; r < R; ++r) {
    store_floats(total + r * kWide, sum[r][0]);
    store_floats(total + r * kWide + kLanes, sum[r][1]);
  }
}

// panel<R>(row, total) for rows [first, last), at most `Most` at a time, R known to the compiler.
template <int Most, typename Panel> void by_rows(int64_t first, int64_t last, const Panel& panel) {
  for (; first + Most <= last; first += Most)
    panel.template operator()<Most>(first);
  if constexpr (Most > 1)
    if (first < last)
      by_rows<Most / 2>(first, last, panel);
}

template <typename Out>
void write_panel(const float* total, int rows, int stride, const float* bias, Out* out, int64_t n, int64_t columns) {
  for (int r = 0; r < rows; ++r) {
    const float* from = total + r * stride;
    Out* to = out + r * n;
    if (bias == nullptr && columns == stride) {
#pragma omp simd
      for (int c = 0; c < stride; ++c)
        store(&to[c], from[c]);
    } else {
      for (int64_t c = 0; c < columns; ++c)
        store(&to[c], from[c] + (bias ? bias[c] : 0.0f));
    }
  }
}

// panel<R>(which panel, row, total[R][Columns]) over all panels and rows, shared among the threads.
template <int Columns, int Most, typename Out, typename Panel>
void over_panels(int64_t m, int64_t n, const float* bias, Out* out, const Panel& panel) {
  const int64_t panels = ceil_div(n, Columns);
  const int64_t grain = std::max<int64_t>(1, panels / (8 * pool->threads()));
  parallel(panels, grain, [&](int64_t first, int64_t last) {
    for (int64_t block = 0; block < m; block += kRowBlock)
      for (int64_t p = first; p < last; ++p) {
        const int64_t column = p * Columns, columns = std::min<int64_t>(Columns, n - column);
        by_rows<Most>(block, std::min(m, block + kRowBlock), [&]<int R>(int64_t row) {
          alignas(64) float total[R * Columns];
          panel.template operator()<R>(p, row, total);
          write_panel(total, R, Columns, bias ? bias + column : nullptr, out + row * n + column, n, columns);
        });
      }
  });
}

template <typename T, typename Out>
void linear(Kind kind, const T* x, int64_t m, int64_t k, const void* weights, int64_t n, const float* bias, Out* out) {
  if (kind == Kind::kBf16) {
    const auto* w = static_cast<const bf16*>(weights);
    thread_local std::vector<float> wide;
    const float* rows = nullptr;
    if constexpr (std::is_same_v<T, float>) {
      rows = x;
    } else {
      if (wide.size() < static_cast<size_t>(m * k))
        wide.resize(static_cast<size_t>(m * k));
      float* to = wide.data();
      parallel(m, 16, [&](int64_t first, int64_t last) {
        for (int64_t i = first * k; i < last * k; ++i)
          to[i] = load(x[i]);
      });
      rows = to;
    }
    over_panels<kWide, kFloatRows>(m, n, bias, out, [&]<int R>(int64_t p, int64_t row, float* total) {
      wide_panel<R>(w + p * kWide * k, rows + row * k, k, total);
    });
    return;
  }
  thread_local Rounded rounded;
  round_rows(x, m, k, rounded);
  const Rounded& rows = rounded; // the lambda must not look up another thread's
  const auto* w = static_cast<const uint8_t*>(weights);
  const int64_t panel_bytes = rounded.groups * group_bytes(kind);
  if (kind == Kind::kInt8)
    over_panels<kColumns, kFewRows>(m, n, bias, out, [&]<int R>(int64_t p, int64_t row, float* total) {
      int8_panel<R>(w + p * panel_bytes, rows, row, total);
    });
  else
    over_panels<kColumns, kFewRows>(m, n, bias, out, [&]<int R>(int64_t p, int64_t row, float* total) {
      int4_panel<R>(w + p * panel_bytes, rows, row, total);
    });
}

#endif

} // namespace
