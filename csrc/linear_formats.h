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
// A format is a struct with
//
//     kStep, kStepBytes       inputs of one step, and the bytes of a row of activations for it
//     kTileRows               rows of a tile, as the registers allow
//     kPanels                 panels that one row is multiplied with at once: 1 for groups, since
//                             two take 1.4 times as long (AVX2) or twice as long (VNNI)
//     kPrefetches             whether the last of several tiles prefetches the weights after its own:
//                             int4 by VNNI takes 12 % less time for 8 rows; fp32, whose loop is
//                             short, would take 10 % more for 16, and bf16 as long as before
//     kHasOutliers            whether some groups of a row have second bytes, for add_low
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
#pragma GCC unroll 32
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
  static constexpr bool kPrefetches = false;
  static constexpr bool kHasOutliers = false;
  static constexpr int kStep = 1, kStepBytes = 4;
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
  static constexpr bool kPrefetches = false;
  static constexpr bool kHasOutliers = false;
  static constexpr int kStep = 2, kStepBytes = 8;
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

#if !defined(BROS_MULTIPLIES_CODES)
struct Int8Panel : ExactProducts<Int8Panel> {
  using Wide = Fp32Panel;
  static constexpr int kPanels = 1;
  static constexpr bool kPrefetches = false;
  static constexpr bool kHasOutliers = false;
  static constexpr int kStep = kGroup, kStepBytes = 4 * kGroup;
  static constexpr int64_t kGroupBytes = kPanelOutputs * (4 + kGroup);
  static int64_t bytes(int64_t inputs) { return inputs / kGroup * kGroupBytes; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    const char* group = weights + k / kGroup * kGroupBytes;
    const float* scales = reinterpret_cast<const float*>(group);
    for (int j = 0; j < 2; ++j) scale_[j] = load(scales + j * kLanes);
    codes_ = reinterpret_cast<const uint32_t*>(group + 4 * kPanelOutputs);
  }
  BROS_INLINE Pair at(int part) const {
    Pair w;
    for (int j = 0; j < 2; ++j) {
      const IntVec raw = load_int(codes_ + part / 4 * kPanelOutputs + j * kLanes);
      w.v[j] = to_float(raw << (24 - part % 4 * 8) >> 24) * scale_[j];
    }
    return w;
  }

 private:
  const uint32_t* codes_;
  Vec scale_[2];
};

struct Int4Panel : ExactProducts<Int4Panel> {
  using Wide = Fp32Panel;
  static constexpr int kPanels = 1;
  static constexpr bool kPrefetches = false;
  static constexpr bool kHasOutliers = false;
  static constexpr int kStep = kGroup, kStepBytes = 4 * kGroup;
  static constexpr int64_t kGroupBytes = kPanelOutputs * (4 + kGroup / 2);
  static int64_t bytes(int64_t inputs) { return inputs / kGroup * kGroupBytes; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    const char* group = weights + k / kGroup * kGroupBytes;
    const Fp16* halves = reinterpret_cast<const Fp16*>(group);
    for (int j = 0; j < 2; ++j) {
      scale_[j] = load(halves + j * kLanes);
      minimum_[j] = load(halves + kPanelOutputs + j * kLanes);
    }
    codes_ = reinterpret_cast<const uint32_t*>(group + 4 * kPanelOutputs);
  }
  BROS_INLINE Pair at(int part) const {
    Pair w;
    for (int j = 0; j < 2; ++j) {
      const IntVec raw = load_int(codes_ + part / 8 * kPanelOutputs + j * kLanes);
      w.v[j] = to_float((raw >> (part % 4 * 8 + part / 4 % 2 * 4)) & 15) * scale_[j] + minimum_[j];
    }
    return w;
  }

 private:
  const uint32_t* codes_;
  Vec scale_[2], minimum_[2];
};
#endif

// ---- AVX-512 BF16: activations are rounded to bf16, their products with bf16 weights are exact.

#if defined(BROS_MULTIPLIES_PAIRS)
struct Bf16Panel {
  using Wide = Bf16Panel;
  static constexpr bool kRounds = true;
  static constexpr int kTileRows = 12;  // sums: 24 of 32 registers
  static constexpr int kPanels = 4;
  static constexpr bool kPrefetches = false;
  static constexpr bool kHasOutliers = false;
  static constexpr int kStep = 2, kStepBytes = 4;
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

// ---- AVX-512 VNNI, int8: activations are rounded to codes of 16 bits, in blocks of four groups
// ---- that share a scale. Products of codes are summed exactly within a group of weights. With
// ---- codes w and a:
//
//     sum over a block = scale_a * sum over its groups of scale_w * (sum of w * a)

#if defined(BROS_MULTIPLIES_CODES)
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
  __m512 most = {};
  __mmask16 finite = 0xffff;
  for (int i = 0; i < 2 * groups; ++i) {
    const __m512 magnitude = _mm512_abs_ps(load(x + i * kLanes));
    finite &= _mm512_cmp_ps_mask(magnitude, splat(kInfinity), _CMP_LT_OQ);
    most = _mm512_max_ps(most, magnitude);
  }
  const float largest = _mm512_reduce_max_ps(most);
  const bool usable = finite == 0xffff;
  const float to_code = usable && largest > 1e-30f ? kMostCode / largest : 0.0f;
  for (int g = 0; g < groups; ++g) {
    for (int j = 0; j < 2; ++j) {
      const __m512i code = _mm512_cvtps_epi32(load(x + g * kGroup + j * kLanes) * to_code);
      const __m512i ordered = _mm512_shuffle_epi32(code, static_cast<_MM_PERM_ENUM>(0xd8));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->codes[g]) + j,
                          _mm512_cvtsepi32_epi16(ordered));
    }
  }
  out->scale = usable ? largest / kMostCode : __builtin_nanf("");
}

struct Int8Panel {
  using Wide = Int8Panel;
  static constexpr bool kRounds = true;
  static constexpr int kTileRows = 4;  // sums of a group, of a block and of the row: 24 of 32
  static constexpr int kPanels = 1;
  static constexpr bool kPrefetches = true;
  static constexpr bool kHasOutliers = false;
  static constexpr int kStep = kBlockGroups * kGroup, kStepBytes = sizeof(ActivationBlock);
  static constexpr int64_t kGroupBytes = kPanelOutputs * (4 + kGroup);
  static int64_t bytes(int64_t inputs) { return inputs / kGroup * kGroupBytes; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    group_ = weights + k / kGroup * kGroupBytes;
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
        sum[r][j] = _mm512_fmadd_ps(block[r][j], splat(rows[r]->scale), sum[r][j]);
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
    __m512i dot[R][2] = {};
#pragma GCC unroll 16
    for (int pair = 0; pair < kGroup / 2; ++pair) {
      const __m512i w[2] = {codes(group, pair, 0), codes(group, pair, 1)};
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        int32_t a;
        __builtin_memcpy(&a, rows[r]->codes[g] + 2 * pair, sizeof a);
        for (int j = 0; j < 2; ++j) {
          dot[r][j] = _mm512_dpwssd_epi32(dot[r][j], w[j], _mm512_set1_epi32(a));
        }
      }
    }
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const Vec scale = load(reinterpret_cast<const float*>(group) + j * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        block[r][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][j]), scale, block[r][j]);
      }
    }
  }

  BROS_INLINE static __m512i codes(const char* group, int pair, int j) {
    const uint32_t* quads = reinterpret_cast<const uint32_t*>(group + 4 * kPanelOutputs);
    const uint32_t* at = quads + pair / 2 * kPanelOutputs + j * kLanes;
    const __m512i raw = bit_cast<__m512i>(load_int(at));
    return _mm512_srai_epi16(pair % 2 ? raw : _mm512_slli_epi16(raw, 8), 8);
  }

  const char* group_;
};

// ---- AVX-512 VNNI, int4: activations are rounded to codes of 8 bits, in the groups of weights.
// ---- Outliers, groups that are large in their row, have codes of 16 bits, in two bytes: they would
// ---- make most of the rounding error. Their second bytes are multiplied after the first bytes of
// ---- all groups of a block of inputs (add_outliers in linear.h).
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

// The sum of each of four vectors.
BROS_INLINE __m128i sums_of(const __m512i (&v)[4]) {
  __m512i pairs[2];
  for (int i = 0; i < 2; ++i) {
    pairs[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                                _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  }
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(pairs[0], pairs[1]),
                                       _mm512_unpackhi_epi64(pairs[0], pairs[1]));
  const __m256i half =
      _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// The largest of each of four vectors.
BROS_INLINE __m128i largest_of(const __m512i (&v)[4]) {
  __m512i pairs[2];
  for (int i = 0; i < 2; ++i) {
    pairs[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                                _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  }
  const __m512i all = _mm512_max_epi32(_mm512_unpacklo_epi64(pairs[0], pairs[1]),
                                       _mm512_unpackhi_epi64(pairs[0], pairs[1]));
  const __m256i half =
      _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// The largest magnitudes of up to four groups; a NaN is larger than any number.
BROS_INLINE __m128 largest_magnitudes(const float* x, int groups) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i most[4] = {};
  for (int g = 0; g < groups; ++g) {
    const __m512i first = bit_cast<__m512i>(load(x + g * kGroup));
    const __m512i second = bit_cast<__m512i>(load(x + g * kGroup + kLanes));
    most[g] = _mm512_max_epi32(_mm512_and_si512(first, magnitude),
                               _mm512_and_si512(second, magnitude));
  }
  return _mm_castsi128_ps(largest_of(most));
}

// Up to four groups of x. largest: their largest magnitudes. Groups with a larger one than `limit`
// are outliers.
BROS_INLINE void round_groups(const float* x, int groups, __m128 largest, float limit,
                              ActivationGroup* out) {
  const __mmask8 outliers = _mm_cmp_ps_mask(largest, _mm_set1_ps(limit), _CMP_GT_OQ);
  const __mmask8 finite = _mm_cmp_ps_mask(largest, _mm_set1_ps(kInfinity), _CMP_LT_OQ);
  const __mmask8 usable = finite & _mm_cmp_ps_mask(largest, _mm_set1_ps(1e-30f), _CMP_GT_OQ);
  const __m128 most =
      _mm_mask_blend_ps(outliers, _mm_set1_ps(kMostByte), _mm_set1_ps(kMostPair));
  const __m128 step =
      _mm_mask_div_ps(_mm_set1_ps(__builtin_nanf("")), finite, largest, most);
  float to_code[4], steps[4], totals[4];
  _mm_storeu_ps(to_code, _mm_maskz_div_ps(usable, most, largest));
  _mm_storeu_ps(steps, step);
  __m512i sum[4] = {};
  for (int g = 0; g < groups; ++g) {
    const bool both = outliers >> g & 1;
    for (int j = 0; j < 2; ++j) {
      const __m512i code =
          _mm512_cvtps_epi32(load(x + g * kGroup + j * kLanes) * splat(to_code[g]));
      sum[g] = _mm512_add_epi32(sum[g], code);
      __m512i high = code;
      if (both) {
        high = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
        const __m512i low = _mm512_sub_epi32(code, _mm512_slli_epi32(high, 8));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out[g].low) + j, _mm512_cvtepi32_epi8(low));
      }
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out[g].high) + j, _mm512_cvtsepi32_epi8(high));
    }
    out[g].is_outlier = both;
    out[g].low_scale = steps[g];
    out[g].high_scale = both ? steps[g] * 256.0f : steps[g];
  }
  _mm_storeu_ps(totals, _mm_mul_ps(step, _mm_cvtepi32_ps(sums_of(sum))));
  for (int g = 0; g < groups; ++g) out[g].total = totals[g];
}

struct Int4Panel {
  using Wide = Int4Panel;
  static constexpr bool kRounds = true;
  static constexpr int kTileRows = 6;  // sums of a group and of the row: 24 of 32 registers
  static constexpr int kPanels = 1;
  static constexpr bool kPrefetches = true;
  static constexpr bool kHasOutliers = true;
  static constexpr int kStep = kGroup, kStepBytes = sizeof(ActivationGroup);
  static constexpr int64_t kGroupBytes = kPanelOutputs * (4 + kGroup / 2);
  static int64_t bytes(int64_t inputs) { return inputs / kGroup * kGroupBytes; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    group_ = weights + k / kGroup * kGroupBytes;
  }

  template <int R, int C>
  BROS_INLINE static void multiply(const Int4Panel (&panels)[C], const char* x, int64_t x_stride,
                                   int64_t, Vec (&sum)[R][2 * C]) {
    static_assert(C == kPanels, "");
    const ActivationGroup* rows[R];
    for (int r = 0; r < R; ++r) {
      rows[r] = reinterpret_cast<const ActivationGroup*>(x + r * x_stride);
    }
    __m512i dot[R][2];
    panels[0].multiply_bytes([&](int r) { return rows[r]->high; }, dot);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const Vec scale = panels[0].scale(j), minimum = panels[0].minimum(j);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const Vec product = _mm512_cvtepi32_ps(dot[r][j]) * splat(rows[r]->high_scale);
        sum[r][j] = _mm512_fmadd_ps(product, scale, sum[r][j]);
        sum[r][j] = _mm512_fmadd_ps(minimum, splat(rows[r]->total), sum[r][j]);
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
    __m512i dot[R][2];
    multiply_bytes([&](int r) { return groups[r]->low; }, dot);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __mmask16 some = _cvtu32_mask16(
          width >= kPanelOutputs ? 0xffff : ((1u << width) - 1) >> j * kLanes & 0xffff);
      const Vec scale = this->scale(j);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        float* at = out + rows[r] * stride + j * kLanes;
        const Vec product = _mm512_cvtepi32_ps(dot[r][j]) * splat(groups[r]->low_scale);
        const Vec sum = _mm512_maskz_loadu_ps(some, at);
        _mm512_mask_storeu_ps(at, some, _mm512_fmadd_ps(product, scale, sum));
      }
    }
  }

  static void round(const float* x, int64_t inputs, char* out) {
    ActivationGroup* groups = reinterpret_cast<ActivationGroup*>(out);
    const int64_t count = inputs / kGroup;
    __m128 sum = {};
    for (int64_t g = 0; g < count; g += 4) {
      sum += largest_magnitudes(x + g * kGroup, static_cast<int>(min_of<int64_t>(4, count - g)));
    }
    const float mean = (sum[0] + sum[1] + (sum[2] + sum[3])) / static_cast<float>(count);
    const float limit = kOutlier * mean;
    for (int64_t g = 0; g < count; g += 4) {
      const int some = static_cast<int>(min_of<int64_t>(4, count - g));
      const float* at = x + g * kGroup;
      round_groups(at, some, largest_magnitudes(at, some), limit, groups + g);
    }
  }

 private:
  BROS_INLINE Vec scale(int j) const {
    return load(reinterpret_cast<const Fp16*>(group_) + j * kLanes);
  }
  BROS_INLINE Vec minimum(int j) const {
    return load(reinterpret_cast<const Fp16*>(group_) + kPanelOutputs + j * kLanes);
  }

  // dot[r][j]: codes of weights times the bytes of row r.
  template <int R, class Bytes>
  BROS_INLINE void multiply_bytes(const Bytes& bytes, __m512i (&dot)[R][2]) const {
    const uint32_t* eights = reinterpret_cast<const uint32_t*>(group_ + 4 * kPanelOutputs);
    for (int r = 0; r < R; ++r) dot[r][0] = dot[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      __m512i w[2];
      for (int j = 0; j < 2; ++j) {
        const uint32_t* at = eights + quad / 2 * kPanelOutputs + j * kLanes;
        const __m512i raw = bit_cast<__m512i>(load_int(at));
        w[j] = _mm512_and_si512(quad % 2 ? _mm512_srli_epi16(raw, 4) : raw, _mm512_set1_epi8(15));
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        int32_t a;
        __builtin_memcpy(&a, bytes(r) + 4 * quad, sizeof a);
        for (int j = 0; j < 2; ++j) {
          dot[r][j] = _mm512_dpbusd_epi32(dot[r][j], w[j], _mm512_set1_epi32(a));
        }
      }
    }
  }

  const char* group_;
};
#endif

}  // namespace
}  // namespace bros
