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
//     bytes(inputs)           of a panel
//     seek(weights, k)        goes to input k, a multiple of kStep, of the panel at `weights`
//     multiply(panels, x, x_stride, sum)
//                             sum[r][2 c + j] += row r of x, one step at x + r * x_stride, times
//                             vector j of panel c
//     round(x, inputs, out)   a row of activations as `multiply` takes it; fp32 if kRounds is false
//     Wide                    the format that a block is widened to for many rows, or itself
#pragma once

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
                                   Vec (&sum)[R][2 * C]) {
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
  static constexpr int kStep = 1, kStepBytes = 4;
  static int64_t bytes(int64_t inputs) { return inputs * kPanelOutputs * 4; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    values_ = reinterpret_cast<const float*>(weights) + k * kPanelOutputs;
  }
  BROS_INLINE Pair at(int) const { return {{load(values_), load(values_ + kLanes)}}; }

 private:
  const float* values_;
};

#if !defined(__AVX512BF16__)
struct Bf16Panel : ExactProducts<Bf16Panel> {
  using Wide = Fp32Panel;
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

#if !defined(__AVX512VNNI__)
struct Int8Panel : ExactProducts<Int8Panel> {
  using Wide = Fp32Panel;
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

#if defined(__AVX512BF16__)
struct Bf16Panel {
  using Wide = Bf16Panel;
  static constexpr bool kRounds = true;
  static constexpr int kTileRows = 12;  // sums: 24 of 32 registers
  static constexpr int kStep = 2, kStepBytes = 4;
  static int64_t bytes(int64_t inputs) { return inputs * kPanelOutputs * 2; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    pairs_ = reinterpret_cast<const uint32_t*>(weights) + k / 2 * kPanelOutputs;
  }

  template <int R, int C>
  BROS_INLINE static void multiply(const Bf16Panel (&panels)[C], const char* x, int64_t x_stride,
                                   Vec (&sum)[R][2 * C]) {
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

// ---- AVX-512 VNNI: activations are rounded to 16 bits in groups of 32, and products of codes are
// ---- summed exactly within a group. With codes w of weights, and two codes per activation:
//
//     a = kFine * high + low             |high|, |low| <= 127
//     sum over the group = scale_w * scale_a * (sum of w * a) + minimum_w * scale_a * (sum of a)
//
// With the high codes alone, int4 diverged from fp32 and answered plain questions wrongly
// (docs/decisions/0004).

#if defined(__AVX512VNNI__)
constexpr int32_t kFine = 254;

struct ActivationGroup {
  float scale;           // the largest magnitude / 127 / kFine; NaN if a value is not finite
  float total;           // scale * the sum of a
  int32_t shift[2];      // -128 * the sum of high, and of low codes
  int8_t codes[2][kGroup];  // high, low
};

BROS_INLINE void round_group(const float* x, ActivationGroup* out) {
  const Vec v[2] = {load(x), load(x + kLanes)};
  const __m512 magnitude[2] = {_mm512_abs_ps(v[0]), _mm512_abs_ps(v[1])};
  const __mmask16 finite =
      _mm512_cmp_ps_mask(magnitude[0], splat(__builtin_inff()), _CMP_LT_OQ) &
      _mm512_cmp_ps_mask(magnitude[1], splat(__builtin_inff()), _CMP_LT_OQ);
  const float most = _mm512_reduce_max_ps(_mm512_max_ps(magnitude[0], magnitude[1]));
  const bool usable = finite == 0xffff;
  const float to_code = usable && most > 1e-30f ? 127.0f / most : 0.0f;
  int32_t sums[2] = {0, 0};
  for (int j = 0; j < 2; ++j) {
    const __m512 scaled = v[j] * to_code;
    const __m512i high = _mm512_cvtps_epi32(scaled);
    const __m512 rest = _mm512_sub_ps(scaled, _mm512_cvtepi32_ps(high));  // at most 1/2
    const __m512i low = _mm512_cvtps_epi32(rest * static_cast<float>(kFine));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out->codes[0]) + j, _mm512_cvtsepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out->codes[1]) + j, _mm512_cvtsepi32_epi8(low));
    sums[0] += _mm512_reduce_add_epi32(high);
    sums[1] += _mm512_reduce_add_epi32(low);
  }
  out->scale = usable ? most / 127.0f / kFine : __builtin_nanf("");
  out->total = out->scale * static_cast<float>(kFine * sums[0] + sums[1]);
  for (int part = 0; part < 2; ++part) out->shift[part] = -128 * sums[part];
}

template <class Panel>
struct GroupProducts {
  using Wide = Panel;
  static constexpr bool kRounds = true;
  static constexpr int kTileRows = 4;  // sums of codes and of groups: 24 of 32 registers
  static constexpr int kStep = kGroup, kStepBytes = sizeof(ActivationGroup);

  template <int R, int C>
  BROS_INLINE static void multiply(const Panel (&panels)[C], const char* x, int64_t x_stride,
                                   Vec (&sum)[R][2 * C]) {
    const ActivationGroup* rows[R];
    for (int r = 0; r < R; ++r) {
      rows[r] = reinterpret_cast<const ActivationGroup*>(x + r * x_stride);
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      IntVec dot[R][2][2];  // [row][high, low][half of the panel]
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        for (int part = 0; part < 2; ++part) {
          dot[r][part][0] = dot[r][part][1] = splat_int(Panel::first(*rows[r], part));
        }
      }
#pragma GCC unroll 8
      for (int quad = 0; quad < kGroup / 4; ++quad) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          const __m512i w = bit_cast<__m512i>(panels[c].codes(quad, j));
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; ++part) {
              int32_t a;
              __builtin_memcpy(&a, rows[r]->codes[part] + 4 * quad, sizeof a);
              dot[r][part][j] = bit_cast<IntVec>(_mm512_dpbusd_epi32(
                  bit_cast<__m512i>(dot[r][part][j]), w, bit_cast<__m512i>(splat_int(a))));
            }
          }
        }
      }
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const Vec scale = panels[c].scale(j);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          Vec& to = sum[r][2 * c + j];
          const IntVec both = dot[r][0][j] * kFine + dot[r][1][j];
          to = _mm512_fmadd_ps(to_float(both), scale * rows[r]->scale, to);
          to = panels[c].add_minimum(to, j, *rows[r]);
        }
      }
    }
  }

  static void round(const float* x, int64_t inputs, char* out) {
    ActivationGroup* groups = reinterpret_cast<ActivationGroup*>(out);
    for (int64_t g = 0; g < inputs / kGroup; ++g) round_group(x + g * kGroup, groups + g);
  }
};

struct Int8Panel : GroupProducts<Int8Panel> {
  static constexpr int64_t kGroupBytes = kPanelOutputs * (4 + kGroup);
  static int64_t bytes(int64_t inputs) { return inputs / kGroup * kGroupBytes; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    group_ = weights + k / kGroup * kGroupBytes;
  }
  // The first factor of a product is unsigned: code + 128.
  BROS_INLINE IntVec codes(int quad, int j) const {
    const char* quads = group_ + 4 * kPanelOutputs;
    const uint32_t* at = reinterpret_cast<const uint32_t*>(quads) + quad * kPanelOutputs;
    return load_int(at + j * kLanes) ^ splat_int(static_cast<int32_t>(0x80808080));
  }
  BROS_INLINE static int32_t first(const ActivationGroup& x, int part) { return x.shift[part]; }
  BROS_INLINE Vec scale(int j) const {
    return load(reinterpret_cast<const float*>(group_) + j * kLanes);
  }
  BROS_INLINE Vec add_minimum(Vec sum, int, const ActivationGroup&) const { return sum; }

 private:
  const char* group_;
};

struct Int4Panel : GroupProducts<Int4Panel> {
  static constexpr int64_t kGroupBytes = kPanelOutputs * (4 + kGroup / 2);
  static int64_t bytes(int64_t inputs) { return inputs / kGroup * kGroupBytes; }

  BROS_INLINE void seek(const char* weights, int64_t k) {
    group_ = weights + k / kGroup * kGroupBytes;
  }
  BROS_INLINE IntVec codes(int quad, int j) const {
    const char* eights = group_ + 4 * kPanelOutputs;
    const uint32_t* at = reinterpret_cast<const uint32_t*>(eights) + quad / 2 * kPanelOutputs;
    return (load_int(at + j * kLanes) >> (quad % 2 * 4)) & splat_int(0x0f0f0f0f);
  }
  BROS_INLINE static int32_t first(const ActivationGroup&, int) { return 0; }
  BROS_INLINE Vec scale(int j) const {
    return load(reinterpret_cast<const Fp16*>(group_) + j * kLanes);
  }
  BROS_INLINE Vec add_minimum(Vec sum, int j, const ActivationGroup& x) const {
    const Fp16* minima = reinterpret_cast<const Fp16*>(group_) + kPanelOutputs;
    return _mm512_fmadd_ps(load(minima + j * kLanes), splat(x.total), sum);
  }

 private:
  const char* group_;
};
#endif

}  // namespace
}  // namespace bros
