// How the attention of a step is cut into tasks.
//
//   row of the step:   context keys (segments)          chunk keys (qkv)
//                      [ part 0 | part 1 | ... | part n ............... ]   x kv heads x query
//                      tiles
//
// A task is the attention of some queries of one row, with all query heads of one KV head (its
// lanes), over a part of the context and, in the last part, over the chunk. If all keys of the
// queries are in one part that nobody shares, the task adds all results itself; else it writes
// records, and a merge adds those of all parts in the same order. So the cut changes no result.
//
// Shared parts (attention_shared.h) are cut in the same way, with the queries of all their readers
// as the queries; the merge of a row adds their results before those of its own parts.
#pragma once

#include "attention_shared.h"

namespace bros {
namespace {

constexpr int64_t kTileSplit = 1024;  // context keys of a part if a row has one tile of queries
// Tiles of a row with many queries are larger, since each one copies the keys: the attention of
// 4,096 tokens takes 0.95 of the time (Zen 4, two threads). But with too few tasks, threads wait for
// the last one: 256 tokens in three tasks take 1.3 times as long as in twelve.
constexpr int64_t kMostTileLanes = 4 * kTileLanes;
constexpr int64_t kTasksPerThread = 6;  // of a row with larger tiles, at least

struct Task {
  int32_t kv_head;
  int32_t token;          // of the first query if `tokens` is null
  const int32_t* tokens;  // of the queries if they are of several rows, else null
  int32_t num_queries;
  int32_t first_query;     // its index in the chunk
  const int32_t* segment;  // where the context part begins: skip the first `skip` keys from here
  int32_t skip;
  int32_t num_context;  // keys of the context part
  int64_t position;     // of its first key in the row
  bool with_chunk;      // each query also attends to the chunk up to itself
  bool decode;          // a decode task (attention_decode.h), else a tile task
  int64_t partial;      // where the first record goes; -1: write to the output
  int64_t record_step;  // floats between two records

  int64_t query_token(int64_t query) const { return tokens ? tokens[query] : token + query; }
};

// The records of a part of the context, or of what the row has by itself, for some queries.
struct Source {
  int64_t partial;  // where the first one begins
  int64_t record_step;
  int64_t position;  // of the first key
  int64_t end;
  int64_t split;  // keys of every task but the last

  // Calls visit(position of the first key, its result for the first lane) for each record.
  template <class Visit>
  void for_each_record(float* partials, const Visit& visit) const {
    float* record = partials + partial;
    for (int64_t first = position; first < end; first += split) {
      const int64_t task_end = min_of(first + split, end);
      for (int64_t key = first; key < task_end; key = record_end(key, task_end)) {
        visit(key, record);
        record += record_step;
      }
    }
  }
};

// Adds the results of some queries of a row.
struct Merge {
  int32_t kv_head;
  int32_t token;
  int32_t num_queries;
  int32_t num_sources;
  int64_t first_source;
};

// Lists the tasks of a batch, long ones first. With null arrays it only counts them.
class TaskList {
 public:
  TaskList(const Problem& problem, const SharedIndex& shared, Task* tasks, Merge* merges,
           Source* sources)
      : partial_floats(shared.partial_floats),
        problem_(problem),
        shared_(shared),
        tasks_(tasks),
        merges_(merges),
        sources_(sources) {
    for (int64_t i = 0; i < shared.num_parts; ++i) add_shared(shared.parts[i]);
    add_rows(false);
    add_rows(true);
  }

  int64_t num_tasks = 0;
  int64_t num_merges = 0;
  int64_t num_sources = 0;
  int64_t partial_floats;
  int64_t multiply_adds = 0;
  int64_t most_lanes = 0;  // no tile task has more

 private:
  int64_t queries_per_tile(int64_t lanes) const {
    return max_of<int64_t>(1, lanes / problem_.group);
  }

  // Lanes of the tiles of a row: kTileLanes, doubled while that leaves enough tasks.
  int64_t tile_lanes(int64_t num_queries) const {
    const int64_t fewest = kTasksPerThread * problem_.args.threads;
    int64_t lanes = kTileLanes;
    while (lanes < kMostTileLanes) {
      const int64_t num_tiles = num_queries / queries_per_tile(2 * lanes);
      if (num_tiles < 2 || num_tiles * problem_.args.layout.kv_heads < fewest) break;
      lanes *= 2;
    }
    return lanes;
  }

  void add_shared(const SharedPart& part) {
    if (part.num_splits == 0) return;
    const int64_t size = problem_.partial_size(part.num_queries);
    Task task = {};
    task.segment = part.segments;
    task.decode = part.num_queries * problem_.group <= kDecodeLanes;
    task.position = part.position;
    task.record_step = size;
    const int64_t per_tile = queries_per_tile(kTileLanes);
    if (!task.decode) note_lanes(per_tile);
    for (int64_t first = 0; first < part.num_queries; first += per_tile) {
      task.tokens = part.tokens + first;
      task.num_queries = static_cast<int32_t>(min_of(per_tile, part.num_queries - first));
      for (int64_t head = 0; head < problem_.args.layout.kv_heads; ++head) {
        task.kv_head = static_cast<int32_t>(head);
        task.partial = part.partial + head * part.num_records * size + problem_.partial_size(first);
        add_parts(task, part.num_context, part.split, part.num_splits);
      }
    }
    multiply_adds += multiply_adds_of(part.num_queries * part.num_context);
  }

  void add_rows(bool decode) {
    for (int64_t row = 0; row < problem_.args.rows; ++row) add_row(row, decode);
  }

  void add_row(int64_t row, bool decode) {
    const AttentionArgs& a = problem_.args;
    const int64_t num_queries = problem_.num_queries(row);
    if (num_queries == 0 || decode != (num_queries * problem_.group <= kDecodeLanes)) return;
    Task task = {};
    task.decode = decode;
    task.with_chunk = true;
    task.segment = a.segments + 3 * static_cast<int64_t>(a.segment_start[row]);
    const int64_t context =
        count_keys(task.segment, a.segment_start[row + 1] - a.segment_start[row]);
    const int64_t per_tile = decode ? num_queries : queries_per_tile(tile_lanes(num_queries));
    if (!decode) note_lanes(per_tile);
    const int64_t num_tiles = ceil_div(num_queries, per_tile);
    int64_t part_length = decode ? kDecodeSplit : kTileSplit;
    if (num_tiles > 1) part_length = max_of<int64_t>(1, context);
    const int64_t num_parts = max_of<int64_t>(1, ceil_div(context, part_length));
    for (int64_t tile = num_tiles - 1; tile >= 0; --tile) {
      task.first_query = static_cast<int32_t>(tile * per_tile);
      task.token = a.query_start[row] + task.first_query;
      task.num_queries = static_cast<int32_t>(min_of(per_tile, num_queries - task.first_query));
      for (int64_t head = 0; head < a.layout.kv_heads; ++head) {
        task.kv_head = static_cast<int32_t>(head);
        add_tile(row, task, context, part_length, num_parts);
      }
    }
    multiply_adds += multiply_adds_of(num_queries * (context + (num_queries + 1) / 2));
  }

  // Adds the tasks of a tile of queries of a row, and the merge if there are several results.
  void add_tile(int64_t row, Task task, int64_t context, int64_t part_length, int64_t num_parts) {
    const int64_t first_source = num_sources;
    task.position = 0;
    shared_.for_each_part(row, [&](const SharedPart& part, int64_t first_query) {
      const int64_t step = problem_.partial_size(part.num_queries);
      const int64_t mine = problem_.partial_size(first_query + task.first_query);
      add_source({part.partial + task.kv_head * part.num_records * step + mine, step,
                  part.position, part.position + part.num_context, part.split});
      task.position += part.num_context;
    });
    task.partial = -1;
    if (num_parts > 1 || num_sources > first_source) {
      task.partial = partial_floats;
      task.record_step = problem_.partial_size(task.num_queries);
      add_own_source(task, context, part_length, num_parts);
      if (merges_) {
        merges_[num_merges] = {task.kv_head, task.token, task.num_queries,
                               static_cast<int32_t>(num_sources - first_source), first_source};
      }
      ++num_merges;
    }
    add_parts(task, context, part_length, num_parts);
  }

  // The source of the row's own keys: all parts but the last, then the last one with the chunk.
  void add_own_source(const Task& task, int64_t context, int64_t part_length, int64_t num_parts) {
    const int64_t before = (num_parts - 1) * part_length;
    const int64_t last = task.position + before;
    const int64_t end = task.position + context + task.first_query + task.num_queries;
    int64_t partial = task.partial;
    if (before > 0) {
      add_source({partial, task.record_step, task.position, last, part_length});
      for (int64_t first = task.position; first < last; first += part_length) {
        partial += task.record_step * count_records(first, first + part_length);
      }
    }
    add_source({partial, task.record_step, last, end, end - last});
    partial_floats = partial + task.record_step * count_records(last, end);
  }

  void note_lanes(int64_t queries) {
    most_lanes = max_of(most_lanes, queries * problem_.group);
  }

  void add_source(const Source& source) {
    if (sources_) sources_[num_sources] = source;
    ++num_sources;
  }

  // Adds the task once for each part of the context; the last one keeps the chunk.
  void add_parts(Task task, int64_t context, int64_t part_length, int64_t num_parts) {
    if (tasks_) {
      const bool with_chunk = task.with_chunk;
      for (int64_t part = 0; part < num_parts; ++part) {
        const bool last = part + 1 == num_parts;
        task.num_context = static_cast<int32_t>(min_of(part_length, context - part * part_length));
        task.with_chunk = with_chunk && last;
        tasks_[num_tasks + part] = task;
        if (last) break;
        advance(&task);
        task.partial += task.record_step * count_records(task.position, task.position + part_length);
        task.position += part_length;
      }
    }
    num_tasks += num_parts;
  }

  // Moves (segment, skip) past the task's part of the context.
  void advance(Task* task) const {
    int32_t left = task->skip + task->num_context;
    for (;;) {
      const int32_t* s = task->segment;
      if (left < keys_of(s)) break;
      left -= keys_of(s);
      task->segment += 3;
    }
    task->skip = left;
  }

  int64_t multiply_adds_of(int64_t pairs) const {
    return pairs * problem_.args.layout.heads * problem_.dim * 2;
  }

  const Problem& problem_;
  const SharedIndex& shared_;
  Task* tasks_;
  Merge* merges_;
  Source* sources_;
};

// The slots of a segment but for the first `skip` ones: from `offset` on, in steps of 1 or -1.
struct Stretch {
  int32_t block;
  int32_t offset;
  int32_t step;
  int32_t count;

  Stretch(const int32_t* segment, int32_t skip)
      : block(segment[0]),
        offset(segment[1] <= segment[2] ? segment[1] + skip : segment[1] - 1 - skip),
        step(segment[1] <= segment[2] ? 1 : -1),
        count(keys_of(segment) - skip) {}
};

// Calls visit(stretch) for the contiguous ranges of slots of a task's context.
template <class Visit>
BROS_INLINE void for_each_stretch(const Task& task, const Visit& visit) {
  const int32_t* segment = task.segment;
  int32_t skip = task.skip;
  for (int32_t left = task.num_context; left > 0; segment += 3, skip = 0) {
    Stretch stretch(segment, skip);
    stretch.count = min_of(stretch.count, left);
    if (stretch.count > 0) visit(stretch);
    left -= stretch.count;
  }
}

}  // namespace
}  // namespace bros
