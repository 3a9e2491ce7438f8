// bfloat16 by matrix tiles (AMX): linears, and attention over paged keys.
//
// A tile multiplies each row on its own, over the depth in one order, so that a row's result does not depend on which
// rows are beside it.

#pragma once

#include "lanes.hpp"
#include "numbers.hpp"
#include "pool.hpp"

#if defined(__AMX_BF16__)
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <limits>
#include <memory>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

namespace {

constexpr int kTile = 16;      // rows of a tile, and columns of its float results
constexpr int kDepth = 32;     // bfloat16 values a tile row holds
constexpr int kTileSize = 512; // bfloat16 values in a tile

// Whether the system lets this process use them; asked once.
inline bool tiles_granted() {
  constexpr long request_permission = 0x1023, tile_data = 18;
  static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return granted;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// All tiles of 64 bytes a row; 0 to 5 of `rows` rows, 6 and 7 of 16.
inline void configure_tiles(int rows = kTile) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 6 ? rows : kTile);
  }
  asm volatile("" : : "r"(&config) : "memory"); // the intrinsic does not tell the compiler that it reads all of it
  _tile_loadconfig(&config);
}

inline void write_tile(const float* tile, int rows, int columns, const float* bias, void* out, int64_t stride,
                       bool as_float) {
  const __mmask16 live = static_cast<__mmask16>((1u << columns) - 1u);
  const __m512 shift = bias ? _mm512_maskz_loadu_ps(live, bias) : _mm512_setzero_ps();
  for (int r = 0; r < rows; ++r) {
    const __m512 value = _mm512_add_ps(_mm512_load_ps(tile + r * kTile), shift);
    if (as_float)
      _mm512_mask_storeu_ps(static_cast<float*>(out) + r * stride, live, value);
    else
      _mm256_mask_storeu_epi16(static_cast<bf16*>(out) + r * stride, live, (__m256i)_mm512_cvtneps_pbh(value));
  }
}

constexpr int64_t kPart = 768 * 1024; // bytes of rows, and of weights, that stay in a core's cache beside each other

// Rows and pairs of column tiles that one piece of work multiplies.
struct Pieces {
  int64_t rows, pairs;
};

inline Pieces cut(int64_t m, int64_t pairs, int64_t depth, int threads) {
  const int64_t row_bytes = depth * kDepth * 2, pair_bytes = 2 * depth * kTileSize * 2;
  const int64_t shared = std::max<int64_t>(1, pairs / (8 * threads));
  if (m * row_bytes <= 2 * kPart)
    return {m, shared};
  const int64_t rows = std::max<int64_t>(2 * kTile, kPart / row_bytes / (2 * kTile) * (2 * kTile));
  const int64_t row_pieces = (m + rows - 1) / rows;
  return {rows, std::min(std::max<int64_t>(1, kPart / pair_bytes), shared * row_pieces)};
}

constexpr int64_t kTilesAhead = 4;

// One pair of column tiles times two row tiles (a, and b if there are two); Fetch: the weights come from memory, and
// are fetched ahead of their use.
template <bool Two, bool Fetch>
void multiply_pair(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride, const bf16* w0, const bf16* w1,
                   int64_t depth) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t d = 0; d < depth; ++d) {
    if constexpr (Fetch)
      for (int64_t at = 0; at < kTileSize; at += kDepth) {
        _mm_prefetch(reinterpret_cast<const char*>(w0 + (d + kTilesAhead) * kTileSize + at), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(w1 + (d + kTilesAhead) * kTileSize + at), _MM_HINT_T0);
      }
    _tile_stream_loadd(6, w0 + d * kTileSize, 64);
    _tile_stream_loadd(7, w1 + d * kTileSize, 64);
    _tile_loadd(4, a + d * kDepth, a_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Two) {
      _tile_loadd(5, b + d * kDepth, b_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// out[M, N] = x[M, K] · W[N, K]ᵀ (+ bias), W packed by pack_bf16. Two column tiles by two row tiles at a time: each
// weight is read once from memory, however many rows there are up to 32.
void linear_bf16(const bf16* x, int64_t m, int64_t k, const bf16* packed, int64_t n, const float* bias, void* out,
                 bool as_float) {
  const int64_t depth = (k + kDepth - 1) / kDepth, column_tiles = (n + kTile - 1) / kTile;
  const int64_t all_pairs = (column_tiles + 1) / 2, full = m / kTile, tail = m % kTile;
  const bool copy_all = k % kDepth != 0;
  const int64_t row_tiles = full + (tail != 0);
  const int tile_rows = static_cast<int>(std::min<int64_t>(m, kTile));
  const int64_t copied_from = copy_all ? 0 : full + (full == 0);
  // Rows that do not fill their tile, or whose length does not, are laid out with zeros behind them.
  std::vector<bf16> padded(
      static_cast<size_t>(std::max<int64_t>(0, row_tiles - copied_from) * kTile * depth * kDepth), 0);
  for (int64_t r = copied_from * kTile; r < m; ++r)
    std::memcpy(&padded[static_cast<size_t>((r - copied_from * kTile) * depth * kDepth)], x + r * k, sizeof(bf16) * k);
  const int64_t out_bytes = as_float ? 4 : 2;
  const auto rows_at = [&](int64_t tile) {
    return tile >= copied_from ? &padded[static_cast<size_t>((tile - copied_from) * kTile * depth * kDepth)]
                               : x + tile * kTile * k;
  };
  const auto stride_of = [&](int64_t tile) { return (tile >= copied_from ? depth * kDepth : k) * 2; };
  const Pieces pieces = cut(m, all_pairs, depth, pool->threads());
  const int64_t row_pieces = (m + pieces.rows - 1) / pieces.rows;
  const int64_t pair_pieces = (all_pairs + pieces.pairs - 1) / pieces.pairs;
  // Neighbouring pieces have the same weights.
  parallel(row_pieces * pair_pieces, 1, [&](int64_t first_piece, int64_t last_piece) {
    configure_tiles(tile_rows);
    alignas(64) float results[4][kTile * kTile];
    for (int64_t piece = first_piece; piece < last_piece; ++piece) {
      const int64_t first_tile = piece % row_pieces * pieces.rows / kTile;
      const int64_t last_tile = std::min(row_tiles, first_tile + (pieces.rows + kTile - 1) / kTile);
      const int64_t first_pair = piece / row_pieces * pieces.pairs;
      for (int64_t pair = first_pair; pair < std::min(all_pairs, first_pair + pieces.pairs); ++pair) {
        const bf16* w0 = packed + pair * 2 * depth * kTileSize;
        const bf16* w1 = w0 + depth * kTileSize;
        for (int64_t tile = first_tile; tile < last_tile; tile += 2) {
          const bool two = tile + 1 < last_tile;
          const bf16* a = rows_at(tile);
          const bf16* b = two ? rows_at(tile + 1) : a;
          const int64_t a_stride = stride_of(tile), b_stride = stride_of(two ? tile + 1 : tile);
          if (two && tile == first_tile)
            multiply_pair<true, true>(a, a_stride, b, b_stride, w0, w1, depth);
          else if (two)
            multiply_pair<true, false>(a, a_stride, b, b_stride, w0, w1, depth);
          else if (tile == first_tile)
            multiply_pair<false, true>(a, a_stride, b, b_stride, w0, w1, depth);
          else
            multiply_pair<false, false>(a, a_stride, b, b_stride, w0, w1, depth);
          _tile_stored(0, results[0], 64);
          _tile_stored(1, results[1], 64);
          if (two) {
            _tile_stored(2, results[2], 64);
            _tile_stored(3, results[3], 64);
          }
          for (int i = 0; i < (two ? 2 : 1); ++i)
            for (int j = 0; j < 2; ++j) {
              const int64_t row = (tile + i) * kTile, column = (pair * 2 + j) * kTile;
              const int columns = static_cast<int>(std::min<int64_t>(kTile, n - column));
              if (columns <= 0)
                continue;
              write_tile(results[i * 2 + j], static_cast<int>(std::min<int64_t>(kTile, m - row)), columns,
                         bias ? bias + column : nullptr, static_cast<char*>(out) + (row * n + column) * out_bytes, n,
                         as_float);
            }
        }
      }
    }
    _tile_release();
  });
}

// Transposes 16 rows of 16 values of 32 bits.
inline void transpose(__m512i (&row)[16]) {
  __m512i other[16];
  for (int i = 0; i < 16; i += 2) {
    other[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      row[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
      row[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
    }
  // row[4 a + c] holds, in its quarter q, column 4 q + c of rows 4 a to 4 a + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(row[c], row[4 + c], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(row[c], row[4 + c], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0xee);
    other[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    other[4 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    other[8 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    other[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
  for (int i = 0; i < 16; ++i)
    row[i] = other[i];
}

// fast_exp of 16 values; a NaN stays one. `in_order` since the compiler may reorder sums, and would here and not there.
inline __m512 fast_exp(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
  const __m512 n = 
      _mm512_roundscale_ps(in_order(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f))), _MM_FROUND_TO_NEAREST_INT);
  const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f),
                                    _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x));
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = in_order(_mm512_add_ps(_mm512_fmadd_ps(in_order(_mm512_mul_ps(p, r)), r, r), _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

constexpr int kQueryTiles = 2;                 // of 16 queries, per work item
constexpr int kFew = 4;                        // queries of an item that has no more: a request's new token, mostly
constexpr int kKeyBlock = 128;                 // keys per step of the online softmax
constexpr int kKeyTiles = kKeyBlock / kTile;   // of 16 keys
constexpr int kKeyDepths = kKeyBlock / kDepth; // of 32 keys

// What a query tile's softmax has come to, by lanes: query i % Columns in lane i.
struct Softmax {
  __m512 top, total;
};

// Keys that one step looks at: where each is in its cache (values, theirs), in elements.
struct KeyBlock {
  int64_t at[kKeyBlock];
  int count;
};

template <int D> struct alignas(64) AttentionScratch {
  float scores[kKeyBlock * kTile];          // [keys][Columns]
  float product[4][kTile * kTile];          // [16 of D][queries][16]
  bf16 weights[kKeyDepths][kTileSize];      // [32 keys][queries][32]
  bf16 values[kKeyBlock * D];               // [32 keys][16 of D][16 pairs of keys][16][2]
  bf16 keys[kKeyBlock * D];                 // where pages do not hold whole tiles
  uint16_t sees[kKeyBlock];                 // lanes of a vector of scores whose query sees the key
  bf16 queries[kQueryTiles][kTile * D];     // [32 of D][16 pairs][16 queries][2]
  float sums[kQueryTiles][kTile * D];       // [queries][D]
};

// Tiles for Columns queries: 0, 1 scores; 4 and 7 keys, or values; 5 queries; 6 weights; 2, 3 sums of values.
template <int Columns> void configure_attention() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    const bool by_query = i == 2 || i == 3 || i == 6;
    config.rows[i] = by_query ? Columns : kTile;
    config.bytes_per_row[i] = i == 0 || i == 1 || i == 5 ? 4 * Columns : 64;
  }
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Pairs of neighbouring keys' values, as tiles want them; touches the keys on the way.
template <int D>
void pair_values(const bf16* k_cache, const bf16* v_cache, const KeyBlock& block, AttentionScratch<D>& at_hand) {
  // Quarters 0 and 1 of two vectors, or 2 and 3, one from each in turn.
  const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const int depths = (block.count + kDepth - 1) / kDepth;
  for (int t = 0; t < depths * kDepth; t += 2) {
    const bool some = t < block.count, both = t + 1 < block.count;
    const bf16* even = v_cache + (some ? block.at[t] : 0);
    const bf16* odd = v_cache + (both ? block.at[t + 1] : 0);
    if (both)
      for (int d = 0; d < D; d += kDepth) {
        _mm_prefetch(reinterpret_cast<const char*>(k_cache + block.at[t] + d), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(k_cache + block.at[t + 1] + d), _MM_HINT_T0);
      }
    const __mmask32 first_there = some ? ~0u : 0u, second_there = both ? ~0u : 0u;
    bf16* to = at_hand.values + t / kDepth * kDepth * D + t % kDepth / 2 * kDepth;
    for (int d = 0; d < D; d += kDepth) {
      const __m512i a = _mm512_maskz_loadu_epi16(first_there, even + d);
      const __m512i c = _mm512_maskz_loadu_epi16(second_there, odd + d);
      const __m512i low = _mm512_unpacklo_epi16(a, c), high = _mm512_unpackhi_epi16(a, c);
      _mm512_store_si512(to + d / kTile * kTileSize, _mm512_permutex2var_epi64(low, first_half, high));
      _mm512_store_si512(to + (d / kTile + 1) * kTileSize, _mm512_permutex2var_epi64(low, second_half, high));
    }
  }
}

// Scores of a block's keys: [keys][Columns]. Touches the next block's values.
template <int D, int Columns>
void score(const bf16* k_cache, int64_t stride, bool whole_tiles, const bf16* v_cache, const KeyBlock& block,
           const KeyBlock& next, const bf16* queries, AttentionScratch<D>& at_hand) {
  const int tiles = (block.count + kTile - 1) / kTile;
  const auto keys = [&](int tile) {
    return whole_tiles ? k_cache + block.at[tile * kTile] : at_hand.keys + tile * kTile * D;
  };
  const int64_t bytes = (whole_tiles ? stride : D) * 2;
  for (int tile = 0; tile < tiles; tile += 2) {
    const bool two = tile + 1 < tiles;
    const bf16 *first = keys(tile), *second = keys(two ? tile + 1 : tile);
    _tile_zero(0);
    _tile_zero(1);
    for (int d = 0; d < D / kDepth; ++d) {
      _tile_loadd(5, queries + d * kTileSize, 64);
      _tile_loadd(4, first + d * kDepth, bytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(7, second + d * kDepth, bytes);
      _tile_dpbf16ps(1, 7, 5);
    }
    float* to = at_hand.scores + tile * kTile * Columns;
    _tile_stored(0, to, 4 * Columns);
    if (two)
      _tile_stored(1, to + kTile * Columns, 4 * Columns);
    for (int t = tile * kTile; t < std::min((tile + 2) * kTile, next.count); ++t)
      for (int d = 0; d < D; d += kDepth)
        _mm_prefetch(reinterpret_cast<const char*>(v_cache + next.at[t] + d), _MM_HINT_T0);
  }
}

// Lane by lane of four quarters, in one order; the result in all of them.
template <typename Join> __m512 join_quarters(__m512 x, const Join& join) {
  x = join(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  return join(x, _mm512_shuffle_f32x4(x, x, 0x4e));
}

// From scores to weights, rounded to bfloat16; what sums so far are to be multiplied with. The sum of a query's weights
// is made of four, of every fourth key each: in this order for any number of columns.
template <int D, int Columns> __m512 weigh(int n, __m512 scale, Softmax& so_far, AttentionScratch<D>& at_hand) {
  constexpr int kKeys = kTile / Columns; // in a vector
  const int vectors = (n + kKeys - 1) / kKeys;
  const auto at = [&](int v) { return _mm512_load_ps(at_hand.scores + v * kTile); };
  __m512 highest[2] = {so_far.top, so_far.top};
  for (int v = 0; v < vectors; ++v)
    highest[v % 2] = _mm512_mask_max_ps(highest[v % 2], at_hand.sees[v], highest[v % 2], at(v));
  const auto larger = [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); };
  __m512 high = larger(highest[0], highest[1]);
  if constexpr (Columns == kFew)
    high = join_quarters(high, larger);
  __m512 sums[4] = {};
  const auto weight = [&](int v) {
    if (v >= vectors)
      return _mm512_setzero_ps();
    const __m512 e = fast_exp(in_order(_mm512_mul_ps(in_order(_mm512_sub_ps(at(v), high)), scale)));
    return _mm512_maskz_mov_ps(at_hand.sees[v], e);
  };
  for (int depth = 0; depth * kDepth < n; ++depth) {
    if constexpr (Columns == kFew) {
      const __m512i by_query = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      __m512 quarter[2][4]; // [16 keys][query]
      for (int half = 0; half < 2; ++half) {
        __m512 w[4];
        for (int i = 0; i < 4; ++i) {
          const __m512 p = weight(depth * 8 + half * 4 + i);
          sums[0] = in_order(_mm512_add_ps(sums[0], p));
          w[i] = _mm512_permutexvar_ps(by_query, p);
        }
        const __m512 low01 = _mm512_shuffle_f32x4(w[0], w[1], 0x44), high01 = _mm512_shuffle_f32x4(w[0], w[1], 0xee);
        const __m512 low23 = _mm512_shuffle_f32x4(w[2], w[3], 0x44), high23 = _mm512_shuffle_f32x4(w[2], w[3], 0xee);
        quarter[half][0] = _mm512_shuffle_f32x4(low01, low23, 0x88);
        quarter[half][1] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
        quarter[half][2] = _mm512_shuffle_f32x4(high01, high23, 0x88);
        quarter[half][3] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
      }
      for (int c = 0; c < kFew; ++c)
        _mm512_store_si512(at_hand.weights[depth] + c * kDepth,
                           (__m512i)_mm512_cvtne2ps_pbh(quarter[1][c], quarter[0][c]));
    } else {
      __m512i row[kTile];
      for (int p = 0; p < kTile; ++p) {
        const int t = depth * kDepth + 2 * p;
        const __m512 even = weight(t), odd = weight(t + 1);
        sums[2 * p % 4] = in_order(_mm512_add_ps(sums[2 * p % 4], even));
        sums[2 * p % 4 + 1] = in_order(_mm512_add_ps(sums[2 * p % 4 + 1], odd));
        const __m512i by_key = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        const __m512i swapped = _mm512_alignr_epi64(by_key, by_key, 4);
        const __m512i low = _mm512_unpacklo_epi16(by_key, swapped), high = _mm512_unpackhi_epi16(by_key, swapped);
        row[p] = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high);
      }
      transpose(row);
      for (int c = 0; c < kTile; ++c)
        _mm512_store_si512(at_hand.weights[depth] + c * kDepth, row[c]);
    }
  }
  const auto added = [](__m512 a, __m512 b) { return in_order(_mm512_add_ps(a, b)); };
  const __m512 sum = Columns == kFew ? join_quarters(sums[0], added)
                                     : added(added(sums[0], sums[1]), added(sums[2], sums[3]));
  // Where nothing has been seen yet, there is nothing to keep.
  const __mmask16 some = _mm512_cmp_ps_mask(so_far.total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  const __m512 keep = _mm512_maskz_mov_ps(some, fast_exp(in_order(_mm512_mul_ps(in_order(_mm512_sub_ps(so_far.top, high)), scale))));
  so_far = {high, _mm512_fmadd_ps(so_far.total, keep, sum)};
  return keep;
}

// sums[queries][D] = sums * keep + weights · values
template <int D, int Columns>
void add_values(int n, __m512 keep, int live, float* sums, AttentionScratch<D>& at_hand) {
  alignas(64) float kept[kTile];
  _mm512_store_ps(kept, keep);
  for (int d = 0; d < D; d += kDepth) {
    const bf16* values = at_hand.values + d / kTile * kTileSize;
    _tile_zero(2);
    _tile_zero(3);
    for (int depth = 0; depth * kDepth < n; ++depth, values += kDepth * D) {
      _tile_loadd(6, at_hand.weights[depth], 64);
      _tile_loadd(4, values, 64);
      _tile_dpbf16ps(2, 6, 4);
      _tile_loadd(7, values + kTileSize, 64);
      _tile_dpbf16ps(3, 6, 7);
    }
    float(*product)[kTile * kTile] = at_hand.product + d / kDepth % 2 * 2;
    _tile_stored(2, product[0], 64);
    _tile_stored(3, product[1], 64);
    for (int c = 0; c < live; ++c)
      for (int i = 0; i < 2; ++i) {
        float* to = sums + c * D + d + i * kTile;
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), _mm512_set1_ps(kept[c]),
                                            _mm512_load_ps(product[i] + c * kTile)));
      }
  }
}

// What native.cpp's `attention` computes; the weights of the values are rounded to bfloat16.
template <int D>
void attention_tiles(const bf16* q, int64_t q_stride, const bf16* k_cache, const bf16* v_cache,
                     const int32_t* page_table, int64_t pages_per_request, int page_size, const int32_t* table_row,
                     const int32_t* row_start, const int32_t* context, const uint8_t* mask, const int64_t* mask_start,
                     const int32_t* width, int64_t requests, int q_heads, int kv_heads, bf16* out) {
  static_assert(D % kDepth == 0);
  const int group = q_heads / kv_heads;
  const int at_once = std::min(group, kQueryTiles * kTile);                 // heads of an item
  const int most = group > at_once ? 1 : kQueryTiles * kTile / group;       // rows of an item
  const int64_t key_stride = static_cast<int64_t>(kv_heads) * D;
  const bool whole_tiles = page_size % kTile == 0;
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(D)));
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  struct Item {
    int32_t request, head, first, count, first_of_group, heads;
  };
  std::vector<Item> items;
  for (int64_t b = 0; b < requests; ++b) {
    const int rows = row_start[b + 1] - row_start[b];
    for (int first = 0; first < rows; first += most)
      for (int h = 0; h < kv_heads; ++h)
        for (int g = 0; g < group; g += at_once)
          items.push_back({static_cast<int32_t>(b), h, first, std::min(most, rows - first), g,
                           std::min(at_once, group - g)});
  }
  const auto end_of = [&](const Item& item) {
    const int columns = width ? width[item.request] : row_start[item.request + 1] - row_start[item.request];
    return context[item.request] + (mask_start[item.request] < 0 ? item.first + item.count : columns);
  };
  const auto find = [&](const Item& item, int start, KeyBlock& block) {
    const int32_t* pages = page_table + static_cast<int64_t>(table_row[item.request]) * pages_per_request;
    block.count = std::min(kKeyBlock, end_of(item) - start);
    int page = start / page_size, offset = start % page_size;
    for (int t = 0; t < block.count; ++t) {
      block.at[t] = (static_cast<int64_t>(pages[page]) * page_size + offset) * key_stride + item.head * D;
      if (++offset == page_size)
        offset = 0, ++page;
    }
  };
  // The heads of a request together, if there is enough to share out: their keys are neighbours in memory.
  const int64_t n_items = static_cast<int64_t>(items.size()), share = n_items / (8 * pool->threads());
  const int64_t grain = share < kv_heads ? 1 : share / kv_heads * kv_heads;
  parallel(n_items, grain, [&](int64_t first_item, int64_t last_item) {
    thread_local const auto scratch_here = std::make_unique<AttentionScratch<D>>();
    AttentionScratch<D>& at_hand = *scratch_here;
    KeyBlock blocks[2], *block = &blocks[0], *next = &blocks[1];
    find(items[first_item], 0, *next);
    int configured = 0;
    const auto attend = [&]<int Columns>(int64_t it) {
      if (configured != Columns)
        configure_attention<Columns>(), configured = Columns;
      const Item item = items[it];
      const int b = item.request, n_q = item.count * item.heads, tiles = (n_q + kTile - 1) / kTile;
      const int ctx = context[b], columns = width ? width[b] : row_start[b + 1] - row_start[b], end = end_of(item);
      const bool causal = mask_start[b] < 0;
      const auto row_of = [&](int j) { return item.first + std::min(j, n_q - 1) / item.heads; };
      const auto head_of = [&](int j) { return item.head * group + item.first_of_group + j % item.heads; };
      Softmax softmax[kQueryTiles];
      __m512i rows[kQueryTiles];
      for (int tile = 0; tile < tiles; ++tile) {
        for (int d = 0; d < D / kDepth; ++d) {
          __m512i row[kTile];
          for (int c = 0; c < kTile; ++c) {
            const int j = tile * kTile + c;
            const bf16* from = q + (row_start[b] + row_of(j)) * q_stride + head_of(j) * D + d * kDepth;
            row[c] = j < n_q ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
          }
          transpose(row);
          for (int p = 0; p < kTile; ++p)
            _mm512_store_si512(at_hand.queries[tile] + d * kTileSize + p * kDepth, row[p]);
        }
        alignas(64) int32_t lanes[kTile];
        for (int i = 0; i < kTile; ++i)
          lanes[i] = row_of(tile * kTile + i % Columns);
        rows[tile] = _mm512_load_si512(lanes);
        softmax[tile] = {lowest, _mm512_setzero_ps()};
        std::fill_n(at_hand.sums[tile], kTile * D, 0.0f);
      }
      for (int start = 0; start < end; start += kKeyBlock) {
        std::swap(block, next);
        if (start + kKeyBlock < end)
          find(item, start + kKeyBlock, *next);
        else if (it + 1 < last_item)
          find(items[it + 1], 0, *next);
        else
          next->count = 0;
        const int n = block->count;
        pair_values<D>(k_cache, v_cache, *block, at_hand);
        if (!whole_tiles)
          for (int t = 0; t < n; ++t)
            std::memcpy(at_hand.keys + t * D, k_cache + block->at[t], sizeof(bf16) * D);
        for (int tile = 0; tile < tiles; ++tile) {
          score<D, Columns>(k_cache, key_stride, whole_tiles, v_cache, *block, *next, at_hand.queries[tile], at_hand);
          // Vectors up to here are seen by all of the tile's queries.
          constexpr int kKeys = kTile / Columns;
          const int seen_by_all = std::min(n, ctx - start + (causal ? row_of(tile * kTile) + 1 : 0));
          const int vectors = (n + kKeys - 1) / kKeys, all = std::max(0, seen_by_all / kKeys);
          std::fill_n(at_hand.sees, all, static_cast<uint16_t>(0xffff));
          for (int v = all; v < vectors; ++v) {
            alignas(64) int32_t lanes[kTile];
            for (int i = 0; i < kTile; ++i)
              lanes[i] = start + v * kKeys + i / Columns - ctx; // the key's place behind the context
            const __m512i nodes = _mm512_load_si512(lanes);
            const __mmask16 there = _mm512_cmplt_epi32_mask(nodes, _mm512_set1_epi32(start + n - ctx));
            at_hand.sees[v] = there & _mm512_cmple_epi32_mask(nodes, rows[tile]);
            if (!causal) {
              at_hand.sees[v] = 0;
              for (int i = 0; i < kTile; ++i) {
                const int64_t row = row_of(tile * kTile + i % Columns);
                const bool seen = lanes[i] < 0 || (there >> i & 1 && mask[mask_start[b] + row * columns + lanes[i]]);
                at_hand.sees[v] |= static_cast<uint16_t>(seen << i);
              }
            }
          }
          const __m512 keep = weigh<D, Columns>(n, scale, softmax[tile], at_hand);
          add_values<D, Columns>(n, keep, std::min(Columns, n_q - tile * kTile), at_hand.sums[tile], at_hand);
        }
      }
      for (int j = 0; j < n_q; ++j) {
        alignas(64) float totals[kTile];
        _mm512_store_ps(totals, softmax[j / kTile].total);
        const float total = totals[j % kTile];
        const __m512 inverse = _mm512_set1_ps(total == 0.0f ? 0.0f : 1.0f / total);
        bf16* to = out + (row_start[b] + row_of(j)) * static_cast<int64_t>(q_heads) * D + head_of(j) * D;
        const float* from = at_hand.sums[j / kTile] + j % kTile * D;
        for (int d = 0; d < D; d += kTile)
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d),
                              (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_load_ps(from + d), inverse)));
      }
    };
    for (int64_t it = first_item; it < last_item; ++it)
      if (items[it].count * items[it].heads <= kFew)
        attend.template operator()<kFew>(it);
      else
        attend.template operator()<kTile>(it);
    _tile_release();
  });
}

} // namespace

#endif
