// choice.h: select a provider's kernel for each call.
#pragma once

#include <Python.h>

namespace torchop {

// Adds the type Choice. If an operator has several providers (alternative kernels), its call plan
// contains a Choice object in place of a kernel. For each call, the object selects a provider and
// calls the provider's kernel.
bool add_choice_type(PyObject* module);

} // namespace torchop
