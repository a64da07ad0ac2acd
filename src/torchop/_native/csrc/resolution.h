// resolution.h: which overload of a packet PyTorch would call.
#pragma once

#include <Python.h>

#include "arguments.h"

namespace torchop {

// Whether PyTorch would pass an overload with these parameters by, and try the next one of the
// packet. False where it would call it, where it would raise another error than that the arguments
// do not fit, and where that is not certain.
bool is_passed_by(
    const Parameters& parameters, PyObject* const* args, size_t count, PyObject* keywords);

} // namespace torchop
