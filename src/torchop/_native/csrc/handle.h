// handle.h: make calls to operator handles (`torchop.CustomOp`) native.
// See handle.cpp for the design.
#pragma once

#include <Python.h>

namespace torchop {

// make_handle_type(CustomOp, traceable) creates a subclass of CustomOp with native calls. The items
// of the dict `traceable`, such as the Python function `__call__`, become attributes of the new
// type, because Dynamo traces these. The function can be called only once.
PyObject* make_handle_type(PyObject*, PyObject* args);

// adopt(handle, entry) changes a handle's type to the native type, so that calls to the handle run
// the entry.
PyObject* adopt(PyObject*, PyObject* args);

} // namespace torchop
