// bypass.h: for calls through the dispatcher, skip torchop's Python kernels at Autograd and
// ADInplaceOrView when these kernels would only redispatch or bump versions.
#pragma once

#include <Python.h>

#include <ATen/core/boxing/KernelFunction.h>

namespace torchop {

// bypass(name, overload, key, kernel) overrides a Python kernel at Autograd or ADInplaceOrView with
// a C++ kernel, called a bypass, that calls `kernel` only if necessary. Returns a function that
// removes the bypass, or None if `kernel` is not the operator's kernel at this key.
PyObject* bypass(PyObject*, PyObject* args);

// Returns the Python function that a bypass overrides, or nullptr for other kernels.
PyObject* bypassed_function(const c10::OperatorKernel& functor);

} // namespace torchop
