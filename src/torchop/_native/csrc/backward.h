// backward.h: the function that the autograd engine calls to run a backward formula.
#pragma once

#include <Python.h>

namespace torchop {

// Returns the functions for `ctx.apply` and `ctx.saved_tensors`. The arguments in `parts` are
// described in _call_path.pyi. _rules/autograd/function.py has the Python implementation.
PyObject* make_backward(PyObject*, PyObject* parts);

} // namespace torchop
