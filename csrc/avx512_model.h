// AVX-512 instructions in plain C++, under the names of their intrinsics, for the object that runs
// the kernels of AMX on any CPU (kernels_amx_emulated.cpp). Results are those that the manual defines
// (Intel SDM, volume 2), bit by bit, but for the payloads of NaNs.
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
typedef int8_t __m128i __attribute__((vector_size(16)));
typedef int32_t __m256i __attribute__((vector_size(32)));
typedef uint16_t __m256bh __attribute__((vector_size(32)));
typedef uint16_t __mmask16;

BROS_MODELLED __m512i _mm512_set1_epi32(int32_t x) { return splat_int(x); }

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

BROS_MODELLED __m512i _mm512_cvtepi8_epi32(__m128i v) {
  return __builtin_convertvector(v, __m512i);
}
BROS_MODELLED __m512i _mm512_cvtepu16_epi32(__m256i v) {
  return __builtin_convertvector(bit_cast<HalfVec>(v), __m512i);
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

BROS_MODELLED __m512i _mm512_permutexvar_epi16(__m512i order, __m512i v) {
  const WordVec words = bit_cast<WordVec>(v), places = bit_cast<WordVec>(order);
  WordVec out;
  for (int i = 0; i < 32; ++i) out[i] = words[places[i] & 31];
  return bit_cast<__m512i>(out);
}

// ---- Arithmetic.

BROS_MODELLED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
BROS_MODELLED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
BROS_MODELLED __m512i _mm512_slli_epi32(__m512i v, int n) { return v << n; }

// sum += products of the two bf16 of each lane, the second ones first.
BROS_MODELLED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const IntVec x = bit_cast<IntVec>(a), y = bit_cast<IntVec>(b);
  sum = bf16_mul_add(high_bf16(x), high_bf16(y), sum);
  return bf16_mul_add(low_bf16(x), low_bf16(y), sum);
}

}  // namespace
}  // namespace bros

#endif
