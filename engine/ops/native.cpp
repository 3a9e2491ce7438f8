// CPU kernels of the engine: what a decode step does besides bookkeeping.
//
// Compiled on first use by engine/ops/native.py with the instruction sets this machine names. Every kernel exists for
// float and for bfloat16 (kept as uint16_t). A row's result never depends on which other rows are in the batch, nor on
// the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "choose.hpp"
#include "linear.hpp"
#include "numbers.hpp"
#include "pool.hpp"
#include "tiles.hpp"

namespace {

// residual += x (when x is given), out = residual / rms(residual) * weight.
template <typename T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t dim, float eps) {
  parallel(rows, 16, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      T* res = residual + r * dim;
      T* o = out + r * dim;
      if (x != nullptr) {
        const T* delta = x + r * dim;
#pragma omp simd
        for (int64_t i = 0; i < dim; ++i)
          store(&res[i], load(res[i]) + load(delta[i]));
      }
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < dim; ++i)
        sum += load(res[i]) * load(res[i]);
      const float scale = 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
#pragma omp simd
      for (int64_t i = 0; i < dim; ++i)
        store(&o[i], load(res[i]) * scale * load(weight[i]));
    }
  });
}

template <typename T> void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t dim) {
  parallel(rows, 8, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const T* gate = gate_up + r * 2 * dim;
      const T* up = gate + dim;
      T* o = out + r * dim;
#pragma omp simd
      for (int64_t i = 0; i < dim; ++i) {
        const float g = load(gate[i]);
        store(&o[i], g / (1.0f + fast_exp(std::min(-g, 87.0f))) * load(up[i]));
      }
    }
  });
}

// Rotates q in place (half-split convention) and writes rotated k, and v, to their cache slots.
template <typename T>
void rope_store(T* qkv, int64_t rows, int q_heads, int kv_heads, int dim, const float* cos_table,
                const float* sin_table, const int32_t* positions, const int64_t* slots, T* k_cache, T* v_cache) {
  const int64_t width = static_cast<int64_t>(q_heads + 2 * kv_heads) * dim;
  const int half = dim / 2;
  parallel(rows, 16, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float* c = cos_table + static_cast<int64_t>(positions[r]) * half;
      const float* s = sin_table + static_cast<int64_t>(positions[r]) * half;
      T* row = qkv + r * width;
      T* k_out = k_cache + slots[r] * kv_heads * dim;
      T* v_out = v_cache + slots[r] * kv_heads * dim;
      for (int h = 0; h < q_heads + kv_heads; ++h) {
        T* head = row + h * dim;
        T* to = h < q_heads ? head : k_out + (h - q_heads) * dim;
#pragma omp simd
        for (int i = 0; i < half; ++i) {
          const float a = load(head[i]), b = load(head[i + half]);
          store(&to[i], a * c[i] - b * s[i]);
          store(&to[i + half], b * c[i] + a * s[i]);
        }
      }
      std::memcpy(v_out, row + static_cast<int64_t>(q_heads + kv_heads) * dim, sizeof(T) * kv_heads * dim);
    }
  });
}

constexpr int kRowTile = 8;      // query rows per work item
constexpr int kTokenBlock = 128; // keys per step of the online softmax

// Attention of ragged query rows over paged keys. Request b owns rows row_start[b] … row_start[b+1]-1; they see its
// first context[b] tokens, and of the keys behind them what `mask` allows ([rows, width[b]] bytes at mask_start[b];
// square without `width`). Where mask_start[b] < 0 those are the rows' own, and causal.
template <typename T, int D>
void attention(const T* q, int64_t q_stride, const T* k_cache, const T* v_cache, const int32_t* page_table,
               int64_t pages_per_request, int page_size, const int32_t* table_row, const int32_t* row_start,
               const int32_t* context, const uint8_t* mask, const int64_t* mask_start, const int32_t* width,
               int64_t requests, int q_heads, int kv_heads, T* out) {
  const int group = q_heads / kv_heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  struct Item {
    int32_t request, head, first, count;
  };
  std::vector<Item> items;
  for (int64_t b = 0; b < requests; ++b) {
    const int rows = row_start[b + 1] - row_start[b];
    for (int first = 0; first < rows; first += kRowTile)
      for (int h = 0; h < kv_heads; ++h)
        items.push_back({static_cast<int32_t>(b), h, first, std::min(kRowTile, rows - first)});
  }
  const int64_t n_items = static_cast<int64_t>(items.size());
  parallel(n_items, 1, [&](int64_t first_item, int64_t last_item) {
    const int most = kRowTile * group;
    thread_local std::vector<float> query, acc, scores, top, total;
    query.resize(static_cast<size_t>(most) * D), acc.resize(static_cast<size_t>(most) * D);
    scores.resize(static_cast<size_t>(most) * kTokenBlock), top.resize(most), total.resize(most);
    const T* v_rows[kTokenBlock];
    for (int64_t it = first_item; it < last_item; ++it) {
      const Item item = items[it];
      const int b = item.request, h = item.head, n_q = item.count * group;
      const int ctx = context[b], columns = width ? width[b] : row_start[b + 1] - row_start[b];
      const int32_t* pages = page_table + static_cast<int64_t>(table_row[b]) * pages_per_request;
      const bool causal = mask_start[b] < 0;
      for (int i = 0; i < item.count; ++i)
        for (int g = 0; g < group; ++g) {
          const T* from = q + (row_start[b] + item.first + i) * q_stride + (h * group + g) * D;
          float* to = &query[(i * group + g) * D];
          for (int d = 0; d < D; ++d)
            to[d] = load(from[d]) * scale;
        }
      std::fill(acc.begin(), acc.begin() + static_cast<size_t>(n_q) * D, 0.0f);
      std::fill(top.begin(), top.begin() + n_q, -std::numeric_limits<float>::infinity());
      std::fill(total.begin(), total.begin() + n_q, 0.0f);
      const int end = causal ? ctx + item.first + item.count : ctx + columns;
      for (int start = 0; start < end; start += kTokenBlock) {
        const int n = std::min(kTokenBlock, end - start);
        for (int t = 0; t < n; ++t) {
          const int at = start + t;
          const int64_t slot = static_cast<int64_t>(pages[at / page_size]) * page_size + at % page_size;
          const T* k = k_cache + (slot * kv_heads + h) * D;
          v_rows[t] = v_cache + (slot * kv_heads + h) * D;
          float key[D];
#pragma omp simd
          for (int d = 0; d < D; ++d)
            key[d] = load(k[d]);
          for (int j = 0; j < n_q; ++j) {
            const float* qq = &query[j * D];
            float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (int d = 0; d < D; ++d)
              dot += qq[d] * key[d];
            scores[j * kTokenBlock + t] = dot;
          }
        }
        for (int j = 0; j < n_q; ++j) {
          float* s = &scores[j * kTokenBlock];
          const int row = item.first + j / group;
          for (int t = std::max(0, ctx - start); t < n; ++t) {
            const int node = start + t - ctx;
            const bool seen =
                causal ? node <= row : mask[mask_start[b] + static_cast<int64_t>(row) * columns + node] != 0;
            if (!seen)
              s[t] = -std::numeric_limits<float>::infinity();
          }
          // The rest of the block, so that the sums below have one length and with it one order: a row must not be able
          // to tell how many rows it was computed with.
          std::fill(s + n, s + kTokenBlock, -std::numeric_limits<float>::infinity());
          float high = top[j];
          for (int t = 0; t < n; ++t)
            high = std::max(high, s[t]);
          if (high == -std::numeric_limits<float>::infinity()) {
            std::fill(s, s + n, 0.0f);
            continue;
          }
          float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
          for (int t = 0; t < kTokenBlock; ++t) {
            // A masked key must weigh exactly nothing; fast_exp clamps and would leave 1e-38.
            s[t] = s[t] < -1e30f ? 0.0f : fast_exp(s[t] - high);
            sum += s[t];
          }
          if (high != top[j]) {
            const float keep = total[j] > 0.0f ? fast_exp(top[j] - high) : 0.0f;
            total[j] *= keep;
            for (int d = 0; d < D; ++d)
              acc[j * D + d] *= keep;
            top[j] = high;
          }
          total[j] += sum;
        }
        for (int t = 0; t < n; ++t) {
          float value[D];
#pragma omp simd
          for (int d = 0; d < D; ++d)
            value[d] = load(v_rows[t][d]);
          for (int j = 0; j < n_q; ++j) {
            const float p = scores[j * kTokenBlock + t];
            float* a = &acc[j * D];
#pragma omp simd
            for (int d = 0; d < D; ++d)
              a[d] += p * value[d];
          }
        }
      }
      for (int j = 0; j < n_q; ++j) {
        const float inverse = total[j] > 0.0f ? 1.0f / total[j] : 0.0f;
        T* to = out + (row_start[b] + item.first + j / group) * static_cast<int64_t>(q_heads) * D +
                (h * group + j % group) * D;
        for (int d = 0; d < D; ++d)
          store(&to[d], acc[j * D + d] * inverse);
      }
    }
  });
}

template <typename T>
int attention_any(const T* q, int64_t q_stride, const T* k, const T* v, const int32_t* page_table, int64_t ppr,
                  int page_size, const int32_t* table_row, const int32_t* row_start, const int32_t* context,
                  const uint8_t* mask, const int64_t* mask_start, const int32_t* width, int64_t requests, int q_heads,
                  int kv_heads, int dim, T* out) {
#if defined(__AMX_BF16__)
#define ST_TILES(D)                                                                                                    \
  if constexpr (std::is_same_v<T, bf16> && D % kDepth == 0)                                                            \
    if (tiles_granted()) {                                                                                             \
      attention_tiles<D>(q, q_stride, k, v, page_table, ppr, page_size, table_row, row_start, context, mask,           \
                         mask_start, width, requests, q_heads, kv_heads, out);                                         \
      return 0;                                                                                                        \
    }
#else
#define ST_TILES(D)
#endif
#define ST_CASE(D)                                                                                                     \
  case D:                                                                                                              \
    ST_TILES(D)                                                                                                              \
    attention<T, D>(q, q_stride, k, v, page_table, ppr, page_size, table_row, row_start, context, mask, mask_start,    \
                    width, requests, q_heads, kv_heads, out);                                                          \
    return 0;
  switch (dim) {
    ST_CASE(8)
    ST_CASE(16)
    ST_CASE(32)
    ST_CASE(64)
    ST_CASE(80)
    ST_CASE(96)
    ST_CASE(128)
    ST_CASE(256)
  }
#undef ST_CASE
#undef ST_TILES
  return 1;
}

} // namespace

#include "layers.hpp"
#include "shared.hpp"

extern "C" {

// How many threads share the work from now on, the caller included. Not while a kernel runs.
void st_set_threads(int threads) { pool = std::make_unique<Pool>(threads); }

// 1 where bfloat16 linears may use matrix tiles: compiled in, and the system grants the register state.
int st_tiles() {
#if defined(__AMX_BF16__)
  return tiles_granted() ? 1 : 0;
#else
  return 0;
#endif
}

// Size, in bfloat16 values, of a packed [n, k] weight.
int64_t st_packed_size(int64_t n, int64_t k) { return ((n + 31) / 32) * 2 * ((k + 31) / 32) * 512; }

// Lays W[n, k] out as tiles [n/16][k/32][16 pairs of k][16 n][2], zeros where it does not fill them.
void st_pack_bf16(const uint16_t* w, uint16_t* out, int64_t n, int64_t k) {
  const int64_t tiles = ((n + 31) / 32) * 2, depth = (k + 31) / 32;
  parallel(tiles, 64, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for (int64_t d = 0; d < depth; ++d)
        for (int64_t p = 0; p < 16; ++p)
          for (int64_t c = 0; c < 16; ++c)
            for (int64_t i = 0; i < 2; ++i) {
              const int64_t column = t * 16 + c, row = d * 32 + p * 2 + i;
              out[((t * depth + d) * 16 + p) * 32 + c * 2 + i] = column < n && row < k ? w[column * k + row] : 0;
            }
  });
}

void st_linear_tiles(const uint16_t* x, int64_t m, int64_t k, const uint16_t* packed, int64_t n, const float* bias,
                     void* out, int as_float) {
#if defined(__AMX_BF16__)
  linear_bf16(x, m, k, packed, n, bias, out, as_float != 0);
#else
  (void)x, (void)m, (void)k, (void)packed, (void)n, (void)bias, (void)out, (void)as_float;
#endif
}

// Which linear kernels are compiled in: 0 none, else the lanes of their vectors.
int st_lanes() { return ST_LANES; }

// Size in bytes of a packed [n, k] weight of this kind (see Kind).
int64_t st_linear_size(int kind, int64_t n, int64_t k) {
#if ST_LANES
  if (static_cast<Kind>(kind) == Kind::kBf16)
    return wide_size(n, k) * 2;
#endif
  return ceil_div(n, kColumns) * ceil_div(k, kGroup) * group_bytes(static_cast<Kind>(kind));
}

void st_pack_wide(const uint16_t* w, uint16_t* out, int64_t n, int64_t k) {
#if ST_LANES
  pack_wide(w, out, n, k);
#else
  (void)w, (void)out, (void)n, (void)k;
#endif
}

void st_pack_groups(int kind, const uint8_t* numbers, const uint16_t* scale, const uint16_t* minimum, uint8_t* out,
                    int64_t n, int64_t groups) {
  pack_groups(static_cast<Kind>(kind), numbers, scale, minimum, out, n, groups);
}

#if ST_LANES
#define ST_LINEAR(T)                                                                                                   \
  if (as_float)                                                                                                        \
    linear<T, float>(static_cast<Kind>(kind), x, m, k, weights, n, bias, static_cast<float*>(out));                    \
  else                                                                                                                 \
    linear<T, T>(static_cast<Kind>(kind), x, m, k, weights, n, bias, static_cast<T*>(out));
#else
#define ST_LINEAR(T)                                                                                                   \
  (void)kind, (void)x, (void)m, (void)k, (void)weights, (void)n, (void)bias, (void)out, (void)as_float;
#endif

#define ST_TYPED(NAME, T)                                                                                              \
  void st_linear_##NAME(int kind, const T* x, int64_t m, int64_t k, const void* weights, int64_t n, const float* bias, \
                        void* out, int as_float) {                                                                     \
    ST_LINEAR(T)                                                                                                       \
  }                                                                                                                    \
  void st_rms_norm_##NAME(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t dim, float eps) {    \
    rms_norm<T>(x, residual, weight, out, rows, dim, eps);                                                             \
  }                                                                                                                    \
  void st_silu_mul_##NAME(const T* gate_up, T* out, int64_t rows, int64_t dim) {                                       \
    silu_mul<T>(gate_up, out, rows, dim);                                                                              \
  }                                                                                                                    \
  void st_rope_store_##NAME(T* qkv, int64_t rows, int q_heads, int kv_heads, int dim, const float* cos_table,          \
                            const float* sin_table, const int32_t* positions, const int64_t* slots, T* k_cache,        \
                            T* v_cache) {                                                                              \
    rope_store<T>(qkv, rows, q_heads, kv_heads, dim, cos_table, sin_table, positions, slots, k_cache, v_cache);        \
  }                                                                                                                    \
  int st_forward_##NAME(const StackRef* stack, const RowsRef* rows, T* residual, T* normed, const int32_t* wanted,     \
                        int64_t wanted_count, T* features) {                                                           \
    return forward<T>(*stack, *rows, residual, normed, wanted, wanted_count, features);                                \
  }                                                                                                                    \
  int st_attention_##NAME(                                                                                             \
      const T* q, int64_t q_stride, const T* k, const T* v, const int32_t* page_table, int64_t pages_per_request,      \
      int page_size, const int32_t* table_row, const int32_t* row_start, const int32_t* context, const uint8_t* mask,  \
      const int64_t* mask_start, const int32_t* width, int64_t requests, int q_heads, int kv_heads, int dim, T* out) { \
    return attention_any<T>(q, q_stride, k, v, page_table, pages_per_request, page_size, table_row, row_start,         \
                            context, mask, mask_start, width, requests, q_heads, kv_heads, dim, out);                  \
  }

ST_TYPED(f32, float)
ST_TYPED(bf16, uint16_t)

void st_argmax(const float* logits, int64_t rows, int64_t vocab, int64_t* out) {
  parallel(rows, 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      out[r] = largest(logits + r * vocab, vocab);
  });
}

void st_choose(const float* logits, int64_t rows, int64_t vocab, const double* temperature, const int64_t* top_k,
               const double* top_p, const double* coin, const double* min_p, int64_t* out) {
  parallel(rows, 1, [&](int64_t first, int64_t last) {
    thread_local Scratch scratch;
    for (int64_t r = first; r < last; ++r)
      out[r] = draw(logits + r * vocab, vocab, {temperature[r], top_p[r], coin[r], min_p[r], top_k[r]}, scratch);
  });
}

void st_likeliest(const float* logits, int64_t rows, int64_t vocab, int k, double* scores, int64_t* index) {
  parallel(rows, 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      likeliest(logits + r * vocab, vocab, k, scores + r * k, index + r * k);
  });
}

} // extern "C"
