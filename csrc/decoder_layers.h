// A decoder, or some of its layers, one kernel after the other without Python between them.
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
// These are the kernels that decoder.py calls for such a layer, with the same arguments, but for the
// MLP, which is one kernel with the bits of three (mlp.h). So the results have the same bits.
#pragma once

#include <string.h>

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
// activations take 125 MB (SmolLM2-135M in int4, Zen 4). Huge pages instead gained nothing there.
constexpr int64_t kKeptBytes = 256 * 1024 * 1024;

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
    norm(a_.ends->final_norm, a_.delta, a_.hidden);
    product(a_.ends->head, a_.hidden, a_.logits, a_.num_logits);
    return error_;
  }

  // One layer.
  const char* run(int64_t layer) {
    if (error_) return error_;
    const LayerWeights& w = a_.weights[layer];
    norm(w.attention_norm, a_.delta, even_);
    product(w.qkv, even_, odd_, tokens_);
    attend(w, a_.kv[layer]);
    float* attended = even_;
    if (!a_.keeps_all && layer + 1 == a_.end) attended = keep_rows();
    product(w.attention_out, attended, odd_, tokens_);
    norm(w.mlp_norm, odd_, even_);
    call(kernels_.mlp, MlpArgs{a_.new_delta, even_, weights_of(w.gate_up), weights_of(w.down), odd_,
                               even_, tokens_, threads()});
    a_.delta = a_.new_delta;
    return error_;
  }

 private:
  int threads() const { return a_.rope.threads; }
  int64_t hidden() const { return a_.weights->qkv.inputs; }
  int64_t q_size() const { return a_.weights->attention_out.inputs; }

  void take(Arena* arena) {
    const LayerWeights& w = *a_.weights;
    const int64_t even = max_of(q_size(), w.down.inputs);
    const int64_t odd = max_of(w.qkv.outputs, w.gate_up.outputs);
    const int64_t most = max_of(tokens_, a_.num_rows);
    even_ = arena->take<float>(most * max_of(hidden(), even));
    odd_ = arena->take<float>(most * max_of(hidden(), odd));
    kept_ = arena->take<float>(a_.num_rows * q_size());
  }

  template <class Args>
  void call(const char* (*kernel)(const Args&), const Args& args) {
    if (!error_) error_ = kernel(args);
  }

  // out = norm of the residual, to which `delta` is added first unless it is null.
  void norm(const float* weight, const float* delta, float* out) {
    float* sum = delta ? a_.residual : nullptr;
    const float* x = delta ? delta : a_.residual;
    call(kernels_.rms_norm,
         RmsNormArgs{out, sum, x, weight, tokens_, hidden(), a_.rope.eps, threads()});
  }

  static Weights weights_of(const Product& p) {
    return {p.weights, p.bias, static_cast<WeightFormat>(p.format), p.inputs, p.outputs};
  }

  void product(const Product& p, const float* x, float* out, int64_t rows) {
    call(kernels_.linear,
         LinearArgs{out, x, p.weights, p.bias, static_cast<WeightFormat>(p.format), rows,
                    p.inputs, p.outputs, threads()});
  }

  // even = attention of the q, k and v in `odd`.
  void attend(const LayerWeights& w, const LayerKv& kv) {
    a_.rope.qkv = odd_;
    a_.rope.cos_sin = w.rotates ? cos_sin_ : nullptr;
    a_.rope.q_norm = w.q_norm;
    a_.rope.k_norm = w.k_norm;
    a_.rope.cache.k = a_.attention.cache.k = kv.k;
    a_.rope.cache.v = a_.attention.cache.v = kv.v;
    a_.attention.qkv = odd_;
    a_.attention.out = even_;
    call(kernels_.rope_and_cache, a_.rope);
    call(kernels_.attention, a_.attention);
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
  const char* error_ = nullptr;
};

}  // namespace
}  // namespace bros
