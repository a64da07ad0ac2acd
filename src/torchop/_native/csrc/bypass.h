// bypass.h: calls that go through the dispatcher skip torchop's Python kernels at Autograd and
// ADInplaceOrView when these kernels have nothing to do.
#pragma once

#include <Python.h>

#include <ATen/core/boxing/KernelFunction.h>

namespace torchop {

// bypass(name, overload, key, kernel) overrides a Python kernel at Autograd or ADInplaceOrView with
// a C++ kernel, called a bypass, that calls `kernel` only if necessary. Returns a function that
// removes the bypass. Returns None if `kernel` is not the operator's kernel at this key.
PyObject* bypass(PyObject*, PyObject* args);

// If a kernel is a bypass, returns the Python function that it overrides. Otherwise returns
// nullptr.
PyObject* bypassed_function(const c10::OperatorKernel& functor);

} // namespace torchop
