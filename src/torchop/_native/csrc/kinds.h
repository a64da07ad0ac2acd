// kinds.h: which values a schema type takes as they are.
//
// The dispatcher converts arguments: a tuple becomes a list, an int a float, a string a device.
// Here a value either is what the kernel would receive, or a number or a string of which the kernel
// receives the plain value, such as an IntEnum, or the call goes to the dispatcher, which converts
// the value or says what is wrong with it.
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
  Object, // of a class that is registered as opaque, if the caller keeps to that: nobody asks
  Any,    // what a value is decides what becomes of it
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

// The dispatcher leaves out a float that equals its default, and 0.0 equals -0.0.
inline bool is_negative_zero(PyObject* value) {
  const double number = PyFloat_AS_DOUBLE(value);
  return number == 0.0 && std::signbit(number);
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

// Whether PyTorch passes an object on without a look into it. It calls `__torch_function__` if
// there is one, and it looks for tensors in containers. A tensor has the first, and says so by
// `__class__`, as may anything else. To ask for these must run no Python of the object's class,
// since the dispatcher may ask again.
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
  PyObject* own = nullptr; // an attribute of the object itself
  const int found = PyObject_GetOptionalAttr(value, function, &own);
  if (C10_LIKELY(found == 0))
    return true;
  PyErr_Clear();
  Py_XDECREF(own);
  return false;
}

// Whether a kernel would receive this very value. Tensors are looked at elsewhere.
inline bool passes_unchanged(Base base, PyObject* value) {
  switch (base) {
    // Of the very type: of a subclass, such as an IntEnum, PyTorch passes on the value alone.
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
    case Base::NoneType:
      return value == Py_None;
    case Base::Object:
      return is_plain_object(value);
    case Base::Any:
      // A dtype becomes an int, and an object a copy of it. A list stays one, if all in it are
      // alike.
      return value == Py_None || PyComplex_CheckExact(value) || PyFloat_CheckExact(value) ||
          passes_unchanged(Base::Bool, value) || passes_unchanged(Base::Int, value) ||
          passes_unchanged(Base::Str, value) || passes_unchanged(Base::Device, value);
    case Base::Tensor:
      break;
  }
  return false;
}

// An int whose `float()` is what C reads from it. A subclass may define `__float__`, which the
// dispatcher calls.
inline bool has_plain_float(PyObject* value) {
  return PyLong_Check(value) &&
      Py_TYPE(value)->tp_as_number->nb_float == PyLong_Type.tp_as_number->nb_float;
}

// The conversions below read values in C, as the dispatcher does, so that no method of a subclass
// runs. They return nullptr for a value that only the dispatcher can read or refuse.
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

// Makes the int, float or str that a kernel would receive for a value of another type: for an int
// or a bool where a float is expected, for a bool where an int is, and for an instance of a
// subclass, such as an IntEnum. Returns nullptr, without an exception, for any other conversion.
__attribute__((noinline)) inline PyObject* converted_to(Base base, PyObject* value) {
  // A class with `__torch_function__` decides about the whole call.
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
    PyErr_Clear(); // it is too large, or out of memory: the dispatcher raises the error
  return converted;
}

} // namespace torchop
