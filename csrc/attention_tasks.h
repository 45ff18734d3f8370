// How the attention of a step is cut into tasks.
//
//   row of the step:   context keys (segments)          chunk keys (qkv)
//                      [ part 0 | part 1 | ... | part n ............... ]   x kv heads x query
//                      tiles
//
// A task is the attention of some queries of one row, with all query heads of one KV head (its
// lanes), over a part of the context and, in the last part, over the chunk. If a tile of queries
// has several parts, each leaves an unnormalised output with its maximum and sum, and a merge
// combines them. The cut depends on the row alone, so a row's result does not depend on the other
// rows of the batch or on the number of threads.
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace bros {
namespace {

constexpr int64_t kDecodeLanes = 8;    // at most so many lanes go the one-by-one way
constexpr int64_t kDecodeSplit = 256;  // context keys in one part of a decode task
constexpr int64_t kTileLanes = 192;    // lanes of a query tile, if a query has no more
constexpr int64_t kTileSplit = 1024;   // context keys in one part, if a row has only one tile

struct Task {
  int32_t kv_head;
  int32_t token;  // of the first query
  int32_t num_queries;
  int32_t first_query;  // its index in the chunk
  int32_t segment;      // the context part: num_context keys from here, without the first `skip`
  int32_t skip;
  int32_t num_context;
  bool with_chunk;  // also keys 0 .. query of the chunk
  bool decode;
  int64_t partial;  // where the part goes in the array of partials; -1: straight to the output
};

struct Merge {
  int32_t kv_head;
  int32_t token;
  int32_t num_queries;
  int32_t num_parts;
  int64_t partial;  // of the first part; the others follow
};

// A batch with the numbers that every task needs.
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
  int64_t partial_size(int64_t lanes) const { return round_up(lanes * (dim + 2), 16); }
};

// The partial result of one task: o [lanes, dim], then m [lanes] and l [lanes], in base 2:
// the lane's output is sum_parts 2^m o / sum_parts 2^m l.
struct Partial {
  float* o;
  float* m;
  float* l;
  Partial(float* base, int64_t lanes, int64_t dim)
      : o(base), m(base + lanes * dim), l(base + lanes * (dim + 1)) {}
};

const char* check_batch(const AttentionArgs& a) {
  if (a.query_start[0] != 0 || a.query_start[a.rows] != a.tokens) {
    return "query_start must run from 0 to the number of tokens";
  }
  if (a.segment_start[0] < 0 || a.segment_start[a.rows] > a.num_segments) {
    return "segment_start outside segments";
  }
  for (int64_t row = 0; row < a.rows; ++row) {
    if (a.query_start[row] > a.query_start[row + 1]) return "query_start decreases";
    if (a.segment_start[row] > a.segment_start[row + 1]) return "segment_start decreases";
    for (int64_t i = a.segment_start[row]; i < a.segment_start[row + 1]; ++i) {
      const int32_t block = a.segments[3 * i];
      const int32_t lo = a.segments[3 * i + 1], hi = a.segments[3 * i + 2];
      if (block < 0 || block >= a.cache.num_blocks) return "segment outside the KV cache";
      if (lo < 0 || lo > hi || hi > a.cache.block_size) return "segment outside its block";
    }
  }
  return nullptr;
}

int64_t context_length(const AttentionArgs& a, int64_t row) {
  int64_t total = 0;
  for (int64_t i = a.segment_start[row]; i < a.segment_start[row + 1]; ++i) {
    total += a.segments[3 * i + 2] - a.segments[3 * i + 1];
  }
  return total;
}

// Lists the tasks of a batch, the long ones first. With null arrays it only counts.
class TaskList {
 public:
  TaskList(const Problem& problem, Task* tasks, Merge* merges)
      : problem_(problem), tasks_(tasks), merges_(merges) {
    add_rows(false);
    add_rows(true);
  }

  int64_t num_tasks = 0;
  int64_t num_merges = 0;
  int64_t partial_floats = 0;
  int64_t multiply_adds = 0;

 private:
  void add_rows(bool decode) {
    for (int64_t row = 0; row < problem_.args.rows; ++row) add_row(row, decode);
  }

  void add_row(int64_t row, bool decode) {
    const int32_t* start = problem_.args.query_start + row;
    const int64_t num_queries = start[1] - start[0];
    if (num_queries == 0 || decode != (num_queries * problem_.group <= kDecodeLanes)) return;
    const int64_t context = context_length(problem_.args, row);
    const int64_t per_tile = decode ? num_queries : max_of<int64_t>(1, kTileLanes / problem_.group);
    const int64_t num_tiles = ceil_div(num_queries, per_tile);
    int64_t part_length = decode ? kDecodeSplit : kTileSplit;
    if (num_tiles > 1) part_length = max_of<int64_t>(1, context);
    for (int64_t tile = num_tiles - 1; tile >= 0; --tile) {
      Task task = {};
      task.first_query = static_cast<int32_t>(tile * per_tile);
      task.token = start[0] + task.first_query;
      task.num_queries = static_cast<int32_t>(min_of(per_tile, num_queries - task.first_query));
      task.decode = decode;
      for (int64_t head = 0; head < problem_.args.layout.kv_heads; ++head) {
        task.kv_head = static_cast<int32_t>(head);
        add_parts(row, task, context, part_length);
      }
    }
    multiply_adds += num_queries * (context + (num_queries + 1) / 2) * problem_.args.layout.heads *
                     problem_.dim * 2;
  }

  void add_parts(int64_t row, Task task, int64_t context, int64_t part_length) {
    const int64_t num_parts = max_of<int64_t>(1, ceil_div(context, part_length));
    const int64_t size = problem_.partial_size(task.num_queries * problem_.group);
    if (num_parts > 1) {
      if (merges_) {
        merges_[num_merges] = {task.kv_head, task.token, task.num_queries,
                               static_cast<int32_t>(num_parts), partial_floats};
      }
      ++num_merges;
    }
    task.segment = problem_.args.segment_start[row];
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t begin = part * part_length;
      task.num_context = static_cast<int32_t>(min_of(part_length, context - begin));
      task.with_chunk = part == num_parts - 1;
      task.partial = num_parts > 1 ? partial_floats + part * size : -1;
      if (tasks_) {
        tasks_[num_tasks] = task;
        if (!task.with_chunk) advance(&task);
      }
      ++num_tasks;
    }
    if (num_parts > 1) partial_floats += num_parts * size;
  }

  // Moves (segment, skip) past the task's part of the context.
  void advance(Task* task) const {
    const int32_t* segments = problem_.args.segments;
    int32_t left = task->skip + task->num_context;
    for (;;) {
      const int32_t* s = segments + 3 * task->segment;
      if (left < s[2] - s[1]) break;
      left -= s[2] - s[1];
      ++task->segment;
    }
    task->skip = left;
  }

  const Problem& problem_;
  Task* tasks_;
  Merge* merges_;
};

// Calls visit(block, offset, count) for the stretches of cache that make up a task's context.
template <class Visit>
BROS_INLINE void for_each_stretch(const Problem& p, const Task& task, const Visit& visit) {
  const int32_t* segment = p.args.segments + 3 * static_cast<int64_t>(task.segment);
  int32_t skip = task.skip;
  for (int32_t left = task.num_context; left > 0; segment += 3, skip = 0) {
    const int32_t lo = segment[1] + skip;
    const int32_t count = min_of(segment[2] - lo, left);
    if (count > 0) visit(segment[0], lo, count);
    left -= count;
  }
}

}  // namespace
}  // namespace bros
