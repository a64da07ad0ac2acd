// arguments.h: bind a call's arguments to the schema's parameters, and check the argument types.
#pragma once

#include <Python.h>

#include <array>
#include <memory>
#include <vector>

#include <c10/util/SmallVector.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/utils/object_ptr.h>

#include "dispatch.h"
#include "errors.h"
#include "free_threads.h"
#include "kinds.h"
#include "reasons.h"

namespace torchop {

// A parameter of an operator's schema. The call plan (plan.h) owns the objects.
struct Parameter {
  PyObject* name = nullptr;          // interned
  PyObject* default_value = nullptr; // nullptr if the parameter is required
  // True for a parameter of type Device whose default is a string in the schema, such as "cpu".
  bool is_device_string = false;
  Kind kind;
};

// The parameters of an operator's schema. Keyword-only parameters come last.
struct Parameters {
  // The value of `pass_through_count` if all calls must copy their arguments to a new array
  static constexpr size_t no_count = ~size_t{0};

  std::vector<Parameter> all;
  size_t positional = 0;
  // A call with exactly this many positional arguments and no keyword arguments can pass the
  // caller's argument array on to the kernel without copying it.
  size_t pass_through_count = no_count;
  size_t leading_tensors = 0; // number of parameters of type Tensor before any other type
  bool has_tensor_lists = false;
  // True if calls drop arguments that equal their default, as the dispatcher does when it calls
  // Python kernels (parseIValuesToPyArgsKwargs). Positional arguments are only dropped at the end.
  bool drops_defaults = false;
  bool has_device_string_defaults = false;
  PyObject* keyword_names = nullptr; // of keyword-only parameters; nullptr if there are none

  size_t size() const {
    return all.size();
  }
};

// Equivalent to PyObject_Vectorcall, but faster for Python functions.
inline PyObject* call_kernel(
    PyObject* function, PyObject* const* values, size_t nargsf, PyObject* names) {
  if (C10_LIKELY(PyFunction_Check(function)))
    return reinterpret_cast<PyFunctionObject*>(function)->vectorcall(
        function, values, nargsf, names);
  return PyObject_Vectorcall(function, values, nargsf, names);
}

// The values of all parameters in one call, in schema order. Owns converted values and copied
// lists, and borrows all other values from the caller.
class Values {
 public:
  explicit Values(const Parameters& parameters) : parameters_(parameters) {}
  ~Values() {
    // Check Py_IsInitialized, as ~THPObjectPtr does. During finalization, CPython unwinds the stack
    // of a daemon thread through this destructor, although the thread does not hold the GIL.
    if (!copies_.empty() && C10_LIKELY(Py_IsInitialized())) {
      for (PyObject* copy : copies_)
        Py_DECREF(copy);
    }
  }
  Values(const Values&) = delete;
  Values& operator=(const Values&) = delete;

  // Binds the arguments of a call to the parameters. If they do not match the schema, returns
  // Reason::Binding, so that the dispatcher raises the error. `args` must outlive this object.
  C10_ALWAYS_INLINE Reason bind(PyObject* const* args, size_t nargsf, PyObject* keywords) {
    const size_t count = PyVectorcall_NARGS(nargsf);
    if (C10_LIKELY(count == parameters_.pass_through_count && keywords == nullptr)) {
      values_ = args;
      // Keep the flag that lets the callee temporarily overwrite args[-1], as bound methods do.
      flags_ = nargsf & PY_VECTORCALL_ARGUMENTS_OFFSET;
      return Reason::Native;
    }
    return complete(args, count, keywords);
  }

  // Checks the type of each value, converts numbers and strings, and collects the properties of the
  // tensors in `result`. Like the dispatcher, copies all lists, so that a kernel cannot modify the
  // caller's list. If `below_autograd` is true, ignores requires_grad and tangents. Call this after
  // `bind`.
  Reason inspect(TensorSummary& result, bool below_autograd) {
    return below_autograd ? inspect_values<true>(result) : inspect_values<false>(result);
  }

  PyObject* operator[](size_t index) const {
    return values_[index];
  }

  // Returns the number of positional arguments without trailing ones that equal their defaults.
  size_t count_passed() const {
    size_t count = parameters_.positional;
    while (count > 0 && is_default(count - 1))
      --count;
    return count;
  }

  // Returns whether the kernel would receive the default of a device parameter. Such a call cannot
  // be native, because the dispatcher would pass the string from the schema, such as "cpu", but our
  // default is a torch.device.
  __attribute__((noinline, cold)) bool passes_device_string_default() {
    for (size_t index = 0; index < count_passed(); ++index) {
      const Parameter& parameter = parameters_.all[index];
      if (parameter.is_device_string && values_[index] == parameter.default_value) {
        rejected_ = index;
        return true;
      }
    }
    return false;
  }

  // Calls a kernel with the values. The kernel may modify lists, so pass copies of the lists that
  // are read again later: the aliasing check reads tensor lists, and setup_context reads all lists
  // (`all_are_read_later`).
  C10_ALWAYS_INLINE PyObject* pass_to(PyObject* function, bool all_are_read_later) const {
    if (C10_LIKELY(copies_.empty() || !(all_are_read_later || parameters_.has_tensor_lists)))
      return call(function, values_, flags_);
    return pass_copies_to(function);
  }

  // Calls `visit(PyObject* tensor)` for each tensor in the arguments. Call after `inspect`.
  template <class Visitor>
  void each_tensor(Visitor&& visit) const {
    for (size_t index = 0; index < parameters_.size(); ++index) {
      if (parameters_.all[index].kind.holds_tensors())
        each_tensor_of(index, visit);
    }
  }

  template <class Visitor>
  void each_tensor_of(size_t index, Visitor&& visit) const {
    PyObject* value = values_[index];
    if (value == Py_None)
      return;
    if (!parameters_.all[index].kind.is_list) {
      visit(value);
      return;
    }
    for (Py_ssize_t item = 0; item < PyList_GET_SIZE(value); ++item) {
      if (PyObject* tensor = PyList_GET_ITEM(value, item); tensor != Py_None)
        visit(tensor);
    }
  }

  const Parameters& parameters() const {
    return parameters_;
  }

  size_t rejected_parameter() const {
    return rejected_;
  }

  // Returns the positional arguments. `stored_defaults` may be a tuple with a default for each
  // parameter, as the schema stores it, for example a number for a dtype. These then replace the
  // arguments that the dispatcher would drop. The same applies to `keyword_only`.
  THPObjectPtr positional(PyObject* stored_defaults = nullptr) const {
    THPObjectPtr result(PyTuple_New(static_cast<Py_ssize_t>(parameters_.positional)));
    const size_t passed = stored_defaults == nullptr ? parameters_.positional : count_passed();
    for (size_t index = 0; result && index < parameters_.positional; ++index) {
      PyObject* value = index < passed ? Py_NewRef(values_[index]) : stored(stored_defaults, index);
      PyTuple_SET_ITEM(result.get(), index, value);
    }
    return result;
  }

  THPObjectPtr keyword_only(PyObject* stored_defaults = nullptr) const {
    THPObjectPtr result(PyDict_New());
    for (size_t index = parameters_.positional; result && index < parameters_.size(); ++index) {
      const bool is_dropped = stored_defaults != nullptr && is_default(index);
      THPObjectPtr value(is_dropped ? stored(stored_defaults, index) : Py_NewRef(values_[index]));
      if (PyDict_SetItem(result.get(), parameters_.all[index].name, value.get()) < 0)
        return THPObjectPtr();
    }
    return result;
  }

 private:
  static constexpr size_t inline_size = 40;

  PyObject* call(PyObject* function, PyObject* const* values, size_t flags) const {
    if (C10_UNLIKELY(parameters_.drops_defaults))
      return call_without_defaults(function, values, flags);
    return call_kernel(function, values, parameters_.positional | flags, parameters_.keyword_names);
  }

  PyObject* call_without_defaults(PyObject* function, PyObject* const* values, size_t flags) const {
    const size_t count = count_passed(), positional = parameters_.positional;
    size_t named = 0;
    for (size_t index = positional; index < parameters_.size(); ++index)
      named += !is_default(index);
    if (named == 0)
      return call_kernel(function, values, count | flags, nullptr);
    if (count + named == parameters_.size())
      return call_kernel(function, values, count | flags, parameters_.keyword_names);
    THPObjectPtr names(PyTuple_New(Py_ssize_t(named)));
    if (!names)
      return nullptr;
    c10::SmallVector<PyObject*, inline_size> passed{nullptr}; // passed[0] is for the callee
    passed.append(values, values + count);
    for (size_t index = positional; index < parameters_.size(); ++index) {
      if (is_default(index))
        continue;
      PyObject* name = parameters_.all[index].name;
      PyTuple_SET_ITEM(names.get(), passed.size() - 1 - count, Py_NewRef(name));
      passed.push_back(values[index]);
    }
    const size_t nargsf = count | PY_VECTORCALL_ARGUMENTS_OFFSET;
    return call_kernel(function, passed.data() + 1, nargsf, names.get());
  }

  // Returns whether the dispatcher would drop this value because it equals the default. A device
  // that a caller passes never equals a default that is a string in the schema, such as "cpu".
  bool is_default(size_t index) const {
    const Parameter& parameter = parameters_.all[index];
    PyObject* value = values_[index];
    if (value == parameter.default_value)
      return true;
    if (parameter.default_value == nullptr || parameter.is_device_string)
      return false;
    return parameter.kind.is_list && value != Py_None
        ? are_equal_lists(value, parameter.default_value)
        : are_equal(value, parameter.default_value);
  }

  static bool are_equal_lists(PyObject* list, PyObject* other) {
    if (!PyList_CheckExact(other) || PyList_GET_SIZE(list) != PyList_GET_SIZE(other))
      return false;
    for (Py_ssize_t item = 0; item < PyList_GET_SIZE(list); ++item) {
      if (!are_equal(PyList_GET_ITEM(list, item), PyList_GET_ITEM(other, item)))
        return false;
    }
    return true;
  }

  // Both values were accepted by `inspect`, so comparing them runs no user code.
  static bool are_equal(PyObject* value, PyObject* other) {
    if (Py_TYPE(value) != Py_TYPE(other) || is_plain_tensor(value))
      return false;
    const int equal = PyObject_RichCompareBool(value, other, Py_EQ);
    if (equal < 0)
      throw_python_error();
    return equal != 0;
  }

  __attribute__((noinline)) PyObject* pass_copies_to(PyObject* function) const {
    std::vector<THPObjectPtr> lists;
    std::vector<PyObject*> values(parameters_.size() + 1);
    for (size_t index = 0; index < parameters_.size(); ++index) {
      PyObject* value = values_[index];
      if (parameters_.all[index].kind.is_list && value != Py_None)
        value = lists.emplace_back(copy_of(value)).get();
      values[index + 1] = value;
    }
    return call(function, values.data() + 1, PY_VECTORCALL_ARGUMENTS_OFFSET);
  }

  __attribute__((noinline)) Reason
  complete(PyObject* const* args, size_t count, PyObject* keywords) {
    const size_t size = parameters_.size();
    if (count > parameters_.positional)
      return Reason::Binding;
    PyObject** values = reserve(size);
    std::copy(args, args + count, values);
    std::fill(values + count, values + size, nullptr);
    if (keywords != nullptr && !place_keywords(args + count, keywords, count))
      return Reason::Binding;
    for (size_t index = count; index < size; ++index) {
      if (values[index] == nullptr) {
        values[index] = parameters_.all[index].default_value;
        if (values[index] == nullptr)
          return Reason::Binding;
      }
    }
    return Reason::Native;
  }

  // Leaves a slot before the first value free, as PY_VECTORCALL_ARGUMENTS_OFFSET requires.
  PyObject** reserve(size_t size) {
    PyObject** buffer = inline_buffer_.data();
    if (C10_UNLIKELY(size >= inline_size)) {
      heap_buffer_ = std::make_unique<PyObject*[]>(size + 1);
      buffer = heap_buffer_.get();
    }
    values_ = buffer_ = buffer + 1;
    flags_ = PY_VECTORCALL_ARGUMENTS_OFFSET;
    return buffer_;
  }

  // Stores the keyword arguments. Returns false if a keyword is unknown, or names a parameter
  // before `first`, which already has a positional argument.
  bool place_keywords(PyObject* const* given, PyObject* keywords, size_t first) {
    size_t guess = first; // most callers pass keyword arguments in schema order
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(keywords); ++k) {
      PyObject* name = PyTuple_GET_ITEM(keywords, k);
      if (C10_UNLIKELY(guess >= parameters_.size() || parameters_.all[guess].name != name))
        guess = find(name, first);
      if (guess == parameters_.size())
        return false;
      buffer_[guess++] = given[k];
    }
    return true;
  }

  size_t find(PyObject* name, size_t first) const {
    const size_t size = parameters_.size();
    for (size_t index = first; index < size; ++index) {
      if (parameters_.all[index].name == name)
        return index;
    }
    // Also compare the text, because a name may not be interned.
    for (size_t index = first; index < size; ++index) {
      if (PyUnicode_Compare(parameters_.all[index].name, name) == 0)
        return index;
    }
    return size;
  }

  template <bool below_autograd>
  Reason inspect_values(TensorSummary& result) {
    TensorSummary seen; // local, because the compiler then keeps it in registers
    size_t index = 0;
    while (index < parameters_.leading_tensors && is_plain_tensor(values_[index]))
      add_tensor_to<below_autograd>(values_[index++], seen);
    for (; index < parameters_.size(); ++index) {
      const Parameter& parameter = parameters_.all[index];
      PyObject* value = values_[index];
      if (C10_LIKELY(parameter.kind.base == Base::Tensor && !parameter.kind.is_list)) {
        if (C10_LIKELY(is_plain_tensor(value)))
          add_tensor_to<below_autograd>(value, seen);
        else if (!(value == Py_None && parameter.kind.is_optional))
          return reject(index, reason_of(value));
      } else if (value == Py_None && parameter.kind.is_optional) {
        continue;
      } else if (parameter.kind.is_list) {
        if (Reason reason = inspect_list<below_autograd>(index, seen); reason != Reason::Native)
          return reason;
      } else if (
          C10_UNLIKELY(!passes_unchanged(parameter.kind.base, value)) &&
          value != parameter.default_value && !convert(index)) {
        return reject(index, Reason::ArgumentType);
      }
    }
    result = seen;
    // The dispatcher ignores tensors in arguments of type Tensor[]? when it computes the dispatch
    // keys (makeBitsetForDispatchArgs in ATen/core/dispatch/DispatchKeyExtractor.h). If only these
    // tensors have a certain key, the dispatcher may choose another kernel, so fall back.
    if (C10_UNLIKELY(!seen.keys.has_all(optional_list_keys_)))
      return Reason::ArgumentType;
    return Reason::Native;
  }

  // Replaces the value at `index` with an int, float or str, as the dispatcher does. Returns false
  // if only the dispatcher supports the conversion.
  __attribute__((noinline)) bool convert(size_t index) {
    PyObject* converted = converted_to(parameters_.all[index].kind.base, values_[index]);
    if (converted == nullptr)
      return false;
    if (buffer_ == nullptr) {
      PyObject* const* given = values_;
      std::copy(given, given + parameters_.size(), reserve(parameters_.size()));
    }
    copies_.push_back(converted);
    buffer_[index] = converted;
    return true;
  }

  template <bool below_autograd>
  Reason inspect_list(size_t index, TensorSummary& seen) {
    const Kind& kind = parameters_.all[index].kind;
    PyObject* value = values_[index];
    // Also accept torch.Size, because callers often pass `tensor.shape`.
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value) && !THPSize_Check(value))
      return reject(index, Reason::ArgumentType);
    // `inspect_values` checks the keys of tensors in Tensor[]? arguments separately.
    const bool is_optional_list = kind.holds_tensors() && kind.is_optional;
    const DispatchKeySet keys = seen.keys;
    PyObject* list = copy_of(value);
    copies_.push_back(list);
    buffer_[index] = list;
    for (Py_ssize_t position = 0; position < PyList_GET_SIZE(list); ++position) {
      PyObject* item = PyList_GET_ITEM(list, position);
      if (kind.holds_tensors()) {
        if (C10_LIKELY(is_plain_tensor(item)))
          add_tensor_to<below_autograd>(item, seen);
        else if (!(item == Py_None && kind.items_are_optional))
          return reject(index, reason_of(item));
      } else if (!passes_unchanged(kind.base, item)) {
        PyObject* converted = converted_to(kind.base, item);
        if (converted == nullptr)
          return reject(index, Reason::ArgumentType);
        PyList_SetItem(list, position, converted);
      }
    }
    if (C10_UNLIKELY(is_optional_list)) {
      rejected_ = index;
      optional_list_keys_ = optional_list_keys_ | seen.keys;
      seen.keys = keys;
    }
    return Reason::Native;
  }

  Reason reject(size_t index, Reason reason) {
    rejected_ = index;
    return reason;
  }

  static Reason reason_of(PyObject* value) {
    return is_tensor(value) ? Reason::TensorSubclass : Reason::ArgumentType;
  }

  static PyObject* stored(PyObject* defaults, size_t index) {
    PyObject* value = PyTuple_GET_ITEM(defaults, Py_ssize_t(index));
    return PyList_CheckExact(value) ? copy_of(value) : Py_NewRef(value);
  }

  static PyObject* copy_of(PyObject* sequence) {
    PyObject* list;
    // Without the GIL, another thread may modify the list, so lock it.
    Py_BEGIN_CRITICAL_SECTION(sequence);
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(sequence);
    list = PyList_New(size);
    for (Py_ssize_t index = 0; list != nullptr && index < size; ++index)
      PyList_SET_ITEM(list, index, Py_NewRef(PySequence_Fast_GET_ITEM(sequence, index)));
    Py_END_CRITICAL_SECTION();
    if (list == nullptr)
      throw_python_error();
    return list;
  }

  const Parameters& parameters_;
  PyObject* const* values_ = nullptr;
  PyObject** buffer_ = nullptr; // our own array; nullptr if `values_` is the caller's array
  size_t flags_ = 0;
  size_t rejected_ = 0;
  DispatchKeySet optional_list_keys_;
  std::array<PyObject*, inline_size + 1> inline_buffer_;
  std::unique_ptr<PyObject*[]> heap_buffer_;
  c10::SmallVector<PyObject*, 4> copies_; // owned references to converted values and copied lists
};

} // namespace torchop
