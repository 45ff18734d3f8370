// Attention of a few lanes (typically one token): bound by memory bandwidth, reads K and V once.
#pragma once

#include "attention_registers.h"
#include "attention_tasks.h"
#include "attention_words.h"

namespace bros {
namespace {

// Register blocks: lanes x vectors of head_dim.
constexpr int kLaneBlock = 4;
#if defined(__AVX512F__)
constexpr int kDimBlock = 4;
#else
constexpr int kDimBlock = 2;
#endif

static_assert(kTileKeys % kLanes == 0, "");
constexpr int kKeyVecs = kTileKeys / kLanes;
constexpr int kKeyBlock = kKeyVecs < 4 ? kKeyVecs : 4;  // vectors of keys that are scored at once

// K and V of the task's keys, in order, as pointers to rows of the cache's type.
template <class T>
struct Keys {
  const T** k;
  const T** v;
  int64_t count;
};

struct DecodeScratch {
  float* q;        // words of head_dim, [lanes, stride], scaled
  float* tile;     // [lanes, stride], of the current tile
  float* run;      // [lanes, stride], of the record so far
  float* o;        // [lanes, stride], of all records
  float* weights;  // [lanes, kTileKeys]: scores first, then weights in words of keys
  float* columns;  // words of head_dim, [stride, kTileKeys]: the tile's K transposed. For tile
                   // registers then words of keys, [kTileKeys / 2, stride]: its V
  float* chunk;    // [2, kDecodeLanes, head_dim] or less: K and V of the chunk in the cache's type
  const void** k;  // [kDecodeSplit + kDecodeLanes]
  const void** v;

  DecodeScratch(Arena* arena, const Problem& p) {
    const int64_t stride = round_up(p.dim, kLanes);
    q = arena->take<float>(kDecodeLanes * stride);
    tile = arena->take<float>(kDecodeLanes * stride);
    run = arena->take<float>(kDecodeLanes * stride);
    o = arena->take<float>(kDecodeLanes * stride);
    weights = arena->take<float>(kDecodeLanes * kTileKeys);
    columns = arena->take<float>(stride * kTileKeys);
    chunk = arena->take<float>(2 * kDecodeLanes * p.dim);
    k = arena->take<const void*>(kDecodeSplit + kDecodeLanes);
    v = arena->take<const void*>(kDecodeSplit + kDecodeLanes);
  }
};

template <class T>
BROS_INLINE void prefetch_row(const T* row, int64_t dim) {
  const char* line = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < dim * static_cast<int64_t>(sizeof(T)); i += 64) {
    __builtin_prefetch(line + i);
  }
}

// columns[word][key] = word of k[key] for the `count` keys of a tile, repeating the last one up to a
// whole vector. Prefetches `next` meanwhile, a row for each key.
template <class Words, class T>
void transpose_keys(const T* const* k, int64_t count, int64_t dim, const T* const* next,
                    int64_t next_count, float* columns) {
  for (int64_t first = 0; first < count; first += kLanes) {
    for (int64_t i = first; i < min_of(first + kLanes, next_count); ++i) prefetch_row(next[i], dim);
    const T* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) rows[i] = k[min_of(first + i, count - 1)];
    const auto write = [&](Vec* block, int64_t word) {
      transpose(block);
      for (int i = 0; i < kLanes; ++i) store(columns + (word + i) * kTileKeys + first, block[i]);
    };
    for_each_vector(
        ceil_div(dim, Words::kPerWord),
        [&](int64_t word) {
          Vec block[kLanes];
          for (int i = 0; i < kLanes; ++i) block[i] = Words::load_row(rows[i], word);
          write(block, word);
        },
        [&](int64_t word, int64_t n) {
          Vec block[kLanes];
          for (int i = 0; i < kLanes; ++i) block[i] = Words::load_row_first(rows[i], word, n);
          write(block, word);
        });
  }
}

// scores[lane][key] = sum over words of q[lane][word] columns[word][key], for LANES lanes and VECS
// vectors of keys.
template <int LANES, int VECS, class Words>
BROS_INLINE void score_columns(const float* q, int64_t q_stride, const float* columns,
                               int64_t words, float* scores) {
  Vec sum[LANES][VECS] = {};
  for (int64_t word = 0; word < words; ++word) {
    Vec key[VECS];
    for (int i = 0; i < VECS; ++i) key[i] = load(columns + word * kTileKeys + i * kLanes);
    for (int lane = 0; lane < LANES; ++lane) {
      const Vec x = splat_word(q + lane * q_stride + word);
      for (int i = 0; i < VECS; ++i) sum[lane][i] = Words::add_product(sum[lane][i], key[i], x);
    }
  }
  for (int lane = 0; lane < LANES; ++lane) {
    for (int i = 0; i < VECS; ++i) store(scores + lane * kTileKeys + i * kLanes, sum[lane][i]);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Scores of keys in 16 bits without columns in memory: attention of 1 row with 128 cached tokens
// takes 0.73 of the time, of 8 rows with 110 tokens 0.84, of 16 with 300 tokens 0.9 (fp16, Zen 3).
// With keys in 32 bits it takes 1.16 times as long where they come from memory, so those keep the
// columns, and so do more lanes than one block, which would convert the keys once for each block.

// Four numbers of two rows, one row in each half.
BROS_INLINE __m128i four_of_two(const void* a, const void* b) {
  return _mm_unpacklo_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(a)),
                            _mm_loadl_epi64(static_cast<const __m128i*>(b)));
}
BROS_INLINE Vec load_halves(const Bf16* a, const Bf16* b) {
  const __m256i bits = _mm256_cvtepu16_epi32(four_of_two(a, b));
  return bit_cast<Vec>(_mm256_slli_epi32(bits, 16));
}
BROS_INLINE Vec load_halves(const Fp16* a, const Fp16* b) {
  return _mm256_cvtph_ps(four_of_two(a, b));
}

// columns[i] = number d + i of each of eight rows.
template <class T>
BROS_INLINE void load_columns(const T* const* rows, int64_t d, Vec* columns) {
  Vec x[4];
  for (int i = 0; i < 4; ++i) x[i] = load_halves(rows[i] + d, rows[i + 4] + d);
  transpose_halves(x, columns);
}

// scores[lane][key] = sum over d of q[lane][d] k[key][d], for LANES lanes and GROUPS vectors of
// keys, of which there may be only `count`: as score_columns does it.
template <int LANES, int GROUPS, class T>
BROS_INLINE void score_rows(const float* q, int64_t q_stride, const T* const* k, int64_t count,
                            int64_t dim, float* scores) {
  const T* rows[GROUPS * kLanes];
  for (int i = 0; i < GROUPS * kLanes; ++i) rows[i] = k[min_of<int64_t>(i, count - 1)];
  Vec sum[LANES][GROUPS] = {};
  for (int64_t d = 0; d < dim; d += 4) {
    Vec columns[GROUPS][4];
    for (int g = 0; g < GROUPS; ++g) load_columns(rows + g * kLanes, d, columns[g]);
    for (int i = 0; i < 4; ++i) {
      for (int lane = 0; lane < LANES; ++lane) {
        const Vec x = splat(q[lane * q_stride + d + i]);
        for (int g = 0; g < GROUPS; ++g) {
          sum[lane][g] = mul_add(columns[g][i], x, sum[lane][g]);
        }
      }
    }
  }
  for (int lane = 0; lane < LANES; ++lane) {
    for (int g = 0; g < GROUPS; ++g) store(scores + lane * kTileKeys + g * kLanes, sum[lane][g]);
  }
}

template <class T>
struct RowScoreBody {
  const DecodeScratch& s;
  int64_t stride;
  const T* const* k;
  const T* const* v;  // prefetched meanwhile
  int64_t count;
  int64_t dim;
  template <int LANES>
  void run(int64_t lane) const {
    const float* q = s.q + lane * stride;
    float* scores = s.weights + lane * kTileKeys;
    for (int64_t key = 0; key < count; key += 2 * kLanes) {
      const int64_t left = count - key;
      for (int64_t i = key; i < min_of(key + 2 * kLanes, count); ++i) prefetch_row(v[i], dim);
      if (left > kLanes) {
        score_rows<LANES, 2>(q, stride, k + key, left, dim, scores + key);
      } else {
        score_rows<LANES, 1>(q, stride, k + key, left, dim, scores + key);
      }
    }
  }
};
#endif

// o[lane] = sum over keys of weights[lane][key] * v[key], for LANES lanes and VECS vectors of `v`
// from element d on. If tail > 0, the last vector has only `tail` elements.
template <int LANES, int VECS, class Words, class T>
void weigh_values_block(const float* weights, const T* const* v, int64_t count, int64_t d,
                        int64_t tail, float* o, int64_t o_stride) {
  Vec sum[LANES][VECS] = {};
  for (int64_t key = 0; key < count; key += Words::kPerWord, ++weights) {
    Vec x[VECS];
    for (int i = 0; i < VECS; ++i) {
      x[i] = Words::load_column(v + key, count - key, d + i * kLanes, VECS == 1 ? tail : 0);
    }
    for (int lane = 0; lane < LANES; ++lane) {
      const Vec weight = splat_word(weights + lane * kTileKeys);
      for (int i = 0; i < VECS; ++i) sum[lane][i] = Words::add_product(sum[lane][i], x[i], weight);
    }
  }
  for (int lane = 0; lane < LANES; ++lane) {
    for (int i = 0; i < VECS; ++i) store(o + lane * o_stride + d + i * kLanes, sum[lane][i]);
  }
}

#if defined(BROS_MULTIPLIES_TILES)
// Both by tile registers, for all lanes, all keys of a tile and all elements of head_dim.
inline void scores_by_tiles(const DecodeScratch& s, int64_t stride, int64_t count, int64_t words) {
  int64_t key = 0;
  for (; key + (kKeyBlock - 1) * kLanes < count; key += kKeyBlock * kLanes) {
    multiply_words<kKeyBlock>(s.q, stride, s.columns + key, kTileKeys, words);
    store_sums<kKeyBlock>(s.weights + key, kTileKeys);
  }
  for (; key < count; key += kLanes) {
    multiply_words<1>(s.q, stride, s.columns + key, kTileKeys, words);
    store_sums<1>(s.weights + key, kTileKeys);
  }
}

template <class Words, class T>
void values_by_tiles(const DecodeScratch& s, int64_t stride, const T* const* v, int64_t count,
                     int64_t dim) {
  constexpr int kDims = 2;
  static_assert(Words::kStep % (kDims * kLanes) == 0, "a multiple of this is head_dim");
  float* words = s.columns;
  for (int64_t key = 0; key < count; key += Words::kPerWord, words += stride) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      store(words + d, Words::load_column(v + key, count - key, d, 0));
    }
  }
  const int64_t num_words = round_up(count, Words::kStep) / Words::kPerWord;
  for (const float* end = s.columns + num_words * stride; words < end; words += stride) {
    __builtin_memset(words, 0, dim * sizeof *words);
  }
  for (int64_t d = 0; d < dim; d += kDims * kLanes) {
    multiply_words<kDims>(s.weights, kTileKeys, s.columns + d, stride, num_words);
    store_sums<kDims>(s.tile + d, stride);
  }
}
#endif

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

template <class Words>
struct ScoreBody {
  const DecodeScratch& s;
  int64_t stride;
  int64_t count;
  int64_t words;
  template <int LANES>
  void run(int64_t lane) const {
    const float* q = s.q + lane * stride;
    float* scores = s.weights + lane * kTileKeys;
    int64_t key = 0;
    for (; key + (kKeyBlock - 1) * kLanes < count; key += kKeyBlock * kLanes) {
      score_columns<LANES, kKeyBlock, Words>(q, stride, s.columns + key, words, scores + key);
    }
    for (; key < count; key += kLanes) {
      score_columns<LANES, 1, Words>(q, stride, s.columns + key, words, scores + key);
    }
  }
};

template <class Words, class T>
struct ValueBody {
  const DecodeScratch& s;
  int64_t stride;
  const T* const* v;
  int64_t count;
  int64_t dim;
  template <int LANES>
  void run(int64_t lane) const {
    const float* weights = s.weights + lane * kTileKeys;
    float* o = s.tile + lane * stride;
    int64_t d = 0;
    for (; d + kDimBlock * kLanes <= dim; d += kDimBlock * kLanes) {
      weigh_values_block<LANES, kDimBlock, Words>(weights, v, count, d, 0, o, stride);
    }
    for (; d < dim; d += kLanes) {
      const int64_t tail = d + kLanes <= dim ? 0 : dim - d;
      weigh_values_block<LANES, 1, Words>(weights, v, count, d, tail, o, stride);
    }
  }
};

// Replaces n scores by weights 2^(score - max), in words; returns max, and the sum of the weights
// from the first to the last. Without a finite score, all weights are 0.
template <class Words>
BROS_INLINE void softmax_lane(float* scores, int64_t n, float* max, float* sum) {
  const int64_t padded = round_up(n, max_of<int64_t>(kLanes, Words::kStep));
  for (int64_t i = n; i < padded; ++i) scores[i] = -kInfinity;
  Vec top = load(scores);
  for (int64_t i = kLanes; i < padded; i += kLanes) top = vmax(load(scores + i), top);
  *max = reduce_max(top);
  const Vec base = splat(*max == -kInfinity ? 0.0f : *max);
  for (int64_t i = 0; i < padded; i += kLanes) {
    store(scores + i, Words::rounded(exp2_nonpositive(load(scores + i) - base)));
  }
  float total = 0.0f;
  for (int64_t i = 0; i < n; ++i) total += scores[i];
  *sum = total;
  if (Words::kPerWord > 1) Words::template put_row<float, float>(scores, scores, padded);
}

// The keys of the task: its context in the cache, then its chunk, in the type of the cache.
template <class T>
Keys<T> list_keys(const Problem& p, const Task& task, const DecodeScratch& s) {
  Keys<T> keys = {reinterpret_cast<const T**>(s.k), reinterpret_cast<const T**>(s.v), 0};
  for_each_stretch(task, [&](const Stretch& stretch) {
    int64_t row = p.cache_row(stretch.block, task.kv_head, stretch.offset);
    for (int32_t i = 0; i < stretch.count; ++i, ++keys.count, row += stretch.step * p.dim) {
      keys.k[keys.count] = static_cast<const T*>(p.args.cache.k) + row;
      keys.v[keys.count] = static_cast<const T*>(p.args.cache.v) + row;
    }
  });
  if (!task.with_chunk) return keys;
  T* rounded = reinterpret_cast<T*>(s.chunk);
  for (int64_t i = 0; i < task.num_queries; ++i, ++keys.count, rounded += 2 * p.dim) {
    convert(rounded, p.chunk_key(task.token + i, task.kv_head), p.dim);
    convert(rounded + p.dim, p.chunk_value(task.token + i, task.kv_head), p.dim);
    keys.k[keys.count] = rounded;
    keys.v[keys.count] = rounded + p.dim;
  }
  return keys;
}

template <class Words>
void start_lanes(const Problem& p, const Task& task, float q_scale, const DecodeScratch& s,
                 int64_t stride) {
  for (int64_t lane = 0; lane < task.num_queries * p.group; ++lane) {
    const float* q =
        p.query(task.query_token(lane / p.group), task.kv_head * p.group + lane % p.group);
    for (int64_t d = 0; d < p.dim; ++d) s.tile[d] = q[d] * q_scale;
    Words::template put_row<float, float>(s.q + lane * stride, s.tile, p.dim);
  }
}

// The results of all lanes.
struct Results {
  float* o;
  int64_t stride;
  float m[kDecodeLanes];
  float l[kDecodeLanes];
  Results(float* o, int64_t stride) : o(o), stride(stride) {}
  Partial of(int64_t lane) { return Partial(o + lane * stride, m + lane, l + lane); }
};

// The scores of a tile of keys, in s.weights. Prefetches their values.
template <class Words, class T>
BROS_INLINE void score_tile(const Problem& p, const T* const* k, const T* const* v, int64_t count,
                            int64_t lanes, const DecodeScratch& s, int64_t stride) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) {
    if (lanes <= kLaneBlock && p.dim % 4 == 0) {
      return for_lane_blocks(lanes, RowScoreBody<T>{s, stride, k, v, count, p.dim});
    }
  }
#endif
  transpose_keys<Words>(k, count, p.dim, v, count, s.columns);
#if defined(BROS_MULTIPLIES_TILES)
  if constexpr (Words::kByTiles) {
    return scores_by_tiles(s, stride, count, p.dim / Words::kPerWord);
  }
#endif
  for_lane_blocks(lanes, ScoreBody<Words>{s, stride, count, ceil_div(p.dim, Words::kPerWord)});
}

// The results for keys [first, first + count) of the task, which are of one tile.
template <class Words, class T>
void decode_tile(const Problem& p, const Task& task, const Keys<T>& keys, int64_t first,
                 int64_t count, const DecodeScratch& s, int64_t stride, Results& tile) {
  const int64_t lanes = task.num_queries * p.group;
  const int64_t next = min_of(kTileKeys, keys.count - first - count);
  score_tile<Words>(p, keys.k + first, keys.v + first, count, lanes, s, stride);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    float* scores = s.weights + lane * kTileKeys;
    if (task.with_chunk) {  // the query of this lane attends to the chunk up to itself
      const int64_t visible = max_of<int64_t>(task.num_context + lane / p.group + 1 - first, 0);
      for (int64_t key = visible; key < count; ++key) scores[key] = -kInfinity;
    }
    softmax_lane<Words>(scores, count, tile.m + lane, tile.l + lane);
  }
  for (int64_t i = 0; i < next; ++i) prefetch_row(keys.k[first + count + i], p.dim);
#if defined(BROS_MULTIPLIES_TILES)
  if constexpr (Words::kByTiles) {
    return values_by_tiles<Words>(s, stride, keys.v + first, count, p.dim);
  }
#endif
  for_lane_blocks(lanes, ValueBody<Words, T>{s, stride, keys.v + first, count, p.dim});
}

template <class T, class Words>
void decode_task(const Problem& p, const Task& task, float q_scale, const DecodeScratch& s,
                 float* partials) {
  const int64_t lanes = task.num_queries * p.group;
  const int64_t stride = round_up(p.dim, kLanes);
#if defined(BROS_MULTIPLIES_TILES)
  ThreadTiles tiles;
  if (Words::kByTiles) tiles.configure(attention_shapes(lanes));
#endif
  start_lanes<Words>(p, task, q_scale, s, stride);
  const Keys<T> keys = list_keys<T>(p, task, s);
  Results tile(s.tile, stride), run(s.run, stride), all(s.o, stride);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    run.of(lane).clear(p.dim);
    all.of(lane).clear(p.dim);
  }
  const int64_t end = task.position + keys.count;
  int64_t record = record_end(task.position, end);
  float* out = partials + task.partial;
  for (int64_t at = task.position; at < end;) {
    const int64_t next = min_of(tile_end(at), end);
    decode_tile<Words>(p, task, keys, at - task.position, next - at, s, stride, tile);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      run.of(lane).add(tile.of(lane), p.dim);
      if (next < record) continue;
      if (task.partial < 0) {
        all.of(lane).add(run.of(lane), p.dim);
      } else {
        run.of(lane).copy_to(Partial(out + lane * p.lane_size(), p.dim), p.dim);
      }
      run.of(lane).clear(p.dim);
    }
    if (next == record) {
      record = record_end(next, end);
      out += task.record_step;
    }
    at = next;
  }
  if (task.partial >= 0) return;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    float* to = p.output(task.query_token(lane / p.group), task.kv_head * p.group + lane % p.group);
    for (int64_t d = 0; d < p.dim; ++d) to[d] = all.of(lane).o[d] / all.l[lane];
  }
}

}  // namespace
}  // namespace bros
