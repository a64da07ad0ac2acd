// kinds.h: which values a schema type takes as they are.
//
// The dispatcher converts arguments: a tuple becomes a list, an int a float, a string a device.
// Here a value either is what the kernel would receive, or an int that is to be a float, or the
// call goes to the dispatcher, which converts it or says what is wrong with it.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string_view>

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>

namespace torchop {

enum class Base : uint8_t {
  Tensor,
  Int,
  Float,
  Bool,
  Str,
  Dtype,
  Device,
  Layout,
  MemoryFormat,
  Number,
  Generator,
};

struct Kind {
  Base base = Base::Tensor;
  bool is_list = false;
  bool is_optional = false;
  bool items_are_optional = false;

  bool holds_tensors() const {
    return base == Base::Tensor;
  }
};

// Reads PyTorch's spelling of a type, such as "Optional[List[int]]"; false if it is none of ours.
inline bool parse_kind(std::string_view text, Kind& kind) {
  constexpr std::string_view optional = "Optional[", list = "List[";
  auto strip = [&](std::string_view prefix) {
    if (text.substr(0, prefix.size()) != prefix || text.back() != ']')
      return false;
    text = text.substr(prefix.size(), text.size() - prefix.size() - 1);
    return true;
  };
  kind = Kind{};
  kind.is_optional = strip(optional);
  kind.is_list = strip(list);
  if (kind.is_list)
    kind.items_are_optional = strip(optional);
  struct Name {
    std::string_view text;
    Base base;
  };
  constexpr Name names[] = {
      {"Tensor", Base::Tensor},
      {"int", Base::Int},
      {"float", Base::Float},
      {"bool", Base::Bool},
      {"str", Base::Str},
      {"ScalarType", Base::Dtype},
      {"Device", Base::Device},
      {"Layout", Base::Layout},
      {"MemoryFormat", Base::MemoryFormat},
      {"number", Base::Number},
      {"Generator", Base::Generator},
  };
  for (const Name& name : names) {
    if (name.text == text) {
      kind.base = name.base;
      return kind.base == Base::Tensor || !kind.items_are_optional;
    }
  }
  return false;
}

// The dispatcher leaves out a float that equals its default, and 0.0 equals -0.0.
inline bool is_negative_zero(PyObject* value) {
  return PyFloat_CheckExact(value) && PyFloat_AS_DOUBLE(value) == 0.0 &&
      std::signbit(PyFloat_AS_DOUBLE(value));
}

// Surrogates without their partner have no UTF-8, in which C++ takes a string.
inline bool is_utf8(PyObject* text) {
  if (PyUnicode_IS_ASCII(text) || PyUnicode_AsUTF8(text) != nullptr)
    return true;
  PyErr_Clear();
  return false;
}

inline bool fits_in_64_bits(PyObject* integer) {
  int overflow = 0;
  (void)PyLong_AsLongLongAndOverflow(integer, &overflow);
  return overflow == 0;
}

// Whether a kernel would receive this very value. Tensors are looked at elsewhere.
inline bool passes_unchanged(Base base, PyObject* value) {
  switch (base) {
    case Base::Int:
      return PyLong_CheckExact(value) && fits_in_64_bits(value);
    case Base::Float:
      return PyFloat_CheckExact(value) && !is_negative_zero(value);
    case Base::Bool:
      return PyBool_Check(value);
    case Base::Str:
      return PyUnicode_CheckExact(value) && is_utf8(value);
    case Base::Dtype:
      return THPDtype_Check(value);
    case Base::Device:
      return THPDevice_Check(value);
    case Base::Layout:
      return THPLayout_Check(value);
    case Base::MemoryFormat:
      return THPMemoryFormat_Check(value);
    case Base::Number:
      return PyBool_Check(value) || (PyLong_CheckExact(value) && fits_in_64_bits(value)) ||
          (PyFloat_CheckExact(value) && !is_negative_zero(value));
    case Base::Generator:
      // It carries dispatch keys of its own.
      return false;
    case Base::Tensor:
      break;
  }
  return false;
}

// What a kernel would receive for an int where a float is expected, which Python's numeric tower
// allows; nullptr, without an exception, for any other conversion.
inline PyObject* converted_to(Base base, PyObject* value) {
  if (base != Base::Float || !PyLong_CheckExact(value))
    return nullptr;
  const double number = PyLong_AsDouble(value);
  PyObject* converted = number == -1.0 && PyErr_Occurred() ? nullptr : PyFloat_FromDouble(number);
  PyErr_Clear(); // it is too large, and the dispatcher says so
  return converted;
}

} // namespace torchop
