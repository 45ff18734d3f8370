// bros.kernels._C: the kernels as Python functions of addresses and sizes.
//
// Tensors are passed as data_ptr() integers, so this needs no torch headers. cpu_ops.py checks
// dtypes, shapes and the sizes of outputs before a call; values (slots, blocks) are checked here.
// Bytes and arrays come as buffers: the draws of `sample`, the int32 numbers of two functions that
// encode the segments of a step for other ranks (segment_changes.py), and the int64 rules and
// capacities of `work_list`. `concatenate_chunks` reads the objects of a plan.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "checks.h"
#include "decoder_layers.h"
#include "key_order.h"
#include "kernels.h"
#include "plan_segments.h"
#include "step_inputs.h"
#include "work_list.h"

namespace bros {
namespace {

struct Level {
  const char* name;
  const KernelTable* table;
  bool (*available)();
  bool is_emulated = false;  // for tests: slower than any other
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return has_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Whether the CPU has tile registers with products of bf16, and the system saves them.
bool cpu_has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAll = 1u << 22 | 1u << 24;  // AMX-BF16, AMX-TILE
  if ((d & kAll) != kAll) return false;
  unsigned low, high;  // the state that is saved; XGETBV exists where there is AVX
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileShapes = 1u << 17, kTileData = 1u << 18;
  return (low & kTileShapes) && (low & kTileData);
}

// Asks Linux for the contents of tiles, which a process must do before its first use of one. It
// refuses that if a signal handler's stack is too small for them.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  static const bool found = kAvx512AmxKernels.linear && has_bf16() && cpu_has_tiles() &&
                            may_use_tiles();
  return found;
}
#endif

// Fastest first. The index of a level is the first argument of every kernel.
const Level kLevels[] = {
#if defined(__x86_64__)
    {"avx512-amx", &kAvx512AmxKernels, has_amx},
    {"avx512-bf16", &kAvx512Bf16Kernels, has_bf16},
    {"avx512-vnni", &kAvx512VnniKernels, has_vnni},
    {"avx512", &kAvx512Kernels, has_avx512},
    {"avx2", &kAvx2Kernels,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
    {"generic", &kGenericKernels, [] { return true; }},
    {"amx-emulated", &kAmxEmulatedKernels, [] { return true; }, true},
};
constexpr long kNumLevels = sizeof kLevels / sizeof kLevels[0];

// Reads positional arguments in order. Errors show in PyErr_Occurred() at the end.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : values_(values), left_(count) {}
  ~Arguments() {
    for (int i = 0; i < held_; ++i) PyBuffer_Release(&views_[i]);
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  template <class T>
  T* pointer() {
    return static_cast<T*>(PyLong_AsVoidPtr(next()));
  }
  PyObject* object() { return next(); }
  long long integer() { return PyLong_AsLongLong(next()); }
  float real() { return static_cast<float>(PyFloat_AsDouble(next())); }

  // Memory with the buffer protocol, valid as long as this object, and how many T it has.
  template <class T>
  const T* buffer(int64_t* count) {
    return static_cast<const T*>(view(PyBUF_SIMPLE, sizeof(T), count));
  }
  template <class T>
  T* writable_buffer(int64_t* count) {
    return static_cast<T*>(view(PyBUF_WRITABLE, sizeof(T), count));
  }

  const KernelTable* table() {
    const long long level = integer();
    if (level >= 0 && level < kNumLevels && kLevels[level].available()) {
      return kLevels[level].table;
    }
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no such level on this machine");
    return nullptr;
  }

  HeadLayout layout() {
    HeadLayout l;
    l.heads = static_cast<int>(integer());
    l.kv_heads = static_cast<int>(integer());
    l.head_dim = static_cast<int>(integer());
    return l;
  }

  KvCache cache() {
    KvCache c;
    c.k = pointer<void>();
    c.v = pointer<void>();
    c.type = static_cast<KvType>(integer());
    c.num_blocks = integer();
    c.block_size = integer();
    return c;
  }

  // Where the tokens of a step are: positions, slots and the rotary table.
  void places(RopeArgs* a) {
    a->positions = pointer<const int32_t>();
    a->slots = pointer<const int32_t>();
    a->cos_sin = pointer<const float>();
    a->max_positions = integer();
    a->rotary_dim = integer();
  }

  void batch(AttentionArgs* a) {
    a->query_start = pointer<const int32_t>();
    a->segment_start = pointer<const int32_t>();
    a->segments = pointer<const int32_t>();
    a->rows = integer();
    a->num_segments = integer();
    a->shared = shared();
  }

  WorkBatch work_batch() {
    AttentionArgs a;
    batch(&a);
    const SharedArgs& s = a.shared;
    WorkBatch b = {a.query_start, a.segment_start, a.segments, a.rows, a.num_segments};
    if (!s.parts) return b;
    b.part_start = s.row_start;
    b.part_rows = s.rows;
    b.part_segment_start = s.segment_start;
    b.part_segments = s.segments;
    b.parts = s.parts;
    b.num_part_rows = s.num_rows;
    b.num_part_segments = s.num_segments;
    return b;
  }

  // An array of int64 numbers, as a struct of as many.
  template <class T>
  T numbers() {
    T result = {};
    int64_t count = 0;
    const int64_t* found = buffer<int64_t>(&count);
    if (PyErr_Occurred()) return result;
    if (count * sizeof *found == sizeof result) {
      memcpy(&result, found, sizeof result);
    } else {
      PyErr_SetString(PyExc_ValueError, "wrong number of int64 numbers");
    }
    return result;
  }

  SharedArgs shared() {
    SharedArgs s;
    s.row_start = pointer<const int32_t>();
    s.rows = pointer<const int32_t>();
    s.segment_start = pointer<const int32_t>();
    s.segments = pointer<const int32_t>();
    s.parts = integer();
    s.num_rows = integer();
    s.num_segments = integer();
    return s;
  }

  bool ok() const {
    if (PyErr_Occurred()) return false;
    if (left_ != 0) PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return left_ == 0;
  }

 private:
  PyObject* next() {
    if (--left_ >= 0) return *values_++;
    left_ = -1;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too few arguments");
    return Py_None;
  }

  void* view(int flags, size_t size, int64_t* count) {
    *count = 0;
    PyObject* value = next();
    if (PyErr_Occurred() || PyObject_GetBuffer(value, &views_[held_], flags) != 0) return nullptr;
    const Py_buffer& found = views_[held_++];
    *count = found.len / static_cast<Py_ssize_t>(size);
    return found.buf;
  }

  static constexpr int kMostBuffers = 7;
  PyObject* const* values_;
  Py_ssize_t left_;
  Py_buffer views_[kMostBuffers];
  int held_ = 0;
};

// A kernel with less work, in elements, takes some ten microseconds and keeps the GIL: to get a
// released GIL back may take another thread's switch interval (5 ms).
constexpr int64_t kKeepGil = 65536;

PyObject* index_error(const char* message) {
  PyErr_SetString(PyExc_IndexError, message);
  return nullptr;
}

template <class Args>
PyObject* call(const char* (*kernel)(const Args&), const Args& args, int64_t work) {
  const char* error = nullptr;
  if (work < kKeepGil) {
    error = kernel(args);
  } else {
    Py_BEGIN_ALLOW_THREADS;
    error = kernel(args);
    Py_END_ALLOW_THREADS;
  }
  if (error) return index_error(error);
  Py_RETURN_NONE;
}

PyObject* rms_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const KernelTable* table = in.table();
  RmsNormArgs a;
  a.out = in.pointer<float>();
  a.residual = in.pointer<float>();
  a.x = in.pointer<const float>();
  a.weight = in.pointer<const float>();
  a.tokens = in.integer();
  a.size = in.integer();
  a.eps = in.real();
  a.threads = static_cast<int>(in.integer());
  return in.ok() ? call(table->rms_norm, a, a.tokens * a.size) : nullptr;
}

PyObject* rope_and_cache(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const KernelTable* table = in.table();
  RopeArgs a;
  a.qkv = in.pointer<float>();
  a.tokens = in.integer();
  a.layout = in.layout();
  in.places(&a);
  a.cache = in.cache();
  a.q_norm = in.pointer<const float>();
  a.k_norm = in.pointer<const float>();
  a.eps = in.real();
  a.threads = static_cast<int>(in.integer());
  if (!in.ok()) return nullptr;
  if (const char* error = check_rope(a)) return index_error(error);
  return call(table->rope_and_cache, a, a.tokens * a.layout.heads * a.layout.head_dim);
}

PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const KernelTable* table = in.table();
  AttentionArgs a;
  a.out = in.pointer<float>();
  a.qkv = in.pointer<const float>();
  a.tokens = in.integer();
  a.layout = in.layout();
  a.cache = in.cache();
  in.batch(&a);
  a.scale = in.real();
  a.threads = static_cast<int>(in.integer());
  if (!in.ok()) return nullptr;
  if (const char* error = check_attention(a)) return index_error(error);
  // An estimate of the keys per query that needs no pass over the batch.
  const int64_t per_row = a.rows ? a.num_segments / a.rows : 0;
  const int64_t keys = (per_row + a.shared.num_segments) * a.cache.block_size + a.tokens;
  const int64_t work = a.tokens * keys * a.layout.heads * a.layout.head_dim / 8;
  return call(table->attention, a, work);
}

PyObject* silu_and_mul(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const KernelTable* table = in.table();
  SiluArgs a;
  a.out = in.pointer<float>();
  a.in = in.pointer<const float>();
  a.tokens = in.integer();
  a.size = in.integer();
  a.threads = static_cast<int>(in.integer());
  return in.ok() ? call(table->silu_and_mul, a, 2 * a.tokens * a.size) : nullptr;
}

PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const KernelTable* table = in.table();
  LinearArgs a;
  a.out = in.pointer<float>();
  a.x = in.pointer<const float>();
  a.weights = in.pointer<const void>();
  a.bias = in.pointer<const float>();
  a.format = static_cast<WeightFormat>(in.integer());
  a.rows = in.integer();
  a.inputs = in.integer();
  a.outputs = in.integer();
  a.threads = static_cast<int>(in.integer());
  return in.ok() ? call(table->linear, a, a.inputs * a.outputs) : nullptr;
}

PyObject* embed(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const KernelTable* table = in.table();
  EmbedArgs a;
  a.out = in.pointer<float>();
  a.tokens = in.pointer<const int32_t>();
  a.count = in.integer();
  a.weights = in.pointer<const void>();
  a.format = static_cast<WeightFormat>(in.integer());
  a.inputs = in.integer();
  a.outputs = in.integer();
  a.threads = static_cast<int>(in.integer());
  if (!in.ok()) return nullptr;
  if (const char* error = check_embed(a)) return index_error(error);
  return call(table->embed, a, a.count * a.inputs);
}

// Whether Python stops the step before this layer; -1 if it raised an exception.
int stops(PyObject* before_layer, int64_t layer) {
  PyObject* index = PyLong_FromLongLong(layer);
  PyObject* answer = index ? PyObject_CallOneArg(before_layer, index) : nullptr;
  const int stop = answer ? PyObject_IsTrue(answer) : -1;
  Py_XDECREF(answer);
  Py_XDECREF(index);
  return stop;
}

// run_layers(level, weights, kv, ends, first, end, ..., before_layer): layers [first, end) of a
// decoder and what is before and behind them, without the GIL. before_layer, unless it is None, is
// asked before each layer. Returns the layer before which the step was stopped; `end` if it was not.
PyObject* run_layers(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const KernelTable* table = in.table();
  LayersArgs a = {};
  int64_t num_kv = 0, num_ends = 0;
  a.weights = in.buffer<LayerWeights>(&a.layers);
  a.kv = in.buffer<LayerKv>(&num_kv);
  a.ends = in.buffer<DecoderEnds>(&num_ends);
  a.first = in.integer();
  a.end = in.integer();
  a.token_ids = in.pointer<const int32_t>();
  a.residual = in.pointer<float>();
  a.delta = in.pointer<const float>();
  a.new_delta = in.pointer<float>();
  a.rope.tokens = a.attention.tokens = in.integer();
  a.rope.layout = a.attention.layout = in.layout();
  in.places(&a.rope);
  a.rope.cache = a.attention.cache = in.cache();
  in.batch(&a.attention);
  a.attention.scale = in.real();
  a.keeps_all = in.integer();
  a.rows = in.pointer<const int32_t>();
  a.num_rows = in.integer();
  a.residual_of_rows = in.pointer<float>();
  a.hidden = in.pointer<float>();
  a.logits = in.pointer<float>();
  a.num_logits = in.integer();
  a.rope.eps = in.real();
  a.rope.threads = a.attention.threads = static_cast<int>(in.integer());
  PyObject* before_layer = in.object();
  if (!in.ok()) return nullptr;
  if (num_kv != a.layers) return index_error("K and V of some layers are missing");
  if (!num_ends && (a.token_ids || a.hidden || a.num_logits)) return index_error("the layers have no ends");
  if (const char* error = check_layers(a)) return index_error(error);

  DecoderLayers layers(*table, a);
  int64_t layer = a.first;
  PyThreadState* released = PyEval_SaveThread();
  const char* error = layers.begin();
  for (; layer < a.end && !error; ++layer) {
    if (before_layer != Py_None) {
      PyEval_RestoreThread(released);
      const int stop = stops(before_layer, layer);
      if (stop) return stop < 0 ? nullptr : PyLong_FromLongLong(layer);
      released = PyEval_SaveThread();
    }
    error = layers.run(layer);
  }
  if (!error) error = layers.finish();
  PyEval_RestoreThread(released);
  if (!error) return PyLong_FromLongLong(a.end);
  PyErr_SetString(PyExc_MemoryError, error);
  return nullptr;
}

PyObject* sample(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const KernelTable* table = in.table();
  SampleArgs a;
  a.sampled = in.writable_buffer<SampledRow>(&a.num_sampled);
  a.tops = in.writable_buffer<TokenLogprob>(&a.num_top);
  a.top = in.integer();
  a.logits = in.pointer<const float>();
  a.num_rows = in.integer();
  a.vocab = in.integer();
  a.draws = in.buffer<Draw>(&a.num_draws);
  a.edit_tokens = in.buffer<int32_t>(&a.num_edits);
  a.edit_values = in.buffer<float>(&a.num_edit_values);
  a.history = in.buffer<int32_t>(&a.num_history);
  a.masks = in.buffer<uint8_t>(&a.num_mask_bytes);
  a.threads = static_cast<int>(in.integer());
  return in.ok() ? call(table->sample, a, a.num_draws * a.vocab) : nullptr;
}

// order_segments(positions, num_blocks, block_size, start, rows, segments, out_start, out): the
// number of pieces.
PyObject* ordered(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const int32_t* positions = in.pointer<const int32_t>();
  const int64_t num_blocks = in.integer();
  const int64_t block_size = in.integer();
  const int32_t* start = in.pointer<const int32_t>();
  const int64_t rows = in.integer();
  const Piece* segments = in.pointer<const Piece>();
  int32_t* out_start = in.pointer<int32_t>();
  Piece* out = in.pointer<Piece>();
  if (!in.ok()) return nullptr;
  const int64_t pieces = order_segments(positions, num_blocks, block_size, start, rows, segments,
                                        out_start, out);
  if (pieces >= 0) return PyLong_FromLongLong(pieces);
  PyErr_SetString(PyExc_IndexError, "segment outside the KV cache");
  return nullptr;
}

PyObject* wrong_work(const char* error) {
  PyErr_SetString(error == WorkList::kNoMemory ? PyExc_MemoryError : PyExc_ValueError, error);
  return nullptr;
}

// batch_counts(batch): its tokens, its rows of no token, of several tokens, and the segments of its
// work list.
PyObject* batch_counts(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const WorkBatch batch = in.work_batch();
  if (!in.ok()) return nullptr;
  BatchCounts found;
  if (const char* error = found.count(batch)) return wrong_work(error);
  return Py_BuildValue("LLLL", static_cast<long long>(found.tokens),
                       static_cast<long long>(found.empty), static_cast<long long>(found.several),
                       static_cast<long long>(found.segments));
}

// work_list_sizes(batch, rules): WorkSizes of its list.
PyObject* work_list_sizes(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const WorkBatch batch = in.work_batch();
  const WorkRules rules = in.numbers<WorkRules>();
  if (!in.ok()) return nullptr;
  WorkList list(batch, rules);
  if (const char* error = list.measure()) return wrong_work(error);
  const WorkSizes& s = list.sizes();
  const int64_t sizes[] = {s.one_items,   s.tile_items, s.listed,  s.merge_tokens,
                           s.merge_slots, s.segments,   s.partials};
  PyObject* result = PyTuple_New(7);
  for (Py_ssize_t i = 0; result && i < 7; ++i) {
    PyObject* size = PyLong_FromLongLong(sizes[i]);
    if (size) {
      PyTuple_SET_ITEM(result, i, size);
    } else {
      Py_CLEAR(result);
    }
  }
  return result;
}

// work_list(batch, rules, out, capacity): how many int32 numbers of `out` are used, and the number
// of partial results. capacity: WorkSizes and then WorkSections. Nothing is written if the list
// exceeds it.
PyObject* work_list(PyObject*, PyObject* const* values, Py_ssize_t count) {
  struct Room {
    WorkSizes sizes;
    WorkSections at;
  };
  Arguments in(values, count);
  const WorkBatch batch = in.work_batch();
  const WorkRules rules = in.numbers<WorkRules>();
  int32_t* out = in.pointer<int32_t>();
  const Room room = in.numbers<Room>();
  if (!in.ok()) return nullptr;
  if (!room.at.have_room(room.sizes)) return wrong_work("sections of a work list overlap");
  WorkList list(batch, rules);
  const char* error = list.measure();
  const WorkSizes& sizes = list.sizes();
  if (!error && !room.sizes.hold(sizes)) error = "the work list exceeds its capacity";
  if (!error) error = list.write(room.at, out);
  if (error) return wrong_work(error);
  return Py_BuildValue("LL", static_cast<long long>(room.at.segments + 3 * sizes.segments),
                       static_cast<long long>(sizes.partials));
}

// concatenate_chunks(chunks): the chunks of a plan as arrays, see step_inputs.h.
PyObject* concatenate_chunks(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  PyObject* chunks = in.object();
  if (!in.ok()) return nullptr;
  if (!PyTuple_Check(chunks)) {
    PyErr_SetString(PyExc_TypeError, "the chunks of a plan must be a tuple");
    return nullptr;
  }
  StepChunks step;
  return step.read(chunks) ? step.result() : nullptr;
}

// panel_layout(level): how it wants weights to be packed, as in PanelLayout (kernels/panels.py).
PyObject* panel_layout(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const KernelTable* table = in.table();
  if (!in.ok()) return nullptr;
  return Py_BuildValue("LN", static_cast<long long>(table->panel_outputs),
                       PyBool_FromLong(table->tile_product != nullptr));
}

// The int32 numbers of arguments with the buffer protocol. Errors show in PyErr_Occurred().
class Buffers {
 public:
  Buffers(PyObject* const* values, Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted) {
      PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
      return;
    }
    while (held_ < count && PyObject_GetBuffer(values[held_], &views_[held_], PyBUF_SIMPLE) == 0) {
      ++held_;
    }
  }
  ~Buffers() {
    for (Py_ssize_t i = 0; i < held_; ++i) PyBuffer_Release(&views_[i]);
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  const int32_t* numbers(int i) const { return static_cast<const int32_t*>(views_[i].buf); }
  int64_t count(int i) const { return views_[i].len / static_cast<Py_ssize_t>(sizeof(int32_t)); }

 private:
  Py_buffer views_[5];
  Py_ssize_t held_ = 0;
};

PyObject* wrong_segments() {
  PyErr_SetString(PyExc_ValueError, "segments, their starts and places do not fit each other");
  return nullptr;
}

// A growing list of pairs: index of a number, and its new value.
struct Changes {
  int32_t* places = nullptr;
  int32_t* values = nullptr;
  int64_t count = 0, room = 0;
  bool ok = true;

  ~Changes() {
    PyMem_Free(places);
    PyMem_Free(values);
  }
  void add(int32_t place, int32_t value) {
    if (count == room && !grow()) return;
    places[count] = place;
    values[count++] = value;
  }

 private:
  bool grow() {
    room = room ? 2 * room : 256;
    void* more = PyMem_Realloc(places, room * sizeof *places);
    if (more) places = static_cast<int32_t*>(more);
    void* most = more ? PyMem_Realloc(values, room * sizeof *values) : nullptr;
    if (most) values = static_cast<int32_t*>(most);
    ok = ok && most;
    if (!most) room = count;
    return most;
  }
};

// segment_changes(before_starts, before, previous_rows, starts, numbers): bytes of the indexes of
// all numbers that differ from the prediction, then of their values.
PyObject* segment_changes(PyObject*, PyObject* const* values, Py_ssize_t count) {
  const Buffers in(values, count, 5);
  if (PyErr_Occurred()) return nullptr;
  const RowSegments before{in.numbers(0), in.numbers(1), in.count(0) - 1};
  const RowSegments now{in.numbers(3), in.numbers(4), in.count(3) - 1};
  if (!before.valid(in.count(1)) || !now.valid(in.count(4)) || in.count(2) != now.rows ||
      !places_valid(in.numbers(2), now.rows, before)) {
    return wrong_segments();
  }
  Changes found;
  for_each_change(before, in.numbers(2), now, [&](int64_t place) {
    found.add(static_cast<int32_t>(place), now.numbers[place]);
  });
  if (!found.ok) return PyErr_NoMemory();
  const int64_t bytes = found.count * static_cast<int64_t>(sizeof(int32_t));
  PyObject* result = PyBytes_FromStringAndSize(nullptr, 2 * bytes);
  if (result && bytes) {
    memcpy(PyBytes_AS_STRING(result), found.places, bytes);
    memcpy(PyBytes_AS_STRING(result) + bytes, found.values, bytes);
  }
  return result;
}

// changed_segments(before_starts, before, previous_rows, starts, changes): the numbers, as a
// bytearray.
PyObject* changed_segments(PyObject*, PyObject* const* values, Py_ssize_t count) {
  const Buffers in(values, count, 5);
  if (PyErr_Occurred()) return nullptr;
  const RowSegments before{in.numbers(0), in.numbers(1), in.count(0) - 1};
  const RowSegments now{in.numbers(3), nullptr, in.count(3) - 1};
  const int64_t total = now.rows < 0 ? -1 : kSegmentWidth * now.starts[now.rows];
  if (total < 0 || !before.valid(in.count(1)) || !now.valid(total) || in.count(2) != now.rows ||
      !places_valid(in.numbers(2), now.rows, before) || in.count(4) % 2 != 0) {
    return wrong_segments();
  }
  PyObject* result = PyByteArray_FromStringAndSize(nullptr, total * sizeof(int32_t));
  if (!result) return nullptr;
  int32_t* out = reinterpret_cast<int32_t*>(PyByteArray_AS_STRING(result));
  guess(before, in.numbers(2), now.starts, now.rows, out);
  const int64_t changed = in.count(4) / 2;
  for (int64_t i = 0; i < changed; ++i) {
    const int32_t place = in.numbers(4)[i];
    if (place < 0 || place >= total) {
      Py_DECREF(result);
      return wrong_segments();
    }
    out[place] = in.numbers(4)[changed + i];
  }
  return result;
}

// tile_product(level, c, a, b, rows, columns, depth): one product of tile registers, see
// TileProductArgs.
PyObject* tile_product(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const KernelTable* table = in.table();
  TileProductArgs a;
  a.c = in.pointer<void>();
  a.a = in.pointer<const void>();
  a.b = in.pointer<const void>();
  a.rows = in.integer();
  a.columns = in.integer();
  a.depth = in.integer();
  if (!in.ok()) return nullptr;
  if (!table->tile_product) return index_error("this level has no tile registers");
  return call(table->tile_product, a, 0);
}

// (name, whether this machine can run it, whether it is emulated) of all levels built, fastest
// first.
PyObject* levels(PyObject*, PyObject*) {
  PyObject* result = PyTuple_New(kNumLevels);
  for (Py_ssize_t i = 0; result && i < kNumLevels; ++i) {
    PyObject* item =
        Py_BuildValue("(sOO)", kLevels[i].name, kLevels[i].available() ? Py_True : Py_False,
                      kLevels[i].is_emulated ? Py_True : Py_False);
    if (!item) {
      Py_CLEAR(result);
    } else {
      PyTuple_SET_ITEM(result, i, item);
    }
  }
  return result;
}

template <PyObject* (*Function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Function)),
          METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    method<rms_norm>("rms_norm"),
    method<rope_and_cache>("rope_and_cache"),
    method<attention>("attention"),
    method<ordered>("order_segments"),
    method<batch_counts>("batch_counts"),
    method<work_list_sizes>("work_list_sizes"),
    method<work_list>("work_list"),
    method<concatenate_chunks>("concatenate_chunks"),
    method<silu_and_mul>("silu_and_mul"),
    method<linear>("linear"),
    method<embed>("embed"),
    method<run_layers>("run_layers"),
    method<sample>("sample"),
    method<panel_layout>("panel_layout"),
    method<tile_product>("tile_product"),
    method<segment_changes>("segment_changes"),
    method<changed_segments>("changed_segments"),
    {"levels", levels, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_C",
                      "Compiled kernels; see cpu_ops.py.",
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace
}  // namespace bros

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&bros::module);
  if (module) PyModule_AddStringConstant(module, "SOURCES", BROS_SOURCES);
  return module;
}
