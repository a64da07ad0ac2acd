// handle.h: making calls of a handle native.
#pragma once

#include <Python.h>

namespace torchop {

// make_handle_type(CustomOp, traceable): a type for handles whose calls are native. Compilers that
// trace a call look up what is in `traceable`, and find a Python function.
PyObject* make_handle_type(PyObject*, PyObject* args);

// adopt(handle, entry): makes calls of this handle native.
PyObject* adopt(PyObject*, PyObject* args);

} // namespace torchop
