// The interface between module.cpp and the kernels: one table of kernels per instruction set.
//
// It has only plain C data: objects compiled with different flags fill the tables, and code
// compiled with AVX flags must not be shared with code that runs on every CPU.
#pragma once

#include <cstdint>

namespace bros {

enum class KvType : int { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

// Columns of a row of qkv: heads x head_dim of Q, then kv_heads x head_dim of K, then V.
struct HeadLayout {
  int heads;
  int kv_heads;
  int head_dim;
};

// K and V of one layer, each [num_blocks, kv_heads, block_size, head_dim] of `type`.
struct KvCache {
  void* k;
  void* v;
  KvType type;
  int64_t num_blocks;
  int64_t block_size;
};

struct RmsNormArgs {
  float* out;           // [tokens, size]
  float* residual;      // [tokens, size]; null: plain norm of x
  const float* x;       // [tokens, size]
  const float* weight;  // [size]
  int64_t tokens;
  int64_t size;
  float eps;
  int threads;
};

struct RopeArgs {
  float* qkv;
  int64_t tokens;
  HeadLayout layout;
  const int32_t* positions;  // [tokens], < max_positions
  const int32_t* slots;      // [tokens], < num_blocks * block_size
  const float* cos_sin;      // [max_positions, rotary_dim] or null
  int64_t max_positions;
  int64_t rotary_dim;
  KvCache cache;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;  // [head_dim] or null
  float eps;
  int threads;
};

// Shared parts: context that several rows read in addition to their own. With parts == 0 all other
// fields are ignored.
struct SharedArgs {
  const int32_t* row_start;      // [parts + 1]
  const int32_t* rows;           // [num_rows]
  const int32_t* segment_start;  // [parts + 1]
  const int32_t* segments;       // [num_segments, 3] of (block, lo, hi)
  int64_t parts;
  int64_t num_rows;
  int64_t num_segments;
};

struct AttentionArgs {
  float* out;        // [tokens, heads * head_dim]
  const float* qkv;  // [tokens, (heads + 2 * kv_heads) * head_dim]
  int64_t tokens;
  HeadLayout layout;
  KvCache cache;
  const int32_t* query_start;    // [rows + 1], from 0 to tokens
  const int32_t* segment_start;  // [rows + 1]
  const int32_t* segments;       // [num_segments, 3] of (block, lo, hi)
  int64_t rows;
  int64_t num_segments;
  SharedArgs shared;
  float scale;
  int threads;
};

struct SiluArgs {
  float* out;       // [tokens, size]
  const float* in;  // [tokens, 2 * size]
  int64_t tokens;
  int64_t size;
  int threads;
};

enum class WeightFormat : int { kFp32 = 0, kBf16 = 1, kInt8 = 2, kInt4 = 3 };

struct LinearArgs {
  float* out;           // [rows, outputs]
  const float* x;       // [rows, inputs]
  const void* weights;  // packed as in linear.h
  const float* bias;    // [outputs] or null
  WeightFormat format;
  int64_t rows;
  int64_t inputs;  // fp32: any; bf16: even; int8, int4: a multiple of 32
  int64_t outputs;
  int threads;
};

// Of a linear layer, as LinearArgs has them.
struct Weights {
  const void* data;
  const float* bias;
  WeightFormat format;
  int64_t inputs;
  int64_t outputs;
};

struct MlpArgs {
  float* out;          // [rows, down.outputs]; not x
  const float* x;      // [rows, gate_up.inputs]
  Weights gate_up;     // outputs: 2 * size, the gates first
  Weights down;        // inputs: size
  float* gate_up_out;  // memory for [rows, 2 * size]
  float* gated;        // memory for [rows, size]; may be x
  int64_t rows;
  int threads;
};

// Rows of packed weights, widened exactly: the embeddings of tokens.
struct EmbedArgs {
  float* out;             // [count, inputs]
  const int32_t* tokens;  // [count], < outputs
  const void* weights;    // packed as in linear.h
  WeightFormat format;    // not kInt4
  int64_t count;
  int64_t inputs;
  int64_t outputs;
  int threads;
};

// One draw of a token; kernels/cpu_ops.py has the same layout as DRAW. `_begin` and `_end` are
// ranges of the buffers in SampleArgs.
struct Draw {
  uint64_t seed;
  uint64_t index;  // of the output token
  int64_t row;     // of the logits
  int64_t edit_begin, edit_end;
  int64_t history_begin, history_end;
  int64_t mask_begin, mask_end;  // mask_begin < 0: no mask
  double top_p;                  // 1: off
  double presence_penalty;
  double frequency_penalty;
  float repetition_penalty;  // 1: off
  float temperature;         // 0: greedy
  float min_p;               // 0: off
  int32_t top_k;             // 0: off
  int32_t top_logprobs;      // -1: no log-probabilities
  int32_t prompt_len;        // tokens of the history that are the prompt
};

constexpr int32_t kNotFinite = -1;       // the largest logit of the row is not finite
constexpr int32_t kNothingAllowed = -2;  // the mask allows no token

struct SampledRow {
  int32_t token;   // or one of the two above
  float peak;      // the largest logit, after all changes
  double logprob;  // of the token, if asked for
};

struct TokenLogprob {
  int64_t token;
  double logprob;
};

struct SampleArgs {
  SampledRow* sampled;  // [num_draws]
  TokenLogprob* tops;   // [num_draws, top]
  const float* logits;  // [num_rows, vocab]
  int64_t num_rows;
  int64_t vocab;
  const Draw* draws;
  const int32_t* edit_tokens;  // biases; -inf forbids the token
  const float* edit_values;
  const int32_t* history;
  const uint8_t* masks;  // one bit per token, the first in the lowest bit
  int64_t num_sampled, num_top, num_draws, num_edits, num_edit_values, num_history, num_mask_bytes;
  int64_t top;
  int threads;
};

// One product of tile registers, for tests: C += A . B as tiles.h has it. Elements have 4 bytes each.
struct TileProductArgs {
  void* c;        // [rows, columns], rows 64 bytes apart like those of a and b
  const void* a;  // [rows, depth]
  const void* b;  // [depth, columns]
  int64_t rows, columns, depth;  // 1 to 16
};

// How the rows of a step are divided, see decoder_layers.h.
struct PartRows {
  int64_t fewest;  // for each thread; with fewer, all threads compute all rows together
  int64_t most;    // of a part, about
};

// Every kernel returns null, or an error message before it writes any memory. RopeArgs,
// AttentionArgs and EmbedArgs must have been checked (checks.h).
struct KernelTable {
  const char* (*rms_norm)(const RmsNormArgs&);
  const char* (*rope_and_cache)(const RopeArgs&);
  const char* (*attention)(const AttentionArgs&);
  const char* (*silu_and_mul)(const SiluArgs&);
  const char* (*linear)(const LinearArgs&);
  const char* (*mlp)(const MlpArgs&);
  const char* (*embed)(const EmbedArgs&);
  int64_t panel_outputs;  // of packed weights
  PartRows part_rows;
  const char* (*sample)(const SampleArgs&);
  // Null without tiles. Where it is set, panels of codes have the layout for them (linear_formats.h).
  const char* (*tile_product)(const TileProductArgs&);
};

extern const KernelTable kGenericKernels;
extern const KernelTable kAmxEmulatedKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx512VnniKernels;
extern const KernelTable kAvx512Bf16Kernels;
extern const KernelTable kAvx512AmxKernels;  // all null if the compiler does not know AMX
#endif

}  // namespace bros
