// autograd.h: recording a call for backward, without autograd.Function.apply.
#pragma once

#include <Python.h>

#include <c10/util/FunctionRef.h>

#include "arguments.h"

namespace torchop {

// The gradient of an operator; the plan keeps the objects alive.
struct Gradient {
  // Of the objects that are both `ctx` and the node of the graph. Without it, calls that record a
  // gradient go to the dispatcher.
  PyObject* node_class = nullptr;
  PyObject* setup_context = nullptr; // setup_context(ctx, inputs, keyword_only_inputs, output)
  // Whether the function takes the arguments as the dispatcher hands them over, without those at
  // the end that equal their default, and one object more. PyTorch's functions of operators do.
  bool as_dispatched = false;
  // Whether a kernel may return what it was passed, because nothing checks that it does not.
  bool may_return_inputs = false;
  // Tells what those are where that takes more than a comparison: inputs(args) returns a list, in
  // which lists are spread out, and what `ctx._pt_metadata` is to be, or None. nullptr elsewhere.
  PyObject* inputs = nullptr;
};

// Whether what a formula returned is a tuple of so many tensors and None.
inline bool are_plain_gradients(PyObject* gradients, Py_ssize_t count) {
  if (!PyTuple_CheckExact(gradients) || PyTuple_GET_SIZE(gradients) != count)
    return false;
  bool plain = true;
  for (Py_ssize_t index = 0; index < count; ++index) {
    PyObject* gradient = PyTuple_GET_ITEM(gradients, index);
    plain &= gradient == Py_None || Py_TYPE(gradient) == tensor_type;
  }
  return plain;
}

// Whether gradients that are plain have the shapes, the devices and the kind of numbers, real or
// complex, of the inputs of `node`. False also for what autograd makes fit, such as by a sum.
bool fit_inputs(PyObject* gradients, PyObject* node);

// Whether nodes of the installed PyTorch can be made here.
bool can_make_nodes();

// Runs `compute`, and makes its results the outputs of a new node of the graph.
//
// The node is the one that `autograd.Function.apply` would make, an object of the same class and
// layout, so whatever follows a graph treats it alike: hooks, double backward, checkpointing,
// anomaly mode, compiled autograd. A private C++ node costs the same, and the last of these fails.
PyObject* record(
    const Gradient& gradient, const Values& values, c10::function_ref<PyObject*()> compute);

} // namespace torchop
