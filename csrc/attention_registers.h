// What attention multiplies by tile registers (tiles.h): pairs of bf16 of heads with a multiple of 32
// numbers.
//
// Where many lanes share the keys (attention_tile.h), keys and elements of the head lie along the
// rows of A, lanes along the columns of B and C. All of these are parts of arrays that the task has
// in any case, but for the values, which are transposed once per tile of keys:
//
//     scores [16 keys][lanes]   =  K [16 keys][32 of the head]  .  Q' [32 of the head][lanes]
//     output [16 of d][lanes]   =  V' [16 of d][32 keys]        .  weights [32 keys][lanes]
//
// A few lanes (attention_decode.h) lie along the rows of A and C, as their scores do in memory:
//
//     scores [lanes][16 keys]   =  Q [lanes][32 of the head]    .  K' [32 of the head][16 keys]
//     output [lanes][16 of d]   =  weights [lanes][32 keys]     .  V [32 keys][16 of d]
//
// **Same bits.** Both are, 32 numbers at a time from the first on, increased by the sum of the even
// and the sum of the odd products (tiles.h), whichever operand is A. Keys of the last 32 that a lane
// does not attend to have weights of 0, and the values of later keys or 0. So they change no sum, as
// long as values are finite.
#pragma once

#include "attention_words.h"
#include "tiles.h"

#if defined(BROS_MULTIPLIES_TILES)

namespace bros {
namespace {

constexpr int kTileWords = 16;  // along a sum: 32 numbers

// Multiplied by tiles, of which C 0, 1, .. are sums, A 6 and B 7 the factors.
struct Bf16TilePairs : Bf16Pairs {
  static constexpr int kStep = 2 * kTileWords;
  static constexpr bool kByTiles = true;
};

// `rows` rows of A and C.
inline TileShapes attention_shapes(int64_t rows) {
  TileShapes shapes;
  for (int i = 0; i < 7; ++i) shapes.set(i, rows, kTileRowBytes);
  shapes.set(7, kTileWords, kTileRowBytes);
  return shapes;
}

// C 0 .. N - 1 = a . b, where C j has columns [j * kLanes, ..) of b. Strides are in floats.
template <int N>
BROS_INLINE void multiply_words(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                                int64_t words) {
  unrolled<N>([](auto j) { zero_tile<j.value>(); });
  for (int64_t word = 0; word < words; word += kTileWords) {
    load_tile<6>(a + word, a_stride * sizeof(float));
    unrolled<N>([&](auto j) {
      load_tile<7>(b + word * b_stride + j.value * kLanes, b_stride * sizeof(float));
      add_product<j.value, 6, 7>();
    });
  }
}

// Writes C 0 .. N - 1 side by side.
template <int N>
BROS_INLINE void store_sums(float* to, int64_t stride) {
  unrolled<N>([&](auto j) { store_tile<j.value>(to + j.value * kLanes, stride * sizeof(float)); });
}

}  // namespace
}  // namespace bros

#endif
