// Makes the work list of a step's attention (kernels/triton/plan.py, which defines every number of
// it) and writes it where a copy takes it to the device (kernels/triton/buffers.py).
//
//   WorkList list(batch, rules)
//   list.measure()   checks the batch and counts what each section will hold; writes nothing
//   list.write()     the sections, without checks: they hold what was measured
//
// The host makes a list in every step while the device waits for it, so this walks rows, items and
// readers, and copies segments as blocks of memory.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

namespace bros {

// One of plan.Split: how the segments of units are split into items.
struct SplitRule {
  int64_t programs, grain, least, long_grains, waves;

  bool valid() const {
    return programs > 0 && grain > 0 && least >= 0 && long_grains > 0 && waves > 0 &&
           std::max({programs, grain, least, long_grains, waves}) < kMost;
  }
  int64_t grains(int64_t segments) const { return (segments + grain - 1) / grain; }

  int64_t item_length(int64_t total, int64_t programs_per_item) const {
    const int64_t work = total * programs_per_item;
    const int64_t even = (work + programs - 1) / programs;
    const int64_t at_once = programs * waves;
    const int64_t shortest = std::max(long_grains, (work + at_once - 1) / at_once);
    return std::max(least, std::min(even, shortest));
  }

  static constexpr int64_t kMost = int64_t{1} << 20;  // see WorkList::kMostGrains
};

// plan.PlanRules, in the order of work_list.pack_rules.
struct WorkRules {
  SplitRule one, tile;
  int64_t tile_tokens, programs_per_one, programs_per_tile;

  bool valid() const {
    return one.valid() && tile.valid() && tile_tokens > 0 && programs_per_one > 0 &&
           programs_per_tile > 0 &&
           std::max({tile_tokens, programs_per_one, programs_per_tile}) < SplitRule::kMost;
  }
};

// interface.AttentionBatch: int32, `segments` has three numbers each.
struct WorkBatch {
  const int32_t *query_start, *segment_start, *segments;
  int64_t rows, num_segments;
  const int32_t *part_start, *part_rows, *part_segment_start, *part_segments;
  int64_t parts, num_part_rows, num_part_segments;

  int64_t queries(int64_t row) const { return int64_t{query_start[row + 1]} - query_start[row]; }
  int64_t part_length(int64_t part) const {
    return int64_t{part_segment_start[part + 1]} - part_segment_start[part];
  }

  // What is wrong with the offsets; null if nothing is.
  const char* error() const {
    if (rows < 0 || num_segments < 0) return "a batch of negative size";
    if (query_start[0] != 0) return "query_start does not begin with 0";
    if (segment_start[0] < 0 || segment_start[rows] > num_segments) {
      return "segment_start outside segments";
    }
    for (int64_t row = 0; row < rows; ++row) {
      if (query_start[row] > query_start[row + 1]) return "query_start decreases";
      if (segment_start[row] > segment_start[row + 1]) return "segment_start decreases";
    }
    return parts ? error_of_parts() : nullptr;
  }

 private:
  const char* error_of_parts() const {
    if (parts < 0 || num_part_rows < 0 || num_part_segments < 0) return "parts of negative size";
    if (part_start[0] != 0 || part_start[parts] != num_part_rows) {
      return "row_start of shared parts does not run from 0 to the number of rows";
    }
    if (part_segment_start[0] < 0 || part_segment_start[parts] > num_part_segments) {
      return "segment_start of shared parts outside their segments";
    }
    for (int64_t part = 0; part < parts; ++part) {
      if (part_start[part] > part_start[part + 1]) return "row_start of shared parts decreases";
      if (part_length(part) < 0) return "segment_start of shared parts decreases";
    }
    for (int64_t i = 0; i < num_part_rows; ++i) {
      if (part_rows[i] < 0 || part_rows[i] >= rows) return "shared part of a row outside the batch";
    }
    return nullptr;
  }
};

// Calls visit(part, first, end, readers) for each part: its readers are part_rows[first, end), of
// which `readers` are rows of one token that read it together. 0: each has a copy of its own.
template <class Visit>
void for_each_part(const WorkBatch& batch, const Visit& visit) {
  for (int64_t part = 0; part < batch.parts; ++part) {
    const int64_t first = batch.part_start[part], end = batch.part_start[part + 1];
    int64_t readers = 0;
    if (batch.part_length(part) > 0) {
      for (int64_t i = first; i < end; ++i) readers += batch.queries(batch.part_rows[i]) == 1;
    }
    visit(part, first, end, readers > 1 ? readers : 0);
  }
}

// What buffers.GraphWork.fits asks about a batch.
struct BatchCounts {
  int64_t tokens, empty, several, segments;  // rows of no and of several tokens; segments of a list

  // Null, or what is wrong.
  const char* count(const WorkBatch& batch) {
    if (const char* error = batch.error()) return error;
    *this = {batch.query_start[batch.rows], 0, 0, batch.num_segments + batch.num_part_segments};
    for (int64_t row = 0; row < batch.rows; ++row) {
      empty += batch.queries(row) == 0;
      several += batch.queries(row) > 1;
    }
    for_each_part(batch, [&](int64_t part, int64_t first, int64_t end, int64_t readers) {
      segments += (end - first - readers) * batch.part_length(part);
    });
    return nullptr;
  }
};

// buffers.ListSizes, in its order.
struct WorkSizes {
  int64_t one_items, tile_items, listed, merge_tokens, merge_slots, segments, partials;

  bool valid() const {
    const auto sizes = {one_items,   tile_items, listed,  merge_tokens,
                        merge_slots, segments,   partials};
    return std::min(sizes) >= 0 && std::max(sizes) <= kMost;
  }
  bool hold(const WorkSizes& need) const {
    return need.one_items <= one_items && need.tile_items <= tile_items && need.listed <= listed &&
           need.merge_tokens <= merge_tokens && need.merge_slots <= merge_slots &&
           need.segments <= segments && need.partials <= partials;
  }

  // Of anything: all numbers of a section then have an index in int32.
  static constexpr int64_t kMost = int64_t{1} << 27;
};

// Where the sections of a list begin, in int32 numbers (ListSizes.section_starts).
struct WorkSections {
  int64_t counts, one_items, tile_items, listed, merge_tokens, merge_start, merge_slots, segments,
      end;

  // Whether each section holds its capacity before the next one begins, and the last before `end`.
  bool have_room(const WorkSizes& sizes) const;
};

// Columns as plan.QUERY, QUERIES ... number them.
struct WorkItem {
  int32_t query, queries, segment, segment_end, own, own_end, partial, listed;
};

inline bool WorkSections::have_room(const WorkSizes& sizes) const {
  constexpr int64_t kWidth = sizeof(WorkItem) / sizeof(int32_t), kCounts = 4;
  const int64_t starts[] = {counts,       one_items,   tile_items,  listed,
                            merge_tokens, merge_start, merge_slots, segments};
  const int64_t lengths[] = {kCounts,
                             sizes.one_items * kWidth,
                             sizes.tile_items * kWidth,
                             sizes.listed,
                             sizes.merge_tokens,
                             sizes.merge_tokens + 1,
                             sizes.merge_slots,
                             sizes.segments * 3};
  if (!sizes.valid()) return false;
  int64_t used = 0;
  for (int i = 0; i < 8; ++i) {
    if (starts[i] < used || starts[i] > end) return false;
    used = starts[i] + lengths[i];
  }
  return used <= end;
}

class WorkList {
 public:
  WorkList(const WorkBatch& batch, const WorkRules& rules) : batch_(batch), rules_(rules) {}
  ~WorkList() {
    free(rows_);
    free(tiles_);
    free(places_);
  }
  WorkList(const WorkList&) = delete;
  WorkList& operator=(const WorkList&) = delete;

  // Null, or what is wrong.
  const char* measure() {
    if (!rules_.valid()) return "rules that are no small positive numbers";
    if (const char* error = batch_.error()) return error;
    if (batch_.parts && !find_context()) return kNoMemory;
    const int64_t largest = std::max({int64_t{batch_.query_start[batch_.rows]},
                                      batch_.num_segments, batch_.num_part_segments, copied_});
    if (largest > WorkSizes::kMost || !measure_ones() || !measure_tiles()) return kTooLong;
    sizes_.merge_slots = sizes_.partials;
    sizes_.segments = batch_.num_segments;
    if (batch_.parts) sizes_.segments = copied_ + batch_.num_part_segments;
    return sizes_.valid() ? nullptr : kTooLong;
  }

  static constexpr const char* kNoMemory = "no memory for the work list";

  const WorkSizes& sizes() const { return sizes_; }

  // Writes the sections, which must hold `sizes()`. Null, or what is wrong.
  const char* write(const WorkSections& at, int32_t* out) {
    const int64_t tokens = batch_.query_start[batch_.rows];
    if (sizes_.tile_items) {
      tiles_ = static_cast<Tile*>(malloc(sizes_.tile_items * sizeof(Tile)));
      if (!tiles_) return kNoMemory;
    }
    if (sizes_.partials) {
      places_ = static_cast<int32_t*>(calloc(tokens, sizeof(int32_t)));
      if (!places_) return kNoMemory;
    }
    const int32_t counts[] = {static_cast<int32_t>(sizes_.one_items),
                              static_cast<int32_t>(sizes_.tile_items),
                              static_cast<int32_t>(sizes_.merge_tokens), 0};
    memcpy(out + at.counts, counts, sizeof counts);
    WorkItem* ones = reinterpret_cast<WorkItem*>(out + at.one_items);
    WorkItem* tiles = reinterpret_cast<WorkItem*>(out + at.tile_items);
    int32_t* listed = out + at.listed;
    write_ones(ones);
    write_listed(listed);
    write_tiles(tiles);
    number_partials(ones, sizes_.one_items);
    number_partials(tiles, sizes_.tile_items);
    write_merges(ones, tiles, listed, out + at.merge_tokens, out + at.merge_start,
                 out + at.merge_slots);
    write_segments(out + at.segments);
    return nullptr;
  }

 private:
  static constexpr const char* kTooLong = "a work list of more than 2 ** 27 entries";
  static constexpr int64_t kMostGrains = int64_t{1} << 40;  // times a rule, it is below 2 ** 63
  static constexpr int64_t kTokensPerSegment = 8;  // on average, as in plan.py

  // A row and its segments after parts that are not shared were copied to it.
  struct Row {
    int64_t start, copied;  // its first segment; how many of a part come before its own
    bool reads_shared;
  };

  struct Tile {
    WorkItem item;
    int64_t weight, index;
  };

  // The grains of units that are split by the same rule.
  struct Grains {
    int64_t total = 0, most = 0;

    void add(int64_t grains, int64_t times = 1) {
      total += grains * times;
      most = std::max(most, grains);
    }
  };

  int64_t segment(int64_t row) const {
    return rows_ ? rows_[row].start : batch_.segment_start[row];
  }
  int64_t segment_end(int64_t row) const { return segment(row) + length(row); }
  int64_t length(int64_t row) const {
    const int64_t own = int64_t{batch_.segment_start[row + 1]} - batch_.segment_start[row];
    return rows_ ? own + rows_[row].copied : own;
  }
  bool reads_shared(int64_t row) const { return rows_ && rows_[row].reads_shared; }
  int64_t tiles_of(int64_t queries) const {
    return (queries + rules_.tile_tokens - 1) / rules_.tile_tokens;
  }

  // Fills rows_, and counts what is shared.
  bool find_context() {
    rows_ = static_cast<Row*>(calloc(batch_.rows + 1, sizeof(Row)));
    if (!rows_) return false;
    for_each_part(batch_, [&](int64_t part, int64_t first, int64_t end, int64_t readers) {
      for (int64_t i = first; i < end; ++i) {
        Row& row = rows_[batch_.part_rows[i]];
        if (readers && batch_.queries(batch_.part_rows[i]) == 1) {
          row.reads_shared = true;
        } else {
          row.copied += batch_.part_length(part);
        }
      }
    });
    for (int64_t row = 0; row < batch_.rows; ++row) {
      rows_[row].start = copied_;
      copied_ += length(row);
    }
    return true;
  }

  bool measure_ones() {
    Grains grains;
    for (int64_t row = 0; row < batch_.rows; ++row) {
      if (batch_.queries(row) == 1) grains.add(rules_.one.grains(length(row)));
    }
    if (grains.total > kMostGrains) return false;
    one_length_ = length_of_items(rules_.one, grains, rules_.programs_per_one);
    for (int64_t row = 0; row < batch_.rows; ++row) {
      if (batch_.queries(row) != 1) continue;
      const int64_t pieces = pieces_of(rules_.one, length(row), one_length_);
      sizes_.one_items += pieces;
      if (pieces == 1 && !reads_shared(row)) continue;
      sizes_.partials += pieces;
      ++sizes_.merge_tokens;
    }
    return true;
  }

  bool measure_tiles() {
    Grains grains;
    for (int64_t row = 0; row < batch_.rows; ++row) {
      const int64_t queries = batch_.queries(row);
      if (queries > 1) grains.add(rules_.tile.grains(length(row)), tiles_of(queries));
    }
    for_each_part(batch_, [&](int64_t part, int64_t, int64_t, int64_t readers) {
      if (readers) grains.add(rules_.tile.grains(batch_.part_length(part)), tiles_of(readers));
    });
    if (grains.total > kMostGrains) return false;
    tile_length_ = length_of_items(rules_.tile, grains, rules_.programs_per_tile);
    for (int64_t row = 0; row < batch_.rows; ++row) {
      const int64_t queries = batch_.queries(row);
      if (queries <= 1) continue;
      const int64_t pieces = pieces_of(rules_.tile, length(row), tile_length_);
      sizes_.tile_items += tiles_of(queries) * pieces;
      if (pieces == 1) continue;
      sizes_.partials += queries * pieces;
      sizes_.merge_tokens += queries;
    }
    for_each_part(batch_, [&](int64_t part, int64_t, int64_t, int64_t readers) {
      if (!readers) return;
      const int64_t pieces = pieces_of(rules_.tile, batch_.part_length(part), tile_length_);
      sizes_.tile_items += tiles_of(readers) * pieces;
      sizes_.partials += readers * pieces;
      sizes_.listed += readers;
    });
    return true;
  }

  // Grains per item; 0 if no unit is split.
  static int64_t length_of_items(const SplitRule& rule, const Grains& grains,
                                 int64_t programs_per_item) {
    const int64_t length = rule.item_length(grains.total, programs_per_item);
    return grains.most <= length ? 0 : length;
  }

  // Of a unit with these segments.
  static int64_t pieces_of(const SplitRule& rule, int64_t segments, int64_t length) {
    if (!length) return 1;
    return std::max(int64_t{1}, (rule.grains(segments) + length - 1) / length);
  }

  // Calls add(item) for each item of a unit, as plan._split makes them.
  template <class Add>
  static void split(const SplitRule& rule, const WorkItem& unit, int64_t length, const Add& add) {
    const int64_t segments = int64_t{unit.segment_end} - unit.segment;
    const int64_t pieces = pieces_of(rule, segments, length);
    if (pieces == 1) return add(unit);
    const int64_t grains = rule.grains(segments);
    WorkItem item = unit;
    item.own = item.own_end = item.partial = 0;
    for (int64_t piece = 1; piece < pieces; ++piece) {
      const int64_t skipped = grains * piece / pieces * rule.grain;
      item.segment_end = static_cast<int32_t>(unit.segment + skipped);
      add(item);
      item.segment = item.segment_end;
    }
    item.segment_end = unit.segment_end;
    item.own = unit.own;  // the last item of a unit gets its own tokens
    item.own_end = unit.own_end;
    add(item);
  }

  WorkItem unit_of(int64_t row) const {
    const int32_t begin = batch_.query_start[row], end = batch_.query_start[row + 1];
    return {begin,
            end - begin,
            static_cast<int32_t>(segment(row)),
            static_cast<int32_t>(segment_end(row)),
            begin,
            end,
            reads_shared(row) ? 0 : -1,
            0};
  }

  void write_ones(WorkItem* out) const {
    for (int64_t row = 0; row < batch_.rows; ++row) {
      if (batch_.queries(row) != 1) continue;
      split(rules_.one, unit_of(row), one_length_, [&](const WorkItem& item) { *out++ = item; });
    }
  }

  // The query tokens of rows that read shared parts, part by part.
  void write_listed(int32_t* out) const {
    for_each_part(batch_, [&](int64_t, int64_t first, int64_t end, int64_t readers) {
      for (int64_t i = first; readers && i < end; ++i) {
        const int32_t row = batch_.part_rows[i];
        if (batch_.queries(row) == 1) *out++ = batch_.query_start[row];
      }
    });
  }

  void write_tiles(WorkItem* out) {
    Tile* end = tiles_;
    const auto add = [&](const WorkItem& item) {
      const int64_t cached = int64_t{item.segment_end} - item.segment;
      const int64_t weight = cached * kTokensPerSegment + item.own_end - item.own;
      *end = {item, weight, end - tiles_};
      ++end;
    };
    for (int64_t row = 0; row < batch_.rows; ++row) {
      if (batch_.queries(row) > 1) tile(unit_of(row), add);
    }
    // Segments of parts come after those of all rows; readers of one part follow each other.
    int32_t listed = 0;
    for_each_part(batch_, [&](int64_t part, int64_t, int64_t, int64_t readers) {
      if (!readers) return;
      const int64_t first = copied_ + batch_.part_segment_start[part];
      const int64_t last = copied_ + batch_.part_segment_start[part + 1];
      const int32_t queries = static_cast<int32_t>(readers);
      tile({listed, queries, static_cast<int32_t>(first), static_cast<int32_t>(last), 0, 0, 0, 1},
           add);
      listed += queries;
    });
    // Long items first; equal ones stay in order.
    const auto before = [](const Tile& a, const Tile& b) {
      return a.weight != b.weight ? a.weight > b.weight : a.index < b.index;
    };
    if (!std::is_sorted(tiles_, end, before)) std::sort(tiles_, end, before);
    for (const Tile* tile = tiles_; tile != end; ++tile) *out++ = tile->item;
  }

  // Calls add(item) for each item of each tile of a unit.
  template <class Add>
  void tile(const WorkItem& unit, const Add& add) const {
    for (int64_t skipped = 0; skipped < unit.queries; skipped += rules_.tile_tokens) {
      WorkItem part = unit;
      part.query = static_cast<int32_t>(unit.query + skipped);
      part.queries = static_cast<int32_t>(std::min(unit.queries - skipped, rules_.tile_tokens));
      if (part.own_end > 0) part.own_end = part.query + part.queries;
      split(rules_.tile, part, tile_length_, add);
    }
  }

  void number_partials(WorkItem* items, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if (items[i].partial < 0) continue;
      items[i].partial = next_partial_;
      next_partial_ += items[i].queries;
    }
  }

  // Calls visit(token, partial result) in the order of partial results.
  template <class Visit>
  static void for_each_partial(const WorkItem* items, int64_t count, const int32_t* listed,
                               const Visit& visit) {
    for (int64_t i = 0; i < count; ++i) {
      const WorkItem& item = items[i];
      if (item.partial < 0) continue;
      for (int32_t q = 0; q < item.queries; ++q) {
        const int32_t query = item.query + q;
        visit(item.listed ? listed[query] : query, item.partial + q);
      }
    }
  }

  // Sorts the partial results by their tokens, by counting; those of a token stay in order.
  void write_merges(const WorkItem* ones, const WorkItem* tiles, const int32_t* listed,
                    int32_t* merge_tokens, int32_t* merge_start, int32_t* merge_slots) {
    int32_t begin = 0;
    if (sizes_.partials) {
      const auto count = [&](int32_t token, int32_t) { ++places_[token]; };
      for_each_partial(ones, sizes_.one_items, listed, count);
      for_each_partial(tiles, sizes_.tile_items, listed, count);
      const int32_t tokens = batch_.query_start[batch_.rows];
      for (int32_t token = 0; token < tokens; ++token) {
        const int32_t found = places_[token];
        if (!found) continue;
        *merge_tokens++ = token;
        *merge_start++ = places_[token] = begin;
        begin += found;
      }
      const auto place = [&](int32_t token, int32_t slot) { merge_slots[places_[token]++] = slot; };
      for_each_partial(ones, sizes_.one_items, listed, place);
      for_each_partial(tiles, sizes_.tile_items, listed, place);
    }
    *merge_start = begin;
  }

  void write_segments(int32_t* out) const {
    if (!batch_.parts) return copy(batch_.segments, batch_.num_segments, out);
    // Copies of parts come before the own segments of a row, in the order of the parts. `copied`
    // counts them again, so that it says where the next one goes.
    for (int64_t row = 0; row < batch_.rows; ++row) rows_[row].copied = 0;
    for_each_part(batch_, [&](int64_t part, int64_t first, int64_t end, int64_t readers) {
      const int32_t* found = batch_.part_segments + 3 * int64_t{batch_.part_segment_start[part]};
      const int64_t length = batch_.part_length(part);
      for (int64_t i = first; i < end; ++i) {
        if (readers && batch_.queries(batch_.part_rows[i]) == 1) continue;
        Row& row = rows_[batch_.part_rows[i]];
        copy(found, length, out + 3 * (row.start + row.copied));
        row.copied += length;
      }
    });
    for (int64_t row = 0; row < batch_.rows; ++row) {
      const int64_t first = batch_.segment_start[row], end = batch_.segment_start[row + 1];
      copy(batch_.segments + 3 * first, end - first,
           out + 3 * (rows_[row].start + rows_[row].copied));
    }
    copy(batch_.part_segments, batch_.num_part_segments, out + 3 * copied_);
  }

  static void copy(const int32_t* segments, int64_t count, int32_t* out) {
    if (count) memcpy(out, segments, 3 * count * sizeof *out);
  }

  const WorkBatch batch_;
  const WorkRules rules_;
  WorkSizes sizes_ = {};
  int64_t one_length_ = 0, tile_length_ = 0;  // grains per item; 0 if no unit is split
  int64_t copied_ = 0;  // segments of rows with their copies; 0 if there are no parts
  int32_t next_partial_ = 0;
  Row* rows_ = nullptr;  // [rows], null if there are no shared parts
  Tile* tiles_ = nullptr;
  int32_t* places_ = nullptr;  // [tokens], of their partial results in merge_slots
};

}  // namespace bros
