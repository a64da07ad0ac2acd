// backward.h: run a backward formula, i.e. the Python function that computes an operator's
// gradients, when the autograd engine runs the operator's node.
#pragma once

#include <Python.h>

namespace torchop {

// Returns C++ implementations of the attributes `apply` and `saved_tensors` of an operator's node
// class. For the tuple `parts`, see the parameters in _call_path.pyi. _rules/autograd/function.py
// contains the Python implementation of the two attributes.
PyObject* make_backward(PyObject*, PyObject* parts);

} // namespace torchop
