// operator.h: the type Operator, for `OpOverload._op` and `OpOverloadPacket._op`.
#pragma once

#include <Python.h>

namespace torchop {

extern PyTypeObject* operator_type;

// Returns whether `owner._op` may be an Operator. `owner` is an OpOverload or OpOverloadPacket.
// This hash lookup is cheaper than reading the attribute. Always returns true without the GIL.
bool has_operator(PyObject* owner);

// Returns whether an Operator makes native calls. An Operator without an entry calls PyTorch's
// function and counts the calls.
bool has_entry(PyObject* op);

// Adds the type Operator to the module.
bool add_operator_type(PyObject* module);

} // namespace torchop
