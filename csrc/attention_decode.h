// Attention of a few lanes (typically one token): bound by memory bandwidth, reads K and V once.
#pragma once

#include "attention_tasks.h"

namespace bros {
namespace {

// Register blocks: lanes x vectors of head_dim.
constexpr int kLaneBlock = 4;
#if defined(__AVX512F__)
constexpr int kDimBlock = 4;
#else
constexpr int kDimBlock = 2;
#endif

constexpr int64_t kScoreStride = kDecodeSplit + 16;  // kDecodeSplit + kDecodeLanes, whole vectors
static_assert(kDecodeLanes <= 16 && kScoreStride % kLanes == 0, "");

// Consecutive rows of the cache: `count` keys and values.
struct Run {
  const void* k;
  const void* v;
  int32_t count;
};

struct DecodeScratch {
  float* q;       // [lanes, stride], scaled, zero past head_dim
  float* o;       // [lanes, stride]
  float* scores;  // [lanes, kScoreStride]
  Run* runs;      // [kDecodeSplit], at most one per context key

  DecodeScratch(Arena* arena, const Problem& p) {
    const int64_t stride = round_up(p.dim, kLanes);
    q = arena->take<float>(kDecodeLanes * stride);
    o = arena->take<float>(kDecodeLanes * stride);
    scores = arena->take<float>(kDecodeLanes * kScoreStride);
    runs = arena->take<Run>(kDecodeSplit);
  }
};

// scores[lane][key] = q[lane] . k[key] for LANES lanes. Prefetches row i of `next` with key i.
template <int LANES, class T>
void score_run(const float* q, int64_t q_stride, const T* k, int64_t k_stride, int64_t count,
               int64_t dim, const T* next, int64_t next_count, float* scores) {
  for (int64_t key = 0; key < count; ++key, k += k_stride) {
    if (key < next_count) {
      const char* line = reinterpret_cast<const char*>(next + key * dim);
      for (int64_t i = 0; i < dim * static_cast<int64_t>(sizeof(T)); i += 64) {
        __builtin_prefetch(line + i);
      }
    }
    Vec sum[LANES] = {};
    for_each_vector(
        dim,
        [&](int64_t d) {
          const Vec x = load(k + d);
          for (int lane = 0; lane < LANES; ++lane) sum[lane] += x * load(q + lane * q_stride + d);
        },
        [&](int64_t d, int64_t n) {
          const Vec x = load_first(k + d, n);
          for (int lane = 0; lane < LANES; ++lane) sum[lane] += x * load(q + lane * q_stride + d);
        });
    for (int lane = 0; lane < LANES; ++lane)
      scores[lane * kScoreStride + key] = reduce_add(sum[lane]);
  }
}

// o[lane] += sum over keys of p[lane][key] * v[key], for LANES lanes and VECS vectors of `v`.
// If tail > 0, the last vector has only `tail` elements.
template <int LANES, int VECS, class T>
void add_values_block(const float* p, const T* v, int64_t v_stride, int64_t count, int64_t tail,
                      float* o, int64_t o_stride) {
  Vec sum[LANES][VECS];
  for (int lane = 0; lane < LANES; ++lane) {
    for (int i = 0; i < VECS; ++i) sum[lane][i] = load(o + lane * o_stride + i * kLanes);
  }
  for (int64_t key = 0; key < count; ++key, v += v_stride) {
    Vec x[VECS];
    for (int i = 0; i < VECS; ++i) {
      x[i] = VECS == 1 && tail ? load_first(v, tail) : load(v + i * kLanes);
    }
    for (int lane = 0; lane < LANES; ++lane) {
      const Vec weight = splat(p[lane * kScoreStride + key]);
      for (int i = 0; i < VECS; ++i) sum[lane][i] += weight * x[i];
    }
  }
  for (int lane = 0; lane < LANES; ++lane) {
    for (int i = 0; i < VECS; ++i) store(o + lane * o_stride + i * kLanes, sum[lane][i]);
  }
}

template <int LANES, class T>
void add_values_run(const float* p, const T* v, int64_t v_stride, int64_t count, int64_t dim,
                    float* o, int64_t o_stride) {
  int64_t d = 0;
  for (; d + kDimBlock * kLanes <= dim; d += kDimBlock * kLanes) {
    add_values_block<LANES, kDimBlock>(p, v + d, v_stride, count, 0, o + d, o_stride);
  }
  for (; d < dim; d += kLanes) {
    const int64_t tail = d + kLanes <= dim ? 0 : dim - d;
    add_values_block<LANES, 1>(p, v + d, v_stride, count, tail, o + d, o_stride);
  }
}

// Calls body.run<LANES>(first lane) for blocks of up to kLaneBlock lanes.
template <class Body>
BROS_INLINE void for_lane_blocks(int64_t lanes, const Body& body) {
  int64_t lane = 0;
  for (; lane + kLaneBlock <= lanes; lane += kLaneBlock) body.template run<kLaneBlock>(lane);
  switch (lanes - lane) {
    case 3:
      body.template run<3>(lane);
      break;
    case 2:
      body.template run<2>(lane);
      break;
    case 1:
      body.template run<1>(lane);
      break;
  }
}

template <class T>
struct ScoreBody {
  const DecodeScratch& s;
  int64_t stride;
  const T* k;
  int64_t k_stride;
  int64_t count;
  int64_t dim;
  const T* next;
  int64_t next_count;
  float* scores;
  template <int LANES>
  void run(int64_t lane) const {
    score_run<LANES>(s.q + lane * stride, stride, k, k_stride, count, dim, next,
                     lane == 0 ? next_count : 0, scores + lane * kScoreStride);
  }
};

template <class T>
struct ValueBody {
  const DecodeScratch& s;
  int64_t stride;
  const T* v;
  int64_t v_stride;
  int64_t count;
  int64_t dim;
  const float* weights;
  template <int LANES>
  void run(int64_t lane) const {
    add_values_run<LANES>(weights + lane * kScoreStride, v, v_stride, count, dim,
                          s.o + lane * stride, stride);
  }
};

// Replaces n scores by 2^(score - max), padded with 0 to a whole vector; returns max and sum.
BROS_INLINE void softmax_lane(float* scores, int64_t n, float* max, float* sum) {
  const int64_t padded = round_up(n, kLanes);
  for (int64_t i = n; i < padded; ++i) scores[i] = -__builtin_inff();
  Vec top = load(scores);
  for (int64_t i = kLanes; i < padded; i += kLanes) top = vmax(load(scores + i), top);
  *max = reduce_max(top);
  Vec total = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec weight = exp2_nonpositive(load(scores + i) - *max);
    total += weight;
    store(scores + i, weight);
  }
  *sum = reduce_add(total);
}

template <class T>
int64_t list_runs(const Problem& p, const Task& task, Run* runs) {
  int64_t n = 0;
  for_each_stretch(task, [&](int64_t block, int64_t offset, int32_t count) {
    const int64_t row = p.cache_row(block, task.kv_head, offset);
    runs[n++] = {static_cast<const T*>(p.args.cache.k) + row,
                 static_cast<const T*>(p.args.cache.v) + row, count};
  });
  return n;
}

BROS_INLINE void write_lane(const Problem& p, const Task& task, int64_t lane, const float* o,
                            float max, float sum, float* partials) {
  float* out;
  float scale = 1.0f;
  if (task.partial < 0) {
    out = p.output(task.query_token(lane / p.group), task.kv_head * p.group + lane % p.group);
    scale /= sum;
  } else {
    const Partial part(partials + task.partial + lane * p.lane_size(), p.dim);
    out = part.o;
    *part.m = max;
    *part.l = sum;
  }
  for (int64_t d = 0; d < p.dim; ++d) out[d] = o[d] * scale;
}

void start_lanes(const Problem& p, const Task& task, float q_scale, const DecodeScratch& s,
                 int64_t stride) {
  for (int64_t lane = 0; lane < task.num_queries * p.group; ++lane) {
    const float* q =
        p.query(task.query_token(lane / p.group), task.kv_head * p.group + lane % p.group);
    for (int64_t d = 0; d < stride; ++d) {
      s.q[lane * stride + d] = d < p.dim ? q[d] * q_scale : 0.0f;
      s.o[lane * stride + d] = 0.0f;
    }
  }
}

template <class T>
void decode_task(const Problem& p, const Task& task, float q_scale, const DecodeScratch& s,
                 float* partials) {
  const int64_t lanes = task.num_queries * p.group;
  const int64_t stride = round_up(p.dim, kLanes);
  start_lanes(p, task, q_scale, s, stride);
  const int64_t num_runs = list_runs<T>(p, task, s.runs);
  const int64_t chunk = task.with_chunk ? task.num_queries : 0;
  float* scores = s.scores;
  for (int64_t i = 0; i < num_runs; ++i) {
    const Run& run = s.runs[i];
    const bool last = i + 1 == num_runs;
    const Run& next = s.runs[last ? 0 : i + 1];
    for_lane_blocks(
        lanes, ScoreBody<T>{s, stride, static_cast<const T*>(run.k), p.dim, run.count, p.dim,
                            static_cast<const T*>(last ? next.v : next.k), next.count, scores});
    scores += run.count;
  }
  if (chunk) {
    for_lane_blocks(lanes, ScoreBody<float>{s, stride, p.chunk_key(task.token, task.kv_head),
                                            p.columns, chunk, p.dim, nullptr, 0, scores});
  }
  float max[kDecodeLanes], sum[kDecodeLanes];
  for (int64_t lane = 0; lane < lanes; ++lane) {
    // Causal: the query of this lane attends to the chunk up to itself.
    const int64_t visible = task.num_context + (chunk ? lane / p.group + 1 : 0);
    float* lane_scores = s.scores + lane * kScoreStride;
    for (int64_t key = visible; key < task.num_context + chunk; ++key) {
      lane_scores[key] = -__builtin_inff();
    }
    softmax_lane(lane_scores, task.num_context + chunk, max + lane, sum + lane);
  }
  const float* weights = s.scores;
  for (int64_t i = 0; i < num_runs; ++i) {
    const Run& run = s.runs[i];
    for_lane_blocks(lanes, ValueBody<T>{s, stride, static_cast<const T*>(run.v), p.dim, run.count,
                                        p.dim, weights});
    weights += run.count;
  }
  if (chunk) {
    for_lane_blocks(lanes, ValueBody<float>{s, stride, p.chunk_value(task.token, task.kv_head),
                                            p.columns, chunk, p.dim, weights});
  }
  for (int64_t lane = 0; lane < lanes; ++lane) {
    write_lane(p, task, lane, s.o + lane * stride, max[lane], sum[lane], partials);
  }
}

}  // namespace
}  // namespace bros
