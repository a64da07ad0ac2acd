// choice.h: choose in each call between several kernels for the same operator and device. Each of
// the kernels is registered by a named provider.
#pragma once

#include <Python.h>

namespace torchop {

bool add_choice_type(PyObject* module);

} // namespace torchop
