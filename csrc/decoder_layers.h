// A decoder, or some of its layers, without Python between its kernels.
//
//   tokens ─▶ residual
//   each layer
//     residual + delta ─▶ norm ─▶ q, k, v ─▶ RoPE, K and V cached ─▶ attention ─▶ out ─▶ + residual
//     residual         ─▶ norm ─▶ gate, up ─▶ silu(gate) * up ─▶ down ─▶ delta of the next layer
//   residual + delta ─▶ norm ─▶ lm_head ─▶ logits
//
// Buffers of [tokens, features] take turns: a kernel reads one and writes the other.
//
//   even   | norm      | attended | norm         | gated  |
//   odd    |   q, k, v |      out |     gate, up |        |  ─▶ delta
//
// Where there are rows enough for every thread, each computes parts of them alone (PartRows). Threads
// then wait for each other three times in a layer and not after each of a dozen kernels, and the rows
// of a part stay in the cache of its core, if they fit. Only the residual, q, k and v, attended and
// delta are [tokens, features]; a thread has its own even and odd for a part.
//
//   rows of a part     norm ─▶ q, k, v ─▶ RoPE, K and V cached      all threads wait
//   queries and heads  attention                                    all threads wait
//   rows of a part     out ─▶ + residual ─▶ norm ─▶ MLP             all threads wait
//
// These are the kernels that decoder.py calls for such a layer, but for the MLP, which is one kernel
// with the bits of three (mlp.h), with the same arguments or those of some of the rows. No row
// depends on others outside of the attention, so the results have the same bits.
#pragma once

#include <string.h>

#include <initializer_list>

#include "checks.h"
#include "parallel.h"

namespace bros {
namespace {

// kernels/cpu_ops.py has the same layout of a LayerWeights as LAYER.
struct Product {
  const void* weights;
  const float* bias;  // or null
  int64_t format;     // WeightFormat
  int64_t outputs;
  int64_t inputs;
};

struct LayerWeights {
  const float* attention_norm;
  const float* mlp_norm;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;  // [head_dim] or null
  int64_t rotates;      // whether positions rotate q and k
  Product qkv;
  Product attention_out;
  Product gate_up;
  Product down;
};

// kernels/cpu_ops.py has the same layout as ENDS.
struct DecoderEnds {
  Product embedding;  // [vocab, hidden], as weights of a product; not int4
  const float* final_norm;
  Product head;
};

struct LayerKv {
  void* k;
  void* v;
};

struct LayersArgs {
  const LayerWeights* weights;  // [layers]
  const LayerKv* kv;            // [layers]
  int64_t layers;
  int64_t first, end;           // the layers to compute
  const DecoderEnds* ends;      // where there are token_ids or logits
  const int32_t* token_ids;     // [tokens], whose embeddings fill `residual` first; or null
  float* residual;              // [tokens, hidden]
  const float* delta;           // [tokens, hidden] or null, before the first layer
  float* new_delta;             // [max(tokens, num_rows), hidden], after any layer
  RopeArgs rope;                // qkv, K, V and norms: set for each layer
  AttentionArgs attention;      // out, qkv, K and V: set for each layer
  bool keeps_all;               // else the last layer to compute keeps these:
  const int32_t* rows;          // [num_rows]
  int64_t num_rows;             // 0 if it keeps all
  float* residual_of_rows;      // [num_rows, hidden], after the last layer
  float* hidden;                // [kept rows, hidden] after the final norm; null: without them
  float* logits;                // [num_logits, vocab], of the first of these rows
  int64_t num_logits;
};

EmbedArgs embed_of(const LayersArgs& a) {
  const Product& p = a.ends->embedding;
  return {a.residual, a.token_ids, p.weights, static_cast<WeightFormat>(p.format),
          a.rope.tokens, p.inputs, p.outputs, a.rope.threads};
}

const char* check_layers(const LayersArgs& a) {
  if (a.first < 0 || a.first > a.end || a.end > a.layers) return "layers outside the decoder";
  if (const char* error = check_rope(a.rope)) return error;
  if (a.token_ids) {
    if (const char* error = check_embed(embed_of(a))) return error;
  }
  for (int64_t i = 0; i < a.num_rows; ++i) {
    if (a.rows[i] < 0 || a.rows[i] >= a.rope.tokens) return "row outside the step";
  }
  if (a.num_logits > (a.keeps_all ? a.rope.tokens : a.num_rows)) {
    return "more rows have logits than there are";
  }
  return check_attention(a.attention);
}

void copy_rows(float* to, const float* from, const int32_t* rows, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i) {
    memcpy(to + i * size, from + rows[i] * size, size * sizeof(float));
  }
}

// Activations of at most so many bytes stay for the next step; more are freed, so that no memory
// stays that only a very long prompt needs. The pages of fresh memory have to be mapped and cleared
// one by one, where malloc gives them back at once, as it does on a thread (`bros.LLM`): 24 ms of
// CPU time in a prompt of 1,024 tokens, of 1,260, and 2 % of the time of one of 4,000, whose
// activations took 125 MB before there were parts (SmolLM2-135M in int4, Zen 4). Huge pages instead
// gained nothing there.
constexpr int64_t kKeptBytes = 256 * 1024 * 1024;

constexpr int64_t kPartStep = 16;  // a part begins at a multiple of it, which is whole cache lines

// One step. Its arguments must have been checked.
class DecoderLayers {
 public:
  DecoderLayers(const KernelTable& kernels, const LayersArgs& args)
      : kernels_(kernels), a_(args), cos_sin_(args.rope.cos_sin), tokens_(args.rope.tokens) {
    Arena measured(nullptr);
    take(&measured);
    static thread_local Scratch kept;
    Scratch& memory = measured.used() <= kKeptBytes ? kept : memory_;
    void* base = memory.reserve(measured.used() + 64);  // also without tokens
    if (!base) error_ = "no memory for activations";
    Arena arena(base);
    take(&arena);
  }

  // These return null, or why they and all that comes later have failed.

  // What is before the first layer.
  const char* begin() {
    if (a_.token_ids) call(kernels_.embed, embed_of(a_));
    return error_;
  }

  // What is behind the last layer.
  const char* finish() {
    if (!a_.hidden) return error_;
    const Part all = {0, tokens_, threads(), nullptr, nullptr};
    if (!error_) error_ = norm(a_.ends->final_norm, a_.delta, a_.hidden, all);
    if (!error_) error_ = product(a_.ends->head, a_.hidden, a_.logits, a_.num_logits, threads());
    return error_;
  }

  // One layer.
  const char* run(int64_t layer) {
    if (error_) return error_;
    const LayerWeights& w = a_.weights[layer];
    set_layer(w, a_.kv[layer]);
    for_parts([&](const Part& part) { return before_attention(w, part); });
    call(kernels_.attention, a_.attention);
    const float* attended = even_;
    if (!a_.keeps_all && layer + 1 == a_.end) attended = keep_rows();
    for_parts([&](const Part& part) { return after_attention(w, attended, part); });
    a_.delta = a_.new_delta;
    return error_;
  }

 private:
  // Rows [first, first + count).
  struct Part {
    int64_t first;
    int64_t count;
    int threads;
    float* even;  // [count, max(hidden, down.inputs)], memory for numbers between two kernels
    float* odd;   // [count, max(hidden, gate_up.outputs)], likewise
  };

  int threads() const { return max_of(a_.rope.threads, 1); }
  int64_t hidden() const { return a_.weights->qkv.inputs; }
  int64_t q_size() const { return a_.weights->attention_out.inputs; }
  int64_t even_size() const { return max_of(hidden(), a_.weights->down.inputs); }
  int64_t odd_size() const { return max_of(hidden(), a_.weights->gate_up.outputs); }

  // As many for each thread; 1 if the rows are too few.
  int64_t num_parts(int64_t rows) const {
    const PartRows& limits = kernels_.part_rows;
    if (rows < threads() * limits.fewest) return 1;
    return ceil_div(rows, threads() * limits.most) * threads();
  }

  void take(Arena* arena) {
    // The most rows that are one part alone, and that are one part of several.
    int64_t alone = 0, shared = 0;
    for (int64_t rows : {tokens_, a_.num_rows}) {
      const int64_t parts = num_parts(rows);
      if (parts == 1) {
        alone = max_of(alone, rows);
      } else {
        shared = max_of(shared, ceil_div(rows, parts) + kPartStep);
      }
    }
    even_ = arena->take<float>(max_of(tokens_ * q_size(), alone * even_size()));
    odd_ = arena->take<float>(max_of(tokens_ * a_.weights->qkv.outputs, alone * odd_size()));
    kept_ = arena->take<float>(a_.num_rows * q_size());
    part_rows_ = shared;
    even_of_parts_ = arena->take<float>(threads() * shared * even_size());
    odd_of_parts_ = arena->take<float>(threads() * shared * odd_size());
  }

  // Computes all rows; run(part) returns null or an error.
  template <class Run>
  void for_parts(const Run& run) {
    if (error_) return;
    const int64_t parts = num_parts(tokens_);
    if (parts == 1) {
      error_ = run(Part{0, tokens_, threads(), even_, odd_});
      return;
    }
    const auto first_of = [&](int64_t part) {
      return part == parts ? tokens_ : tokens_ * part / parts / kPartStep * kPartStep;
    };
    parallel_tasks(parts, threads(), [&](int64_t part, int slot) {
      const int64_t first = first_of(part);
      const char* error = run(Part{first, first_of(part + 1) - first, 1,
                                   even_of_parts_ + slot * part_rows_ * even_size(),
                                   odd_of_parts_ + slot * part_rows_ * odd_size()});
      if (error) __atomic_store_n(&error_, error, __ATOMIC_RELAXED);
    });
  }

  // q, k and v of rows, to `odd_`; k and v to the cache as well.
  const char* before_attention(const LayerWeights& w, const Part& part) const {
    float* qkv = odd_ + part.first * w.qkv.outputs;
    const float* delta = a_.delta ? a_.delta + part.first * hidden() : nullptr;
    const char* error = norm(w.attention_norm, delta, part.even, part);
    if (!error) error = product(w.qkv, part.even, qkv, part.count, part.threads);
    if (error) return error;
    RopeArgs rope = a_.rope;
    rope.qkv = qkv;
    rope.positions += part.first;
    rope.slots += part.first;
    rope.tokens = part.count;
    rope.threads = part.threads;
    return kernels_.rope_and_cache(rope);
  }

  // Adds the output of the attention to the residual of rows, and computes their `new_delta`.
  const char* after_attention(const LayerWeights& w, const float* attended,
                              const Part& part) const {
    attended += part.first * q_size();
    const char* error = product(w.attention_out, attended, part.odd, part.count, part.threads);
    if (!error) error = norm(w.mlp_norm, part.odd, part.even, part);
    if (error) return error;
    return kernels_.mlp({a_.new_delta + part.first * hidden(), part.even, weights_of(w.gate_up),
                         weights_of(w.down), part.odd, part.even, part.count, part.threads});
  }

  template <class Args>
  void call(const char* (*kernel)(const Args&), const Args& args) {
    if (!error_) error_ = kernel(args);
  }

  // out = norm of the residual of rows, to which their `delta` is added first unless it is null.
  const char* norm(const float* weight, const float* delta, float* out, const Part& part) const {
    float* residual = a_.residual + part.first * hidden();
    return kernels_.rms_norm({out, delta ? residual : nullptr, delta ? delta : residual, weight,
                              part.count, hidden(), a_.rope.eps, part.threads});
  }

  static Weights weights_of(const Product& p) {
    return {p.weights, p.bias, static_cast<WeightFormat>(p.format), p.inputs, p.outputs};
  }

  const char* product(const Product& p, const float* x, float* out, int64_t rows,
                      int threads) const {
    return kernels_.linear({out, x, p.weights, p.bias, static_cast<WeightFormat>(p.format), rows,
                            p.inputs, p.outputs, threads});
  }

  // `even_` will be the attention of the q, k and v in `odd_`.
  void set_layer(const LayerWeights& w, const LayerKv& kv) {
    a_.rope.cos_sin = w.rotates ? cos_sin_ : nullptr;
    a_.rope.q_norm = w.q_norm;
    a_.rope.k_norm = w.k_norm;
    a_.rope.cache.k = a_.attention.cache.k = kv.k;
    a_.rope.cache.v = a_.attention.cache.v = kv.v;
    a_.attention.qkv = odd_;
    a_.attention.out = even_;
  }

  // From here on there are only the rows that the last layer keeps. Returns their attention.
  float* keep_rows() {
    if (error_) return even_;
    copy_rows(kept_, even_, a_.rows, a_.num_rows, q_size());
    copy_rows(a_.residual_of_rows, a_.residual, a_.rows, a_.num_rows, hidden());
    a_.residual = a_.residual_of_rows;
    tokens_ = a_.num_rows;
    return kept_;
  }

  const KernelTable& kernels_;
  LayersArgs a_;
  const float* const cos_sin_;
  int64_t tokens_;
  Scratch memory_;  // freed after the call
  float* even_ = nullptr;
  float* odd_ = nullptr;
  float* kept_ = nullptr;
  int64_t part_rows_ = 0;           // for which a thread has memory
  float* even_of_parts_ = nullptr;  // [threads, part_rows_, even_size()]
  float* odd_of_parts_ = nullptr;   // [threads, part_rows_, odd_size()]
  const char* error_ = nullptr;
};

}  // namespace
}  // namespace bros
