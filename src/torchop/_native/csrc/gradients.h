// gradients.h: a fast check of the gradients that a formula returned.
#pragma once

#include <Python.h>

#include "dispatch.h"

namespace torchop {

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

// Returns whether each gradient fits the corresponding input of the node `ctx`: it has the same
// shape and device, and is complex if and only if the input is. The caller must convert or reject
// gradients that do not fit. All gradients must be plain tensors or None. Inputs that only autograd
// can check, such as nested tensors, are assumed to fit.
bool fit_inputs(PyObject* gradients, PyObject* ctx);

} // namespace torchop
