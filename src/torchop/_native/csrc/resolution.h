// resolution.h: decide whether PyTorch would skip an overload in a call to an OpOverloadPacket.
// PyTorch tries the overloads in order, and a native call (a call without the dispatcher) must run
// the overload that PyTorch would choose.
#pragma once

#include <Python.h>

#include "arguments.h"

namespace torchop {

// Returns whether PyTorch would certainly skip an overload with these parameters and try the next
// one. Returns false if PyTorch would call the overload or raise an error, or if we cannot tell.
bool is_skipped_overload(
    const Parameters& parameters, PyObject* const* args, size_t count, PyObject* keywords);

// Returns whether a call passes a tensor where the schema declares a number, or a list with a
// tensor where it declares a list of numbers.
bool passes_tensor_for_number(
    const Parameters& parameters, PyObject* const* args, size_t count, PyObject* keywords);

} // namespace torchop
