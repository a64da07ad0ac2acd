// gradients.h: fast checks of the gradients that a formula returned.
#pragma once

#include <Python.h>

#include "dispatch.h"

namespace torchop {

// Returns whether gradients are a tuple with `count` items that are plain tensors or None.
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

// Returns false if a gradient's shape or device differs from the corresponding input of the node
// `ctx`, or if only one of the two is complex. Such gradients must be converted or rejected: for
// example, autograd sums a gradient that broadcasts the input. The gradients must be plain. Returns
// true for inputs that only autograd can check, such as nested tensors.
bool fit_inputs(PyObject* gradients, PyObject* ctx);

} // namespace torchop
