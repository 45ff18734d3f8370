// Formats of packed weights, and how activations are multiplied with each.
//
// Weights are packed in panels of kPanelOutputs outputs, those of the last one zero-padded. In the
// tables, `out` is the output within the panel and u32 is one number of 32 bits per output:
//
//     fp32   [panels][inputs][out]            f32
//     bf16   [panels][inputs / 2][out]        u32: inputs 2i (low half) and 2i + 1
//     int8   [panels][groups]                 group of 32 inputs, value = code * scale:
//                scale [out] f32, codes [8][out] u32: inputs 4i .. 4i + 3, from the low byte on
//     int4   [panels][groups]                 group of 32 inputs, value = code * scale + minimum:
//                scale [out] f16, minimum [out] f16, codes [4][out] u32: inputs 8i .. 8i + 3 in the
//                low halves of the bytes, from the low byte on, 8i + 4 .. 8i + 7 in the high halves
//
// Products of tile registers (linear_tiles.h) want codes in another order:
//
//     int8       codes [out][32] i8
//     int4       codes [out / 4][32] u16: an input of outputs 4i .. 4i + 3, from the low four bits on
//
// A format is a struct with
//
//     kStep, kStepBytes       inputs of one step, and the bytes of a row of activations for it
//     kTileRows               rows of a tile, as the registers allow
//     kPanels                 panels that one row is multiplied with at once: 1 for groups, since
//                             two take 1.4 times as long (AVX2) or twice as long (VNNI)
//     kAheadRows              a single tile of at least so many rows prefetches its own weights
//                             (`ahead` in linear.h): 8 rows of fp32 take 0.65 of the time so (Xeon).
//                             With fewer it takes as long, or longer: one row of int4 by VNNI 1.05 to
//                             1.18 times
//     kL2Rows                 several tiles prefetch the next block to L2 with up to so many rows,
//                             which wait for memory: 16 rows of bf16 take 0.81 of the time so, and
//                             1.04 with L1. With more rows L1 is better: 32 take 0.81, and 0.85
//     kStepsPerPrefetch       steps of a tile for which it prefetches at once. A step of fp32 in vectors
//                             of 8 lanes is 12 multiply-adds, which take less time than to test and
//                             count a prefetch beside them: with 16 instead of 1, and loops of 4
//                             steps, 8 and 16 rows take 0.85 of the time, 32 take 0.90, 64 take 0.97
//                             and 256 as long (Zen 3, two threads). In vectors of 16 lanes 16 rows take
//                             1.04, 32 take 0.92 and 256 take 0.88 (Xeon)
//     kHasOutliers            whether some groups of a row have second bytes, for add_low and
//                             multiply_row
//     bytes(inputs)           of a panel
//     seek(weights, k)        goes to input k, a multiple of kStep, of the panel at `weights`
//     multiply(panels, x, x_stride, count, sum)
//                             sum[r][2 c + j] += row r of x, one step at x + r * x_stride, times
//                             vector j of panel c; the step may have only `count` inputs, a multiple
//                             of kGroup, if kStep is several groups
//     round(x, inputs, out)   a row of activations as `multiply` takes it; fp32 if kRounds is false
//     Wide                    the format that a block is widened to for many rows, or itself
#pragma once

#include "avx512_model.h"
#include "kernels.h"
#include "simd.h"

namespace bros {
namespace {

constexpr int64_t kPanelOutputs = 2 * kLanes;
constexpr int64_t kGroup = 32;

BROS_INLINE int64_t groups_of(int64_t inputs) {
  return static_cast<int64_t>(static_cast<uint64_t>(inputs) / kGroup);  // unsigned: a shift
}

BROS_INLINE IntVec load_int(const uint32_t* p) {
  IntVec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

BROS_INLINE Vec to_float(IntVec v) { return __builtin_convertvector(v, Vec); }

// ---- Exact products: fp32 activations times exactly widened weights. `at(part)` are the weights
// ---- of input k + part of the step. With a constant part it is a few instructions.

struct Pair {
  Vec v[2];  // the weights of one input for the outputs of a panel
};

template <class Panel>
struct ExactProducts {
  static constexpr bool kRounds = false;

  template <int R, int C>
  BROS_INLINE static void multiply(const Panel (&panels)[C], const char* x, int64_t x_stride,
                                   int64_t, Vec (&sum)[R][2 * C]) {
#pragma GCC unroll 2
    for (int part = 0; part < Panel::kStep; ++part) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const Pair w = panels[c].at(part);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const Vec a = splat(reinterpret_cast<const float*>(x + r * x_stride)[part]);
          sum[r][2 * c] += a * w.v[0];
          sum[r][2 * c + 1] += a * w.v[1];
        }
      }
    }
  }
};

struct Fp32Panel : ExactProducts<Fp32Panel> {
  using Wide = Fp32Panel;
#if defined(__AVX512F__)
  static constexpr int kTileRows = 12;  // sums: 24 of 32 registers
#else
  static constexpr int kTileRows = 6;  // 12 of 16
#endif
  static constexpr int kPanels = 4;
  static constexpr int kAheadRows = 5, kL2Rows = 18;
  static constexpr bool kHasOutliers = false;
  static constexpr int kStep = 1, kStepBytes = 4;
  static constexpr int kStepsPerPrefetch = 16;
  static int64_t bytes(int64_t inputs) { return inputs * kPanelOutputs * 4; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    values_ = reinterpret_cast<const float*>(weights) + k * kPanelOutputs;
  }
  BROS_INLINE Pair at(int) const { return {{load(values_), load(values_ + kLanes)}}; }

 private:
  const float* values_;
};

#if !defined(BROS_MULTIPLIES_PAIRS)
struct Bf16Panel : ExactProducts<Bf16Panel> {
  using Wide = Fp32Panel;
  static constexpr int kPanels = 4;
  static constexpr int kAheadRows = 5;
  static constexpr bool kHasOutliers = false;
  static constexpr int kStep = 2, kStepBytes = 8, kStepsPerPrefetch = 1;
  static int64_t bytes(int64_t inputs) { return inputs * kPanelOutputs * 2; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    pairs_ = reinterpret_cast<const uint32_t*>(weights) + k / 2 * kPanelOutputs;
  }
  BROS_INLINE Pair at(int part) const {
    Pair w;
    for (int j = 0; j < 2; ++j) {
      const IntVec raw = load_int(pairs_ + j * kLanes);
      w.v[j] = bit_cast<Vec>(part ? raw & splat_int(static_cast<int32_t>(0xffff0000)) : raw << 16);
    }
    return w;
  }

 private:
  const uint32_t* pairs_;
};
#endif

// ---- AVX-512 BF16: activations are rounded to bf16, their products with bf16 weights are exact.

#if defined(BROS_MULTIPLIES_PAIRS)
struct Bf16Panel {
  using Wide = Bf16Panel;
  static constexpr bool kRounds = true;
  static constexpr int kTileRows = 12;  // sums: 24 of 32 registers
  static constexpr int kPanels = 4;
  static constexpr int kAheadRows = 9, kL2Rows = 18;
  static constexpr bool kHasOutliers = false;
  static constexpr int kStep = 2, kStepBytes = 4, kStepsPerPrefetch = 1;
  static int64_t bytes(int64_t inputs) { return inputs * kPanelOutputs * 2; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    pairs_ = reinterpret_cast<const uint32_t*>(weights) + k / 2 * kPanelOutputs;
  }

  template <int R, int C>
  BROS_INLINE static void multiply(const Bf16Panel (&panels)[C], const char* x, int64_t x_stride,
                                   int64_t, Vec (&sum)[R][2 * C]) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const __m512bh w[2] = {bit_cast<__m512bh>(load_int(panels[c].pairs_)),
                             bit_cast<__m512bh>(load_int(panels[c].pairs_ + kLanes))};
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const int32_t pair = *reinterpret_cast<const int32_t*>(x + r * x_stride);
        const __m512bh a = bit_cast<__m512bh>(splat_int(pair));
        sum[r][2 * c] = _mm512_dpbf16_ps(sum[r][2 * c], a, w[0]);
        sum[r][2 * c + 1] = _mm512_dpbf16_ps(sum[r][2 * c + 1], a, w[1]);
      }
    }
  }

  static void round(const float* x, int64_t inputs, char* out) {
    uint16_t* to = reinterpret_cast<uint16_t*>(out);
    for_each_vector(
        inputs, [&](int64_t i) { store_bf16(to + i, load(x + i), kLanes); },
        [&](int64_t i, int64_t m) { store_bf16(to + i, load_first(x + i, m), m); });
  }

 private:
  BROS_INLINE static void store_bf16(uint16_t* to, Vec v, int64_t n) {
    const __m256bh h = _mm512_cvtneps_pbh(v);
    __builtin_memcpy(to, &h, n * sizeof(uint16_t));
  }

  const uint32_t* pairs_;
};
#endif

// ---- Codes: activations are rounded to integers, and multiplied with the codes of int8 and int4.
// ---- The sums of a group are exact, so they are the same for every instruction set whose products
// ---- are those of codes (all but tiles).

typedef int16_t ShortVec __attribute__((vector_size(4 * kLanes)));
constexpr int kGroupVectors = kGroup / kLanes;

// The compiler may not reorder sums: it would make a tree of them, whose terms do not fit in the
// registers (1.5 times as long with AVX2).
BROS_INLINE IntVec in_order(IntVec v) {
#if defined(__AVX2__)
  asm("" : "+v"(v));
#endif
  return v;
}

#if !defined(__AVX2__) && !defined(BROS_HAS_VNNI)
// Only tests use these (`has_products` in executor/models/layers.py). Inlined into tiles that are
// unrolled, they would make half of the time to compile all kernels.
__attribute__((noinline)) IntVec add_bytes(IntVec sums, IntVec w, int32_t a) {
  for (int i = 0; i < 4; ++i) sums += (w >> 8 * i & 255) * static_cast<int8_t>(a >> 8 * i);
  return sums;
}
__attribute__((noinline)) IntVec add_pairs(IntVec sums, IntVec w, int32_t a) {
  return sums + (w << 16 >> 16) * static_cast<int16_t>(a) + (w >> 16) * (a >> 16);
}
#endif

// Per lane, the sum of products of a group: of bytes of weights, 0..15, and bytes of activations.
class ByteSums {
 public:
  // w: four bytes per lane. a: the four bytes of a row that they are multiplied with.
  BROS_INLINE void add(IntVec w, int32_t a) {
#if defined(BROS_HAS_VNNI)
    sums_ = bit_cast<IntVec>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sums_), bit_cast<__m512i>(w),
                                                 _mm512_set1_epi32(a)));
#elif defined(__AVX512F__)
    const __m512i pairs = _mm512_maddubs_epi16(bit_cast<__m512i>(w), _mm512_set1_epi32(a));
    sums_ = in_order(bit_cast<IntVec>(_mm512_add_epi16(bit_cast<__m512i>(sums_), pairs)));
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_maddubs_epi16(bit_cast<__m256i>(w), _mm256_set1_epi32(a));
    sums_ = in_order(bit_cast<IntVec>(_mm256_add_epi16(bit_cast<__m256i>(sums_), pairs)));
#else
    sums_ = add_bytes(sums_, w, a);
#endif
  }

  // As floats. Without VNNI there are two sums of 16 bits per lane, of 16 products each.
  BROS_INLINE Vec value() const {
    static_assert(kGroup / 2 * 15 * 128 < 32768, "sums of 16 bits");
#if defined(__AVX512F__) && !defined(BROS_HAS_VNNI)
    const __m512i ones = _mm512_set1_epi16(1);
    return to_float(bit_cast<IntVec>(_mm512_madd_epi16(bit_cast<__m512i>(sums_), ones)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i ones = _mm256_set1_epi16(1);
    return to_float(bit_cast<IntVec>(_mm256_madd_epi16(bit_cast<__m256i>(sums_), ones)));
#else
    return to_float(sums_);
#endif
  }

 private:
  IntVec sums_ = {};
};

// Per lane, the sum of the products of a group, of codes of 16 bits.
class PairSums {
 public:
  // w: two codes per lane. a: the two codes of a row that they are multiplied with.
  BROS_INLINE void add(ShortVec w, int32_t a) {
#if defined(BROS_HAS_VNNI)
    sums_ = bit_cast<IntVec>(_mm512_dpwssd_epi32(bit_cast<__m512i>(sums_), bit_cast<__m512i>(w),
                                                 _mm512_set1_epi32(a)));
#elif defined(__AVX512F__)
    const __m512i products = _mm512_madd_epi16(bit_cast<__m512i>(w), _mm512_set1_epi32(a));
    sums_ = in_order(sums_ + bit_cast<IntVec>(products));
#elif defined(__AVX2__)
    const __m256i products = _mm256_madd_epi16(bit_cast<__m256i>(w), _mm256_set1_epi32(a));
    sums_ = in_order(sums_ + bit_cast<IntVec>(products));
#else
    sums_ = add_pairs(sums_, bit_cast<IntVec>(w), a);
#endif
  }

  BROS_INLINE Vec value() const { return to_float(sums_); }

 private:
  IntVec sums_ = {};
};

// The largest magnitude of n values, a multiple of kGroup; a NaN is larger than any number.
BROS_INLINE float largest_magnitude(const float* x, int64_t n) {
  IntVec most = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const IntVec magnitude = bit_cast<IntVec>(load(x + i)) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  return bit_cast<float>(reduce_max(most));
}

BROS_INLINE void store_codes(int8_t* to, const IntVec (&codes)[kGroupVectors]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const auto of = [&](int i) { return bit_cast<__m256i>(codes[i]); };
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(of(0), of(1)),
                                           _mm256_packs_epi32(of(2), of(3)));
  // Packing works within halves of a vector: the fours of codes are in the order 0 2 4 6 1 3 5 7.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, order));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  for (int i = 0; i < kGroupVectors; ++i) {
    const Bytes bytes = __builtin_convertvector(codes[i], Bytes);
    __builtin_memcpy(to + i * kLanes, &bytes, sizeof bytes);
  }
#endif
}

// ---- int8: activations have codes of 16 bits, in blocks of four groups that share a scale. With
// ---- codes w and a:
//
//     sum over a block = scale_a * sum over its groups of scale_w * (sum of w * a)

constexpr int kBlockGroups = 4;

struct ActivationBlock {
  // Of each four inputs the first, the third, the second and the fourth: a vector of weights has
  // two inputs per output that were two bytes apart.
  int16_t codes[kBlockGroups][kGroup];
  float scale;  // the largest magnitude / kMostCode; NaN if a value is not finite
};

constexpr float kMostCode = 32766.0f;  // 258 * 127: steps of 8 bits stay exact

// `groups` groups of x; the codes of others remain undefined.
BROS_INLINE void round_block(const float* x, int groups, ActivationBlock* out) {
  const float largest = largest_magnitude(x, groups * kGroup);
  const bool usable = largest < kInfinity;
  const float to_code = usable && largest > 1e-30f ? kMostCode / largest : 0.0f;
  out->scale = usable ? largest / kMostCode : __builtin_nanf("");
  for (int i = 0; i < groups * kGroup; i += kLanes) {
    const IntVec codes = round_to_int(load(x + i) * to_code);
    // The first and the third of four come first: one number has them in its halves.
    int32_t fours[kLanes];
    __builtin_memcpy(fours, &codes, sizeof codes);
    int16_t* to = out->codes[0] + i;
    for (int k = 0; k < kLanes; k += 4) {
      to[k] = static_cast<int16_t>(fours[k]);
      to[k + 1] = static_cast<int16_t>(fours[k + 2]);
      to[k + 2] = static_cast<int16_t>(fours[k + 1]);
      to[k + 3] = static_cast<int16_t>(fours[k + 3]);
    }
  }
}

// The code of an input of a group for an output.
BROS_INLINE int8_t int8_code(const char* group, int64_t output, int64_t input) {
#if defined(BROS_MULTIPLIES_TILES)
  const int64_t at = output * kGroup + input;
#else
  const int64_t at = (input / 4 * kPanelOutputs + output) * 4 + input % 4;
#endif
  return static_cast<int8_t>(group[4 * kPanelOutputs + at]);
}

struct Int8Panel {
  using Wide = Int8Panel;
  static constexpr bool kRounds = true;
  static constexpr int kTileRows = 4;  // sums of a group, of a block and of the row: 24 registers
  static constexpr int kPanels = 1;
  static constexpr int kAheadRows = kLanes == 16 ? 5 : 1, kL2Rows = 16;
  static constexpr bool kHasOutliers = false;
  static constexpr int kStep = kBlockGroups * kGroup, kStepBytes = sizeof(ActivationBlock);
  static constexpr int kStepsPerPrefetch = 1;
  static constexpr int64_t kGroupBytes = kPanelOutputs * (4 + kGroup);
  static int64_t bytes(int64_t inputs) { return groups_of(inputs) * kGroupBytes; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    group_ = weights + groups_of(k) * kGroupBytes;
  }

  template <int R, int C>
  BROS_INLINE static void multiply(const Int8Panel (&panels)[C], const char* x, int64_t x_stride,
                                   int64_t count, Vec (&sum)[R][2 * C]) {
    static_assert(C == kPanels, "");
    const ActivationBlock* rows[R];
    for (int r = 0; r < R; ++r) {
      rows[r] = reinterpret_cast<const ActivationBlock*>(x + r * x_stride);
    }
    Vec block[R][2] = {};
    for (int g = 0; g < count / kGroup; ++g) add_group(panels[0].group_, g, rows, block);
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < 2; ++j) {
        sum[r][j] = mul_add(block[r][j], splat(rows[r]->scale), sum[r][j]);
      }
    }
  }

  static void round(const float* x, int64_t inputs, char* out) {
    ActivationBlock* blocks = reinterpret_cast<ActivationBlock*>(out);
    for (int64_t k = 0; k < inputs; k += kStep) {
      const int64_t count = min_of<int64_t>(kStep, inputs - k);
      round_block(x + k, static_cast<int>(count / kGroup), blocks++);
    }
  }

 private:
  template <int R>
  BROS_INLINE static void add_group(const char* groups, int g, const ActivationBlock* (&rows)[R],
                                    Vec (&block)[R][2]) {
    const char* group = groups + g * kGroupBytes;
    PairSums sums[R][2];
#pragma GCC unroll 16
    for (int pair = 0; pair < kGroup / 2; ++pair) {
      const ShortVec w[2] = {codes(group, pair, 0), codes(group, pair, 1)};
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        int32_t a;
        __builtin_memcpy(&a, rows[r]->codes[g] + 2 * pair, sizeof a);
        for (int j = 0; j < 2; ++j) sums[r][j].add(w[j], a);
      }
    }
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const Vec scale = load(reinterpret_cast<const float*>(group) + j * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        block[r][j] = mul_add(sums[r][j].value(), scale, block[r][j]);
      }
    }
  }

  BROS_INLINE static ShortVec codes(const char* group, int pair, int j) {
    const uint32_t* quads = reinterpret_cast<const uint32_t*>(group + 4 * kPanelOutputs);
    const uint32_t* at = quads + pair / 2 * kPanelOutputs + j * kLanes;
    const ShortVec raw = bit_cast<ShortVec>(load_int(at));
    return pair % 2 ? raw >> 8 : raw << 8 >> 8;
  }

  const char* group_;
};

// ---- int4: activations have codes of 8 bits, in the groups of weights. Outliers, groups that are
// ---- large in their row, have codes of 16 bits, in two bytes: they would make most of the rounding
// ---- error. Their second bytes are multiplied after the first bytes of all groups of a block of
// ---- inputs (add_outliers in linear.h).
//
//     sum over a group = scale_a * scale_w * (sum of w * a) + minimum_w * (scale_a * sum of a)

constexpr float kOutlier = 1.1f;  // times the mean largest magnitude of the groups of a row
constexpr float kMostByte = 127.0f, kMostPair = 32639.0f;  // 127 * 256 + 127

struct ActivationGroup {
  int8_t high[kGroup];
  float high_scale;  // of the first bytes; NaN if a value is not finite
  float total;       // the sum of the activations as they are rounded
  int8_t low[kGroup];  // of an outlier: code = 256 * high + low
  float low_scale;
  int32_t is_outlier;
};

// A group of x, whose largest magnitude is given. With a larger one than `limit` it is an outlier.
BROS_INLINE void round_group(const float* x, float largest, float limit, ActivationGroup* out) {
  const bool finite = largest < kInfinity;
  const bool both = largest > limit;
  const float most = both ? kMostPair : kMostByte;
  const float step = finite ? largest / most : __builtin_nanf("");
  const float to_code = finite && largest > 1e-30f ? most / largest : 0.0f;
  IntVec codes[kGroupVectors], sum = {};
  for (int j = 0; j < kGroupVectors; ++j) {
    codes[j] = round_to_int(load(x + j * kLanes) * to_code);
    sum += codes[j];
  }
  if (both) {
    IntVec low[kGroupVectors];
    for (int j = 0; j < kGroupVectors; ++j) {
      const IntVec high = (codes[j] + 128) >> 8;
      low[j] = codes[j] - (high << 8);
      codes[j] = high;
    }
    store_codes(out->low, low);
  }
  store_codes(out->high, codes);
  out->high_scale = both ? step * 256.0f : step;
  out->total = step * static_cast<float>(reduce_add(sum));
  out->low_scale = step;
  out->is_outlier = both;
}

// sum, increased by one group. dot: the sum of products of codes.
BROS_INLINE Vec add_scaled(Vec sum, Vec dot, Vec scale, Vec minimum, const ActivationGroup& group) {
  sum = mul_add(dot * splat(group.high_scale), scale, sum);
  return mul_add(minimum, splat(group.total), sum);
}

struct Int4Panel {
  using Wide = Int4Panel;
  static constexpr bool kRounds = true;
  // Sums of a group and of the row: 24 of 32 registers. With 16 of them those of the row are in
  // memory between groups, which takes as long as tiles of 4 rows.
  static constexpr int kTileRows = 6;
  static constexpr int kPanels = 1;
  static constexpr int kAheadRows = kLanes == 16 ? 3 : 1, kL2Rows = 8;
  static constexpr bool kHasOutliers = true;
  static constexpr int kStep = kGroup, kStepBytes = sizeof(ActivationGroup);
  static constexpr int kStepsPerPrefetch = 1;
  static constexpr int64_t kGroupBytes = kPanelOutputs * (4 + kGroup / 2);
  static int64_t bytes(int64_t inputs) { return groups_of(inputs) * kGroupBytes; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    group_ = weights + groups_of(k) * kGroupBytes;
  }

  template <int R, int C>
  BROS_INLINE static void multiply(const Int4Panel (&panels)[C], const char* x, int64_t x_stride,
                                   int64_t, Vec (&sum)[R][2 * C]) {
    static_assert(C == kPanels, "");
    const ActivationGroup* rows[R];
    for (int r = 0; r < R; ++r) {
      rows[r] = reinterpret_cast<const ActivationGroup*>(x + r * x_stride);
    }
    ByteSums sums[R][2];
    panels[0].multiply_bytes([&](int r) { return rows[r]->high; }, sums);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const Vec scale = panels[0].scale(j), minimum = panels[0].minimum(j);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        sum[r][j] = add_scaled(sum[r][j], sums[r][j].value(), scale, minimum, *rows[r]);
      }
    }
  }

  // Group g of a row of activations.
  BROS_INLINE static const ActivationGroup& activations(const char* x, int64_t g) {
    return reinterpret_cast<const ActivationGroup*>(x)[g];
  }

  // out[rows[r] * stride + i] += the second bytes of row rows[r] of x, one group, for i < width.
  template <int R>
  void add_low(const char* x, int64_t x_stride, const int32_t* rows, float* out, int64_t stride,
               int64_t width) const {
    const ActivationGroup* groups[R];
    for (int r = 0; r < R; ++r) groups[r] = &activations(x + rows[r] * x_stride, 0);
    ByteSums sums[R][2];
    multiply_bytes([&](int r) { return groups[r]->low; }, sums);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const int64_t count = width - j * kLanes;
      if (count <= 0) break;
      const Vec scale = this->scale(j);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        float* at = out + rows[r] * stride + j * kLanes;
        const Vec product = sums[r][j].value() * splat(groups[r]->low_scale);
        if (count >= kLanes) {
          store(at, mul_add(product, scale, load(at)));
        } else {
          store_first(at, mul_add(product, scale, load_first(at, count)), count);
        }
      }
    }
  }

  // The product with the second bytes of one outlier, per vector of outputs, before it is scaled
  // and added to the sums of its row.
  struct Low {
    Vec product[2];
    Vec scale[2];
  };

  // sum[j] += one group of one row, without the second bytes of an outlier, which are left in *low.
  // Returns where those of the next outlier go.
  BROS_INLINE Low* multiply_row(const char* x, Vec (&sum)[2], Low* low) const {
    const ActivationGroup& group = activations(x, 0);
    if (!group.is_outlier) {
      ByteSums sums[1][2];
      multiply_bytes([&](int) { return group.high; }, sums);
      for (int j = 0; j < 2; ++j) {
        sum[j] = add_scaled(sum[j], sums[0][j].value(), scale(j), minimum(j), group);
      }
      return low;
    }
    ByteSums sums[2][2];
    multiply_bytes([&](int byte) { return byte ? group.low : group.high; }, sums);
    for (int j = 0; j < 2; ++j) {
      low->scale[j] = scale(j);
      sum[j] = add_scaled(sum[j], sums[0][j].value(), low->scale[j], minimum(j), group);
      low->product[j] = sums[1][j].value() * splat(group.low_scale);
    }
    return low + 1;
  }

  static void round(const float* x, int64_t inputs, char* out) {
    ActivationGroup* groups = reinterpret_cast<ActivationGroup*>(out);
    const int64_t count = inputs / kGroup;
    float sums[4] = {};
    for (int64_t g = 0; g < count; ++g) {
      const float largest = largest_magnitude(x + g * kGroup, kGroup);
      groups[g].high_scale = largest;  // until the group is rounded
      sums[g % 4] += largest;
    }
    const float mean = (sums[0] + sums[1] + (sums[2] + sums[3])) / static_cast<float>(count);
    for (int64_t g = 0; g < count; ++g) {
      round_group(x + g * kGroup, groups[g].high_scale, kOutlier * mean, groups + g);
    }
  }

 private:
  BROS_INLINE Vec scale(int j) const {
    return load(reinterpret_cast<const Fp16*>(group_) + j * kLanes);
  }
  BROS_INLINE Vec minimum(int j) const {
    return load(reinterpret_cast<const Fp16*>(group_) + kPanelOutputs + j * kLanes);
  }

  // sums[r][j]: codes of weights times the bytes of row r.
  template <int R, class Bytes>
  BROS_INLINE void multiply_bytes(const Bytes& bytes, ByteSums (&sums)[R][2]) const {
    const uint32_t* eights = reinterpret_cast<const uint32_t*>(group_ + 4 * kPanelOutputs);
#pragma GCC unroll 8
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      IntVec w[2];
      for (int j = 0; j < 2; ++j) {
        const IntVec raw = load_int(eights + quad / 2 * kPanelOutputs + j * kLanes);
        w[j] = (quad % 2 ? raw >> 4 : raw) & 0x0f0f0f0f;
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        int32_t a;
        __builtin_memcpy(&a, bytes(r) + 4 * quad, sizeof a);
        for (int j = 0; j < 2; ++j) sums[r][j].add(w[j], a);
      }
    }
  }

  const char* group_;
};

}  // namespace
}  // namespace bros
