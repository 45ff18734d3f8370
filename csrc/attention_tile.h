// Attention of many lanes: bound by arithmetic, so it uses register-blocked products.
//
// Lanes (query, head of the group) lie along the vectors, keys and head_dim along memory:
//
//   scores [key][lane]  = sum over d of    K [key][d] (broadcast) * Q' [d][lane]
//   output [d][lane]   += sum over key of  V [key][d] (broadcast) * weights [key][lane]
//
// so K and V need no transposition, and the maxima, sums and rescaling of the online softmax are
// vertical operations. A panel is kPanel lanes. Lanes are ordered by query, so a panel skips the
// keys after its last query.
#pragma once

#include "attention_tasks.h"

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
constexpr int64_t kTileKeys = 64;
constexpr int32_t kSeesAll = 1 << 30;
static_assert(kTileKeys % kRows == 0, "");

struct TileScratch {
  int64_t key_stride;  // of k and v: head_dim, rounded up to kRows
  float* k;            // [kTileKeys, key_stride]
  float* v;            // [kTileKeys, key_stride]
  float* scores;       // [kTileKeys, kPanel]
  float* alpha;        // [kPanel]
  float* q;            // per panel [head_dim, kPanel]
  float* o;            // per panel [key_stride, kPanel]
  float* m;            // per panel [kPanel]
  float* l;            // per panel [kPanel]
  int32_t* visible;    // per panel [kPanel]: keys that the lane attends to, context included

  TileScratch(Arena* arena, const Problem& p) : key_stride(round_up(p.dim, kRows)) {
    const int64_t panels = ceil_div(max_of(kTileLanes, p.group), kPanel);
    k = arena->take<float>(kTileKeys * key_stride);
    v = arena->take<float>(kTileKeys * key_stride);
    scores = arena->take<float>(kTileKeys * kPanel);
    alpha = arena->take<float>(kPanel);
    q = arena->take<float>(panels * p.dim * kPanel);
    o = arena->take<float>(panels * key_stride * kPanel);
    m = arena->take<float>(panels * kPanel);
    l = arena->take<float>(panels * kPanel);
    visible = arena->take<int32_t>(panels * kPanel);
  }
};

// scores[i][lane] = k[i] . q[.][lane] for kRows keys.
template <int VECS>
BROS_INLINE void score_block(const float* __restrict k, int64_t k_stride, const float* __restrict q,
                             int64_t dim, float* __restrict scores) {
  Vec sum[kRows][VECS] = {};
  for (int64_t d = 0; d < dim; ++d) {
    Vec x[VECS];
    for (int j = 0; j < VECS; ++j) x[j] = load(q + d * kPanel + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec key = splat(k[i * k_stride + d]);
      for (int j = 0; j < VECS; ++j) sum[i][j] += key * x[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < VECS; ++j) store(scores + i * kPanel + j * kLanes, sum[i][j]);
  }
}

// o[i][lane] = o[i][lane] * alpha[lane] + sum over keys of v[key][i] * weights[key][lane], for
// kRows elements i of head_dim.
template <int VECS>
BROS_INLINE void value_block(const float* __restrict v, int64_t v_stride,
                             const float* __restrict weights, int64_t num_keys,
                             const float* __restrict alpha, float* __restrict o) {
  Vec sum[kRows][VECS];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < VECS; ++j) {
      sum[i][j] = load(o + i * kPanel + j * kLanes) * load(alpha + j * kLanes);
    }
  }
  for (int64_t key = 0; key < num_keys; ++key) {
    Vec x[VECS];
    for (int j = 0; j < VECS; ++j) x[j] = load(weights + key * kPanel + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec value = splat(v[key * v_stride + i]);
      for (int j = 0; j < VECS; ++j) sum[i][j] += value * x[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < VECS; ++j) store(o + i * kPanel + j * kLanes, sum[i][j]);
  }
}

// Online softmax: replaces scores by weights relative to the new maximum m; alpha rescales the sums
// accumulated with the old maximum. visible: keys that each lane attends to, null for all; base:
// index of the tile's first key.
template <int VECS>
BROS_INLINE void softmax_block(float* __restrict scores, int64_t num_keys, const int32_t* visible,
                               int32_t base, float* __restrict m, float* __restrict l,
                               float* __restrict alpha) {
  Vec top[VECS];
  for (int j = 0; j < VECS; ++j) top[j] = load(m + j * kLanes);
  for (int64_t key = 0; key < num_keys; ++key) {
    for (int j = 0; j < VECS; ++j) {
      float* score = scores + key * kPanel + j * kLanes;
      Vec x = load(score);
      if (visible) {
        IntVec seen;
        __builtin_memcpy(&seen, visible + j * kLanes, sizeof seen);
        x = select(seen - base > splat_int(static_cast<int32_t>(key)), x, splat(-__builtin_inff()));
        store(score, x);
      }
      top[j] = vmax(x, top[j]);
    }
  }
  Vec sum[VECS];
  for (int j = 0; j < VECS; ++j) {
    const Vec rescale = exp2_nonpositive(load(m + j * kLanes) - top[j]);
    sum[j] = load(l + j * kLanes) * rescale;
    store(alpha + j * kLanes, rescale);
    store(m + j * kLanes, top[j]);
  }
  for (int64_t key = 0; key < num_keys; ++key) {
    for (int j = 0; j < VECS; ++j) {
      float* score = scores + key * kPanel + j * kLanes;
      const Vec weight = exp2_nonpositive(load(score) - top[j]);
      sum[j] += weight;
      store(score, weight);
    }
  }
  for (int j = 0; j < VECS; ++j) store(l + j * kLanes, sum[j]);
}

// One panel over the num_keys keys of the tile; `masked` if some lane attends to fewer of them.
template <int VECS>
void tile_panel(const Problem& p, const TileScratch& s, int64_t panel, int64_t num_keys,
                int32_t base, bool masked) {
  const float* q = s.q + panel * p.dim * kPanel;
  float* o = s.o + panel * s.key_stride * kPanel;
  for (int64_t key = 0; key < num_keys; key += kRows) {
    score_block<VECS>(s.k + key * s.key_stride, s.key_stride, q, p.dim, s.scores + key * kPanel);
  }
  softmax_block<VECS>(s.scores, num_keys, masked ? s.visible + panel * kPanel : nullptr, base,
                      s.m + panel * kPanel, s.l + panel * kPanel, s.alpha);
  for (int64_t d = 0; d < p.dim; d += kRows) {
    value_block<VECS>(s.v + d, s.key_stride, s.scores, num_keys, s.alpha, o + d * kPanel);
  }
}

// Copies the task's keys and values, in order, into the tile, as fp32.
template <class T>
class KeyStream {
 public:
  KeyStream(const Problem& p, const Task& task)
      : p_(p), task_(task), segment_(task.segment), skip_(task.skip), left_(task.num_context) {}

  // The next `count` keys, the context first, then the chunk.
  void fill(const TileScratch& s, int64_t count) {
    int64_t row = 0;
    while (row < count && left_ > 0) {
      const int64_t lo = segment_[1] + skip_;
      const int64_t n = min_of<int64_t>(min_of<int64_t>(segment_[2] - lo, left_), count - row);
      const int64_t source = p_.cache_row(segment_[0], task_.kv_head, lo);
      copy(s, row, n, static_cast<const T*>(p_.args.cache.k) + source,
           static_cast<const T*>(p_.args.cache.v) + source, p_.dim);
      row += n;
      left_ -= n;
      skip_ += n;
      if (segment_[1] + skip_ == segment_[2]) {
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
  }

 private:
  template <class S>
  void copy(const TileScratch& s, int64_t row, int64_t n, const S* k, const S* v, int64_t stride) {
    for (int64_t i = 0; i < n; ++i) {
      float* key = s.k + (row + i) * s.key_stride;
      float* value = s.v + (row + i) * s.key_stride;
      widen(key, k + i * stride, p_.dim);
      widen(value, v + i * stride, p_.dim);
      for (int64_t d = p_.dim; d < s.key_stride; ++d) value[d] = 0.0f;
    }
  }

  const Problem& p_;
  const Task& task_;
  const int32_t* segment_;
  int64_t skip_;
  int64_t left_;
  int64_t chunk_ = 0;
};

void start_panels(const Problem& p, const Task& task, float q_scale, const TileScratch& s,
                  int64_t panels) {
  const int64_t lanes = task.num_queries * p.group;
  __builtin_memset(s.o, 0, panels * s.key_stride * kPanel * sizeof(float));
  for (int64_t i = 0; i < panels * kPanel; ++i) {
    const int64_t lane = min_of(i, lanes - 1);  // lanes past the end repeat the last one
    const int64_t query = lane / p.group;
    s.m[i] = -__builtin_inff();
    s.l[i] = 0.0f;
    s.visible[i] = task.with_chunk
                       ? task.num_context + task.first_query + static_cast<int32_t>(query) + 1
                       : kSeesAll;
    const float* in = p.query(task.query_token(query), task.kv_head * p.group + lane % p.group);
    float* out = s.q + i / kPanel * p.dim * kPanel + i % kPanel;
    for (int64_t d = 0; d < p.dim; ++d) out[d * kPanel] = in[d] * q_scale;
  }
}

void finish_panels(const Problem& p, const Task& task, const TileScratch& s, float* partials) {
  const int64_t lanes = task.num_queries * p.group;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const float* o = s.o + lane / kPanel * s.key_stride * kPanel + lane % kPanel;
    float* out;
    float scale = 1.0f;
    if (task.partial < 0) {
      out = p.output(task.query_token(lane / p.group), task.kv_head * p.group + lane % p.group);
      scale /= s.l[lane];
    } else {
      const Partial part(partials + task.partial + lane * p.lane_size(), p.dim);
      out = part.o;
      *part.m = s.m[lane];
      *part.l = s.l[lane];
    }
    for (int64_t d = 0; d < p.dim; ++d) out[d] = o[d * kPanel] * scale;
  }
}

template <class T>
void tile_task(const Problem& p, const Task& task, float q_scale, const TileScratch& s,
               float* partials) {
  const int64_t lanes = task.num_queries * p.group;
  const int64_t panels = ceil_div(lanes, kPanel);
  start_panels(p, task, q_scale, s, panels);
  const int64_t num_keys =
      task.num_context + (task.with_chunk ? task.first_query + task.num_queries : 0);
  KeyStream<T> stream(p, task);
  for (int64_t base = 0; base < num_keys; base += kTileKeys) {
    const int64_t in_tile = min_of(kTileKeys, num_keys - base);
    stream.fill(s, in_tile);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int32_t* visible = s.visible + panel * kPanel;
      const int64_t seen = min_of<int64_t>(in_tile, visible[kPanel - 1] - base);
      if (seen <= 0) continue;
      const bool masked = visible[0] - base < seen;
      const int32_t from = static_cast<int32_t>(base);
      switch (ceil_div(min_of(kPanel, lanes - panel * kPanel), kLanes)) {
        case 1:
          tile_panel<1>(p, s, panel, seen, from, masked);
          break;
        case 2:
          tile_panel<2>(p, s, panel, seen, from, masked);
          break;
        default:
          tile_panel<kVecs>(p, s, panel, seen, from, masked);
          break;
      }
    }
  }
  finish_panels(p, task, s, partials);
}

}  // namespace
}  // namespace bros
