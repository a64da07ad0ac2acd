// handle.h: run calls to operator handles in C++. A handle is the `torchop.CustomOp` object that
// `torchop.custom_op` returns. See handle.cpp for the design.
#pragma once

#include <Python.h>

namespace torchop {

// make_handle_type(CustomOp, traceable) creates a subclass of CustomOp whose calls run in C++. The
// items of the dict `traceable`, such as the Python function `__call__`, become attributes of the
// subclass. Dynamo traces these Python functions, because it cannot trace the C++ code. Can be
// called only once.
PyObject* make_handle_type(PyObject*, PyObject* args);

// adopt(handle, entry) changes a handle's class to the class that `make_handle_type` created. After
// that, calls to the handle go to `entry`.
PyObject* adopt(PyObject*, PyObject* args);

} // namespace torchop
