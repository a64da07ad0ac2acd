// overloads.h: replace tp_call of OpOverload, OpOverloadPacket and CustomOpDef, to save a Python
// frame per call.
#pragma once

#include <Python.h>

namespace torchop {

// shorten_calls(type, before_first_call) replaces the tp_call of OpOverload or OpOverloadPacket.
// Calls whose `_op` is an Operator with an entry go to it directly, and all others to the original
// `__call__`. `before_first_call(object)` runs before an object is first called, and may install an
// Operator.
PyObject* shorten_calls(PyObject*, PyObject* args);

// shorten_handle_calls(cls) replaces the tp_call of torch.library's CustomOpDef. Its `__call__`
// only calls the OpOverload, so calls go directly to the overload's tp_call.
PyObject* shorten_handle_calls(PyObject*, PyObject* args);

} // namespace torchop
