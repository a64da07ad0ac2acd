// gradients.h: whether what a formula returned is plain: what most formulas return.
#pragma once

#include <Python.h>

#include "dispatch.h"

namespace torchop {

// Whether gradients are a tuple of so many tensors and None.
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
// complex, of the inputs of the node that is `ctx`. False also for what autograd makes fit, such as
// by a sum. Of nodes that are not known, autograd alone can tell.
bool fit_inputs(PyObject* gradients, PyObject* ctx);

} // namespace torchop
