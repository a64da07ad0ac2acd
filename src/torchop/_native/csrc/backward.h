// backward.h: run a backward formula, i.e. the Python function that computes an operator's
// gradients, when the autograd engine runs the operator's node.
#pragma once

#include <Python.h>

namespace torchop {

// Returns C++ implementations of the attributes `apply` and `saved_tensors` of an operator's node
// class. _call_path.pyi describes the items of the tuple `parts`. The Python implementation of the
// two attributes is in _rules/autograd/function.py.
PyObject* make_backward(PyObject*, PyObject* parts);

} // namespace torchop
