// kinds.h: types of arguments, and their conversions.
//
// The dispatcher converts arguments to the types of the schema: a tuple to a list, an int to a
// float, a string to a device. Native calls convert lists, numbers and strings in the same way. If
// another argument needs a conversion, the call falls back to the dispatcher, which converts the
// argument or raises an error.
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

// The type of a parameter, or of the items of a list.
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
  // An opaque type of PyTorch. The dispatcher does not check the class, so native calls do not
  // either.
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

// Parses a type in PyTorch's spelling, such as "Optional[List[int]]". Returns false if native calls
// do not support the type.
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

// Calls with -0.0 need a check: the dispatcher drops an argument that equals the default. -0.0
// equals a default of 0.0, so the kernel would receive 0.0.
inline bool is_negative_zero(PyObject* value) {
  const double number = PyFloat_AS_DOUBLE(value);
  return number == 0.0 && std::signbit(number);
}

// Returns whether a string can be converted to UTF-8, which C++ strings use. A string with lone
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

// Returns whether the dispatcher's checks of an object have no effect. The dispatcher looks for
// `__torch_function__` and for tensors in containers, and tests with isinstance, which reads
// `__class__`, whether the object is a tensor. This function must not run Python code of the
// object's class, because the dispatcher would run that code again.
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

// Returns whether the dispatcher would pass this object to the kernel. For tensors, see
// `Values::inspect`.
inline bool passes_unchanged(Base base, PyObject* value) {
  switch (base) {
    // Exact types only: the dispatcher converts an instance of a subclass such as IntEnum to an
    // int.
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
      return false; // has dispatch keys, which TensorSummary does not include
    case Base::NoneType:
      return value == Py_None;
    case Base::Object:
      return is_plain_object(value);
    case Base::Any:
      // The dispatcher converts other values: a dtype to an int, and an object to a copy.
      return value == Py_None || PyComplex_CheckExact(value) || PyFloat_CheckExact(value) ||
          passes_unchanged(Base::Bool, value) || passes_unchanged(Base::Int, value) ||
          passes_unchanged(Base::Str, value) || passes_unchanged(Base::Device, value);
    case Base::Tensor:
      break;
  }
  return false;
}

// Returns whether a value is an int that does not override `__float__`. The dispatcher calls that
// method, and `plain_float` does not.
inline bool has_plain_float(PyObject* value) {
  return PyLong_Check(value) &&
      Py_TYPE(value)->tp_as_number->nb_float == PyLong_Type.tp_as_number->nb_float;
}

// Conversions to exact types. As in the dispatcher, they call no overridden methods. They return a
// new reference, or nullptr, possibly with an exception set.
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

// Converts a value to int, float or str as the dispatcher does: int and bool to float, bool to int,
// and instances of subclasses, such as IntEnum, to the base type. Returns a new reference, or
// nullptr without an exception if the call must fall back to the dispatcher.
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
    PyErr_Clear(); // the dispatcher raises the error
  return converted;
}

} // namespace torchop
