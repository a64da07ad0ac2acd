// ambient_state.h: pack the random and ambient state that a derived formula replays.
#pragma once

#include <Python.h>

namespace torchop {

// pack_plain(values, latest, count) returns the packed state, or None if Python must pack it. See
// _rules/autograd/derived/replay.py.
PyObject* pack_plain(PyObject*, PyObject* const* args, Py_ssize_t count);

} // namespace torchop
