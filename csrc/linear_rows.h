// What the parts of a product share (linear.h, linear_tiles.h).
#pragma once

#include "kernels.h"
#include "simd.h"

namespace bros {
namespace {

constexpr int64_t kInputBlock = 1024;  // inputs of a widened block: 64 or 128 KB

// x and out of a product. Rows of x are as the format takes them.
struct Rows {
  const char* x;
  int64_t x_stride;  // in bytes
  float* out;
  int64_t count;
};

// What a tile prefetches while it multiplies: `step` bytes in each of its steps, or nothing if `from`
// is null.
struct Prefetch {
  const char* from;
  int64_t step;
  bool to_l2;  // not to L1

  // For the next `steps` steps.
  BROS_INLINE void next(int64_t steps) {
    if (!from) return;
    const int64_t bytes = steps * step;
    if (to_l2) {
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    } else {
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
    }
    from += bytes;
  }

  // Of `tiles` tiles that share the work, each with so many steps, what tile t prefetches.
  BROS_INLINE Prefetch part(int64_t t, int64_t tiles, int64_t steps) const {
    if (!from) return *this;
    return {from + step * steps * t / tiles, step / tiles, to_l2};
  }
};

// Inputs [first, first + count) of the panels at `weights`, and the same of the rows of x.
struct Inputs {
  const char* x;
  int64_t x_stride;
  const char* weights;
  int64_t panel_bytes;
  int64_t first;
  int64_t count;
  bool carry;  // the sums go on from `out`
  Prefetch prefetch;
};

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// The size of about equal parts of `total` rows or inputs, a multiple of `unit`: as many parts as
// parts of at most `most` would be.
BROS_INLINE int64_t about_equal(int64_t total, int64_t most, int64_t unit) {
  return round_up(ceil_div(total, ceil_div(total, most)), unit);
}

BROS_INLINE void copy_floats(float* to, const float* from, int64_t n) {
  __builtin_memcpy(to, from, n * sizeof(float));
}

// Whether products of a format consist of tiles (linear_tiles.h). Their activations are rounded to
// tiles of several rows: by Panel::round_all to those that the product of so many rows takes, by
// Panel::round_rows to A tiles.
template <class Panel>
constexpr bool kByTiles = false;

// The panels [begin, end) of all rows, where kByTiles. x has room for a multiple of kRowsOfTile rows.
template <class Panel>
void tile_panels(const LinearArgs& a, const Rows& rows, int64_t begin, int64_t end);

constexpr int64_t kRowsOfTile = 16;

}  // namespace
}  // namespace bros
