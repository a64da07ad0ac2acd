// ambient_state.h: store the states of random number generators and the ambient settings, such as
// autocast, in one tensor. A derived formula restores them when it runs the forward again.
#pragma once

#include <Python.h>

namespace torchop {

// pack_plain(values, latest, count) returns a byte tensor with the states of the generators and the
// settings, or None if Python must create it (see _rules/autograd/derived/replay.py). `values` are
// the arguments of the call, and `count` is the number of accelerators. If nothing has changed
// since the tensor `latest` was made, returns `latest`.
PyObject* pack_plain(PyObject*, PyObject* const* args, Py_ssize_t count);

} // namespace torchop
