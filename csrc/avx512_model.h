// AVX-512 instructions in plain C++, under the names of their intrinsics, for the object that runs
// the kernels of AVX-512 VNNI and BF16 on any CPU (kernels_amx_emulated.cpp). Results are those
// that the manual defines (Intel SDM, volume 2), bit by bit, but for the payloads of NaNs.
//
// Only what the kernels use is here: what is missing does not compile.
#pragma once

#include "simd.h"

#if defined(BROS_MODEL)

// Not inlined: as part of unrolled kernels they would take minutes to compile.
#if defined(__clang__)
#define BROS_MODELLED __attribute__((noinline, unused)) static
#else
#define BROS_MODELLED __attribute__((noinline, unused, optimize("O3"))) static
#endif

namespace bros {
namespace {

// ---- Products of bf16: fp32 FMA, rounded to nearest even, with subnormals as zeros.

// Subnormals become zeros of their sign.
BROS_INLINE float without_subnormal(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  return bit_cast<float>(bits & (bits & 0x7f800000 ? 0xffffffff : 0x80000000));
}
BROS_INLINE Vec without_subnormals(Vec x) {
  for (int i = 0; i < kLanes; ++i) x[i] = without_subnormal(x[i]);
  return x;
}

// a * b + c, where a and b have the precision of bf16. Their product then is exact in fp32, and the
// sum is rounded once, unless a product leaves the range of fp32: then libm's FMA computes all
// lanes. (A sum that is just below the smallest normal number and rounds to it counts as normal.)
BROS_MODELLED Vec bf16_mul_add(Vec a, Vec b, Vec c) {
  float x[kLanes], y[kLanes], z[kLanes], sum[kLanes];
  __builtin_memcpy(x, &a, sizeof a);
  __builtin_memcpy(y, &b, sizeof b);
  __builtin_memcpy(z, &c, sizeof c);
  uint32_t leaves = 0;
  const auto exponent = [](float value) { return bit_cast<uint32_t>(value) & 0x7f800000; };
  for (int i = 0; i < kLanes; ++i) {
    x[i] = without_subnormal(x[i]);
    y[i] = without_subnormal(y[i]);
    z[i] = without_subnormal(z[i]);
    const float product = x[i] * y[i];
    const uint32_t size = exponent(product);
    leaves |= (size == 0x7f800000) | ((size == 0) & (exponent(x[i]) != 0) & (exponent(y[i]) != 0));
    sum[i] = without_subnormal(product + z[i]);
  }
  for (int i = 0; leaves && i < kLanes; ++i) {
    sum[i] = without_subnormal(__builtin_fmaf(x[i], y[i], z[i]));
  }
  return bit_cast<Vec>(sum);
}

BROS_INLINE Vec low_bf16(IntVec pairs) { return bit_cast<Vec>(pairs << 16); }
BROS_INLINE Vec high_bf16(IntVec pairs) {
  return bit_cast<Vec>(pairs & static_cast<int32_t>(0xffff0000));
}

// ---- Types, and what moves and converts between them.

typedef Vec __m512;
typedef IntVec __m512i;
typedef uint16_t __m512bh __attribute__((vector_size(64)));
typedef int32_t __m256i __attribute__((vector_size(32)));
typedef uint16_t __m256bh __attribute__((vector_size(32)));
typedef float __m128 __attribute__((vector_size(16)));
typedef int32_t __m128i __attribute__((vector_size(16)));
typedef uint16_t __mmask16;
typedef uint8_t __mmask8;

typedef int16_t ShortVec __attribute__((vector_size(64)));
typedef uint16_t WordVec __attribute__((vector_size(64)));

BROS_INLINE __mmask16 _cvtu32_mask16(uint32_t bits) { return static_cast<__mmask16>(bits); }

BROS_MODELLED __m512i _mm512_setzero_si512() { return IntVec{}; }
BROS_MODELLED __m512i _mm512_set1_epi32(int32_t x) { return splat_int(x); }
BROS_MODELLED __m512i _mm512_set1_epi8(int8_t x) { return splat_int(0x01010101 * (x & 0xff)); }
BROS_MODELLED __m128 _mm_set1_ps(float x) { return __m128{x, x, x, x}; }

BROS_MODELLED __m512i _mm512_load_si512(const void* p) {
  __m512i v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

BROS_MODELLED __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* p) {
  uint16_t some[16] = {};
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) some[i] = static_cast<const uint16_t*>(p)[i];
  }
  return bit_cast<__m256i>(some);
}
BROS_MODELLED __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* p) {
  int32_t some[16] = {};
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) __builtin_memcpy(some + i, static_cast<const char*>(p) + 4 * i, 4);
  }
  return bit_cast<__m512i>(some);
}
BROS_MODELLED void _mm512_mask_storeu_epi32(void* p, __mmask16 mask, __m512i v) {
  for (int i = 0; i < 16; ++i) {
    const int32_t x = v[i];
    if (mask >> i & 1) __builtin_memcpy(static_cast<char*>(p) + 4 * i, &x, 4);
  }
}
BROS_MODELLED __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* p) {
  return bit_cast<__m512>(_mm512_maskz_loadu_epi32(mask, p));
}
BROS_MODELLED void _mm512_mask_storeu_ps(float* p, __mmask16 mask, __m512 v) {
  _mm512_mask_storeu_epi32(p, mask, bit_cast<__m512i>(v));
}
BROS_MODELLED void _mm256_storeu_si256(__m256i* p, __m256i v) { __builtin_memcpy(p, &v, sizeof v); }
BROS_MODELLED void _mm_storeu_si128(__m128i* p, __m128i v) { __builtin_memcpy(p, &v, sizeof v); }
BROS_MODELLED void _mm_storeu_ps(float* p, __m128 v) { __builtin_memcpy(p, &v, sizeof v); }

template <int N, class Half, class Whole>
BROS_INLINE Half part_of(const Whole& v) {
  Half parts[2];
  __builtin_memcpy(parts, &v, sizeof v);
  return parts[N];
}
BROS_MODELLED __m256i _mm512_castsi512_si256(__m512i v) { return part_of<0, __m256i>(v); }
BROS_MODELLED __m128i _mm256_castsi256_si128(__m256i v) { return part_of<0, __m128i>(v); }
BROS_MODELLED __m256i _mm512_extracti64x4_epi64(__m512i v, int) { return part_of<1, __m256i>(v); }
BROS_MODELLED __m128i _mm256_extracti128_si256(__m256i v, int) { return part_of<1, __m128i>(v); }
BROS_MODELLED __m128 _mm_castsi128_ps(__m128i v) { return bit_cast<__m128>(v); }

BROS_MODELLED __m512 _mm512_cvtepi32_ps(__m512i v) { return __builtin_convertvector(v, __m512); }
BROS_MODELLED __m128 _mm_cvtepi32_ps(__m128i v) { return __builtin_convertvector(v, __m128); }
BROS_MODELLED __m512i _mm512_cvtps_epi32(__m512 v) {
  __m512i out;
  for (int i = 0; i < 16; ++i) {
    const bool fits = __builtin_fabsf(v[i]) < 0x1p31f;
    out[i] = fits ? static_cast<int32_t>(__builtin_lrintf(v[i])) : -0x7fffffff - 1;
  }
  return out;
}
BROS_MODELLED __m512i _mm512_cvtepu16_epi32(__m256i v) {
  return __builtin_convertvector(bit_cast<HalfVec>(v), __m512i);
}
BROS_MODELLED __m256i _mm512_cvtsepi32_epi16(__m512i v) {
  int16_t out[16];
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<int16_t>(max_of(min_of(v[i], 32767), -32768));
  }
  return bit_cast<__m256i>(out);
}
BROS_MODELLED __m128i _mm512_cvtsepi32_epi8(__m512i v) {
  int8_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = static_cast<int8_t>(max_of(min_of(v[i], 127), -128));
  return bit_cast<__m128i>(out);
}
BROS_MODELLED __m128i _mm512_cvtepi32_epi8(__m512i v) {
  int8_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = static_cast<int8_t>(v[i]);
  return bit_cast<__m128i>(out);
}

BROS_MODELLED __m256bh _mm512_cvtneps_pbh(__m512 x) {
  const IntVec bits = bit_cast<IntVec>(without_subnormals(x));
  const IntVec is_nan = x != x;
  const IntVec rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const IntVec words = ((is_nan & (bits | 0x400000)) | (~is_nan & rounded)) >> 16;
  return __builtin_convertvector(words, __m256bh);
}
BROS_MODELLED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  const __m256bh halves[2] = {_mm512_cvtneps_pbh(low), _mm512_cvtneps_pbh(high)};
  return bit_cast<__m512bh>(halves);
}

// ---- Shuffles.

enum _MM_PERM_ENUM {};
// In each quarter: elements a[0], b[0], a[1], b[1] of the low half, or of the high half.
template <int kHigh, class T>
BROS_INLINE __m512i unpack(__m512i a, __m512i b) {
  constexpr int kQuarter = 16 / sizeof(T);
  T from[2][4 * kQuarter], to[4 * kQuarter];
  __builtin_memcpy(from[0], &a, sizeof a);
  __builtin_memcpy(from[1], &b, sizeof b);
  for (int i = 0; i < 4 * kQuarter; ++i) {
    const int quarter = i / kQuarter * kQuarter;
    to[i] = from[i % 2][quarter + kHigh * kQuarter / 2 + i % kQuarter / 2];
  }
  return bit_cast<__m512i>(to);
}
BROS_MODELLED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
  return unpack<0, int32_t>(a, b);
}
BROS_MODELLED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
  return unpack<1, int32_t>(a, b);
}
BROS_MODELLED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  return unpack<0, int64_t>(a, b);
}
BROS_MODELLED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  return unpack<1, int64_t>(a, b);
}
BROS_MODELLED __m512i _mm512_shuffle_epi32(__m512i v, _MM_PERM_ENUM order) {
  __m512i out;
  for (int i = 0; i < 16; ++i) out[i] = v[i / 4 * 4 + (static_cast<int>(order) >> i % 4 * 2 & 3)];
  return out;
}
BROS_MODELLED __m512i _mm512_permutexvar_epi16(__m512i order, __m512i v) {
  const WordVec words = bit_cast<WordVec>(v), places = bit_cast<WordVec>(order);
  WordVec out;
  for (int i = 0; i < 32; ++i) out[i] = words[places[i] & 31];
  return bit_cast<__m512i>(out);
}

// ---- Arithmetic.

template <class T>
BROS_INLINE T larger_of(T a, T b) {
  const T mask = a > b;
  return (mask & a) | (~mask & b);
}
BROS_MODELLED __m512i _mm512_add_epi32(__m512i a, __m512i b) { return a + b; }
BROS_MODELLED __m256i _mm256_add_epi32(__m256i a, __m256i b) { return a + b; }
BROS_MODELLED __m128i _mm_add_epi32(__m128i a, __m128i b) { return a + b; }
BROS_MODELLED __m512i _mm512_sub_epi32(__m512i a, __m512i b) { return a - b; }
BROS_MODELLED __m512i _mm512_max_epi32(__m512i a, __m512i b) { return larger_of(a, b); }
BROS_MODELLED __m256i _mm256_max_epi32(__m256i a, __m256i b) { return larger_of(a, b); }
BROS_MODELLED __m128i _mm_max_epi32(__m128i a, __m128i b) { return larger_of(a, b); }
BROS_MODELLED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
BROS_MODELLED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
BROS_MODELLED __m512i _mm512_slli_epi32(__m512i v, int n) { return v << n; }
BROS_MODELLED __m512i _mm512_srai_epi32(__m512i v, int n) { return v >> n; }
BROS_MODELLED __m512i _mm512_slli_epi16(__m512i v, int n) {
  return bit_cast<__m512i>(bit_cast<WordVec>(v) << n);
}
BROS_MODELLED __m512i _mm512_srli_epi16(__m512i v, int n) {
  return bit_cast<__m512i>(bit_cast<WordVec>(v) >> n);
}
BROS_MODELLED __m512i _mm512_srai_epi16(__m512i v, int n) {
  return bit_cast<__m512i>(bit_cast<ShortVec>(v) >> n);
}

BROS_MODELLED __m512 _mm512_abs_ps(__m512 v) {
  return bit_cast<__m512>(bit_cast<IntVec>(v) & 0x7fffffff);
}
BROS_MODELLED __m512 _mm512_max_ps(__m512 a, __m512 b) { return vmax(a, b); }
BROS_MODELLED float _mm512_reduce_max_ps(__m512 v) { return reduce_max(v); }
BROS_MODELLED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
BROS_MODELLED __m128 _mm_mul_ps(__m128 a, __m128 b) { return a * b; }
BROS_MODELLED __m128 _mm_mask_div_ps(__m128 other, __mmask8 mask, __m128 a, __m128 b) {
  for (int i = 0; i < 4; ++i) other[i] = mask >> i & 1 ? a[i] / b[i] : other[i];
  return other;
}
BROS_MODELLED __m128 _mm_maskz_div_ps(__mmask8 mask, __m128 a, __m128 b) {
  return _mm_mask_div_ps(__m128{}, mask, a, b);
}
BROS_MODELLED __m128 _mm_mask_blend_ps(__mmask8 mask, __m128 a, __m128 b) {
  for (int i = 0; i < 4; ++i) a[i] = mask >> i & 1 ? b[i] : a[i];
  return a;
}

// Ordered comparisons: false if one of the two is NaN.
enum Comparison { _CMP_LT_OQ, _CMP_GT_OQ };
BROS_MODELLED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, Comparison how) {
  return static_cast<__mmask16>(lanes_set(how == _CMP_LT_OQ ? a < b : a > b));
}
BROS_MODELLED __mmask8 _mm_cmp_ps_mask(__m128 a, __m128 b, Comparison how) {
  int mask = 0;
  for (int i = 0; i < 4; ++i) mask |= (how == _CMP_LT_OQ ? a[i] < b[i] : a[i] > b[i]) << i;
  return static_cast<__mmask8>(mask);
}

// ---- Dot products of neighbours, added to `sum`.

// Of unsigned bytes `a` and signed bytes `b`.
BROS_MODELLED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  for (int at = 0; at < 32; at += 8) {
    sum += (a >> at & 255) * (b << (24 - at) >> 24);
  }
  return sum;
}
// Of signed words.
BROS_MODELLED __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
  sum += (a << 16 >> 16) * (b << 16 >> 16);
  return sum + (a >> 16) * (b >> 16);
}
// Of bf16, the second ones first.
BROS_MODELLED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const IntVec x = bit_cast<IntVec>(a), y = bit_cast<IntVec>(b);
  sum = bf16_mul_add(high_bf16(x), high_bf16(y), sum);
  return bf16_mul_add(low_bf16(x), low_bf16(y), sum);
}

}  // namespace
}  // namespace bros

#endif
