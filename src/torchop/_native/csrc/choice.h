// choice.h: if several named providers have registered kernels for the same operator and device,
// choose one of these kernels for each call.
#pragma once

#include <Python.h>

namespace torchop {

bool add_choice_type(PyObject* module);

} // namespace torchop
