// The attention of a step: cuts it into tasks, runs them on all threads, merges their results.
#pragma once

#include "attention_decode.h"
#include "attention_tile.h"

namespace bros {
namespace {

// `run` is memory for head_dim floats.
void merge_parts(const Problem& p, const Merge& merge, const Source* sources, float* partials,
                 float* run) {
  for (int64_t lane = 0; lane < merge.num_queries * p.group; ++lane) {
    float* out = p.output(merge.token + lane / p.group, merge.kv_head * p.group + lane % p.group);
    float m, l, run_m, run_l;
    const Partial all(out, &m, &l), of_run(run, &run_m, &run_l);
    all.clear(p.dim);
    of_run.clear(p.dim);
    for (int64_t i = 0; i < merge.num_sources; ++i) {
      sources[merge.first_source + i].for_each_record(partials, [&](int64_t key, float* record) {
        if (key % kRunKeys == 0) {
          all.add(of_run, p.dim);
          of_run.clear(p.dim);
        }
        of_run.add(Partial(record + lane * p.lane_size(), p.dim), p.dim);
      });
    }
    all.add(of_run, p.dim);
    for (int64_t d = 0; d < p.dim; ++d) out[d] /= l;
  }
}

// The scratch memory of one thread; a task uses one of the two halves.
struct ThreadScratch {
  DecodeScratch decode;
  TileScratch tile;
  float* run;  // [head_dim], of a merge
  ThreadScratch(Arena* arena, const Problem& p, int64_t most_lanes)
      : decode(arena, p), tile(arena, p, most_lanes), run(arena->take<float>(p.dim)) {}
};

template <class T, class Words>
void run_task(const Problem& p, const Task& task, float q_scale, const ThreadScratch& scratch,
              float* partials) {
  if (task.decode) {
    decode_task<T, Words>(p, task, q_scale, scratch.decode, partials);
  } else {
    tile_task<T, Words>(p, task, q_scale, scratch.tile, partials);
  }
}

using RunTask = void (*)(const Problem&, const Task&, float, const ThreadScratch&, float*);

RunTask task_runner(KvType type, int64_t dim) {
  switch (type) {
    case KvType::kBf16:
#if defined(BROS_MULTIPLIES_TILES)
      if (dim % Bf16TilePairs::kStep == 0) return run_task<Bf16, Bf16TilePairs>;
#endif
#if defined(BROS_MULTIPLIES_PAIRS)
      if (dim % Bf16Pairs::kPerWord == 0) return run_task<Bf16, Bf16Pairs>;
#endif
      return run_task<Bf16, Floats>;
    case KvType::kFp16:
      return run_task<Fp16, Floats>;
    default:
      return run_task<float, Floats>;
  }
}

const char* attention(const AttentionArgs& a) {
  const Problem p(a);
  thread_local Scratch index_memory;
  const SharedIndex shared(p, &index_memory);
  if (!shared.ok) return "no memory for attention";
  const TaskList counted(p, shared, nullptr, nullptr, nullptr);
  const bool parallel =
      a.threads > 1 && counted.num_tasks > 1 && counted.multiply_adds / 2 >= kMinParallelWork;
  const int threads = parallel ? a.threads : 1;

  Arena measured(nullptr);
  ThreadScratch(&measured, p, counted.most_lanes);
  const int64_t thread_bytes = round_up(measured.used(), 4096);
  thread_local Scratch memory;
  void* base = memory.reserve(threads * thread_bytes + counted.num_tasks * sizeof(Task) + 64 +
                              counted.num_merges * sizeof(Merge) + 64 +
                              counted.num_sources * sizeof(Source) + 64 +
                              counted.partial_floats * sizeof(float));
  if (!base) return "no memory for attention";
  Arena arena(static_cast<char*>(base) + threads * thread_bytes);
  float* partials = arena.take<float>(counted.partial_floats);
  Task* tasks = arena.take<Task>(counted.num_tasks);
  Merge* merges = arena.take<Merge>(counted.num_merges);
  Source* sources = arena.take<Source>(counted.num_sources);
  const TaskList list(p, shared, tasks, merges, sources);

  const RunTask run = task_runner(a.cache.type, p.dim);
  const float q_scale = a.scale * 1.44269504f;  // scores in base 2
  const auto scratch_of = [&](int slot) {
    Arena own(static_cast<char*>(base) + slot * thread_bytes);
    return ThreadScratch(&own, p, counted.most_lanes);
  };
  parallel_tasks(list.num_tasks, threads, [&](int64_t i, int slot) {
    run(p, tasks[i], q_scale, scratch_of(slot), partials);
  });
  parallel_tasks(list.num_merges, threads, [&](int64_t i, int slot) {
    merge_parts(p, merges[i], sources, partials, scratch_of(slot).run);
  });
  return nullptr;
}

}  // namespace
}  // namespace bros
