// Threads of the kernels, and loops that run on them.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Threads that help with one job at a time. Unlike OpenMP's, a job never waits for a helper to arrive: the caller takes
// chunks itself until none is left, and then waits only for chunks that a helper is in the middle of. On cores shared
// with other processes (the frontend, a load client) a barrier per operation would cost a scheduler's time slice, some
// milliseconds, hundreds of times a step.
class Pool {
public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i)
      helpers_.emplace_back([this] { help(); });
  }

  ~Pool() {
    stop_ = true;
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto& helper : helpers_)
      helper.join();
  }

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // run(context, chunk) for every chunk of [0, chunks), in any order.
  void each(int64_t chunks, void (*run)(void*, int64_t), void* context) {
    if (helpers_.empty() || chunks < 2) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        run(context, chunk);
      return;
    }
    run_ = run, context_ = context, chunks_ = chunks;
    next_ = 0;
    open_ = true;
    epoch_.fetch_add(1);
    epoch_.notify_all();
    take();
    open_ = false;
    for (int spins = 0, busy; (busy = active_.load()) != 0;) {
      if (++spins < kSpins)
        pause_briefly();
      else
        active_.wait(busy); // lets the scheduler put the helper on this core
    }
  }

private:
  static constexpr int kSpins = 4000; // some 50 microseconds

  void take() {
    for (int64_t chunk; (chunk = next_.fetch_add(1)) < chunks_;)
      run_(context_, chunk);
  }

  void help() {
    for (uint64_t seen = 0; !stop_;) {
      for (int spins = 0; epoch_.load() == seen;) {
        if (++spins < kSpins)
          pause_briefly();
        else
          epoch_.wait(seen);
      }
      seen = epoch_.load();
      // Counted first, so that the caller cannot begin another job between the check and the work. A helper that comes
      // late may meet the next job already: then it helps with that one.
      active_.fetch_add(1);
      if (open_.load())
        take();
      if (active_.fetch_sub(1) == 1)
        active_.notify_all();
    }
  }

  std::vector<std::thread> helpers_;
  void (*run_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t chunks_ = 0;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint64_t> epoch_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> active_{0};
  std::atomic<bool> open_{false};
};

std::unique_ptr<Pool> pool = std::make_unique<Pool>(1);

// body(first, last) over [0, n) in pieces of `grain`.
template <typename Body> void parallel(int64_t n, int64_t grain, const Body& body) {
  struct Context {
    int64_t n, grain;
    const Body* body;
  } context{n, grain, &body};
  pool->each((n + grain - 1) / grain,
             [](void* raw, int64_t chunk) {
               const Context& c = *static_cast<Context*>(raw);
               (*c.body)(chunk* c.grain, std::min(c.n, (chunk + 1) * c.grain));
             },
             &context);
}

} // namespace
