// bypass.h: passing Python kernels of ours by, in calls that the dispatcher makes.
#pragma once

#include <Python.h>

#include <ATen/core/boxing/KernelFunction.h>

namespace torchop {

// bypass(name, overload, key, kernel): does so at Autograd or ADInplaceOrView, until the function
// is called, or goes, that it returns; None where the operator's kernel is not this one.
PyObject* bypass(PyObject*, PyObject* args);

// The Python kernel that is passed by; nullptr if this is another kind of kernel.
PyObject* bypassed_function(const c10::OperatorKernel& functor);

} // namespace torchop
