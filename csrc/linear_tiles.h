// Products by tile registers (tiles.h), of any number of rows. fp32 has none.
//
// All of them are products of bf16. A panel of bf16 has the layout of tiles already: 16 pairs of
// inputs and all 32 outputs are two B tiles side by side. Codes of int8 and int4 are widened to the
// same. Activations are rounded to A tiles, each in one piece:
//
//     panel, bf16         outputs 0 .. 15    outputs 16 .. 31
//     inputs  0,  1    [ 16 pairs, 64 bytes | 16 pairs, 64 bytes ]  ┐
//     inputs  2,  3    [                    |                    ]  │ a B tile each, 16 rows in
//     ..                                                            │ steps of 128 bytes
//     inputs 30, 31    [                    |                    ]  ┘
//
//     x, bf16             inputs 0 .. 31     32 .. 63   ..   padded with 0 to a multiple of 32
//     rows  0 .. 15    [ A tile, 1 KB      | A tile   | .. ]
//     rows 16 .. 31    [ A tile            | A tile   | .. ]
//
// Registers, for up to 32 rows of one panel, or up to 16 rows of two (few rows of codes have others,
// see FewRowsOfCodes):
//
//     R = 2 row tiles, 1 panel              R = 1 row tile, 2 panels
//
//                  B 6      B 7                          B 6      B 7      B 6      B 7
//     A 4 (x)      C 0      C 1             A 4 (x)      C 0      C 1      C 2      C 3
//     A 5 (x)      C 2      C 3
//
// Four sums hide the latency of a product (52 cycles of Sapphire Rapids, 16 until the next can
// start). With two row tiles, every tile that is loaded is multiplied twice: 4 loads of 1 KB (32
// cycles, of the first cache) for 4 products (64 cycles). From the second cache, whose limit is 1 KB
// in 16 cycles, they would take as long as the products. So the weights of a block stay in the first
// one, and x is loaded by instructions that leave them there (load_tile_once): products of 1,024 rows
// take 0.8 of the time so.
//
// Up to 32 rows keep their sums in registers for all inputs: each weight is read once. More rows are
// multiplied in blocks, as the caches have room, from the outermost loop to the innermost:
//
//     block of rows      about 256         read each weight from memory once
//     group of panels    16                have sums of 512 KB, carried from part to part
//     part of inputs     about 1,700       x of the block of rows, 1 MB, stays in the second cache
//     panel              32 outputs
//     block of inputs    up to 576         all row tiles read its weights, 36 KB, which were fetched
//                                          into the second cache during the block before, or were
//                                          widened
//     two row tiles      32                four sums in registers
//
//                    part of inputs                          group of panels
//                  ┌───────┬───────┐                      ┌────┬────┬────┬───
//     block of     │ x     │       │       ·    block of  │    │    │    │       =  sums of the block
//     rows         │       │       │            inputs    ├────┼────┼────┼───
//                  ├───────┼───────┤                      │    │    │    │
//
// If all inputs are one part, a group is one panel. A layer of 8,192 inputs has five parts: with the
// x of all inputs in the cache, a block would have 64 rows, and weights would be read four times as
// often, which takes more time than products do. From block to block of inputs the sums of a panel
// are stored and loaded again, 64 KB, while its products take 9,216 cycles.
//
// Sums are carried in a buffer of [rows, 32], not in `out`, whose rows are a power of two apart in
// many layers: the rows of a tile would share one or two sets of the first cache. The last block of
// inputs stores to `out` at once, tile by tile, so that its misses are spread among products. The
// lines of `out` are fetched for writing while the sums are made: where a thread waits for them when
// it stores, products of 1,024 rows take 1.4 times as long. Tiles are always full in a block: rows
// behind the last are multiplied, too, and dropped, since a product of fewer rows takes as long and
// another configuration takes longer.
//
// **Same bits.** An output of bf16 is, step by step of 32 inputs, increased by the sum of its even
// and the sum of its odd products. These depend on nothing but the row and the output: the other
// rows of a tile, their number and the blocks only decide which register holds a sum. AVX-512's
// products of bf16 are rounded otherwise, so no row is multiplied by vectors. (Few rows of codes are B
// instead of A, which changes no sum.)
#pragma once

#include "linear_formats.h"
#include "linear_rows.h"
#include "parallel.h"
#include "tiles.h"

#if defined(BROS_MULTIPLIES_TILES)

namespace bros {
namespace {

constexpr int64_t kTileRows = kMostTileRows, kTileOutputs = kLanes;
constexpr int64_t kTileInputs = 32;  // of bf16
static_assert(kRowsOfTile == kTileRows, "");

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

// For `rows` rows in `row_tiles` row tiles and `columns` columns of outputs, of bf16.
inline TileShapes product_shapes(int row_tiles, int columns, int64_t rows) {
  TileShapes shapes;
  for (int r = 0; r < row_tiles; ++r) {
    const int64_t count = min_of<int64_t>(kTileRows, rows - r * kTileRows);
    set_rows(&shapes, r, columns, count, kTileRowBytes);
  }
  set_columns(&shapes, kTileRowBytes);
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

// ---- Blocks of many rows.

#if defined(BROS_MODEL)
// Small ones, so that small shapes, which tests use, have several blocks of each kind.
constexpr int64_t kBlockRows = 64, kBlockPanels = 2, kBlockInputs = 32;
constexpr int64_t kBlockXBytes = 24 * 1024;
#else
constexpr int64_t kBlockRows = 256, kBlockPanels = 16, kBlockInputs = 576;
constexpr int64_t kBlockXBytes = 1024 * 1024;
#endif

// Weights of the next block, which are brought into the second cache a few lines at a time while
// those of a block are multiplied.
class Ahead {
 public:
  Ahead(const char* from, int64_t bytes) : at_(from), end_(from ? from + bytes : from) {}

  int64_t lines() const { return ceil_div(end_ - at_, 64); }

  BROS_INLINE void fetch(int64_t lines) {
    for (; lines > 0 && at_ < end_; --lines, at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const char* at_;
  const char* end_;
};

// A block of inputs of one panel, for the rows of a block.
struct TileBlock {
  Rows rows;            // `out` at the first output of the panel
  int64_t inputs;       // of the layer
  int64_t outputs;      // of the layer
  int64_t width;        // outputs of the panel
  const char* weights;  // of the panel
  int64_t k, count;     // inputs [k, k + count)
  float* sums;          // [kTileRows * n, kPanelOutputs]: those of inputs [0, k), if there are some
  Ahead ahead;

  bool is_first() const { return k == 0; }
  bool is_last() const { return k + count == inputs; }
  float* sums_of(int64_t row) const { return sums + row * kPanelOutputs; }

  // To `out`, which may be the sums themselves.
  void copy_sums(int64_t row, int64_t n) const {
    if (rows.out == sums) return;
    for (int64_t r = row; r < row + n; ++r) {
      copy_floats(rows.out + r * outputs, sums_of(r), width);
    }
  }
};

// The blocks of one block of rows in their order: parts of the inputs of a group of panels, panels
// of the group, and blocks of inputs.
class TileWalk {
 public:
  // Panels [begin, end), about equal blocks of up to `most_inputs` inputs.
  TileWalk(const Rows& rows, int64_t inputs, int64_t begin, int64_t end, int64_t most_inputs)
      : inputs_(inputs), end_(end), group_(begin), panel_(begin) {
    const int64_t blocks = ceil_div(inputs, most_inputs);
    block_ = about_equal(inputs, most_inputs, kTileInputs);
    const int64_t most =
        max_of<int64_t>(kBlockXBytes * blocks / (rows.count * rows.x_stride), 1);
    const int64_t parts = ceil_div(blocks, most);
    part_ = ceil_div(blocks, parts) * block_;
    panels_ = parts > 1 ? kBlockPanels : 1;
  }

  int64_t most_panels() const { return min_of(panels_, end_ - group_); }
  bool done() const { return group_ >= end_; }
  int64_t panel() const { return panel_; }
  int64_t panel_of_group() const { return panel_ - group_; }
  int64_t k() const { return k_; }
  int64_t count() const { return min_of(block_, inputs_ - k_); }

  void advance() {
    k_ += block_;
    if (k_ < min_of(first_ + part_, inputs_)) return;
    k_ = first_;
    if (++panel_ < min_of(group_ + panels_, end_)) return;
    panel_ = group_;
    k_ = first_ += part_;
    if (first_ < inputs_) return;
    panel_ = group_ += panels_;
    k_ = first_ = 0;
  }

 private:
  int64_t inputs_, end_, block_, part_, panels_;
  int64_t group_, first_ = 0;  // the first panel of the group and the first input of the part
  int64_t panel_, k_ = 0;
};

// How a format multiplies a block:
//
//     kInputs             the most inputs of a block
//     multiply(block)     sums, and `out` with the last inputs
template <class Panel>
struct BlocksOf;

// Panels [begin, end) of all rows, with full tiles: what lies behind the last row is multiplied,
// too, but no part of `out`.
template <class Panel>
void many_rows_by_tiles(const LinearArgs& a, const Rows& all, int64_t begin, int64_t end) {
  using Blocks = typename BlocksOf<Panel>::Type;
  static thread_local Scratch scratch;
  ThreadTiles tiles;
  tiles.configure(product_shapes(2, 2, 2 * kTileRows));
  const int64_t most = about_equal(all.count, kBlockRows, 2 * kTileRows);
  const int64_t panel_bytes = Panel::bytes(a.inputs);
  for (int64_t row = 0; row < all.count; row += most) {
    const Rows rows = {all.x + row * all.x_stride, all.x_stride, all.out + row * a.outputs,
                       min_of(most, all.count - row)};
    TileWalk walk(rows, a.inputs, begin, end, Blocks::kInputs);
    const int64_t panel_sums = round_up(rows.count, kTileRows) * kPanelOutputs;
    float* sums = static_cast<float*>(
        scratch.reserve(walk.most_panels() * panel_sums * sizeof(float)));
    if (!sums) __builtin_trap();  // 512 KB at most
    const auto weights = [&](const TileWalk& at) {
      return static_cast<const char*>(a.weights) + at.panel() * panel_bytes;
    };
    while (!walk.done()) {
      TileWalk next = walk;
      next.advance();
      const int64_t first = walk.panel() * kPanelOutputs;
      const Ahead ahead =
          next.done() ? Ahead(nullptr, 0)
                      : Ahead(weights(next) + Panel::bytes(next.k()), Panel::bytes(next.count()));
      Blocks::multiply({{rows.x, rows.x_stride, rows.out + first, rows.count},
                        a.inputs,
                        a.outputs,
                        min_of(kPanelOutputs, a.outputs - first),
                        weights(walk),
                        walk.k(),
                        walk.count(),
                        sums + walk.panel_of_group() * panel_sums,
                        ahead});
      walk = next;
    }
  }
}

// ---- bf16.

// Activations are rounded to bf16 in tiles, which have fewer rows only if the product has fewer than
// 16. (Rows in one piece each would be in 16 pages, for a layer of 2,048 inputs.) The tiles of 16
// rows have 16 x_stride bytes, as many as the rows would.
struct Bf16Tiles {
  static constexpr bool kRounds = true;
  static constexpr int kStep = kTileInputs, kStepBytes = kTileRowBytes;
  static constexpr int64_t kStepWeights = kStep * kPanelOutputs * 2;  // bytes of a panel
  static constexpr int64_t bytes(int64_t inputs) { return inputs * kPanelOutputs * 2; }
  static int64_t tile_bytes(int64_t rows) { return min_of(rows, kTileRows) * kTileRowBytes; }

  // All rows of a.x.
  static void round_all(const LinearArgs& a, char* out) {
    parallel_for(a.rows, a.rows * a.inputs, a.threads, [&](int64_t begin, int64_t end) {
      round_rows(a, begin, end, out);
    });
  }

  // Rows [begin, end) of a.x, part by part of the inputs, so that the lines of a tile are written
  // one after the other.
  static void round_rows(const LinearArgs& a, int64_t begin, int64_t end, char* out) {
    constexpr int64_t kPart = 8 * kStep;
    const int64_t steps = ceil_div(a.inputs, kStep), bytes = tile_bytes(a.rows);
    for (int64_t first = begin; first < end;) {
      const int64_t tile = first / kTileRows, after = min_of((tile + 1) * kTileRows, end);
      char* tiles = out + tile * steps * bytes;
      for (int64_t k = 0; k < a.inputs; k += kPart) {
        const int64_t count = min_of(kPart, a.inputs - k);
        for (int64_t r = first; r < after; ++r) {
          round(a.x + r * a.inputs + k, count,
                tiles + k / kStep * bytes + r % kTileRows * kStepBytes, bytes);
        }
      }
      first = after;
    }
  }

 protected:
  BROS_INLINE static void round(const float* x, int64_t inputs, char* to, int64_t step_bytes) {
    for (int64_t k = 0; k < inputs; k += kStep, to += step_bytes) {
      for (int64_t j = 0; j < kStep; j += kLanes) {
        const int64_t count = inputs - k - j;
        const Vec values = count >= kLanes ? load(x + k + j)
                           : count > 0     ? load_first(x + k + j, count)
                                           : Vec{};
        const __m256bh half = _mm512_cvtneps_pbh(values);
        __builtin_memcpy(to + 2 * j, &half, sizeof half);
      }
    }
  }
};
template <>
constexpr bool kByTiles<Bf16Tiles> = true;

// What a sum adds up.
struct Bf16Steps {
  const char* x;
  int64_t x_tile, x_step;  // bytes from a row tile, from a step to the next
  const char* weights;
  int64_t panel_bytes;
  int64_t count;     // whole steps
  const char* last;  // null, or the weights of one more, with zeros behind the last input
};

// Weights that are fetched ahead of a product of few rows, in bytes of each panel.
constexpr int64_t kStreamAhead = 8192;

// The C tiles += kRowTiles row tiles times kPanels panels. before_step(weights) comes first.
// kManyRows: other rows are multiplied with these weights next, but other weights with these rows
// not before they have left the first cache.
template <int kRowTiles, int kPanels, bool kManyRows, class BeforeStep>
BROS_INLINE void add_bf16(Bf16Steps steps, const BeforeStep& before_step) {
  constexpr int kColumns = 2 * kPanels;
  const char* x = steps.x;
  const auto step = [&](const char* weights, int64_t panel_bytes) {
    unrolled<kRowTiles>([&](auto r) {
      const char* from = x + r.value * steps.x_tile;
      if constexpr (kManyRows) {
        load_tile_once<a_tile(r.value)>(from, kTileRowBytes);
      } else {
        load_tile<a_tile(r.value)>(from, kTileRowBytes);
      }
    });
    unrolled<kColumns>([&](auto j) {
      load_tile<b_tile(j.value)>(weights + j.value / 2 * panel_bytes + j.value % 2 * kTileRowBytes,
                                 2 * kTileRowBytes);
      unrolled<kRowTiles>([&](auto r) {
        add_product<c_tile(r.value, j.value, kColumns), a_tile(r.value), b_tile(j.value)>();
      });
    });
    x += steps.x_step;
  };
  const char* weights = steps.weights;
  for (int64_t i = 0; i < steps.count; ++i, weights += Bf16Tiles::kStepWeights) {
    before_step(weights);
    step(weights, steps.panel_bytes);
  }
  if (steps.last) step(steps.last, Bf16Tiles::kStepWeights);
}

// body(tile, row, output) for each C tile.
template <int kRowTiles, int kColumns, class Body>
BROS_INLINE void for_sums(const Body& body) {
  unrolled<kRowTiles>([&](auto r) {
    unrolled<kColumns>([&](auto j) {
      body(Number<c_tile(r.value, j.value, kColumns)>(), r.value * kTileRows,
           j.value * kTileOutputs);
    });
  });
}

// The weights of the last inputs of kPanels panels, if these are no whole step.
template <int kPanels>
class LastStep {
 public:
  LastStep(const char* weights, int64_t inputs) {
    const int64_t bytes = Bf16Tiles::bytes(inputs);
    const int64_t rest = Bf16Tiles::bytes(inputs % Bf16Tiles::kStep);
    if (!rest) return;
    for (int p = 0; p < kPanels; ++p) {
      char* to = data_ + p * Bf16Tiles::kStepWeights;
      __builtin_memcpy(to, weights + (p + 1) * bytes - rest, rest);
      __builtin_memset(to + rest, 0, Bf16Tiles::kStepWeights - rest);
    }
    found_ = true;
  }
  const char* get() const { return found_ ? data_ : nullptr; }

 private:
  bool found_ = false;
  alignas(64) char data_[kPanels * Bf16Tiles::kStepWeights];
};

class Bf16Blocks {
 public:
  static constexpr int64_t kInputs = kBlockInputs;

  static void multiply(const TileBlock& block) {
    const char* weights = block.weights + Bf16Tiles::bytes(block.k);
    if (block.count % Bf16Tiles::kStep == 0) return multiply(block, weights, nullptr);
    const LastStep<1> last(block.weights, block.inputs);
    multiply(block, weights, last.get());
  }

  // weights: of the whole steps of the block; last: see Bf16Steps.
  static void multiply(TileBlock block, const char* weights, const char* last) {
    const int64_t steps = block.count / Bf16Tiles::kStep;
    const int64_t all = ceil_div(block.rows.count, 2 * kTileRows) * max_of<int64_t>(steps, 1);
    const int64_t lines = ceil_div(block.ahead.lines(), all);  // a step
    for_row_tiles(block.rows.count, [&](auto row_tiles, int64_t row, int64_t count) {
      const Bf16Steps part = {
          block.rows.x + row * block.rows.x_stride +
              block.k / Bf16Tiles::kStep * kTileRows * kTileRowBytes,
          kTileRows * block.rows.x_stride,
          kTileRows * kTileRowBytes,
          weights,
          0,
          steps,
          last};
      multiply_rows<row_tiles.value>(&block, part, row, count, lines);
    });
  }

 private:
  template <int kRowTiles>
  static void multiply_rows(TileBlock* block, const Bf16Steps& steps, int64_t row, int64_t count,
                            int64_t lines) {
    float* sums = block->sums_of(row);
    for_sums<kRowTiles, 2>([&](auto c, int64_t r, int64_t output) {
      if (block->is_first()) {
        zero_tile<c.value>();
      } else {
        load_tile<c.value>(sums + r * kPanelOutputs + output, kPanelOutputs * sizeof(float));
      }
    });
    const bool whole = count == kRowTiles * kTileRows && block->width == kPanelOutputs;
    const bool at_once = block->is_last() && whole;
    float* to = at_once ? block->rows.out + row * block->outputs : sums;
    const int64_t stride = at_once ? block->outputs : kPanelOutputs;
    // The last steps are the time that the last lines take to come.
    constexpr int64_t kRows = kRowTiles * kTileRows, kLastSteps = 2;
    const int64_t fetched = ceil_div(kRows, max_of<int64_t>(steps.count - kLastSteps, 1));
    const float* next = to;
    const float* const end = at_once ? to + kRows * stride : to;
    Ahead ahead = block->ahead;  // in registers
    add_bf16<kRowTiles, 1, true>(steps, [&](const char*) {
      ahead.fetch(lines);
      for (int64_t i = 0; i < fetched && next < end; ++i, next += stride) {
        __builtin_prefetch(next, 1);
        __builtin_prefetch(next + kTileOutputs, 1);
      }
    });
    block->ahead = ahead;
    for_sums<kRowTiles, 2>([&](auto c, int64_t r, int64_t output) {
      store_tile<c.value>(to + r * stride + output, stride * sizeof(float));
    });
    if (block->is_last() && !at_once) block->copy_sums(row, count);
  }
};
template <>
struct BlocksOf<Bf16Tiles> {
  using Type = Bf16Blocks;
};

using Bf16Format = Bf16Tiles;

// ---- int8 and int4: weights are widened to bf16, a block of a panel at a time, and multiplied as
// ---- those of bf16 are.
//
// Tiles of codes would have to be scaled output by output, group by group, with vectors, and one code
// of 8 bits for an activation needs a second one where it is large: that took 2 to 5 times as long for
// 64 rows and more, in int4 and in int8 (docs/decisions/0025).
//
// What widens a group makes rows of an A tile, one of each output:
//
//     inputs, bf16       [ input 0 | input 1 |   ..   | input 31 ]
//
// Few rows multiply it as it is, with x in B tiles, so that outputs are the rows of C; the sums have
// the same bits. Many rows want weights in B tiles, for which 16 outputs at a time are transposed.
// Codes lie in the order that this wants (linear_formats.h). A format of codes is a struct with
//
//     kGroupBytes                   of a group of a panel
//     kAhead                        bytes of codes that are fetched ahead for few rows
//     widen_group(group, put, between)
//                                   put(Number<o>, numbers) for each output of a panel: its inputs of
//                                   a group, 32 numbers of bf16. between(Number<q>) follows each four
//                                   outputs, 4q .. 4q + 3, for what runs beside them

// An output has at most 16 values in a group. They are computed as a vector of fp32, whose upper
// halves are the table in which 32 codes are looked up at once, by VPERMW: five instructions for 32
// weights, where code by code took ten, and products of one row took 1.5 times as long:
//
//     table, words       [ .. value 0 | .. value 1 |     ..     | .. value 15 ]
//     places, words      [ 2 * code of input 0 + 1 | .. of input 1 |   ..   | .. of input 31 ]
struct Int4Codes {
  static constexpr int64_t kGroupBytes = Int4Panel::kGroupBytes;
  // With 1,920 and 2,560 instead, products of 1 to 32 rows take 1.02 to 1.12 times as long; with
  // 6,400 as long.
  static constexpr int64_t kAhead = 4096;

  // value = code * scale + minimum, rounded to fp32 once, and to bf16, halves away from zero.
  template <class Put, class Between>
  BROS_INLINE static void widen_group(const char* group, const Put& put, const Between& between) {
    const Vec codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    alignas(64) float scales[kPanelOutputs], minima[kPanelOutputs];
    const Fp16* halves = reinterpret_cast<const Fp16*>(group);
    for (int j = 0; j < kPanelOutputs; j += kLanes) {
      store(scales + j, load(halves + j));
      store(minima + j, load(halves + kPanelOutputs + j));
    }
    // Otherwise the compiler would take the numbers from registers, by permutations, which need the
    // port of the look-ups: 1.25 times as long.
    __asm__ volatile("" : "+m"(scales), "+m"(minima));
    unrolled<kPanelOutputs / 4>([&](auto quad) {
      WordVec words;
      __builtin_memcpy(&words, group + 4 * kPanelOutputs + quad.value * sizeof words,
                       sizeof words);
      unrolled<4>([&](auto i) {
        constexpr int kOutput = 4 * quad.value + i.value, kBit = 4 * i.value;
        const Vec values = mul_add(codes, splat(scales[kOutput]), splat(minima[kOutput]));
        const IntVec table = bit_cast<IntVec>(values) + 0x8000;  // what rounds
        const WordVec places = (kBit ? words >> max_of(kBit - 1, 0) : words << 1) | 1;
        put(Number<kOutput>(),
            _mm512_permutexvar_epi16(bit_cast<__m512i>(places), bit_cast<__m512i>(table)));
      });
      between(quad);
    });
  }
};

// 32 codes of one output lie side by side. value = code * scale, rounded to fp32 and then to bf16, to
// nearest even.
struct Int8Codes {
  static constexpr int64_t kGroupBytes = Int8Panel::kGroupBytes;
  static constexpr int64_t kAhead = 8192;  // as many groups as of int4, about

  template <class Put, class Between>
  BROS_INLINE static void widen_group(const char* group, const Put& put, const Between& between) {
    const float* scales = reinterpret_cast<const float*>(group);
    unrolled<kPanelOutputs / 4>([&](auto quad) {
      unrolled<4>([&](auto i) {
        constexpr int kOutput = 4 * quad.value + i.value;
        const char* codes = group + 4 * kPanelOutputs + kOutput * kGroup;
        const Vec scale = splat(scales[kOutput]);
        const __m512bh numbers = _mm512_cvtne2ps_pbh(values(codes + kLanes) * scale,
                                                     values(codes) * scale);
        put(Number<kOutput>(), bit_cast<__m512i>(numbers));
      });
      between(quad);
    });
  }

 private:
  BROS_INLINE static Vec values(const char* codes) {
    __m128i bytes;
    __builtin_memcpy(&bytes, codes, sizeof bytes);
    return to_float(bit_cast<IntVec>(_mm512_cvtepi8_epi32(bytes)));
  }
};

template <class CodesOfPanel>
struct CodeTiles : Bf16Tiles {
  using Codes = CodesOfPanel;
  static int64_t bytes(int64_t inputs) { return groups_of(inputs) * Codes::kGroupBytes; }

  // Up to two row tiles are rounded to B tiles, of [16 pairs of inputs, rows] each; more to A tiles.
  static void round_all(const LinearArgs& a, char* out) {
    if (a.rows > 2 * kTileRows) return Bf16Tiles::round_all(a, out);
    const int64_t steps = ceil_div(a.inputs, kStep), bytes = tile_bytes(a.rows);
    // Not by rows: threads would write to the same lines.
    parallel_for(steps, a.rows * a.inputs, a.threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = 0; row < a.rows; row += kTileRows) {
        char* tiles = out + row / kTileRows * steps * bytes;
        const int64_t rows = min_of(kTileRows, a.rows - row);
        for (int64_t step = begin; step < end; ++step) {
          round_b_tile(a.x + row * a.inputs + step * kStep, a.inputs, rows,
                       min_of(kTileRows, a.rows), tiles + step * bytes);
        }
      }
    });
  }

  // out [inputs / 2][out]: as a panel of bf16. weights: of the group of the first of `inputs`
  // inputs, whole groups.
  static void widen(const char* weights, int64_t inputs, uint32_t* out) {
    for (int64_t g = 0; g < groups_of(inputs); ++g, weights += Codes::kGroupBytes) {
      Vec tile[kTileOutputs];
      const auto put = [&](auto output, __m512i numbers) {
        constexpr int kAt = output.value % kTileOutputs;
        tile[kAt] = bit_cast<Vec>(numbers);
        if constexpr (kAt == kTileOutputs - 1) {
          transpose(tile);
          float* to = reinterpret_cast<float*>(out) + output.value - kAt;
          for (int i = 0; i < kGroup / 2; ++i) store(to + i * kPanelOutputs, tile[i]);
        }
      };
      Codes::widen_group(weights, put, [](auto) {});
      out += kGroup / 2 * kPanelOutputs;
    }
  }

 private:
  // 32 inputs of `rows` rows, which lie x_stride numbers apart. `columns`: rows that the tile has room
  // for.
  BROS_INLINE static void round_b_tile(const float* x, int64_t x_stride, int64_t rows,
                                       int64_t columns, char* out) {
    Vec pairs[kTileRows];
    for (int64_t r = 0; r < rows; ++r) {
      round(x + r * x_stride, kStep, reinterpret_cast<char*>(pairs + r), kStepBytes);
    }
    if (columns == 1) {
      __builtin_memcpy(out, pairs, sizeof *pairs);
      return;
    }
    transpose(pairs);
    float* to = reinterpret_cast<float*>(out);
    for (int i = 0; i < kTileRows; ++i, to += columns) store_first(to, pairs[i], rows);
  }
};
template <class Codes>
constexpr bool kByTiles<CodeTiles<Codes>> = true;

template <class Codes>
struct CodeBlocks {
  static constexpr int64_t kInputs = kBlockInputs;

  static void multiply(const TileBlock& block) {
    alignas(64) char widened[Bf16Tiles::bytes(kBlockInputs)];
    CodeTiles<Codes>::widen(block.weights + CodeTiles<Codes>::bytes(block.k), block.count,
                            reinterpret_cast<uint32_t*>(widened));
    Bf16Blocks::multiply(block, widened, nullptr);
  }
};
template <class Codes>
struct BlocksOf<CodeTiles<Codes>> {
  using Type = CodeBlocks<Codes>;
};

using Int8Format = CodeTiles<Int8Codes>;
using Int4Format = CodeTiles<Int4Codes>;

// Panels of up to kRowTiles row tiles. Registers:
//
//                            B 6         B 7         x of rows 0 .. 15, 16 .. 31
//     A 4 (outputs 0 .. 15)  C 0         C 1
//     A 5 (16 .. 31)         C 2         C 3
template <class Codes, int kRowTiles>
class FewRowsOfCodes {
 public:
  FewRowsOfCodes(const LinearArgs& a, const Rows& rows)
      : a_(a), rows_(rows), x_row_bytes_(row_bytes(0)) {
    TileShapes shapes;
    for (int i = 0; i < 2; ++i) shapes.set(a_tile(i), kTileOutputs, kTileRowBytes);
    for (int j = 0; j < kRowTiles; ++j) {
      shapes.set(b_tile(j), kTileRows, row_bytes(j));
      for (int i = 0; i < 2; ++i) {
        shapes.set(c_tile(i, j, kRowTiles), kTileOutputs, row_bytes(j));
      }
    }
    tiles_.configure(shapes);
  }

  void multiply(int64_t begin, int64_t end) const {
    for (int64_t p = begin; p < end; ++p) multiply_panel(p);
  }

 private:
  // Groups are multiplied two later than they are widened, since a tile cannot be loaded before what
  // was stored there has left for the cache, and part by part between those that are widened, since
  // tiles and vectors take turns otherwise: 0.89 of the time with 1 row, 0.93 with 8 and 32.
  static constexpr int kDelay = 2, kGroups = 4;

  struct alignas(64) WidenedGroup {
    char rows[kPanelOutputs][kTileRowBytes];
  };

  int64_t rows_of(int j) const { return min_of(kTileRows, rows_.count - j * kTileRows); }
  int64_t row_bytes(int j) const { return 4 * rows_of(j); }

  void multiply_panel(int64_t panel) const {
    const int64_t groups = groups_of(a_.inputs);
    const char* group =
        static_cast<const char*>(a_.weights) + panel * CodeTiles<Codes>::bytes(a_.inputs);
    const char* x = rows_.x;
    WidenedGroup widened[kGroups];
    for_sums<2, kRowTiles>([&](auto c, int64_t, int64_t) { zero_tile<c.value>(); });
    const int64_t ahead = min_of<int64_t>(kDelay, groups);
    for (int64_t g = 0; g < ahead; ++g, group += Codes::kGroupBytes) {
      widen(group, widened + g, [](auto) {});
    }
    for (int64_t g = 0; g < groups - ahead; ++g, group += Codes::kGroupBytes) {
      const WidenedGroup& from = widened[g % kGroups];
      widen(group, widened + (g + ahead) % kGroups,
            [&](auto quad) { multiply_part<quad.value>(from, x); });
      x += Bf16Tiles::tile_bytes(rows_.count);
    }
    for (int64_t g = groups - ahead; g < groups; ++g, x += Bf16Tiles::tile_bytes(rows_.count)) {
      unrolled<8>([&](auto part) { multiply_part<part.value>(widened[g % kGroups], x); });
    }
    store_sums(panel);
  }

  template <class Between>
  BROS_INLINE static void widen(const char* group, WidenedGroup* to, const Between& between) {
    Codes::widen_group(
        group,
        [&](auto output, __m512i numbers) {
          __builtin_memcpy(to->rows[output.value], &numbers, sizeof numbers);
        },
        [&](auto quad) {
          constexpr int kLines = Codes::kGroupBytes / 64, kQuads = kPanelOutputs / 4;
          for (int line = quad.value; line < kLines; line += kQuads) {
            __builtin_prefetch(group + Codes::kAhead + line * 64, 0, 2);
          }
          between(quad);
        });
  }

  // The products of a group in eight parts, one after each four outputs of the group that is widened
  // meanwhile.
  template <int kPart>
  BROS_INLINE void multiply_part(const WidenedGroup& group, const char* x) const {
    constexpr int i = kPart / 4;
    if constexpr (kPart == 0 || (kPart == 2 && kRowTiles == 2)) {
      load_tile<b_tile(kPart / 2)>(x + kPart / 2 * kTileRows * rows_.x_stride, x_row_bytes_);
    }
    if constexpr (kPart == 0 || kPart == 4) {
      load_tile<a_tile(i)>(group.rows[i * kTileOutputs], kTileRowBytes);
    }
    if constexpr (kPart % 4 == 1) {
      add_product<c_tile(i, 0, kRowTiles), a_tile(i), b_tile(0)>();
    }
    if constexpr (kPart % 4 == 3 && kRowTiles == 2) {
      add_product<c_tile(i, 1, kRowTiles), a_tile(i), b_tile(1)>();
    }
  }

  // A C tile is [outputs, rows].
  void store_sums(int64_t panel) const {
    for_sums<2, kRowTiles>([&](auto c, int64_t output, int64_t row) {
      const int64_t first = panel * kPanelOutputs + output;
      const int64_t width = min_of<int64_t>(kTileOutputs, a_.outputs - first);
      if (width <= 0) return;
      float* out = rows_.out + row * a_.outputs + first;
      Vec sums[kTileRows];
      const int64_t count = rows_of(static_cast<int>(row / kTileRows));
      store_tile<c.value>(sums, 4 * (count == 1 ? 1 : kTileRows));
      if (count > 1) transpose(sums);
      for (int64_t r = 0; r < count; ++r) store_first(out + r * a_.outputs, sums[r], width);
    });
  }

  const LinearArgs& a_;
  const Rows& rows_;
  const int64_t x_row_bytes_;  // of a B tile
  ThreadTiles tiles_;
};

// ---- Few rows of bf16: each weight is read once, from memory, and sums stay in registers.

// The C tiles += kRowTiles row tiles times kPanels panels from `panel` on, for all inputs.
template <int kRowTiles, int kPanels>
BROS_INLINE void add_panels(const LinearArgs& a, const Rows& rows, int64_t panel) {
  const int64_t bytes = Bf16Tiles::bytes(a.inputs);
  const char* weights = static_cast<const char*>(a.weights) + panel * bytes;
  const LastStep<kPanels> last(weights, a.inputs);
  const Bf16Steps steps = {rows.x,
                           kTileRows * rows.x_stride,
                           Bf16Tiles::tile_bytes(rows.count),
                           weights,
                           bytes,
                           a.inputs / Bf16Tiles::kStep,
                           last.get()};
  add_bf16<kRowTiles, kPanels, false>(steps, [&](const char* at) {
    unrolled<kPanels>([&](auto p) {
      for (int64_t i = 0; i < Bf16Tiles::kStepWeights; i += 64) {
        __builtin_prefetch(at + p.value * bytes + kStreamAhead + i, 0, 2);
      }
    });
  });
}

// kPanels panels from `panel` on, for all rows, up to kRowTiles row tiles.
template <int kRowTiles, int kPanels>
void few_rows_by_tiles(const LinearArgs& a, const Rows& rows, int64_t panel, ThreadTiles* tiles) {
  constexpr int kColumns = 2 * kPanels;
  constexpr int64_t kWidth = kPanels * kPanelOutputs;
  tiles->configure(product_shapes(kRowTiles, kColumns, rows.count));
  for_sums<kRowTiles, kColumns>([&](auto c, int64_t, int64_t) { zero_tile<c.value>(); });
  add_panels<kRowTiles, kPanels>(a, rows, panel);
  const auto store_to = [&](float* out, int64_t stride) {
    for_sums<kRowTiles, kColumns>([&](auto c, int64_t row, int64_t output) {
      store_tile<c.value>(out + row * stride + output, stride * sizeof(float));
    });
  };
  float* out = rows.out + panel * kPanelOutputs;
  const int64_t width = a.outputs - panel * kPanelOutputs;
  if (width >= kWidth) return store_to(out, a.outputs);
  alignas(64) float padded[kRowTiles * kTileRows * kWidth];
  store_to(padded, kWidth);
  for (int64_t r = 0; r < rows.count; ++r) {
    copy_floats(out + r * a.outputs, padded + r * kWidth, width);
  }
}

// Panels [begin, end) of all rows, of formats whose products consist of tiles.
template <class Panel>
void tile_panels(const LinearArgs& a, const Rows& rows, int64_t begin, int64_t end) {
  if (rows.count > 2 * kTileRows) {
    many_rows_by_tiles<Panel>(a, rows, begin, end);
  } else if constexpr (!is_same<Panel, Bf16Tiles>) {
    using Codes = typename Panel::Codes;
    if (rows.count > kTileRows) return FewRowsOfCodes<Codes, 2>(a, rows).multiply(begin, end);
    FewRowsOfCodes<Codes, 1>(a, rows).multiply(begin, end);
  } else {
    ThreadTiles tiles;
    int64_t p = begin;
    if (rows.count > kTileRows) {
      for (; p < end; ++p) few_rows_by_tiles<2, 1>(a, rows, p, &tiles);
      return;
    }
    for (; p + 2 <= end; p += 2) few_rows_by_tiles<1, 2>(a, rows, p, &tiles);
    if (p < end) few_rows_by_tiles<1, 1>(a, rows, p, &tiles);
  }
}

}  // namespace
}  // namespace bros

#else

namespace bros {
namespace {

using Bf16Format = Bf16Panel;
using Int8Format = Int8Panel;
using Int4Format = Int4Panel;

}  // namespace
}  // namespace bros

#endif
