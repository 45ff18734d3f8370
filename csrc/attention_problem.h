// The arguments of a batch with derived sizes, and the result of a tile of keys.
//
// The attention of a lane (a query with a head of its group) is the same sequence of operations,
// whatever else is in the batch:
//
//   keys of the lane, by position   [ run 0: 1024 keys | run 1: 1024 | ... | run n: the rest ]
//   of each run                     [ tile 0: 64 | tile 1: 64 | ... ]
//   of each tile                    score of a key = sum of q[d] k[d] for d = 0, 1, ...
//                                   m = maximum; weight = 2^(score - m)
//                                   l = sum of weights, o = sum of weight * v, key by key from 0 on
//   of the run                      the results of its tiles, added in their order (Partial::add)
//   of the lane                     the results of the runs, added in their order
//
// It depends neither on the cut of the prompt into chunks nor on who reads a part of the context,
// as long as shared parts begin and end at tiles. Keys and values of the chunk are rounded to the
// type of the cache before they are used. Where that is bf16 and the CPU multiplies pairs of bf16,
// q and the weights are rounded to bf16, too; d and keys are then taken two by two, or by tile
// registers 32 at a time (attention_registers.h).
//
// What does not compute all keys of a lane writes records: the first tiles of a run in one, because
// further ones can be added to that, and every other tile in one of its own.
//
//   keys 1472 to 3000   | tile | tile | ... to 2048 | 2048 to 3000, one record |
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace bros {
namespace {

constexpr int64_t kTileKeys = 64;      // TILE_KEYS of kernels/interface.py
constexpr int64_t kRunKeys = 1024;     // whole tiles
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

  // A result has lane_size() floats per lane. A lane is a query and a head of the group.
  int64_t lane_size() const { return dim + 2; }
  int64_t partial_size(int64_t queries) const { return queries * group * lane_size(); }
};

// The end of the tile that has the key at a position.
int64_t tile_end(int64_t position) { return round_up(position + 1, kTileKeys); }

// The end of the record that begins at a position, if there are keys up to `end`.
int64_t record_end(int64_t position, int64_t end) {
  const int64_t full = position % kRunKeys == 0 ? position + kRunKeys : tile_end(position);
  return min_of(full, end);
}

// Records of the keys from `position` to `end`.
int64_t count_records(int64_t position, int64_t end) {
  const int64_t run = min_of(round_up(position, kRunKeys), end);
  return ceil_div(run, kTileKeys) - position / kTileKeys + ceil_div(end - run, kRunKeys);
}

// The result of a lane for some keys: o [dim], then the maximum m of the scores and the
// sum l of the weights, in base 2. The lane's output is o / l of all keys.
struct Partial {
  float* o;
  float* m;
  float* l;
  Partial(float* base, int64_t dim) : o(base), m(base + dim), l(base + dim + 1) {}
  Partial(float* o, float* m, float* l) : o(o), m(m), l(l) {}

  // The result of no key.
  void clear(int64_t dim) const {
    for (int64_t d = 0; d < dim; ++d) o[d] = 0.0f;
    *m = -kInfinity;
    *l = 0.0f;
  }

  void copy_to(const Partial& other, int64_t dim) const {
    __builtin_memcpy(other.o, o, dim * sizeof *o);
    *other.m = *m;
    *other.l = *l;
  }

  // Adds the result of the next keys. One of no key changes nothing; added to one of no key, a
  // result stays what it is.
  void add(const Partial& next, int64_t dim) const {
    const Rescaling by(splat(*m), splat(*next.m));
    for_each_vector(
        dim, [&](int64_t d) { store(o + d, by.sum(load(o + d), load(next.o + d))); },
        [&](int64_t d, int64_t n) {
          store_first(o + d, by.sum(load_first(o + d, n), load_first(next.o + d, n)), n);
        });
    *l = by.sum(splat(*l), splat(*next.l))[0];
    *m = by.top[0];
  }

  // How sums relative to the maxima `before` and `next` are added.
  struct Rescaling {
    Vec top;
    Vec alpha;
    Vec beta;
    Rescaling(Vec before, Vec next)
        : top(vmax(next, before)),
          alpha(exp2_relative(before, top)),
          beta(exp2_relative(next, top)) {}
    Vec sum(Vec before, Vec next) const { return mul_add(next, beta, before * alpha); }
  };
};

}  // namespace
}  // namespace bros
