// Splitting work over threads, and scratch memory that is reused across calls.
#pragma once

#include <stdlib.h>

#include "simd.h"
#include "team.h"

namespace bros {
namespace {

// With less work (about 5 microseconds of one thread) telling other threads costs more than it saves.
// In elements read or written; attention counts multiply-adds / 2: with 8 instead of 2, one row with
// 110 cached tokens, or with 200, took 1.2 times as long (Zen 3, two threads).
constexpr int64_t kMinParallelWork = 32768;

// Calls body(index, slot) for each index in [0, count), on up to `threads` threads with different
// slots in [0, threads), see team.h.
template <class Body>
inline void parallel_tasks(int64_t count, int threads, const Body& body) {
  run_tasks(
      count, threads,
      [](void* context, int64_t index, int slot) {
        (*static_cast<const Body*>(context))(index, slot);
      },
      const_cast<Body*>(&body));
}

// Calls body(begin, end) on consecutive parts of [0, n), as many as threads. Callers compute each
// index independently of the split, so results do not depend on the number of threads.
//
// Smaller parts that threads take as they finish others (a quarter of what is left, four panels at
// least) made prompts 2 to 3 % slower and decode steps no faster (Zen 4, two threads of OpenMP).
template <class Body>
inline void parallel_for(int64_t n, int64_t work, int threads, const Body& body) {
  const int64_t parts = min_of<int64_t>(min_of(threads, kMostThreads), n);
  if (parts <= 1 || work < kMinParallelWork) {
    body(int64_t{0}, n);
    return;
  }
  parallel_tasks(parts, threads, [&](int64_t part, int) {
    body(n * part / parts, n * (part + 1) / parts);
  });
}

// A block of memory that grows and never shrinks: fresh pages for every layer would cost more than
// the small kernels themselves. Each calling thread has its own (thread_local where it is used).
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { free(data_); }

  // At least `bytes` bytes aligned to 64, contents undefined; null if there is no memory.
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      free(data_);
      size_ = 0;
      data_ = nullptr;
      const size_t rounded = round_up(bytes + bytes / 4, 4096);
      if (posix_memalign(&data_, 64, rounded) != 0) {
        data_ = nullptr;
        return nullptr;
      }
      size_ = rounded;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Allocates 64-byte aligned arrays from a block of memory; with a null block it only measures.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return p;
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace bros
