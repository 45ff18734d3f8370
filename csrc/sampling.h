// Sampling: one token per row of logits. executor/sampler.py defines the results.
//
// A row is a number of blocks of 256 tokens, the last one padded with -inf. One pass over the
// logits finds the peak of every block, and after that only blocks are read whose peak says that
// they matter:
//
//     top_k     the k-th largest peak is a lower bound of the k-th largest logit
//     top_p     needs the sum of all weights, then only the few largest of them
//     the race  -log(u) >= 1 - u, and a block weighs at most 256 times its peak: most blocks lose
//               before their weights are known
//
// A weight is e^((logit - peak) / temperature), 1 for the best token. Sums of a block are in fp32,
// all others in fp64. A row is computed by one thread and depends on nothing but its draw.
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace bros {
namespace {

constexpr int64_t kBlock = 256;
constexpr float kSmallestTemperature = 1e-20f;  // below it, dividing by it could overflow
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr uint64_t kBlockNoise = uint64_t{1} << 32;  // numbers from here on are for blocks
constexpr uint32_t kBitsOfOne = 0x3f800000;

// ---- noise and races --------------------------------------------------------------------------

BROS_INLINE uint64_t splitmix64(uint64_t state) {
  state += kGolden;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
  return state ^ (state >> 31);
}

// The random numbers of one draw.
struct Noise {
  uint64_t start;

  Noise(uint64_t seed, uint64_t index) : start(splitmix64(splitmix64(seed) ^ index)) {}

  // Uniform in (0, 1]; -log of it is the exponential number `number`.
  BROS_INLINE double uniform(uint64_t number) const {
    const uint64_t bits = splitmix64(start + number * kGolden);
    return (static_cast<double>(static_cast<int64_t>(bits >> 11)) + 0.5) * 0x1p-53;
  }
};

// Exponential race: the smallest -log(u) / mass wins, of equal ones the first index.
struct Race {
  double best = __builtin_inf();
  int64_t winner = 0;

  // Whether a mass of at most `most` may win.
  BROS_INLINE bool open(double u, double most) const { return 1.0 - u <= best * most; }

  BROS_INLINE void enter(int64_t index, double u, double mass) {
    const double time = -__builtin_log(u) / mass;
    if (time < best || (time == best && index < winner)) {
      best = time;
      winner = index;
    }
  }
};

// ---- rows in blocks ---------------------------------------------------------------------------

struct Row {
  const float* logits;
  const float* last;  // the last block, padded
  int64_t vocab;
  int64_t blocks;

  Row(const float* values, int64_t count, float* padded)
      : logits(values), vocab(count), blocks(ceil_div(count, kBlock)) {
    const int64_t whole = (blocks - 1) * kBlock;
    last = values + whole;
    if (count % kBlock == 0) return;
    for (int64_t i = 0; i < kBlock; ++i) padded[i] = whole + i < count ? last[i] : -kInfinity;
    last = padded;
  }

  BROS_INLINE const float* block(int64_t b) const {
    return b + 1 < blocks ? logits + b * kBlock : last;
  }
};

// Calls body(i, j) for the vectors at i of a block; j counts 0 .. 3, for four independent results.
template <class Body>
BROS_INLINE void each_vector_of_block(const Body& body) {
  for (int64_t i = 0; i < kBlock; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) body(i + j * kLanes, j);
  }
}

BROS_INLINE float sum_of(const Vec (&four)[4]) {
  return reduce_add((four[0] + four[1]) + (four[2] + four[3]));
}

// The largest logit of every block; returns that of the row, NaN if the row has one.
inline float find_peaks(const Row& row, float* peaks) {
  IntVec is_nan = {};
  float peak = -kInfinity;
  for (int64_t b = 0; b < row.blocks; ++b) {
    const float* x = row.block(b);
    Vec best[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
    each_vector_of_block([&](int64_t i, int j) {
      const Vec v = load(x + i);
      is_nan |= v != v;
      best[j] = vmax(v, best[j]);
    });
    peaks[b] = reduce_max(vmax(vmax(best[0], best[1]), vmax(best[2], best[3])));
    peak = max_of(peak, peaks[b]);
  }
  return lanes_set(is_nan) ? __builtin_nanf("") : peak;
}

// The first token whose logit is `peak`.
inline int64_t first_of(const Row& row, const float* peaks, float peak) {
  int64_t b = 0, i = 0;
  while (peaks[b] != peak) ++b;
  const float* x = row.block(b);
  while (x[i] != peak) ++i;
  return b * kBlock + i;
}

// ---- selection --------------------------------------------------------------------------------

constexpr int64_t kDigits = 2048;
constexpr int64_t kFew = 32;  // so many keys are sorted

// The smallest key such that the keys up to it have the mass `goal` together; the largest one if
// all of them have less. Changes the order of keys. histogram: kDigits.
template <class Mass>
uint32_t select_key(uint32_t* keys, int64_t n, double goal, double* histogram, const Mass& mass) {
  constexpr int kShifts[] = {21, 10, 0};
  for (const int shift : kShifts) {
    if (n <= kFew) break;
    for (int64_t d = 0; d < kDigits; ++d) histogram[d] = 0.0;
    for (int64_t i = 0; i < n; ++i) histogram[keys[i] >> shift & (kDigits - 1)] += mass(keys[i]);
    double before = 0.0, reached = 0.0;
    uint32_t crossing = 0;
    for (uint32_t d = 0; d < kDigits && reached < goal; ++d) {
      if (histogram[d] == 0.0) continue;
      crossing = d;
      before = reached;
      reached += histogram[d];
    }
    goal -= before;
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = keys[i];
      keys[kept] = key;
      kept += (key >> shift & (kDigits - 1)) == crossing;
    }
    n = kept;
  }
  if (n > kFew) return keys[0];  // all digits are the same
  for (int64_t i = 1; i < n; ++i) {
    const uint32_t key = keys[i];
    int64_t at = i;
    for (; at > 0 && keys[at - 1] > key; --at) keys[at] = keys[at - 1];
    keys[at] = key;
  }
  double reached = 0.0;
  for (int64_t i = 0; i + 1 < n; ++i) {
    reached += mass(keys[i]);
    if (reached >= goal) return keys[i];
  }
  return keys[n - 1];
}

// ---- memory of a thread -----------------------------------------------------------------------

struct SampleScratch {
  float* edited;       // [tokens of whole blocks]
  float* weights;      // the same
  uint32_t* keys;      // the same
  float* last;         // [kBlock], of the model's logits
  float* last_edited;  // [kBlock]
  float* peaks;        // [blocks]
  float* raw_peaks;    // [blocks], of the model's logits
  float* scaled;       // [blocks], (peak - peak of the row) / temperature
  float* most;         // [blocks], at least the weight of each token
  float* sums;         // [blocks]
  double* histogram;   // [kDigits]
  uint8_t* mask;       // a bit for each token of whole blocks

  SampleScratch(Arena* arena, int64_t vocab) {
    const int64_t blocks = ceil_div(vocab, kBlock);
    edited = arena->take<float>(blocks * kBlock);
    weights = arena->take<float>(blocks * kBlock);
    keys = arena->take<uint32_t>(blocks * kBlock);
    last = arena->take<float>(kBlock);
    last_edited = arena->take<float>(kBlock);
    float** const per_block[] = {&peaks, &raw_peaks, &scaled, &most, &sums};
    for (float** each : per_block) *each = arena->take<float>(round_up(blocks, kLanes));
    histogram = arena->take<double>(kDigits);
    mask = arena->take<uint8_t>(blocks * kBlock / 8);
  }
};

// ---- biases, penalties and masks --------------------------------------------------------------

// A token occurs in the history any number of times, but is penalized once; `counts` needs no
// initial values.
inline void penalize(const Draw& draw, const int32_t* history, uint32_t* counts, float* x) {
  const int32_t* end = history + draw.history_end;
  const int32_t* begin = history + draw.history_begin;
  if (draw.repetition_penalty != 1.0f) {
    for (const int32_t* t = begin; t < end; ++t) counts[*t] = 0;
    for (const int32_t* t = begin; t < end; ++t) {
      if (counts[*t]++) continue;
      const float seen = x[*t];
      x[*t] = seen > 0.0f ? seen / draw.repetition_penalty : seen * draw.repetition_penalty;
    }
  }
  if (draw.presence_penalty == 0.0 && draw.frequency_penalty == 0.0) return;
  begin += draw.prompt_len;
  for (const int32_t* t = begin; t < end; ++t) counts[*t] = 0;
  for (const int32_t* t = begin; t < end; ++t) ++counts[*t];
  for (const int32_t* t = begin; t < end; ++t) {
    if (!counts[*t]) continue;
    x[*t] -= static_cast<float>(draw.presence_penalty + draw.frequency_penalty * counts[*t]);
    counts[*t] = 0;
  }
}

// False if the mask allows no token. bits: one per token, [bytes]; tokens beyond are not allowed.
inline bool apply_mask(const uint8_t* bits, int64_t bytes, int64_t vocab, uint8_t* mask, float* x) {
  const int64_t tokens = round_up(vocab, kBlock);
  const int64_t given = min_of(bytes, ceil_div(vocab, 8));
  uint8_t any = 0;
  for (int64_t i = 0; i < tokens / 8; ++i) {
    const int64_t left = vocab - 8 * i;  // of this byte's tokens
    const int valid = left >= 8 ? 0xff : left > 0 ? (1 << left) - 1 : 0;
    mask[i] = i < given ? bits[i] & valid : 0;
    any |= mask[i];
  }
  if (!any) return false;
  IntVec bit_of_lane;
  for (int lane = 0; lane < kLanes; ++lane) bit_of_lane[lane] = 1 << lane;
  for (int64_t i = 0; i < tokens; i += kLanes) {
    uint32_t word = mask[i / 8];
    if (kLanes > 8) word |= static_cast<uint32_t>(mask[i / 8 + 1]) << 8;
    const IntVec allowed = (splat_int(static_cast<int32_t>(word >> i % 8)) & bit_of_lane) != 0;
    store(x + i, select(allowed, load(x + i), splat(-kInfinity)));
  }
  return true;
}

// The logits of a draw with its changes, in scratch.edited. False if a mask allows no token.
inline bool edit(const SampleArgs& a, const Draw& draw, const Row& raw, const SampleScratch& s) {
  for (int64_t b = 0; b < raw.blocks; ++b) {
    __builtin_memcpy(s.edited + b * kBlock, raw.block(b), kBlock * sizeof(float));
  }
  for (int64_t i = draw.edit_begin; i < draw.edit_end; ++i) {
    float& x = s.edited[a.edit_tokens[i]];
    x = a.edit_values[i] == -kInfinity ? -kInfinity : x + a.edit_values[i];
  }
  if (draw.history_begin < draw.history_end) penalize(draw, a.history, s.keys, s.edited);
  return draw.mask_begin < 0 ||
         apply_mask(a.masks + draw.mask_begin, draw.mask_end - draw.mask_begin, a.vocab, s.mask,
                    s.edited);
}

// ---- filters and draws ------------------------------------------------------------------------

// One draw: filters are lower bounds of the scaled logits and of the weights.
class Sampling {
 public:
  Sampling(const Row& row, const Draw& draw, float peak, const SampleScratch& s)
      : row_(row), s_(s), peak_(peak) {
    temperature_ = max_of(draw.temperature, kSmallestTemperature);
    for (int64_t b = 0; b < row.blocks; b += kLanes) {
      const Vec scaled = scale(load(s.peaks + b));  // behind the last block, anything
      store(s.scaled + b, scaled);
      // Rounding may put a weight above that of a larger logit.
      store(s.most + b, exp_nonpositive(scaled) * 1.00001f);
    }
    least_ = draw.min_p;
    if (draw.top_k > 0 && draw.top_k < row.vocab) least_scaled_ = kth_largest(draw.top_k);
    if (draw.top_p < 1.0) least_ = max_of(least_, nucleus_bound(draw.top_p));
  }

  // A token with its probability among the allowed ones.
  int64_t token(const Noise& noise) {
    Race blocks;
    const int64_t first = first_of(row_, s_.peaks, peak_) / kBlock;
    enter(first, noise, &blocks);  // the likeliest first, so that most others need no weights
    for (int64_t b = 0; b < row_.blocks; ++b) {
      if (b != first && has_allowed(b)) enter(b, noise, &blocks);
    }
    Race tokens;
    const int64_t start = blocks.winner * kBlock;
    for (int64_t t = start; t < start + kBlock; ++t) {
      const double weight = s_.weights[t];
      if (weight < least_ || weight == 0.0) continue;
      const double u = noise.uniform(t);
      if (tokens.open(u, weight)) tokens.enter(t, u, weight);
    }
    return tokens.winner;
  }

 private:
  BROS_INLINE Vec scale(Vec logits) const { return (logits - peak_) / temperature_; }

  bool has_allowed(int64_t b) const {
    return s_.scaled[b] >= least_scaled_ && s_.most[b] >= least_ && s_.most[b] > 0.0f;
  }

  // Computes the weights of a block, 0 for those that are not allowed; returns their sum.
  float weigh(int64_t b) {
    const float* x = row_.block(b);
    float* weights = s_.weights + b * kBlock;
    const Vec least_scaled = splat(least_scaled_), least = splat(least_);
    Vec sum[4] = {};
    each_vector_of_block([&](int64_t i, int j) {
      const Vec scaled = scale(load(x + i));
      const Vec weight = exp_nonpositive(scaled);
      const IntVec allowed = (scaled >= least_scaled) & (weight >= least);
      const Vec kept = bit_cast<Vec>(allowed & bit_cast<IntVec>(weight));
      store(weights + i, kept);
      sum[j] += kept;
    });
    return sum_of(sum);
  }

  // The mass of a block whose weights are known, after its bound was raised.
  float mass_of(int64_t b) const {
    const float* weights = s_.weights + b * kBlock;
    Vec sum[4] = {};
    each_vector_of_block([&](int64_t i, int j) {
      const Vec weight = load(weights + i);
      const IntVec allowed = weight >= splat(least_);
      sum[j] += bit_cast<Vec>(allowed & bit_cast<IntVec>(weight));
    });
    return sum_of(sum);
  }

  void enter(int64_t b, const Noise& noise, Race* race) {
    const double u = noise.uniform(kBlockNoise + b);
    if (!race->open(u, weighed_ ? s_.sums[b] : kBlock * s_.most[b])) return;
    const float mass = weighed_ ? mass_of(b) : weigh(b);
    if (mass > 0.0f) race->enter(b, u, mass);
  }

  // The k-th largest scaled logit, k < vocab.
  float kth_largest(int64_t k) {
    const auto key_of = [](float scaled) { return bit_cast<uint32_t>(scaled) & 0x7fffffff; };
    const auto one = [](uint32_t) { return 1.0; };
    float bound = -kInfinity;
    if (k <= row_.blocks) {
      // k blocks have a value >= the k-th largest peak, so smaller values cannot be the answer.
      for (int64_t b = 0; b < row_.blocks; ++b) s_.keys[b] = key_of(s_.scaled[b]);
      bound = -bit_cast<float>(select_key(s_.keys, row_.blocks, k, s_.histogram, one));
    }
    int64_t n = 0;
    for (int64_t b = 0; b < row_.blocks; ++b) {
      if (s_.scaled[b] < bound) continue;
      const float* x = row_.block(b);
      each_vector_of_block([&](int64_t i, int) {
        const Vec scaled = scale(load(x + i));
        const IntVec wanted = scaled >= splat(bound);
        for_each_lane_set(wanted, [&](int lane) { s_.keys[n++] = key_of(scaled[lane]); });
      });
    }
    return -bit_cast<float>(select_key(s_.keys, n, k, s_.histogram, one));
  }

  // The largest bound such that the weights >= bound have `share` of the total mass. Tries the few
  // largest weights first: usually they have that mass.
  float nucleus_bound(double share) {
    double total = 0.0;
    for (int64_t b = 0; b < row_.blocks; ++b) {
      s_.sums[b] = has_allowed(b) ? weigh(b) : 0.0f;
      total += s_.sums[b];
    }
    weighed_ = true;
    const double goal = share * total;
    const auto weight_of = [](uint32_t key) { return bit_cast<float>(kBitsOfOne - key); };
    int64_t n = 0;
    constexpr float kLeast[] = {0.0183f, 4.5e-5f, 1.2e-38f};  // e^-4, e^-10, any but 0
    for (const float least : kLeast) {
      double mass = 0.0;
      n = 0;
      for (int64_t b = 0; b < row_.blocks; ++b) {
        if (s_.sums[b] == 0.0f || s_.most[b] < least) continue;
        const float* weights = s_.weights + b * kBlock;
        each_vector_of_block([&](int64_t i, int) {
          const IntVec wanted = load(weights + i) >= splat(least);
          for_each_lane_set(wanted, [&](int lane) {
            const float weight = weights[i + lane];
            s_.keys[n++] = kBitsOfOne - bit_cast<uint32_t>(weight);
            mass += weight;
          });
        });
      }
      if (mass >= goal) break;
    }
    return weight_of(select_key(s_.keys, n, goal, s_.histogram, weight_of));
  }

  const Row& row_;
  const SampleScratch& s_;
  float peak_;
  float temperature_;
  float least_scaled_ = -kInfinity;
  float least_;
  bool weighed_ = false;  // whether all blocks have weights and sums
};

// ---- log-probabilities ------------------------------------------------------------------------

// log-softmax of a token and of the k best ones, equal logits in order of token ids.
inline void log_probabilities(const Row& row, const float* peaks, float peak, int64_t k,
                              SampledRow* out, TokenLogprob* top) {
  double sum = 0.0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    const float* x = row.block(b);
    Vec part[4] = {};
    each_vector_of_block([&](int64_t i, int j) { part[j] += exp_nonpositive(load(x + i) - peak); });
    sum += sum_of(part);
  }
  const double norm = peak + __builtin_log(sum);
  out->logprob = row.logits[out->token] - norm;
  const int64_t wanted = min_of(k, row.vocab);
  int64_t count = 0;
  for (int64_t b = 0; wanted > 0 && b < row.blocks; ++b) {
    if (count == wanted && !(peaks[b] > top[wanted - 1].logprob)) continue;
    const float* x = row.block(b);
    const int64_t end = min_of(kBlock, row.vocab - b * kBlock);
    for (int64_t i = 0; i < end; ++i) {
      if (count == wanted && !(x[i] > top[wanted - 1].logprob)) continue;
      int64_t at = count < wanted ? count++ : wanted - 1;
      for (; at > 0 && top[at - 1].logprob < x[i]; --at) top[at] = top[at - 1];
      top[at] = {b * kBlock + i, x[i]};
    }
  }
  for (int64_t i = 0; i < wanted; ++i) top[i].logprob -= norm;
}

// ---- the step ---------------------------------------------------------------------------------

inline void sample_row(const SampleArgs& a, const Draw& draw, const SampleScratch& s,
                       SampledRow* out, TokenLogprob* top) {
  const Row raw(a.logits + draw.row * a.vocab, a.vocab, s.last);
  const bool edited = draw.edit_begin < draw.edit_end || draw.history_begin < draw.history_end ||
                      draw.mask_begin >= 0;
  *out = {kNothingAllowed, -kInfinity, 0.0};
  if (edited && !edit(a, draw, raw, s)) return;
  const Row row = edited ? Row(s.edited, a.vocab, s.last_edited) : raw;
  const float peak = find_peaks(row, s.peaks);
  out->peak = peak;
  out->token = kNotFinite;
  if (!__builtin_isfinite(peak)) return;
  if (draw.temperature == 0.0f) {
    out->token = static_cast<int32_t>(first_of(row, s.peaks, peak));
  } else {
    Sampling sampling(row, draw, peak, s);
    out->token = static_cast<int32_t>(sampling.token(Noise(draw.seed, draw.index)));
  }
  if (draw.top_logprobs < 0) return;
  const float raw_peak = edited ? find_peaks(raw, s.raw_peaks) : peak;
  if (!__builtin_isfinite(raw_peak)) {  // at a token that may not be chosen
    out->peak = raw_peak;
    out->token = kNotFinite;
    return;
  }
  log_probabilities(raw, edited ? s.raw_peaks : s.peaks, raw_peak, draw.top_logprobs, out, top);
}

inline bool is_range(int64_t begin, int64_t end, int64_t count) {
  return 0 <= begin && begin <= end && end <= count;
}

inline bool are_tokens(const int32_t* tokens, int64_t count, int64_t vocab) {
  for (int64_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab) return false;
  }
  return true;
}

inline const char* check_draws(const SampleArgs& a) {
  if (a.vocab < 1 || a.vocab > INT32_MAX) return "rows of logits have no tokens";
  if (a.num_sampled != a.num_draws || a.num_edit_values != a.num_edits ||
      a.num_top != a.num_draws * a.top) {
    return "buffers of sampling do not fit each other";
  }
  if (!are_tokens(a.edit_tokens, a.num_edits, a.vocab) ||
      !are_tokens(a.history, a.num_history, a.vocab)) {
    return "token outside the vocabulary";
  }
  for (int64_t i = 0; i < a.num_draws; ++i) {
    const Draw& d = a.draws[i];
    if (d.row < 0 || d.row >= a.num_rows || d.top_logprobs > a.top || d.prompt_len < 0 ||
        !is_range(d.edit_begin, d.edit_end, a.num_edits) ||
        !is_range(d.history_begin, d.history_end, a.num_history) ||
        (d.mask_begin >= 0 && !is_range(d.mask_begin, d.mask_end, a.num_mask_bytes))) {
      return "a draw is outside the buffers of sampling";
    }
  }
  return nullptr;
}

const char* sample(const SampleArgs& a) {
  if (const char* error = check_draws(a)) return error;
  Arena measured(nullptr);
  SampleScratch(&measured, a.vocab);
  const int64_t thread_bytes = round_up(measured.used(), 4096);
  const bool parallel = a.num_draws > 1 && a.num_draws * a.vocab >= kMinParallelWork;
  const int64_t most = parallel ? min_of<int64_t>(a.threads, a.num_draws) : 1;
  const int threads = static_cast<int>(max_of<int64_t>(most, 1));
  thread_local Scratch memory;
  char* base = static_cast<char*>(memory.reserve(threads * thread_bytes));
  if (!base) return "no memory for sampling";
  parallel_tasks(a.num_draws, threads, [&](int64_t i, int slot) {
    Arena own(base + slot * thread_bytes);
    const SampleScratch scratch(&own, a.vocab);
    sample_row(a, a.draws[i], scratch, a.sampled + i, a.tops + i * a.top);
  });
  return nullptr;
}

}  // namespace
}  // namespace bros
