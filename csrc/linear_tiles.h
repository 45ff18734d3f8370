// Products by tile registers (tiles.h): bf16 for any number of rows, int8 and int4 for many.
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
// codes of a group are exact, so int8 and int4 have the bits of their kernels of vectors
// (linear_formats.h), which few rows use.
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

// `count` rows in A tile i and in the C tiles of its products with `columns` columns of outputs.
inline void set_rows(TileShapes* shapes, int i, int columns, int64_t count, int64_t depth) {
  shapes->set(a_tile(i), count, depth);
  for (int j = 0; j < columns; ++j) shapes->set(c_tile(i, j, columns), count, kTileRowBytes);
}

inline void set_columns(TileShapes* shapes, int64_t depth) {
  for (int j = 0; j < 2; ++j) shapes->set(b_tile(j), depth / 4, kTileRowBytes);
}

// For `rows` rows in `row_tiles` row tiles, `columns` columns of outputs, and rows of A of `depth`
// bytes.
inline TileShapes product_shapes(int row_tiles, int columns, int64_t rows, int64_t depth) {
  TileShapes shapes;
  for (int r = 0; r < row_tiles; ++r) {
    const int64_t count = min_of<int64_t>(kTileRows, rows - r * kTileRows);
    set_rows(&shapes, r, columns, count, depth);
  }
  set_columns(&shapes, depth);
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
        add_product<TileProduct::kBf16, c_tile(r.value, j.value, kColumns), a_tile(r.value),
                    b_tile(j.value)>();
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

using Bf16Format = Bf16Tiles;

// ---- Codes, int8 and int4: the sums of a group come from tiles, and scales are applied with
// ---- vectors, by the functions that the kernels of vectors call.
//
//     A    16 rows x 32 bytes of activations: the two bytes of int8 are two tiles
//     B    8 rows of 4 inputs x 16 outputs: codes of weights, as bytes
//     C    16 rows x 16 outputs in int32, stored, since vectors cannot read a tile
//
// A group of 32 inputs, 16 rows and a vector of outputs take, in cycles of Sapphire Rapids (two
// operations of vectors at a time, one product of tiles in 16, one row of a tile stored at a time):
//
//                        codes                          scales and minima               together
//     int4   vectors     16 x 8 products:     64        16 x 4 operations:      32      96
//            tiles       1 product:           16        32                              32 to 64
//                        stores of C:         16, beside them
//     int8   vectors     16 x 16 products:   128        16 x 2.25 operations:   18      146
//            tiles       2 products:          32        16 x 4.25 operations:   34      34 to 98
//                        stores of 2 C:       32, beside them
//
// The lower number holds if everything overlaps. Fewer rows do not make up for spreading the codes
// of int4, 8 cycles, and for products that take 16 with any number of rows. (Those of int8 are not
// spread, so it might use tiles from 12 rows on.) This is an estimate, not a measurement.
static_assert(kFewestTileRows == kTileRows, "");

// Sums of groups that are stored before scales are applied: 16 KB, so that sums of rows are loaded
// and stored once for four groups.
constexpr int64_t kStoredGroups = 4;

struct GroupDots {
  alignas(64) int32_t of[2][2][kTileRows][kTileOutputs];  // A tile, vector of outputs
};

// dots [g] = the products of group g of `codes`, which are
//
//     kTiles                number of A tiles, with rows x_stride bytes apart
//     product(i)            how bytes of A tile i are multiplied
//     left(g, i)            A tile i of group g
//     right(g, j)           vector j of outputs of the weights, with rows kRightStride bytes apart
//     scale(row, groups, dots, sum)
//                           sum[r][j] += rows [row, row + R) of the groups, from their dots
template <class Codes>
BROS_INLINE void multiply_codes(const Codes& codes, int64_t groups, GroupDots* dots) {
  for (int64_t g = 0; g < groups; ++g) {
    unrolled<Codes::kTiles>([&](auto i) {
      load_tile<a_tile(i.value)>(codes.left(g, i.value), codes.x_stride);
    });
    unrolled<2>([&](auto j) {
      load_tile<b_tile(j.value)>(codes.right(g, j.value), Codes::kRightStride);
      unrolled<Codes::kTiles>([&](auto i) {
        constexpr int kC = c_tile(i.value, j.value, 2);
        zero_tile<kC>();
        add_product<Codes::product(i.value), kC, a_tile(i.value), b_tile(j.value)>();
      });
    });
    unrolled<Codes::kTiles>([&](auto i) {
      unrolled<2>([&](auto j) {
        store_tile<c_tile(i.value, j.value, 2)>(dots[g].of[i.value][j.value], kTileRowBytes);
      });
    });
  }
}

BROS_INLINE IntVec load_dots(const int32_t (&dots)[kTileOutputs]) {
  return bit_cast<IntVec>(_mm512_load_si512(dots));
}

// The sums of `rows` rows: out[r * stride + i] for i < width, from 0 without `carry`.
struct TileSums {
  float* out;
  int64_t stride, width, rows;
  bool carry;
};

template <int R, class Codes>
BROS_INLINE void scale_rows(const Codes& codes, int64_t groups, const GroupDots* dots,
                            const TileSums& sums, int64_t row) {
  __mmask16 some[2];
  for (int j = 0; j < 2; ++j) {
    some[j] = _cvtu32_mask16(
        sums.width >= kPanelOutputs ? 0xffff : ((1u << sums.width) - 1) >> j * kLanes & 0xffff);
  }
  Vec sum[R][2] = {};
  for (int r = 0; r < R; ++r) {
    for (int j = 0; sums.carry && j < 2; ++j) {
      sum[r][j] =
          _mm512_maskz_loadu_ps(some[j], sums.out + (row + r) * sums.stride + j * kLanes);
    }
  }
  codes.scale(row, groups, dots, sum);
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < 2; ++j) {
      _mm512_mask_storeu_ps(sums.out + (row + r) * sums.stride + j * kLanes, some[j], sum[r][j]);
    }
  }
}

// sums += up to kStoredGroups groups of `codes`, whose tiles are configured.
template <class Codes>
BROS_INLINE void add_codes(const Codes& codes, int64_t groups, GroupDots* dots,
                           const TileSums& sums) {
  multiply_codes(codes, groups, dots);
  int64_t row = 0;
  for (; row + 4 <= sums.rows; row += 4) scale_rows<4>(codes, groups, dots, sums, row);
  for (; row < sums.rows; ++row) scale_rows<1>(codes, groups, dots, sums, row);
}

// ---- int8: codes of activations are 256 * high + low, bytes with a sign and without one, so that
//
//     sum of w * a = 256 * (sum of w * high) + (sum of w * low)
//
// which is exact in int32. Weights are multiplied where they lie in the panel, whose rows of four
// inputs are two B tiles side by side. Activations are rounded to tiles at once, in a format for
// products of many rows.

// As ActivationBlock in linear_formats.h, with the two bytes of a code apart. A row of a tile lies in
// one cache line.
struct alignas(64) ActivationBytes {
  uint8_t bytes[kBlockGroups][2][kGroup];  // high, low
  float scale;
};

struct Int8Tiles {
  static constexpr bool kRounds = true;
  static constexpr int kStep = kBlockGroups * kGroup, kStepBytes = sizeof(ActivationBytes);

  static void round(const float* x, int64_t inputs, char* out) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    ActivationBytes* block = reinterpret_cast<ActivationBytes*>(out);
    for (int64_t k = 0; k < inputs; k += kStep, ++block) {
      const int groups = static_cast<int>(min_of<int64_t>(kStep, inputs - k) / kGroup);
      block->scale = round_codes(x + k, groups, [&](int g, int j, IntVec code) {
        const Bytes high = __builtin_convertvector(code >> 8, Bytes);
        const Bytes low = __builtin_convertvector(code, Bytes);
        __builtin_memcpy(block->bytes[g][0] + j * kLanes, &high, sizeof high);
        __builtin_memcpy(block->bytes[g][1] + j * kLanes, &low, sizeof low);
      });
    }
  }
};
template <>
constexpr bool kAllByTiles<Int8Tiles> = true;

// A block of activations of up to 16 rows, and the same groups of a panel.
struct Int8Codes {
  static constexpr int kTiles = 2;
  static constexpr int64_t kRightStride = 2 * kTileRowBytes;
  const char* x;
  int64_t x_stride;
  const char* weights;

  static constexpr TileProduct product(int byte) {
    return byte ? TileProduct::kUnsignedSigned : TileProduct::kSignedSigned;
  }
  const void* left(int64_t g, int byte) const { return activations(0).bytes[g][byte]; }
  const void* right(int64_t g, int j) const {
    return group(g) + 4 * kPanelOutputs + j * kTileRowBytes;
  }

  template <int R>
  BROS_INLINE void scale(int64_t row, int64_t groups, const GroupDots* dots,
                         Vec (&sum)[R][2]) const {
    Vec block[R][2] = {};
    for (int64_t g = 0; g < groups; ++g) {
      for (int j = 0; j < 2; ++j) {
        const Vec scale = load(reinterpret_cast<const float*>(group(g)) + j * kLanes);
        for (int r = 0; r < R; ++r) {
          const IntVec high = load_dots(dots[g].of[0][j][row + r]);
          const IntVec low = load_dots(dots[g].of[1][j][row + r]);
          block[r][j] = add_scaled(block[r][j], to_float((high << 8) + low), scale);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < 2; ++j) {
        sum[r][j] = add_block(sum[r][j], block[r][j], activations(row + r).scale);
      }
    }
  }

 private:
  BROS_INLINE const ActivationBytes& activations(int64_t row) const {
    return *reinterpret_cast<const ActivationBytes*>(x + row * x_stride);
  }
  BROS_INLINE const char* group(int64_t g) const { return weights + g * Int8Panel::kGroupBytes; }
};

// One panel for all rows. Its weights for kTileInputs inputs, 18 KB, stay in the first cache.
inline void int8_panel(const LinearArgs& a, const Rows& rows, int64_t panel, ThreadTiles* tiles) {
  static_assert(kStoredGroups == kBlockGroups && kTileInputs % Int8Tiles::kStep == 0, "");
  const int64_t at = panel * kPanelOutputs;
  const char* weights = static_cast<const char*>(a.weights) + panel * Int8Panel::bytes(a.inputs);
  GroupDots dots[kStoredGroups];
  for (int64_t first = 0; first < a.inputs; first += kTileInputs) {
    const int64_t end = min_of(first + kTileInputs, a.inputs);
    for (int64_t row = 0; row < rows.count; row += kTileRows) {
      const int64_t count = min_of(kTileRows, rows.count - row);
      TileShapes shapes;
      for (int byte = 0; byte < 2; ++byte) set_rows(&shapes, byte, 2, count, kGroup);
      set_columns(&shapes, kGroup);
      tiles->configure(shapes);
      const char* x = rows.x + row * rows.x_stride;
      float* out = rows.out + row * a.outputs + at;
      for (int64_t k = first; k < end; k += Int8Tiles::kStep) {
        const int64_t groups = min_of<int64_t>(Int8Tiles::kStep, end - k) / kGroup;
        const Int8Codes codes = {x + k / Int8Tiles::kStep * Int8Tiles::kStepBytes, rows.x_stride,
                                 weights + Int8Panel::bytes(k)};
        add_codes(codes, groups, dots, {out, a.outputs, a.outputs - at, count, k > 0});
      }
    }
  }
}

using Int8ManyFormat = Int8Tiles;

// ---- int4: first bytes of activations, as they lie in the groups of a row. Codes of 4 bits are
// ---- spread to bytes once per block of a panel.

template <>
constexpr bool kManyByTiles<Int4Panel> = true;

// A block of a panel for tiles.
struct SpreadBlock {
  static constexpr int64_t kGroups = kInputBlock / kGroup;
  alignas(64) uint8_t codes[kGroups][2][kGroup / 4][kTileRowBytes];  // per vector of outputs
  alignas(64) float scales[kGroups][kPanelOutputs], minima[kGroups][kPanelOutputs];
  GroupDots dots[kStoredGroups];
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

// Groups from `first` on of a block of a panel and of the rows of kRowTiles row tiles.
template <int kRowTiles>
struct Int4Codes {
  static constexpr int kTiles = kRowTiles;
  static constexpr int64_t kRightStride = kTileRowBytes;
  const char* x;
  int64_t x_stride;
  const SpreadBlock& block;
  int64_t first;

  static constexpr TileProduct product(int) { return TileProduct::kSignedUnsigned; }
  const void* left(int64_t g, int row_tile) const {
    return activations(row_tile * kTileRows, g).high;
  }
  const void* right(int64_t g, int j) const { return block.codes[first + g][j]; }

  template <int R>
  BROS_INLINE void scale(int64_t row, int64_t groups, const GroupDots* dots,
                         Vec (&sum)[R][2]) const {
    for (int64_t g = 0; g < groups; ++g) {
      for (int j = 0; j < 2; ++j) {
        const Vec scale = load(block.scales[first + g] + j * kLanes);
        const Vec minimum = load(block.minima[first + g] + j * kLanes);
        for (int r = 0; r < R; ++r) {
          const int64_t at = row + r;
          const Vec dot = to_float(load_dots(dots[g].of[at / kTileRows][j][at % kTileRows]));
          sum[r][j] = add_scaled(sum[r][j], dot, scale, minimum, activations(at, g));
        }
      }
    }
  }

 private:
  BROS_INLINE const ActivationGroup& activations(int64_t row, int64_t g) const {
    return Int4Panel::activations(x + row * x_stride, first + g);
  }
};

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
      const int64_t stored = min_of(kStoredGroups, groups - g);
      const Int4Codes<row_tiles.value> codes = {x, in.x_stride, *block, g};
      add_codes(codes, stored, block->dots, {out, a.outputs, width, count, in.carry || g > 0});
    }
  });
}

// ---- Products that consist of tiles, of bf16 and of many rows of int8.

// Activations that stay in the second cache (2 MB) for all panels.
constexpr int64_t kTileRowBlockBytes = 1024 * 1024;

// Panels [begin, end) of all rows.
template <class Panel>
void tile_panels(const LinearArgs& a, const Rows& all, int64_t begin, int64_t end) {
  static_assert(kAllByTiles<Panel>, "");
  constexpr bool kIsBf16 = is_same<Panel, Bf16Tiles>;
  ThreadTiles tiles;
  if (kIsBf16 && all.count <= kTileRows) {
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
    for (int64_t p = begin; p < end; ++p) {
      if constexpr (kIsBf16) {
        bf16_panels<1>(a, rows, p, &tiles);
      } else {
        int8_panel(a, rows, p, &tiles);
      }
    }
  }
}

}  // namespace
}  // namespace bros

#else

namespace bros {
namespace {

using Bf16Format = Bf16Panel;
using Int8ManyFormat = Int8Panel;

}  // namespace
}  // namespace bros

#endif
