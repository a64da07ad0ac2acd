// overloads.h: replace tp_call of OpOverload, OpOverloadPacket and CustomOpDef. This saves a Python
// frame per call.
#pragma once

#include <Python.h>

namespace torchop {

// patch_calls(type, before_first_call) replaces tp_call of OpOverload or OpOverloadPacket. If `_op`
// is an Operator with an entry, the new function calls it. Otherwise it calls the original
// `__call__`. `before_first_call(object)` runs before the first call to an object, and may replace
// `_op`.
PyObject* patch_calls(PyObject*, PyObject* args);

// patch_handle_calls(cls) replaces tp_call of CustomOpDef. Its method `__call__` only calls the
// OpOverload, so the new function calls the OpOverload's tp_call directly.
PyObject* patch_handle_calls(PyObject*, PyObject* args);

} // namespace torchop
