// Encodes the segments of a step as differences from a prediction (kernels/segment_changes.py).
//
//   before   [ row a | row b | row c ]      places  1, -1, 0: the new rows x, y, z were b, none, a
//   guess    [ row b, padded with 0 or cut to x | 0 ... | row a, padded with 0 or cut to z ]
//
// All numbers are int32, three for each segment; `starts` counts segments. places[row] is the index
// of a row in the previous step, -1 for a new row.
#pragma once

#include <stdint.h>
#include <string.h>

namespace bros {

constexpr int64_t kSegmentWidth = 3;

struct RowSegments {
  const int32_t* starts;   // [rows + 1]
  const int32_t* numbers;  // [kSegmentWidth * starts[rows]]
  int64_t rows;

  int64_t begin(int64_t row) const { return kSegmentWidth * starts[row]; }
  int64_t length(int64_t row) const { return kSegmentWidth * (starts[row + 1] - starts[row]); }

  bool valid(int64_t num_numbers) const {
    if (rows < 0 || starts[0] != 0) return false;
    for (int64_t row = 0; row < rows; ++row) {
      if (starts[row] > starts[row + 1]) return false;
    }
    return begin(rows) == num_numbers;
  }
};

// How many numbers of a row are predicted from its previous row; these begin at *from.
inline int64_t kept(const RowSegments& before, int32_t place, int64_t length,
                    const int32_t** from) {
  if (place < 0) return 0;
  *from = before.numbers + before.begin(place);
  return length < before.length(place) ? length : before.length(place);
}

inline bool places_valid(const int32_t* places, int64_t rows, const RowSegments& before) {
  for (int64_t row = 0; row < rows; ++row) {
    if (places[row] >= before.rows) return false;
  }
  return true;
}

// Calls visit(index) for every number of `now` that differs from the guess.
template <class Visit>
void for_each_change(const RowSegments& before, const int32_t* places, const RowSegments& now,
                     const Visit& visit) {
  constexpr int64_t kAtOnce = 128;  // numbers per memcmp: nearly all are unchanged
  for (int64_t row = 0; row < now.rows; ++row) {
    const int64_t length = now.length(row), begin = now.begin(row);
    const int32_t* found = now.numbers + begin;
    const int32_t* from = nullptr;
    const int64_t known = kept(before, places[row], length, &from);
    for (int64_t i = 0; i < known; i += kAtOnce) {
      const int64_t end = i + kAtOnce < known ? i + kAtOnce : known;
      if (memcmp(found + i, from + i, (end - i) * sizeof *found) == 0) continue;
      for (int64_t j = i; j < end; ++j) {
        if (found[j] != from[j]) visit(begin + j);
      }
    }
    for (int64_t i = known; i < length; ++i) {
      if (found[i] != 0) visit(begin + i);
    }
  }
}

// Writes the predicted numbers of all rows.
inline void guess(const RowSegments& before, const int32_t* places, const int32_t* starts,
                  int64_t rows, int32_t* out) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t length = kSegmentWidth * (starts[row + 1] - starts[row]);
    const int32_t* from = nullptr;
    const int64_t known = kept(before, places[row], length, &from);
    if (known > 0) memcpy(out, from, known * sizeof *out);
    memset(out + known, 0, (length - known) * sizeof *out);
    out += length;
  }
}

}  // namespace bros
