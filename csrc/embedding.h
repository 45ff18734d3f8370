// Rows of packed weights (linear_formats.h), widened exactly: the embeddings of tokens, from the
// weights of the lm_head where both are the same matrix.
//
// An output of a panel is one column of its table (of int8 for tiles: one row of each group), so it
// lies in as many cache lines as it has numbers of 32 bits (groups).
#pragma once

#include "kernels.h"
#include "linear_tiles.h"
#include "parallel.h"

namespace bros {
namespace {

// out[i] = input i of output `o` of a panel.
void widen_output(WeightFormat format, const char* panel, int64_t o, int64_t inputs, float* out) {
  const float* values = reinterpret_cast<const float*>(panel) + o;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(panel) + o;
  switch (format) {
    case WeightFormat::kFp32:
      for (int64_t k = 0; k < inputs; ++k) out[k] = values[k * kPanelOutputs];
      return;
    case WeightFormat::kBf16:
      for (int64_t k = 0; k < inputs; k += 2) {
        const uint32_t pair = words[k / 2 * kPanelOutputs];
        out[k] = bit_cast<float>(pair << 16);
        out[k + 1] = bit_cast<float>(pair & 0xffff0000);
      }
      return;
    case WeightFormat::kInt8:
      for (int64_t k = 0; k < inputs; k += kGroup, panel += Int8Panel::kGroupBytes) {
        const float scale = reinterpret_cast<const float*>(panel)[o];
        for (int i = 0; i < kGroup; ++i) out[k + i] = int8_code(panel, o, i) * scale;
      }
      return;
    case WeightFormat::kInt4:
      return;  // checked before
  }
}

int64_t panel_bytes(WeightFormat format, int64_t inputs) {
  switch (format) {
    case WeightFormat::kFp32: return Fp32Panel::bytes(inputs);
    case WeightFormat::kBf16: return Bf16Format::bytes(inputs);
    case WeightFormat::kInt8: return Int8Format::bytes(inputs);
    case WeightFormat::kInt4: return Int4Format::bytes(inputs);
  }
  return 0;
}

const char* embed(const EmbedArgs& a) {
  const int64_t bytes = panel_bytes(a.format, a.inputs);
  parallel_for(a.count, a.count * a.inputs, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t token = a.tokens[t];
      const char* panel = static_cast<const char*>(a.weights) + token / kPanelOutputs * bytes;
      widen_output(a.format, panel, token % kPanelOutputs, a.inputs, a.out + t * a.inputs);
    }
  });
  return nullptr;
}

}  // namespace
}  // namespace bros
