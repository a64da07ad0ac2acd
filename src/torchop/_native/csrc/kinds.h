// kinds.h: schema types, and the conversions of arguments to them.
//
// The dispatcher converts arguments: a tuple to a list, an int to a float, a string to a device.
// Native calls pass an argument unchanged if the dispatcher would, and convert numbers and strings
// like the dispatcher (an int to a float, an IntEnum to an int). Calls with other arguments fall
// back to the dispatcher, which converts them or raises the right error.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string_view>

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

namespace torchop {

// The element type of a parameter.
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
  NoneType,
  // An instance of a class that is registered as an opaque type. The dispatcher does not check the
  // class, so neither do native calls.
  Object,
  Any, // the conversion depends on the value
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

// Parses a type as printed by PyTorch, such as "Optional[List[int]]". Returns false if native calls
// do not support it.
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
      {"NoneType", Base::NoneType},
      {"PyObject", Base::Object},
      {"Any", Base::Any},
  };
  for (const Name& name : names) {
    if (name.text == text) {
      kind.base = name.base;
      return !kind.items_are_optional || kind.base == Base::Tensor || kind.base == Base::Object;
    }
  }
  return false;
}

// -0.0 equals a default of 0.0, so the dispatcher drops it, and the kernel receives 0.0.
inline bool is_negative_zero(PyObject* value) {
  const double number = PyFloat_AS_DOUBLE(value);
  return number == 0.0 && std::signbit(number);
}

// C++ strings are UTF-8, which cannot represent lone surrogates.
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

// Returns whether PyTorch passes an object on without inspecting it. It checks for
// `__torch_function__`, for tensors in containers, and (with isinstance, so through `__class__`)
// for tensors. The checks here must not run Python code of the object's class, because the
// dispatcher would run it a second time.
inline bool is_plain_object(PyObject* value) {
  static PyObject* const function = PyUnicode_InternFromString("__torch_function__");
  static PyObject* const declared = PyUnicode_InternFromString("__class__");
  constexpr unsigned long containers =
      Py_TPFLAGS_LIST_SUBCLASS | Py_TPFLAGS_TUPLE_SUBCLASS | Py_TPFLAGS_DICT_SUBCLASS;
  PyTypeObject* type = Py_TYPE(value);
  if (type->tp_getattro != PyObject_GenericGetAttr || PyType_HasFeature(type, containers) ||
      _PyType_Lookup(type, function) != nullptr ||
      _PyType_Lookup(type, declared) != _PyType_Lookup(&PyBaseObject_Type, declared))
    return false;
  PyObject* own = nullptr; // the object's own attribute
  const int found = PyObject_GetOptionalAttr(value, function, &own);
  if (C10_LIKELY(found == 0))
    return true;
  PyErr_Clear();
  Py_XDECREF(own);
  return false;
}

// Returns whether the kernel would receive this very object. Not for tensors, see
// `Values::inspect`.
inline bool passes_unchanged(Base base, PyObject* value) {
  switch (base) {
    // Exact types only: for a subclass such as IntEnum, the kernel receives a plain int.
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
      // A generator has dispatch keys of its own, which TensorSummary does not include.
      return false;
    case Base::NoneType:
      return value == Py_None;
    case Base::Object:
      return is_plain_object(value);
    case Base::Any:
      // Other values change: a dtype becomes an int, an object a copy. A list keeps its type only
      // if all items have the same type.
      return value == Py_None || PyComplex_CheckExact(value) || PyFloat_CheckExact(value) ||
          passes_unchanged(Base::Bool, value) || passes_unchanged(Base::Int, value) ||
          passes_unchanged(Base::Str, value) || passes_unchanged(Base::Device, value);
    case Base::Tensor:
      break;
  }
  return false;
}

// Returns whether a value is an int that inherits `int.__float__`. The dispatcher calls an
// overridden `__float__`, but `plain_float` would not.
inline bool has_plain_float(PyObject* value) {
  return PyLong_Check(value) &&
      Py_TYPE(value)->tp_as_number->nb_float == PyLong_Type.tp_as_number->nb_float;
}

// Conversions in C, like the dispatcher's, so that no overridden method of a subclass runs. Return
// a new reference, or nullptr (perhaps with an exception) if the dispatcher must convert the value
// or raise.
inline PyObject* plain_int(PyObject* value) {
  return fits_in_64_bits(value) ? PyLong_FromLongLong(PyLong_AsLongLong(value)) : nullptr;
}

inline PyObject* plain_float(PyObject* value) {
  if (PyFloat_Check(value))
    return is_negative_zero(value) ? nullptr : PyFloat_FromDouble(PyFloat_AS_DOUBLE(value));
  const double number = PyLong_AsDouble(value);
  return number == -1.0 && PyErr_Occurred() ? nullptr : PyFloat_FromDouble(number);
}

inline PyObject* plain_str(PyObject* value) {
  return is_utf8(value) ? PyUnicode_FromObject(value) : nullptr;
}

// Converts a value to the int, float or str that the kernel would receive: int and bool to float,
// bool to int, and instances of subclasses such as IntEnum. Returns a new reference, or nullptr
// without an exception if the call must fall back to the dispatcher.
__attribute__((noinline)) inline PyObject* converted_to(Base base, PyObject* value) {
  // `__torch_function__` of a subclass may intercept the call.
  if (!PyLong_CheckExact(value) && !PyBool_Check(value) && !is_plain_object(value))
    return nullptr;
  PyObject* converted = nullptr;
  const bool takes_ints = base == Base::Int || base == Base::Number;
  const bool takes_floats = base == Base::Float || base == Base::Number;
  if (takes_ints && PyLong_Check(value))
    converted = plain_int(value);
  else if (takes_floats && PyFloat_Check(value))
    converted = plain_float(value);
  else if (base == Base::Float && has_plain_float(value))
    converted = plain_float(value);
  else if (base == Base::Str && PyUnicode_Check(value))
    converted = plain_str(value);
  if (converted == nullptr)
    PyErr_Clear(); // overflow or out of memory: the dispatcher raises the error
  return converted;
}

} // namespace torchop
