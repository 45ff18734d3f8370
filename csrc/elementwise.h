// Norms, rotary embedding with cache writes, and gated activation: one pass over each token.
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace bros {
namespace {

BROS_INLINE float sum_of_squares(const float* x, int64_t n) {
  Vec even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vec a = load(x + i), b = load(x + i + kLanes);
    even += a * a;
    odd += b * b;
  }
  for_each_vector(
      n - i, [&](int64_t j) { even += load(x + i + j) * load(x + i + j); },
      [&](int64_t j, int64_t m) {
        const Vec a = load_first(x + i + j, m);
        odd += a * a;
      });
  return reduce_add(even + odd);
}

// out = x / rms(x) * weight; out may be x.
BROS_INLINE void norm_one(float* out, const float* x, const float* weight, int64_t n, float eps) {
  const float mean = sum_of_squares(x, n) / static_cast<float>(n);
  const float scale = 1.0f / __builtin_sqrtf(mean + eps);
  for_each_vector(
      n, [&](int64_t i) { store(out + i, load(x + i) * scale * load(weight + i)); },
      [&](int64_t i, int64_t m) {
        store_first(out + i, load_first(x + i, m) * scale * load_first(weight + i, m), m);
      });
}

const char* rms_norm(const RmsNormArgs& a) {
  parallel_for(a.tokens, a.tokens * a.size, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = a.x + t * a.size;
      if (a.residual) {
        float* sum = a.residual + t * a.size;
        for_each_vector(
            a.size, [&](int64_t i) { store(sum + i, load(sum + i) + load(x + i)); },
            [&](int64_t i, int64_t m) {
              store_first(sum + i, load_first(sum + i, m) + load_first(x + i, m), m);
            });
        x = sum;
      }
      norm_one(a.out + t * a.size, x, a.weight, a.size, a.eps);
    }
  });
  return nullptr;
}

// silu(gate) * up.
BROS_INLINE Vec silu_times(Vec gate, Vec up) {
  return gate / (1.0f + exp_clamped(-gate)) * up;
}

const char* silu_and_mul(const SiluArgs& a) {
  parallel_for(a.tokens, 3 * a.tokens * a.size, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* gate = a.in + t * 2 * a.size;
      const float* up = gate + a.size;
      float* out = a.out + t * a.size;
      for_each_vector(
          a.size, [&](int64_t i) { store(out + i, silu_times(load(gate + i), load(up + i))); },
          [&](int64_t i, int64_t m) {
            store_first(out + i, silu_times(load_first(gate + i, m), load_first(up + i, m)), m);
          });
    }
  });
  return nullptr;
}

// Rotates the pairs (x[i], x[i + half]) by the angles with these `half` cosines, then sines.
BROS_INLINE void rotate_one(float* x, const float* cos_sin, int64_t half) {
  const float* cosines = cos_sin;
  const float* sines = cos_sin + half;
  for_each_vector(
      half,
      [&](int64_t i) {
        const Vec a = load(x + i), b = load(x + i + half);
        const Vec c = load(cosines + i), s = load(sines + i);
        store(x + i, a * c - b * s);
        store(x + i + half, b * c + a * s);
      },
      [&](int64_t i, int64_t m) {
        const Vec a = load_first(x + i, m), b = load_first(x + i + half, m);
        const Vec c = load_first(cosines + i, m), s = load_first(sines + i, m);
        store_first(x + i, a * c - b * s, m);
        store_first(x + i + half, b * c + a * s, m);
      });
}

template <class T>
void rope_and_cache_token(const RopeArgs& a, int64_t token) {
  const HeadLayout& layout = a.layout;
  const int64_t dim = layout.head_dim;
  const int64_t rotated_heads = layout.heads + layout.kv_heads;
  float* q = a.qkv + token * (rotated_heads + layout.kv_heads) * dim;
  const float* cos_sin =
      a.cos_sin ? a.cos_sin + static_cast<int64_t>(a.positions[token]) * a.rotary_dim : nullptr;
  for (int64_t head = 0; head < rotated_heads; ++head) {
    float* x = q + head * dim;
    const float* norm = head < layout.heads ? a.q_norm : a.k_norm;
    if (norm) norm_one(x, x, norm, dim, a.eps);
    if (cos_sin) rotate_one(x, cos_sin, a.rotary_dim / 2);
  }
  const float* k = q + layout.heads * dim;
  const float* v = k + layout.kv_heads * dim;
  const int64_t block = a.slots[token] / a.cache.block_size;
  const int64_t offset = a.slots[token] % a.cache.block_size;
  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    const int64_t row = (block * layout.kv_heads + head) * a.cache.block_size + offset;
    convert(static_cast<T*>(a.cache.k) + row * dim, k + head * dim, dim);
    convert(static_cast<T*>(a.cache.v) + row * dim, v + head * dim, dim);
  }
}

const char* rope_and_cache(const RopeArgs& a) {
  const int64_t columns =
      (a.layout.heads + 2 * static_cast<int64_t>(a.layout.kv_heads)) * a.layout.head_dim;
  parallel_for(a.tokens, a.tokens * columns, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      switch (a.cache.type) {
        case KvType::kFp32:
          rope_and_cache_token<float>(a, t);
          break;
        case KvType::kBf16:
          rope_and_cache_token<Bf16>(a, t);
          break;
        case KvType::kFp16:
          rope_and_cache_token<Fp16>(a, t);
          break;
      }
    }
  });
  return nullptr;
}

}  // namespace
}  // namespace bros
