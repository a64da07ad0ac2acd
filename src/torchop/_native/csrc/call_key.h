// call_key.h: a cache key for the arguments of a call. choice.cpp uses it to find the kernel that
// was selected for an earlier call with the same key. The key consists of the tensors' metadata
// (shapes, strides, dtypes, devices) and the values of the other arguments.
#pragma once

#include <cstring>

#include <c10/util/SmallVector.h>
#include <torch/csrc/Size.h>

#include "arguments.h"
#include "dispatch.h"
#include "kinds.h"

namespace torchop {

// Calls with a key longer than this (32 KiB) are not cached.
constexpr size_t max_key_words = 4096;

// The key of a call. It contains neither tensor data nor pointers to objects that may be freed.
class CallKey {
 public:
  // The `subject` is part of the key, so calls with equal arguments but different subjects have
  // different keys.
  explicit CallKey(uint64_t subject) : words_{subject} {}

  // Appends all arguments of a vectorcall. Returns false if the key gets too long or an argument
  // has a type that keys do not support.
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

  size_t size() const {
    return words_.size();
  }

  bool operator==(const CallKey& other) const {
    return words_ == other.words_;
  }

  struct Hash {
    size_t operator()(const CallKey& key) const {
      uint64_t hash = 0;
      for (const uint64_t word : key.words_) {
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
      }
      return hash;
    }
  };

 private:
  // Each argument is stored in the key as one or more 64-bit words. The lowest byte of the first
  // word is a Tag, which gives the type of the argument. The other bytes contain a length or the
  // value itself. Thanks to the tags, different argument lists never have equal keys.
  enum class Tag : uint8_t {
    None,
    Bool,
    Int,
    Float,
    Complex,
    Str,
    Device,
    Singleton,
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
    // Compare numbers by their bits, because 0.0 equals -0.0, and nan does not equal itself.
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
    // Sizes that are symbolic or computed in Python are not supported.
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
      return add_tag(Tag::Bool, value == Py_True);
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
    if (THPDevice_Check(value))
      return add_tag(Tag::Device, packed(reinterpret_cast<THPDevice*>(value)->device));
    if (THPDtype_Check(value) || THPLayout_Check(value) || THPMemoryFormat_Check(value)) {
      add_tag(Tag::Singleton); // equal values of these types are the same object
      add(reinterpret_cast<uintptr_t>(value));
      return true;
    }
    return false;
  }

  c10::SmallVector<uint64_t, 40> words_;
};

} // namespace torchop
