// Tokens from rows of logits: the likeliest ones, and draws by inverse transform with a given coin.
//
// A row's result never depends on other rows. Sums are taken by blocks of fixed length, so that their order is fixed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "numbers.hpp"
#include "pool.hpp"

namespace {

constexpr int64_t kBlock = 64; // logits that are summed, or passed over, together

// The index of the largest logit (the first of equals); -1 where the row holds a NaN.
inline int64_t largest(const float* row, int64_t vocab) {
  float high = -std::numeric_limits<float>::infinity();
  int64_t bad = 0;
#pragma omp simd reduction(max : high) reduction(+ : bad)
  for (int64_t i = 0; i < vocab; ++i) {
    high = row[i] > high ? row[i] : high;
    bad += row[i] != row[i];
  }
  if (bad == 0)
    for (int64_t i = 0; i < vocab; ++i)
      if (row[i] == high)
        return i;
  return -1;
}

// exp((x - high) * steepness) where that is at least `floor`, else nothing.
inline float weight_of(float x, float high, float steepness, float floor) {
  const float exponent = (x - high) * steepness;
  const float weight = fast_exp(exponent);
  return exponent < -86.0f || weight < floor ? 0.0f : weight;
}

// How a row is to be drawn from; see engine.ops.sampling.choose.
struct Wish {
  double temperature, top_p, coin, min_p;
  int64_t top_k;
};

// What one row needs, kept for the next.
struct Scratch {
  std::vector<float> weights, highest; // of each token; the largest of each block
  std::vector<double> sums;            // of each block
  std::vector<std::pair<float, int64_t>> head; // logits and tokens of one bucket, best first
  std::vector<int64_t> counts;                 // of each bucket
  std::vector<double> masses;
};

// The first of n weights at which `sum` plus theirs exceeds `aim`, else the last; never one of weight zero.
template <typename Weight> int64_t place(int64_t n, double aim, const Weight& weight, double sum) {
  int64_t last = -1;
  for (int64_t i = 0; i < n; ++i) {
    const double w = weight(i);
    sum += w;
    if (w > 0.0)
      last = i;
    if (sum > aim && w > 0.0)
      return i;
  }
  return last;
}

inline int64_t draw_from_all(int64_t vocab, double coin, double total, const Scratch& s) {
  const double aim = coin * total;
  double before = 0.0;
  int64_t last = -1; // the last block that holds anything; the largest logit's does
  for (size_t b = 0; b < s.sums.size(); ++b) {
    if (s.sums[b] <= 0.0)
      continue;
    if (last >= 0)
      before += s.sums[last];
    last = static_cast<int64_t>(b);
    if (before + s.sums[b] > aim)
      break;
  }
  const int64_t first = last * kBlock;
  return first +
         place(std::min(kBlock, vocab - first), aim, [&](int64_t i) { return s.weights[first + i]; }, before);
}

// Weights whose upper 16 bits are alike share a bucket; none is above 1.
constexpr uint32_t kBuckets = 0x3f81;

inline uint32_t bucket_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, 4);
  return std::min(bits >> 16, kBuckets - 1);
}

// Calls visit(i) for every token whose weight is above `least`.
template <typename Visit> void above(const Scratch& s, int64_t vocab, float least, const Visit& visit) {
  for (size_t b = 0; b < s.sums.size(); ++b) {
    if (s.highest[b] <= least)
      continue;
    const int64_t end = std::min(vocab, static_cast<int64_t>(b + 1) * kBlock);
    for (int64_t i = static_cast<int64_t>(b) * kBlock; i < end; ++i)
      if (s.weights[i] > least)
        visit(i);
  }
}

// Draws from the likeliest tokens: at most top_k of them, and of those the fewest that hold the share top_p.
//
// Sorting a vocabulary takes milliseconds. The order matters within two buckets alone: where the kept ones end, and
// where the coin falls.
inline int64_t draw_from_head(const float* row, int64_t vocab, const Wish& wish, double total, Scratch& s) {
  const bool counted = wish.top_k > 0 && wish.top_k < vocab;
  const int64_t most = counted ? wish.top_k : vocab;
  for (const float least : {1e-3f, 0.0f}) { // weights near the largest, which is 1, nearly always suffice
    int64_t count = 0;
    double mass = 0.0;
    s.counts.assign(kBuckets, 0), s.masses.assign(kBuckets, 0.0);
    above(s, vocab, least, [&](int64_t i) {
      const uint32_t bucket = bucket_of(s.weights[i]);
      ++s.counts[bucket], s.masses[bucket] += s.weights[i];
      ++count, mass += s.weights[i];
    });
    // Without the last bucket of this look, of which it may have passed some over.
    if (counted ? count >= most + s.counts[bucket_of(least)] : mass - s.masses[bucket_of(least)] > wish.top_p * total)
      break;
  }
  const auto sort_bucket = [&](int64_t bucket) {
    const uint32_t bits = static_cast<uint32_t>(bucket) << 16;
    float least;
    std::memcpy(&least, &bits, 4);
    s.head.clear();
    above(s, vocab, std::nextafter(least, -1.0f), [&](int64_t i) {
      if (bucket_of(s.weights[i]) == static_cast<uint32_t>(bucket))
        s.head.emplace_back(row[i], i);
    });
    std::sort(s.head.begin(), s.head.end(),
              [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
  };
  // Takes from the likeliest down while fewer than `most` are taken and their mass is below `enough`: the bucket in which
  // that ends, how many of it are taken, and the mass of all.
  struct End {
    int64_t bucket, taken;
    double mass;
  };
  const auto take = [&](double enough) {
    int64_t taken = 0;
    double mass = 0.0;
    for (int64_t bucket = kBuckets - 1; bucket >= 0; --bucket) {
      if (s.counts[bucket] == 0)
        continue;
      if (taken + s.counts[bucket] < most && mass + s.masses[bucket] < enough) {
        taken += s.counts[bucket], mass += s.masses[bucket];
        continue;
      }
      sort_bucket(bucket);
      int64_t of_this = 0;
      while (of_this < s.counts[bucket] && taken < most && (taken == 0 || mass < enough))
        mass += s.weights[s.head[of_this++].second], ++taken;
      return End{bucket, of_this, mass};
    }
    return End{0, 0, mass}; // all of them
  };
  constexpr double kAll = std::numeric_limits<double>::infinity();
  const double whole = counted ? take(kAll).mass : total; // top-p is a share of what top-k left
  const End end = take(wish.top_p < 1.0 ? wish.top_p * whole : kAll);
  const double aim = wish.coin * end.mass;
  double before = 0.0;
  int64_t last = -1, limit = 0;
  for (int64_t bucket = kBuckets - 1; bucket >= end.bucket; --bucket) {
    const int64_t n = bucket == end.bucket ? end.taken : s.counts[bucket];
    if (n == 0)
      continue;
    if (last >= 0)
      before += s.masses[last];
    last = bucket, limit = n;
    if (before + s.masses[bucket] > aim)
      break;
  }
  sort_bucket(last);
  return s.head[place(limit, aim, [&](int64_t i) { return s.weights[s.head[i].second]; }, before)].second;
}

inline int64_t draw(const float* row, int64_t vocab, const Wish& wish, Scratch& s) {
  const int64_t best = largest(row, vocab);
  if (best < 0 || !(wish.temperature > 0.0) || wish.top_k == 1 || std::isinf(row[best]))
    return best;
  const float high = row[best];
  // However small the temperature, the largest logit's exponent stays 0.
  const float steepness = static_cast<float>(std::min(1.0 / wish.temperature, 1e30));
  const int64_t blocks = (vocab + kBlock - 1) / kBlock;
  s.weights.resize(vocab), s.sums.resize(blocks), s.highest.resize(blocks);
  const float floor = static_cast<float>(wish.min_p);
  double total = 0.0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = b * kBlock, n = std::min(kBlock, vocab - first);
    float sum = 0.0f, most = 0.0f;
#pragma omp simd reduction(+ : sum) reduction(max : most)
    for (int64_t i = 0; i < n; ++i) {
      const float w = weight_of(row[first + i], high, steepness, floor);
      s.weights[first + i] = w;
      sum += w;
      most = w > most ? w : most;
    }
    s.sums[b] = sum, s.highest[b] = most, total += sum;
  }
  if ((wish.top_k > 0 && wish.top_k < vocab) || wish.top_p < 1.0)
    return draw_from_head(row, vocab, wish, total, s);
  return draw_from_all(vocab, wish.coin, total, s);
}

// Log-probabilities and indices of a row's k largest logits, best first, of equals the first; NaN where it holds one.
inline void likeliest(const float* row, int64_t vocab, int k, double* scores, int64_t* index) {
  const int64_t best = largest(row, vocab);
  if (best < 0) {
    for (int j = 0; j < k; ++j)
      scores[j] = std::numeric_limits<double>::quiet_NaN(), index[j] = j;
    return;
  }
  const float high = row[best];
  double total = 0.0;
  int held = 0;
  for (int64_t first = 0; first < vocab; first += kBlock) {
    const int64_t n = std::min(kBlock, vocab - first);
    float sum = 0.0f, most = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(+ : sum) reduction(max : most)
    for (int64_t i = 0; i < n; ++i) {
      sum += fast_exp(row[first + i] - high);
      most = row[first + i] > most ? row[first + i] : most;
    }
    total += sum;
    if (held == k && !(most > scores[k - 1]))
      continue;
    for (int64_t i = first; i < first + n; ++i) {
      if (held == k && !(row[i] > scores[k - 1]))
        continue;
      int j = held < k ? held++ : k - 1;
      for (; j > 0 && row[i] > scores[j - 1]; --j)
        scores[j] = scores[j - 1], index[j] = index[j - 1];
      scores[j] = row[i], index[j] = i;
    }
  }
  const double log_total = high + std::log(total);
  for (int j = 0; j < k; ++j)
    scores[j] -= log_total;
}

} // namespace
