// What attention multiplies: words of 32 bits, each with one number or with several neighbours along
// a sum. Words are as floats in memory, whatever they hold.
//
//     kPerWord    numbers of a word
//     kStep       numbers that a product adds to a sum at once; what is missing from the last ones is 0
//     kByTiles    whether tile registers multiply them (attention_registers.h)
#pragma once

#include <type_traits>

#include "avx512_model.h"
#include "simd.h"

namespace bros {
namespace {

BROS_INLINE Vec splat_word(const float* word) {
  int32_t bits;
  __builtin_memcpy(&bits, word, sizeof bits);
  return bit_cast<Vec>(splat_int(bits));
}

// A number in fp32.
struct Floats {
  static constexpr int kPerWord = 1;
  static constexpr int kStep = kPerWord;
  static constexpr bool kByTiles = false;

  // sum plus the products of the numbers of a and b, in their order.
  BROS_INLINE static Vec add_product(Vec sum, Vec a, Vec b) { return mul_add(a, b, sum); }
  BROS_INLINE static Vec add_numbers(Vec sum, Vec words) { return sum + words; }
  BROS_INLINE static Vec rounded(Vec x) { return x; }
  BROS_INLINE static Vec join(const Vec (&x)[1]) { return x[0]; }

  // Words of the numbers at `x`, rows of the cache's type, in fp32.
  template <class T>
  BROS_INLINE static Vec load_row(const T* x, int64_t word) {
    return load(x + word);
  }
  template <class T>
  BROS_INLINE static Vec load_row_first(const T* x, int64_t word, int64_t n) {
    return load_first(x + word, n);
  }
  // Words that have the same element of consecutive rows; of the first n < kLanes if n > 0.
  template <class T>
  BROS_INLINE static Vec load_column(const T* const* rows, int64_t, int64_t d, int64_t n) {
    return n ? load_first(rows[0] + d, n) : load(rows[0] + d);
  }

  // Writes n numbers, rounded to T, as words of neighbours.
  template <class S, class T>
  BROS_INLINE static void put_row(float* words, const S* x, int64_t n) {
    for_each_vector(
        n, [&](int64_t i) { store(words + i, round_to<T>(load(x + i))); },
        [&](int64_t i, int64_t m) { store_first(words + i, round_to<T>(load_first(x + i, m)), m); });
  }
  // Writes number `part` of n words; those after it become 0.
  template <class S, class T>
  BROS_INLINE static void put_column(float* words, const S* x, int64_t n, int) {
    put_row<S, T>(words, x, n);
  }
  // Writes all numbers of n words, from kPerWord rows.
  template <class S, class T>
  BROS_INLINE static void put_columns(float* words, const S* x, int64_t, int64_t n) {
    put_row<S, T>(words, x, n);
  }
};

#if defined(BROS_MULTIPLIES_PAIRS)
// Two numbers in bf16, the first in the low half.
struct Bf16Pairs {
  static constexpr int kPerWord = 2;
  static constexpr int kStep = kPerWord;
  static constexpr bool kByTiles = false;

  BROS_INLINE static Vec add_product(Vec sum, Vec a, Vec b) {
    return _mm512_dpbf16_ps(sum, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
  }
  BROS_INLINE static Vec add_numbers(Vec sum, Vec words) {
    const __m512i bits = bit_cast<__m512i>(words);
    sum += bit_cast<Vec>(_mm512_slli_epi32(bits, 16));
    return sum + bit_cast<Vec>(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
  }
  BROS_INLINE static Vec rounded(Vec x) {
    return bit_cast<Vec>(_mm512_slli_epi32(halves(_mm512_cvtneps_pbh(x)), 16));
  }
  BROS_INLINE static Vec join(const Vec (&x)[2]) {
    alignas(64) static constexpr int16_t kOrder[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i bits = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(x[1], x[0]));
    return bit_cast<Vec>(_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), bits));
  }

  BROS_INLINE static Vec load_row(const Bf16* x, int64_t word) {
    return load(reinterpret_cast<const float*>(x) + word);
  }
  BROS_INLINE static Vec load_row_first(const Bf16* x, int64_t word, int64_t n) {
    return load_first(reinterpret_cast<const float*>(x) + word, n);
  }
  BROS_INLINE static Vec load_column(const Bf16* const* rows, int64_t left, int64_t d, int64_t n) {
    const __m512i first = load_halves(rows[0] + d, n);
    if (left < 2) return bit_cast<Vec>(first);
    return bit_cast<Vec>(
        _mm512_or_si512(first, _mm512_slli_epi32(load_halves(rows[1] + d, n), 16)));
  }

  template <class S, class T>
  BROS_INLINE static void put_row(float* words, const S* x, int64_t n) {
    if constexpr (std::is_same_v<S, Bf16>) {
      __builtin_memcpy(words, x, n * sizeof *x);
    } else {
      convert_to_bf16(reinterpret_cast<char*>(words), x, n);
    }
  }
  template <class S, class T>
  BROS_INLINE static void put_column(float* words, const S* x, int64_t n, int part) {
    for_each_vector(
        n, [&](int64_t i) { put(words + i, load(x + i), kLanes, part); },
        [&](int64_t i, int64_t m) { put(words + i, load_first(x + i, m), m, part); });
  }
  template <class S, class T>
  BROS_INLINE static void put_columns(float* words, const S* x, int64_t stride, int64_t n) {
    const S* rows[] = {x, x + stride};
    if constexpr (std::is_same_v<S, Bf16>) {
      for_each_vector(
          n, [&](int64_t i) { store(words + i, load_column(rows, 2, i, 0)); },
          [&](int64_t i, int64_t m) { store_first(words + i, load_column(rows, 2, i, m), m); });
    } else {
      for_each_vector(
          n, [&](int64_t i) { store(words + i, join({load(rows[0] + i), load(rows[1] + i)})); },
          [&](int64_t i, int64_t m) {
            const Vec word = join({load_first(rows[0] + i, m), load_first(rows[1] + i, m)});
            store_first(words + i, word, m);
          });
    }
  }

 private:
  BROS_INLINE static __m512i halves(__m256bh x) {
    return _mm512_cvtepu16_epi32(bit_cast<__m256i>(x));
  }
  BROS_INLINE static __m512i load_halves(const Bf16* x, int64_t n) {
    const __mmask16 mask = static_cast<__mmask16>(n ? (1 << n) - 1 : 0xffff);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x));
  }
  template <class S>
  BROS_INLINE static void convert_to_bf16(char* to, const S* x, int64_t n) {
    for_each_vector(
        n, [&](int64_t i) { store_numbers(to + 2 * i, load(x + i), kLanes); },
        [&](int64_t i, int64_t m) { store_numbers(to + 2 * i, load_first(x + i, m), m); });
  }
  BROS_INLINE static void store_numbers(char* to, Vec x, int64_t n) {
    const __m256bh numbers = _mm512_cvtneps_pbh(x);
    __builtin_memcpy(to, &numbers, 2 * n);
  }
  BROS_INLINE static void put(float* words, Vec x, int64_t n, int part) {
    const __mmask16 mask = static_cast<__mmask16>(0xffff >> (kLanes - n));
    __m512i bits = halves(_mm512_cvtneps_pbh(x));
    if (part) {
      bits = _mm512_slli_epi32(bits, 16);
      bits = _mm512_or_si512(bits, _mm512_maskz_loadu_epi32(mask, words));
    }
    _mm512_mask_storeu_epi32(words, mask, bits);
  }
};
#endif

}  // namespace
}  // namespace bros
