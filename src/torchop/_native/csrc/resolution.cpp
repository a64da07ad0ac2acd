// resolution.cpp: PyTorch tries the overloads in order (getOpWithStack in
// torch/csrc/jit/python/pybind_utils.cpp). For each overload, it converts the arguments in schema
// order until a conversion fails. This is hard to predict, for two reasons. First, PyTorch converts
// more values than one would expect, for example a one-element tensor to a number, and any number
// to a bool. Second, some values, such as an invalid device string, raise an error instead of
// moving on to the next overload. So we consider an overload skipped only if all arguments before
// the first mismatch certainly convert.
#include "resolution.h"

#include "free_threads.h"

namespace torchop {

namespace {

// Whether PyTorch can convert a value to a type in the schema. If a value is `Rejected`, PyTorch
// tries the next overload. `Unknown` values may be converted, be rejected, or raise an error.
enum class Fit { Accepted, Rejected, Unknown };

bool is_list(PyObject* value) {
  return PyList_CheckExact(value) || PyTuple_CheckExact(value) || THPSize_Check(value);
}

bool is_integer(PyObject* value) {
  return PyBool_Check(value) || PyLong_CheckExact(value);
}

bool is_builtin(PyObject* value) {
  return value == Py_None || is_integer(value) || PyFloat_CheckExact(value) ||
      PyUnicode_CheckExact(value) || is_list(value);
}

// Returns whether a tensor has several elements, so that it certainly does not convert to a number.
// For tensors that native calls do not support, the number of elements may be symbolic, so this
// returns false.
bool is_not_scalar(PyObject* tensor) {
  TensorSummary seen;
  add_tensor_to<true>(tensor, seen);
  return tensors_reason(seen) == Reason::Native && impl_of(tensor)->numel() > 1;
}

// Returns whether a value converts to a number or to a type such as a dtype, which the dispatcher
// stores as a number.
Fit fit_number(Base base, PyObject* value) {
  if (base == Base::Bool) // py::cast<bool> accepts numbers and None
    return PyUnicode_CheckExact(value) || is_list(value) ? Fit::Rejected : Fit::Accepted;
  if (PyFloat_CheckExact(value))
    return base == Base::Float || base == Base::Number ? Fit::Accepted : Fit::Rejected;
  if (!is_integer(value))
    return Fit::Rejected;
  const bool is_certain = base == Base::Int || base == Base::Float;
  return is_certain && fits_in_64_bits(value) ? Fit::Accepted : Fit::Unknown;
}

// Returns whether a plain tensor or a built-in object converts to a non-list type.
Fit fit_builtin(Base base, PyObject* value) {
  const bool is_tensor = is_plain_tensor(value);
  switch (base) {
    case Base::Tensor:
      return is_tensor || value == Py_None ? Fit::Accepted : Fit::Rejected;
    case Base::Str:
    case Base::Device:
      return PyUnicode_CheckExact(value) ? Fit::Unknown : Fit::Rejected;
    case Base::Number: // unlike int and float, Scalar does not accept one-element tensors
      return is_tensor ? Fit::Rejected : fit_number(base, value);
    case Base::Int:
    case Base::Float:
    case Base::Bool:
    case Base::Dtype:
    case Base::Layout:
    case Base::MemoryFormat:
      if (is_tensor)
        return is_not_scalar(value) ? Fit::Rejected : Fit::Unknown;
      return fit_number(base, value);
    default:
      return Fit::Unknown;
  }
}

Fit fit_one(Base base, PyObject* value) {
  if (passes_unchanged(base, value))
    return Fit::Accepted;
  return is_plain_tensor(value) || is_builtin(value) ? fit_builtin(base, value) : Fit::Unknown;
}

Fit fit_item(const Kind& kind, PyObject* item) {
  // PyTorch converts None to an undefined tensor, but not inside a list.
  if (item == Py_None && kind.holds_tensors() && !kind.items_are_optional)
    return Fit::Rejected;
  return fit_one(kind.base, item);
}

Fit fit_items(const Kind& kind, PyObject* list) {
  Fit fit = Fit::Accepted;
  Py_BEGIN_CRITICAL_SECTION(list); // because another thread may modify the list
  for (Py_ssize_t index = 0; fit == Fit::Accepted && index < PySequence_Fast_GET_SIZE(list);
       ++index) {
    THPObjectPtr item(Py_NewRef(PySequence_Fast_GET_ITEM(list, index)));
    fit = fit_item(kind, item.get());
  }
  Py_END_CRITICAL_SECTION();
  return fit;
}

// Returns whether a non-list value converts to a list type.
Fit fit_as_list(const Kind& kind, PyObject* value) {
  if (value == Py_None)
    return Fit::Rejected;
  // For lists of int, float, bool or Tensor, PyTorch only accepts sequences. For all other lists,
  // it accepts any iterable, even a string.
  const bool is_read_as_sequence = kind.base == Base::Int || kind.base == Base::Float ||
      kind.base == Base::Bool || (kind.holds_tensors() && !kind.items_are_optional);
  if (is_plain_tensor(value) || PyUnicode_CheckExact(value))
    return is_read_as_sequence ? Fit::Rejected : Fit::Unknown;
  // A list type with a fixed size, such as int[2], also accepts a single number and repeats it.
  // Since `kind` does not include the size, any list of ints or floats might be such a type.
  const bool may_be_repeated = kind.base == Base::Int
      ? is_integer(value)
      : kind.base == Base::Float && PyFloat_CheckExact(value);
  return may_be_repeated || !is_builtin(value) ? Fit::Unknown : Fit::Rejected;
}

Fit fit_of(const Kind& kind, PyObject* value) {
  if (value == Py_None && kind.is_optional)
    return Fit::Accepted;
  if (!kind.is_list)
    return fit_one(kind.base, value);
  return is_list(value) ? fit_items(kind, value) : fit_as_list(kind, value);
}

PyObject* keyword_value(PyObject* keywords, PyObject* const* values, PyObject* name) {
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t index = 0; index < count; ++index) {
    PyObject* given = PyTuple_GET_ITEM(keywords, index);
    if (given == name || PyUnicode_Compare(given, name) == 0)
      return values[index];
  }
  return nullptr;
}

bool holds_tensor(PyObject* value) {
  if (!PyList_Check(value) && !PyTuple_Check(value))
    return false;
  bool found = false;
  Py_BEGIN_CRITICAL_SECTION(value);
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(value); ++index)
    found |= is_tensor(PySequence_Fast_GET_ITEM(value, index));
  Py_END_CRITICAL_SECTION();
  return found;
}

} // namespace

bool passes_tensor_for_number(
    const Parameters& parameters, PyObject* const* args, size_t count, PyObject* keywords) {
  for (size_t index = 0; index < parameters.size(); ++index) {
    const Parameter& parameter = parameters.all[index];
    const Base base = parameter.kind.base;
    if (base != Base::Int && base != Base::Float && base != Base::Bool && base != Base::Number)
      continue;
    PyObject* value =
        index < count ? args[index] : keyword_value(keywords, args + count, parameter.name);
    if (value == nullptr)
      continue;
    if (is_tensor(value) || (parameter.kind.is_list && holds_tensor(value)))
      return true;
  }
  return false;
}

bool is_skipped_overload(
    const Parameters& parameters, PyObject* const* args, size_t count, PyObject* keywords) {
  const size_t named = keywords == nullptr ? 0 : size_t(PyTuple_GET_SIZE(keywords));
  if (count + named > parameters.size())
    return true;
  size_t found = 0;
  for (size_t index = 0; index < parameters.size(); ++index) {
    const Parameter& parameter = parameters.all[index];
    PyObject* value = nullptr;
    if (index < count) {
      if (index >= parameters.positional)
        return true;
      value = args[index];
    } else {
      value = keyword_value(keywords, args + count, parameter.name);
      found += value != nullptr;
    }
    if (value == nullptr) {
      if (parameter.default_value == nullptr)
        return true;
    } else if (const Fit fit = fit_of(parameter.kind, value); fit != Fit::Accepted) {
      return fit == Fit::Rejected;
    }
  }
  return found < named;
}

} // namespace torchop
