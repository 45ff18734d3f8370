// Lays the chunks of a plan end to end (executor/chunk_arrays.py): one array of int32 numbers.
//
//   query_start | segment_start | sample_rows | token_ids | positions | slots | segments
//
// This reads Python objects, unlike the other headers. A first pass takes what it needs of each
// chunk and counts; a second one copies. Between them, and while it copies, code of other objects
// may run, so the second pass checks that the sizes are still those that were counted.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>

#include "plan_segments.h"

namespace bros {

// An attribute of chunks, or of how to sample. Their classes have slots, so that it is at the same
// place in each object. Reading it there halves the time of concatenate_chunks. An object of
// another class than the first one is read with PyObject_GetAttr.
class SlotField {
 public:
  explicit SlotField(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  ~SlotField() { Py_XDECREF(name_); }
  SlotField(const SlotField&) = delete;
  SlotField& operator=(const SlotField&) = delete;

  // Finds the place in objects of a class, if any. False with an exception if there was no memory
  // for the name.
  bool find(PyTypeObject* type) {
    if (!name_) return false;
    if (!type || type->tp_getattro != PyObject_GenericGetAttr) return true;
    PyObject* found = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name_);
    if (!found) PyErr_Clear();
    if (found && Py_IS_TYPE(found, &PyMemberDescr_Type)) {
      const PyMemberDescrObject* slot = reinterpret_cast<PyMemberDescrObject*>(found);
      const bool own = PyType_IsSubtype(type, PyDescr_TYPE(slot));
      if (own && slot->d_member->type == T_OBJECT_EX) offset_ = slot->d_member->offset;
    }
    Py_XDECREF(found);
    return true;
  }

  // A new reference; null with an exception. same: the object's class was given to `find`.
  PyObject* of(PyObject* object, bool same) const {
    if (same && offset_ > 0) {
      PyObject* value = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
      if (value) return Py_NewRef(value);
    }
    return PyObject_GetAttr(object, name_);
  }

 private:
  PyObject* const name_;
  Py_ssize_t offset_ = 0;
};

// What a method returns is false or null if it has set a Python exception.
class StepChunks {
 public:
  StepChunks() = default;
  ~StepChunks() {
    for (Py_ssize_t i = 0; i < count_; ++i) {
      Py_XDECREF(chunks_[i].token_ids);
      Py_XDECREF(chunks_[i].segments);
      Py_XDECREF(chunks_[i].slots);
    }
    PyMem_Free(chunks_);
    Py_XDECREF(samples_);
    Py_XDECREF(sample_type_);
    Py_XDECREF(type_);
  }
  StepChunks(const StepChunks&) = delete;
  StepChunks& operator=(const StepChunks&) = delete;

  // chunks: a tuple, which the caller keeps.
  bool read(PyObject* chunks) {
    const Py_ssize_t count = PyTuple_GET_SIZE(chunks);
    if (count) {
      type_ = Py_TYPE(PyTuple_GET_ITEM(chunks, 0));
      Py_INCREF(type_);
    }
    for (SlotField* field : {&token_ids_, &segments_, &slots_, &start_, &sample_, &request_id_,
                             &readout_, &kept_}) {
      if (!field->find(type_)) return false;
    }
    chunks_ = static_cast<Chunk*>(PyMem_Calloc(count ? count : 1, sizeof(Chunk)));
    if (!chunks_) return wrong(PyExc_MemoryError, "no memory for the chunks of a plan");
    samples_ = PyTuple_New(count);
    if (!samples_) return false;
    while (count_ < count) {
      Chunk* chunk = &chunks_[count_++];  // counted first: the destructor releases what it has
      if (!read(PyTuple_GET_ITEM(chunks, count_ - 1), chunk)) return false;
    }
    return true;
  }

  // (numbers: bytearray, tokens, slots, segments, samples: tuple of (request_id, sample, index of
  // the token in its output), special).
  PyObject* result() const {
    const int64_t offsets = 2 * (count_ + 1);
    const int64_t total =
        offsets + num_samples_ + 2 * tokens_ + num_slots_ + kSegmentWidth * num_segments_;
    if (total > INT32_MAX) {
      too_large();
      return nullptr;
    }
    PyObject* numbers = PyByteArray_FromStringAndSize(nullptr, total * sizeof(int32_t));
    PyObject* samples = numbers ? PyTuple_GetSlice(samples_, 0, num_samples_) : nullptr;
    if (samples && write(reinterpret_cast<int32_t*>(PyByteArray_AS_STRING(numbers)))) {
      return Py_BuildValue("NLLLNO", numbers, static_cast<long long>(tokens_),
                           static_cast<long long>(num_slots_),
                           static_cast<long long>(num_segments_), samples,
                           special_ ? Py_True : Py_False);
    }
    Py_XDECREF(samples);
    Py_XDECREF(numbers);
    return nullptr;
  }

 private:
  struct Chunk {
    PyObject *token_ids, *segments, *slots;  // owned
    int64_t start, tokens, num_segments, num_slots;
    bool sampled;
  };

  static bool wrong(PyObject* exception, const char* message) {
    PyErr_SetString(exception, message);
    return false;
  }

  static bool too_large() {
    return wrong(PyExc_OverflowError, "numbers of a chunk, or how many there are, exceed int32");
  }

  static bool wrong_size() {
    return wrong(PyExc_ValueError, "a chunk has changed, or has numbers of two dimensions");
  }

  bool read(PyObject* object, Chunk* chunk) {
    const bool same = Py_IS_TYPE(object, type_);
    chunk->token_ids = token_ids_.of(object, same);
    chunk->segments = chunk->token_ids ? segments_.of(object, same) : nullptr;
    chunk->slots = chunk->segments ? slots_.of(object, same) : nullptr;
    if (!chunk->slots) return false;
    if (!size(chunk->token_ids, &chunk->tokens) || !size(chunk->slots, &chunk->num_slots) ||
        !size(chunk->segments, &chunk->num_segments)) {
      return false;
    }
    if (chunk->num_segments % kSegmentWidth != 0) {
      return wrong(PyExc_ValueError, "the segments of a chunk are not triples");
    }
    chunk->num_segments /= kSegmentWidth;
    PyObject* start = start_.of(object, same);
    const bool read = start && integer(start, &chunk->start);
    Py_XDECREF(start);
    if (!read || !add_sample(object, same, chunk) ||
        !note_special(readout_.of(object, same)) || !note_special(kept_.of(object, same))) {
      return false;
    }
    if (chunk->start + chunk->tokens - 1 > INT32_MAX) return too_large();
    tokens_ += chunk->tokens;
    num_slots_ += chunk->num_slots;
    num_segments_ += chunk->num_segments;
    return true;
  }

  bool add_sample(PyObject* object, bool same, Chunk* chunk) {
    PyObject* sample = sample_.of(object, same);
    if (!sample) return false;
    chunk->sampled = sample != Py_None;
    bool added = true;
    if (chunk->sampled) {
      PyObject* name = request_id_.of(object, same);
      PyObject* index = name ? output_index(sample, chunk->start + chunk->tokens) : nullptr;
      PyObject* entry = index ? PyTuple_Pack(3, name, sample, index) : nullptr;
      added = entry;
      if (entry) PyTuple_SET_ITEM(samples_, num_samples_++, entry);
      Py_XDECREF(index);
      Py_XDECREF(name);
    }
    Py_DECREF(sample);
    return added;
  }

  // The index in its output of the token after `end` tokens. A new reference.
  PyObject* output_index(PyObject* sample, int64_t end) {
    if (!sample_type_) {
      sample_type_ = Py_TYPE(sample);
      Py_INCREF(sample_type_);
      if (!prompt_len_.find(sample_type_)) return nullptr;
    }
    PyObject* before = prompt_len_.of(sample, Py_IS_TYPE(sample, sample_type_));
    int64_t prompt_len = 0;
    const bool read = before && integer(before, &prompt_len);
    Py_XDECREF(before);
    return read ? PyLong_FromLongLong(end - prompt_len) : nullptr;
  }

  bool note_special(PyObject* value) {
    if (!value) return false;
    special_ |= value != Py_None;
    Py_DECREF(value);
    return true;
  }

  static bool size(PyObject* values, int64_t* size) {
    *size = PyObject_Size(values);
    if (*size < 0) return false;
    return *size <= INT32_MAX || too_large();
  }

  // An integer in the range of int32.
  static bool integer(PyObject* object, int64_t* value) {
    *value = PyLong_AsLongLong(object);
    if (*value == -1 && PyErr_Occurred()) return false;
    return (*value >= INT32_MIN && *value <= INT32_MAX) || too_large();
  }

  bool write(int32_t* query_start) const {
    int32_t* segment_start = query_start + count_ + 1;
    int32_t* sample_rows = segment_start + count_ + 1;
    int32_t* token_ids = sample_rows + num_samples_;
    int32_t* positions = token_ids + tokens_;
    int32_t* slots = positions + tokens_;
    int32_t* segments = slots + num_slots_;
    int32_t token = *query_start = 0, segment = *segment_start = 0;
    for (Py_ssize_t i = 0; i < count_; ++i) {
      const Chunk& chunk = chunks_[i];
      if (!copy_integers(chunk.token_ids, chunk.tokens, token_ids + token) ||
          !copy_numbers(chunk.slots, chunk.num_slots, slots) ||
          !copy_numbers(chunk.segments, kSegmentWidth * chunk.num_segments,
                        segments + kSegmentWidth * segment)) {
        return false;
      }
      for (int64_t t = 0; t < chunk.tokens; ++t) {
        positions[token + t] = static_cast<int32_t>(chunk.start + t);
      }
      slots += chunk.num_slots;
      *++query_start = token += static_cast<int32_t>(chunk.tokens);
      *++segment_start = segment += static_cast<int32_t>(chunk.num_segments);
      if (chunk.sampled) *sample_rows++ = token - 1;
    }
    return true;
  }

  // Copies int32 numbers with the buffer protocol.
  static bool copy_numbers(PyObject* values, int64_t count, int32_t* out) {
    Py_buffer view;
    if (PyObject_GetBuffer(values, &view, PyBUF_CONTIG_RO | PyBUF_FORMAT) != 0) return false;
    const bool numbers = is_int32(view);
    const bool unchanged = view.len == count * static_cast<int64_t>(sizeof *out);
    if (numbers && unchanged && count) memcpy(out, view.buf, view.len);
    PyBuffer_Release(&view);
    if (!numbers) return wrong(PyExc_TypeError, "segments and slots of a chunk must be int32");
    return unchanged || wrong_size();
  }

  // Copies any sequence of integers.
  static bool copy_integers(PyObject* values, int64_t count, int32_t* out) {
    if (!PyList_Check(values) && !PyTuple_Check(values) && PyObject_CheckBuffer(values)) {
      Py_buffer view;
      bool numbers = false;
      if (PyObject_GetBuffer(values, &view, PyBUF_CONTIG_RO | PyBUF_FORMAT) == 0) {
        numbers = is_int32(view);
        PyBuffer_Release(&view);
      } else {
        PyErr_Clear();  // it is read as any other sequence
      }
      if (numbers) return copy_numbers(values, count, out);
    }
    PyObject* items = PySequence_Fast(values, "the tokens of a chunk are no sequence");
    if (!items) return false;
    bool copied = true;
    for (int64_t i = 0; i < count && copied; ++i) {
      // __index__ of an item may change the list.
      if (PySequence_Fast_GET_SIZE(items) != count) break;
      PyObject* item = PySequence_Fast_GET_ITEM(items, i);
      Py_INCREF(item);
      int64_t value = 0;
      copied = integer(item, &value);
      Py_DECREF(item);
      out[i] = static_cast<int32_t>(value);
    }
    if (copied && PySequence_Fast_GET_SIZE(items) != count) copied = wrong_size();
    Py_DECREF(items);
    return copied;
  }

  static bool is_int32(const Py_buffer& view) {
    return view.itemsize == sizeof(int32_t) && view.format && strcmp(view.format, "i") == 0;
  }

  SlotField token_ids_{"token_ids"}, segments_{"segments"}, slots_{"slots"}, start_{"start"},
      sample_{"sample"}, request_id_{"request_id"}, readout_{"readout"}, kept_{"kept"},
      prompt_len_{"prompt_len"};
  PyTypeObject *type_ = nullptr, *sample_type_ = nullptr;  // of the first chunk, sample; owned
  Chunk* chunks_ = nullptr;
  Py_ssize_t count_ = 0;         // of chunks that hold references
  PyObject* samples_ = nullptr;  // a tuple of which the first num_samples_ are set
  int64_t num_samples_ = 0, tokens_ = 0, num_slots_ = 0, num_segments_ = 0;
  bool special_ = false;  // whether a chunk has a readout or continues
};

}  // namespace bros
