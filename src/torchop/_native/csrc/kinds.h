// kinds.h: the types of arguments that native calls (calls without the dispatcher) support.
//
// The dispatcher converts arguments to the types in the schema, for example a tuple to a list, an
// int to a float, or a string to a device. Native calls make the same conversions for lists,
// numbers and strings. If any other argument needs a conversion, the call falls back to the
// dispatcher.
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

// The type of a parameter, or of the list's items if the parameter is a list.
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
  // A Python object that PyTorch passes through without checking its class.
  Object,
  Any, // accepts any value; the dispatcher's conversion depends on the type of the value
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

// Parses a type that is spelled as in `str(argument.type)`, such as "Optional[List[int]]". Returns
// false if native calls do not support the type.
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

// If a parameter has the default 0.0 and the caller passes -0.0, the dispatcher drops the value,
// because it equals the default. The kernel then receives 0.0. To get the same result, calls with
// -0.0 fall back to the dispatcher.
inline bool is_negative_zero(PyObject* value) {
  const double number = PyFloat_AS_DOUBLE(value);
  return number == 0.0 && std::signbit(number);
}

// Returns whether a string can be encoded as UTF-8, as the dispatcher requires. Strings with lone
// surrogates cannot.
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

// Returns whether an object is plain data, i.e. is no container, has no `__torch_function__`, and
// runs none of its own Python code when the dispatcher checks this. The dispatcher looks up
// `__torch_function__`, searches containers for tensors, and calls isinstance, which reads
// `__class__`. Here we must not run such Python code, because the dispatcher would run it a second
// time if the call falls back.
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
  PyObject* own = nullptr; // an attribute of the instance
  const int found = PyObject_GetOptionalAttr(value, function, &own);
  if (C10_LIKELY(found == 0))
    return true;
  PyErr_Clear();
  Py_XDECREF(own);
  return false;
}

// Returns whether the dispatcher would pass an object to the kernel as it is, without converting
// it. Do not call this for tensors, which `Values::inspect` (arguments.h) checks itself.
inline bool passes_unchanged(Base base, PyObject* value) {
  switch (base) {
    // Accept only exact types, because the dispatcher converts instances of subclasses, such as an
    // IntEnum to an int.
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
      return false; // a generator affects the dispatch keys, but TensorSummary covers only tensors
    case Base::NoneType:
      return value == Py_None;
    case Base::Object:
      return is_plain_object(value);
    case Base::Any:
      // Accept only types that the dispatcher does not convert. For example, it converts a dtype to
      // an int.
      return value == Py_None || PyComplex_CheckExact(value) || PyFloat_CheckExact(value) ||
          passes_unchanged(Base::Bool, value) || passes_unchanged(Base::Int, value) ||
          passes_unchanged(Base::Str, value) || passes_unchanged(Base::Device, value);
    case Base::Tensor:
      break;
  }
  return false;
}

// Returns whether a value is an int whose class does not override `__float__`. `plain_float` would
// bypass the override, but the dispatcher would call it.
inline bool has_plain_float(PyObject* value) {
  return PyLong_Check(value) &&
      Py_TYPE(value)->tp_as_number->nb_float == PyLong_Type.tp_as_number->nb_float;
}

// The functions `plain_...` convert an instance of a subclass to exactly int, float or str. Like
// the dispatcher, they bypass overridden methods. They return a new reference. If the value cannot
// be converted, they return nullptr, perhaps with an exception set.
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

// Converts a value to int, float or str as the dispatcher does, for example an IntEnum to an int.
// Returns a new reference, or nullptr without an exception if the call must fall back to the
// dispatcher.
__attribute__((noinline)) inline PyObject* converted_to(Base base, PyObject* value) {
  // A subclass of float or str may define `__torch_function__`. Only the dispatcher calls it, so
  // the call must fall back.
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
    PyErr_Clear(); // the dispatcher raises the error
  return converted;
}

} // namespace torchop
