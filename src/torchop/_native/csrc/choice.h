// choice.h: which of the kernels of an operator runs a call.
#pragma once

#include <Python.h>

namespace torchop {

// Choice: stands in a plan where a kernel does, and calls the one that a call is for.
bool add_choice_type(PyObject* module);

} // namespace torchop
