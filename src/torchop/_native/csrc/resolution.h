// resolution.h: decide which overload of a packet PyTorch would call.
#pragma once

#include <Python.h>

#include "arguments.h"

namespace torchop {

// Returns whether PyTorch would certainly skip an overload with these parameters and try the next
// one. Returns false if it would call the overload, raise an error other than mismatched arguments,
// or if neither is certain.
bool is_skipped_overload(
    const Parameters& parameters, PyObject* const* args, size_t count, PyObject* keywords);

} // namespace torchop
