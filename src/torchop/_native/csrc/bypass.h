// bypass.h: skip torchop's Python kernels in calls through the dispatcher.
#pragma once

#include <Python.h>

#include <ATen/core/boxing/KernelFunction.h>

namespace torchop {

// bypass(name, overload, key, kernel) overrides `kernel`, a Python kernel at Autograd or
// ADInplaceOrView, with a C++ kernel that calls `kernel` only if necessary. Returns a function that
// removes the C++ kernel again, or None if `kernel` is not the operator's kernel at that key.
PyObject* bypass(PyObject*, PyObject* args);

// Returns the Python kernel that a bypass overrides, or nullptr for any other kernel.
PyObject* bypassed_function(const c10::OperatorKernel& functor);

} // namespace torchop
