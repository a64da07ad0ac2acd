// backward.h: when the autograd engine runs an operator's node, call the operator's backward
// formula, i.e. the Python function that computes the gradients.
#pragma once

#include <Python.h>

namespace torchop {

// Returns C++ implementations of the attributes `apply` and `saved_tensors` of an operator's node
// class (in Python: _rules/autograd/function.py). _call_path.pyi describes the tuple `parts`.
PyObject* make_backward(PyObject*, PyObject* parts);

} // namespace torchop
