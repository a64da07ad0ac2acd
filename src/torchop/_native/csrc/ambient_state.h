// ambient_state.h: the states on which the body of an operator depends, packed into bytes.
#pragma once

#include <Python.h>

namespace torchop {

// pack_on_cpu(values, latest): as in `_rules/autograd/derived/replay.py`, which unpacks them.
PyObject* pack_on_cpu(PyObject*, PyObject* const* args, Py_ssize_t count);

} // namespace torchop
