// Linear layers: out = x @ weight.T + bias, with packed weights.
//
// Weights are packed in panels of kPanelOutputs outputs, those of the last one zero-padded. In the
// tables, `out` is the output within the panel and u32 is one number of 32 bits per output:
//
//     fp32   [panels][inputs][out]            f32
//     bf16   [panels][inputs / 2][out]        u32: inputs 2i (low half) and 2i + 1
//     int8   [panels][groups]                 group of 32 inputs, value = code * scale:
//                scale [out] f32, codes [8][out] u32: inputs 4i .. 4i + 3, from the low byte on
//     int4   [panels][groups]                 group of 32 inputs, value = code * scale + minimum:
//                scale [out] f16, minimum [out] f16, codes [4][out] u32: inputs 8i .. 8i + 7
//
// Every output of a row is one sum in fp32, from the first input to the last, of fp32 activations
// times exactly widened weights. It does not depend on other rows, on their number or on threads:
// a row of a product has the same bits in any batch.
//
//     tile of R rows x C panels:   R * C * 2 accumulators; per input R broadcasts, 2 C vectors
//
// A few rows read the packed weights directly, over several panels at once, so that there are enough
// independent sums to hide the latency of an FMA. For more rows, a block of a panel is widened once
// into a buffer that stays in the cache, and every tile of rows reads it from there.
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace bros {
namespace {

constexpr int64_t kPanelOutputs = 2 * kLanes;
#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // 24 of 32 registers
#else
constexpr int kTileRows = 6;  // 12 of 16
#endif
constexpr int64_t kGroup = 32;
constexpr int64_t kInputBlock = 1024;  // inputs of a widened block: 64 or 128 KB

struct Pair {
  Vec v[2];  // the weights of one input for the outputs of a panel
};

BROS_INLINE IntVec load_int(const uint32_t* p) {
  IntVec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

BROS_INLINE Vec to_float(IntVec v) { return __builtin_convertvector(v, Vec); }

// One format each: `seek` goes to input k, a multiple of kStep, of the panel at `weights`; `at(part)`
// are the weights of input k + part. With a constant part it is a few instructions.
struct Fp32Panel {
  static constexpr int kStep = 1;
  static int64_t bytes(int64_t inputs) { return inputs * kPanelOutputs * 4; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    values_ = reinterpret_cast<const float*>(weights) + k * kPanelOutputs;
  }
  BROS_INLINE Pair at(int) const { return {{load(values_), load(values_ + kLanes)}}; }

 private:
  const float* values_;
};

struct Bf16Panel {
  static constexpr int kStep = 2;
  static int64_t bytes(int64_t inputs) { return inputs * kPanelOutputs * 2; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    pairs_ = reinterpret_cast<const uint32_t*>(weights) + k / 2 * kPanelOutputs;
  }
  BROS_INLINE Pair at(int part) const {
    Pair w;
    for (int j = 0; j < 2; ++j) {
      const IntVec raw = load_int(pairs_ + j * kLanes);
      w.v[j] = bit_cast<Vec>(part ? raw & splat_int(static_cast<int32_t>(0xffff0000)) : raw << 16);
    }
    return w;
  }

 private:
  const uint32_t* pairs_;
};

struct Int8Panel {
  static constexpr int kStep = kGroup;
  static constexpr int64_t kGroupBytes = kPanelOutputs * (4 + kGroup);
  static int64_t bytes(int64_t inputs) { return inputs / kGroup * kGroupBytes; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    const char* group = weights + k / kGroup * kGroupBytes;
    const float* scales = reinterpret_cast<const float*>(group);
    for (int j = 0; j < 2; ++j) scale_[j] = load(scales + j * kLanes);
    codes_ = reinterpret_cast<const uint32_t*>(group + 4 * kPanelOutputs);
  }
  BROS_INLINE Pair at(int part) const {
    Pair w;
    for (int j = 0; j < 2; ++j) {
      const IntVec raw = load_int(codes_ + part / 4 * kPanelOutputs + j * kLanes);
      w.v[j] = to_float(raw << (24 - part % 4 * 8) >> 24) * scale_[j];
    }
    return w;
  }

 private:
  const uint32_t* codes_;
  Vec scale_[2];
};

struct Int4Panel {
  static constexpr int kStep = kGroup;
  static constexpr int64_t kGroupBytes = kPanelOutputs * (4 + kGroup / 2);
  static int64_t bytes(int64_t inputs) { return inputs / kGroup * kGroupBytes; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    const char* group = weights + k / kGroup * kGroupBytes;
    const Fp16* halves = reinterpret_cast<const Fp16*>(group);
    for (int j = 0; j < 2; ++j) {
      scale_[j] = load(halves + j * kLanes);
      minimum_[j] = load(halves + kPanelOutputs + j * kLanes);
    }
    codes_ = reinterpret_cast<const uint32_t*>(group + 4 * kPanelOutputs);
  }
  BROS_INLINE Pair at(int part) const {
    Pair w;
    for (int j = 0; j < 2; ++j) {
      const IntVec raw = load_int(codes_ + part / 8 * kPanelOutputs + j * kLanes);
      w.v[j] = to_float((raw >> (part % 8 * 4)) & 15) * scale_[j] + minimum_[j];
    }
    return w;
  }

 private:
  const uint32_t* codes_;
  Vec scale_[2], minimum_[2];
};

// Inputs [first, first + count) of the panels at `weights`, and the same of the rows of x.
struct Inputs {
  const float* x;
  const char* weights;
  int64_t panel_bytes;
  int64_t first;
  int64_t count;
  bool carry;  // the sums go on from `out`
};

// The sums of R rows for C panels: out[r * stride + c * kPanelOutputs + i], from x[r * x_stride + k].
template <int R, int C, class Panel>
BROS_INLINE void tile(const Inputs& in, int64_t x_stride, float* __restrict out, int64_t stride) {
  Vec sum[R][2 * C] = {};
  if (in.carry) {
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 2 * C; ++i) sum[r][i] = load(out + r * stride + i * kLanes);
    }
  }
  const float* __restrict x = in.x;
  for (int64_t k = in.first; k < in.first + in.count; k += Panel::kStep) {
    Panel panels[C];
    for (int c = 0; c < C; ++c) panels[c].seek(in.weights + c * in.panel_bytes, k);
#pragma GCC unroll 32
    for (int part = 0; part < Panel::kStep; ++part) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const Pair w = panels[c].at(part);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const Vec a = splat(x[r * x_stride + k + part]);
          sum[r][2 * c] += a * w.v[0];
          sum[r][2 * c + 1] += a * w.v[1];
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < 2 * C; ++i) store(out + r * stride + i * kLanes, sum[r][i]);
  }
}

BROS_INLINE void copy_floats(float* to, const float* from, int64_t n) {
  __builtin_memcpy(to, from, n * sizeof(float));
}

// A tile at outputs [at, at + C * kPanelOutputs), of which the layer may have only the first ones.
template <int R, int C, class Panel>
BROS_INLINE void tile_at(const LinearArgs& a, const Inputs& in, int64_t row, int64_t at) {
  constexpr int64_t kWidth = C * kPanelOutputs;
  float* out = a.out + row * a.outputs + at;
  const int64_t width = a.outputs - at;
  if (width >= kWidth) {
    tile<R, C, Panel>(in, a.inputs, out, a.outputs);
    return;
  }
  float padded[R * kWidth];
  for (int r = 0; in.carry && r < R; ++r) {
    copy_floats(padded + r * kWidth, out + r * a.outputs, width);
  }
  tile<R, C, Panel>(in, a.inputs, padded, kWidth);
  for (int r = 0; r < R; ++r) copy_floats(out + r * a.outputs, padded + r * kWidth, width);
}

// All R rows in one tile: panels [begin, end), C at a time.
template <int R, int C, class Panel>
void few_rows(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t bytes = Panel::bytes(a.inputs);
  Inputs in = {a.x, nullptr, bytes, 0, a.inputs, false};
  int64_t p = begin;
  for (; p + C <= end; p += C) {
    in.weights = static_cast<const char*>(a.weights) + p * bytes;
    tile_at<R, C, Panel>(a, in, 0, p * kPanelOutputs);
  }
  for (; p < end; ++p) {
    in.weights = static_cast<const char*>(a.weights) + p * bytes;
    tile_at<R, 1, Panel>(a, in, 0, p * kPanelOutputs);
  }
}

// All rows of one widened block, in `tiles` tiles of R or R - 1 rows.
template <int R>
void block_rows(const LinearArgs& a, const Inputs& in, int64_t at, int64_t tiles) {
  const int64_t full = a.rows - tiles * (R - 1);  // tiles of R rows
  Inputs rows = in;
  for (int64_t t = 0, row = 0; t < tiles; ++t) {
    rows.x = in.x + row * a.inputs;
    if (t < full) {
      tile_at<R, 1, Fp32Panel>(a, rows, row, at);
      row += R;
    } else {
      tile_at<(R > 1 ? R - 1 : 1), 1, Fp32Panel>(a, rows, row, at);
      row += R - 1;
    }
  }
}

template <class Panel>
BROS_INLINE void widen_block(const char* weights, int64_t first, int64_t count, float* out) {
  for (int64_t k = 0; k < count; k += Panel::kStep) {
    Panel panel;
    panel.seek(weights, first + k);
#pragma GCC unroll 32
    for (int part = 0; part < Panel::kStep; ++part) {
      const Pair w = panel.at(part);
      store(out + (k + part) * kPanelOutputs, w.v[0]);
      store(out + (k + part) * kPanelOutputs + kLanes, w.v[1]);
    }
  }
}

using BlockRows = void (*)(const LinearArgs&, const Inputs&, int64_t, int64_t);
template <int... R>
BROS_INLINE BlockRows block_rows_of(int64_t rows) {
  constexpr BlockRows kAll[] = {block_rows<R>...};
  return kAll[rows - 1];
}

// Panels [begin, end) of many rows: block by block of inputs, widened into `wide` if not fp32.
template <class Panel>
void many_rows(const LinearArgs& a, int64_t begin, int64_t end, float* wide) {
  const int64_t bytes = Panel::bytes(a.inputs);
  const int64_t tiles = ceil_div(a.rows, kTileRows);
  const int64_t rows = ceil_div(a.rows, tiles);
#if defined(__AVX512F__)
  const BlockRows block = block_rows_of<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>(rows);
#else
  const BlockRows block = block_rows_of<1, 2, 3, 4, 5, 6>(rows);
#endif
  for (int64_t p = begin; p < end; ++p) {
    const char* weights = static_cast<const char*>(a.weights) + p * bytes;
    for (int64_t k = 0; k < a.inputs; k += kInputBlock) {
      Inputs in = {a.x, weights, 0, k, min_of(kInputBlock, a.inputs - k), k > 0};
      if (wide) {
        widen_block<Panel>(weights, k, in.count, wide);
        in.weights = reinterpret_cast<const char*>(wide);
        in.first = 0;
        in.x += k;
      }
      block(a, in, p * kPanelOutputs, tiles);
    }
  }
}

template <class Panel>
void panels_of(const LinearArgs& a, int64_t begin, int64_t end) {
  // fp32 weights and a pair need few registers beside the sums, groups with scales more.
  constexpr int kOne = Panel::kStep <= 2 ? 4 : 2, kTwo = 2, kMore = kLanes == 16 ? 2 : 1;
  switch (a.rows) {
    case 0: return;
    case 1: return few_rows<1, kOne, Panel>(a, begin, end);
    case 2: return few_rows<2, kTwo, Panel>(a, begin, end);
    case 3: return few_rows<3, kMore, Panel>(a, begin, end);
    case 4: return few_rows<4, kMore, Panel>(a, begin, end);
  }
  float* wide = nullptr;
  if (Panel::kStep > 1) {
    static thread_local Scratch scratch;
    wide = static_cast<float*>(scratch.reserve(kInputBlock * kPanelOutputs * sizeof(float)));
    if (!wide) __builtin_trap();  // 128 KB
  }
  many_rows<Panel>(a, begin, end, wide);
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

const char* linear(const LinearArgs& a) {
  const int64_t panels = ceil_div(a.outputs, kPanelOutputs);
  const int64_t work = a.inputs * a.outputs * ceil_div(a.rows, 4);
  parallel_for(panels, work, a.threads, [&](int64_t begin, int64_t end) {
    switch (a.format) {
      case WeightFormat::kFp32: panels_of<Fp32Panel>(a, begin, end); break;
      case WeightFormat::kBf16: panels_of<Bf16Panel>(a, begin, end); break;
      case WeightFormat::kInt8: panels_of<Int8Panel>(a, begin, end); break;
      case WeightFormat::kInt4: panels_of<Int4Panel>(a, begin, end); break;
    }
    if (a.bias) add_bias(a, begin, end);
  });
  return nullptr;
}

}  // namespace
}  // namespace bros
