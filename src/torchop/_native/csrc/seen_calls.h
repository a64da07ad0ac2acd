// seen_calls.h: a cache that remembers which kernel was selected for a call, so that similar calls
// can skip the selection (see choice.cpp). The key consists of the tensors' metadata (shapes,
// strides, dtypes, devices) and the values of the other arguments.
#pragma once

#include <cstring>
#include <vector>

#include <c10/util/SmallVector.h>
#include <torch/csrc/Size.h>

#include "arguments.h"
#include "dispatch.h"
#include "kinds.h"

namespace torchop {

// Calls with a longer key than this (32 KiB) are not cached.
constexpr size_t max_key_words = 4096;

// The key of a call. It contains no pointers and no tensor data.
class CallKey {
 public:
  // words_[0] is reserved for the subject (see `set_subject`).
  CallKey() : words_{0} {}

  // Appends all arguments of a vectorcall. Returns false if the key gets too long, or if an
  // argument has a type that keys do not support.
  bool read(PyObject* const* args, size_t count, PyObject* keywords) {
    add(count);
    for (size_t index = 0; index < count; ++index) {
      if (!add_value(args[index]))
        return false;
    }
    const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t index = 0; index < named; ++index) {
      if (!add_value(PyTuple_GET_ITEM(keywords, index)) || !add_value(args[count + size_t(index)]))
        return false;
    }
    return words_.size() <= max_key_words;
  }

  // Sets the subject, a number that the caller chooses so that calls with the same arguments can
  // have different keys. For example, choice.cpp uses one subject per combination of settings.
  void set_subject(uint64_t subject) {
    words_[0] = subject;
  }

  uint64_t hash() const {
    uint64_t hash = 0;
    for (const uint64_t word : words_) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    }
    return hash;
  }

  const uint64_t* begin() const {
    return words_.data();
  }
  size_t size() const {
    return words_.size();
  }

 private:
  // Each argument is stored in the key as one or more 64-bit words. The lowest byte of the first
  // word is a Tag, the type of the argument. The other bytes contain a length, or the value itself.
  // Because of the tags, different argument lists never have equal keys.
  enum class Tag : uint8_t {
    None,
    True,
    False,
    Int,
    Float,
    Complex,
    Str,
    Dtype,
    Device,
    Layout,
    MemoryFormat,
    List,
    Tensor,
  };

  void add(uint64_t word) {
    words_.push_back(word);
  }

  bool add_tag(Tag tag, uint64_t more = 0) {
    add(uint64_t(tag) | more << 8);
    return true;
  }

  void add_bytes(const void* bytes, size_t size) {
    const size_t start = words_.size();
    words_.resize(start + (size + sizeof(uint64_t) - 1) / sizeof(uint64_t)); // fills with zeros
    if (size != 0)
      std::memcpy(words_.data() + start, bytes, size);
  }

  bool add_number(Tag tag, double number) {
    add_tag(tag);
    // Add the bits, because as numbers 0.0 equals -0.0, and nan does not equal itself.
    add_bytes(&number, sizeof(number));
    return true;
  }

  static uint64_t packed(c10::Device device) {
    return uint64_t(uint8_t(device.type())) | uint64_t(uint8_t(device.index())) << 8;
  }

  bool add_value(PyObject* value) {
    if (is_tensor(value))
      return add_tensor(*impl_of(value));
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value) || THPSize_Check(value)) {
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
      add_tag(Tag::List, uint64_t(size));
      for (Py_ssize_t index = 0; index < size; ++index) {
        PyObject* item = PySequence_Fast_GET_ITEM(value, index);
        if (!(is_tensor(item) ? add_tensor(*impl_of(item)) : add_plain(item)))
          return false;
      }
      return true;
    }
    return add_plain(value);
  }

  bool add_tensor(const at::TensorImpl& impl) {
    // Symbolic sizes, and sizes that come from Python code, are not supported.
    if (C10_UNLIKELY(!has_plain_keys(impl) || impl.has_symbolic_sizes_strides()))
      return false;
    const c10::IntArrayRef sizes = impl.sizes(), strides = impl.strides();
    const auto dtype = uint64_t(c10::typeMetaToScalarType(impl.dtype()));
    add_tag(Tag::Tensor, dtype | packed(impl.device()) << 8 | uint64_t(sizes.size()) << 24);
    for (const int64_t size : sizes)
      add(uint64_t(size));
    for (const int64_t stride : strides)
      add(uint64_t(stride));
    return true;
  }

  bool add_plain(PyObject* value) {
    if (value == Py_None)
      return add_tag(Tag::None);
    if (PyBool_Check(value))
      return add_tag(value == Py_True ? Tag::True : Tag::False);
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
      add_tag(Tag::Int);
      add(uint64_t(number));
      return overflow == 0;
    }
    if (PyFloat_CheckExact(value))
      return add_number(Tag::Float, PyFloat_AS_DOUBLE(value));
    if (PyUnicode_CheckExact(value)) {
      const auto kind = size_t(PyUnicode_KIND(value)), length = size_t(PyUnicode_GET_LENGTH(value));
      add_tag(Tag::Str, kind | length << 8);
      add_bytes(PyUnicode_DATA(value), kind * length);
      return true;
    }
    return add_unusual(value);
  }

  __attribute__((noinline)) bool add_unusual(PyObject* value) {
    if (PyComplex_CheckExact(value)) {
      add_number(Tag::Complex, PyComplex_RealAsDouble(value));
      return add_number(Tag::Complex, PyComplex_ImagAsDouble(value));
    }
    if (THPDtype_Check(value))
      return add_tag(Tag::Dtype, uint64_t(reinterpret_cast<THPDtype*>(value)->scalar_type));
    if (THPDevice_Check(value))
      return add_tag(Tag::Device, packed(reinterpret_cast<THPDevice*>(value)->device));
    if (THPLayout_Check(value))
      return add_tag(Tag::Layout, uint64_t(reinterpret_cast<THPLayout*>(value)->layout));
    if (THPMemoryFormat_Check(value)) {
      const auto format = reinterpret_cast<THPMemoryFormat*>(value)->memory_format;
      return add_tag(Tag::MemoryFormat, uint64_t(format));
    }
    return false;
  }

  c10::SmallVector<uint64_t, 40> words_;
};

// A hash table with open addressing. It owns references to the kernels. The size is limited,
// because some programs call operators with new shapes all the time. If the table is full (see
// `has_capacity`), the caller must replace it with an empty one. Not thread-safe.
class SeenCalls {
 public:
  PyObject* find(const CallKey& key, uint64_t hash) const { // borrowed; nullptr if missing
    for (size_t place = hash & mask(); !slots_.empty(); place = (place + 1) & mask()) {
      const Slot& slot = slots_[place];
      if (slot.function == nullptr)
        return nullptr;
      if (slot.hash == hash && slot.size == key.size() &&
          std::memcmp(&words_[slot.start], key.begin(), key.size() * sizeof(uint64_t)) == 0)
        return slot.function;
    }
    return nullptr;
  }

  // Adds a key that is not in the table yet. `has_capacity(key)` must be true.
  void add(const CallKey& key, uint64_t hash, PyObject* function) {
    if (2 * (count_ + 1) > slots_.size())
      grow();
    const Slot slot{hash, uint32_t(words_.size()), uint32_t(key.size()), Py_NewRef(function)};
    words_.insert(words_.end(), key.begin(), key.begin() + key.size());
    put(slot);
    ++count_;
  }

  bool has_capacity(const CallKey& key) const {
    return count_ < max_keys && words_.size() + key.size() <= max_words;
  }

  size_t count() const {
    return count_;
  }

  template <class Visitor>
  void each_function(Visitor&& visit) const {
    for (const Slot& slot : slots_) {
      if (slot.function != nullptr)
        visit(slot.function);
    }
  }

 private:
  struct Slot {
    uint64_t hash = 0;
    uint32_t start = 0, size = 0; // position of the key in `words_`
    PyObject* function = nullptr; // owned; nullptr if the slot is empty
  };

  static constexpr size_t max_keys = 4096;
  static constexpr size_t max_words = size_t{1} << 18; // 2 MiB for all keys

  size_t mask() const {
    return slots_.size() - 1; // a power of two minus one
  }

  void put(const Slot& slot) {
    size_t place = slot.hash & mask();
    while (slots_[place].function != nullptr)
      place = (place + 1) & mask();
    slots_[place] = slot;
  }

  void grow() {
    std::vector<Slot> before(std::max<size_t>(16, 2 * slots_.size()));
    before.swap(slots_);
    for (const Slot& slot : before) {
      if (slot.function != nullptr)
        put(slot);
    }
  }

  std::vector<Slot> slots_;
  std::vector<uint64_t> words_;
  size_t count_ = 0;
};

} // namespace torchop
