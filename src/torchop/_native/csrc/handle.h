// handle.h: make calls of operator handles (`torchop.CustomOp`) native.
#pragma once

#include <Python.h>

namespace torchop {

// make_handle_type(CustomOp, traceable) returns a subclass of CustomOp whose calls are native.
// `traceable` is copied into the type's dict: it has a Python `__call__`, which Dynamo and other
// tracers find there. Can be called once.
PyObject* make_handle_type(PyObject*, PyObject* args);

// adopt(handle, entry) changes the type of a handle to the native one, and makes it call the entry.
PyObject* adopt(PyObject*, PyObject* args);

} // namespace torchop
