// bypass.h: skip torchop's Python kernels in calls that the dispatcher makes.
#pragma once

#include <Python.h>

#include <ATen/core/boxing/KernelFunction.h>

namespace torchop {

// bypass(name, overload, key, kernel) registers a C++ kernel in front of `kernel` at Autograd or
// ADInplaceOrView. Returns a function that removes it, as its deallocation does. Returns None if
// `kernel` is not the operator's kernel at that key.
PyObject* bypass(PyObject*, PyObject* args);

// Returns the Python kernel behind a bypass; nullptr for any other kernel.
PyObject* bypassed_function(const c10::OperatorKernel& functor);

} // namespace torchop
