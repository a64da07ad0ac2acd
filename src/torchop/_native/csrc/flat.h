// flat.h: flatten an operator's inputs and results for autograd, so that each tensor in a list is a
// separate input or output of the autograd node.
#pragma once

#include <Python.h>

#include <vector>

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable_info.h>

#include "autograd.h"
#include "python_node.h"

namespace torchop {

inline PyObject* as_bool(bool value) {
  return Py_NewRef(value ? Py_True : Py_False);
}

// Equivalent to torch::autograd::impl::gradient_edge, but faster, because that function needs three
// calls to check whether the tensor is a view.
inline torch::autograd::Edge edge_of(const at::Tensor& tensor) {
  const torch::autograd::AutogradMeta* meta = autograd_meta_of(*tensor.unsafeGetTensorImpl());
  if (meta == nullptr)
    return {};
  if (C10_UNLIKELY(meta->is_view_))
    return torch::autograd::impl::gradient_edge(tensor);
  if (meta->grad_fn_)
    return {meta->grad_fn_, meta->output_nr_};
  if (!meta->requires_grad_)
    return {};
  return {torch::autograd::impl::grad_accumulator(tensor), 0};
}

// The inputs of an autograd node. If the operator has list arguments, `edges` and the other vectors
// have one item per tensor in a list, but `need_grad` contains nested lists. The functions for rare
// cases are `noinline`, because the attribute `flatten` of `record` (autograd.cpp) would otherwise
// inline them.
struct Inputs {
  torch::autograd::edge_list edges;
  std::vector<bool> are_tensors;
  THPObjectPtr need_grad;
  std::vector<torch::autograd::VariableInfo> infos; // only compiled autograd reads these
  // The tensors themselves, only filled if the kernel may return an input
  torch::autograd::variable_list variables;
  // These describe how to restore the list arguments, and are nullptr if there are none. For
  // gradient formulas that were registered with torchop, `layout` contains the length of each list.
  // For formulas that were registered with torch.library, `metadata` is a function that computes
  // `ctx._pt_metadata` from the result.
  THPObjectPtr layout, metadata;

  Inputs(const Values& values, const Gradient& gradient)
      : keeps_variables_(gradient.may_return_inputs) {
    if (gradient.inputs != nullptr)
      add_flattened(values, gradient.inputs);
    else if (gradient.as_dispatched)
      add_as_dispatched(values.count_passed(), [&](size_t index) { return values[index]; });
    else
      add_all(values);
  }

 private:
  void reserve(size_t size) {
    edges.reserve(size);
    infos.reserve(size);
    are_tensors.reserve(size);
    need_grad = checked(PyTuple_New(Py_ssize_t(size)));
  }

  void add_all(const Values& values) {
    const Parameters& parameters = values.parameters();
    bool has_tensor_lists = false;
    reserve(parameters.positional);
    for (size_t index = 0; index < parameters.positional; ++index) {
      const Kind& kind = parameters.all[index].kind;
      PyObject* value = values[index];
      const bool holds_tensors = kind.holds_tensors() && value != Py_None;
      const bool is_tensor_list = holds_tensors && kind.is_list;
      has_tensor_lists |= is_tensor_list;
      PyObject* needed = is_tensor_list ? add_list(value) : add(value, holds_tensors);
      PyTuple_SET_ITEM(need_grad.get(), index, needed);
    }
    if (has_tensor_lists)
      layout = layout_of(values);
  }

  // For torch.library's formulas: adds the arguments that the dispatcher would pass. As in
  // torch/_library/autograd.py, the node has an additional input for the metadata. The input is
  // None, and so is the gradient that the formula returns for it.
  template <class Item>
  __attribute__((noinline)) void add_as_dispatched(size_t count, Item&& item) {
    reserve(count + 1);
    for (size_t index = 0; index < count; ++index)
      PyTuple_SET_ITEM(need_grad.get(), index, add(item(index), is_tensor(item(index))));
    PyTuple_SET_ITEM(need_grad.get(), count, add(Py_None, false));
  }

  __attribute__((noinline)) void add_flattened(const Values& values, PyObject* flatten) {
    THPObjectPtr args = checked(values.positional().release());
    THPObjectPtr passed =
        checked(PyTuple_GetSlice(args.get(), 0, Py_ssize_t(values.count_passed())));
    THPObjectPtr found = checked(PyObject_CallOneArg(flatten, passed.get()));
    PyObject *list, *metadata_of;
    if (!PyArg_ParseTuple(found.get(), "O!O", &PyList_Type, &list, &metadata_of))
      throw_python_error();
    add_as_dispatched(
        size_t(PyList_GET_SIZE(list)), [&](size_t index) { return PyList_GET_ITEM(list, index); });
    metadata = THPObjectPtr(Py_NewRef(metadata_of));
  }

  PyObject* add(PyObject* value, bool is_tensor) {
    are_tensors.push_back(is_tensor);
    if (!is_tensor)
      return Py_NewRef(Py_False);
    const at::Tensor& tensor = THPVariable_Unpack(value);
    const torch::autograd::Edge& edge = edges.emplace_back(edge_of(tensor));
    infos.emplace_back(tensor);
    if (keeps_variables_)
      variables.push_back(tensor);
    // A view created under no_grad has no edge, but may require grad because its base does.
    return as_bool(edge.is_valid() || impl_of(value)->requires_grad());
  }

  __attribute__((noinline)) PyObject* add_list(PyObject* list) {
    const Py_ssize_t size = PyList_GET_SIZE(list);
    THPObjectPtr needed = checked(PyList_New(size));
    for (Py_ssize_t item = 0; item < size; ++item) {
      PyObject* tensor = PyList_GET_ITEM(list, item);
      PyList_SET_ITEM(needed.get(), item, add(tensor, tensor != Py_None));
    }
    return needed.release();
  }

  __attribute__((noinline)) static THPObjectPtr layout_of(const Values& values) {
    const Parameters& parameters = values.parameters();
    THPObjectPtr result = checked(PyTuple_New(Py_ssize_t(parameters.positional)));
    for (size_t index = 0; index < parameters.positional; ++index) {
      const Kind& kind = parameters.all[index].kind;
      PyObject* value = values[index];
      const bool is_list = kind.holds_tensors() && kind.is_list && value != Py_None;
      PyObject* length = is_list ? PyLong_FromSsize_t(PyList_GET_SIZE(value)) : Py_NewRef(Py_None);
      PyTuple_SET_ITEM(result.get(), index, length);
    }
    return result;
  }

  bool keeps_variables_;
};

inline size_t output_count(PyObject* result) {
  return PyTuple_Check(result) ? size_t(PyTuple_GET_SIZE(result)) : 1;
}

inline PyObject* output(PyObject* result, size_t index) {
  return PyTuple_Check(result) ? PyTuple_GET_ITEM(result, index) : result;
}

struct Outputs {
  THPObjectPtr flat;
  // For each result, the length of the list, or None if the result is not a list. If no result is a
  // list, `layout` is nullptr, and `flat` is the result itself.
  THPObjectPtr layout;
  bool are_tuple = false;

  Outputs(const Gradient& gradient, THPObjectPtr result) : are_tuple(PyTuple_Check(result.get())) {
    bool has_lists = false;
    for (size_t index = 0; index < output_count(result.get()); ++index)
      has_lists |= is_flattened(gradient, output(result.get(), index));
    if (C10_UNLIKELY(has_lists))
      flatten(gradient, result.get());
    else
      flat = std::move(result);
  }

  THPObjectPtr restored(THPObjectPtr connected) const {
    return layout ? restore_lists(connected.get()) : std::move(connected);
  }

 private:
  __attribute__((noinline)) THPObjectPtr restore_lists(PyObject* connected) const {
    const Py_ssize_t count = PyTuple_GET_SIZE(layout.get());
    THPObjectPtr values = checked(PyTuple_New(count));
    Py_ssize_t start = 0;
    for (Py_ssize_t index = 0; index < count; ++index) {
      PyObject* length = PyTuple_GET_ITEM(layout.get(), index);
      const Py_ssize_t end = start + (length == Py_None ? 1 : PyLong_AsSsize_t(length));
      THPObjectPtr value;
      if (length == Py_None) {
        value = THPObjectPtr(Py_NewRef(PyTuple_GET_ITEM(connected, start)));
      } else {
        THPObjectPtr items = checked(PyTuple_GetSlice(connected, start, end));
        value = checked(PySequence_List(items.get()));
      }
      PyTuple_SET_ITEM(values.get(), index, value.release());
      start = end;
    }
    return are_tuple ? std::move(values)
                     : THPObjectPtr(Py_NewRef(PyTuple_GET_ITEM(values.get(), 0)));
  }

  // Returns whether each item of a result is a separate output of the node. torch.library flattens
  // a list only if all of its items are tensors and the operator has list arguments, too.
  static bool is_flattened(const Gradient& gradient, PyObject* value) {
    if (!PyList_Check(value))
      return false;
    if (!gradient.as_dispatched)
      return true;
    bool are_tensors = gradient.inputs != nullptr;
    for (Py_ssize_t item = 0; item < PyList_GET_SIZE(value); ++item)
      are_tensors &= is_tensor(PyList_GET_ITEM(value, item));
    return are_tensors;
  }

  __attribute__((noinline)) void flatten(const Gradient& gradient, PyObject* result) {
    const size_t count = output_count(result);
    THPObjectPtr items = checked(PyList_New(0));
    layout = checked(PyTuple_New(Py_ssize_t(count)));
    for (size_t index = 0; index < count; ++index) {
      PyObject* value = output(result, index);
      const bool is_list = is_flattened(gradient, value);
      const Py_ssize_t end = PyList_GET_SIZE(items.get());
      PyObject* length = is_list ? PyLong_FromSsize_t(PyList_GET_SIZE(value)) : Py_NewRef(Py_None);
      PyTuple_SET_ITEM(layout.get(), index, checked(length).release());
      const int failed = is_list ? PyList_SetSlice(items.get(), end, end, value)
                                 : PyList_Append(items.get(), value);
      if (failed != 0)
        throw_python_error();
    }
    flat = checked(PyList_AsTuple(items.get()));
  }
};

} // namespace torchop
