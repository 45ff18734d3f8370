// One vector of floats, as wide as the instruction set of this object allows.
//
// Arithmetic uses GCC/Clang vector extensions (a * b + c contracts to FMA), and intrinsics only for
// operations that the extensions lack. Everything is in an unnamed namespace, and no header with
// inline functions of external linkage is included: otherwise the linker could pick the AVX-512
// copy of such a function for a machine without AVX-512.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define BROS_INLINE inline __attribute__((always_inline))

// Which instructions for products the object has beside FMA: of codes, of pairs of bf16, of tiles.
// With BROS_MODEL (kernels_amx_emulated.cpp) the last two are plain C++ (avx512_model.h, tiles.h).
#if defined(__AVX512VNNI__)
#define BROS_HAS_VNNI
#endif
#if defined(__AVX512BF16__) || defined(BROS_MODEL)
#define BROS_MULTIPLIES_PAIRS
#endif
#if defined(__AMX_TILE__) || defined(BROS_MODEL)
#define BROS_MULTIPLIES_TILES
#endif

namespace bros {
namespace {

#if defined(__AVX512F__) || defined(BROS_MODEL)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

constexpr float kInfinity = __builtin_inff();
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UintVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

template <class A, class B>
BROS_INLINE A bit_cast(const B& b) {
  static_assert(sizeof(A) == sizeof(B), "");
  A a;
  __builtin_memcpy(&a, &b, sizeof a);
  return a;
}

template <int N>
struct Number {
  static constexpr int value = N;
};

// body(Number<0>()), .. body(Number<N - 1>()).
template <int N, class Body>
BROS_INLINE void unrolled(const Body& body) {
  if constexpr (N > 0) {
    unrolled<N - 1>(body);
    body(Number<N - 1>());
  }
}

template <class T>
BROS_INLINE constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
BROS_INLINE constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}
BROS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
BROS_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

BROS_INLINE Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, also for -0, so it folds
BROS_INLINE IntVec splat_int(int32_t x) { return x - IntVec{}; }

BROS_INLINE Vec select(IntVec mask, Vec a, Vec b) {
  return bit_cast<Vec>((mask & bit_cast<IntVec>(a)) | (~mask & bit_cast<IntVec>(b)));
}

// The larger of each pair; b if a is NaN, as in x86 max.
BROS_INLINE Vec vmax(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return select(a > b, a, b);
#endif
}

BROS_INLINE float reduce_add(Vec a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(a);
#elif defined(__AVX2__)
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a[i] += a[i + half];
  }
  return a[0];
#endif
}

BROS_INLINE float reduce_max(Vec a) {
  float best = a[0];
  for (int i = 1; i < kLanes; ++i) best = max_of(best, a[i]);
  return best;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// All lanes, joined by an operation on two vectors of four.
template <class Join>
BROS_INLINE int32_t joined(IntVec a, const Join& join) {
  const __m256i v = bit_cast<__m256i>(a);
  __m128i x = join(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  x = join(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(join(x, _mm_shuffle_epi32(x, 0xb1)));
}
#endif

BROS_INLINE int32_t reduce_add(IntVec a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(bit_cast<__m512i>(a));
#elif defined(__AVX2__)
  return joined(a, [](__m128i x, __m128i y) { return _mm_add_epi32(x, y); });
#else
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += a[i];
  return sum;
#endif
}

BROS_INLINE int32_t reduce_max(IntVec a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(bit_cast<__m512i>(a));
#elif defined(__AVX2__)
  return joined(a, [](__m128i x, __m128i y) { return _mm_max_epi32(x, y); });
#else
  int32_t best = a[0];
  for (int i = 1; i < kLanes; ++i) best = max_of(best, a[i]);
  return best;
#endif
}

// Bit i is set if lane i of a mask is.
BROS_INLINE uint32_t lanes_set(IntVec mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(bit_cast<__m512i>(mask));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(bit_cast<__m256>(mask)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(mask[i] & 1) << i;
  return bits;
#endif
}

// Calls body(lane) for each lane of a mask that is set, in order.
template <class Body>
BROS_INLINE void for_each_lane_set(IntVec mask, const Body& body) {
  for (uint32_t bits = lanes_set(mask); bits; bits &= bits - 1) body(__builtin_ctz(bits));
}

// ---- loads and stores, converting to and from fp32 (to nearest even) -------------------------

BROS_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

BROS_INLINE Vec load(const Bf16* p) {
  HalfVec h;
  __builtin_memcpy(&h, p, sizeof h);
  return bit_cast<Vec>(__builtin_convertvector(h, IntVec) << 16);
}

BROS_INLINE Vec load(const Fp16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  // Scaling by 2^112 moves the exponent bias from 15 to 127, and makes subnormals normal.
  HalfVec h;
  __builtin_memcpy(&h, p, sizeof h);
  const IntVec bits = __builtin_convertvector(h, IntVec);
  const IntVec magnitude = (bits & 0x7fff) << 13;
  IntVec wide = bit_cast<IntVec>(bit_cast<Vec>(magnitude) * 0x1p112f);
  wide |= (magnitude >= splat_int(0x0f800000)) & 0x7f800000;  // infinity and NaN
  return bit_cast<Vec>(wide | ((bits & 0x8000) << 16));
#endif
}

BROS_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

BROS_INLINE void store(Bf16* p, Vec v) {
  IntVec bits = bit_cast<IntVec>(v);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const IntVec is_nan = v != v;
  const HalfVec h = __builtin_convertvector((bits & ~is_nan) | (is_nan & 0x7fc0), HalfVec);
  __builtin_memcpy(p, &h, sizeof h);
}

BROS_INLINE void store(Fp16* p, Vec v) {
#if defined(__AVX512F__)
  const __m256i h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  const __m128i h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#else
  const IntVec bits = bit_cast<IntVec>(v);
  const IntVec magnitude = bits & 0x7fffffff;
  // Below 2^-14 the result is subnormal: adding 0.5 leaves it, rounded, in the low ten bits.
  const IntVec small = bit_cast<IntVec>(bit_cast<Vec>(magnitude) + 0.5f) - 0x3f000000;
  const IntVec normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const IntVec is_small = magnitude < splat_int(113 << 23);
  const IntVec is_huge = magnitude >= splat_int(143 << 23);
  const IntVec is_nan = magnitude > splat_int(0x7f800000);
  IntVec out = (is_small & small) | (~is_small & normal);
  out = (is_huge & 0x7c00) | (~is_huge & out);
  out |= is_nan & 0x0200;
  const HalfVec h = __builtin_convertvector(out | ((bits >> 16) & 0x8000), HalfVec);
#endif
  __builtin_memcpy(p, &h, sizeof h);
}

// The first n < kLanes elements, then zeros.
template <class T>
BROS_INLINE Vec load_first(const T* p, int64_t n) {
#if defined(__AVX512F__)
  if (sizeof(T) == 4) return _mm512_maskz_loadu_ps((1u << n) - 1, p);
#endif
  T padded[kLanes] = {};
  __builtin_memcpy(padded, p, n * sizeof(T));
  return load(padded);
}

// The first n <= kLanes elements.
template <class T>
BROS_INLINE void store_first(T* p, Vec v, int64_t n) {
#if defined(__AVX512F__)
  if (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, (1u << n) - 1, v);
#endif
  T padded[kLanes];
  store(padded, v);
  __builtin_memcpy(p, padded, n * sizeof(T));
}

// Calls full(i) for every whole vector of n elements, then rest(i, count) for what is left.
template <class Full, class Rest>
BROS_INLINE void for_each_vector(int64_t n, const Full& full, const Rest& rest) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) full(i);
  if (i < n) rest(i, n - i);
}

template <class T>
BROS_INLINE void convert(T* out, const float* in, int64_t n) {
  for_each_vector(
      n, [&](int64_t i) { store(out + i, load(in + i)); },
      [&](int64_t i, int64_t m) { store_first(out + i, load_first(in + i, m), m); });
}

template <class T>
BROS_INLINE void widen(float* out, const T* in, int64_t n) {
  for_each_vector(
      n, [&](int64_t i) { store(out + i, load(in + i)); },
      [&](int64_t i, int64_t m) { store_first(out + i, load_first(in + i, m), m); });
}

// x in the precision of T.
template <class T>
BROS_INLINE Vec round_to(Vec x) {
  if (sizeof(T) == sizeof(float)) return x;
  T rounded[kLanes];
  store(rounded, x);
  return load(rounded);
}

#if defined(BROS_MODEL)
// The object has no FMA. A call: inlined into kernels it would take minutes to compile.
__attribute__((noinline, unused)) Vec fused(Vec a, Vec b, Vec c) {
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#endif

// a * b + c. In an expression with two products the compiler chooses which of them is rounded; here
// it is always `c`, if that is one, and never a * b where the CPU has FMA.
BROS_INLINE Vec mul_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(BROS_MODEL)
  return fused(a, b, c);
#else
  return a * b + c;
#endif
}

// The nearest integers, of two the even one, for |x| < 2^22.
BROS_INLINE IntVec round_to_int(Vec x) {
#if defined(__AVX512F__)
  return bit_cast<IntVec>(_mm512_cvtps_epi32(x));
#elif defined(__AVX2__)
  return bit_cast<IntVec>(_mm256_cvtps_epi32(x));
#else
  return bit_cast<IntVec>(x + kRoundMagic) - bit_cast<int32_t>(kRoundMagic);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Transposes both halves of four vectors: lane 4 h + j of vector i becomes lane 4 h + i of out[j].
BROS_INLINE void transpose_halves(const Vec* rows, Vec* out) {
  const __m256 low = _mm256_unpacklo_ps(rows[0], rows[1]);
  const __m256 high = _mm256_unpackhi_ps(rows[0], rows[1]);
  const __m256 next_low = _mm256_unpacklo_ps(rows[2], rows[3]);
  const __m256 next_high = _mm256_unpackhi_ps(rows[2], rows[3]);
  out[0] = _mm256_shuffle_ps(low, next_low, 0x44);
  out[1] = _mm256_shuffle_ps(low, next_low, 0xee);
  out[2] = _mm256_shuffle_ps(high, next_high, 0x44);
  out[3] = _mm256_shuffle_ps(high, next_high, 0xee);
}
#endif

// Transposes kLanes vectors: lane j of vector i becomes lane i of vector j.
BROS_INLINE void transpose(Vec* rows) {
#if defined(__AVX512F__)
  // u[4 g + c] has column 4 L + c of rows 4 g to 4 g + 3 in its quarter L.
  __m512 u[16];
  for (int i = 0; i < 16; i += 4) {
    const __m512 low = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    const __m512 high = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    const __m512 next_low = _mm512_unpacklo_ps(rows[i + 2], rows[i + 3]);
    const __m512 next_high = _mm512_unpackhi_ps(rows[i + 2], rows[i + 3]);
    const auto pair = [](__m512 a, __m512 b, bool second) {
      const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
      return _mm512_castpd_ps(second ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
    };
    u[i] = pair(low, next_low, false);
    u[i + 1] = pair(low, next_low, true);
    u[i + 2] = pair(high, next_high, false);
    u[i + 3] = pair(high, next_high, true);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 even = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88);
    const __m512 odd = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
    const __m512 next_even = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
    const __m512 next_odd = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_f32x4(even, next_even, 0x88);
    rows[4 + c] = _mm512_shuffle_f32x4(odd, next_odd, 0x88);
    rows[8 + c] = _mm512_shuffle_f32x4(even, next_even, 0xdd);
    rows[12 + c] = _mm512_shuffle_f32x4(odd, next_odd, 0xdd);
  }
#elif defined(__AVX2__)
  Vec u[8];
  for (int i = 0; i < 8; i += 4) transpose_halves(rows + i, u + i);
  for (int c = 0; c < 4; ++c) {
    rows[c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    rows[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float x = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = x;
    }
  }
#endif
}

// ---- exponentials -----------------------------------------------------------------------------

// 2^f for |f| <= 1/2. The polynomial is the minimax one of degree 5: relative error below 2.1e-7,
// rounding included.
BROS_INLINE Vec exp2_fraction(Vec f) {
  Vec p = splat(1.327647198e-3f);
  p = p * f + 9.675541334e-3f;
  p = p * f + 5.550713274e-2f;
  p = p * f + 2.402211972e-1f;
  p = p * f + 6.931469671e-1f;
  return p * f + 1.000000072f;
}

// 2^n * 2^f for integral n (given as round_magic + n) and |f| <= 1/2.
BROS_INLINE Vec scale_exp2(Vec magic_plus_n, Vec f) {
  const IntVec p = bit_cast<IntVec>(exp2_fraction(f));
  return bit_cast<Vec>(p + (bit_cast<IntVec>(magic_plus_n) << 23));
}

// 2^x for x <= 0; 0 below -126.
BROS_INLINE Vec exp2_nonpositive(Vec x) {
#if defined(__AVX512F__)
  // Four operations less, with the same results: attention of a prompt of 4,096 tokens takes 0.84 of
  // the time where tiles multiply (Xeon with AMX).
  const __mmask16 is_in_range = _mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_GE_OQ);
  const Vec rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_maskz_scalef_ps(is_in_range, exp2_fraction(rest), x - rest);
#else
  const IntVec in_range = x >= splat(-126.0f);
  const Vec clamped = vmax(x, splat(-126.0f));
  const Vec shifted = clamped + kRoundMagic;
  const Vec y = scale_exp2(shifted, clamped - (shifted - kRoundMagic));
  return bit_cast<Vec>(in_range & bit_cast<IntVec>(y));
#endif
}

// 2^(x - top) for x <= top, exactly 1 if they are equal.
BROS_INLINE Vec exp2_relative(Vec x, Vec top) {
  return select(x == top, splat(1.0f), exp2_nonpositive(x - top));
}

// e^x with x clamped to [-87, 87].
BROS_INLINE Vec exp_clamped(Vec x) {
#if defined(__AVX512F__)
  // Two operations less. _mm512_max_ps and _mm512_min_ps return their second operand if it is NaN, so
  // that NaN stays NaN.
  const Vec clamped = _mm512_min_ps(splat(87.0f), _mm512_max_ps(splat(-87.0f), x));
  const Vec n = _mm512_roundscale_ps(clamped * 1.44269504f,
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec rest = mul_add(clamped, splat(1.44269504f), -n);
  return _mm512_scalef_ps(exp2_fraction(mul_add(clamped, splat(1.925963e-8f), rest)), n);
#else
  // x - n ln 2 in two parts, so that the error stays relative for large |x|.
  const Vec clamped = -vmax(-vmax(x, splat(-87.0f)), splat(-87.0f));
  const Vec shifted = clamped * 1.44269504f + kRoundMagic;
  const Vec n = shifted - kRoundMagic;
  const Vec rest = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
  return scale_exp2(shifted, rest * 1.44269504f);
#endif
}

// e^x for x <= 0, within about one rounding, and 1 at 0; 0 below -87. A polynomial of degree 6 with
// the first two terms of the series has a relative error of 3.1e-9.
BROS_INLINE Vec exp_nonpositive(Vec x) {
  const IntVec in_range = x >= splat(-87.0f);
  const Vec clamped = vmax(x, splat(-87.0f));
  const Vec shifted = clamped * 1.44269504f + kRoundMagic;
  const Vec n = shifted - kRoundMagic;
  const Vec r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
  Vec q = splat(1.38146e-3f);
  q = q * r + 8.36872e-3f;
  q = q * r + 4.166839e-2f;
  q = q * r + 1.6666521e-1f;
  q = q * r + 4.9999993e-1f;
  const Vec p = (q * r) * r + r + 1.0f;
  const Vec y = bit_cast<Vec>(bit_cast<IntVec>(p) + (bit_cast<IntVec>(shifted) << 23));
  return bit_cast<Vec>(in_range & bit_cast<IntVec>(y));
}

}  // namespace
}  // namespace bros
