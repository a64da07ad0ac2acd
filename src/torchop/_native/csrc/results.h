// results.h: check that a kernel returned values of the right types, and that they do not alias the
// inputs.
//
// These checks are a fast path that accepts most valid results. Any other result goes to Python
// code, which checks it thoroughly and either converts it or raises an error.
#pragma once

#include <Python.h>

#include <vector>

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/COW.h>

#include "arguments.h"
#include "dispatch.h"

namespace torchop {

struct Returns {
  size_t count = 0;
  bool are_checked = true; // true if each result is of type Tensor, Tensor?, Tensor[] or int
  bool has_lists_or_ints = false;
  std::vector<bool> are_optional, are_lists, are_ints;
  bool are_fresh = true; // true if results must not share memory with inputs or each other
  // The indices of the arguments that the kernel of an in-place or out= operator must return
  std::vector<size_t> parameters;
};

namespace detail {

inline c10::StorageImpl* storage_of(PyObject* tensor) {
  return impl_of(tensor)->unsafe_storage().unsafeGetStorageImpl();
}

inline bool has_own_storage(PyObject* tensor) {
  return impl_of(tensor)->has_storage() && impl_of(tensor)->unsafe_storage().use_count() == 1;
}

// Returns whether a storage uses memory that PyTorch did not allocate, for example the memory of a
// NumPy array. Several such storages may share the same memory. PyTorch's own allocators can be
// recognized because they pass the address of the memory as the context of its deleter.
inline bool is_borrowed(c10::StorageImpl* storage) {
  const c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  return data.get() != data.get_context();
}

// Returns whether two different storages overlap in memory. Copy-on-write storages do not count as
// overlapping, because PyTorch copies their memory before a write.
__attribute__((noinline)) inline bool overlap(c10::StorageImpl* one, c10::StorageImpl* other) {
  const c10::DataPtr &first = one->_mutable_data_ptr_no_checks(),
                     &second = other->_mutable_data_ptr_no_checks();
  const auto *start = static_cast<const char*>(first.get()),
             *other_start = static_cast<const char*>(second.get());
  if (start == nullptr || other_start == nullptr)
    return false; // a meta tensor, or an empty one
  return start < other_start + other->nbytes() && other_start < start + one->nbytes() &&
      !c10::impl::cow::is_cow_data_ptr(first) && !c10::impl::cow::is_cow_data_ptr(second);
}

// Returns whether two plain tensors share memory. A tensor without a storage shares none.
inline bool share_memory(PyObject* one, PyObject* other) {
  c10::StorageImpl *first = storage_of(one), *second = storage_of(other);
  return first == second || (first != nullptr && second != nullptr && overlap(first, second));
}

// Returns whether a result is a plain tensor that autograd can record. Autograd cannot record
// inference tensors, so outside of inference mode, returns false and lets Python code replace them.
C10_ALWAYS_INLINE bool is_plain_result(PyObject* value) {
  return is_plain_tensor(value) &&
      (C10_LIKELY(!impl_of(value)->is_inference()) || c10::InferenceMode::is_enabled());
}

C10_ALWAYS_INLINE bool is_fresh(PyObject* tensor, const Values& values) {
  if (C10_UNLIKELY(!impl_of(tensor)->has_storage()))
    return false; // not dense, so Python must check whether it aliases an argument
  // The fast path: if nothing else references the tensor, it is not an input. If in addition it is
  // the only owner of its storage and PyTorch allocated the memory, it is no view of an input.
  if (C10_LIKELY(
          Py_REFCNT(tensor) == 1 && has_own_storage(tensor) && !is_borrowed(storage_of(tensor))))
    return true;
  bool fresh = true;
  values.each_tensor([&](PyObject* input) { fresh &= !share_memory(input, tensor); });
  return fresh;
}

} // namespace detail

// Returns false for tensor subclasses, because comparing their metadata may run Python code.
inline bool have_same_metadata(PyObject* one, PyObject* other) {
  if (!is_plain_tensor(one) || !is_plain_tensor(other))
    return false;
  try {
    const at::TensorImpl &first = *impl_of(one), &second = *impl_of(other);
    return first.sizes() == second.sizes() && first.dtype() == second.dtype() &&
        first.layout() == second.layout() && first.device() == second.device();
  } catch (const c10::Error&) {
    return false; // the sizes are symbolic, or the tensors are nested
  }
}

// Returns whether a result is a plain tensor that shares no memory with the arguments, including
// tensors in lists and tuples.
inline bool is_evidently_fresh(PyObject* args, PyObject* keywords, PyObject* result) {
  if (!is_plain_tensor(result) || !impl_of(result)->has_storage())
    return false;
  bool is_input = false;
  auto compare = [&](PyObject* value) {
    if (is_plain_tensor(value))
      is_input |= detail::share_memory(value, result);
    else // compare only the storages, because a subclass may have no memory
      is_input |= is_tensor(value) && detail::storage_of(value) == detail::storage_of(result);
  };
  auto compare_all = [&](PyObject* value) {
    compare(value);
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
      for (Py_ssize_t item = 0; item < PySequence_Fast_GET_SIZE(value); ++item)
        compare(PySequence_Fast_GET_ITEM(value, item));
    }
  };
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(args); ++index)
    compare_all(PyTuple_GET_ITEM(args, index));
  PyObject *name, *value;
  for (Py_ssize_t position = 0; PyDict_Next(keywords, &position, &name, &value);)
    compare_all(value);
  return !is_input;
}

namespace detail {

// Implements `is_valid_result` for schemas that return lists or ints. Each call through the
// dispatcher returns a new list, so a list is accepted only if nothing else references it.
__attribute__((noinline)) inline bool is_valid_result_with_lists_or_ints(
    PyObject* result, const Returns& returns, const Values& values) {
  const bool is_tuple = returns.count > 1;
  if (is_tuple &&
      (!PyTuple_CheckExact(result) || Py_REFCNT(result) != 1 ||
       PyTuple_GET_SIZE(result) != Py_ssize_t(returns.count)))
    return false;
  std::vector<PyObject*> borrowed; // the tensors so far whose memory PyTorch did not allocate
  auto is_valid_tensor = [&](PyObject* tensor) {
    if (!is_plain_result(tensor))
      return false;
    if (!returns.are_fresh)
      return true;
    // An array from `tensor.numpy()` references the tensor that owns the memory. So a tensor
    // without other references can share memory only if it is borrowed from elsewhere.
    if (!has_own_storage(tensor) || Py_REFCNT(tensor) != 1)
      return false;
    if (C10_LIKELY(!is_borrowed(storage_of(tensor))))
      return true;
    for (PyObject* before : borrowed) {
      if (share_memory(before, tensor))
        return false;
    }
    borrowed.push_back(tensor);
    return is_fresh(tensor, values);
  };
  bool valid = true;
  for (size_t index = 0; valid && index < returns.count; ++index) {
    PyObject* value = is_tuple ? PyTuple_GET_ITEM(result, index) : result;
    if (returns.are_ints[index]) {
      valid = passes_unchanged(Base::Int, value);
      continue;
    }
    if (!returns.are_lists[index]) {
      valid = value == Py_None ? returns.are_optional[index] : is_valid_tensor(value);
      continue;
    }
    valid = PyList_CheckExact(value) && Py_REFCNT(value) == 1;
    for (Py_ssize_t item = 0; valid && item < PyList_GET_SIZE(value); ++item)
      valid = is_valid_tensor(PyList_GET_ITEM(value, item));
  }
  return valid;
}

} // namespace detail

// Returns whether a result is certainly valid, so that it can be returned to the caller unchanged.
C10_ALWAYS_INLINE bool is_valid_result(
    PyObject* result, const Returns& returns, const Values& values) {
  if (returns.count == 0)
    return result == Py_None;
  if (!returns.are_checked)
    return false;
  if (C10_UNLIKELY(returns.has_lists_or_ints))
    return returns.parameters.empty() &&
        detail::is_valid_result_with_lists_or_ints(result, returns, values);
  if (returns.count == 1) {
    if (!returns.parameters.empty())
      return result == values[returns.parameters[0]];
    if (result == Py_None)
      return returns.are_optional[0];
    return detail::is_plain_result(result) &&
        (!returns.are_fresh || detail::is_fresh(result, values));
  }
  if (!PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != Py_ssize_t(returns.count))
    return false;
  for (size_t index = 0; index < returns.count; ++index) {
    PyObject* item = PyTuple_GET_ITEM(result, index);
    if (!returns.parameters.empty()) {
      if (item != values[returns.parameters[index]])
        return false;
      continue;
    }
    if (item == Py_None && returns.are_optional[index])
      continue;
    if (!detail::is_plain_result(item))
      return false;
    if (!returns.are_fresh)
      continue;
    if (!detail::is_fresh(item, values))
      return false;
    for (size_t other = 0; other < index; ++other) {
      PyObject* before = PyTuple_GET_ITEM(result, other);
      if (before != Py_None && detail::share_memory(before, item))
        return false;
    }
  }
  return true;
}

} // namespace torchop
