// choice.h: select the kernel of a provider for each call.
#pragma once

#include <Python.h>

namespace torchop {

// Adds the type Choice. A Choice is the kernel in a call plan, and calls the selected kernel.
bool add_choice_type(PyObject* module);

} // namespace torchop
