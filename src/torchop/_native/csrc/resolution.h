// resolution.h: decide whether PyTorch would skip an overload in a call to a packet.
#pragma once

#include <Python.h>

#include "arguments.h"

namespace torchop {

// Returns whether PyTorch would certainly skip an overload with these parameters and try the next
// overload. Returns false if PyTorch would call the overload or raise an error, or if this is not
// certain.
bool is_skipped_overload(
    const Parameters& parameters, PyObject* const* args, size_t count, PyObject* keywords);

} // namespace torchop
