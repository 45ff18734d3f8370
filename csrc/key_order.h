// Brings the segments of rows into the order of their positions.
//
//   slots of a block    12  13  14  15         positions of a stack that grows from the right
//   positions            3   2   1   0         (block, 12, 16)  ->  (block, 16, 12)
//
// The cache lists the slots of a row as ranges, whose tokens may be in any order: a best-effort
// request grows from the right of a block, and restored tokens are where there was room. A segment
// with lo > hi is read from slot lo - 1 down to hi.
#pragma once

#include <stdint.h>

#include <algorithm>

namespace bros {

struct Piece {
  int32_t block, lo, hi;
};

// positions: of the token in each slot, -1 if it is unknown. Rows of `segments` begin at
// start[row]; those of `out`, which has room for a piece per key, begin at out_start[row]. Returns
// the number of pieces, -1 if a segment is outside the cache. Ranges with unknown positions stay as
// they are, and so does the order of their row.
inline int64_t order_segments(const int32_t* positions, int64_t num_blocks, int64_t block_size,
                              const int32_t* start, int64_t rows, const Piece* segments,
                              int32_t* out_start, Piece* out) {
  Piece* end = out;
  out_start[0] = 0;
  for (int64_t row = 0; row < rows; ++row) {
    Piece* first = end;
    const auto position = [&](const Piece& piece) {
      const int32_t slot = piece.lo < piece.hi ? piece.lo : piece.lo - 1;
      return positions[piece.block * block_size + slot];
    };
    bool known = true;
    for (int64_t i = start[row]; i < start[row + 1]; ++i) {
      const Piece& segment = segments[i];
      if (segment.block < 0 || segment.block >= num_blocks || segment.lo < 0 ||
          segment.hi > block_size) {
        return -1;
      }
      const int32_t* at = positions + segment.block * block_size;
      for (int32_t lo = segment.lo; lo < segment.hi;) {
        int32_t hi = lo + 1;
        const int32_t step = hi < segment.hi ? at[hi] - at[lo] : 0;
        const bool unknown = at[lo] < 0;
        known &= !unknown;
        if (unknown || step == 1 || step == -1) {
          while (hi < segment.hi && (unknown ? at[hi] < 0 : at[hi] - at[hi - 1] == step)) ++hi;
        }
        *end++ = step == -1 && !unknown ? Piece{segment.block, hi, lo}
                                        : Piece{segment.block, lo, hi};
        lo = hi;
      }
    }
    const auto before = [&](const Piece& a, const Piece& b) { return position(a) < position(b); };
    if (known && !std::is_sorted(first, end, before)) std::sort(first, end, before);
    out_start[row + 1] = static_cast<int32_t>(end - out);
  }
  return end - out;
}

}  // namespace bros
