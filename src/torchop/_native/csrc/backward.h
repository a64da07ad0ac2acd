// backward.h: what the engine of autograd calls of a node.
#pragma once

#include <Python.h>

namespace torchop {

// Returns what is to be `apply` of a `ctx`, and what its attribute `saved_tensors` calls. See
// `_call_path.pyi` for the parts; `_rules.autograd.function` has the same in Python.
PyObject* make_backward(PyObject*, PyObject* parts);

} // namespace torchop
