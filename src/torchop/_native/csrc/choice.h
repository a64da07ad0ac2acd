// choice.h: choose between several kernels for the same operator and device in each call. Each of
// these kernels is registered by a named provider.
#pragma once

#include <Python.h>

namespace torchop {

// Adds the type Choice to the module. If an operator has several providers, its call plan contains
// a Choice object as the kernel. When the object is called, it selects a provider and calls that
// provider's kernel.
bool add_choice_type(PyObject* module);

} // namespace torchop
