// choice.h: for each call, choose one of several kernels for the same operator and device. Each
// kernel was registered by a named provider.
#pragma once

#include <Python.h>

namespace torchop {

bool add_choice_type(PyObject* module);

} // namespace torchop
