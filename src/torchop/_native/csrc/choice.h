// choice.h: select one of several kernels (providers) for a call.
#pragma once

#include <Python.h>

namespace torchop {

// Adds the type Choice, a callable that a plan uses as a kernel and that calls the selected one.
bool add_choice_type(PyObject* module);

} // namespace torchop
