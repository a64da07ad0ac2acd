// handle.h: run calls to operator handles in C++. A handle is the `torchop.CustomOp` object that
// `torchop.custom_op` returns. See handle.cpp for the design.
#pragma once

#include <Python.h>

namespace torchop {

// make_handle_type(CustomOp, traceable) creates a subclass of CustomOp whose calls run in C++. The
// items of the dict `traceable`, such as a Python function `__call__`, become attributes of the
// subclass, so that Dynamo can trace these functions instead of the C++ code. make_handle_type can
// be called only once.
PyObject* make_handle_type(PyObject*, PyObject* args);

// adopt(handle, entry) changes a handle's class to the one created by `make_handle_type`. From then
// on, calls to the handle go to `entry`.
PyObject* adopt(PyObject*, PyObject* args);

} // namespace torchop
