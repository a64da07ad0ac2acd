// handle.h: make calls of operator handles (`torchop.CustomOp`) native.
// See handle.cpp for the design.
#pragma once

#include <Python.h>

namespace torchop {

// make_handle_type(CustomOp, traceable) creates a subclass of CustomOp with native calls. The items
// of the dict `traceable`, such as the Python function `__call__`, become attributes of the new
// type. Dynamo traces these. Can be called only once.
PyObject* make_handle_type(PyObject*, PyObject* args);

// adopt(handle, entry) changes the type of a handle to the native type, and makes it call the
// entry.
PyObject* adopt(PyObject*, PyObject* args);

} // namespace torchop
