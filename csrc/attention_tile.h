// Attention of many lanes: bound by arithmetic, so it uses register-blocked products.
//
// Lanes (query, head of the group) lie along the vectors, keys and head_dim along memory:
//
//   scores [key][lane]  = sum over d of    K [key][d] (broadcast) * Q' [d][lane]
//   output [d][lane]   += sum over key of  V [key][d] (broadcast) * weights [key][lane]
//
// so K and V need no transposition (but V for tile registers), and the maxima, sums and rescaling of
// the softmax are vertical operations. A panel is kPanel lanes. Lanes are ordered by query, so a
// panel skips the keys after its last query. K, V, Q' and weights are words (attention_words.h), of
// neighbours along the sums.
#pragma once

#include "attention_registers.h"
#include "attention_tasks.h"
#include "attention_words.h"

namespace bros {
namespace {

// Register blocks: kRows broadcast rows x kVecs vectors of lanes accumulate in registers.
#if defined(__AVX512F__)
constexpr int kRows = 8, kVecs = 3;  // 24 of 32 registers
#elif defined(__AVX2__)
constexpr int kRows = 4, kVecs = 3;  // 12 of 16
#else
constexpr int kRows = 4, kVecs = 2;  // 8 of 16
#endif
constexpr int64_t kPanel = kVecs * kLanes;
constexpr int32_t kSeesAll = 1 << 30;
static_assert(kTileKeys % kRows == 0, "");
constexpr int64_t kTurned = kTileKeys / 2;  // words of two keys each

struct TileScratch {
  int64_t key_stride;  // head_dim, rounded up to kRows
  float* k;            // words of head_dim, [kTileKeys, as many as head_dim has]
  float* v;            // words of keys, [kTileKeys, key_stride]
  float* turned;       // v transposed, [key_stride, kTurned], for tile registers
  float* scores;       // [kTileKeys, kPanel], then weights in words of keys
  float* alpha;        // [kPanel]: factors of the tiles so far
  float* beta;         // [kPanel]: and of this tile
  float* q;            // per panel words of head_dim, [head_dim, kPanel]
  float* o;            // per panel [key_stride, kPanel], of the record so far
  float* m;            // per panel [kPanel]
  float* l;            // per panel [kPanel]
  float* all;          // like o, of all records
  float* all_m;        // per panel [kPanel]
  float* all_l;        // per panel [kPanel]
  int32_t* visible;    // per panel [kPanel]: keys that the lane attends to, context included

  // most_lanes: of all tile tasks.
  TileScratch(Arena* arena, const Problem& p, int64_t most_lanes)
      : key_stride(round_up(p.dim, kRows)) {
    const int64_t panels = ceil_div(most_lanes, kPanel);
    k = arena->take<float>(kTileKeys * key_stride);
    v = arena->take<float>(kTileKeys * key_stride);
    turned = arena->take<float>(key_stride * kTurned);
    scores = arena->take<float>(kTileKeys * kPanel);
    alpha = arena->take<float>(kPanel);
    beta = arena->take<float>(kPanel);
    q = arena->take<float>(panels * p.dim * kPanel);
    o = arena->take<float>(panels * key_stride * kPanel);
    m = arena->take<float>(panels * kPanel);
    l = arena->take<float>(panels * kPanel);
    all = arena->take<float>(panels * key_stride * kPanel);
    all_m = arena->take<float>(panels * kPanel);
    all_l = arena->take<float>(panels * kPanel);
    visible = arena->take<int32_t>(panels * kPanel);
  }
};

// scores[i][lane] = k[i] . q[.][lane] for kRows keys of `words` words.
template <int VECS, class Words>
BROS_INLINE void score_block(const float* __restrict k, const float* __restrict q, int64_t words,
                             float* __restrict scores) {
  Vec sum[kRows][VECS] = {};
  for (int64_t word = 0; word < words; ++word) {
    Vec x[VECS];
    for (int j = 0; j < VECS; ++j) x[j] = load(q + word * kPanel + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec key = splat_word(k + i * words + word);
      for (int j = 0; j < VECS; ++j) sum[i][j] = Words::add_product(sum[i][j], key, x[j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < VECS; ++j) store(scores + i * kPanel + j * kLanes, sum[i][j]);
  }
}

// o[i][lane] = o[i][lane] * alpha[lane] + beta[lane] * sum over keys of v[key][i] *
// weights[key][lane], for kRows elements i of head_dim and `words` words of keys.
template <int VECS, class Words>
BROS_INLINE void value_block(const float* __restrict v, int64_t v_stride,
                             const float* __restrict weights, int64_t words,
                             const float* __restrict alpha, const float* __restrict beta,
                             float* __restrict o) {
  Vec sum[kRows][VECS] = {};
  for (int64_t word = 0; word < words; ++word) {
    Vec x[VECS];
    for (int j = 0; j < VECS; ++j) x[j] = load(weights + word * kPanel + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec value = splat_word(v + word * v_stride + i);
      for (int j = 0; j < VECS; ++j) sum[i][j] = Words::add_product(sum[i][j], value, x[j]);
    }
  }
  for (int j = 0; j < VECS; ++j) {
    const Vec before = load(alpha + j * kLanes), next = load(beta + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      float* out = o + i * kPanel + j * kLanes;
      store(out, mul_add(sum[i][j], next, load(out) * before));
    }
  }
}

#if defined(BROS_MULTIPLIES_TILES)
// Both by tile registers, for all keys of a tile and all elements of head_dim.
template <int VECS>
BROS_INLINE void scores_by_tiles(const TileScratch& s, const float* q, int64_t num_keys,
                                 int64_t words) {
  for (int64_t key = 0; key < num_keys; key += kMostTileRows) {
    multiply_words<VECS>(s.k + key * words, words, q, kPanel, words);
    store_sums<VECS>(s.scores + key * kPanel, kPanel);
  }
}

template <int VECS>
BROS_INLINE void values_by_tiles(const TileScratch& s, int64_t words, int64_t dim, float* o) {
  float* sums = s.scores + kTileKeys / 2 * kPanel;  // behind the words of the weights
  for (int64_t d = 0; d < dim; d += kMostTileRows, o += kMostTileRows * kPanel) {
    multiply_words<VECS>(s.turned + d * kTurned, kTurned, s.scores, kPanel, words);
    store_sums<VECS>(sums, kPanel);
    for (int j = 0; j < VECS; ++j) {
      const Vec before = load(s.alpha + j * kLanes), next = load(s.beta + j * kLanes);
      for (int i = 0; i < kMostTileRows; ++i) {
        float* out = o + i * kPanel + j * kLanes;
        store(out, mul_add(load(sums + i * kPanel + j * kLanes), next, load(out) * before));
      }
    }
  }
}
#endif

// Replaces the scores of a tile by weights relative to their maximum, in words of keys, and adds the
// maximum and the sum to m and l; alpha and beta are the factors of o and of this tile's. visible:
// keys that each lane attends to, null for all; base: index of the tile's first key.
template <int VECS, class Words>
BROS_INLINE void softmax_block(float* __restrict scores, int64_t num_keys, const int32_t* visible,
                               int32_t base, float* __restrict m, float* __restrict l,
                               float* __restrict alpha, float* __restrict beta) {
  Vec top[VECS];
  for (int j = 0; j < VECS; ++j) top[j] = splat(-kInfinity);
  for (int64_t key = 0; key < num_keys; ++key) {
    for (int j = 0; j < VECS; ++j) {
      float* score = scores + key * kPanel + j * kLanes;
      Vec x = load(score);
      if (visible) {
        IntVec seen;
        __builtin_memcpy(&seen, visible + j * kLanes, sizeof seen);
        x = select(seen - base > splat_int(static_cast<int32_t>(key)), x, splat(-kInfinity));
        store(score, x);
      }
      top[j] = vmax(x, top[j]);
    }
  }
  Vec sum[VECS] = {}, zero[VECS];
  for (int j = 0; j < VECS; ++j) {
    // A lane that attends to none of the keys has weights of 0.
    zero[j] = select(top[j] == splat(-kInfinity), Vec{}, top[j]);
  }
  for (int64_t key = num_keys; key % Words::kPerWord; ++key) {  // the last word's other keys
    for (int j = 0; j < VECS; ++j) store(scores + key * kPanel + j * kLanes, splat(-kInfinity));
  }
  float* words = scores;  // never beyond the scores that have been read
  for (int64_t key = 0; key < num_keys; key += Words::kPerWord, words += kPanel) {
    for (int j = 0; j < VECS; ++j) {
      Vec weights[Words::kPerWord];
      for (int part = 0; part < Words::kPerWord; ++part) {
        const Vec score = load(scores + (key + part) * kPanel + j * kLanes);
        weights[part] = exp2_nonpositive(score - zero[j]);
      }
      const Vec word = Words::join(weights);
      sum[j] = Words::add_numbers(sum[j], word);
      store(words + j * kLanes, word);
    }
  }
  for (const float* end = scores + round_up(num_keys, Words::kStep) / Words::kPerWord * kPanel;
       words < end; words += kPanel) {
    for (int j = 0; j < VECS; ++j) store(words + j * kLanes, Vec{});
  }
  for (int j = 0; j < VECS; ++j) {
    const Partial::Rescaling by(load(m + j * kLanes), top[j]);
    store(alpha + j * kLanes, by.alpha);
    store(beta + j * kLanes, by.beta);
    store(l + j * kLanes, by.sum(load(l + j * kLanes), sum[j]));
    store(m + j * kLanes, by.top);
  }
}

// The first num_keys keys of a tile of keys, of which a panel may attend to fewer.
struct PanelKeys {
  int64_t panel;
  int64_t num_keys;
  int64_t base;  // index of the tile's first key in the task
  bool masked;   // whether some lane attends to fewer
};

// Three steps of a panel, each of which needs the results of the one before.

template <int VECS, class Words>
void score_panel(const Problem& p, const TileScratch& s, const PanelKeys& keys) {
  const float* q = s.q + keys.panel * p.dim * kPanel;
  const int64_t words = ceil_div(p.dim, Words::kPerWord);
#if defined(BROS_MULTIPLIES_TILES)
  if constexpr (Words::kByTiles) return scores_by_tiles<VECS>(s, q, keys.num_keys, words);
#endif
  for (int64_t key = 0; key < keys.num_keys; key += kRows) {
    score_block<VECS, Words>(s.k + key * words, q, words, s.scores + key * kPanel);
  }
}

template <int VECS, class Words>
void softmax_panel(const TileScratch& s, const PanelKeys& keys) {
  const int64_t first = keys.panel * kPanel;
  softmax_block<VECS, Words>(s.scores, keys.num_keys, keys.masked ? s.visible + first : nullptr,
                             static_cast<int32_t>(keys.base), s.m + first, s.l + first, s.alpha,
                             s.beta);
}

template <int VECS, class Words>
void value_panel(const Problem& p, const TileScratch& s, const PanelKeys& keys) {
  float* o = s.o + keys.panel * s.key_stride * kPanel;
  const int64_t words = round_up(keys.num_keys, Words::kStep) / Words::kPerWord;
#if defined(BROS_MULTIPLIES_TILES)
  if constexpr (Words::kByTiles) return values_by_tiles<VECS>(s, words, p.dim, o);
#endif
  for (int64_t d = 0; d < p.dim; d += kRows) {
    value_block<VECS, Words>(s.v + d, s.key_stride, s.scores, words, s.alpha, s.beta,
                             o + d * kPanel);
  }
}

// Copies the task's keys and values, in order, into the tile; those of the chunk rounded to the type
// of the cache.
template <class T, class Words>
class KeyStream {
 public:
  KeyStream(const Problem& p, const Task& task)
      : p_(p), task_(task), segment_(task.segment), skip_(task.skip), left_(task.num_context) {}

  // The next `count` keys, the context first, then the chunk.
  void fill(const TileScratch& s, int64_t count) {
    int64_t row = 0;
    while (row < count && left_ > 0) {
      const Stretch stretch(segment_, static_cast<int32_t>(skip_));
      const int64_t n = min_of<int64_t>(min_of<int64_t>(stretch.count, left_), count - row);
      const int64_t source = p_.cache_row(stretch.block, task_.kv_head, stretch.offset);
      copy(s, row, n, static_cast<const T*>(p_.args.cache.k) + source,
           static_cast<const T*>(p_.args.cache.v) + source, stretch.step * p_.dim);
      row += n;
      left_ -= n;
      skip_ += n;
      if (skip_ == keys_of(segment_)) {
        segment_ += 3;
        skip_ = 0;
      }
    }
    if (row < count) {
      const int64_t token = task_.token - task_.first_query + chunk_;
      copy(s, row, count - row, p_.chunk_key(token, task_.kv_head),
           p_.chunk_value(token, task_.kv_head), p_.columns);
      chunk_ += count - row;
    }
    if constexpr (Words::kByTiles) turn_values(s, count);
  }

 private:
  template <class S>
  void copy(const TileScratch& s, int64_t row, int64_t n, const S* k, const S* v, int64_t stride) {
    const int64_t words = ceil_div(p_.dim, Words::kPerWord);
    for (int64_t i = 0; i < n; ++i) {
      Words::template put_row<S, T>(s.k + (row + i) * words, k + i * stride, p_.dim);
    }
    for (int64_t i = 0; i < n;) {
      float* values = s.v + (row + i) / Words::kPerWord * s.key_stride;
      const int part = static_cast<int>((row + i) % Words::kPerWord);
      if (part == 0 && n - i >= Words::kPerWord) {
        Words::template put_columns<S, T>(values, v + i * stride, stride, p_.dim);
        i += Words::kPerWord;
      } else {
        Words::template put_column<S, T>(values, v + i * stride, p_.dim, part);
        ++i;
      }
      for (int64_t d = p_.dim; d < s.key_stride; ++d) values[d] = 0.0f;
    }
  }

  // s.turned[d][word] = s.v[word][d], and 0 for what the last step lacks.
  void turn_values(const TileScratch& s, int64_t count) {
    const int64_t words = round_up(count, Words::kStep) / Words::kPerWord;
    for (int64_t word = ceil_div(count, Words::kPerWord); word < words; ++word) {
      __builtin_memset(s.v + word * s.key_stride, 0, p_.dim * sizeof *s.v);
    }
    for (int64_t word = 0; word < words; word += kLanes) {
      for (int64_t d = 0; d < p_.dim; d += kLanes) {
        Vec block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = load(s.v + (word + i) * s.key_stride + d);
        transpose(block);
        for (int i = 0; i < kLanes; ++i) store(s.turned + (d + i) * kTurned + word, block[i]);
      }
    }
  }

  const Problem& p_;
  const Task& task_;
  const int32_t* segment_;
  int64_t skip_;
  int64_t left_;
  int64_t chunk_ = 0;
};

// Forgets what the record has so far.
void clear_panel(const TileScratch& s, int64_t panel) {
  __builtin_memset(s.o + panel * s.key_stride * kPanel, 0, s.key_stride * kPanel * sizeof(float));
  for (int64_t i = panel * kPanel; i < (panel + 1) * kPanel; ++i) {
    s.m[i] = -kInfinity;
    s.l[i] = 0.0f;
  }
}

// Adds the record to those before it. The first one is copied, which is the same.
void add_record(const TileScratch& s, int64_t panel, bool first) {
  const int64_t size = s.key_stride * kPanel, begin = panel * kPanel;
  float* all = s.all + panel * size;
  const float* o = s.o + panel * size;
  if (first) {
    __builtin_memcpy(all, o, size * sizeof *o);
    __builtin_memcpy(s.all_m + begin, s.m + begin, kPanel * sizeof *s.m);
    __builtin_memcpy(s.all_l + begin, s.l + begin, kPanel * sizeof *s.l);
    return;
  }
  for (int64_t i = 0; i < kPanel; i += kLanes) {
    const Partial::Rescaling by(load(s.all_m + begin + i), load(s.m + begin + i));
    for (int64_t d = i; d < size; d += kPanel) store(all + d, by.sum(load(all + d), load(o + d)));
    float* l = s.all_l + begin + i;
    store(l, by.sum(load(l), load(s.l + begin + i)));
    store(s.all_m + begin + i, by.top);
  }
}

template <class Words>
void start_panels(const Problem& p, const Task& task, float q_scale, const TileScratch& s,
                  int64_t panels) {
  const int64_t lanes = task.num_queries * p.group;
  const int64_t num_words = ceil_div(p.dim, Words::kPerWord);
  float* scaled = s.v;  // no key has been read yet
  float* words = s.k;   // [kLanes, key_stride]
  for (int64_t first = 0; first < panels * kPanel; first += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t lane = min_of(first + i, lanes - 1);  // lanes past the end repeat the last one
      const int64_t query = lane / p.group;
      s.visible[first + i] =
          task.with_chunk ? task.num_context + task.first_query + static_cast<int32_t>(query) + 1
                          : kSeesAll;
      const float* in = p.query(task.query_token(query), task.kv_head * p.group + lane % p.group);
      for (int64_t d = 0; d < p.dim; ++d) scaled[d] = in[d] * q_scale;
      Words::template put_row<float, float>(words + i * s.key_stride, scaled, p.dim);
    }
    float* out = s.q + first / kPanel * p.dim * kPanel + first % kPanel;
    for (int64_t word = 0; word < num_words; word += kLanes) {
      Vec block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) block[i] = load(words + i * s.key_stride + word);
      transpose(block);
      for (int64_t i = 0; i < min_of<int64_t>(kLanes, num_words - word); ++i) {
        store(out + (word + i) * kPanel, block[i]);
      }
    }
  }
}

// Writes element d of lane i, scaled(o[d][i]), to rows[i][d], for the first `count` lanes.
template <class Scaled>
BROS_INLINE void write_lanes(const float* o, int64_t dim, int64_t count, float* const* rows,
                             const Scaled& scaled) {
  int64_t d = 0;
  // Whole blocks, in loops of one length, stay in registers.
  for (; count == kLanes && d + kLanes <= dim; d += kLanes) {
    Vec block[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) block[i] = scaled(load(o + (d + i) * kPanel));
    transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(rows[i] + d, block[i]);
  }
  for (; d < dim; d += kLanes) {
    const int64_t width = min_of<int64_t>(kLanes, dim - d);
    Vec block[kLanes] = {};
    for (int64_t i = 0; i < width; ++i) block[i] = scaled(load(o + (d + i) * kPanel));
    transpose(block);
    for (int64_t i = 0; i < count; ++i) store_first(rows[i] + d, block[i], width);
  }
}

// Writes the record of a panel.
void write_record(const Problem& p, const Task& task, const TileScratch& s, int64_t panel,
                  float* results) {
  const int64_t lanes = task.num_queries * p.group;
  for (int64_t lane = panel * kPanel; lane < min_of(lanes, (panel + 1) * kPanel); lane += kLanes) {
    const int64_t count = min_of<int64_t>(kLanes, lanes - lane);
    float* rows[kLanes];
    for (int64_t i = 0; i < count; ++i) {
      rows[i] = results + (lane + i) * p.lane_size();
      const Partial result(rows[i], p.dim);
      *result.m = s.m[lane + i];
      *result.l = s.l[lane + i];
    }
    write_lanes(s.o + panel * s.key_stride * kPanel + lane % kPanel, p.dim, count, rows,
                [](Vec o) { return o; });
  }
}

void finish_panels(const Problem& p, const Task& task, const TileScratch& s) {
  const int64_t lanes = task.num_queries * p.group;
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    const int64_t count = min_of<int64_t>(kLanes, lanes - lane);
    float* rows[kLanes];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t query = (lane + i) / p.group, head = (lane + i) % p.group;
      rows[i] = p.output(task.query_token(query), task.kv_head * p.group + head);
    }
    const Vec l = load(s.all_l + lane);
    write_lanes(s.all + lane / kPanel * s.key_stride * kPanel + lane % kPanel, p.dim, count, rows,
                [l](Vec o) { return o / l; });
  }
}

// Calls body(Number<vectors of the panel>()), of so many lanes that there are from the panel on.
template <class Body>
BROS_INLINE void with_vectors(int64_t lanes, const Body& body) {
  switch (ceil_div(min_of(kPanel, lanes), kLanes)) {
    case 1:
      return body(Number<1>());
    case 2:
      return body(Number<2>());
    default:
      return body(Number<kVecs>());
  }
}

// Adds keys [base, base + count) of the task to all panels, and calls finish(panel) for each.
template <class Words, class Finish>
void add_tile(const Problem& p, const TileScratch& s, int64_t lanes, int64_t base, int64_t count,
              const Finish& finish) {
  for (int64_t panel = 0; panel < ceil_div(lanes, kPanel); ++panel) {
    const int32_t* visible = s.visible + panel * kPanel;
    const int64_t seen = min_of<int64_t>(count, visible[kPanel - 1] - base);
    if (seen > 0) {
      const PanelKeys keys = {panel, seen, base, visible[0] - base < seen};
      with_vectors(lanes - panel * kPanel, [&](auto vectors) {
        score_panel<vectors.value, Words>(p, s, keys);
        softmax_panel<vectors.value, Words>(s, keys);
        value_panel<vectors.value, Words>(p, s, keys);
      });
    }
    finish(panel);
  }
}

template <class T, class Words>
void tile_task(const Problem& p, const Task& task, float q_scale, const TileScratch& s,
               float* partials) {
  const int64_t lanes = task.num_queries * p.group;
  const int64_t panels = ceil_div(lanes, kPanel);
#if defined(BROS_MULTIPLIES_TILES)
  ThreadTiles tiles;
  if (Words::kByTiles) tiles.configure(attention_shapes(kMostTileRows));
#endif
  start_panels<Words>(p, task, q_scale, s, panels);
  for (int64_t panel = 0; panel < panels; ++panel) clear_panel(s, panel);
  const int64_t num_keys =
      task.num_context + (task.with_chunk ? task.first_query + task.num_queries : 0);
  const int64_t end = task.position + num_keys;
  int64_t record = record_end(task.position, end);
  float* out = partials + task.partial;
  bool first = true;
  KeyStream<T, Words> stream(p, task);
  for (int64_t at = task.position; at < end;) {
    const int64_t next = min_of(tile_end(at), end), base = at - task.position;
    stream.fill(s, next - at);
    add_tile<Words>(p, s, lanes, base, next - at, [&](int64_t panel) {
      if (next < record) return;
      if (task.partial < 0) {
        add_record(s, panel, first);
      } else {
        write_record(p, task, s, panel, out);
      }
      clear_panel(s, panel);
    });
    if (next == record) {
      record = record_end(next, end);
      out += task.record_step;
      first = false;
    }
    at = next;
  }
  if (task.partial < 0) finish_panels(p, task, s);
}

}  // namespace
}  // namespace bros
