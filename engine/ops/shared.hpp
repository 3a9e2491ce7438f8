// Collectives between processes that share one memory segment. Included by native.cpp; see engine/collectives/shm.py.
//
// Operations are numbered from 1 and every rank runs the same ones in the same order. For operation k a rank puts its
// data into its own slot k % 2 and then publishes k; when a peer shows k, its data may be read. Nobody writes slot k % 2
// for operation k + 2 before everybody has published k + 1, that is, has read k: two slots are enough, and no barrier
// ends an operation. Everybody adds the slots of all ranks in the order of the ranks, so all get the same bits.
//
// Publishing is a release store and looking an acquire load, which orders the data on x86 and ARM alike.

#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>

#include "numbers.hpp"
#include "pool.hpp"

namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "atomics between processes must be free of locks");

enum class Op : int64_t { kAllReduce = 0, kAllGather = 1, kBroadcast = 2 };
constexpr int kOps = 3;
enum class Failure : int32_t { kNone = 0, kTimeout = 1, kLost = 2, kDisagree = 3 };

constexpr int64_t kSumBlock = 1024;

struct Said {
  int64_t op, bytes;
};

// In the segment, one per rank.
struct RankState {
  alignas(64) std::atomic<uint64_t> published;
  alignas(64) Said said[2]; // what it takes the operation to be, by slot
};

// In the segment, at its beginning.
struct SharedState {
  alignas(64) std::atomic<int32_t> lost; // 1 + a rank that has died; 0: none that is known of
};

struct Totals {
  int64_t calls, bytes, nanoseconds, slowest;
};

inline int64_t now_ns() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1000000000LL + at.tv_nsec;
}

constexpr int64_t up_to_page(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

inline int64_t segment_bytes(int64_t ranks, int64_t slot_bytes) {
  return up_to_page(sizeof(SharedState) + ranks * sizeof(RankState)) + 2 * ranks * up_to_page(slot_bytes);
}

// One rank's handle on the segment. Used by one thread at a time.
class SharedRank {
public:
  SharedRank(void* segment, int rank, int ranks, int64_t slot_bytes, int64_t timeout_ns, int spins)
      : shared_(static_cast<SharedState*>(segment)),
        states_(reinterpret_cast<RankState*>(static_cast<uint8_t*>(segment) + sizeof(SharedState))),
        slots_(static_cast<uint8_t*>(segment) + up_to_page(sizeof(SharedState) + ranks * sizeof(RankState))),
        rank_(rank), ranks_(ranks), slot_bytes_(up_to_page(slot_bytes)), timeout_ns_(timeout_ns), spins_(spins) {}

  // data[count] of this rank becomes the sum over all ranks.
  template <typename T> Failure all_reduce(T* data, int64_t count) {
    const int64_t began = now_ns(), most = slot_bytes_ / static_cast<int64_t>(sizeof(T));
    for (int64_t first = 0; first < count; first += most) {
      const int64_t n = std::min(most, count - first);
      if (!enter(Op::kAllReduce, n * sizeof(T)))
        return failure_;
      std::memcpy(slot(rank_), data + first, n * sizeof(T));
      publish();
      if (!await_all())
        return failure_;
      add(data + first, n);
    }
    return done(Op::kAllReduce, count * sizeof(T), began);
  }

  // Rows of all ranks side by side: `mine` [rows, width of this rank] to out [rows, total]; rank r's columns are bytes
  // at[r] to at[r + 1] of a row.
  Failure all_gather(const uint8_t* mine, int64_t rows, const int64_t* at, uint8_t* out) {
    const int64_t began = now_ns(), total = at[ranks_], own = at[rank_ + 1] - at[rank_];
    int64_t widest = 1;
    for (int r = 0; r < ranks_; ++r)
      widest = std::max(widest, at[r + 1] - at[r]);
    const int64_t most = std::max<int64_t>(1, slot_bytes_ / widest);
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t n = std::min(most, rows - first);
      if (!enter(Op::kAllGather, n * total))
        return failure_;
      std::memcpy(slot(rank_), mine + first * own, n * own);
      publish();
      if (!await_all())
        return failure_;
      for (int r = 0; r < ranks_; ++r) {
        const int64_t width = at[r + 1] - at[r];
        for (int64_t i = 0; i < n; ++i)
          std::memcpy(out + (first + i) * total + at[r], slot(r) + i * width, width);
      }
    }
    return done(Op::kAllGather, rows * total, began);
  }

  // data of rank `root` to all.
  Failure broadcast(uint8_t* data, int64_t bytes, int root) {
    const int64_t began = now_ns();
    for (int64_t first = 0; first < bytes; first += slot_bytes_) {
      const int64_t n = std::min(slot_bytes_, bytes - first);
      if (!enter(Op::kBroadcast, n))
        return failure_;
      if (rank_ == root)
        std::memcpy(slot(rank_), data + first, n);
      publish();
      if (rank_ != root) {
        if (!await(root, number_) || !agrees(root))
          return failure_;
        std::memcpy(data + first, slot(root), n);
      }
    }
    return done(Op::kBroadcast, bytes, began);
  }

  // Everybody who waits, or will, gives up: this rank has died.
  void lose(int rank) { shared_->lost.store(rank + 1, std::memory_order_release); }

  const Totals& totals(Op op) const { return totals_[static_cast<int64_t>(op)]; }
  int64_t slot_bytes() const { return slot_bytes_; }

  // Of the failure: number of the operation, the peer, and the number that it had published; what both said it was;
  // its kind.
  void explain(int64_t* out) const {
    const Said mine = states_[rank_].said[number_ % 2], theirs = states_[peer_].said[number_ % 2];
    const int64_t all[] = {static_cast<int64_t>(number_),
                           peer_,
                           static_cast<int64_t>(states_[peer_].published.load()),
                           mine.op,
                           mine.bytes,
                           theirs.op,
                           theirs.bytes,
                           static_cast<int64_t>(failure_)};
    std::copy(std::begin(all), std::end(all), out);
  }

private:
  uint8_t* slot(int rank) const { return slots_ + (2 * rank + static_cast<int64_t>(number_ % 2)) * slot_bytes_; }

  // Begins an operation; this rank's slot may be written afterwards.
  bool enter(Op op, int64_t bytes) {
    if (failure_ != Failure::kNone)
      return false; // after one failure nothing is in step any more
    ++number_;
    for (int r = 0; r < ranks_; ++r)
      if (!await(r, number_ - 1))
        return false;
    states_[rank_].said[number_ % 2] = {static_cast<int64_t>(op), bytes};
    return true;
  }

  void publish() { states_[rank_].published.store(number_, std::memory_order_release); }

  bool await_all() {
    for (int r = 0; r < ranks_; ++r)
      if (!await(r, number_) || !agrees(r))
        return false;
    return true;
  }

  bool agrees(int peer) {
    const Said mine = states_[rank_].said[number_ % 2], theirs = states_[peer].said[number_ % 2];
    return (mine.op == theirs.op && mine.bytes == theirs.bytes) || fail(Failure::kDisagree, peer);
  }

  // Until `peer` has published `number`. A peer that computes on another core arrives within microseconds; one that
  // needs this core must be let on it.
  bool await(int peer, uint64_t number) {
    const std::atomic<uint64_t>& published = states_[peer].published;
    if (published.load(std::memory_order_acquire) >= number)
      return true;
    for (int i = 0; i < spins_; ++i) {
      pause_briefly();
      if (published.load(std::memory_order_acquire) >= number)
        return true;
    }
    const int64_t began = now_ns();
    for (;;) {
      if (published.load(std::memory_order_acquire) >= number)
        return true;
      if (const int32_t lost = shared_->lost.load(std::memory_order_acquire))
        return fail(Failure::kLost, lost - 1);
      const int64_t waited = now_ns() - began;
      if (waited > timeout_ns_)
        return fail(Failure::kTimeout, peer);
      if (waited < 1000000) {
        sched_yield();
      } else {
        const timespec nap{0, waited < 50000000 ? 50000 : 500000};
        nanosleep(&nap, nullptr);
      }
    }
  }

  bool fail(Failure failure, int peer) {
    failure_ = failure, peer_ = peer;
    return false;
  }

  template <typename T> void add(T* out, int64_t count) const {
    const T* slots[64];
    for (int r = 0; r < ranks_; ++r)
      slots[r] = reinterpret_cast<const T*>(slot(r));
    if (ranks_ == 2) {
      const T *a = slots[0], *b = slots[1];
#pragma omp simd
      for (int64_t i = 0; i < count; ++i)
        store(&out[i], load(a[i]) + load(b[i]));
      return;
    }
    float sum[kSumBlock];
    for (int64_t first = 0; first < count; first += kSumBlock) {
      const int64_t n = std::min(kSumBlock, count - first);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i)
        sum[i] = load(slots[0][first + i]);
      for (int r = 1; r < ranks_; ++r) {
        const T* from = slots[r] + first;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i)
          sum[i] += load(from[i]);
      }
#pragma omp simd
      for (int64_t i = 0; i < n; ++i)
        store(&out[first + i], sum[i]);
    }
  }

  Failure done(Op op, int64_t bytes, int64_t began) {
    Totals& totals = totals_[static_cast<int64_t>(op)];
    const int64_t took = now_ns() - began;
    ++totals.calls, totals.bytes += bytes, totals.nanoseconds += took;
    totals.slowest = std::max(totals.slowest, took);
    return Failure::kNone;
  }

  SharedState* shared_;
  RankState* states_;
  uint8_t* slots_;
  int rank_, ranks_;
  int64_t slot_bytes_, timeout_ns_;
  int spins_;
  uint64_t number_ = 0;
  Failure failure_ = Failure::kNone;
  int peer_ = 0;
  Totals totals_[kOps] = {};
};

} // namespace

extern "C" {

int64_t st_shared_bytes(int64_t ranks, int64_t slot_bytes) { return segment_bytes(ranks, slot_bytes); }

// A new segment is all zeros, which is the state that every rank begins from.
void* st_shared_open(void* segment, int rank, int ranks, int64_t slot_bytes, int64_t timeout_ns, int spins) {
  return new (std::nothrow) SharedRank(segment, rank, ranks, slot_bytes, timeout_ns, spins);
}

void st_shared_close(void* group) { delete static_cast<SharedRank*>(group); }

// kind: see engine/ops/native.py's _SUFFIX: 0 float, 1 bfloat16. Also what layers.hpp calls (ReduceHook).
int st_shared_all_reduce(void* group, void* data, int64_t count, int kind) {
  auto* shared = static_cast<SharedRank*>(group);
  return static_cast<int>(kind ? shared->all_reduce(static_cast<bf16*>(data), count)
                               : shared->all_reduce(static_cast<float*>(data), count));
}

int st_shared_all_gather(void* group, const void* mine, int64_t rows, const int64_t* at, void* out) {
  return static_cast<int>(static_cast<SharedRank*>(group)->all_gather(static_cast<const uint8_t*>(mine), rows, at,
                                                                      static_cast<uint8_t*>(out)));
}

int st_shared_broadcast(void* group, void* data, int64_t bytes, int root) {
  return static_cast<int>(static_cast<SharedRank*>(group)->broadcast(static_cast<uint8_t*>(data), bytes, root));
}

void st_shared_lose(void* group, int rank) { static_cast<SharedRank*>(group)->lose(rank); }

void st_shared_explain(void* group, int64_t* out) { static_cast<SharedRank*>(group)->explain(out); }

// calls, bytes, nanoseconds and the slowest call's nanoseconds of one kind of operation.
void st_shared_totals(void* group, int64_t op, int64_t* out) {
  const Totals& totals = static_cast<SharedRank*>(group)->totals(static_cast<Op>(op));
  out[0] = totals.calls, out[1] = totals.bytes, out[2] = totals.nanoseconds, out[3] = totals.slowest;
}
}
