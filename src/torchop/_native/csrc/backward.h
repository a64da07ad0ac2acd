// backward.h: call an operator's backward formula, i.e. the Python function that computes the
// gradients, when the autograd engine runs the operator's node.
#pragma once

#include <Python.h>

namespace torchop {

// Returns C++ implementations of the attributes `apply` and `saved_tensors` of an operator's node
// class (in Python: _rules/autograd/function.py). _call_path.pyi describes the tuple `parts`.
PyObject* make_backward(PyObject*, PyObject* parts);

} // namespace torchop
