// The arguments of a batch with derived sizes, and the layout of partial results.
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace bros {
namespace {

constexpr int64_t kDecodeLanes = 8;    // decode tasks have at most this many lanes, else tile tasks
constexpr int64_t kDecodeSplit = 256;  // context keys of a decode task

// A batch with the sizes that every task needs.
struct Problem {
  const AttentionArgs& args;
  int64_t dim;
  int64_t group;    // query heads per KV head
  int64_t columns;  // of qkv

  explicit Problem(const AttentionArgs& a)
      : args(a),
        dim(a.layout.head_dim),
        group(a.layout.heads / a.layout.kv_heads),
        columns((a.layout.heads + 2 * static_cast<int64_t>(a.layout.kv_heads)) * dim) {}

  const float* query(int64_t token, int64_t head) const {
    return args.qkv + token * columns + head * dim;
  }
  const float* chunk_key(int64_t token, int64_t kv_head) const {
    return query(token, args.layout.heads + kv_head);
  }
  const float* chunk_value(int64_t token, int64_t kv_head) const {
    return query(token, args.layout.heads + args.layout.kv_heads + kv_head);
  }
  float* output(int64_t token, int64_t head) const {
    return args.out + (token * args.layout.heads + head) * dim;
  }
  int64_t cache_row(int64_t block, int64_t kv_head, int64_t offset) const {
    return ((block * args.layout.kv_heads + kv_head) * args.cache.block_size + offset) * dim;
  }
  int64_t num_queries(int64_t row) const {
    return args.query_start[row + 1] - args.query_start[row];
  }

  // A partial result has lane_size() floats per lane. A lane is a query and a head of the group.
  int64_t lane_size() const { return dim + 2; }
  int64_t partial_size(int64_t queries) const { return queries * group * lane_size(); }
};

// The partial result of a lane: o [dim], then maximum m and sum l, in base 2. The lane's output is
// sum_parts 2^m o / sum_parts 2^m l.
struct Partial {
  float* o;
  float* m;
  float* l;
  Partial(float* base, int64_t dim) : o(base), m(base + dim), l(base + dim + 1) {}
};

}  // namespace
}  // namespace bros
