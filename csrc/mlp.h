// The MLP of a layer: out = down(silu(gate) * up), where gate and up are one product of x.
//
// In general these are three kernels, whose results lie in memory between them. Many rows by tile
// registers (linear_tiles.h) take another way, since prompts took 1.13 to 1.2 times as long with
// these [rows, 2 * size] numbers of fp32 in memory. Block of rows after block of rows, a thread
// multiplies a panel of gates and the panel of up with the same outputs, joins their sums while these
// are in the cache, and rounds the results to the tiles that `down` multiplies. A panel has as many
// outputs as a tile of `down` has inputs:
//
//     x, tiles     gate    up            tiles of `down`
//     [ rows ]  .  [ p ]  [ p ]   ─▶   [ ..  | p | .. ]   a column of tiles, 32 inputs, for each p
//
// These are the operations of the three kernels, number by number, so the results have the same bits.
#pragma once

#include "elementwise.h"
#include "linear.h"

namespace bros {
namespace {

LinearArgs linear_of(const MlpArgs& a, const Weights& w, const float* x, float* out) {
  return {out, x, w.data, w.bias, w.format, a.rows, w.inputs, w.outputs, a.threads};
}

#if defined(BROS_MULTIPLIES_TILES)

// Many rows of a format whose products consist of tiles.
template <class Panel>
class GatedTiles {
  using Blocks = typename BlocksOf<Panel>::Type;

 public:
  explicit GatedTiles(const MlpArgs& a)
      : a_(a),
        x_stride_(stride_of(a.gate_up.inputs)),
        gated_stride_(stride_of(a.down.inputs)),
        panels_(a.down.inputs / kPanelOutputs),
        most_(about_equal(a.rows, kBlockRows, 2 * kTileRows)) {}

  // Whether this is possible, and x of a block stays in the second cache in one part (TileWalk).
  static bool fits(const MlpArgs& a) {
    return a.rows > 2 * kTileRows && !a.gate_up.bias && a.down.inputs % kPanelOutputs == 0 &&
           a.gate_up.inputs % Panel::kStep == 0 &&
           kBlockRows * stride_of(a.gate_up.inputs) <= kBlockXBytes;
  }

  const char* run() const {
    static thread_local Scratch scratch;
    char* x = static_cast<char*>(scratch.reserve(most_ * (x_stride_ + gated_stride_)));
    if (!x) return "no memory for rounded activations";
    char* gated = x + most_ * x_stride_;
    for (int64_t first = 0; first < a_.rows; first += most_) {
      const int64_t rows = min_of(most_, a_.rows - first);
      round_x(first, rows, x);
      LinearArgs gates = linear_of(a_, a_.gate_up, nullptr, nullptr);
      gates.rows = rows;
      parallel_for(panels_, work_of(gates), a_.threads, [&](int64_t begin, int64_t end) {
        for_gates({x, x_stride_, nullptr, rows}, begin, end, gated);
      });
      multiply_down(first, rows, gated);
    }
    return nullptr;
  }

 private:
  static int64_t stride_of(int64_t inputs) {
    return ceil_div(inputs, Panel::kStep) * Panel::kStepBytes;
  }

  void round_x(int64_t first, int64_t rows, char* x) const {
    LinearArgs block = linear_of(a_, a_.gate_up, a_.x + first * a_.gate_up.inputs, nullptr);
    block.rows = most_;  // tiles of 16 rows, also if there are fewer
    parallel_for(rows, rows * block.inputs, a_.threads, [&](int64_t begin, int64_t end) {
      Panel::round_rows(block, begin, end, x);
    });
  }

  // Gates of panels [begin, end).
  void for_gates(const Rows& rows, int64_t begin, int64_t end, char* gated) const {
    static thread_local Scratch scratch;
    const int64_t size = round_up(rows.count, kTileRows) * kPanelOutputs;
    float* gate = static_cast<float*>(scratch.reserve(2 * size * sizeof(float)));
    if (!gate) __builtin_trap();  // 64 KB
    float* up = gate + size;
    ThreadTiles tiles;
    tiles.configure(product_shapes(2, 2, 2 * kTileRows));
    for (int64_t p = begin; p < end; ++p) {
      multiply_panel(rows, panel_of(p), panel_of(panels_ + p), gate);
      multiply_panel(rows, panel_of(panels_ + p), p + 1 < end ? panel_of(p + 1) : nullptr, up);
      char* to = gated + p * kTileRows * kTileRowBytes;
      for (int64_t r = 0; r < rows.count; ++r) {
        join_row(gate + r * kPanelOutputs, up + r * kPanelOutputs,
                 to + r / kTileRows * kTileRows * gated_stride_ + r % kTileRows * kTileRowBytes);
      }
    }
  }

  const char* panel_of(int64_t p) const {
    return static_cast<const char*>(a_.gate_up.data) + p * Panel::bytes(a_.gate_up.inputs);
  }

  // sums = rows times the panel. Fetches the panel after it.
  void multiply_panel(Rows rows, const char* panel, const char* after, float* sums) const {
    const int64_t inputs = a_.gate_up.inputs;
    const int64_t most = about_equal(inputs, Blocks::kInputs, kTileInputs);
    rows.out = sums;
    for (int64_t k = 0; k < inputs; k += most) {
      const int64_t count = min_of(most, inputs - k), next = k + count;
      const char* from = next < inputs ? panel + Panel::bytes(next) : after;
      const Ahead ahead(from, Panel::bytes(min_of(most, next < inputs ? inputs - next : inputs)));
      Blocks::multiply(
          {rows, inputs, kPanelOutputs, kPanelOutputs, panel, k, count, sums, ahead});
    }
  }

  BROS_INLINE static void join_row(const float* gate, const float* up, char* to) {
    const Vec low = silu_times(load(gate), load(up));
    const Vec high = silu_times(load(gate + kLanes), load(up + kLanes));
    const __m512bh numbers = _mm512_cvtne2ps_pbh(high, low);
    __builtin_memcpy(to, &numbers, sizeof numbers);
  }

  void multiply_down(int64_t first, int64_t rows, const char* gated) const {
    LinearArgs block = linear_of(a_, a_.down, nullptr, a_.out + first * a_.down.outputs);
    block.rows = rows;
    const int64_t panels = ceil_div(block.outputs, kPanelOutputs);
    parallel_for(panels, work_of(block), a_.threads, [&](int64_t begin, int64_t end) {
      many_rows_by_tiles<Panel>(block, {gated, gated_stride_, block.out, rows}, begin, end);
      if (block.bias) add_bias(block, begin, end);
    });
  }

  const MlpArgs& a_;
  const int64_t x_stride_, gated_stride_;  // bytes of a row in tiles
  const int64_t panels_;                    // of the gates
  const int64_t most_;                      // rows of a block
};

#endif

const char* mlp(const MlpArgs& a) {
#if defined(BROS_MULTIPLIES_TILES)
  if (a.gate_up.format == a.down.format) {
    if (a.down.format == WeightFormat::kBf16 && GatedTiles<Bf16Format>::fits(a)) {
      return GatedTiles<Bf16Format>(a).run();
    }
    if (a.down.format == WeightFormat::kInt8 && GatedTiles<Int8Format>::fits(a)) {
      return GatedTiles<Int8Format>(a).run();
    }
    if (a.down.format == WeightFormat::kInt4 && GatedTiles<Int4Format>::fits(a)) {
      return GatedTiles<Int4Format>(a).run();
    }
  }
#endif
  if (const char* error = linear(linear_of(a, a.gate_up, a.x, a.gate_up_out))) return error;
  silu_and_mul({a.gated, a.gate_up_out, a.rows, a.down.inputs, a.threads});
  return linear(linear_of(a, a.down, a.gated, a.out));
}

}  // namespace
}  // namespace bros
