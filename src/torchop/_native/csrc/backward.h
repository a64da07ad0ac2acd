// backward.h: the function that the autograd engine calls to run a backward formula.
#pragma once

#include <Python.h>

namespace torchop {

// Returns the functions for `ctx.apply` and `ctx.saved_tensors`. _call_path.pyi describes the
// arguments in `parts`, and _rules/autograd/function.py has the Python implementation.
PyObject* make_backward(PyObject*, PyObject* parts);

} // namespace torchop
