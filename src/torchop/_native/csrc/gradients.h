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

// Returns whether plain gradients have the shapes and devices of the inputs of the node `ctx`, and
// are complex if and only if the input is. Returns false for gradients that autograd would convert,
// for example by a sum. Returns true if only autograd can check.
bool fit_inputs(PyObject* gradients, PyObject* ctx);

} // namespace torchop
