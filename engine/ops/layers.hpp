// All layers of a model in one call: the same kernels in the same order as engine/model/llama.py calls them, without
// some three hundred calls from Python. Included by native.cpp, behind its kernels.

#pragma once

namespace {

// What engine/ops/fused.py fills in; field by field the same there.
struct LinearRef {
  int64_t kind; // see Kind; kTiles: packed for matrix tiles
  int64_t n, k;
  const void* weights;
  const float* bias;
};

struct LayerRef {
  const void *attention_norm, *mlp_norm;
  LinearRef qkv, out, gate_up, down;
};

// Adds up data[count] over all ranks (kind: 0 float, 1 bfloat16); not 0: it failed, and so does the forward.
using ReduceHook = int (*)(void* group, void* data, int64_t count, int kind);

struct StackRef {
  const LayerRef* layers;
  int64_t count, q_heads, kv_heads, dim;
  const void* final_norm;
  const float *cos_table, *sin_table;
  double eps;
  ReduceHook all_reduce; // null: the layers are whole
  void* group;
};

struct RowsRef {
  int64_t rows, requests, pages_per_request, page_size;
  const int32_t *positions, *page_table, *table_row, *row_start, *context, *mask_width;
  const int64_t *slots, *mask_start;
  const uint8_t* mask;
  void *k_cache, *v_cache; // of the first layer; the others follow at this distance, in elements
  int64_t cache_stride;
};

constexpr int64_t kTiles = 3;

template <typename T> void run(const LinearRef& linear_ref, const T* x, int64_t m, T* out) {
  const auto& l = linear_ref;
  if (l.kind == kTiles) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bf16>)
      linear_bf16(x, m, l.k, static_cast<const bf16*>(l.weights), l.n, l.bias, out, false);
#endif
    return;
  }
#if ST_LANES
  linear<T, T>(static_cast<Kind>(l.kind), x, m, l.k, l.weights, l.n, l.bias, out);
#endif
}

// residual [rows, H] becomes the last layer's output, normed [rows, H] the final normalisation of it; features
// [rows, wanted_count, H] get the outputs of the wanted layers. 1: no attention kernel for these heads. 2: the ranks'
// parts could not be added up.
template <typename T>
int forward(const StackRef& stack, const RowsRef& v, T* residual, T* normed, const int32_t* wanted,
            int64_t wanted_count, T* features) {
  const LayerRef& first = stack.layers[0];
  const int64_t rows = v.rows, hidden = first.qkv.k, inner = first.down.k, mixed_width = first.out.k;
  thread_local std::vector<T> qkv, mixed, added, gate_up, activated;
  qkv.resize(rows * first.qkv.n), mixed.resize(rows * mixed_width), added.resize(rows * hidden);
  gate_up.resize(rows * first.gate_up.n), activated.resize(rows * inner);
  const auto eps = static_cast<float>(stack.eps);
  const int q_heads = static_cast<int>(stack.q_heads), kv_heads = static_cast<int>(stack.kv_heads);
  const int dim = static_cast<int>(stack.dim);
  const auto whole = [&](std::vector<T>& part) {
    return stack.all_reduce == nullptr ||
           stack.all_reduce(stack.group, part.data(), rows * hidden, std::is_same_v<T, bf16>) == 0;
  };
  rms_norm<T>(nullptr, residual, static_cast<const T*>(first.attention_norm), normed, rows, hidden, eps);
  for (int64_t i = 0; i < stack.count; ++i) {
    const LayerRef& layer = stack.layers[i];
    T* k_cache = static_cast<T*>(v.k_cache) + i * v.cache_stride;
    T* v_cache = static_cast<T*>(v.v_cache) + i * v.cache_stride;
    run<T>(layer.qkv, normed, rows, qkv.data());
    rope_store<T>(qkv.data(), rows, q_heads, kv_heads, dim, stack.cos_table, stack.sin_table, v.positions, v.slots,
                  k_cache, v_cache);
    if (attention_any<T>(qkv.data(), layer.qkv.n, k_cache, v_cache, v.page_table, v.pages_per_request,
                         static_cast<int>(v.page_size), v.table_row, v.row_start, v.context, v.mask, v.mask_start,
                         v.mask_width, v.requests, q_heads, kv_heads, dim, mixed.data()))
      return 1;
    run<T>(layer.out, mixed.data(), rows, added.data());
    if (!whole(added))
      return 2;
    rms_norm<T>(added.data(), residual, static_cast<const T*>(layer.mlp_norm), normed, rows, hidden, eps);
    run<T>(layer.gate_up, normed, rows, gate_up.data());
    silu_mul<T>(gate_up.data(), activated.data(), rows, inner);
    run<T>(layer.down, activated.data(), rows, added.data());
    if (!whole(added))
      return 2;
    const void* next = i + 1 < stack.count ? stack.layers[i + 1].attention_norm : stack.final_norm;
    rms_norm<T>(added.data(), residual, static_cast<const T*>(next), normed, rows, hidden, eps);
    for (int64_t w = 0; w < wanted_count; ++w)
      if (wanted[w] == i)
        for (int64_t r = 0; r < rows; ++r)
          std::memcpy(features + (r * wanted_count + w) * hidden, residual + r * hidden, sizeof(T) * hidden);
  }
  return 0;
}

} // namespace
