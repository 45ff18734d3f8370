// Shared parts, the context that several rows read: their readers, and where their results go.
//
//   part    readers (rows)    queries of the part, in this order    its context keys, in splits
//   0       0 1 2             q0 | q1 q1 q1 | q2                    [ split 0 | split 1 | ... ]
//   1       1 2               q1 q1 q1 | q2                         [ split 0 ]
//
// All queries of a part attend to its keys together, so that K and V are loaded once per tile of
// queries instead of once per row. Each record of a KV head has the results of all queries of the
// part, one after the other; the merge of a reader picks those of its queries.
#pragma once

#include "attention_problem.h"

namespace bros {
namespace {

constexpr int64_t kTileLanes = 192;    // lanes of a query tile; see TaskList::tile_lanes
constexpr int64_t kSharedSplit = kRunKeys;  // context keys of a task if all queries are in one tile

struct SharedPart {
  const int32_t* tokens;    // [num_queries], of the queries of all its readers
  const int32_t* segments;  // (block, lo, hi) each, see keys_of
  int64_t num_queries;
  int64_t num_context;
  int64_t position;     // of its first key: in its readers, parts before it come before it
  int64_t split;        // context keys of every split but the last
  int64_t num_splits;   // 0 if the part has no queries or no context
  int64_t num_records;  // of each KV head, of all splits
  int64_t partial;      // where the results of the first KV head and record begin; others follow
};

// A row that reads a part.
struct Reader {
  int32_t part;
  int32_t first_query;  // index of the row's first query among the queries of the part
};

// A segment with lo > hi is read from slot lo - 1 down to hi.
int32_t keys_of(const int32_t* segment) {
  return segment[1] < segment[2] ? segment[2] - segment[1] : segment[1] - segment[2];
}

int64_t count_keys(const int32_t* segments, int64_t num_segments) {
  int64_t total = 0;
  for (int64_t i = 0; i < num_segments; ++i) total += keys_of(segments + 3 * i);
  return total;
}

// The parts of a batch, and for each row the parts that it reads. `memory` owns the arrays.
class SharedIndex {
 public:
  SharedIndex(const Problem& p, Scratch* memory) {
    const SharedArgs& s = p.args.shared;
    if (s.parts == 0) return;
    int64_t num_tokens = 0;
    for (int64_t i = s.row_start[0]; i < s.row_start[s.parts]; ++i) {
      num_tokens += p.num_queries(s.rows[i]);
    }
    Arena measured(nullptr);
    take(&measured, p, num_tokens);
    void* base = memory->reserve(measured.used());
    ok = base != nullptr;
    if (!ok) return;
    Arena arena(base);
    take(&arena, p, num_tokens);
    list_parts(p);
    list_readers(p);
    place_parts(p);
  }

  bool ok = true;
  int64_t num_parts = 0;
  int64_t partial_floats = 0;
  SharedPart* parts = nullptr;

  // Calls visit(part, index of the row's first query in it) for each part that a row reads.
  template <class Visit>
  void for_each_part(int64_t row, const Visit& visit) const {
    if (num_parts == 0) return;
    for (int64_t i = reader_start_[row]; i < reader_start_[row + 1]; ++i) {
      const SharedPart& part = parts[readers_[i].part];
      if (part.num_splits > 0) visit(part, readers_[i].first_query);
    }
  }

 private:
  void take(Arena* arena, const Problem& p, int64_t num_tokens) {
    const SharedArgs& s = p.args.shared;
    parts = arena->take<SharedPart>(s.parts);
    readers_ = arena->take<Reader>(s.num_rows);
    reader_start_ = arena->take<int64_t>(p.args.rows + 1);
    tokens_ = arena->take<int32_t>(num_tokens);
  }

  void list_parts(const Problem& p) {
    const SharedArgs& s = p.args.shared;
    int32_t* token = tokens_;
    num_parts = s.parts;
    for (int64_t i = 0; i < num_parts; ++i) {
      SharedPart& part = parts[i];
      part.tokens = token;
      for (int64_t j = s.row_start[i]; j < s.row_start[i + 1]; ++j) {
        const int32_t* query_start = p.args.query_start + s.rows[j];
        for (int32_t t = query_start[0]; t < query_start[1]; ++t) *token++ = t;
      }
      part.num_queries = token - part.tokens;
      part.segments = s.segments + 3 * static_cast<int64_t>(s.segment_start[i]);
      part.num_context = count_keys(part.segments, s.segment_start[i + 1] - s.segment_start[i]);
      part.split = split_of(p, part.num_queries);
      part.num_splits = part.num_queries ? ceil_div(part.num_context, part.split) : 0;
    }
  }

  // Splits are longer if there are more tiles of queries. So the number of tasks does not grow with
  // the number of tiles.
  static int64_t split_of(const Problem& p, int64_t num_queries) {
    const int64_t lanes = num_queries * p.group;
    if (lanes <= kDecodeLanes) return kDecodeSplit;
    return kSharedSplit * ceil_div(lanes, kTileLanes);
  }

  // Counting sort of the readers by row. During the sort reader_start_[row + 1] is the position of
  // the next reader of `row`; at the end it is where the readers of row + 1 begin.
  void list_readers(const Problem& p) {
    const SharedArgs& s = p.args.shared;
    __builtin_memset(reader_start_, 0, (p.args.rows + 1) * sizeof *reader_start_);
    for (int64_t i = s.row_start[0]; i < s.row_start[s.parts]; ++i) {
      if (s.rows[i] + 1 < p.args.rows) ++reader_start_[s.rows[i] + 2];
    }
    for (int64_t row = 2; row <= p.args.rows; ++row) reader_start_[row] += reader_start_[row - 1];
    for (int64_t part = 0; part < s.parts; ++part) {
      int64_t query = 0;
      for (int64_t i = s.row_start[part]; i < s.row_start[part + 1]; ++i) {
        const int32_t row = s.rows[i];
        readers_[reader_start_[row + 1]++] = {static_cast<int32_t>(part),
                                              static_cast<int32_t>(query)};
        query += p.num_queries(row);
      }
    }
  }

  // Sets where the parts are in their readers, and where their results go. If readers disagree, the
  // last one counts: their results are right, but not in the order of their own keys.
  void place_parts(const Problem& p) {
    for (int64_t row = 0; row < p.args.rows; ++row) {
      int64_t position = 0;
      for (int64_t i = reader_start_[row]; i < reader_start_[row + 1]; ++i) {
        SharedPart& part = parts[readers_[i].part];
        part.position = position;
        position += part.num_context;
      }
    }
    for (int64_t i = 0; i < num_parts; ++i) {
      SharedPart& part = parts[i];
      part.num_records = 0;
      for (int64_t split = 0; split < part.num_splits; ++split) {
        const int64_t first = part.position + split * part.split;
        const int64_t end = min_of(first + part.split, part.position + part.num_context);
        part.num_records += count_records(first, end);
      }
      part.partial = partial_floats;
      partial_floats += p.args.layout.kv_heads * part.num_records * p.partial_size(part.num_queries);
    }
  }

  Reader* readers_ = nullptr;
  int64_t* reader_start_ = nullptr;
  int32_t* tokens_ = nullptr;
};

}  // namespace
}  // namespace bros
