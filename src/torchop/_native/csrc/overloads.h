// overloads.h: replace tp_call of the classes OpOverload, OpOverloadPacket and CustomOpDef, so that
// calling their instances creates no Python frame.
#pragma once

#include <Python.h>

namespace torchop {

// patch_calls(type) replaces tp_call of OpOverload or OpOverloadPacket. If an object's `_op` is an
// Operator with an Entry, the new tp_call calls the Operator directly. Otherwise it falls back to
// the original `__call__`.
PyObject* patch_calls(PyObject*, PyObject* type);

// patch_handle_calls(cls) replaces tp_call of CustomOpDef. `CustomOpDef.__call__` only forwards to
// an OpOverload, so the new tp_call skips it and directly calls tp_call of the OpOverload.
PyObject* patch_handle_calls(PyObject*, PyObject* args);

} // namespace torchop
