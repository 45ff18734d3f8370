// bros.kernels._C: the kernels as Python functions of addresses and sizes.
//
// Tensors come as data_ptr() integers, so this needs no torch headers. cpu_ops.py checks types
// and shapes before it calls; what only the data can tell (slots, blocks) is checked here.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

namespace bros {
namespace {

struct Level {
  const char* name;
  const KernelTable* table;
  bool (*available)();
};

// Best first. The index of a level is the first argument of every kernel.
const Level kLevels[] = {
#if defined(__x86_64__)
    {"avx512", &kAvx512Kernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     }},
    {"avx2", &kAvx2Kernels,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
    {"generic", &kGenericKernels, [] { return true; }},
};
constexpr long kNumLevels = sizeof kLevels / sizeof kLevels[0];

// Reads positional arguments in order. Errors show in PyErr_Occurred() at the end.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : values_(values), left_(count) {}

  template <class T>
  T* pointer() {
    return static_cast<T*>(PyLong_AsVoidPtr(next()));
  }
  long long integer() { return PyLong_AsLongLong(next()); }
  float real() { return static_cast<float>(PyFloat_AsDouble(next())); }

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

  PyObject* const* values_;
  Py_ssize_t left_;
};

// Work below this many elements is done in some ten microseconds and keeps the GIL: giving it up
// could mean waiting for another thread's switch interval (5 ms) to get it back.
constexpr int64_t kKeepGil = 65536;

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
  if (!error) Py_RETURN_NONE;
  PyErr_SetString(PyExc_IndexError, error);
  return nullptr;
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
  a.positions = in.pointer<const int32_t>();
  a.slots = in.pointer<const int32_t>();
  a.cos_sin = in.pointer<const float>();
  a.max_positions = in.integer();
  a.rotary_dim = in.integer();
  a.cache = in.cache();
  a.q_norm = in.pointer<const float>();
  a.k_norm = in.pointer<const float>();
  a.eps = in.real();
  a.threads = static_cast<int>(in.integer());
  const int64_t work = a.tokens * a.layout.heads * a.layout.head_dim;
  return in.ok() ? call(table->rope_and_cache, a, work) : nullptr;
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
  a.query_start = in.pointer<const int32_t>();
  a.segment_start = in.pointer<const int32_t>();
  a.segments = in.pointer<const int32_t>();
  a.rows = in.integer();
  a.num_segments = in.integer();
  a.shared = in.shared();
  a.scale = in.real();
  a.threads = static_cast<int>(in.integer());
  // A guess of the keys per query that needs no pass over the batch.
  const int64_t per_row = a.rows ? a.num_segments / a.rows : 0;
  const int64_t keys = (per_row + a.shared.num_segments) * a.cache.block_size + a.tokens;
  const int64_t work = a.tokens * keys * a.layout.heads * a.layout.head_dim / 8;
  return in.ok() ? call(table->attention, a, work) : nullptr;
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

// The names of all levels built, best first, and whether this machine can run them.
PyObject* levels(PyObject*, PyObject*) {
  PyObject* result = PyTuple_New(kNumLevels);
  for (Py_ssize_t i = 0; result && i < kNumLevels; ++i) {
    PyObject* item =
        Py_BuildValue("(sO)", kLevels[i].name, kLevels[i].available() ? Py_True : Py_False);
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
    method<silu_and_mul>("silu_and_mul"),
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

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&bros::module); }
