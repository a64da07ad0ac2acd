// ambient_state.h: pack the states of the random number generators and ambient settings, such as
// autocast, into one tensor. A derived formula (a gradient formula derived from the kernel) runs
// the forward again in the backward pass. The packed state is restored before this rerun, so that
// the rerun computes the same result.
#pragma once

#include <Python.h>

namespace torchop {

// Returns whether autocast is enabled in this thread for any device.
bool autocast_is_enabled();

// pack_plain(values, latest, count) returns a byte tensor with the generator states and the
// settings. `values` are the arguments of the call, and `count` is the number of accelerators.
// `latest` is the tensor that the previous call returned, and is returned again if nothing has
// changed since then. Returns None if only the Python implementation in
// _rules/autograd/derived/replay.py supports the call.
PyObject* pack_plain(PyObject*, PyObject* const* args, Py_ssize_t count);

} // namespace torchop
