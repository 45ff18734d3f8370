// Products by tile registers (tiles.h): bf16 for any number of rows, int4 for many.
//
// A panel has the layout of tiles already. Of bf16, 16 pairs of inputs and all 32 outputs are two B
// tiles side by side, and a row of rounded activations is a row of A tiles:
//
//     panel, bf16         outputs 0 .. 15    outputs 16 .. 31
//     inputs  0,  1    [ 16 pairs, 64 bytes | 16 pairs, 64 bytes ]  ┐
//     inputs  2,  3    [                    |                    ]  │ a B tile each, 16 rows in
//     ..                                                            │ steps of 128 bytes
//     inputs 30, 31    [                    |                    ]  ┘
//
//     x, bf16: row r   [ inputs 0 .. 31, 64 bytes | inputs 32 .. 63 | .. | 0 up to 32 ]
//                      └ a row of an A tile ┘
//
// Registers, for up to 32 rows of one panel, or up to 16 rows of two:
//
//     R = 2 row tiles, 1 panel              R = 1 row tile, 2 panels
//
//                  B 6      B 7                          B 6      B 7      B 6      B 7
//     A 4 (x)      C 0      C 1             A 4 (x)      C 0      C 1      C 2      C 3
//     A 5 (x)      C 2      C 3
//
// Four sums hide the latency of a product (52 cycles of Sapphire Rapids, 16 until the next can
// start). With two row tiles, every tile that is loaded is multiplied twice: 4 loads of 1 KB (32
// cycles) for 4 products (64 cycles).
//
// **Same bits.** An output of bf16 is, step by step of 32 inputs, increased by the sum of its even
// and the sum of its odd products. These depend on nothing but the row and the output: the other
// rows of a tile, their number and the blocks only decide which register holds a sum. AVX-512's
// products of bf16 are rounded otherwise, so there is no second kernel for few rows. Sums of the
// codes of a group are exact, so int4 has the bits of its kernel of vectors (linear_formats.h),
// which few rows use.
#pragma once

#include "linear_formats.h"
#include "linear_rows.h"
#include "parallel.h"
#include "tiles.h"

#if defined(BROS_MULTIPLIES_TILES)

namespace bros {
namespace {

constexpr int64_t kTileRows = kMostTileRows, kTileOutputs = kLanes;

template <int N, class Body>
BROS_INLINE void unrolled(const Body& body) {
  if constexpr (N > 0) {
    unrolled<N - 1>(body);
    body(Number<N - 1>());
  }
}

constexpr int c_tile(int row_tile, int column, int columns) { return row_tile * columns + column; }
constexpr int a_tile(int row_tile) { return 4 + row_tile; }
constexpr int b_tile(int column) { return 6 + column % 2; }

// For `rows` rows in `row_tiles` row tiles, `columns` columns of outputs, and rows of A of `depth`
// bytes.
inline TileShapes product_shapes(int row_tiles, int columns, int64_t rows, int64_t depth) {
  TileShapes shapes;
  for (int r = 0; r < row_tiles; ++r) {
    const int64_t count = min_of<int64_t>(kTileRows, rows - r * kTileRows);
    shapes.set(a_tile(r), count, depth);
    for (int j = 0; j < columns; ++j) shapes.set(c_tile(r, j, columns), count, kTileRowBytes);
  }
  for (int j = 0; j < 2; ++j) shapes.set(b_tile(j), depth / 4, kTileRowBytes);
  return shapes;
}

// Rows [0, count) in parts of two row tiles, and of one for the last 16 or less:
// run(Number<row tiles>(), first row, rows).
template <class Run>
BROS_INLINE void for_row_tiles(int64_t count, const Run& run) {
  int64_t row = 0;
  for (; count - row > kTileRows; row += 2 * kTileRows) {
    run(Number<2>(), row, min_of(2 * kTileRows, count - row));
  }
  if (row < count) run(Number<1>(), row, count - row);
}

// ---- bf16.

// The format of a product of bf16: activations are rounded to bf16 and padded with zeros to steps.
struct Bf16Tiles {
  static constexpr bool kRounds = true;
  static constexpr int kStep = 32, kStepBytes = kTileRowBytes;
  static constexpr int64_t kStepWeights = kStep * kPanelOutputs * 2;  // bytes of a panel
  static int64_t bytes(int64_t inputs) { return inputs * kPanelOutputs * 2; }

  static void round(const float* x, int64_t inputs, char* out) {
    for (int64_t k = 0; k < inputs; k += kLanes, out += kStepBytes / 2) {
      const int64_t count = min_of<int64_t>(kLanes, inputs - k);
      const Vec values = count < kLanes ? load_first(x + k, count) : load(x + k);
      const __m256bh half = _mm512_cvtneps_pbh(values);
      __builtin_memcpy(out, &half, sizeof half);
    }
    if (ceil_div(inputs, kLanes) % 2) __builtin_memset(out, 0, kStepBytes / 2);
  }
};
template <>
constexpr bool kAllByTiles<Bf16Tiles> = true;

// Where a block of inputs of kPanels panels is.
struct Bf16Steps {
  const char* weights;
  int64_t panel_bytes;
  int64_t count;     // whole steps
  const char* last;  // null, or the weights of one more, with zeros behind the last input
};

// The sums of `rows` rows in kRowTiles row tiles for kPanels panels, whose tiles are configured.
template <int kRowTiles, int kPanels>
BROS_INLINE void bf16_tiles(const Bf16Steps& steps, const char* x, int64_t x_stride, bool carry,
                            float* out, int64_t stride) {
  constexpr int kColumns = 2 * kPanels;
  const auto for_sums = [&](const auto& body) {
    unrolled<kRowTiles>([&](auto r) {
      unrolled<kColumns>([&](auto j) {
        body(Number<c_tile(r.value, j.value, kColumns)>(),
             out + r.value * kTileRows * stride + j.value * kTileOutputs);
      });
    });
  };
  const auto step = [&](const char* weights, int64_t panel_bytes) {
    unrolled<kRowTiles>([&](auto r) {
      load_tile<a_tile(r.value)>(x + r.value * kTileRows * x_stride, x_stride);
    });
    unrolled<kColumns>([&](auto j) {
      load_tile<b_tile(j.value)>(weights + j.value / 2 * panel_bytes + j.value % 2 * kTileRowBytes,
                                 2 * kTileRowBytes);
      unrolled<kRowTiles>([&](auto r) {
        add_bf16_product<c_tile(r.value, j.value, kColumns), a_tile(r.value), b_tile(j.value)>();
      });
    });
    x += Bf16Tiles::kStepBytes;
  };
  for_sums([&](auto c, float* at) {
    if (carry) {
      load_tile<c.value>(at, stride * sizeof(float));
    } else {
      zero_tile<c.value>();
    }
  });
  const char* weights = steps.weights;
  for (int64_t i = 0; i < steps.count; ++i, weights += Bf16Tiles::kStepWeights) {
    step(weights, steps.panel_bytes);
  }
  if (steps.last) step(steps.last, Bf16Tiles::kStepWeights);
  for_sums([&](auto c, float* at) { store_tile<c.value>(at, stride * sizeof(float)); });
}

// The same at outputs [at, at + kPanels * kPanelOutputs), of which the layer may have only some.
template <int kRowTiles, int kPanels>
void bf16_tiles_at(const LinearArgs& a, const Bf16Steps& steps, const Rows& rows, bool carry,
                   int64_t at, ThreadTiles* tiles) {
  constexpr int64_t kWidth = kPanels * kPanelOutputs;
  tiles->configure(product_shapes(kRowTiles, 2 * kPanels, rows.count, kTileRowBytes));
  float* out = rows.out + at;
  const int64_t width = a.outputs - at;
  if (width >= kWidth) {
    bf16_tiles<kRowTiles, kPanels>(steps, rows.x, rows.x_stride, carry, out, a.outputs);
    return;
  }
  alignas(64) float padded[kRowTiles * kTileRows * kWidth];
  for (int64_t r = 0; carry && r < rows.count; ++r) {
    copy_floats(padded + r * kWidth, out + r * a.outputs, width);
  }
  bf16_tiles<kRowTiles, kPanels>(steps, rows.x, rows.x_stride, carry, padded, kWidth);
  for (int64_t r = 0; r < rows.count; ++r) {
    copy_floats(out + r * a.outputs, padded + r * kWidth, width);
  }
}

// Inputs of a block: the weights of a panel for them, 32 KB, stay in the first cache for all rows.
constexpr int64_t kTileInputs = 512;
// Activations that stay in the second cache (2 MB) for all panels.
constexpr int64_t kTileRowBlockBytes = 1024 * 1024;

// kPanels panels from `panel` on.
template <int kPanels>
void bf16_panels(const LinearArgs& a, const Rows& rows, int64_t panel, ThreadTiles* tiles) {
  constexpr int64_t kStep = Bf16Tiles::kStep;
  const int64_t bytes = Bf16Tiles::bytes(a.inputs);
  const char* weights = static_cast<const char*>(a.weights) + panel * bytes;
  alignas(64) char last[kPanels * Bf16Tiles::kStepWeights];
  const int64_t rest = Bf16Tiles::bytes(a.inputs % kStep);
  if (rest) {
    for (int p = 0; p < kPanels; ++p) {
      char* to = last + p * Bf16Tiles::kStepWeights;
      __builtin_memcpy(to, weights + (p + 1) * bytes - rest, rest);
      __builtin_memset(to + rest, 0, Bf16Tiles::kStepWeights - rest);
    }
  }
  const int64_t block = rows.count > kTileRows ? kTileInputs : a.inputs;
  for (int64_t k = 0; k < a.inputs; k += block) {
    const int64_t count = min_of(block, a.inputs - k);
    const Bf16Steps steps = {weights + Bf16Tiles::bytes(k), bytes, count / kStep,
                             count % kStep ? last : nullptr};
    const char* x = rows.x + k / kStep * Bf16Tiles::kStepBytes;
    for_row_tiles(rows.count, [&](auto row_tiles, int64_t first, int64_t some) {
      const Rows part = {x + first * rows.x_stride, rows.x_stride, rows.out + first * a.outputs,
                         some};
      // Two row tiles and two panels would be eight sums.
      constexpr int kTogether = row_tiles.value == 2 ? 1 : kPanels;
      bf16_tiles_at<row_tiles.value, kTogether>(a, steps, part, k > 0, panel * kPanelOutputs,
                                                tiles);
    });
  }
}

// Panels [begin, end) of all rows.
template <class Panel>
void tile_panels(const LinearArgs& a, const Rows& all, int64_t begin, int64_t end) {
  static_assert(kAllByTiles<Panel>, "");
  ThreadTiles tiles;
  if (all.count <= kTileRows) {
    int64_t p = begin;
    for (; p + 2 <= end; p += 2) bf16_panels<2>(a, all, p, &tiles);
    if (p < end) bf16_panels<1>(a, all, p, &tiles);
    return;
  }
  const int64_t most = max_of(kTileRowBlockBytes / all.x_stride, 2 * kTileRows);
  const int64_t block = round_up(ceil_div(all.count, ceil_div(all.count, most)), 2 * kTileRows);
  for (int64_t row = 0; row < all.count; row += block) {
    const Rows rows = {all.x + row * all.x_stride, all.x_stride, all.out + row * a.outputs,
                       min_of(block, all.count - row)};
    for (int64_t p = begin; p < end; ++p) bf16_panels<1>(a, rows, p, &tiles);
  }
}

using Bf16Format = Bf16Tiles;

// ---- int4: the sums of codes of a group come from tiles, and scales are applied with vectors, by
// ---- add_scaled as in Int4Panel::multiply.
//
//     A    16 rows x 32 first bytes of activations, as they lie in the groups of a row
//     B    8 rows of 4 inputs x 16 outputs: codes of 4 bits, as bytes; spread once per block of a
//          panel
//     C    16 rows x 16 outputs in int32, stored, since vectors cannot read a tile
//
// A group of 32 inputs, 16 rows and a vector of outputs take, in cycles of Sapphire Rapids (two
// operations of vectors at a time, one product of tiles in 16, one row of a tile stored at a time):
//
//                  codes                            scales and minima                   together
//     vectors      16 x 8 products:     64          16 x 4 operations:      32          96
//     tiles        1 product:           16          32                                  32 to 64
//                  stores of C:         16, beside them
//
// The lower number holds if everything overlaps. Fewer rows do not make up for spreading the codes,
// 8 cycles, and for products that take 16 with any number of rows. This is an estimate, not a
// measurement.
static_assert(kFewestTileRows == kTileRows, "");
template <>
constexpr bool kManyByTiles<Int4Panel> = true;

// Sums of groups that are stored before scales are applied: 16 KB, so that sums of rows are loaded
// and stored once for four groups.
constexpr int64_t kStoredGroups = 4;

// A block of a panel for tiles.
struct SpreadBlock {
  static constexpr int64_t kGroups = kInputBlock / kGroup;
  alignas(64) uint8_t codes[kGroups][2][kGroup / 4][kTileRowBytes];  // per vector of outputs
  alignas(64) float scales[kGroups][kPanelOutputs], minima[kGroups][kPanelOutputs];
  alignas(64) int32_t dots[kStoredGroups][2][2][kTileRows][kTileOutputs];  // row tile, vector
};

inline void spread_codes(const char* weights, int64_t groups, SpreadBlock* block) {
  for (int64_t g = 0; g < groups; ++g, weights += Int4Panel::kGroupBytes) {
    const Fp16* halves = reinterpret_cast<const Fp16*>(weights);
    widen(block->scales[g], halves, kPanelOutputs);
    widen(block->minima[g], halves + kPanelOutputs, kPanelOutputs);
    const uint32_t* eights = reinterpret_cast<const uint32_t*>(weights + 4 * kPanelOutputs);
    for (int eight = 0; eight < kGroup / 8; ++eight) {
      for (int j = 0; j < 2; ++j) {
        const IntVec raw = load_int(eights + eight * kPanelOutputs + j * kLanes);
        const IntVec low = raw & 0x0f0f0f0f, high = (raw >> 4) & 0x0f0f0f0f;
        __builtin_memcpy(block->codes[g][j][2 * eight], &low, sizeof low);
        __builtin_memcpy(block->codes[g][j][2 * eight + 1], &high, sizeof high);
      }
    }
  }
}

// dots = codes of weights times first bytes of activations, of `count` groups from `first` on.
template <int kRowTiles>
BROS_INLINE void multiply_codes(const char* x, int64_t x_stride, int64_t first, int64_t count,
                                SpreadBlock* block) {
  for (int64_t g = 0; g < count; ++g) {
    const char* bytes = reinterpret_cast<const char*>(Int4Panel::activations(x, first + g).high);
    unrolled<kRowTiles>([&](auto r) {
      load_tile<a_tile(r.value)>(bytes + r.value * kTileRows * x_stride, x_stride);
    });
    unrolled<2>([&](auto j) {
      load_tile<b_tile(j.value)>(block->codes[first + g][j.value], kTileRowBytes);
      unrolled<kRowTiles>([&](auto r) {
        constexpr int kC = c_tile(r.value, j.value, 2);
        zero_tile<kC>();
        add_code_product<kC, a_tile(r.value), b_tile(j.value)>();
      });
    });
    unrolled<kRowTiles>([&](auto r) {
      unrolled<2>([&](auto j) {
        store_tile<c_tile(r.value, j.value, 2)>(block->dots[g][r.value][j.value], kTileRowBytes);
      });
    });
  }
}

// out[r * stride + i] (+)= these groups, for rows [row, row + R) of a part and i < width.
template <int R>
BROS_INLINE void scale_rows(const char* x, int64_t x_stride, int64_t row, int64_t first,
                            int64_t count, const SpreadBlock& block, bool carry, float* out,
                            int64_t stride, int64_t width) {
  __mmask16 some[2];
  for (int j = 0; j < 2; ++j) {
    some[j] = _cvtu32_mask16(
        width >= kPanelOutputs ? 0xffff : ((1u << width) - 1) >> j * kLanes & 0xffff);
  }
  const ActivationGroup* groups[R];
  Vec sum[R][2] = {};
  for (int r = 0; r < R; ++r) {
    groups[r] = &Int4Panel::activations(x + (row + r) * x_stride, first);
    for (int j = 0; carry && j < 2; ++j) {
      sum[r][j] = _mm512_maskz_loadu_ps(some[j], out + (row + r) * stride + j * kLanes);
    }
  }
  for (int64_t g = 0; g < count; ++g) {
    for (int j = 0; j < 2; ++j) {
      const Vec scale = load(block.scales[first + g] + j * kLanes);
      const Vec minimum = load(block.minima[first + g] + j * kLanes);
      for (int r = 0; r < R; ++r) {
        const int64_t at = row + r;
        const int32_t* dots = block.dots[g][at / kTileRows][j][at % kTileRows];
        const Vec dot = to_float(bit_cast<IntVec>(_mm512_load_si512(dots)));
        sum[r][j] = add_scaled(sum[r][j], dot, scale, minimum, groups[r][g]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < 2; ++j) {
      _mm512_mask_storeu_ps(out + (row + r) * stride + j * kLanes, some[j], sum[r][j]);
    }
  }
}

// A block of a panel for all rows, as block_rows in linear.h has it.
template <class Panel>
void block_rows_by_tiles(const LinearArgs& a, const Inputs& in, const Rows& rows, int64_t at,
                         int64_t) {
  static_assert(is_same<Panel, Int4Panel>, "");
  static thread_local Scratch scratch;
  SpreadBlock* block = static_cast<SpreadBlock*>(scratch.reserve(sizeof(SpreadBlock)));
  if (!block) __builtin_trap();  // 57 KB
  const int64_t groups = in.count / kGroup, width = a.outputs - at;
  spread_codes(in.weights + in.first / kGroup * Panel::kGroupBytes, groups, block);
  ThreadTiles tiles;
  for_row_tiles(rows.count, [&](auto row_tiles, int64_t row, int64_t count) {
    tiles.configure(product_shapes(row_tiles.value, 2, count, kGroup));
    const char* x = in.x + row * in.x_stride;
    float* out = rows.out + row * a.outputs + at;
    for (int64_t g = 0; g < groups; g += kStoredGroups) {
      const int64_t some = min_of(kStoredGroups, groups - g);
      const bool carry = in.carry || g > 0;
      multiply_codes<row_tiles.value>(x, in.x_stride, g, some, block);
      int64_t r = 0;
      for (; r + 4 <= count; r += 4) {
        scale_rows<4>(x, in.x_stride, r, g, some, *block, carry, out, a.outputs, width);
      }
      for (; r < count; ++r) {
        scale_rows<1>(x, in.x_stride, r, g, some, *block, carry, out, a.outputs, width);
      }
    }
  });
}

}  // namespace
}  // namespace bros

#else

namespace bros {
namespace {

using Bf16Format = Bf16Panel;

}  // namespace
}  // namespace bros

#endif
