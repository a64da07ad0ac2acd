// choice.h: for each call, choose one of several kernels for the same operator and device. Each of
// the kernels was registered by a provider, which has a name.
#pragma once

#include <Python.h>

namespace torchop {

bool add_choice_type(PyObject* module);

} // namespace torchop
