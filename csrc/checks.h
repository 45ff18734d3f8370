// Checks of the numbers that kernels use as indexes. Each returns null, or what is wrong.
//
// They are made once for all layers of a step, before anything is written.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace bros {

inline const char* check_rope(const RopeArgs& a) {
  const int64_t num_slots = a.cache.num_blocks * a.cache.block_size;
  for (int64_t t = 0; t < a.tokens; ++t) {
    if (a.slots[t] < 0 || a.slots[t] >= num_slots) return "slot outside the KV cache";
    if (a.cos_sin && (a.positions[t] < 0 || a.positions[t] >= a.max_positions)) {
      return "position outside the rotary table";
    }
  }
  return nullptr;
}

inline const char* check_segments(const AttentionArgs& a, const int32_t* start, int64_t count,
                                  const int32_t* segments, int64_t num_segments) {
  if (start[0] < 0 || start[count] > num_segments) return "segment_start outside segments";
  for (int64_t owner = 0; owner < count; ++owner) {
    if (start[owner] > start[owner + 1]) return "segment_start decreases";
    for (int64_t i = start[owner]; i < start[owner + 1]; ++i) {
      const int32_t block = segments[3 * i];
      const int32_t lo = segments[3 * i + 1], hi = segments[3 * i + 2];
      if (block < 0 || block >= a.cache.num_blocks) return "segment outside the KV cache";
      if (std::min(lo, hi) < 0 || std::max(lo, hi) > a.cache.block_size) {
        return "segment outside its block";
      }
    }
  }
  return nullptr;
}

inline const char* check_shared(const AttentionArgs& a) {
  const SharedArgs& s = a.shared;
  if (s.row_start[0] < 0 || s.row_start[s.parts] > s.num_rows) {
    return "row_start of shared parts outside their rows";
  }
  for (int64_t part = 0; part < s.parts; ++part) {
    if (s.row_start[part] > s.row_start[part + 1]) return "row_start of shared parts decreases";
    for (int64_t i = s.row_start[part]; i < s.row_start[part + 1]; ++i) {
      if (s.rows[i] < 0 || s.rows[i] >= a.rows) return "shared part of a row outside the batch";
    }
  }
  return check_segments(a, s.segment_start, s.parts, s.segments, s.num_segments);
}

inline const char* check_attention(const AttentionArgs& a) {
  if (a.query_start[0] != 0 || a.query_start[a.rows] != a.tokens) {
    return "query_start must run from 0 to the number of tokens";
  }
  for (int64_t row = 0; row < a.rows; ++row) {
    if (a.query_start[row] > a.query_start[row + 1]) return "query_start decreases";
  }
  if (a.shared.parts > 0) {
    if (const char* error = check_shared(a)) return error;
  }
  return check_segments(a, a.segment_start, a.rows, a.segments, a.num_segments);
}

inline const char* check_embed(const EmbedArgs& a) {
  if (a.format == WeightFormat::kInt4) return "embeddings cannot be int4";
  for (int64_t i = 0; i < a.count; ++i) {
    if (a.tokens[i] < 0 || a.tokens[i] >= a.outputs) return "token outside the vocabulary";
  }
  return nullptr;
}

}  // namespace bros
