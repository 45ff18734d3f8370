// Linear layers: out = x @ weight.T + bias, with packed weights (linear_formats.h).
//
// Every output of a row is summed in fp32 in one order, from the first input to the last. It depends
// on nothing but this row: not on other rows, on their number or on threads. A row of a product has
// the same bits in any batch. (int4: after every 1,024 inputs come the second bytes of those
// groups of inputs that have some.)
//
//     tile of R rows x C panels:   R * C * 2 accumulators; per input R broadcasts, 2 C vectors
//
// A few rows read the packed weights over several panels at once (Panel::kPanels), so that there are
// enough independent sums to hide the latency of an FMA. For more rows, a block of rows that stays in
// the cache is multiplied with one panel after the other. Where activations are multiplied exactly,
// the block of the panel is first widened to fp32, and every tile of rows reads it from there.
#pragma once

#include "kernels.h"
#include "linear_formats.h"
#include "linear_rows.h"
#include "linear_tiles.h"
#include "parallel.h"

namespace bros {
namespace {

constexpr int64_t kRowBlockBytes = 512 * 1024;

// How far ahead a single tile prefetches the weights that it reads, in bytes. Products of int4 with 1
// to 4 rows take 12 to 16 % less time with 2,560 and with 5,120, 7 % less with 640; those of int8 with
// 1 row 4 to 11 % less, with 4 rows 6 to 16 % (AVX2, Zen 3).
constexpr int64_t kAhead = 2560;

// Prefetches what a single tile of so many rows reads at `weights` and after it.
template <class Panel>
BROS_INLINE Prefetch ahead(const char* weights, int64_t rows) {
  if (rows < Panel::kAheadRows) return {nullptr, 0, false};
  return {weights + kAhead, Panel::bytes(Panel::kStep), false};
}

// The sums of R rows for C panels: out[r * stride + c * kPanelOutputs + i].
template <int R, int C, class Panel>
BROS_INLINE void tile(const Inputs& in, float* __restrict out, int64_t stride) {
  Vec sum[R][2 * C] = {};
  if (in.carry) {
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 2 * C; ++i) sum[r][i] = load(out + r * stride + i * kLanes);
    }
  }
  const char* __restrict x = in.x;
  Prefetch prefetch = in.prefetch;
  const int64_t end = in.first + in.count;
  int64_t k = in.first;
  // The step is written twice: as a function that both loops call, products of int8 with 8 and more
  // rows took 1.15 times as long (AVX2, GCC 12).
  if constexpr (Panel::kStepsPerPrefetch > 1) {
    constexpr int64_t kInputs = Panel::kStepsPerPrefetch * Panel::kStep;
    for (; k + kInputs <= end; k += kInputs) {
      prefetch.next(Panel::kStepsPerPrefetch);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kInputs; i += Panel::kStep, x += Panel::kStepBytes) {
        Panel panels[C];
        for (int c = 0; c < C; ++c) panels[c].seek(in.weights + c * in.panel_bytes, k + i);
        Panel::template multiply<R, C>(panels, x, in.x_stride, Panel::kStep, sum);
      }
    }
  }
  for (; k < end; k += Panel::kStep, x += Panel::kStepBytes) {
    Panel panels[C];
    for (int c = 0; c < C; ++c) panels[c].seek(in.weights + c * in.panel_bytes, k);
    prefetch.next(1);
    Panel::template multiply<R, C>(panels, x, in.x_stride, min_of<int64_t>(Panel::kStep, end - k),
                                   sum);
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < 2 * C; ++i) store(out + r * stride + i * kLanes, sum[r][i]);
  }
}

// A tile at outputs [at, at + C * kPanelOutputs), of which the layer may have only the first ones.
template <int R, int C, class Panel>
BROS_INLINE void tile_at(const LinearArgs& a, const Inputs& in, float* out, int64_t at) {
  constexpr int64_t kWidth = C * kPanelOutputs;
  out += at;
  const int64_t width = a.outputs - at;
  if (width >= kWidth) {
    tile<R, C, Panel>(in, out, a.outputs);
    return;
  }
  float padded[R * kWidth];
  for (int r = 0; in.carry && r < R; ++r) {
    copy_floats(padded + r * kWidth, out + r * a.outputs, width);
  }
  tile<R, C, Panel>(in, padded, kWidth);
  for (int r = 0; r < R; ++r) copy_floats(out + r * a.outputs, padded + r * kWidth, width);
}

// All R rows in one tile: panels [begin, end), C at a time.
template <int R, int C, class Panel>
void few_rows(const LinearArgs& a, const Rows& rows, int64_t begin, int64_t end) {
  static_assert(C == 1 || R < Panel::kAheadRows, "`ahead` is about one panel");
  const int64_t bytes = Panel::bytes(a.inputs);
  Inputs in = {rows.x, rows.x_stride, nullptr, bytes, 0, a.inputs, false, {}};
  int64_t p = begin;
  for (; p + C <= end; p += C) {
    in.weights = static_cast<const char*>(a.weights) + p * bytes;
    in.prefetch = ahead<Panel>(in.weights, R);
    tile_at<R, C, Panel>(a, in, rows.out, p * kPanelOutputs);
  }
  for (; p < end; ++p) {
    in.weights = static_cast<const char*>(a.weights) + p * bytes;
    in.prefetch = ahead<Panel>(in.weights, R);
    tile_at<R, 1, Panel>(a, in, rows.out, p * kPanelOutputs);
  }
}

// All rows of one block of a panel, in `tiles` tiles of R or R - 1 rows.
template <class Panel, int R>
void block_rows(const LinearArgs& a, const Inputs& in, const Rows& rows, int64_t at,
                int64_t tiles) {
  const int64_t full = rows.count - tiles * (R - 1);  // tiles of R rows
  const int64_t steps = ceil_div(in.count, Panel::kStep);
  Inputs block = in;
  float* out = rows.out;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t count = t < full ? R : R - 1;
    block.prefetch = in.prefetch.part(t, tiles, steps);
    if (t < full) {
      tile_at<R, 1, Panel>(a, block, out, at);
    } else {
      tile_at<(R > 1 ? R - 1 : 1), 1, Panel>(a, block, out, at);
    }
    block.x += count * in.x_stride;
    out += count * a.outputs;
  }
}

using BlockRows = void (*)(const LinearArgs&, const Inputs&, const Rows&, int64_t, int64_t);

template <class Panel, int... R>
BROS_INLINE BlockRows block_rows_of(int64_t rows) {
  constexpr BlockRows kAll[] = {block_rows<Panel, R>...};
  return kAll[rows - 1];
}

// For tiles of at most Panel::kTileRows rows.
template <class Panel>
BROS_INLINE BlockRows block_rows_for(int64_t rows) {
  if constexpr (Panel::kTileRows > 6) {
    return block_rows_of<Panel, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>(rows);
  } else {
    return block_rows_of<Panel, 1, 2, 3, 4, 5, 6>(rows);
  }
}

template <class Panel>
BROS_INLINE void widen_block(const char* weights, int64_t first, int64_t count, float* out) {
  for (int64_t k = 0; k < count; k += Panel::kStep) {
    Panel panel;
    panel.seek(weights, first + k);
#pragma GCC unroll 2
    for (int part = 0; part < Panel::kStep; ++part) {
      const Pair w = panel.at(part);
      store(out + (k + part) * kPanelOutputs, w.v[0]);
      store(out + (k + part) * kPanelOutputs + kLanes, w.v[1]);
    }
  }
}

// The rows of a block in which group g is an outlier are rows[start[g]] to rows[start[g + 1] - 1].
struct OutlierRows {
  int32_t* start;
  int32_t* rows;
};

template <class Panel>
OutlierRows outlier_rows(const Rows& rows, int64_t groups) {
  static thread_local Scratch scratch;
  const int64_t most = groups + 1 + groups * rows.count;
  int32_t* start = static_cast<int32_t*>(scratch.reserve(most * sizeof(int32_t)));
  if (!start) __builtin_trap();  // less than the rounded activations have
  const OutlierRows found = {start, start + groups + 1};
  int32_t count = 0;
  for (int64_t g = 0; g < groups; ++g) {
    start[g] = count;
    for (int64_t r = 0; r < rows.count; ++r) {
      found.rows[count] = static_cast<int32_t>(r);
      count += Panel::activations(rows.x + r * rows.x_stride, g).is_outlier;
    }
  }
  start[groups] = count;
  return found;
}

// Second bytes of inputs [k, k + count), for the panel at `weights` with outputs from `at` on. Rows
// from anywhere in the block share a tile, so that only outliers take time. A row gets its sums
// group by group, whatever rows it shares tiles with.
template <class Panel>
void add_outliers(const LinearArgs& a, const Rows& rows, const OutlierRows& outliers,
                  const char* weights, int64_t k, int64_t count, int64_t at) {
  constexpr int kMost = 6;
  float* out = rows.out + at;
  const int64_t width = a.outputs - at;
  for (int64_t g = k / kGroup; g < (k + count) / kGroup; ++g) {
    Panel panel;
    panel.seek(weights, g * kGroup);
    const char* x = rows.x + g * Panel::kStepBytes;
    const int32_t* end = outliers.rows + outliers.start[g + 1];
    for (const int32_t* some = outliers.rows + outliers.start[g]; some < end; some += kMost) {
      const auto add = [&](auto r) {
        panel.template add_low<r.value>(x, rows.x_stride, some, out, a.outputs, width);
      };
      switch (min_of<int64_t>(kMost, end - some)) {
        case 1: add(Number<1>()); break;
        case 2: add(Number<2>()); break;
        case 3: add(Number<3>()); break;
        case 4: add(Number<4>()); break;
        case 5: add(Number<5>()); break;
        default: add(Number<kMost>()); break;
      }
    }
  }
}

// Panels [begin, end) of one row, of a format with outliers. While weights are in registers they are
// multiplied with both bytes of an outlier: a second pass over a block in the cache (add_outliers)
// leaves memory idle. The second bytes are added behind the block all the same, since the order of
// sums is that of any number of rows. Products of int4 take 0.82 to 0.87 of the time in layers that
// are 576 wide, 0.73 to 0.82 with 2,048 and 8,192. The same for 2 rows gained 7 to 13 %, and for 3
// rows, whose sums do not fit in the registers, it took 1.18 times as long (Zen 3, two threads). By
// AVX-512 VNNI one row takes 0.91 of the time (Xeon); AVX-512 without VNNI was not measured.
template <class Panel>
void one_row(const LinearArgs& a, const Rows& row, int64_t begin, int64_t end) {
  typename Panel::Low low[kInputBlock / kGroup];
  const int64_t bytes = Panel::bytes(a.inputs);
  for (int64_t p = begin; p < end; ++p) {
    const char* weights = static_cast<const char*>(a.weights) + p * bytes;
    Prefetch prefetch = ahead<Panel>(weights, 1);
    Vec sum[2] = {};
    for (int64_t first = 0; first < a.inputs; first += kInputBlock) {
      const int64_t block_end = min_of(first + kInputBlock, a.inputs);
      typename Panel::Low* low_end = low;
      for (int64_t k = first; k < block_end; k += kGroup) {
        Panel panel;
        panel.seek(weights, k);
        prefetch.next(1);
        low_end = panel.multiply_row(row.x + groups_of(k) * Panel::kStepBytes, sum, low_end);
      }
      for (const auto* each = low; each < low_end; ++each) {
        for (int j = 0; j < 2; ++j) sum[j] = mul_add(each->product[j], each->scale[j], sum[j]);
      }
    }
    const int64_t at = p * kPanelOutputs;
    float padded[kPanelOutputs];
    float* out = a.outputs - at >= kPanelOutputs ? row.out + at : padded;
    for (int j = 0; j < 2; ++j) store(out + j * kLanes, sum[j]);
    if (out == padded) copy_floats(row.out + at, padded, a.outputs - at);
  }
}

// Rows that are multiplied with one panel after the other: their x stays in the cache. With vectors
// of 8 lanes, which take twice the time for the same x, all rows at once are 3 % faster.
template <class Panel>
BROS_INLINE int64_t row_block(int64_t rows, int64_t x_stride) {
  if (kLanes < 16) return rows;
  if (!is_same<Panel, typename Panel::Wide>) return rows;  // a panel is widened once
  constexpr int64_t kRows = Panel::Wide::kTileRows;
  const int64_t inputs = kInputBlock / Panel::kStep * Panel::kStepBytes;
  const int64_t most = max_of(kRowBlockBytes / min_of(inputs, x_stride), kRows);
  return about_equal(rows, most, kRows);
}

// Panels [begin, end) of many rows: block by block of rows and of inputs.
template <class Panel>
void many_rows(const LinearArgs& a, const Rows& all, int64_t begin, int64_t end) {
  using Wide = typename Panel::Wide;
  constexpr bool kWidens = !is_same<Panel, Wide>;
  float* wide = nullptr;
  if constexpr (kWidens) {
    static thread_local Scratch scratch;
    wide = static_cast<float*>(scratch.reserve(kInputBlock * kPanelOutputs * sizeof(float)));
    if (!wide) __builtin_trap();  // 128 KB
  }
  const int64_t bytes = Panel::bytes(a.inputs);
  const int64_t most = row_block<Panel>(all.count, all.x_stride);
  for (int64_t row = 0; row < all.count; row += most) {
    const Rows rows = {all.x + row * all.x_stride, all.x_stride, all.out + row * a.outputs,
                       min_of(most, all.count - row)};
    const int64_t tiles = ceil_div(rows.count, Wide::kTileRows);
    const BlockRows block = block_rows_for<Wide>(ceil_div(rows.count, tiles));
    OutlierRows outliers = {};
    if constexpr (Panel::kHasOutliers) outliers = outlier_rows<Panel>(rows, a.inputs / kGroup);
    for (int64_t p = begin; p < end; ++p) {
      const char* weights = static_cast<const char*>(a.weights) + p * bytes;
      for (int64_t k = 0; k < a.inputs; k += kInputBlock) {
        Inputs in = {rows.x + k / Panel::kStep * Panel::kStepBytes,
                     rows.x_stride,
                     weights,
                     0,
                     k,
                     min_of(kInputBlock, a.inputs - k),
                     k > 0,
                     {}};
        // Tiles that read weights from the cache prefetch the next block, each an equal part of it:
        // if the last one prefetches all, it waits for memory and the others do not.
        if (tiles > 1 || kWidens) {
          const int64_t step = Panel::bytes(in.count) / ceil_div(in.count, Wide::kStep);
          in.prefetch = {weights + Panel::bytes(k + in.count), step, rows.count <= Wide::kL2Rows};
        } else {
          in.prefetch = ahead<Panel>(weights + Panel::bytes(k), rows.count);
        }
        if constexpr (kWidens) {
          widen_block<Panel>(weights, k, in.count, wide);
          in.weights = reinterpret_cast<const char*>(wide);
          in.first = 0;
        }
        block(a, in, rows, p * kPanelOutputs, tiles);
        if constexpr (Panel::kHasOutliers) {
          add_outliers<Panel>(a, rows, outliers, weights, k, in.count, p * kPanelOutputs);
        }
      }
    }
  }
}

template <class Panel>
void panels_of(const LinearArgs& a, const Rows& rows, int64_t begin, int64_t end) {
  if constexpr (Panel::kHasOutliers) {
    if (rows.count == 1) return one_row<Panel>(a, rows, begin, end);
    return many_rows<Panel>(a, rows, begin, end);
  }
  constexpr int kOne = Panel::kPanels, kTwo = min_of(kOne, 2);
  constexpr int kMore = min_of(kOne, kLanes == 16 ? 2 : 1);
  switch (rows.count) {
    case 1: return few_rows<1, kOne, Panel>(a, rows, begin, end);
    case 2: return few_rows<2, kTwo, Panel>(a, rows, begin, end);
    case 3: return few_rows<3, kMore, Panel>(a, rows, begin, end);
    case 4: return few_rows<4, kMore, Panel>(a, rows, begin, end);
    default: return many_rows<Panel>(a, rows, begin, end);
  }
}

BROS_INLINE void add_bias(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t first = begin * kPanelOutputs;
  const int64_t count = min_of(end * kPanelOutputs, a.outputs) - first;
  for (int64_t r = 0; r < a.rows; ++r) {
    float* out = a.out + r * a.outputs + first;
    const float* bias = a.bias + first;
    for_each_vector(
        count, [&](int64_t i) { store(out + i, load(out + i) + load(bias + i)); },
        [&](int64_t i, int64_t m) {
          store_first(out + i, load_first(out + i, m) + load_first(bias + i, m), m);
        });
  }
}

// For parallel_for.
BROS_INLINE int64_t work_of(const LinearArgs& a) {
  return a.inputs * a.outputs * ceil_div(a.rows, 4);
}

template <class Panel>
const char* product(const LinearArgs& a) {
  Rows rows = {reinterpret_cast<const char*>(a.x), a.inputs * int64_t{sizeof(float)}, a.out,
               a.rows};
  if constexpr (Panel::kRounds) {
    static thread_local Scratch scratch;
    rows.x_stride = ceil_div(a.inputs, Panel::kStep) * Panel::kStepBytes;
    const int64_t room = kByTiles<Panel> ? round_up(a.rows, kRowsOfTile) : a.rows;
    char* rounded = static_cast<char*>(scratch.reserve(room * rows.x_stride));
    if (!rounded) return "no memory for rounded activations";
    if constexpr (kByTiles<Panel>) {
      Panel::round_all(a, rounded);
    } else {
      parallel_for(a.rows, a.rows * a.inputs, a.threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          Panel::round(a.x + r * a.inputs, a.inputs, rounded + r * rows.x_stride);
        }
      });
    }
    rows.x = rounded;
  }
  const int64_t panels = ceil_div(a.outputs, kPanelOutputs);
  parallel_for(panels, work_of(a), a.threads, [&](int64_t begin, int64_t end) {
    if constexpr (kByTiles<Panel>) {
      tile_panels<Panel>(a, rows, begin, end);
    } else {
      panels_of<Panel>(a, rows, begin, end);
    }
    if (a.bias) add_bias(a, begin, end);
  });
  return nullptr;
}

const char* linear(const LinearArgs& a) {
  if (a.rows == 0) return nullptr;
  switch (a.format) {
    case WeightFormat::kFp32: return product<Fp32Panel>(a);
    case WeightFormat::kBf16: return product<Bf16Format>(a);
    case WeightFormat::kInt8: return product<Int8Format>(a);
    case WeightFormat::kInt4: return product<Int4Format>(a);
  }
  return nullptr;
}

}  // namespace
}  // namespace bros
